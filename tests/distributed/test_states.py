"""Recurrences over ranks: outputs, states and gradients are those of one process, and ranks send what is said."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from world import world

from saccade import recurrent
from saccade.distributed import peers_of, shard, unshard
from saccade.distributed import recurrent as over_ranks
from saccade.distributed.slices import Slice
from saccade.distributed.state_passing import TOKENS, bind
from saccade.distributed.states import on_slice
from saccade.testing import diagonal
from saccade.testing import recurrent as catalogue
from saccade.testing.compare import require
from saccade.testing.recurrent import Op, Sizes
from saccade.testing.tensors import get, put

OPS = [*catalogue.OPS, *diagonal.OPS]
NAMES = [op.name for op in OPS]
WORLDS = (1, 2, 3, 4, 8)
# tokens of the whole, and borders of packed sequences: across ranks, where ranks meet, of fewer tokens than ranks
CASES = {
    "rows": (37, None),
    "few": (5, None),
    "documents": (37, (0, 5, 18, 20, 37)),
    "documents at ranks": (32, (0, 8, 8, 24, 31, 32)),
    "one document": (37, (0, 37)),
}
# where documents begin in two rows of 37 tokens
BEGINS = ((0, 3, 21, 22), (0, 30))
Tensors = dict[str, torch.Tensor]


def public(op: Op) -> Any:
    """The function of saccade.recurrent that a row of the catalogue calls."""
    names = {"_linear_attention": "linear_attention", "conv": "causal_conv1d"}
    return getattr(recurrent, names.get(op.call.__name__, op.call.__name__))


def with_pairs(op: Op, call: Any) -> Any:
    """call with a state and its normaliser as one tensor, as the catalogue has them, both ways."""

    def joined(initial_state: Any = None, **given: Any) -> Any:
        if initial_state is not None and public(op) is recurrent.linear_attention and op.options.get("normalize", True):
            initial_state = initial_state[..., :-1], initial_state[..., -1]
        found = call(initial_state=initial_state, **given)
        if not isinstance(found, tuple):
            return found, None
        y, state = found
        return y, torch.cat([state[0], state[1][..., None]], -1) if isinstance(state, tuple) else state

    return joined


def gradients(call: Any, arrays: Tensors, cotangents: list[torch.Tensor], **options: Any) -> Tensors:
    """Outputs ("o", "state") and gradients ("dq", ...) of sum(outputs · cotangents)."""
    leaves = {n: x.clone().requires_grad_() for n, x in arrays.items()}
    outputs = [x for x in call(**leaves, **options) if x is not None]
    torch.autograd.backward(outputs, [d.to(x.dtype) for x, d in zip(outputs, cotangents, strict=False)])
    found = {n: x.detach() for n, x in zip(("o", "state"), outputs, strict=False)}
    return found | {f"d{n}": torch.zeros_like(x) if x.grad is None else x.grad for n, x in leaves.items()}


def made(op: Op, T: int, borders: Any, dtype: str) -> tuple[Tensors, list[torch.Tensor], dict[str, Any]]:
    """Arrays of the whole, cotangents of the output and the final state, and options."""
    sizes = Sizes(1 if borders else 2, T, 4, 2, 4, 3, borders)
    arrays = {n: put(x) for n, x in catalogue.make(op, sizes, dtype).items() if n != "cu_seqlens"}
    given = [put(x) for x in catalogue.cotangents(catalogue.expected(op, catalogue.make(op, sizes, dtype)), dtype)]
    if borders:
        arrays.pop("initial_state", None)
        return arrays, given[:1], {"cu_seqlens": torch.tensor(borders)}
    return arrays, given, {"return_state": True}


def on_ranks(number: int, case: str, dtype: str = "float64") -> tuple[Tensors, Tensors]:
    """The outputs and gradients of one process, and of all ranks put together."""
    op, (T, borders) = OPS[number], CASES[case]
    function, (arrays, given, options) = public(op), made(op, T, borders, dtype)
    cut = {n for n in TOKENS[function.__name__] if n in arrays and arrays[n].ndim > 2}
    whole = gradients(with_pairs(op, function), arrays, given, **op.options, **options)
    slices = {n: shard(x, layout="contiguous") if n in cut else x for n, x in arrays.items()}
    # every rank has the final state, whose gradient is to come from one
    first = dist.get_rank() == 0
    mine = [shard(given[0], layout="contiguous"), *(x if first else 0 * x for x in given[1:])]
    call = with_pairs(op, lambda **named: over_ranks(function, **named))
    return whole, together(gradients(call, slices, mine, **op.options, **options), cut)


def together(mine: Tensors, cut: set[str]) -> Tensors:
    """What ranks found as that of the whole: slices side by side, gradients of weights summed."""
    out = dict[str, torch.Tensor]()
    for name, x in mine.items():
        if name == "o" or name[1:] in cut:
            x = unshard(x, layout="contiguous")
        elif name != "state":
            dist.all_reduce(x)
        out[name] = x
    return out


def furthest(whole: Tensors, found: Tensors) -> float:
    """The largest difference in units of 1, or of an array's largest number where that is more."""
    assert whole.keys() == found.keys()
    pairs = [(whole[n], found[n]) for n in whole if whole[n].numel()]
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1)) for a, b in pairs)


def one_case(number: int, case: str) -> float:
    return furthest(*on_ranks(number, case))


@pytest.mark.sample(25)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", WORLDS)
def test_ranks_compute_what_one_process_does(name: str, case: str, size: int) -> None:
    assert max(world(size).run(one_case, NAMES.index(name), case)) <= 1e-12


