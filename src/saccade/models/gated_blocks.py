"""Layers of linear attention with decays as torch modules: RetNet's retention, GLA, gated DeltaNet.

They are called as the layers of `recurrent_blocks`. A head's state is a matrix; its output is normalised and gated.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..recurrent import gated_delta_rule, gated_linear, scalar_decay
from .blocks import turned
from .recurrent_blocks import FRESH, Convolution, GatedNorm, step_bias, wide
from .states import Carry

RANK, SLOWER = 16, 16.0


class Projections(nn.Module):
    """The maps in all three: to q and k (`heads * key_dim`), to v and the gate (`heads * value_dim`), to the output."""

    def __init__(self, width: int, heads: int, key_dim: int, value_dim: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, heads * key_dim, bias=False)
        self.k_proj = nn.Linear(width, heads * key_dim, bias=False)
        self.v_proj = nn.Linear(width, heads * value_dim, bias=False)
        self.g_proj = nn.Linear(width, heads * value_dim, bias=False)
        self.o_norm = GatedNorm(heads * value_dim, eps, heads, after=True)
        self.o_proj = nn.Linear(heads * value_dim, width, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """x [B, T, heads · D] -> [B, T, heads, D]."""
        return x.unflatten(-1, (self.heads, -1))

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        """The output o [B, T, heads, value_dim] and the input x [B, T, width] -> [B, T, width]."""
        return self.o_proj(self.o_norm(o.flatten(-2), self.g_proj(x)))


class Retention(Projections):
    """Multi-scale retention (Sun et al., 2023): head h forgets 2^(-5 - h) of its state per token; keys are rotated.

    `decays` [heads], their logarithms, are constants.
    """

    decays: Tensor

    def __init__(self, width: int, heads: int, key_dim: int, value_dim: int, eps: float = 1e-5) -> None:
        super().__init__(width, heads, key_dim, value_dim, eps)
        decays = torch.log1p(-(2.0 ** (-5 - torch.arange(heads, dtype=torch.float64))))
        self.register_buffer("decays", decays.float(), persistent=False)

    def forward(self, x: Tensor, carry: Carry = FRESH) -> Tensor:
        q, k = (turned(self.split(one(x)), carry.turn) for one in (self.q_proj, self.k_proj))
        g = wide(self.decays).expand(*x.shape[:2], -1).to(wide(q).dtype)
        return self.finish(carry.through("retention", scalar_decay, q, k, self.split(self.v_proj(x)), g), x)


class GatedLinearAttention(Projections):
    """Gated linear attention (Yang et al., 2024): each channel of a key has a decay that depends on the token."""

    def __init__(self, width: int, heads: int, key_dim: int, value_dim: int, eps: float = 1e-5) -> None:
        super().__init__(width, heads, key_dim, value_dim, eps)
        self.decay_proj = nn.Sequential(nn.Linear(width, RANK, bias=False), nn.Linear(RANK, heads * key_dim))

    def forward(self, x: Tensor, carry: Carry = FRESH) -> Tensor:
        # a root of the sigmoid, so that decays are near 1 at first
        g = functional.logsigmoid(wide(self.decay_proj(x))) / SLOWER
        q, k, v = (self.split(one(x)) for one in (self.q_proj, self.k_proj, self.v_proj))
        return self.finish(carry.through("gla", gated_linear, q, k, v, self.split(g)), x)


class GatedDeltaNet(Projections):
    """Gated DeltaNet (Yang et al., 2025): short convolutions, unit keys, the delta rule with one decay per head."""

    def __init__(
        self, width: int, heads: int, key_dim: int, value_dim: int, kernel: int = 4, eps: float = 1e-5
    ) -> None:
        super().__init__(width, heads, key_dim, value_dim, eps)
        self.a_proj, self.b_proj = nn.Linear(width, heads, bias=False), nn.Linear(width, heads, bias=False)
        self.dt_bias = nn.Parameter(step_bias(heads))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        sizes = {"q": key_dim, "k": key_dim, "v": value_dim}
        self.convs = nn.ModuleDict({name: Convolution(heads * size, kernel, False) for name, size in sizes.items()})

    def forward(self, x: Tensor, carry: Carry = FRESH) -> Tensor:
        maps = {"q": self.q_proj, "k": self.k_proj, "v": self.v_proj}
        q, k, v = (self.split(self.convs[name](one(x), carry, f"conv_{name}")) for name, one in maps.items())
        q, k = (functional.normalize(wide(one), dim=-1).to(x.dtype) for one in (q, k))
        g = -wide(self.A_log).exp() * functional.softplus(wide(self.a_proj(x)) + wide(self.dt_bias))
        beta = wide(self.b_proj(x)).sigmoid()
        return self.finish(carry.through("delta", gated_delta_rule, q, k, v, beta, g), x)
