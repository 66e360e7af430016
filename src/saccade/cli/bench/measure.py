"""Figures that go with a time: the work done, the machine's ceiling, the error against the oracle, peak memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np

from saccade import cost
from saccade.errors import Unsupported

from .cases import Case
from .clocks import in_turn
from .inputs import Inputs
from .providers import Runner

# the oracle stores rows × keys in float64; longer forward passes are checked on rows spread over the sequence
ORACLE_ROWS = 512


def allowed_pairs(case: Case, mask: Any) -> int:
    """Allowed (query head, query, key) triples of the batch, counted by the mask's own predicate if that fits."""
    heads = case.B * case.Hq
    if mask is None:
        return heads * case.Tq * case.Tk
    if case.mask == "causal()" and case.Tq == case.Tk:
        return heads * case.Tq * (case.Tq + 1) // 2
    return heads * int(np.count_nonzero(mask.evaluate(1, 1, case.Tq, case.Tk)))


def visits(case: Case, mask: Any) -> int:
    """Pairs that the plan on the CPU computes, over the batch and all query heads."""
    from saccade.backends import load
    from saccade.plan import make_plan
    from saccade.problem import Problem

    problem = Problem(case.B, case.Tq, case.Tk, case.Hq, case.Hk, case.D, case.D, case.dtype, mask)
    return make_plan(problem, load("cpu").limits(problem)).visited_pairs


def work(case: Case, pairs: int) -> cost.Work:
    """Flops and bytes of the case, from the cost model."""
    shape = cost.Shape(case.B, case.Tq, case.Tk, case.Hq, case.Hk, case.D, case.D, case.dtype, pairs)
    return {"backward": cost.backward, "decode": cost.decode}.get(case.kind, cost.prefill)(shape)


class Ceiling:
    """The machine's own ceiling: FMA peak in flop/s by dtype and stream read in bytes/s, the best of a few probes.

    The compiled core has the probes. Without it they are a large matrix product and a sum, and `source` says so.
    """

    def __init__(self, *, quick: bool = False) -> None:
        self._tries, self._flops = (1 if quick else 3), dict[str, float]()
        self._stream = 0.0
        self._probe = _core()
        self.source = "matmul and sum" if self._probe is None else "probe"

    def flops(self, dtype: str) -> float:
        """Peak flop/s of the dtype's products."""
        if dtype not in self._flops:
            measure = _matmul if self._probe is None else self._probe.probe_flops
            self._flops[dtype] = max(measure(dtype) for _ in range(self._tries))
        return self._flops[dtype]

    def stream(self) -> float:
        """Bytes per second of reading memory once."""
        if not self._stream:
            measure = _sum if self._probe is None else self._probe.probe_stream
            self._stream = max(measure() for _ in range(self._tries))
        return self._stream


def _core() -> Any:
    from saccade import backends

    try:
        core = backends.load("cpu")
    except (ImportError, Unsupported):
        return None
    return core if hasattr(core, "probe_flops") and hasattr(core, "probe_stream") else None


def _matmul(dtype: str, n: int = 1024) -> float:
    import torch

    a = torch.ones(n, n, dtype=getattr(torch, dtype))
    return 2 * n**3 / in_turn({"matmul": lambda: a @ a}, seconds=0.2).pop("matmul").p10


def _sum(n: int = 1 << 26) -> float:
    import torch

    a = torch.zeros(n)
    return 4 * n / in_turn({"sum": lambda: a.sum()}, seconds=0.2).pop("sum").p10


class Oracle:
    """The float64 answer of a case on the first and the last kv head of its batch, and plain attention's."""

    def __init__(self, x: Inputs) -> None:
        self._case, self._rows, mask = x.case, slice(None), x.mask
        case, self._group = x.case, x.case.Hq // x.case.Hk
        if case.kind != "backward" and case.Tq > ORACLE_ROWS:
            self._rows = np.unique(np.linspace(0, case.Tq - 1, ORACLE_ROWS).astype(int))
            if mask is not None:
                mask = dense_rows(mask, case, self._rows)
        self._heads = sorted({(0, 0), (case.B - 1, case.Hk - 1)})
        self._dtype = _numpy_dtype(case.dtype)
        self._refs = [self._reference(x, mask, b, h) for b, h in self._heads]

    def _reference(self, x: Inputs, mask: Any, b: int, h: int) -> list[tuple[Any, Any]]:
        from saccade import reference

        q, do = (_part(a, b, h * self._group, self._group) for a in (x.q, x.do))
        k, v = _part(x.k, b, h, 1), _part(x.v, b, h, 1)

        def answer(dtype: Any) -> tuple[Any, ...]:
            if do is not None:
                return reference.backward(do, q, k, v, mask, dtype=dtype)[:3]
            return (reference.forward(q[:, self._rows], k, v, mask, dtype=dtype)[0],)

        return list(zip(answer(np.float64), answer(self._dtype), strict=True))

    def check(self, runner: Runner) -> tuple[float, float]:
        """(error, allowed error) of one call's output whose error is nearest to its limit."""
        from saccade.testing.compare import measure

        raw = runner.call()
        got = [_bthd(a, runner.heads_first) for a in (raw if isinstance(raw, tuple | list) else (raw,))]
        worst, G = (0.0, 0.0), self._group
        for (b, h), refs in zip(self._heads, self._refs, strict=True):
            for n, (a, (ref, plain)) in enumerate(zip(got, refs, strict=True)):
                heads = slice(h * G, (h + 1) * G) if n == 0 else slice(h, h + 1)
                part = a[b : b + 1, self._rows if n == 0 else slice(None), heads]
                met = measure("o", part, ref, plain, self._dtype)
                if not worst[1] or met.error * worst[1] >= worst[0] * met.allowed:
                    worst = (met.error, met.allowed)
        return worst


def dense_rows(mask: Any, case: Case, rows: Any) -> Any:
    """A dense mask [1, rows, Tk] of some query rows of the case."""
    from saccade.mask import dense

    return dense(np.ascontiguousarray(mask.evaluate(1, 1, case.Tq, case.Tk)[0, 0][rows]))


def _numpy_dtype(name: str) -> Any:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return ml_dtypes.bfloat16


def _bthd(a: Any, heads_first: bool) -> Any:
    a = a.detach().double().numpy() if hasattr(a, "detach") else np.asarray(a, np.float64)
    return a.swapaxes(1, 2) if heads_first else a


def _part(a: Any, b: int, h: int, n: int) -> Any:
    return None if a is None else _bthd(a[b : b + 1, :, h : h + n], False)


def peak_memory(case: Case) -> tuple[float, float]:
    """(bytes, seconds) that a forward and a backward pass take in a fresh process, including inputs."""
    command = [sys.executable, "-m", "saccade.cli.bench.memory", str(case.Tq), str(case.D), case.dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}")
    grown, seconds = done.stdout.split()
    return float(grown), float(seconds)
