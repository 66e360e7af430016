"""A rank that dies, hangs, or makes another call: every other rank ends with an error that names it and the step."""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from world import World, world

from saccade import mask as sm
from saccade import recurrent
from saccade.distributed import PeerError, ShardedKVCache, attention, decode, peers_of, ring_attention, unshard
from saccade.distributed import recurrent as over_ranks

LIMIT = 5.0
# seconds in which every rank must have given up: what one waits, what the next waits for it, and a loaded machine
PATIENCE = 5 * LIMIT


@pytest.fixture
def four() -> Iterator[World]:
    """A separate world, because it does not survive."""
    made = World(4)
    yield made
    made.close()


def call(n: int = 8, dtype: torch.dtype = torch.float64, mask: sm.Mask | None = None, heads: int = 2) -> None:
    """A ring over slices of n tokens."""
    q = torch.ones(1, n, heads, 4, dtype=dtype, requires_grad=True)
    ring_attention(q, q, q, mask).sum().backward()


def begin_together() -> None:
    """A first call without haste, for ranks that may still be starting; then the limit."""
    peers_of(limit=100.0)
    call()
    peers_of(limit=LIMIT)


def differs(kind: str) -> list[tuple[str, str, float]]:
    """Calls that are new to all, in which rank 2 differs: the difference, this rank's error, and the time until it."""
    begin_together()
    me = dist.get_rank() == 2
    wrong = {
        "heads 4/4": lambda: call(8, heads=4 if me else 2),
        "T 36": lambda: call(9 if me else 10),
        "dtype float32": lambda: call(11, dtype=torch.float32 if me else torch.float64),
        "mask causal(_)": lambda: call(12, mask=sm.causal() if me else None),
        "mask documents(@,_)": lambda: call(13, mask=sm.documents([0] * (20 + me) + [1] * (32 - me))),
    }
    if kind == "known":
        # the others made this call before, and send at once
        call(12)
        wrong = {"mask causal(_)": wrong["mask causal(_)"]}
    found: list[tuple[str, str, float]] = []
    for said, make in wrong.items():
        begin = time.monotonic()
        try:
            make()
            found.append((said, "", 0.0))
        except PeerError as error:
            found.append((said, str(error), time.monotonic() - begin))
    return found


@pytest.mark.parametrize("kind", ["new", "known"])
def test_another_call(four: World, kind: str):
    for rank, calls in enumerate(four.run(differs, kind)):
        for said, text, seconds in calls:
            assert text, (rank, said)
            assert seconds < PATIENCE
            if rank != 2:
                assert "rank 2 failed: it makes another call" in text
                assert f"{said} " in text


def stops(how: str) -> tuple[str, float, tuple[int, ...]]:
    """Rank 2 stops in its second call: this rank's error, the time until it, and the rank that it names."""
    begin_together()
    if how != "hangs in backward" and dist.get_rank() == 2:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(PATIENCE)
    q = torch.ones(1, 8, 2, 4, dtype=torch.float64, requires_grad=True)
    begin = time.monotonic()
    try:
        o = ring_attention(q, q, q)
        if dist.get_rank() == 2:
            time.sleep(PATIENCE)
        o.sum().backward()
    except PeerError as error:
        return str(error), time.monotonic() - begin, (error.rank, *error.silent)
    return "", 0.0, ()


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["dies", "hangs", "hangs in backward"])
def test_a_rank_that_stops(four: World, how: str):
    for rank, (fine, result) in enumerate(four.outcomes(stops, how)):
        if rank == 2:
            continue
        assert fine, result
        text, seconds, named = result
        assert "step" in text
        assert 2 in named, text
        assert seconds < PATIENCE
        assert ("backward" in text) == (how == "hangs in backward")


def alone() -> str:
    """Rank 0 makes a call that no other rank makes, and the others make a later one."""
    begin_together()
    try:
        if dist.get_rank() == 0:
            call()
            call()
        else:
            call()
            time.sleep(LIMIT * 1.5)
    except PeerError as error:
        return str(error)
    return ""


def test_a_call_too_many(four: World):
    text = four.run(alone)[0]
    assert "ring attention, step 0, on rank 0: rank 3 failed" in text
    assert f"nothing came for {LIMIT:g} s" in text


def late_mask() -> str:
    """Both masks are known to all; then rank 1 takes the other one."""
    begin_together()
    call(mask=sm.causal())
    try:
        call(mask=sm.causal() if dist.get_rank() == 1 else None)
    except PeerError as error:
        return str(error)
    return ""


def test_headers_tell_known_calls_apart(four: World):
    assert any("shapes, dtypes, masks or options differ" in text for text in four.run(late_mask))


# seconds until every rank has raised, and what a loaded machine adds
SOON = 2.0 + 3.0


