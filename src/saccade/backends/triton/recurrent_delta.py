"""Launching the kernels of the delta rule: a triangular system, then the kernels of other recurrences."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .chip import chip_of
from .kernels import recurrent_backward as kernels_backward
from .kernels import recurrent_channels as kernels_channels
from .kernels import recurrent_delta as kernels
from .kernels.recurrent import Arrays, Cotangent
from .kernels.recurrent_backward import Gradients
from .kernels.recurrent_delta import Decayed, System
from .kernels.recurrent_forward import Outputs
from .kernels.recurrent_states import Ends, States
from .recurrent_call import MatrixLaunch, power_of_two, tokens

# Chips with 99 KiB of shared memory for a program, on which wide blocks of dqdk would spill thousands of bytes. They
# spill on sm_80 too, which keeps wide blocks until a run has compared both.
SMALL = ("sm_86", "sm_89", "sm_120", "sm_121")


class _Solved(NamedTuple):
    # X, P, and e, the values that states take up; states before chunks; last states
    system: System
    states: States
    final: Tensor


def _by_columns(call: MatrixLaunch, kernel: Any, *args: Any, **changes: Any) -> None:
    # each program has all rows of a state
    rows, channels = max(16, power_of_two(call.p.K)), call.sides.pairs is not None
    # keys that have decayed take twice the registers of 16-bit keys
    warps = 8 if rows > 128 or channels else 4
    # for sm_80 wide blocks of these are compiled to 32 registers
    small = (*SMALL, "sm_80") if channels else SMALL
    if channels:
        changes["most"] = 64
    if _chip(call).startswith("gfx"):
        # AMD's warps have 64 lanes, and local memory has space for one stage
        warps, changes["num_stages"] = 4, 1
    elif (rows > 128) + channels + (_chip(call) in small) > 1:
        # Triton 3.8 uses twice as much shared memory as other versions
        changes |= {"num_stages": 1, "most": 16}
    call.by_states(kernel, *args, BK=rows, num_warps=warps, **changes)


def _chip(call: MatrixLaunch) -> str:
    return chip_of(str(call.arrays.v.p.device))


def _solve(call: MatrixLaunch, paired: bool) -> _Solved:
    p, (q, k, v, _) = call.p, call.arrays
    # products of both sides in bfloat16 suffice for o, but not for a state that is returned
    narrow = p.dtype == "bfloat16" and not p.return_state
    args: tuple[Any, ...]
    if (pairs := call.sides.pairs) is not None:
        # the backward reads keys that have decayed from the chunk's start too
        rows = [call.rows(p.K, dtype="bfloat16" if narrow and not paired else "float32") for _ in range(2 + paired)]
        decayed = Decayed(rows[0], rows[2] if paired else None, rows[1], call.scratch(call.slots, p.H, p.K))
        system = System(call.rows(call.C), pairs, None, decayed)
        args = Arrays(q, k, None), call.sides
        call.by_chunks(kernels_channels.decay, call.tiles, *args, decayed, call.size)
        call.by_chunks(kernels_channels.solve, 1, *args, system, call.size, NARROW=narrow)
    else:
        system = System(call.rows(call.C), call.rows(call.C) if paired else None, None)
        args = Arrays(q, k, None), call.sides, system, call.size, p.scale
        call.by_chunks(kernels.solve, 1, *args)
    system = system._replace(solution=call.rows(p.V, dtype=call.narrow))
    states, final = call.stored_states(), call.last_states()
    args = Arrays(None, k, v), call.sides, system._replace(pairs=None), states, Ends(call.initial, final), call.size
    _by_columns(call, kernels.states, *args, NARROW=narrow)
    return _Solved(system, states, final)


def forward(call: MatrixLaunch) -> tuple[Tensor, Tensor]:
    """(o, final state)."""
    p, solved = call.p, _solve(call, False)
    o = call.rows(p.V, dtype=p.out_dtype)
    arrays = call.arrays._replace(v=tokens(solved.system.solution))
    call._replace(arrays=arrays).outputs(solved.states, Outputs(o))
    return o, solved.final


def backward(call: MatrixLaunch, do: Tensor, dfinal: Tensor | None) -> list[Tensor]:
    """Gradients as `MatrixLaunch.gradients` takes them."""
    p, (q, k, *_), solved = call.p, call.arrays, _solve(call, True)
    de, dstates, dinitial = call.rows(p.V, dtype=call.narrow), call.stored_states(), call.states(p.N)
    cotangent, system = Cotangent(tokens(do), p.scale), solved.system._replace(solution=de)
    args = Arrays(q, k, None, cotangent), call.sides, system, dstates, Ends(dfinal, dinitial), call.size
    _by_columns(call, kernels.dstates, *args, num_stages=1)
    channels, sides = call.sides.pairs is not None, call.sides
    shares = call.shares(1 if channels else call.tiles, sides.g), call.shares(call.tiles, sides.beta)
    grads = Gradients(*call.for_keys(), *shares)
    x = Arrays(q, k, tokens(solved.system.solution), cotangent._replace(de=de))
    args = x, call.sides, (solved.states, dstates), grads, call.size
    wide = _chip(call) not in SMALL
    BV = call.wide_block(p.V) if wide else call.block(p.V)
    kernel = kernels_channels.dqdk if channels else kernels_backward.dqdk
    call.by_chunks(kernel, call.tiles, *args, BV=BV, num_stages=1)
    return [de, dinitial, *(x for x in grads if x is not None)]
