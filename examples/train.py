"""Training in a few lines: packed documents that do not see each other, gradients through ``saccade.attention``."""

import torch

from saccade import mask
from saccade.models.data import PackedText, read_documents
from saccade.models.llama import Llama, LlamaConfig
from saccade.models.tokens import Bytes

tokenizer = Bytes()
text = PackedText(tokenizer.encode(read_documents([__file__] * 8)), context=128, seed=0)
torch.manual_seed(0)
model = Llama(LlamaConfig(tokenizer.vocab_size, hidden_size=96, num_hidden_layers=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(20):
    batch = text.batch(step, size=2)
    seen = mask.causal() & mask.documents(batch.documents)
    logits = model(torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions), seen)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        print(f"step {step + 1}  loss {loss.item():.3f}")
