"""The work of one rank: pieces of attention by a backend, and partial results that are merged in order of arrival."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..backends import Backend, Inputs, Outputs
from ..frameworks.torch_run import dense, follow_threads, giver, tensor
from ..merge import merge
from ..plan import Plan, make_plan
from ..problem import Problem
from ..statistics import sinks_gradient
from .layout import Run
from .schedule import Piece, Schedule, pieces

# in place of a block number: the keys of all ranks in the order of their positions
WHOLE = -1


class Planned(NamedTuple):
    """A piece with its problem and plan."""

    piece: Piece
    problem: Problem
    plan: Plan


class Local:
    """The calls of one rank, planned on first use. problem: of this rank's own rows and keys, without a mask."""

    def __init__(self, schedule: Schedule, rank: int, problem: Problem, backend: Backend) -> None:
        self.schedule, self.rank, self.problem, self.backend = schedule, rank, problem, backend
        self.wide = getattr(torch, problem.accumulator)
        self.known: dict[int, list[Planned]] = {}

    def calls(self, block: int) -> list[Planned]:
        """The calls of this rank on a block of keys."""
        if block not in self.known:
            s = self.schedule
            if block == WHOLE:
                cut = pieces(s.heads, s.runs[self.rank], (Run(0, 1, sum(s.counts)),))
            else:
                cut = s.pieces(self.rank, block)
            self.known[block] = [self._plan(piece) for piece in cut]
        return self.known[block]

    def _plan(self, piece: Piece) -> Planned:
        rows, keys = piece.rows, piece.keys
        problem = replace(self.problem, Tq=rows.stop - rows.start, Tk=keys.stop - keys.start)
        return Planned(piece, problem, make_plan(problem, self.backend.limits(problem), piece.heads))

    def forward(self, sums: Sums, call: Planned, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Merge one piece of attention into sums; q, k and v: all of the rank and of the block."""
        give, (rows, keys, _) = self._giver(), call.piece
        q, k, v = (give(dense(x)) for x in (q[:, rows], k[:, keys], v[:, keys]))
        wide = self.problem.accumulator
        o, lse = self.backend.forward(call.problem, call.plan, Inputs(q, k, v), out_dtype=wide)
        sums.add(rows, tensor(o), tensor(lse))

    def backward(
        self, call: Planned, q: Tensor, k: Tensor, v: Tensor, outputs: Outputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of the rows and keys of one piece, in the accumulator's dtype."""
        give, (rows, keys, _) = self._giver(), call.piece
        o, lse, do, _, delta = outputs[:5]
        do, q, o = (give(dense(x[:, rows])) for x in (do, q, o))
        k, v = (give(dense(x[:, keys])) for x in (k, v))
        lse, delta = (give(x[:, rows].contiguous()) for x in (lse, delta))
        inputs, outputs = Inputs(q, k, v), Outputs(o, lse, do, delta=delta)
        gradients = self.backend.backward(call.problem, call.plan, inputs, outputs, out_dtype=self.problem.accumulator)
        return tensor(gradients[0]), tensor(gradients[1]), tensor(gradients[2])

    def _giver(self) -> Any:
        follow_threads(self.backend)
        return giver(self.backend)


class Sums:
    """Attention over the keys seen so far: o [B, n, Hq, Dv] and lse [B, n, Hq] in the accumulator's dtype."""

    def __init__(self, q: Tensor, Dv: int, wide: torch.dtype) -> None:
        self.empty = True
        self.o = q.new_zeros((*q.shape[:3], Dv), dtype=wide)
        self.lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide)

    def add(self, rows: slice, o: Tensor, lse: Tensor) -> None:
        """Merge the result of these rows over other keys."""
        if self.empty and o.shape == self.o.shape:
            self.o, self.lse = o, lse
        elif o.is_cuda:
            from ..backends.triton.fold import fold

            fold(self.o[:, rows], self.lse[:, rows], o, lse)
        else:
            self.o[:, rows], self.lse[:, rows] = merge([(self.o[:, rows], self.lse[:, rows]), (o, lse)])
        self.empty = False

    def finish(self, dtype: torch.dtype, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """(o, lse) with the sinks [Hq] added once."""
        if sinks is not None:
            self.o, self.lse = merge([(self.o, self.lse)], sinks=sinks)
        return self.o.to(dtype), self.lse


class Total:
    """A sum of gradients of some rows or keys at a time, [B, n, heads, head size] like `like`.

    into: its array, which may have a sum already; None for a new one, or for the first part if that has all rows.
    """

    def __init__(self, like: Tensor, wide: torch.dtype, into: Tensor | None = None, filled: bool = False) -> None:
        self.like, self.wide, self.into, self.filled = like, wide, into, filled

    def add(self, where: slice, part: Tensor) -> None:
        """Add the gradients of these rows or keys."""
        if self.filled or part.shape != self.like.shape:
            self.sum()[:, where] += part
        else:
            self.into = part if self.into is None else self.into.copy_(part)
            self.filled = True

    def sum(self) -> Tensor:
        """The sum so far, zeros if nothing was added."""
        if self.into is None:
            self.into = self.like.new_zeros(self.like.shape, dtype=self.wide)
        elif not self.filled:
            self.into.zero_()
        self.filled = True
        return self.into


class Way(NamedTuple):
    """A strategy: forward(q, k, v, sinks) returns (o, lse), and backward(q, k, v, outputs) returns (dq, dk, dv)."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


class OverRanks(torch.autograd.Function):
    """(o, lse) of this rank's rows by a strategy; the gradient of sinks is this rank's contribution."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, way: Way
    ) -> tuple[Tensor, Tensor]:
        o, lse = way.forward(q, k, v, sinks)
        ctx.save_for_backward(q, k, v, o, lse, sinks)
        ctx.way = way
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, o, lse, sinks = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        delta = _row_terms(do, o, lse, dlse)
        dq, dk, dv = ctx.way.backward(q, k, v, Outputs(o, lse, do, delta=delta))
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            dsinks = sinks_gradient(sinks.to(lse.dtype), lse, delta).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None


def _row_terms(do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    # Δ = Σ do · o - dlse of every row, 0 for rows without a key, in the dtype of lse
    if do.is_cuda:
        from ..backends.triton import launch
        from ..backends.triton.chip import on
        from ..backends.triton.launches import PLAIN

        with on(do):
            delta = launch.delta(PLAIN, Outputs(dense(o), lse, dense(do), dlse))
    else:
        delta = (do.to(lse.dtype) * o.to(lse.dtype)).sum(-1)
        if dlse is not None:
            delta = delta - dlse
    return torch.where(lse == -torch.inf, torch.zeros_like(delta), delta)