def outcome(make: Callable[[], object]) -> tuple[str, str, float]:
    """(kind of error, its text, seconds) of a call that this rank may raise in."""
    begin = time.monotonic()
    try:
        make()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", time.monotonic() - begin


def rejects() -> dict[str, tuple[str, str, float]]:
    """Calls in which rank 1 alone gives an argument that it rejects, each first made by all as it should be."""
    begin_together()
    peers_of(limit=60.0)
    me = dist.get_rank() == 1
    x, long = (torch.ones(1, n, 4, 4, dtype=torch.float64) for n in (8, 9))
    cache = ShardedKVCache(1, 64, 4, 4, dtype=torch.float64)
    cache.append(x, x)

    def wrong(good: object, bad: object) -> object:
        return bad if me else good

    calls: dict[str, Callable[[Callable[..., Any]], object]] = {
        "ring": lambda pick: ring_attention(x, x, x, layout=pick("zigzag", "nonsense")),
        "ring, slices": lambda pick: ring_attention(x, pick(x, long), x),
        "ring, dtype": lambda pick: ring_attention(x, x, pick(x, x.float())),
        "gather": lambda pick: attention(x, x, x, strategy="gather", dropout=pick(0.0, 0.5)),
        "ulysses": lambda pick: attention(x, x, x, strategy="ulysses", mask=pick(None, "causal")),
        "strategy": lambda pick: attention(x, x, x, strategy=pick("ring", "nonsense")),
        "recurrence": lambda pick: over_ranks(recurrent.linear_attention, x, x, x, scale=pick(None, "large")),
        "decode": lambda pick: decode(x[:, :1], cache, softcap=pick(None, -1.0)),
        "unshard": lambda pick: unshard(pick(x, x.clone().requires_grad_()), layout="contiguous"),
    }
    found: dict[str, tuple[str, str, float]] = {}
    for name, make in calls.items():
        # as a call that no rank has made before
        found[name] = outcome(lambda make=make: make(wrong))
    # the group is as it was: calls that every rank makes rightly
    for name, make in calls.items():
        kind, text, _ = outcome(lambda make=make: make(lambda good, bad: good))
        assert not kind, (name, text)
    return found


def test_a_rank_that_rejects_its_argument_tells_all(four: World):
    for rank, found in enumerate(four.run(rejects)):
        for name, (kind, text, seconds) in found.items():
            assert kind, (rank, name)
            assert seconds < SOON, (rank, name, text)
            # these two compare all options before they look at them
            agreed_first = name in ("recurrence", "decode")
            assert (kind == "PeerError") == (rank != 1 or agreed_first), (rank, name, text)
            if rank != 1:
                said = "it makes another call" if agreed_first else "it raised "
                assert f"rank 1 failed: {said}" in text, (rank, name, text)


def rejects_later() -> tuple[str, str, float]:
    """A call that all have made before, and whose messages the others wait for: rank 1 rejects its argument."""
    begin_together()
    peers_of(limit=60.0)
    x = torch.ones(1, 8, 2, 4)
    ring_attention(x, x, x)
    return outcome(lambda: ring_attention(x, x, x, layout="nonsense" if dist.get_rank() == 1 else "zigzag"))


def test_ranks_that_wait_for_messages_learn_of_it(four: World):
    for rank, (kind, text, seconds) in enumerate(four.run(rejects_later)):
        assert seconds < SOON, (rank, text)
        assert "layout is 'nonsense'" in text
        assert (kind == "PeerError") == (rank != 1)


def uneven(layout: str, lengths: list[int]) -> tuple[str, str, float]:
    """Slices of these lengths, and no length=."""
    begin_together()
    peers_of(limit=60.0)
    x = torch.ones(1, lengths[dist.get_rank()], 2, 4)
    return outcome(lambda: ring_attention(x, x, x, layout=layout))


@pytest.mark.parametrize("lengths", [[16, 16, 16, 15], [20, 16, 16, 12]])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_uneven_slices_want_a_length(four: World, layout: str, lengths: list[int]):
    for rank, (kind, text, seconds) in enumerate(four.run(uneven, layout, lengths)):
        assert kind, (rank, text)
        assert seconds < SOON, (rank, text)
        assert "give length=" in text


def groups_after_their_end() -> int:
    """How many of three groups remain when they are destroyed after a ring, while its graph is still there."""
    groups, graphs = [], []
    for _ in range(3):
        group = dist.new_group([0, 1])
        q = torch.ones(1, 8, 2, 4, requires_grad=True)
        graphs.append(ring_attention(q, q, q, sm.causal(), group=group))
        graphs[-1].sum().backward()
        groups.append(weakref.ref(group))
        dist.destroy_process_group(group)
        del group
    return sum(group() is not None for group in groups)


def test_a_destroyed_group_is_released():
    """The threads of a group end with it; those of gloo abort the process if they end after the interpreter."""
    assert world(2).run(groups_after_their_end) == [0, 0]
