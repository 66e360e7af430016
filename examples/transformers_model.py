"""transformers with `attn_implementation="saccade"`: a tiny random Mistral, compared with torch's attention."""

import torch
from transformers import MistralConfig, MistralForCausalLM

import saccade.integrations.transformers  # noqa: F401

torch.manual_seed(0)
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 16}
model = MistralForCausalLM(MistralConfig(**sizes, **heads, pad_token_id=0)).eval()

# two prompts, the second with padding on the left
tokens = torch.randint(1, 256, (2, 40))
padding = torch.ones_like(tokens)
padding[1, :12] = 0

results = {}
for name in ("sdpa", "saccade"):
    model.set_attn_implementation(name)  # or from_pretrained(..., attn_implementation="saccade")
    with torch.no_grad():
        logits = model(tokens, attention_mask=padding).logits
    new = model.generate(tokens, attention_mask=padding, max_new_tokens=12, do_sample=False)[:, 40:]
    results[name] = logits[padding.bool()], new
    print(f"{name:8}", new[0].tolist())

torch.testing.assert_close(results["saccade"][0], results["sdpa"][0])
assert torch.equal(results["saccade"][1], results["sdpa"][1])