def rows_of_documents(number: int) -> float:
    """Rows whose documents are given by positions: the slices of all rows on each rank, packed."""
    op, B, T = OPS[number], 2, 37
    function = public(op)
    arrays, given, _ = made(op, B * T, (0, B * T), "float64")
    cut = {n for n in TOKENS[function.__name__] if n in arrays and arrays[n].ndim > 2}
    borders = [row * T + begin for row, begins in enumerate(BEGINS) for begin in begins]
    packed = torch.tensor([*borders, B * T])
    whole = gradients(with_pairs(op, function), arrays, given, **op.options, cu_seqlens=packed)
    positions = torch.stack([torch.cat([torch.arange(e - b) for b, e in pairwise([*row, T])]) for row in BEGINS])
    # [1, B T, ...] as rows, cut, and one behind the other again
    mine = lambda x: shard(x.unflatten(1, (B, T))[0], layout="contiguous").flatten(0, 1)[None]  # noqa: E731
    piece = Slice.of_positions(shard(positions, layout="contiguous"))
    call = lambda **named: on_slice(bind(function, (), named), piece, None)[:1]  # noqa: E731
    found = gradients(call, {n: mine(x) if n in cut else x for n, x in arrays.items()}, [mine(given[0])], **op.options)
    rows = {n: x[0].unflatten(0, (B, -1)) if n == "o" or n[1:] in cut else x for n, x in found.items()}
    back = together(rows, cut)
    return furthest(whole, {n: x.flatten(0, 1)[None] if n == "o" or n[1:] in cut else x for n, x in back.items()})


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [4, 8])
def test_rows_of_documents(name: str, size: int) -> None:
    assert max(world(size).run(rows_of_documents, NAMES.index(name))) <= 1e-12


def in_bfloat16(number: int) -> list[Any]:
    op, (T, _) = OPS[number], CASES["rows"]
    arrays = catalogue.make(op, Sizes(2, T, 4, 2, 4, 3), "bfloat16")
    given = catalogue.cotangents(catalogue.expected(op, arrays), "bfloat16")
    return catalogue.compare(op, arrays, get(on_ranks(number, "rows", "bfloat16")[1]), "bfloat16", given)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", NAMES)
def test_sixteen_bits_by_the_rule(name: str) -> None:
    for mets in world(4).run(in_bfloat16, NAMES.index(name)):
        require(mets, f"{name} on 4 ranks")


def traffic(T: int) -> tuple[int, int, int]:
    """Messages of a forward, of a backward, and bytes of both."""
    peers, rows = peers_of(), {n: torch.ones(1, T, 2, 16, requires_grad=True) for n in "qkv"}
    decay = -torch.ones(1, T, 2)
    found: list[int] = []
    for _ in range(2):
        before, sent = peers.messages, peers.bytes
        y = over_ranks(recurrent.scalar_decay, *rows.values(), decay)
        found = [peers.messages - before]
        y.sum().backward()
        found = [*found, peers.messages - before - found[0], peers.bytes - sent]
    return found[0], found[1], found[2]


def test_one_exchange_whose_size_knows_no_length() -> None:
    state = 2 * 16 * 16 * 4
    for short, long in zip(world(4).run(traffic, 8), world(4).run(traffic, 800), strict=True):
        assert short == long
        assert short[:2] == (3, 3)
        assert 6 * state <= short[2] <= 6 * (state + 1024)


def wrong_calls() -> list[str]:
    x, cu = torch.ones(1, 6, 4), torch.tensor([0, 20])
    weight = torch.ones(4, 3)
    calls = [
        lambda: over_ranks(torch.add, x, x),
        lambda: over_ranks(recurrent.causal_conv1d, x.numpy(), weight),
        lambda: over_ranks(recurrent.causal_conv1d, x, weight, cu_seqlens=cu),
        lambda: over_ranks(recurrent.causal_conv1d, x, weight, cu_seqlens=torch.tensor([0, 9, 3, 12])),
        lambda: over_ranks(recurrent.causal_conv1d, x, weight, cu_seqlens=torch.tensor([0, 12]), return_state=True),
    ]
    told: list[str] = []
    for call in calls:
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        told.append(str(caught.value))
    return told


def test_wrong_calls_are_told() -> None:
    expected = ["expected one of saccade.recurrent", "x is ndarray", "slice of 6 tokens", "never decrease", "leave out"]
    for told in world(2).run(wrong_calls):
        for text, part in zip(told, expected, strict=True):
            assert part in text


def other_widths() -> str:
    from saccade.distributed import PeerError

    q = torch.ones(1, 4, 2, 4 + dist.get_rank())
    with pytest.raises(PeerError) as caught:
        over_ranks(recurrent.scalar_decay, q, q, q, torch.zeros(1, 4, 2))
    return str(caught.value)


def test_ranks_that_differ_are_named() -> None:
    for rank, told in enumerate(world(2).run(other_widths)):
        assert f"rank {1 - rank} failed" in told
        assert "q [1, 2, 4]" in told
    # calls of these ranks no longer agree
    world(2).close()


def no_number() -> bool:
    """Whether a document is finite if its neighbour on the previous rank contains NaN."""
    x = torch.ones(1, 12, 4)
    x[:, 2] = torch.nan
    rows = shard(x, layout="contiguous").requires_grad_()
    y = over_ranks(recurrent.rg_lru, rows, rows, rows, torch.zeros(4), cu_seqlens=torch.tensor([0, 6, 12]))
    y.sum().backward()
    fine = unshard(y.detach().isfinite() & rows.grad.isfinite(), layout="contiguous")
    return bool(fine[:, 6:].all()) and not bool(fine[:, 2:6].any())


def test_what_is_no_number_stays_in_its_document() -> None:
    assert all(world(3).run(no_number))


def test_laws_name_every_operator() -> None:
    assert set(TOKENS) == set(recurrent.__all__)
