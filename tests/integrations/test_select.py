"""Selected keys on torch tensors: new lists at every step, torch.compile, vmap, and what is refused."""

from __future__ import annotations

import pytest

import saccade
from saccade import Unsupported
from saccade import mask as masks

torch = pytest.importorskip("torch")
T, HQ, HK, BLOCK = 64, 4, 2, 8


@pytest.fixture
def qkv():
    torch.manual_seed(0)
    return [torch.randn(1, T, heads, 16, requires_grad=True) for heads in (HQ, HK, HK)]


def lists(seed: int):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(-1, T // BLOCK, (1, HK, T, 3), generator=generator)
    # every query sees its own block, so that no row is empty
    indices[..., 0] = torch.arange(T) // BLOCK
    return indices


def by_torch(q, k, v, indices):
    """SDPA with the dense mask of the lists."""
    allowed = torch.from_numpy((masks.causal() & masks.select(indices, BLOCK)).evaluate(1, HQ, T, T).copy())
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
    return out.transpose(1, 2)


def test_lists_change_in_place(qkv) -> None:
    indices = lists(0)
    mask = masks.causal() & masks.select(indices, BLOCK)
    for step in range(3):
        indices.copy_(lists(step))
        o, wanted = saccade.attention(*qkv, mask), by_torch(*qkv, indices)
        torch.testing.assert_close(o, wanted)
        for got, expected in zip(
            torch.autograd.grad(o.square().sum(), qkv), torch.autograd.grad(wanted.square().sum(), qkv), strict=True
        ):
            torch.testing.assert_close(got, expected)


def test_compiled(qkv) -> None:
    attend = torch.compile(
        lambda q, k, v, i: saccade.attention(q, k, v, masks.causal() & masks.select(i, BLOCK)), fullgraph=True
    )
    for step in range(2):
        torch.testing.assert_close(attend(*qkv, lists(step)), by_torch(*qkv, lists(step)))


def test_vmap(qkv) -> None:
    q, k, v = (x.detach() for x in qkv)
    mask = masks.causal() & masks.select(lists(0), BLOCK)
    both = torch.vmap(lambda x: saccade.attention(x, k, v, mask))(torch.stack([q, 2 * q]))
    for x, o in zip((q, 2 * q), both, strict=True):
        torch.testing.assert_close(o, by_torch(x, k, v, lists(0)))


REFUSED = {
    "another number of key heads": (
        lambda q, k, v: saccade.attention(q, k, v, masks.select(torch.zeros(1, HQ, T, 1, dtype=torch.int32))),
        ValueError, "lists for 4 key heads; expected Hk = 2",
    ),
    "an index out of range": (
        lambda q, k, v: saccade.attention(q, k, v, masks.select(torch.full((1, HK, T, 1), T // BLOCK), BLOCK)),
        ValueError, "indices runs from 8 to 8, expected -1 to 7",
    ),
    "a bias": (
        lambda q, k, v: saccade.attention(q, k, v, masks.select(lists(0), BLOCK), bias=torch.zeros(T, T)),
        Unsupported, "selected keys with a bias are not computed: leave",
    ),
    "masks of heads": (
        lambda q, k, v: saccade.attention(q, k, v, masks.per_head([None] * HQ) & masks.select(lists(0), BLOCK)),
        ValueError, "select with per_head is not defined",
    ),
    "weights": (
        lambda q, k, v: saccade.attention_weights(q, k, masks.select(lists(0), BLOCK), rows=[3]),
        ValueError, "only attention, attention_backward, decode and paged_attention compute it",
    ),
    "second derivatives": (
        lambda q, k, v: torch.autograd.grad(
            torch.autograd.grad(
                saccade.attention(q, k, v, masks.select(lists(0), BLOCK)).square().sum(), q, create_graph=True
            )[0].sum(), k,
        ),
        Unsupported, "second derivatives with selected keys",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(qkv, name) -> None:
    call, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        call(*qkv)
