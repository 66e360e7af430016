"""MLX: a layer learns to copy the token eight places before, with gradients through attention over a window.

On a Mac the Metal kernels compute the attention. If MLX has only a CPU, the CPU core computes it.
"""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from saccade.integrations.mlx import route, scaled_dot_product_attention
from saccade.mask import causal, window

VOCAB, T, WIDTH, HEADS, BACK = 16, 64, 32, 2, 8
seen = causal() & window(BACK, 0)
print(route(seen))


class Copier(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(T, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, VOCAB)

    def __call__(self, x):
        x = self.tokens(x) + self.places(mx.arange(T))
        q, k, v = (part.reshape(-1, T, HEADS, WIDTH // HEADS).swapaxes(1, 2) for part in self.qkv(x).split(3, -1))
        o = scaled_dot_product_attention(q, k, v, scale=(WIDTH // HEADS) ** -0.5, mask=seen)
        return self.out(o.swapaxes(1, 2).flatten(2))


def loss(model, x):
    return nn.losses.cross_entropy(model(x)[:, BACK:], x[:, :-BACK], reduction="mean")


mx.random.seed(0)
model, optimizer = Copier(), optim.Adam(3e-2)
step = nn.value_and_grad(model, loss)
for n in range(61):
    value, gradients = step(model, mx.random.randint(0, VOCAB, (16, T)))
    optimizer.update(model, gradients)
    mx.eval(model.parameters(), optimizer.state)
    if n % 20 == 0:
        print(f"step {n:3}  loss {value.item():.3f}")
assert value.item() < 1.0
