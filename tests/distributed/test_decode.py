"""Keys on several ranks: decoding gives what one process does, and slices arrive where they are sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from world import world

import saccade
from saccade import mask as masks
from saccade.distributed import ContextParallel, ShardedKVCache, decode, move, peers_of, runs_of
from saccade.distributed.sharding import take
from saccade.models.llama import Llama, LlamaConfig
from saccade.testing.tensors import put

MASKS = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.causal() & masks.window(9, 0),
    "sink + window": masks.causal() & (masks.window(5, 0) | masks.global_tokens(2)),
    "strided": masks.causal() & masks.strided(3),
}
LENGTHS = {"even": (21, 21), "ragged": (21, 4), "few": (2, 1)}
WORLDS = (1, 2, 3, 4, 8)
# ranks that have slices, and ranks that are to have them
GROUPS = [((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((2, 0), (0, 1, 2, 3)), ((1,), (1,))]


def draw(seed: int, *shape: int) -> torch.Tensor:
    return put(np.random.default_rng(seed).standard_normal(shape))


def caches(lengths: tuple[int, ...]) -> tuple[Any, ShardedKVCache]:
    """One of one process and one over ranks with the same tokens, appended in pieces."""
    B, T = len(lengths), max(lengths)
    k, v = draw(1, B, T, 2, 6), draw(2, B, T, 2, 5)
    sizes: dict[str, Any] = {"v_dim": 5, "dtype": k.dtype, "device": k.device, "fill": float("nan")}
    one, many = saccade.KVCache(B, 40, 2, 6, **sizes), ShardedKVCache(B, 40, 2, 6, **sizes)
    stops = torch.tensor(lengths, device=k.device)
    one.append(k, v, stops)
    for first, stop in ((0, 1), (1, 7), (7, T)):
        part = slice(first, max(first, min(stop, T)))
        many.append(k[:, part], v[:, part], (stops - first).clamp(0, part.stop - first))
    assert many.lengths.tolist() == list(lengths)
    return one, many


def decoded(lengths: tuple[int, ...], queries: int, sinks: bool) -> dict[str, float]:
    """By mask, how far o and lse are from one process's, and whether ranks have the same bits."""
    one, many = caches(lengths)
    q, logits = draw(3, len(lengths), queries, 4, 6), draw(4, 4) if sinks else None
    found: dict[str, float] = {}
    for name, mask in MASKS.items():
        whole = saccade.decode(q, one, mask=mask, sinks=logits, softcap=9.0, return_lse=True)
        o, lse = decode(q, many, mask=mask, sinks=logits, softcap=9.0, return_lse=True)
        apart = [(a - b)[a.isfinite() & b.isfinite()].abs() for a, b in zip(whole, (o, lse), strict=True)]
        assert all(torch.equal(a.isfinite(), b.isfinite()) for a, b in zip(whole, (o, lse), strict=True))
        found[name] = max(float(x.max()) if x.numel() else 0.0 for x in apart)
        others = [torch.empty_like(o) for _ in range(dist.get_world_size())]
        dist.all_gather(others, o)
        assert all(torch.equal(x, o) for x in others)
    return found


def shortened(way: str) -> float:
    """How far o is from one process's after lengths were assigned, or changed in place, and more tokens appended."""
    one, many = caches((13, 9))
    q, more = draw(3, 2, 1, 4, 6), draw(4, 2, 3, 2, 6)
    apart = 0.0
    for lengths in ((4, 7), (0, 6)):
        for cache in (one, many):
            if way == "assigned":
                cache.lengths = torch.tensor(lengths)
            else:
                cache.lengths[0], cache.lengths[1] = lengths
        apart = max(apart, float((saccade.decode(q, one) - decode(q, many)).abs().max()))
        for cache in (one, many):
            cache.append(more, more[..., :5])
        assert many.lengths.tolist() == [n + 3 for n in lengths]
        apart = max(apart, float((saccade.decode(q, one) - decode(q, many)).abs().max()))
    return apart


