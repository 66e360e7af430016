"""Packed training: a row contains several documents that do not see each other, without padding."""

import torch

from saccade import mask
from saccade.models.data import PackedText
from saccade.models.llama import Llama, LlamaConfig
from saccade.models.tokens import Bytes

tokenizer = Bytes()
rhymes = ["She sells sea shells by the sea shore. ", "Peter Piper picked a peck of pickled peppers. "]
text = PackedText.of_texts(tokenizer.encode(rhymes * 40), context=128, seed=0)
torch.manual_seed(0)
model = Llama(LlamaConfig(tokenizer.vocab_size, hidden_size=96, num_hidden_layers=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

for step in range(40):
    batch = text.batch(step, size=2)
    seen = mask.causal() & mask.documents(batch.documents)
    logits = model(torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions), seen)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9:
        print(f"step {step + 1}  loss {loss.item():.3f}")
assert loss < 1

# a row gives the same results as its documents one by one
row, ids = torch.from_numpy(batch.tokens[:1]), torch.from_numpy(batch.documents[0])
together = model(row, torch.from_numpy(batch.positions[:1]), mask.causal() & mask.documents(batch.documents[:1]))[0]
single = torch.cat([model(row[:, ids == document])[0] for document in ids.unique()])
print(f"documents in the row {len(ids.unique())}, largest difference {(together - single).abs().max():.1e}")
torch.testing.assert_close(together, single)
