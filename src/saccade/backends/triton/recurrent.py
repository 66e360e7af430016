"""Recurrences over matrix states on NVIDIA: lays out the arrays and launches the kernels of chunks, or of tokens.

Whatever `chunk` says, a chunk holds as many tokens as a matrix product wants, 16 to 64, and to 32 in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...recurrent.family import check_borders
from ...recurrent.problem import Matrix
from . import DTYPES, interpreted
from .chip import on
from .kernels import recurrent as kernels
from .kernels import recurrent_backward as kernels_backward
from .kernels.recurrent import Sides, Sizes, Tokens
from .kernels.recurrent_backward import Cotangent
from .recurrent_walk import Walk

TAKES_TENSORS = True
LARGEST, LARGEST_WALKED = 1024, 512
LONGEST_CHUNK = 64
# features and columns of a tile; columns of a state's, whose products are of float32 and take three times the registers
LARGEST_BLOCK, STATE_BLOCK = 64, 32
# of float32
LONGEST_WIDE_CHUNK, LARGEST_WIDE_BLOCK = 32, 32
HOW = {"bfloat16": kernels.BF16, "float16": kernels.TF32, "float32": kernels.FLOAT32}


def unsupported(problem: Matrix) -> list[str]:
    """Reasons why this problem cannot run here."""
    reasons = elsewhere(problem)
    if problem.K > LARGEST_WALKED and (problem.decay == "channel" or problem.rule == "delta"):
        reasons.append(
            f"a state of {problem.K} rows: at most {LARGEST_WALKED} under decays of channels or the delta rule"
        )
    if problem.feature_map == "taylor":
        reasons.append("the Taylor map is computed on the CPU alone: move the arrays there, or take another map")
    if max(problem.K, problem.V) > LARGEST:
        reasons.append(f"a state has {problem.K} rows and {problem.V} columns: at most {LARGEST} of each")
    return reasons


def elsewhere(problem: Any) -> list[str]:
    """Reasons that all recurrences have: the device of the arrays, and their dtype."""
    reasons: list[str] = []
    kind = problem.device.partition(":")[0]
    if kind != "cuda" and not (kind == "cpu" and interpreted()):
        reasons.append(f"its arrays live on {problem.device}: move them to an NVIDIA GPU by .cuda()")
    if problem.dtype not in DTYPES:
        reasons.append(f"{problem.dtype} is not computed by Triton: cast to {', '.join(DTYPES)}")
    return reasons


def borders(cu_seqlens: Tensor | None, T: int, device: torch.device) -> Tensor | None:
    """cu_seqlens on the device of the arrays. Those on the CPU are checked, others trusted: looking would wait."""
    if cu_seqlens is None:
        return None
    if cu_seqlens.is_cpu:
        check_borders(cu_seqlens.numpy(), T)
    return cu_seqlens.to(device).contiguous()


class Call(NamedTuple):
    """What all launches of one call share."""

    p: Matrix
    given: tuple[Tokens, Tokens, Tokens]
    sides: Sides
    initial: Tensor | None
    size: Sizes
    C: int
    slots: int

    def launch(self, kernel: Any, programs: int, *args: Any, BV: int | None = None, **constants: Any) -> None:
        """Launch a kernel over a line of programs."""
        p = self.p
        kernel[(programs,)](
            *args, K=p.K, V=p.V, W=p.columns, MAP=p.feature_map, BK=self.block(p.K), BV=BV or self.block(p.columns),
            C=self.C, num_warps=4, num_stages=1 if p.dtype == "float32" else 2, **constants,
        )  # fmt: skip

    def walk(self, kernel: Any, *args: Any) -> None:
        """Launch a kernel that goes through the chunks of a sequence, over the blocks of its states."""
        p = self.p
        BV = min(STATE_BLOCK, self.block(p.columns))
        programs = p.N * p.H * -(-p.K // self.block(p.K)) * -(-p.columns // BV)
        self.launch(kernel, programs, *args, BV=BV)

    def block(self, n: int) -> int:
        """Features or columns of a tile."""
        largest = LARGEST_WIDE_BLOCK if self.p.dtype == "float32" else LARGEST_BLOCK
        return max(16, min(largest, 1 << (n - 1).bit_length()))

    def columns(self) -> int:
        """Blocks of v."""
        return -(-self.p.V // self.block(self.p.columns))

    def states(self, keep: bool) -> tuple[Tensor | None, Tensor]:
        """(the state before each chunk, where wanted, the last one)."""
        p, (_, k, v) = self.p, self.given
        kept, final = self.scratch(self.slots) if keep else None, self.scratch(p.N)
        self.walk(kernels.states, k, v, self.sides, self.initial, kept, final, self.size)
        return kept, final

    def scratch(self, n: int) -> Tensor:
        """n states of every head."""
        p = self.p
        return self.given[0].p.new_empty((n, p.H, p.K, p.columns), dtype=torch.float32)

    def outputs(self, kept: Tensor, dtype: str, totals: bool) -> tuple[Tensor, Tensor | None]:
        """(o, what its rows are divided by, where wanted)."""
        p, like = self.p, self.given[0].p
        o = like.new_empty((p.B, p.T, p.H, p.V), dtype=getattr(torch, dtype))
        total = like.new_empty((p.B, p.T, p.H), dtype=torch.float32) if totals else None
        self.launch(
            kernels.outputs, self.slots * p.H * self.columns(), *self.given, self.sides, kept, o, total, self.size,
            p.scale, CAUSAL=p.causal, HOW=HOW[p.dtype],
        )  # fmt: skip
        return o, total


def tokens(x: Tensor) -> Tokens:
    """A tensor [B, T, H, n] as kernels take it."""
    return Tokens(x, *x.stride()[:3])


def _by_tokens(p: Matrix) -> bool:
    # whether a recurrence goes token by token
    plain = p.causal and not p.normalize and not p.feature_map and p.K <= LARGEST_WALKED
    return p.decay == "channel" or p.rule == "delta" or (plain and p.T == 1)


def _call(p: Matrix, arrays: Mapping[str, Any]) -> Call:
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    g, beta = (None if arrays[n] is None else arrays[n].float().contiguous() for n in ("g", "beta"))
    cu, initial = borders(arrays["cu_seqlens"], p.T, q.device), arrays["initial_state"]
    longest = LONGEST_WIDE_CHUNK if p.dtype == "float32" else LONGEST_CHUNK
    C = max(16, min(longest, 1 << max(p.T - 1, 0).bit_length()))
    chunks = -(-p.T // C)
    slots = p.B * chunks if cu is None else p.T // C + p.N
    size = Sizes(p.N, p.T, p.H, p.H // p.Hk, chunks, p.B * p.T * p.H)
    held = None if initial is None else initial.contiguous()
    return Call(p, (tokens(q), tokens(k), tokens(v)), Sides(g, beta, cu), held, size, C, slots)


def forward(problem: Matrix, arrays: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(o [B, T, H, V], final state [N, H, K, columns])."""
    p, call = problem, _call(problem, arrays)
    if not p.N or not p.B:
        return arrays["v"].new_empty((p.B, p.T, p.H, p.V), dtype=getattr(torch, p.out_dtype)), call.scratch(p.N)
    with on(arrays["q"]):
        if _by_tokens(p):
            o, final = arrays["v"].new_empty((p.B, p.T, p.H, p.V), dtype=getattr(torch, p.out_dtype)), call.scratch(p.N)
            Walk(p, call.given, call.sides, call.initial).forward(o, final)
            return o, final
        kept, final = call.states(p.causal)
        if not p.T:
            return arrays["v"].new_empty((p.B, 0, p.H, p.V), dtype=getattr(torch, p.out_dtype)), final
        o, _ = call.outputs(final if kept is None else kept, p.out_dtype, False)
    return o, final


