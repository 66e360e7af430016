"""One case from inputs to rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import providers
from .cases import Case
from .clocks import Function, Timing, in_turn
from .inputs import has_torch, make_inputs
from .machine import Environment
from .measure import Ceiling, Oracle, allowed_pairs, peak_memory, visits, work
from .rows import Row, note


@dataclass(frozen=True)
class Settings:
    """How long to measure: `seconds` and `rounds` per case, as `in_turn` takes them; `peers` filters the cases' own."""

    seconds: float = 4.0
    rounds: tuple[int, int] = (5, 60)
    peers: tuple[str, ...] | None = None

    def chosen(self, case: Case) -> tuple[str, ...]:
        return tuple(p for p in case.peers if self.peers is None or p in self.peers)


def run(case: Case, env: Environment, ceiling: Ceiling, settings: Settings) -> list[Row]:
    """Measure a case for Saccade and its peers; a provider that cannot run it gives a row whose note says why."""
    if case.kind == "memory":
        return [_memory(case, env)]
    if case.kind == "plan":
        return _plan(case, env, settings)
    if not has_torch():
        return _attention(case, env, ceiling, settings)
    import torch

    before = torch.is_grad_enabled()
    torch.set_grad_enabled(case.kind == "backward" or case.grad)
    try:
        return _attention(case, env, ceiling, settings)
    finally:
        torch.set_grad_enabled(before)


def _attention(case: Case, env: Environment, ceiling: Ceiling, settings: Settings) -> list[Row]:
    x = make_inputs(case)
    runners: dict[str, providers.Runner] = {}
    notes: dict[str, str] = {}
    for name in ("saccade", *settings.chosen(case)):
        try:
            runners[name] = providers.PROVIDERS[name](x)
            runners[name].call()
        except Exception as error:
            runners.pop(name, None)
            notes[name] = _why(error)
    timings = in_turn({n: r.call for n, r in runners.items()}, seconds=settings.seconds, rounds=settings.rounds)
    oracle = Oracle(x)
    pairs, base = allowed_pairs(case, x.mask), _base(case, env)
    if ceiling.source != "probe":
        base = base.with_text(f"ceiling={ceiling.source}")
    rows: list[Row] = []
    for name, runner in runners.items():
        times: dict[str, Any] = timings[name]._asdict()
        if name == "dense":
            # it has no error, because it computes another function: all pairs
            every = allowed_pairs(case, None)
            rate = _rate(case, every, times["median"], ceiling)
            rows.append(replace(base, provider=name, pairs=every, **times, **rate))
            continue
        text = _next_to_dense(case, x.mask, pairs, timings) if name == "saccade" and "dense" in timings else ""
        error, allowed = oracle.check(runner)
        rate = _rate(case, pairs, times["median"], ceiling)
        row = replace(base, provider=name, pairs=pairs, error=error, allowed=allowed, **times, **rate)
        rows.append(row.with_text(text))
    return rows + _absent(replace(base, pairs=pairs), notes)


def _next_to_dense(case: Case, mask: Any, pairs: int, timings: Mapping[str, Timing]) -> str:
    # the cost of the mask: how many pairs are visited per allowed pair, and how fast allowed pairs are
    share = pairs / allowed_pairs(case, None)
    speed = share * timings["dense"].median / timings["saccade"].median
    visited = visits(case, mask) / pairs
    return f"{share:.2%} of all pairs allowed, {visited:.3f} visited for each, at {speed:.2f} of the dense speed a pair"


def _rate(case: Case, pairs: int, seconds: float, ceiling: Ceiling) -> dict[str, Any]:
    # products for prefill and backward, bytes for decode
    w = work(case, pairs)
    if case.kind == "decode":
        amount, unit, top = w.bytes / 1e9, "GB/s", ceiling.stream() / 1e9
    else:
        amount, unit, top = w.flops / 1e9, "GFLOP/s", ceiling.flops(case.dtype) / 1e9
    rate = amount / seconds
    return {"rate": rate, "rate_unit": unit, "ceiling": top, "fraction": rate / top}


def _plan(case: Case, env: Environment, settings: Settings) -> list[Row]:
    calls: dict[str, Function] = {}
    notes: dict[str, str] = {}
    for name, make in (("saccade", providers.plan_call), ("flex", providers.plan_flex)):
        if name != "saccade" and name not in settings.chosen(case):
            continue
        try:
            call = make(case)
            call()
            calls[name] = call
        except Exception as error:
            notes[name] = _why(error)
    timings = in_turn(calls, seconds=settings.seconds, rounds=settings.rounds)
    base = _base(case, env)
    rows = [replace(base, provider=name, **timings[name]._asdict()) for name in calls]
    return rows + _absent(base, notes)


def _memory(case: Case, env: Environment) -> Row:
    base = _base(case, env)
    try:
        growth, seconds = peak_memory(case)
    except RuntimeError as error:
        return base.with_text(_why(error))
    row = replace(base, median=seconds, p10=seconds, p90=seconds, samples=1, rate=growth, rate_unit="B")
    return row.with_text("forward and backward")


def _base(case: Case, env: Environment) -> Row:
    shape = "x".join(map(str, (case.B, case.Tq, case.Tk, case.Hq, case.Hk, case.D)))
    bars = note({"bar": case.bar, "against": case.against, "aim": case.aim})
    return Row(*env, case.name, "saccade", case.kind, case.dtype, shape, case.mask, note=bars)


def _absent(base: Row, notes: Mapping[str, str]) -> list[Row]:
    return [replace(base, provider=name).with_text(text) for name, text in notes.items()]


def _why(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return (first if isinstance(error, providers.Skip) else f"{type(error).__name__}: {first}")[:200]


def run_all(
    cases: Sequence[Case], env: Environment, settings: Settings, *, quick: bool, progress: Any
) -> Iterator[list[Row]]:
    """The rows of every case, one list per case; the ceiling is measured once before them."""
    ceiling = Ceiling(quick=quick)
    task = progress.add_task("bench", total=len(cases))
    for case in cases:
        progress.update(task, description=case.name)
        yield run(case, env, ceiling, settings)
        progress.advance(task)
