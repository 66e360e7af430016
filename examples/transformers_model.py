"""transformers in one line: `attn_implementation="saccade"`. A tiny random Mistral, beside torch's attention."""

import torch
from transformers import MistralConfig, MistralForCausalLM

import saccade.integrations.transformers  # noqa: F401

torch.manual_seed(0)
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 16}
model = MistralForCausalLM(MistralConfig(**sizes, **heads, pad_token_id=0)).eval()

# two prompts, the second padded at the left
tokens = torch.randint(1, 256, (2, 40))
padding = torch.ones_like(tokens)
padding[1, :12] = 0

found = {}
for name in ("sdpa", "saccade"):
    model.set_attn_implementation(name)  # or from_pretrained(..., attn_implementation="saccade")
    with torch.no_grad():
        logits = model(tokens, attention_mask=padding).logits
    new = model.generate(tokens, attention_mask=padding, max_new_tokens=12, do_sample=False)[:, 40:]
    found[name] = logits[padding.bool()], new
    print(f"{name:8}", new[0].tolist())

torch.testing.assert_close(found["saccade"][0], found["sdpa"][0])
assert torch.equal(found["saccade"][1], found["sdpa"][1])
