"""The cost of each strategy of distributed attention by a model of compute and links; `auto` chooses by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..cost import backward_flops, forward_flops
from ..errors import Unsupported
from ..problem import Problem
from .layout import runs_of
from .schedule import Schedule, make_schedule

STRATEGIES = ("ring", "ulysses", "gather")
# functions of the number of pairs and both head sizes
_FLOPS = {"forward": forward_flops, "backward": backward_flops}


class Speeds(NamedTuple):
    """flops: flop/s of one rank. link: bytes/s that it sends. latency: seconds until a message arrives.

    step: additional seconds per step of a ring, or per exchange. part: the share of flops that is reached in the parts
    of a ring's steps.
    """

    flops: float
    link: float
    latency: float
    step: float = 0.0
    part: float = 1.0


# four H200s over NVLink, from nvidia-h200x4-distributed.csv; processes of one machine over gloo
SPEEDS = {"cuda": Speeds(500e12, 250e9, 15e-6, 3e-4, 0.92), "cpu": Speeds(50e9, 1e9, 2e-4)}


class Estimate(NamedTuple):
    """Seconds of a forward and backward on the slowest rank, and bytes that it sends and stores besides its slices.

    reasons: why the strategy cannot be used.
    """

    strategy: str
    seconds: float
    sent: float
    stored: float
    reasons: Sequence[str] = ()


def estimates(schedule: Schedule, problem: Problem, speeds: Speeds | None = None) -> list[Estimate]:
    """Every strategy, the fastest first, unusable ones last. problem: of the slices of one rank."""
    speeds = speeds or SPEEDS["cuda" if problem.device.startswith("cuda") else "cpu"]
    every = [estimate(schedule, problem, speeds) for estimate in (_ring, _ulysses, _gather)]
    return sorted(every, key=lambda e: (bool(e.reasons), e.seconds))


def summary(problem: Problem, world: int, layout: str, device: str) -> dict[str, str]:
    """The estimates for a whole problem on `world` ranks as text, by name; "auto" chooses the first strategy.

    Raises ValueError if queries and keys are not the same positions, or for an unknown layout.
    """
    p = problem
    if p.Tq != p.Tk:
        raise ValueError(f"ranks divide one sequence, but there are {p.Tq} queries and {p.Tk} keys; give equal numbers")
    schedule = make_schedule(p.mask, p.B, p.Hq, p.Tk, runs_of(layout, world, p.Tk))
    speeds = SPEEDS["cpu" if device == "cpu" else "cuda"]
    share = schedule.pairs.sum(1)
    # the largest share of the pairs divided by the mean share
    lines = {"largest share": f"{share.max() * world / max(1.0, share.sum()):.3f} of the mean under layout {layout}"}
    for e in estimates(schedule, p, speeds):
        cost = f"{1e3 * e.seconds:.3f} ms, {e.sent / 2**20:.1f} MiB sent and {e.stored / 2**20:.1f} MiB stored per rank"
        lines[e.strategy] = "; ".join(e.reasons) or cost
    return lines


def _bytes(p: Problem) -> tuple[int, int, int]:
    # bytes of one token: query and output, keys and values, gradients of keys and values
    size, wide = {"float64": (8, 8), "float32": (4, 4)}.get(p.dtype, (2, 4))
    keys = p.B * p.Hk * (p.D + p.Dv)
    return p.B * p.Hq * (p.D + p.Dv) * size, keys * size, keys * wide


def _seconds(p: Problem, pairs: float, verb: str, speeds: Speeds) -> float:
    return _FLOPS[verb](p.B * p.Hq * pairs, p.D, p.Dv) / speeds.flops


def _ring(s: Schedule, p: Problem, speeds: Speeds) -> Estimate:
    n, (_, keys, grads) = max(s.counts), _bytes(p)
    total = sent = 0.0
    for step in range(s.world):
        ranks = np.arange(s.world)
        most = float(s.pairs[ranks, (ranks - step) % s.world].max())
        moves = any(s.moves(y, step) for y in range(s.world))
        returns = any(s.returns(y, step) for y in range(s.world))
        forward, backward = moves * n * keys, (moves * keys + returns * grads) * n
        sent += forward + backward
        for verb, size in (("forward", forward), ("backward", backward)):
            # messages travel during the work of the step
            there = size / speeds.link + speeds.latency if size else 0.0
            total += max(_seconds(p, most, verb, speeds) / speeds.part, there) + speeds.step
    stored = n * (2 * keys + 3 * grads) if s.world > 1 else 0
    return Estimate("ring", total, sent, stored)


def _ulysses(s: Schedule, p: Problem, speeds: Speeds) -> Estimate:
    reasons = why_not(p.Hq, p.Hk, s.world)
    n, (rows, keys, _) = max(s.counts), _bytes(p)
    # if there are fewer key heads than ranks, each goes to several ranks
    copies = max(1, s.world // p.Hk)
    size = n * (rows + keys * copies) * (s.world - 1) / s.world
    pairs = float(s.pairs.sum()) / s.world
    compute = sum(_seconds(p, pairs, verb, speeds) for verb in _FLOPS)
    # two exchanges per direction, without work meanwhile
    waits = 4 * (speeds.latency + speeds.step) if s.world > 1 else 0.0
    return Estimate("ulysses", compute + 2 * size / speeds.link + waits, 2 * size, n * (rows + keys * copies), reasons)


def _gather(s: Schedule, p: Problem, speeds: Speeds) -> Estimate:
    n, (_, keys, grads) = max(s.counts), _bytes(p)
    others = max(int(s.sees[:, y].sum() - s.sees[y, y]) for y in range(s.world))
    size = others * n * (2 * keys + grads)
    pairs = float(s.pairs.sum(1).max())
    compute = sum(_seconds(p, pairs, verb, speeds) for verb in _FLOPS)
    waits = 3 * (speeds.latency + speeds.step) if others else 0.0
    return Estimate("gather", compute + size / speeds.link + waits, size, sum(s.counts) * (keys + grads))


def why_not(Hq: int, Hk: int, world: int) -> list[str]:
    """Reasons why the heads cannot be divided among `world` ranks."""
    if Hq % world:
        return [f"{Hq} query heads cannot be divided among {world} ranks: use the ring"]
    share, group = Hq // world, Hq // Hk
    if share % group and group % share:
        return [f"{share} query heads per rank do not fit groups of {group} that share a key head: use the ring"]
    return []


def require(Hq: int, Hk: int, world: int) -> None:
    """Raises Unsupported with the reasons of `why_not`."""
    reasons = why_not(Hq, Hk, world)
    if reasons:
        raise Unsupported("distributed", reasons)
