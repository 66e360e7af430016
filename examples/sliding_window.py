"""A sliding-window model: it is trained on rows of eight windows and generates from a cache that never grows."""

import torch

from saccade.models.data import PackedText
from saccade.models.llama import Llama, LlamaConfig
from saccade.models.sampling import Sampler, generate
from saccade.models.tokens import Bytes

WINDOW, CONTEXT = 32, 256
tokenizer = Bytes()
text = PackedText.of_texts(tokenizer.encode(["She sells sea shells by the sea shore. " * 60]), CONTEXT, seed=0)
torch.manual_seed(0)
sizes = {"hidden_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 4096}
model = Llama(LlamaConfig(tokenizer.vocab_size, sliding_window=WINDOW, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

for step in range(40):
    batch = text.batch(step, size=1)
    logits = model(torch.from_numpy(batch.tokens)).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(batch.targets).flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.2f} after {step + 1} steps")
assert loss < 1

# tokens further back than layers * window affect nothing
tokens = torch.from_numpy(batch.tokens[:1])
changed = tokens.clone()
changed[:, : CONTEXT - 2 * WINDOW] = 0
with torch.no_grad():
    assert torch.equal(model(tokens)[:, -1], model(changed)[:, -1])

# the cache contains the last WINDOW keys, and a few more until the next eviction
prompt = tokenizer.encode(["She sells"])[0].tolist()
drawn = [token for (token,) in generate(model, [prompt], 300, Sampler(0.0), keep=(0, WINDOW))]
print(f"{len(drawn)} tokens from a cache of {WINDOW + WINDOW // 4 + 1}:", repr(tokenizer.decode(drawn)[-60:]))
