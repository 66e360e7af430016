"""Heads for positions, gathered keys, and a mesh, compared with one process; and the choice among them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cases import ALL_MASKS, BIASES, MASKS, Case, all_errors
from world import world

from saccade import Unsupported
from saccade import mask as sm
from saccade.distributed.layout import runs_of
from saccade.distributed.schedule import make_schedule
from saccade.distributed.strategy import Speeds, estimates, summary
from saccade.problem import Problem

LAYOUTS = ("contiguous", "zigzag", "striped")


def close(size: int, cases: list[Case]) -> None:
    for rank in world(size).run(all_errors, cases):
        for case, found in zip(cases, rank, strict=True):
            assert max(found.values()) < 1e-12, (case, found)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_heads_for_positions(size: int):
    heads = ((4, 4), (4, 2), (4, 1), (8, 2))
    some = [Case(layout, mask, *h, strategy="ulysses") for layout, mask, h in itertools.product(LAYOUTS, MASKS, heads)]
    more = [Case("zigzag", mask, strategy="ulysses") for mask in ALL_MASKS]
    close(size, [*some, *more, Case("zigzag", "causal", 4, 2, sinks=True, strategy="ulysses")])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("strategy", ["ulysses", "auto"])
def test_what_belongs_to_whole_rows(size: int, strategy: str):
    """Biases and selected keys, also with key heads that several ranks read."""
    some = [Case(layout, "causal", 4, 2, strategy=strategy, bias=bias) for layout in LAYOUTS for bias in BIASES]
    some += [Case(layout, "selected", 4, Hk, strategy=strategy) for layout in LAYOUTS for Hk in (1, 2, 4)]
    close(size, [*some, Case("zigzag", "causal", 4, 2, strategy=strategy, bias="relative and gates", sinks=True)])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gathered_keys(size: int):
    some = [Case(layout, mask, strategy="gather") for layout, mask in itertools.product(LAYOUTS, ALL_MASKS)]
    close(size, [*some, Case("zigzag", "causal", sinks=True, strategy="gather")])


@pytest.mark.parametrize("size", [4, 8])
def test_mesh(size: int):
    some = [Case(layout, mask, 4, 2, 41, strategy="mesh") for layout, mask in itertools.product(LAYOUTS, MASKS)]
    close(
        size,
        [*some, Case("zigzag", "per head", strategy="mesh"), Case("zigzag", "causal", sinks=True, strategy="mesh")],
    )


@pytest.mark.parametrize("size", [3, 4])
def test_auto(size: int):
    close(size, [Case("zigzag", mask, 4, 4, strategy="auto") for mask in MASKS])


def refused() -> list[str]:
    import torch

    from saccade.distributed import attention

    q = torch.zeros(1, 3, 4, 8)
    with pytest.raises(Unsupported) as caught:
        attention(q, q, q, strategy="ulysses")
    with pytest.raises(ValueError, match="expected 'auto' or one of ring, ulysses, gather"):
        attention(q, q, q, strategy="tree")
    chosen = sm.select(torch.zeros(1, 4, 9, 1, dtype=torch.int64))
    for strategy in ("ring", "gather"):
        with pytest.raises(Unsupported, match=r"bias lies at whole rows.*strategy=\"ulysses\""):
            attention(q, q, q, bias=q, strategy=strategy)
        with pytest.raises(Unsupported, match=r"lists of selected keys.*strategy=\"ulysses\""):
            attention(q, q, q, chosen, strategy=strategy)
    return caught.value.reasons


def disagreed() -> str:
    import torch
    import torch.distributed as dist

    from saccade import alibi, gates, relative
    from saccade.distributed import PeerError, attention

    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match=r"log_f has shape \[1, 4, 4\]; expected \[B, n, Hq\] = \[1, 2, 4\]"):
        attention(q, q, q, sm.causal(), bias=gates(torch.zeros(1, 4, 4)))
    with pytest.raises(ValueError, match="select has lists for 2 key heads; expected Hk = 4"):
        attention(q, q, q, sm.select(torch.zeros(1, 2, 4, 1, dtype=torch.int64)))
    # heads are not cut out of a term that has too many
    for term, words in (
        (torch.zeros(1, 8, 4, 4), r"bias has shape \[1, 8, 4, 4\]"),
        (alibi(torch.zeros(8)), r"slopes of shape \[8\]"),
        (relative(torch.zeros(8, 3), 1), r"table of shape \[8, 3\]"),
    ):
        with pytest.raises(ValueError, match=words):
            attention(q, q, q, bias=term, strategy="ulysses")
    with pytest.raises(PeerError) as caught:
        attention(q, q, q, bias=relative(torch.zeros(4, 3), dist.get_rank()))
    return str(caught.value)


def test_ranks_must_agree_on_the_bias():
    assert all("table [4, 3] torch.float32 from" in told for told in world(2).run(disagreed))


def test_lists_of_keys_have_a_fingerprint_of_their_contents():
    import torch

    from saccade.distributed.call import fingerprint

    # longer than what is mixed at a time
    lists = torch.arange(2 * 2**15).remainder(7).to(torch.int32).view(1, 2, 2**14, 2)
    swapped, changed, flat = lists.clone(), lists.clone(), lists.view(1, 1, 2**14, 4)
    swapped[0, 1, [5, 6]] = lists[0, 1, [6, 5]]
    changed[0, 1, -1, -1] += 1
    whole = fingerprint(sm.causal() & sm.select(lists, 64))
    assert fingerprint(sm.causal() & sm.select(lists.numpy().astype(np.int64), 64)) == whole
    for other in (swapped, changed, flat):
        assert fingerprint(sm.causal() & sm.select(other, 64)) != whole
    assert fingerprint(sm.causal() & sm.select(lists, 32)) != whole


def mistaken() -> list[str]:
    import torch

    from saccade.distributed import ShardedKVCache, attention, decode, ring_attention

    q, found = torch.zeros(1, 2, 4, 8), list[str]()
    cache = ShardedKVCache(1, 8, 4, 8)
    cache.append(q, q)
    calls = [lambda mask: ring_attention(q, q, q, mask), lambda mask: decode(q[:, :1], cache, mask=mask)]
    calls += [
        lambda mask, strategy=strategy: attention(q, q, q, mask, strategy=strategy)
        for strategy in ("auto", "ring", "gather", "ulysses")
    ]
    for call in calls:
        for mask in ("causal", torch.ones(4, 4, dtype=torch.bool)):
            with pytest.raises(TypeError, match=r"expected None or an expression of saccade\.mask, such as") as caught:
                call(mask)
            found.append(str(caught.value))
    return found


def test_a_mask_of_another_type_is_named_with_what_makes_one():
    for found in world(2).run(mistaken):
        assert all("the text 'causal'" in text for text in found[::2])
        assert all("saccade.mask.from_dense(array)" in text for text in found[1::2])


def test_what_is_refused():
    assert world(3).run(refused)[0] == ["4 query heads cannot be divided among 3 ranks: use the ring"]


def estimated(mask: sm.Mask | None, layout: str, T: int, Hq: int, Hk: int, P: int = 4) -> dict[str, float]:
    schedule = make_schedule(mask, 1, Hq, T, runs_of(layout, P, T))
    problem = Problem(1, T // P, T // P, Hq, Hk, 128, 128, "bfloat16", device="cuda:0")
    return {e.strategy: e.seconds for e in estimates(schedule, problem, Speeds(500e12, 250e9, 1e-5)) if not e.reasons}


def test_the_model():
    long = estimated(sm.causal(), "zigzag", 1 << 16, 16, 16)
    # long slices hide what travels, so a balanced ring waits for nothing
    ideal = 14 * 128 * 16 * (1 << 31) / 4 / 500e12
    assert long["ring"] == pytest.approx(ideal, rel=0.02)
    assert min(long, key=long.__getitem__) == "ring"
    # without balance the last rank does nearly twice its share
    assert estimated(sm.causal(), "contiguous", 1 << 16, 16, 16)["ring"] > 1.6 * long["ring"]
    # short slices: one exchange of heads beats as many waits as ranks
    short = estimated(sm.causal(), "zigzag", 1 << 10, 16, 16)
    assert min(short, key=short.__getitem__) != "ring"
    assert "ulysses" not in estimated(None, "zigzag", 1 << 10, 6, 6)


def test_pairs_are_counted():
    schedule = make_schedule(sm.causal() & sm.window(9, 0), 1, 2, 64, runs_of("zigzag", 4, 64))
    assert schedule.pairs.sum() == np.minimum(np.arange(64) + 1, 10).sum()


def test_what_explain_prints():
    whole = Problem(1, 4096, 4096, 16, 16, 128, 128, "bfloat16", mask=sm.causal())
    rows = summary(whole, 4, "contiguous", "h200")
    assert rows["largest share"].startswith("1.75")
    assert (
        summary(whole, 3, "zigzag", "h200")["ulysses"] == "16 query heads cannot be divided among 3 ranks: use the ring"
    )
    with pytest.raises(ValueError, match="give equal numbers"):
        summary(Problem(1, 1, 4096, 16, 16, 128, 128), 4, "zigzag", "h200")
