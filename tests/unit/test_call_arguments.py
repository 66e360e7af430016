"""Other layouts, other libraries' keywords, arrays in place of masks, weights to look at."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import saccade
from saccade import layout, mask

torch = pytest.importorskip("torch")


def arrays(kind: str, rng: np.random.Generator) -> list[Any]:
    shapes = (2, 9, 4, 16), (2, 11, 2, 16), (2, 11, 2, 8), (2, 9, 4, 8)
    made = [rng.standard_normal(s) for s in shapes]
    return made if kind == "numpy" else [torch.tensor(x) for x in made]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("batch", [True, False])
def test_heads_first_is_a_view_of_the_same_call(kind: str, batch: bool, rng: np.random.Generator) -> None:
    q, k, v, do = (x if batch else x[0] for x in arrays(kind, rng))
    o, lse = saccade.attention(q, k, v, mask.causal(), return_lse=True)
    back = saccade.attention_backward(do, q, k, v, o, lse, mask.causal(), dlse=lse)
    turned = [x.swapaxes(-3, -2) for x in (q, k, v, do)]
    o_turned, lse_turned = saccade.attention(*turned[:3], mask.causal(), return_lse=True, layout="bhtd")
    assert o_turned.shape == o.swapaxes(-3, -2).shape
    assert (o_turned.swapaxes(-3, -2) == o).all()
    assert (lse_turned.swapaxes(-2, -1) == lse).all()
    again = saccade.attention_backward(
        turned[3], *turned[:3], o_turned, lse_turned, mask.causal(), dlse=lse_turned, layout="bhtd"
    )
    assert all((x.swapaxes(-3, -2) == y).all() for x, y in zip(again[:3], back[:3], strict=True))


def test_heads_first_gradients_and_decode(rng: np.random.Generator) -> None:
    q, k, v, _ = arrays("torch", rng)
    leaf = q.transpose(1, 2).clone().requires_grad_()
    saccade.attention(leaf, k.transpose(1, 2), v.transpose(1, 2), layout="bhtd").sum().backward()
    other = q.clone().requires_grad_()
    saccade.attention(other, k, v).sum().backward()
    assert torch.equal(leaf.grad.transpose(1, 2), other.grad)
    cache = saccade.KVCache.like(k, v)
    cache.append(k, v)
    o, lse = saccade.decode(q[:, :3].transpose(1, 2), cache, layout="bhtd", return_lse=True)
    expected, of_rows = saccade.decode(q[:, :3], cache, return_lse=True)
    assert torch.equal(o.transpose(1, 2), expected)
    assert torch.equal(lse.mT, of_rows)


def test_an_unknown_layout_is_refused(rng: np.random.Generator) -> None:
    q, k, v, _ = arrays("numpy", rng)
    with pytest.raises(ValueError, match="layout is 'bshd'; expected 'bthd'"):
        saccade.attention(q, k, v, layout="bshd")
    with pytest.raises(TypeError, match="layout is 'bhtd' for an array of type list"):
        saccade.attention([q], k, v, layout="bhtd")


def test_a_swapped_layout_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_warned", False)
    x = np.zeros((1, 8, 128, 16), np.float32)
    with pytest.warns(UserWarning, match="k has 8 tokens and 128 heads.*layout='bhtd'") as caught:
        saccade.attention(x, x, x)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saccade.attention(x, x, x, mask.causal())


@pytest.mark.parametrize("shape", [(1, 128, 8, 16), (1, 16, 8, 16), (1, 16, 48, 16), (1, 40, 128, 16)])
def test_ordinary_shapes_are_not_warned_of(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    monkeypatch.setattr(layout, "_warned", False)
    x = np.zeros(shape, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saccade.attention(x, x, x)


WRONG = {
    "is_causal": "write mask=saccade.mask.causal()",
    "causal": "write mask=saccade.mask.causal()",
    "attn_mask": "write mask=saccade.mask.from_dense",
    "key_padding_mask": r"write mask=saccade.mask.padding\(~x\)",
    "dropout_p": "write dropout=",
    "need_weights": "write saccade.attention_weights",
    "softmax_scale": "write scale=",
    "alibi_slopes": "write bias=saccade.alibi",
    "enable_gqa": "write the call without it",
    "softcp": "write softcap=",
    "zzz": "write one of q, k, v, mask, scale",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_keyword_names_the_right_one(name: str, rng: np.random.Generator) -> None:
    q, k, v, _ = arrays("numpy", rng)
    with pytest.raises(TypeError, match=rf"attention\(\) has no argument '{name}'; {WRONG[name]}"):
        saccade.attention(q, k, v, **{name: True})


def test_wrong_keywords_of_the_other_calls(rng: np.random.Generator) -> None:
    q, k, v, do = arrays("numpy", rng)
    cache = saccade.KVCache.like(k, v)
    for call, args in (
        (saccade.attention_backward, (do, q, k, v, do, q[..., 0])),
        (saccade.decode, (q, cache)),
        (saccade.paged_attention, (q[0], cache)),
        (saccade.attention_weights, (q, k)),
    ):
        with pytest.raises(TypeError, match=rf"{call.__name__}\(\) has no argument 'softmax_scale'; write scale=x"):
            call(*args, softmax_scale=0.1)
    with pytest.raises(TypeError, match="write causal="):
        saccade.decode(q, cache, is_causal=True)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_an_array_for_a_mask_names_the_constructors(kind: str, rng: np.random.Generator) -> None:
    q, k, v, _ = arrays(kind, rng)
    for shape in ((9, 11), (2, 11)):
        x = np.ones(shape, bool) if kind == "numpy" else torch.ones(shape, dtype=torch.bool)
        with pytest.raises(TypeError, match=r"mask\.from_dense\(array\) for booleans.*mask\.padding\(array\)"):
            saccade.attention(q, k, v, x)


MASKS = {
    "none": None,
    "causal": mask.causal(),
    "ragged": mask.causal() & mask.keys([11, 6]),
    "documents": mask.documents(np.array([0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2])),
    "heads": mask.per_head([mask.causal(), mask.full(), mask.window(2, 2), mask.strided(3)]),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("rows", [None, 5, slice(3, 7), [8, 2, 3, -9]])
def test_weights_are_those_of_attention(name: str, rows: Any, rng: np.random.Generator) -> None:
    q, k, v, _ = arrays("numpy", rng)
    options = {"scale": 0.3, "softcap": 3.0, "sinks": rng.standard_normal(4)}
    terms = [saccade.alibi(rng.random((2, 4))), saccade.relative(rng.standard_normal((4, 5)), 2)]
    options["bias"] = terms[0] + terms[1] + rng.standard_normal((1, 4, 9, 11))
    weights = saccade.attention_weights(q, k, MASKS[name], rows=rows, **options)
    o = saccade.attention(q, k, v, MASKS[name], **options)
    some = np.arange(9)[np.atleast_1d(rows)] if isinstance(rows, (int, list)) else np.arange(9)[rows or slice(None)]
    assert weights.shape == (2, 4, len(some), 11)
    np.testing.assert_allclose(np.einsum("bhtj,bjhd->bthd", weights, v.repeat(2, 2)), o[:, some], atol=1e-13)


def test_weights_of_gates_and_of_tensors(rng: np.random.Generator) -> None:
    q, k, v, _ = arrays("torch", rng)
    gates = saccade.gates(torch.tensor(-rng.random((2, 11, 4))))
    weights = saccade.attention_weights(q.transpose(1, 2), k.transpose(1, 2), mask.causal(), bias=gates, layout="bhtd")
    o = saccade.attention(q, k, v, mask.causal(), bias=gates)
    torch.testing.assert_close(torch.einsum("bhtj,bjhd->bthd", weights, v.repeat_interleave(2, 2)), o)
    narrow = saccade.attention_weights(q[0].bfloat16().requires_grad_(), k[0].bfloat16(), rows=-1)
    assert (narrow.shape, narrow.dtype, narrow.requires_grad) == ((4, 1, 11), torch.float32, False)
    torch.testing.assert_close(narrow.sum(-1), torch.ones(4, 1))


def test_rows_that_are_not_there(rng: np.random.Generator) -> None:
    q, k, *_ = arrays("numpy", rng)
    with pytest.raises(IndexError, match="rows has 9; expected numbers from -9 to 8"):
        saccade.attention_weights(q, k, rows=[0, 9])
    with pytest.raises(TypeError, match=r"rows is 0\.5; expected an integer"):
        saccade.attention_weights(q, k, rows=0.5)
    with pytest.raises(ValueError, match="differ in head size"):
        saccade.attention_weights(q, k[..., :3])


def test_weights_refuse_what_attention_refuses(rng: np.random.Generator) -> None:
    q, k, *_ = arrays("numpy", rng)
    log_f = -rng.random((2, 11, 4))
    with pytest.raises(ValueError, match=r"add & saccade\.mask\.causal"):
        saccade.attention_weights(q, k, mask.window(2, 2), bias=saccade.gates(log_f))
    with pytest.raises(ValueError, match="log_f has numbers from"):
        saccade.attention_weights(q, k, mask.causal(), bias=saccade.gates(-log_f))
    with pytest.raises(TypeError, match="mask is an array"):
        saccade.attention_weights(q, k, np.ones((9, 11), bool))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_cache_like_its_keys(kind: str, rng: np.random.Generator) -> None:
    _, k, v, _ = arrays(kind, rng)
    cache = saccade.KVCache.like(k, v, capacity=20)
    assert (cache.capacity, len(cache), bool(cache)) == (20, 0, True)
    cache.append(k, v, lengths=np.array([11, 4], np.int32) if kind == "numpy" else torch.tensor([11, 4]))
    assert len(cache) == 11
    assert "lengths=[11, 4]" in repr(cache)
    assert saccade.KVCache.like(k).capacity == 11
    with pytest.raises(ValueError, match=r"k, v have shapes \[\[11, 2, 16\], \[11, 2, 16\]\]; expected \[batch"):
        saccade.KVCache.like(k[0])
