"""What the launches of one recurrence over matrix states share: its arrays as kernels take them, and blocks by sizes.

Whatever `chunk` says, a chunk holds as many tokens as a matrix product wants, 16 to 64, and to 32 in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ...recurrent.family import check_borders
from ...recurrent.problem import Matrix
from .kernels import recurrent as kernels
from .kernels import recurrent_forward
from .kernels.recurrent import Arrays, Config, Sides, Sizes, Tokens
from .kernels.recurrent_backward import Gradients
from .kernels.recurrent_forward import Outputs
from .kernels.recurrent_states import States

LONGEST_CHUNK = 64
# features and columns of a tile; columns of one in bfloat16 whose rows are then read once
LARGEST_BLOCK, WIDE_BLOCK = 64, 128
# columns of a state where both sides of its products are float32, which take three times the registers
STATE_BLOCK = 32
# of float32
LONGEST_WIDE_CHUNK, LARGEST_WIDE_BLOCK = 32, 32
HOW = {"bfloat16": kernels.BF16.value, "float16": kernels.TF32.value, "float32": kernels.FLOAT32.value}


def borders(cu_seqlens: Tensor | None, T: int, device: torch.device) -> Tensor | None:
    """cu_seqlens on the device of the arrays. Those on the CPU are checked, others trusted: looking would wait."""
    if cu_seqlens is None:
        return None
    if cu_seqlens.is_cpu:
        check_borders(cu_seqlens.numpy(), T)
    return cu_seqlens.to(device).contiguous()


def tokens(x: Tensor) -> Tokens:
    """A tensor [B, T, H, n] as kernels take it."""
    return Tokens(x, *x.stride()[:3])


def power_of_two(n: int) -> int:
    """The first power of two from n up."""
    return 1 << max(n - 1, 0).bit_length()


class MatrixLaunch(NamedTuple):
    """One call, as `describe` makes it of its problem and arrays."""

    p: Matrix
    arrays: Arrays
    sides: Sides
    initial: Tensor | None
    size: Sizes
    C: int
    slots: int

    def config(self, **changes: Any) -> Config:
        """What kernels of this call are compiled for."""
        p = self.p
        state = p.K, p.V, p.columns, p.feature_map, p.causal, p.rule == "delta", p.decay == "channel", HOW[p.dtype]
        return Config(*state, self.block(p.K), self.block(p.V), self.C)._replace(**changes)

    def launch(
        self, kernel: Any, programs: int, *args: Any, num_warps: int = 4, num_stages: int | None = None, **changes: Any
    ) -> None:
        """Launch a kernel over a line of programs, its configuration last."""
        stages = num_stages or (1 if self.p.dtype == "float32" else 2)
        kernel[(programs,)](*args, self.config(**changes), num_warps=num_warps, num_stages=stages)

    def by_chunks(self, kernel: Any, blocks: int, *args: Any, **changes: Any) -> None:
        """Launch a kernel whose programs own blocks of the chunks of a head."""
        self.launch(kernel, self.slots * self.p.H * blocks, *args, **changes)

    def by_states(self, kernel: Any, *args: Any, **changes: Any) -> None:
        """Launch a kernel whose programs go through the chunks of a sequence, with blocks of its states."""
        p = self.p
        decomposed = self.sides.pairs is not None or p.feature_map != ""
        rows, columns = changes.get("BK", self.block(p.K)), self.wide_block(p.V) if decomposed else self.block(p.V)
        columns = columns if p.dtype == "bfloat16" else min(columns, STATE_BLOCK)
        self.launch(kernel, p.N * p.H * -(-p.K // rows) * -(-p.V // columns), *args, **{**changes, "BV": columns})

    def block(self, n: int) -> int:
        """Features or columns of a tile."""
        if self.p.dtype != "float32" and self.C == LONGEST_CHUNK:
            # Triton 3.6 reads beyond narrower operands of 16 bits of Hopper's products of 64 rows
            return LARGEST_BLOCK
        return max(16, min(LARGEST_WIDE_BLOCK if self.p.dtype == "float32" else LARGEST_BLOCK, power_of_two(n)))

    @property
    def tiles(self) -> int:
        """Blocks of q and k."""
        return -(-self.p.K // self.block(self.p.K))

    def wide_block(self, n: int) -> int:
        """Features or columns of a tile of a kernel that has room for more."""
        block = self.block(n)
        return block if self.p.dtype != "bfloat16" else max(block, min(WIDE_BLOCK, power_of_two(n)))

    @property
    def columns(self) -> int:
        """Wide blocks of v."""
        return -(-self.p.V // self.wide_block(self.p.V))

    @property
    def narrow(self) -> str:
        """The dtype of what is stored to be multiplied alone."""
        return "bfloat16" if self.p.dtype == "bfloat16" else "float32"

    def stored_states(self) -> States:
        """Room for the state before each chunk, or, where not causal, the last one of each sequence."""
        p, n = self.p, self.slots if self.p.causal else self.p.N
        x = self.arrays.q.p
        sums = x.new_empty((n, p.H, p.K), dtype=torch.float32) if p.normalize else None
        return States(x.new_empty((n, p.H, p.K, p.V), dtype=getattr(torch, self.narrow)), sums)

    def states(self, n: int) -> Tensor:
        """Room for n states of every head as callers have them."""
        p = self.p
        return self.arrays.q.p.new_empty((n, p.H, p.K, p.columns), dtype=torch.float32)

    def rows(self, *n: int, dtype: str = "float32") -> Tensor:
        """Room for n numbers, or one, of every token and head."""
        p = self.p
        return self.arrays.q.p.new_empty((p.B, p.T, p.H, *n), dtype=getattr(torch, dtype))

    def shares(self, n: int, like: Tensor | None) -> Tensor | None:
        """Room for n shares of the gradient of a side, where there is one."""
        return None if like is None else like.new_empty((n, *like.shape))

    def outputs(self, states: States, out: Outputs) -> None:
        """Fill what there is of the outputs, and of what divides them."""
        args = self.arrays, self.sides, states, out, self.size, self.p.scale
        self.by_chunks(recurrent_forward.outputs, self.columns, *args, BV=self.wide_block(self.p.V))

    def gradients(self, arrays: Mapping[str, Any], grads: Gradients) -> dict[str, Tensor]:
        """Gradients in the dtypes of the arrays: a head of q and k may have several of v; g and beta come in shares."""
        p, named = self.p, dict[str, Tensor]()
        for name, x in (("q", grads.q), ("k", grads.k)):
            shared = p.Hk != p.H
            named[name] = x.view(p.B, p.T, p.Hk, -1, p.K).sum(3).to(arrays[name].dtype) if shared else x
        for name, x in (("g", grads.g), ("beta", grads.beta)):
            if x is not None:
                named[name] = x.sum(0).to(arrays[name].dtype)
        return named

    def for_keys(self) -> tuple[Tensor, Tensor]:
        """Room for dq and dk of every head of v, in float32 where heads are to be added."""
        dtype = "float32" if self.p.Hk != self.p.H else self.p.dtype
        return self.rows(self.p.K, dtype=dtype), self.rows(self.p.K, dtype=dtype)


def describe(p: Matrix, arrays: Mapping[str, Any]) -> MatrixLaunch:
    """What the launches of a problem share."""
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    g, beta = (None if arrays[n] is None else arrays[n].float().contiguous() for n in ("g", "beta"))
    cu, initial = borders(arrays["cu_seqlens"], p.T, q.device), arrays["initial_state"]
    longest = LONGEST_WIDE_CHUNK if p.dtype == "float32" else LONGEST_CHUNK
    if p.rule == "delta":
        # more keys than dimensions overwrite one another, and digits cancel
        longest = min(longest, power_of_two(p.K))
    C = max(16, min(longest, power_of_two(p.T)))
    chunks = -(-p.T // C)
    slots = p.B * chunks if cu is None else p.T // C + p.N
    size = Sizes(p.N, p.T, p.H, p.H // p.Hk, chunks, p.B * p.T * p.H)
    initial = None if initial is None else initial.contiguous()
    sides = Sides(g, beta, cu, tl.constexpr(p.dtype == "float32"), None, None)
    return MatrixLaunch(p, Arrays(tokens(q), tokens(k), tokens(v)), sides, initial, size, C, slots)