def backward(
    problem: Matrix, arrays: Mapping[str, Any], cotangents: Sequence[Any], needs: Set[str]
) -> dict[str, Tensor]:  # fmt: skip
    """Gradients of all arrays given, by name, in their dtypes."""
    p, call, q = problem, _call(problem, arrays), arrays["q"]
    do, dfinal = cotangents
    do = q.new_zeros((p.B, p.T, p.H, p.V)) if do is None else do.contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    dinitial = call.scratch(p.N)
    empty = not p.N or not p.B
    if empty or not p.T:
        found = {n: torch.zeros_like(x) for n, x in arrays.items() if x is not None and n != "cu_seqlens"}
        return found if empty or dfinal is None else {**found, "initial_state": dfinal}
    with on(q):
        if _by_tokens(p):
            return Walk(p, call.given, call.sides, call.initial).backward(arrays, tokens(do), dfinal)
        kept, final = call.states(p.causal)
        states = final if kept is None else kept
        given = _cotangent(call, do, states)
        dkept = call.scratch(call.slots) if p.causal else None
        call.walk(
            kernels_backward.dstates, call.given[0], given, call.sides, dfinal, dkept, dinitial, call.size,
            1.0 if p.normalize else p.scale,
        )  # fmt: skip
        found = _tokens(call, arrays, given, states, dinitial if dkept is None else dkept)
    return {**found, "initial_state": dinitial}


def _cotangent(call: Call, do: Tensor, states: Tensor) -> Cotangent:
    # of sums that are divided by the last of them
    if not call.p.normalize:
        return Cotangent(tokens(do), None, None)
    o, total = call.outputs(states, "float32", True)
    assert total is not None
    inverse = torch.where(total != 0, 1 / total, 0)
    return Cotangent(tokens(do), inverse, -(do * o).sum(-1) * inverse)


def _tokens(call: Call, arrays: Mapping[str, Any], do: Cotangent, states: Tensor, dstates: Tensor) -> dict[str, Tensor]:
    # the gradients of what has a row for each token
    p, (q, k, v), sides = call.p, call.given, call.sides
    shared = p.Hk != p.H
    rows, kind = (p.B, p.T, p.H), torch.float32 if shared else arrays["q"].dtype
    dq, dk = (arrays["q"].new_empty((*rows, p.K), dtype=kind) for _ in range(2))
    dv = torch.empty((*rows, p.V), dtype=v.p.dtype, device=v.p.device)
    tiles, columns = -(-p.K // call.block(p.K)), call.columns()
    dg = None if sides.g is None else sides.g.new_empty((tiles, *rows))
    dbeta = None if sides.beta is None else sides.beta.new_empty((columns, *rows))
    scale, constants = 1.0 if p.normalize else p.scale, dict[str, Any](CAUSAL=p.causal, HOW=HOW[p.dtype])
    call.launch(
        kernels_backward.dqdk, call.slots * p.H * tiles, q, k, v, do, sides, states, dstates, dq, dk, dg,
        call.size, scale, **constants,
    )  # fmt: skip
    call.launch(
        kernels_backward.dvalues, call.slots * p.H * columns, q, k, v, do, sides, dstates, dv, dbeta, call.size, scale,
        **constants,
    )  # fmt: skip
    found = {"v": dv}
    for name, x in (("q", dq), ("k", dk)):
        # a head of q and k has several heads of v
        found[name] = x.view(p.B, p.T, p.Hk, -1, p.K).sum(3).to(arrays[name].dtype) if shared else x
    for name, x in (("g", dg), ("beta", dbeta)):
        if x is not None:
            found[name] = x.sum(0).to(arrays[name].dtype)
    return found
