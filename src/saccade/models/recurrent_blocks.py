"""State-space layers as torch modules: Mamba, Mamba-2 and Griffin's recurrent block.

Each maps x [B, T, width] to [B, T, width] through `saccade.recurrent`. A call starts from the state in its `Carry`, so
a decoding step is the same call with T = 1. Parameters have the names of the Hugging Face layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..recurrent import causal_conv1d, rg_lru, selective_scan, ssd
from .blocks import RMSNorm
from .states import Carry

FRESH = Carry()
# bounds between which the initial steps of a state-space layer have uniform logarithms
STEPS = 1e-3, 1e-1


class Convolution(nn.Module):
    """A causal convolution of each channel over its last `kernel` tokens, x [B, T, D] -> [B, T, D]."""

    def __init__(self, channels: int, kernel: int, bias: bool = True, activation: str | None = "silu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel).uniform_(-(kernel**-0.5), kernel**-0.5))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
        self.activation = activation

    def forward(self, x: Tensor, carry: Carry = FRESH, part: str = "conv") -> Tensor:
        return carry.through(part, causal_conv1d, x, self.weight[:, 0], self.bias, activation=self.activation)


class Mamba(nn.Module):
    """Mamba's layer: a gated selective scan over `expand * width` channels (Gu and Dao, 2023).

    state: the size of a channel's state; rank: of the map to the steps, width / 16 rounded up if 0; eps: of the norms
    of steps, B and C that Jamba has (Lieber et al., 2024), None for no norms.
    """

    def __init__(
        self,
        width: int,
        state: int = 16,
        kernel: int = 4,
        expand: int = 2,
        rank: int = 0,
        bias: bool = False,
        conv_bias: bool = True,
        eps: float | None = None,
    ) -> None:
        super().__init__()
        inner, rank = expand * width, rank or -(-width // 16)
        self.sizes = rank, state, state
        self.in_proj = nn.Linear(width, 2 * inner, bias=bias)
        self.conv1d = Convolution(inner, kernel, conv_bias)
        self.x_proj = nn.Linear(inner, rank + 2 * state, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, width, bias=bias)
        self.dt_layernorm, self.b_layernorm, self.c_layernorm = (
            None if eps is None else RMSNorm(size, eps) for size in self.sizes
        )
        with torch.no_grad():
            self.dt_proj.weight.uniform_(-(rank**-0.5), rank**-0.5)
            self.dt_proj.bias.copy_(step_bias(inner))

    def forward(self, x: Tensor, carry: Carry = FRESH) -> Tensor:
        u, z = self.in_proj(x).chunk(2, -1)
        u = self.conv1d(u, carry)
        step, b, c = self.x_proj(u).split(self.sizes, -1)
        if self.dt_layernorm is not None:
            norms = self.dt_layernorm, self.b_layernorm, self.c_layernorm
            step, b, c = (cast("RMSNorm", norm)(one) for norm, one in zip(norms, (step, b, c), strict=True))
        # the scan adds its bias in float32
        delta = functional.linear(step, self.dt_proj.weight)
        A = -wide(self.A_log).exp()
        y = carry.through(
            "scan", selective_scan, u, delta, A, b, c, D=self.D, z=z, delta_bias=self.dt_proj.bias, delta_softplus=True
        )
        return self.out_proj(y)


class Mamba2(nn.Module):
    """Mamba-2's layer: one decay per head, a norm after the gate (Dao and Gu, 2024).

    heads: of head_dim channels each; groups: the heads of a group share B and C; limit: (low, high) of steps.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int,
        state: int = 64,
        groups: int = 1,
        kernel: int = 4,
        bias: bool = False,
        conv_bias: bool = True,
        eps: float = 1e-5,
        limit: tuple[float, float] = (0.0, math.inf),
    ) -> None:
        super().__init__()
        inner = heads * head_dim
        if heads % groups:
            raise ValueError(f"{groups} groups and {heads} heads given; expected the groups to divide the heads")
        self.heads, self.groups, self.limit = heads, groups, limit
        self.sizes = inner, inner + 2 * groups * state, heads
        self.parts = inner, groups * state, groups * state
        self.in_proj = nn.Linear(width, sum(self.sizes), bias=bias)
        self.conv1d = Convolution(self.sizes[1], kernel, conv_bias)
        self.dt_bias = nn.Parameter(step_bias(heads))
        self.A_log = nn.Parameter(torch.arange(1.0, heads + 1).log())
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = GatedNorm(inner, eps, groups)
        self.out_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor, carry: Carry = FRESH) -> Tensor:
        gate, mixed, step = self.in_proj(x).split(self.sizes, -1)
        u, b, c = self.conv1d(mixed, carry).split(self.parts, -1)
        step = functional.softplus(wide(step) + wide(self.dt_bias)).clamp(*self.limit)
        u = u.unflatten(-1, (self.heads, -1))
        b, c = (one.unflatten(-1, (self.groups, -1)) for one in (b, c))
        y = carry.through("ssd", ssd, u, step, -wide(self.A_log).exp(), b, c, D=self.D)
        return self.out_proj(self.norm(y.flatten(-2), gate))


