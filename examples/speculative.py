"""Speculative decoding: a small model proposes tokens on a fork of its sequence; a larger model rejects wrong ones."""

import numpy as np
import torch

from saccade.models.data import PackedText
from saccade.models.llama import Llama, LlamaConfig
from saccade.models.stores import PagedTokens
from saccade.models.tokens import Bytes

tokenizer = Bytes()
rhyme = "Peter Piper picked a peck of pickled peppers. "
text = PackedText.of_texts(tokenizer.encode([rhyme * 60]), context=128, seed=0)


def trained(width: int, layers: int) -> Llama:
    torch.manual_seed(0)
    model = Llama(LlamaConfig(tokenizer.vocab_size, hidden_size=width, num_hidden_layers=layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(80):
        batch = text.batch(step, size=2)
        tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval().requires_grad_(False)


def read(model: Llama, pages: list, sequence: int, tokens: list[int]) -> list[int]:
    """Append tokens to a sequence. Returns the model's choice after each of them."""
    steps = [PagedTokens(layer, [sequence], np.array([0, len(tokens)])) for layer in pages]
    return model(torch.tensor([tokens]), caches=steps)[0].argmax(-1).tolist()


target, draft = trained(96, 3), trained(48, 1)
prompt, count, ahead = tokenizer.encode(["Peter"])[0].tolist(), 80, 4
big, small = (model.make_pages(pages=32, page_size=8) for model in (target, draft))
(main,), (drafted,) = ({layer.add() for layer in pages} for pages in (big, small))
tokens, passes = [read(target, big, main, prompt)[-1]], 0
read(draft, small, drafted, prompt)
while len(tokens) < count:
    (fork,) = {layer.fork(drafted) for layer in small}
    guess = tokens[-1:]
    while len(guess) <= ahead:
        guess += read(draft, small, fork, guess[-1:])
    agreed = read(target, big, main, guess)
    right = next((n for n in range(ahead) if guess[n + 1] != agreed[n]), ahead)
    for layer in big:
        layer.crop(main, layer.length(main) - ahead + right)
    for layer in small:
        layer.remove(fork)
    read(draft, small, drafted, guess[: right + 1])
    tokens, passes = tokens + agreed[: right + 1], passes + 1

# the text is the same as what the target generates alone, token by token
alone = target(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1].argmax(-1).tolist()
print(f"{len(tokens)} tokens in {passes} passes of the target:", repr(tokenizer.decode(tokens[:60])))
assert tokens == alone
assert passes < count