@pytest.mark.parametrize("way", ["assigned", "in place"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_lengths_can_be_set(size: int, way: str) -> None:
    assert max(world(size).run(shortened, way)) <= 1e-12


@pytest.mark.sample(10)
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("size", WORLDS)
def test_decode(size: int, lengths: str, queries: int) -> None:
    for found in world(size).run(decoded, LENGTHS[lengths], queries, queries == 2):
        assert max(found.values()) <= 1e-12, found


def traffic() -> list[int]:
    _, many = caches((21, 21))
    peers, counts = peers_of(), list[int]()
    for _ in range(2):
        before, sent = peers.messages, peers.bytes
        decode(draw(3, 2, 1, 4, 6), many, mask=masks.causal())
        counts = [peers.messages - before, peers.bytes - sent]
    return counts


def test_one_small_message_to_each_rank() -> None:
    for messages, size in world(4).run(traffic):
        assert messages == 3
        # o [2, 1, 4, 5] and lse [2, 1, 4] in float64, behind a header, each at a multiple of 128 bytes
        assert size <= 3 * (128 + 384 + 128)


def in_codes() -> float:
    k, v, q = draw(1, 2, 17, 2, 8).float(), draw(2, 2, 17, 2, 8).float(), draw(3, 2, 1, 4, 8).float()
    one = saccade.KVCache(2, 20, 2, 8, dtype=k.dtype, device=k.device, quantised="int8")
    many = ShardedKVCache(2, 20, 2, 8, dtype=k.dtype, device=k.device, quantised="int8")
    for cache in (one, many):
        cache.append(k, v)
    with pytest.raises(saccade.Unsupported, match="quantised"):
        decode(q, many, mask=masks.window(3, 0))
    return float((decode(q, many) - saccade.decode(q, one)).abs().max())


def test_codes() -> None:
    assert max(world(3).run(in_codes)) <= 1e-6


def moved(length: int, layout: Any, source: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether slices of two tensors arrive as `shard` would have cut them for the ranks of target."""
    me, whole = dist.get_rank(), [draw(5, 2, length, 3), draw(6, 2, length, 2, 2).float()]
    runs, wanted = runs_of(layout, len(source), length), runs_of("striped", len(target), length)
    held = [take(x, runs[source.index(me)], 1) if me in source else x[:, :0] for x in whole]
    found = move(held, length=length, source=source, target=target, source_layout=layout)
    if me not in target:
        return found == []
    return all(torch.equal(x, take(w, wanted[target.index(me)], 1)) for x, w in zip(found, whole, strict=True))


@pytest.mark.parametrize(
    ("source", "target"), [((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((2, 0), (0, 1, 2, 3)), ((1,), (1,))]
)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_slices_move(layout: str, source: tuple[int, ...], target: tuple[int, ...]) -> None:
    for length in (0, 1, 23):
        assert all(world(4).run(moved, length, layout, source, target))


def generated(tokens: int) -> tuple[list[int], list[int]]:
    """Greedy tokens after a prompt, of one process and by a prefill round the ring and a decode over the same ranks."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 19, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Llama(LlamaConfig(**sizes, num_hidden_layers=2, max_position_embeddings=64)).double()
    prompt = torch.randint(0, 19, (1, 23), generator=torch.Generator().manual_seed(1))
    one = model.make_caches(1, 64)
    ranks = ContextParallel(23, layout="striped")
    held, many = model.make_caches(1, 23), [ShardedKVCache(1, 64, 2, 8, dtype=torch.float64) for _ in range(2)]
    told: list[list[int]] = [[], []]
    with torch.no_grad():
        logits = [model(prompt, caches=one)[:, -1], model(ranks.shard(prompt), caches=held, backend=ranks)[:, -1:]]
        for cache, part in zip(many, held, strict=True):
            n = int(part.lengths[0])
            cache.extend(part.k[:, :n], part.v[:, :n], 23)
        # the rank that has the last token tells all
        dist.broadcast(logits[1], 22 % dist.get_world_size())
        logits[1] = logits[1][:, -1]
        for _ in range(tokens):
            for n, keep in enumerate((one, many)):
                token = logits[n].argmax(-1)
                told[n].append(int(token))
                logits[n] = model(token[:, None], caches=keep)[:, -1]
    return told[0], told[1]


@pytest.mark.parametrize("size", [2, 3])
def test_a_model_decodes_over_ranks(size: int) -> None:
    found = world(size).run(generated, 12)
    assert all(one == many == found[0][0] for one, many in found)


def refused() -> list[str]:
    # 5 of 8 tokens are there: 4 more overrun the capacity, though not the share of every rank
    cache, found = ShardedKVCache(2, 8, 2, 4), list[str]()
    first = torch.ones(2, 5, 2, 4)
    cache.append(first, first)
    new = torch.full((2, 4, 2, 4), 7.0)
    fits = new[:, :2]
    before = cache.local.k.clone(), cache.local.v.clone()
    for call in (
        lambda: cache.append(new, new),
        lambda: cache.append(new, new, torch.tensor([4, 0])),
        lambda: cache.append(fits[:1], fits[:1]),
        lambda: cache.append(fits, fits[:, :, :1]),
        lambda: cache.append(fits, fits[:, :1]),
        lambda: cache.append(fits.double(), fits.double()),
        lambda: cache.append(fits, fits, torch.tensor([0.5, 1.0])),
        lambda: cache.append(fits, fits, torch.tensor([[1], [1]])),
        lambda: cache.append(fits, fits, torch.tensor([3, -1])),
        lambda: cache.append(fits, fits.clone().requires_grad_()),
    ):
        with pytest.raises((TypeError, ValueError, saccade.Unsupported), match=r"expected|detach") as caught:
            call()
        found.append(str(caught.value))
        assert cache.lengths.tolist() == [5, 5]
        assert sum(cache.local.lengths.tolist()) == 2 * len(range(cache.peers.rank, 5, cache.peers.world))
        assert torch.equal(cache.local.k, before[0])
        assert torch.equal(cache.local.v, before[1])
    cache.append(new, new, torch.tensor([3, 1]))
    assert cache.lengths.tolist() == [8, 6]
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_a_refused_append_is_refused_by_every_rank_and_changes_nothing(size: int) -> None:
    first, *others = world(size).run(refused)
    assert "sequence 0 holds 5 tokens and would take 4 more; expected at most 8" in first[0]
    assert all(other == first for other in others)


def wrong() -> list[str]:
    cache = ShardedKVCache(1, 8, 2, 4)
    part = torch.ones(1, 3, 2, 4)
    told: list[str] = []
    for call in (
        lambda: cache.extend(part, part, 9),
        lambda: move([part], length=9, source=[0, 1], target=[0], source_layout="zigzag"),
        lambda: move([part], length=9, source=[0, 0], target=[0], source_layout="zigzag"),
        lambda: move([part], length=9, source=[0, 1], target=[2], source_layout="zigzag"),
        lambda: move([], length=9, source=[0, 1], target=[0], source_layout="zigzag"),
    ):
        with pytest.raises(ValueError, match="expected") as caught:
            call()
        told.append(str(caught.value))
    part.requires_grad_()
    for call in (
        lambda: decode(part, cache),
        lambda: move([part], length=6, source=[0, 1], target=[0], source_layout="contiguous"),
    ):
        with pytest.raises(ValueError, match="has no gradient; call it on x"):
            call()
    return told


def test_wrong_slices_are_told() -> None:
    for rank, told in enumerate(world(2).run(wrong)):
        assert f"expected an empty cache and {(5, 4)[rank]} of 9 tokens" in told[0]
        assert "slices of [3] tokens" in told[1]
        assert "source is [0, 0]; expected different ranks of the group, 0 to 1" in told[2]
        assert "target is [2]; expected different ranks" in told[3]
        assert "tensors is empty" in told[4]
