"""What the launches of one recurrence over matrix states share: arguments of kernels, and sizes of blocks.

`chunk` is ignored: a chunk has 16 to 64 tokens, at most 32 in float32, as matrix products need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ...recurrent.family import check_borders
from ...recurrent.problem import Matrix
from .kernels import recurrent as kernels
from .kernels import recurrent_forward
from .kernels.recurrent import Arrays, Config, Sides, Sizes, Tokens
from .kernels.recurrent_forward import Outputs
from .kernels.recurrent_states import States
from .launches import PLAIN, Launches

LONGEST_CHUNK = 64
# largest numbers of features and columns per tile; largest number of columns in bfloat16, with which rows are read once
LARGEST_BLOCK, WIDE_BLOCK = 64, 128
# columns of a state if both sides of its products are float32, which needs three times the registers
STATE_BLOCK = 32
# the largest K of the delta rule with decays per channel in chunks of 64, because shared memory has keys in float32
MOST_DECAYED = 128
# the limits for float32
LONGEST_WIDE_CHUNK, LARGEST_WIDE_BLOCK = 32, 32
HOW = {"bfloat16": kernels.BF16.value, "float16": kernels.TF32.value, "float32": kernels.FLOAT32.value}
# in a state of fewer rows, the bits that three products of tf32 leave out would be the largest error
FEW_ROWS = 8


def borders(cu_seqlens: Tensor | None, T: int, device: torch.device) -> Tensor | None:
    """cu_seqlens on the device of the arrays; checked if it is on the CPU. A check on a device would have to wait."""
    if cu_seqlens is None:
        return None
    if cu_seqlens.is_cpu:
        check_borders(cu_seqlens.numpy(), T)
    return cu_seqlens.to(device).contiguous()


def tokens(x: Tensor) -> Tokens:
    """A tensor [B, T, H, n] as kernels take it."""
    b, t, h, _ = x.stride()
    return Tokens(x, b, t, h, far_apart(x))


def far_apart(x: Tensor) -> int | None:
    """1 if 32 bits do not hold the offsets along axis 2 of a tensor, None if they do."""
    return 1 if x.shape[2] * x.stride(2) >= 1 << 31 else None


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


class MatrixLaunch(NamedTuple):
    """One call, as `describe` derives it from a problem and its arrays."""

    p: Matrix
    arrays: Arrays
    sides: Sides
    initial: Tensor | None
    size: Sizes
    C: int
    slots: int
    launches: Launches = PLAIN

    def config(self, **changes: Any) -> Config:
        """The constants that kernels of this call are compiled with."""
        p = self.p
        how = kernels.LAST_BIT.value if p.dtype == "float32" and p.K < FEW_ROWS else HOW[p.dtype]
        state = p.K, p.V, p.columns, p.feature_map, p.causal, p.rule == "delta", p.decay == "channel", how
        return Config(*state, self.block(p.K), self.block(p.V), self.C)._replace(**changes)

    def launch(
        self, kernel: Any, programs: int, *args: Any, num_warps: int = 4, num_stages: int | None = None, **changes: Any
    ) -> None:
        """Launch a kernel over a 1-d grid, with its configuration as the last argument."""
        stages = num_stages or (1 if self.p.dtype == "float32" else 2)
        config = self.config(**changes)
        self.launches.run(kernel, (programs,), *args, config, num_warps=num_warps, num_stages=stages)

    def by_chunks(self, kernel: Any, blocks: int, *args: Any, **changes: Any) -> None:
        """Launch a kernel whose programs own a chunk of a head and one of its blocks."""
        self.launch(kernel, self.slots * self.p.H * blocks, *args, **changes)

    def by_states(self, kernel: Any, *args: Any, most: int = 0, **changes: Any) -> None:
        """Launch a kernel whose programs go through the chunks of a sequence and own a block of its states.

        most: the largest number of columns in a block, 0 for the choice by dtype.
        """
        p = self.p
        decomposed = self.sides.pairs is not None or p.feature_map != ""
        rows, columns = changes.get("BK", self.block(p.K)), self.wide_block(p.V) if decomposed else self.block(p.V)
        columns = min(columns, most or (columns if p.dtype == "bfloat16" else STATE_BLOCK))
        self.launch(kernel, p.N * p.H * -(-p.K // rows) * -(-p.V // columns), *args, **{**changes, "BV": columns})

    def block(self, n: int) -> int:
        """Features or columns per tile."""
        if self.p.dtype != "float32" and self.C == LONGEST_CHUNK:
            # for Hopper's products of 64 rows, Triton 3.6 reads past the end of 16-bit operands with fewer columns
            return LARGEST_BLOCK
        return max(16, min(LARGEST_WIDE_BLOCK if self.p.dtype == "float32" else LARGEST_BLOCK, power_of_two(n)))

    @property
    def tiles(self) -> int:
        """The number of blocks of q and k."""
        return -(-self.p.K // self.block(self.p.K))

    def wide_block(self, n: int) -> int:
        """Features or columns per tile of a kernel that has room for more."""
        block = self.block(n)
        return block if self.p.dtype != "bfloat16" else max(block, min(WIDE_BLOCK, power_of_two(n)))

    @property
    def columns(self) -> int:
        """The number of wide blocks of v."""
        return -(-self.p.V // self.wide_block(self.p.V))

    @property
    def narrow(self) -> str:
        """The dtype of stored arrays that are only operands of products."""
        return "bfloat16" if self.p.dtype == "bfloat16" else "float32"

    def stored_states(self) -> States:
        """An uninitialised state before each chunk, or if not causal the last one of each sequence."""
        p, n = self.p, self.slots if self.p.causal else self.p.N
        sums = self.scratch(n, p.H, p.K) if p.normalize else None
        return States(self.scratch(n, p.H, p.K, p.V, dtype=self.narrow), sums)

    def scratch(self, *shape: int, dtype: str = "float32") -> Tensor:
        """An uninitialised array."""
        return self.launches.scratch(*shape, like=self.arrays.q.p, dtype=getattr(torch, dtype))

    def states(self, n: int, dtype: str = "float32") -> Tensor:
        """n uninitialised states of every head, in the caller's layout."""
        return self.scratch(n, self.p.H, self.p.K, self.p.columns, dtype=dtype)

    def last_states(self) -> Tensor:
        """The uninitialised last states, in the caller's dtype."""
        return self.states(self.p.N, self.p.state_dtype or "float32")

    def rows(self, *n: int, dtype: str = "float32") -> Tensor:
        """n uninitialised numbers, or one, per token and head."""
        return self.scratch(self.p.B, self.p.T, self.p.H, *n, dtype=dtype)

    def shares(self, n: int, like: Tensor | None) -> Tensor | None:
        """n uninitialised partial gradients with the shape of `like`; None for None."""
        return None if like is None else self.scratch(n, *like.shape)

    def outputs(self, states: States, out: Outputs) -> None:
        """Compute the outputs that `out` asks for, and their divisors."""
        args = self.arrays, self.sides, states, out, self.size, self.p.scale
        self.by_chunks(recurrent_forward.outputs, self.columns, *args, BV=self.wide_block(self.p.V))

    def gradients(self, arrays: Mapping[str, Any], results: Sequence[Tensor]) -> dict[str, Tensor]:
        """Gradients by name, in the dtypes of the arrays.

        results: of v, the initial state, q and k for every head of v, and partial gradients of g and beta.
        """
        p = self.p
        names = "v", "initial_state", "q", "k", *(n for n in ("g", "beta") if arrays[n] is not None)
        named = dict(zip(names, results, strict=True))
        for name in "qk" if p.Hk != p.H else "":
            named[name] = named[name].view(p.B, p.T, p.Hk, -1, p.K).sum(3)
        for name in names[4:]:
            named[name] = named[name].sum(0)
        return {n: x.to(arrays[n].dtype) if arrays[n] is not None else x for n, x in named.items()}

    def for_keys(self) -> tuple[Tensor, Tensor]:
        """Uninitialised dq and dk for every head of v, in float32 if heads are to be added."""
        dtype = "float32" if self.p.Hk != self.p.H else self.p.dtype
        return self.rows(self.p.K, dtype=dtype), self.rows(self.p.K, dtype=dtype)


