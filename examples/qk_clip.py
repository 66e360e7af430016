"""QK-clip (Kimi K2, 2025): after a step of the optimiser, heads with a score above a limit shrink their weights."""

import torch

import saccade
from saccade import mask

torch.manual_seed(0)
T, H, D, LIMIT = 64, 4, 16, 20.0
x = torch.randn(2, T, H * D)
weights = [torch.nn.Parameter(torch.randn(H, H * D, D) / (H * D) ** 0.5) for _ in range(3)]
# a step that is far too large, so that scores grow
optimiser = torch.optim.Adam(weights, lr=0.2)


def attend() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """o, the largest score and the entropy of every row."""
    q, k, v = (torch.einsum("btn,hnd->bthd", x, w) for w in weights)
    return saccade.attention(q, k, v, mask.causal(), return_max=True, return_entropy=True)


@torch.no_grad()
def clip(top: torch.Tensor) -> int:
    """Scale the query and key weights of each head by the root of LIMIT / its largest score; how many heads it was."""
    largest = top.amax((0, 1))  # [H]; rows without keys have -inf
    factor = (LIMIT / largest.clamp(min=LIMIT)).sqrt()
    for w in weights[:2]:
        w *= factor[:, None, None]
    return int((factor < 1).sum())


for step in range(5):
    o, top, entropy = attend()
    # the loss rewards spread weights a little
    loss = (o - x.unflatten(-1, (H, D))).square().mean() - 0.01 * entropy.mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    before = attend()[1]
    clipped, after = clip(before), attend()[1]
    print(f"step {step}: entropy {entropy.mean():.2f}, largest score {before.max():.1f}, {clipped} heads clipped")
    assert after.max() <= LIMIT * (1 + 1e-5)
