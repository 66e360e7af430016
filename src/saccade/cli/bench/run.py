"""One case from inputs to rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import providers
from .cases import Case
from .inputs import has_torch, make_inputs
from .measure import Ceiling, Oracle, Timing, allowed_pairs, in_turn, peak_memory, visits, work
from .report import Row

NONE = Timing(0.0, 0.0, 0.0, 0)


@dataclass(frozen=True)
class Settings:
    """How long to measure: `seconds` and `rounds` a case, as `in_turn` takes them; `peers` filters the cases' own."""

    seconds: float = 4.0
    rounds: tuple[int, int] = (5, 60)
    peers: tuple[str, ...] | None = None

    def chosen(self, case: Case) -> tuple[str, ...]:
        return tuple(p for p in case.peers if self.peers is None or p in self.peers)


def run(case: Case, env: Mapping[str, str], ceiling: Ceiling, settings: Settings) -> list[Row]:
    """Measure a case for ours and its peers; a provider that cannot run it gives a row whose note says why."""
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


def _attention(case: Case, env: Mapping[str, str], ceiling: Ceiling, settings: Settings) -> list[Row]:
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
    pairs, rows = allowed_pairs(case, x.mask), list[Row]()
    for name, runner in runners.items():
        if name == "dense":
            # another function: all pairs, and no error to the masked one
            every = allowed_pairs(case, None)
            rows.append(_row(case, env, name, timings[name], every, ceiling=_share(case, every, ceiling)))
            continue
        note = _beside_dense(case, x.mask, pairs, timings) if name == "saccade" and "dense" in timings else ""
        share, errors = _share(case, pairs, ceiling), oracle.check(runner)
        rows.append(_row(case, env, name, timings[name], pairs, ceiling=share, errors=errors, note=note))
    return rows + [_row(case, env, name, NONE, pairs, note=note) for name, note in notes.items()]


def _beside_dense(case: Case, mask: Any, pairs: int, timings: Mapping[str, Timing]) -> str:
    # what the mask costs: pairs visited beside those allowed, and how fast the allowed ones are
    share = pairs / allowed_pairs(case, None)
    speed = share * timings["dense"].median / timings["saccade"].median
    visited = visits(case, mask) / pairs
    return f"{share:.2%} of all pairs allowed, {visited:.3f} visited for each, at {speed:.2f} of the dense speed a pair"


def _share(case: Case, pairs: int, ceiling: Ceiling) -> tuple[float, str, float, str]:
    # (work, unit, ceiling in that unit, its source): products for prefill and backward, bytes for decode
    w = work(case, pairs)
    if case.kind == "decode":
        return w.bytes / 1e9, "GB/s", ceiling.stream() / 1e9, ceiling.source
    return w.flops / 1e9, "GFLOP/s", ceiling.flops(case.dtype) / 1e9, ceiling.source


def _plan(case: Case, env: Mapping[str, str], settings: Settings) -> list[Row]:
    calls: dict[str, providers.Call] = {}
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
    rows = [_row(case, env, name, timings[name], 0) for name in calls]
    return rows + [_row(case, env, name, NONE, 0, note=note) for name, note in notes.items()]


def _memory(case: Case, env: Mapping[str, str]) -> Row:
    try:
        grown, seconds = peak_memory(case)
    except RuntimeError as error:
        return _row(case, env, "saccade", NONE, 0, note=_why(error))
    timing = Timing(seconds, seconds, seconds, 1)
    return _row(case, env, "saccade", timing, 0, ceiling=(grown * seconds, "B", 0.0, ""), note="forward and backward")


def _row(
    case: Case, env: Mapping[str, str], provider: str, timing: Timing, pairs: int, *, note: str = "",
    ceiling: tuple[float, str, float, str] = (0.0, "", 0.0, ""), errors: tuple[float, float] = (0.0, 0.0),
) -> Row:  # fmt: skip
    amount, unit, top, source = ceiling
    rate = amount / timing.median if timing.samples else 0.0
    return Row(
        **env, case=case.name, provider=provider, group=case.group, kind=case.kind, dtype=case.dtype,
        shape=f"{case.B}x{case.Tq}x{case.Tk}x{case.Hq}x{case.Hk}x{case.D}", mask=case.mask, pairs=pairs,
        median=timing.median, p10=timing.p10, p90=timing.p90, samples=timing.samples, rate=rate, rate_unit=unit,
        ceiling=top, ceiling_source=source, fraction=rate / top if top else 0.0, error=errors[0],
        error_allowed=errors[1], bar=case.bar, against=case.against, aim=case.aim, note=note,
    )  # fmt: skip


def _why(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return (first if isinstance(error, providers.Skip) else f"{type(error).__name__}: {first}")[:200]


def run_all(
    found: Sequence[Case], env: Mapping[str, str], settings: Settings, *, quick: bool, progress: Any
) -> Iterator[list[Row]]:
    """The rows of every case, one list a case, the ceiling measured once before them."""
    ceiling = Ceiling(quick=quick)
    task = progress.add_task("bench", total=len(found))
    for case in found:
        progress.update(task, description=case.name)
        yield run(case, env, ceiling, settings)
        progress.advance(task)
