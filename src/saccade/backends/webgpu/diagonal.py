"""The selective scan on WebGPU, in float32, token by token: cutting a sequence into pieces does not change any bit.

An invocation has four slots of one channel. The backward pass ignores `chunk`: it stores a state and its gradient every
16 tokens and computes these pieces in parallel. Sums over channels and over pieces have owners and a fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arrays import narrow, widened
from ...recurrent.diagonal import Diagonal, Scan
from .device import open_gpu
from .memory import Buffer
from .support import elsewhere
from .work import Buffers, Work, padded, slots, state_binding

Array = NDArray[Any]
TAKES = {"D", "z", "delta_bias", "initial_state", "cu_seqlens", "fixed_B", "fixed_C", "delta_softplus"}
# tokens per piece; invocations per workgroup; the most blocks of channels that one workgroup of gradients computes
KEEP, WORKGROUP, SERIAL = 16, 64, 8
LARGEST = 256


def unsupported(problem: Diagonal) -> list[str]:
    """Reasons why this problem cannot run here."""
    reasons = elsewhere(problem.device, problem.dtype)
    if not isinstance(problem, Scan):
        reasons.append("WebGPU computes only one recurrence over channels, the selective scan: use another backend")
    elif problem.N > LARGEST:
        reasons.append(f"a channel has N = {problem.N} numbers of state: at most {LARGEST}")
    return reasons


class ScanLaunch:
    """The steps of one call: `forward` or `backward`. Slots of a channel are padded to vectors of four."""

    def __init__(self, work: Work, problem: Scan, arrays: Mapping[str, Any]):
        p = self.problem = problem
        self.work, self.arrays, self.rows, self.N4 = work, arrays, p.B * p.T, -(-p.N // 4)
        self.channels = WORKGROUP // self.N4
        gate = arrays["z"] is not None
        self.constants = {
            "BY": 1 if work.gpu.software else 8,
            "KEEP": KEEP,
            "gate": gate,
            "skip": arrays["D"] is not None,
            "bias": arrays["delta_bias"] is not None,
            "softplus": p.delta_softplus,
            "fixed_B": p.fixed_B,
            "fixed_C": p.fixed_C,
            "backward": False,
        }
        self.tokens = [widened(arrays[n]) for n in ("u", "delta", *(["z"] if gate else []))]
        self.fixed = [n for n in "BC" if getattr(p, f"fixed_{n}")]
        sides = np.zeros((p.D, 4), np.float32)
        for n, name in enumerate(("D", "delta_bias")):
            if arrays[name] is not None:
                sides[:, n] = widened(arrays[name])
        shared = [padded(np.broadcast_to(arrays[n], (p.D, p.N))) for n in self.fixed]
        self.params = work.upload(padded(arrays["A"]), *shared, sides)
        self.mixed = [n for n in "BC" if n not in self.fixed]
        self.mix = [work.upload(*(padded(arrays[n]) for n in self.mixed))] if self.mixed else []
        self.slots, words = slots(p.B, p.T, arrays["cu_seqlens"], KEEP)
        self.side = work.upload(words)
        self.states = p.S * p.D * self.N4

    def forward(self) -> tuple[Buffer, Buffer]:
        """Add steps that compute y [B, T, D] and the final states [S, D, N4]."""
        y, last = self.work.zeros(-(-self.rows * self.problem.D // 4)), self.work.zeros(self.states)
        self._forward(self.work.upload(*self.tokens), [y, last], False)
        return y, last

    def backward(self, dy: Array, dfinal: Array | None) -> Buffers:
        """Add steps that compute gradients; returns, by name, buffers of u, delta and z together, A, sides, B and C."""
        p, work, N4 = self.problem, self.work, self.N4
        rows = work.upload(*self.tokens, widened(dy))
        part, kinds = self.slots * p.D * N4, 1 + len(self.fixed)
        pieces, first = work.zeros(2 * part), work.zeros(self.states)
        self._forward(rows, [pieces], True)
        begin = state_binding(work, dfinal)
        self._add(
            "scan_reverse",
            p.S * self._blocks(p.D, 1),
            [rows, self.params, *self.mix, self.side, *begin, pieces, first],
            begins=bool(begin),
        )
        serial = min(SERIAL, self._blocks(p.D // p.G, 1))
        blocks = self._blocks(p.D // p.G, serial)
        tokens = work.zeros(-(-len(self.tokens) * self.rows * p.D // 4))
        parts = work.zeros(kinds * part + self.slots * p.D)
        mixed = len(self.mixed) * self.rows * p.G * N4
        out = [work.zeros(blocks * mixed)] if self.mixed else []
        self._add(
            "scan_gradients",
            self.slots * p.G * blocks,
            [rows, self.params, *self.mix, pieces, self.side, tokens, parts, *out],
            serial,
        )
        results: Buffers = {
            "tokens": (tokens, (len(self.tokens), p.B, p.T, p.D)),
            "initial_state": (first, (p.S, p.D, 4 * N4)),
        }
        for n, name in enumerate(("A", *self.fixed)):
            results[name] = work.fold(parts, self.slots, p.D * N4, n * part), (p.D, 4 * N4)
        results["sides"] = work.fold(parts, self.slots, p.D, kinds * part), (p.D, 4)
        if out:
            results["mixed"] = work.fold(out[0], blocks, mixed), (len(self.mixed), p.B, p.T, p.G, 4 * N4)
        return results

    def _forward(self, rows: Buffer, out: list[Buffer], keep: bool) -> None:
        begin, p = state_binding(self.work, self.arrays["initial_state"]), self.problem
        self._add(
            "scan_forward",
            p.S * self._blocks(p.D, 1),
            [rows, self.params, *self.mix, self.side, *begin, *out],
            keep=keep,
            begins=bool(begin),
        )

    def _blocks(self, channels: int, serial: int) -> int:
        return -(-channels // (self.channels * serial))

    def _add(self, template: str, groups: int, bindings: Sequence[Buffer], serial: int = 0, **constants: Any) -> None:
        p = self.problem
        numbers = (groups, self.rows, p.D, self.N4, p.G, self.channels, self.slots, serial)
        self.work.add(template, self.constants | constants, bindings, groups, *numbers)


def forward(problem: Scan, arrays: Mapping[str, Any]) -> tuple[Array, Array]:
    """(y [B, T, D], final state [S, D, N])."""
    p = problem
    with Work(open_gpu()) as work:
        launch = ScanLaunch(work, p, arrays)
        y, last = launch.forward()
        rows, final = work.finish((y, (p.B, p.T, p.D)), (last, (p.S, p.D, 4 * launch.N4)))
    return narrow(rows, p.dtype), np.ascontiguousarray(final[..., : p.N])


def backward(problem: Scan, arrays: Mapping[str, Any], cotangents: Sequence[Any], needs: Set[str]) -> dict[str, Array]:
    """The gradients of all given arrays, by name; bfloat16 is carried by uint16."""
    p, (dy, dfinal) = problem, cotangents
    dy = np.zeros((p.B, p.T, p.D), np.float32) if dy is None else dy
    with Work(open_gpu()) as work:
        launch = ScanLaunch(work, p, arrays)
        buffers = launch.backward(dy, dfinal)
        got = dict(zip(buffers, work.finish(*buffers.values()), strict=True))
    gradients = dict(zip(("u", "delta", "z"), got["tokens"], strict=False))
    gradients |= {
        "D": got["sides"][:, 0],
        "delta_bias": got["sides"][:, 1],
        "initial_state": got["initial_state"][..., : p.N],
    }
    gradients |= {n: got[n][:, : p.N] for n in ("A", *launch.fixed)}
    gradients |= {n: x[..., : p.N] for n, x in zip(launch.mixed, got.get("mixed", ()), strict=False)}
    return {n: _like(arrays[n], x) for n, x in gradients.items() if arrays[n] is not None}


def _like(array: Array, x: Array) -> Array:
    # sums rows that all channels share, restores a missing group dimension; bfloat16 is carried by uint16
    x = x.sum(0, dtype=np.float64) if array.ndim < min(x.ndim, 2) else x.reshape(array.shape)
    return narrow(np.ascontiguousarray(x), "bfloat16" if array.dtype == np.uint16 else array.dtype.name)