def describe(p: Matrix, arrays: Mapping[str, Any]) -> MatrixLaunch:
    """The arguments that all launches of a problem share."""
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    g, beta = (None if arrays[n] is None else arrays[n].float().contiguous() for n in ("g", "beta"))
    cu, initial = borders(arrays["cu_seqlens"], p.T, q.device), arrays["initial_state"]
    longest = LONGEST_WIDE_CHUNK if p.dtype == "float32" else LONGEST_CHUNK
    if p.rule == "delta":
        # with more keys than dimensions, keys overwrite one another and digits cancel
        longest = min(longest, power_of_two(p.K))
        if p.decay == "channel" and p.K > MOST_DECAYED:
            longest = min(longest, LONGEST_WIDE_CHUNK)
    C = max(16, min(longest, power_of_two(p.T)))
    chunks = -(-p.T // C)
    slots = p.B * chunks if cu is None else p.T // C + p.N
    size = Sizes(p.N, p.T, p.H, p.H // p.Hk, chunks, p.B * p.T * p.H)
    initial = None if initial is None else initial.contiguous()
    sides = Sides(g, beta, cu, tl.constexpr(p.dtype == "float32"), None, None)
    return MatrixLaunch(p, Arrays(tokens(q), tokens(k), tokens(v)), sides, initial, size, C, slots)
