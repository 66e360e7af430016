"""Recurrences over matrix states on WebGPU, in float32: chunks of 64 tokens in parallel, their states in sequence.

`chunk` is ignored: a chunk is a tile of the products. Every result has an owner, and nothing is added atomically. The
kernels first compute each chunk's terms, then carry states from chunk to chunk, and then compute the rows of each chunk
from the state before it and from its own pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arrays import narrow, widened
from ...recurrent.problem import Matrix
from .device import open_gpu
from .memory import Buffer
from .support import elsewhere
from .work import Buffers, Work, padded, slots, state_binding

Array = NDArray[Any]
TAKES = {"g", "beta", "initial_state", "cu_seqlens", "feature_map", "normalize", "causal"}
CHUNK, LARGEST = 64, 1024


def unsupported(problem: Matrix) -> list[str]:
    """Reasons why this problem cannot run here."""
    reasons = elsewhere(problem.device, problem.dtype)
    if problem.decay == "channel":
        reasons.append("a decay per channel is not computed on WebGPU: use another backend")
    if problem.feature_map == "taylor":
        reasons.append("the Taylor map is computed only on the CPU: move the arrays there, or use another map")
    if max(problem.K, problem.V) > LARGEST:
        reasons.append(f"a state has {problem.K} rows and {problem.V} columns: at most {LARGEST} of each")
    return reasons


class MatrixLaunch:
    """The steps of one call: `forward`, or `backward` for gradients. Rows of buffers are padded to vectors of four."""

    def __init__(self, work: Work, problem: Matrix, arrays: Mapping[str, Any]):
        p = self.problem = problem
        self.work, self.rows = work, p.B * p.T
        self.K4, self.V4, self.W4 = (-(-n // 4) for n in (p.K, p.V, p.columns))
        self.constants = {
            "BY": 1 if work.gpu.software else 4,
            "feature_map": p.feature_map,
            "normalize": p.normalize,
            "causal": p.causal,
            "decay": bool(p.decay),
            "beta": p.beta,
        }
        self.v = padded(arrays["v"])
        self.qk = work.upload(padded(arrays["q"]), padded(arrays["k"]))
        self.slots, words = slots(p.B, p.T, arrays["cu_seqlens"], CHUNK)
        self.side = work.upload(words)
        self.ramps = self._ramps(arrays["g"], arrays["beta"])
        self.begin = state_binding(work, arrays["initial_state"])
        self.starts_size = self.slots * p.H * p.K * self.W4
        self.ends_size = p.N * p.H * p.K * self.W4

    def _ramps(self, g: Array | None, beta: Array | None) -> list[Buffer]:
        rows = [widened(x) for x in (g, beta) if x is not None]
        if not rows:
            return []
        ramps, invocations = self.work.zeros(self.rows * self.problem.H), self.slots * self.problem.H
        self._add("chunk_ramps", -(-invocations // 64), [self.side, self.work.upload(*rows), ramps], {}, invocations)
        return [ramps]

    def forward(self) -> tuple[Buffer, Buffer]:
        """Add steps that compute o [B, T, H, V4] and the final states [N, H, K, W4]."""
        vx = self.work.upload(self.v)
        starts, ends, o = (
            self.work.zeros(n) for n in (self.starts_size, self.ends_size, self.rows * self.problem.H * self.V4)
        )
        self._states(vx, starts, ends)
        self._rows("o", vx, starts if self.problem.causal else ends, [o])
        return o, ends

    def backward(self, do: Array, dfinal: Array | None) -> Buffers:
        """Add steps that compute gradients; returns, by name, buffers of q and k together, v, both ends, g, beta."""
        p, work, K4, V4 = self.problem, self.work, self.K4, self.V4
        vx = work.upload(self.v, padded(do))
        starts, ends = work.zeros(2 * self.starts_size), work.zeros(2 * self.ends_size)
        self._states(vx, starts, ends)
        states, size = (starts, self.starts_size) if p.causal else (ends, self.ends_size)
        divisors = self._divisors(vx, states) if p.normalize else []
        self._add(
            "chunk_states",
            self.slots * p.H * _blocks(K4) * _blocks(V4),
            [self.qk, vx, self.side, *self.ramps, *divisors, starts],
            {"of": "q"},
            write_at=self.starts_size,
        )
        self._carry(state_binding(work, dfinal), starts, ends, True)
        dqdk, dv, rows = work.zeros(2 * self.rows * p.H * K4), work.zeros(self.rows * p.H * V4), self.rows * p.H
        passed = [work.zeros(-(-2 * _blocks(K4) * rows // 4))] if p.decay else []
        shares = [work.zeros(-(-_blocks(V4) * rows // 4))] if p.beta else []
        self._rows("q", vx, states, [*divisors, dqdk, *passed])
        self._rows("k", vx, states, [*divisors, dqdk, *passed], size)
        self._rows("v", vx, states, [*divisors, dv, *shares], size)
        if p.Hk != p.H:
            # several heads of v share one head of q and k
            dqdk = work.fold(dqdk, p.H // p.Hk, 2 * self.rows * p.Hk * K4)
        results: Buffers = {"qk": (dqdk, (2, p.B, p.T, p.Hk, 4 * K4)), "v": (dv, (p.B, p.T, p.H, 4 * V4))}
        results["ends"] = ends, (2, p.N, p.H, p.K, 4 * self.W4)
        if passed:
            dg = work.zeros(-(-rows // 4))
            self._add(
                "chunk_decays",
                self.slots * p.H,
                [self.qk, vx, self.side, states, *self.ramps, *passed, dg],
                {},
                read_at=size,
            )
            results["g"] = dg, (p.B, p.T, p.H)
        return results | ({"beta": (shares[0], (_blocks(V4), p.B, p.T, p.H))} if shares else {})

    def _states(self, vx: Buffer, starts: Buffer, ends: Buffer) -> None:
        p = self.problem
        groups = self.slots * p.H * _blocks(self.K4) * _blocks(self.V4)
        self._add("chunk_states", groups, [self.qk, vx, self.side, *self.ramps, starts], {"of": "k"})
        self._carry(self.begin, starts, ends, False)

    def _carry(self, begin: list[Buffer], starts: Buffer, ends: Buffer, reverse: bool) -> None:
        decays = self.ramps if self.problem.decay else []
        constants, write_at = {"reverse": reverse, "begins": bool(begin)}, self.starts_size if reverse else 0
        bindings = [self.side, *begin, *decays, starts, ends]
        self._add(
            "chunk_carry", -(-self.ends_size // 64), bindings, constants, self.ends_size, 3 * self.slots, write_at
        )

    def _rows(self, of: str, vx: Buffer, states: Buffer, more: Sequence[Buffer], read_at: int = 0) -> None:
        blocks = _blocks(self.V4 if of in "ov" else self.K4)
        self._add(
            "chunk_rows",
            self.slots * self.problem.H * blocks,
            [self.qk, vx, self.side, states, *self.ramps, *more],
            {"of": of, "totals": of == "o" and len(more) > 1},
            read_at=read_at,
        )

    def _divisors(self, vx: Buffer, states: Buffer) -> list[Buffer]:
        rows = self.rows * self.problem.H
        o, total, divisors = (self.work.zeros(n) for n in (rows * self.V4, -(-rows // 4), -(-rows // 2)))
        self._rows("o", vx, states, [o, total])
        self._add("chunk_divisors", -(-rows // 64), [vx, o, total, divisors], {}, rows)
        return [divisors]

    def _add(
        self,
        template: str,
        groups: int,
        bindings: Sequence[Buffer],
        constants: dict[str, Any],
        total: int = 0,
        read_at: int = 0,
        write_at: int = 0,
    ) -> None:
        scale = 1.0 if self.problem.normalize else self.problem.scale
        p, rows = self.problem, self.rows * self.problem.H
        sizes = (p.H, p.H // p.Hk, rows, rows * p.Hk // p.H, p.K, p.V, self.K4, self.V4, self.W4)
        numbers = (total or groups, read_at, write_at, *sizes, float(scale))
        self.work.add(template, self.constants | constants, bindings, groups, *numbers)


def _blocks(vectors: int) -> int:
    # blocks of 64 numbers
    return -(-vectors // 16)


def forward(problem: Matrix, arrays: Mapping[str, Any]) -> tuple[Array, Array]:
    """(o [B, T, H, V], final state [N, H, K, columns])."""
    p = problem
    with Work(open_gpu()) as work:
        launch = MatrixLaunch(work, p, arrays)
        o, ends = launch.forward()
        rows, final = work.finish((o, (p.B, p.T, p.H, 4 * launch.V4)), (ends, (p.N, p.H, p.K, 4 * launch.W4)))
    return narrow(np.ascontiguousarray(rows[..., : p.V]), p.out_dtype), np.ascontiguousarray(final[..., : p.columns])


def backward(
    problem: Matrix, arrays: Mapping[str, Any], cotangents: Sequence[Any], needs: Set[str]
) -> dict[str, Array]:
    """The gradients of all given arrays, by name; bfloat16 is carried by uint16."""
    p, (do, dfinal) = problem, cotangents
    do = np.zeros((p.B, p.T, p.H, p.V), np.float32) if do is None else do
    with Work(open_gpu()) as work:
        launch = MatrixLaunch(work, p, arrays)
        buffers = launch.backward(do, dfinal)
        got = dict(zip(buffers, work.finish(*buffers.values()), strict=True))
    gradients = {"q": got["qk"][0, ..., : p.K], "k": got["qk"][1, ..., : p.K], "v": got["v"][..., : p.V]}
    gradients |= {"g": got["g"]} if p.decay else {}
    gradients |= {"beta": got["beta"].sum(0)} if p.beta else {}
    kinds = {n: "bfloat16" if arrays[n].dtype == np.uint16 else arrays[n].dtype.name for n in gradients}
    gradients = {n: narrow(np.ascontiguousarray(x), kinds[n]) for n, x in gradients.items()}
    return {**gradients, "initial_state": np.ascontiguousarray(got["ends"][1, ..., : p.columns])}