class GatedNorm(nn.Module):
    """norm(x · silu(gate)), or norm(x) · silu(gate) with `after`, over each of `groups` parts of the width."""

    def __init__(self, width: int, eps: float, groups: int = 1, after: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.groups, self.after = eps, groups, after
        self.activation: Callable[[Tensor], Tensor] = functional.silu

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y, gated = wide(x), self.activation(wide(gate))
        if not self.after:
            y = y * gated
        parts = y.unflatten(-1, (self.groups, -1))
        y = functional.rms_norm(parts, parts.shape[-1:], eps=self.eps).flatten(-2) * wide(self.weight)
        return (y * gated if self.after else y).to(x.dtype)


class GriffinRecurrent(nn.Module):
    """Griffin's recurrent block: a convolution and an RG-LRU next to a GeLU branch (De et al., 2024).

    inner: the number of channels; heads: the number of blocks of the gates' maps, each inner / heads wide.
    """

    def __init__(self, width: int, inner: int, heads: int, kernel: int = 4) -> None:
        super().__init__()
        self.linear_y, self.linear_x = nn.Linear(width, inner), nn.Linear(width, inner)
        self.linear_out = nn.Linear(inner, width)
        self.conv_1d = Convolution(inner, kernel, activation=None)
        self.rg_lru = GatedUnit(inner, heads)

    def forward(self, x: Tensor, carry: Carry = FRESH) -> Tensor:
        y = functional.gelu(self.linear_y(x), approximate="tanh")
        return self.linear_out(y * self.rg_lru(self.conv_1d(self.linear_x(x), carry), carry))


class GatedUnit(nn.Module):
    """The RG-LRU with its gates, block-diagonal maps of the input; x [B, T, D] -> [B, T, D]."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        if channels % heads:
            raise ValueError(f"{channels} channels and {heads} heads given; expected the heads to divide the channels")
        block = channels // heads
        self.input_gate_weight = nn.Parameter(torch.randn(heads, block, block) * block**-0.5)
        self.input_gate_bias = nn.Parameter(torch.zeros(heads, block))
        self.recurrent_gate_weight = nn.Parameter(torch.randn(heads, block, block) * block**-0.5)
        self.recurrent_gate_bias = nn.Parameter(torch.zeros(heads, block))
        # with an open gate, the decay is a**8, where a² is uniform between 0.9² and 0.999²
        radius = torch.empty(channels).uniform_(0.9**2, 0.999**2)
        self.recurrent_param = nn.Parameter((radius.log() * -0.5).expm1().log())

    def forward(self, x: Tensor, carry: Carry = FRESH) -> Tensor:
        heads = x.unflatten(-1, (self.input_gate_weight.shape[0], -1))
        i = torch.einsum("bthc,hcd->bthd", heads, self.input_gate_weight) + self.input_gate_bias
        r = torch.einsum("bthc,hcd->bthd", heads, self.recurrent_gate_weight) + self.recurrent_gate_bias
        return carry.through("rg_lru", rg_lru, x, r.flatten(-2), i.flatten(-2), self.recurrent_param)


def wide(x: Tensor) -> Tensor:
    """x in float32, or unchanged in float64."""
    return x if x.dtype == torch.float64 else x.float()


def step_bias(count: int) -> Tensor:
    """Biases [count] for which the logarithm of the softplus is uniform between those of the bounds `STEPS`."""
    low, high = (math.log(step) for step in STEPS)
    steps = torch.empty(count).uniform_(low, high).exp()
    return steps + (-torch.expm1(-steps)).log()
