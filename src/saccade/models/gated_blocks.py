"""Layers of linear attention with decays as torch modules: RetNet's retention, GLA, gated DeltaNet, Kimi's attention.

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
UNIT_EPS = 1e-6


class Projections(nn.Module):
    """The maps in all of them: to q and k (of `key_heads` heads, 0 for `heads`), v, the gate, and to the output."""

    def __init__(self, width: int, heads: int, key_dim: int, value_dim: int, eps: float, key_heads: int = 0) -> None:
        super().__init__()
        self.key_dim, self.value_dim = key_dim, value_dim
        key_heads = key_heads or heads
        self.q_proj = nn.Linear(width, key_heads * key_dim, bias=False)
        self.k_proj = nn.Linear(width, key_heads * key_dim, bias=False)
        self.v_proj = nn.Linear(width, heads * value_dim, bias=False)
        self.g_proj: nn.Module = nn.Linear(width, heads * value_dim, bias=False)
        self.o_norm = GatedNorm(heads * value_dim, eps, heads, after=True)
        self.o_proj = nn.Linear(heads * value_dim, width, bias=False)

    def split(self, x: Tensor, size: int) -> Tensor:
        """x [B, T, heads · size] -> [B, T, heads, size]."""
        return x.unflatten(-1, (-1, size))

    def maps(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, width] -> q, k [B, T, key_heads, key_dim] and v [B, T, heads, value_dim]."""
        q, k = (self.split(one(x), self.key_dim) for one in (self.q_proj, self.k_proj))
        return q, k, self.split(self.v_proj(x), self.value_dim)

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
        q, k, v = self.maps(x)
        q, k = (turned(one, carry.turn) for one in (q, k))
        g = wide(self.decays).expand(*x.shape[:2], -1).to(wide(q).dtype)
        return self.finish(carry.through("retention", scalar_decay, q, k, v, g), x)


class GatedLinearAttention(Projections):
    """Gated linear attention (Yang et al., 2024): each channel of a key has a decay that depends on the token."""

    def __init__(self, width: int, heads: int, key_dim: int, value_dim: int, eps: float = 1e-5) -> None:
        super().__init__(width, heads, key_dim, value_dim, eps)
        self.decay_proj = nn.Sequential(nn.Linear(width, RANK, bias=False), nn.Linear(RANK, heads * key_dim))

    def forward(self, x: Tensor, carry: Carry = FRESH) -> Tensor:
        # a root of the sigmoid, so that decays are near 1 at first
        g = functional.logsigmoid(wide(self.decay_proj(x))) / SLOWER
        return self.finish(carry.through("gla", gated_linear, *self.maps(x), self.split(g, self.key_dim)), x)


class GatedDeltaNet(Projections):
    """Gated DeltaNet (Yang et al., 2025): short convolutions, unit keys, the delta rule with one decay per head.

    key_heads: the heads of queries and keys, which divide the others; 0 for as many.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        kernel: int = 4,
        eps: float = 1e-5,
        key_heads: int = 0,
    ) -> None:
        super().__init__(width, heads, key_dim, value_dim, eps, key_heads)
        self.a_proj: nn.Module = nn.Linear(width, heads, bias=False)
        self.b_proj = nn.Linear(width, heads, bias=False)
        self.dt_bias = nn.Parameter(step_bias(heads))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        maps = {"q": self.q_proj, "k": self.k_proj, "v": self.v_proj}
        self.convs = nn.ModuleDict({name: Convolution(one.out_features, kernel, False) for name, one in maps.items()})

    def forward(self, x: Tensor, carry: Carry = FRESH) -> Tensor:
        maps = {"q": (self.q_proj, self.key_dim), "k": (self.k_proj, self.key_dim), "v": (self.v_proj, self.value_dim)}
        q, k, v = (
            self.split(self.convs[name](one(x), carry, f"conv_{name}"), size) for name, (one, size) in maps.items()
        )
        q, k = (unit(one) for one in (q, k))
        beta = wide(self.b_proj(x)).sigmoid()
        return self.finish(carry.through("delta", gated_delta_rule, q, k, v, beta, self.decays(x)), x)

    def decays(self, x: Tensor) -> Tensor:
        """Logarithms of the decays [B, T, heads] of x [B, T, width]."""
        return -wide(self.A_log).exp() * functional.softplus(wide(self.a_proj(x)) + wide(self.dt_bias))


class KimiDeltaAttention(GatedDeltaNet):
    """Kimi delta attention (Kimi Team, 2025): a decay per key channel; decays and a sigmoid gate from low-rank maps."""

    def __init__(
        self, width: int, heads: int, key_dim: int, value_dim: int, kernel: int = 4, eps: float = 1e-5
    ) -> None:
        super().__init__(width, heads, key_dim, value_dim, kernel, eps)
        self.a_proj, self.g_proj = (
            nn.Sequential(nn.Linear(width, size, bias=False), nn.Linear(size, heads * size, bias=False))
            for size in (key_dim, value_dim)
        )
        self.dt_bias = nn.Parameter(step_bias(heads * key_dim))
        self.o_norm.activation = torch.sigmoid

    def decays(self, x: Tensor) -> Tensor:
        """Logarithms of the decays [B, T, heads, key_dim] of x [B, T, width]."""
        steps = functional.softplus(wide(self.a_proj(x)) + wide(self.dt_bias))
        return -wide(self.A_log).exp()[:, None] * self.split(steps, self.key_dim)


def unit(x: Tensor) -> Tensor:
    """x / |x| of the last dimension, with the ε of flash-linear-attention, so that 0 stays 0."""
    y = wide(x)
    return (y * (y.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt()).to(x.dtype)
