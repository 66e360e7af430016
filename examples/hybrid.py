"""A hybrid model: Griffin's recurrences with local attention. It is trained for a few seconds and generates twice.

Its states have a fixed size, so the cache does not grow with the text. `crop` goes back to stored copies of the states.
"""

import torch

from saccade.models.data import PackedText
from saccade.models.hybrid import Hybrid
from saccade.models.hybrid_config import HybridConfig, griffin
from saccade.models.tokens import Bytes

tokenizer = Bytes()
text = PackedText.of_texts(tokenizer.encode(["She sells sea shells by the sea shore. "] * 60), context=128, seed=0)
torch.manual_seed(0)
model = Hybrid(HybridConfig(tokenizer.vocab_size, hidden_size=96, intermediate_size=192, **griffin(3, window=32)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step in range(40):
    optimizer.zero_grad()
    tokens, targets, _, positions = map(torch.from_numpy, text.batch(step, size=1))
    # a position of 0 starts a document and resets the states
    loss = torch.nn.functional.cross_entropy(model(tokens, positions).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
print(f"mixers {', '.join(model.config.mixers)}: loss {loss.item():.2f} after {step + 1} steps")
assert loss < 1

prompt = torch.from_numpy(tokenizer.encode(["She sells sea"])[0]).long()[None]
with torch.no_grad():
    caches = model.make_caches(1, capacity=128, every=16)
    logits = model(prompt, caches=caches)[:, -1]
    length, texts = prompt.shape[1], []
    for _ in range(2):
        drawn = []
        token = logits.argmax(-1)
        for _ in range(30):
            drawn.append(token.item())
            token = model(token[:, None], caches=caches)[:, -1].argmax(-1)
        texts.append(tokenizer.decode(drawn))
        model.crop(caches, length)
print(repr(texts[0]))
assert texts[0] == texts[1]
