"""Launching the kernels that go through a recurrence over matrix states token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...recurrent.problem import Matrix
from .kernels import recurrent_walk as kernels
from .kernels.recurrent import Sides, Sizes, Tokens

# tokens between two states that a backward keeps, and numbers of state of a program
CHUNK, NUMBERS = 32, 2048


class Walk:
    """One call: q, k, v as Tokens, of N sequences."""

    def __init__(self, p: Matrix, given: tuple[Tokens, Tokens, Tokens], sides: Sides, initial: Tensor | None) -> None:
        self.p, self.given, self.sides, self.initial = p, given, sides, initial
        self.BK = max(1, 1 << (p.K - 1).bit_length())
        self.BV = max(1, min(32, NUMBERS // self.BK, 1 << (p.V - 1).bit_length()))
        self.columns = -(-p.V // self.BV)
        chunks = -(-p.T // CHUNK)
        self.slots = p.B * chunks if sides.cu is None else p.T // CHUNK + p.N
        self.size = Sizes(p.N, p.T, p.H, p.H // p.Hk, chunks, p.B * p.T * p.H)

    def launch(self, kernel: Any, *args: Any) -> None:
        """Launch a kernel over sequences, heads and blocks of columns."""
        p = self.p
        kernel[(p.N * p.H * self.columns,)](
            *self.given, *args, self.size, p.scale, K=p.K, V=p.V, DELTA=p.rule == "delta",
            CHANNELS=p.decay == "channel", BK=self.BK, BV=self.BV, C=CHUNK, num_warps=4,
        )  # fmt: skip

    def forward(self, o: Tensor, final: Tensor) -> None:
        """o [B, T, H, V] and the final state [N, H, K, V]."""
        self.launch(kernels.walk, self.sides, self.initial, o, final, None)

    def backward(self, arrays: Mapping[str, Any], do: Tokens, dfinal: Tensor | None) -> dict[str, Tensor]:
        """Gradients by name, in the dtypes of the arrays."""
        p, wide = self.p, self.given[0].p.new_empty(0).float()
        state, rows = (p.H, p.K, p.V), (self.columns, p.B, p.T, p.H)
        kept, scratch = (wide.new_empty((n, *state)) for n in (self.slots, p.N * CHUNK))
        self.launch(kernels.walk, self.sides, self.initial, None, None, kept)
        dq, dk = (wide.new_empty((*rows, p.K)) for _ in range(2))
        dv, dinitial = self.given[2].p.new_empty((p.B, p.T, p.H, p.V)), wide.new_empty((p.N, *state))
        dg = None if self.sides.g is None else wide.new_empty((self.columns, *self.sides.g.shape))
        dbeta = None if self.sides.beta is None else wide.new_empty(rows)
        out = kernels.Walked(dq, dk, dv, dg, dbeta, dinitial)
        self.launch(kernels.walk_backward, do, self.sides, dfinal, out, kept, scratch)
        found = {"v": dv, "initial_state": dinitial}
        for name, x in (("q", dq), ("k", dk)):
            # a head of q and k has several heads of v
            found[name] = x.view(self.columns, p.B, p.T, p.Hk, -1, p.K).sum((0, 4)).to(arrays[name].dtype)
        for name, x in (("g", dg), ("beta", dbeta)):
            if x is not None:
                found[name] = x.sum(0).to(arrays[name].dtype)
        return found
