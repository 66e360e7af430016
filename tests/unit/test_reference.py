"""The oracle compared with torch in float64 if torch is installed, and with textbook formulas."""

from __future__ import annotations

import numpy as np
import pytest

from saccade import mask as masks
from saccade import reference, reference_softmax
from saccade.philox import dropout_kept, philox

B, TQ, TK, HQ, HK, D, DV = 2, 5, 7, 4, 2, 6, 3


def draw(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    shapes = [(B, TQ, HQ, D), (B, TK, HK, D), (B, TK, HK, DV), (B, TQ, HQ, DV), (B, TQ, HQ)]
    return tuple(rng.standard_normal(shape) for shape in shapes)


def autograd(q, k, v, do, dlse, allowed, opt):
    """Attention written with torch's own operations, and its gradients by autograd."""
    torch = pytest.importorskip("torch")
    sides = ("bias", "slopes", "table", "log_f", "sinks")
    given = {name: opt[name] for name in sides if opt.get(name) is not None}
    leaves = {name: torch.tensor(x, requires_grad=True) for name, x in {"q": q, "k": k, "v": v, **given}.items()}
    scale, softcap, dropout = opt.get("scale"), opt.get("softcap"), opt.get("dropout", 0.0)
    heads = {name: leaves[name].transpose(1, 2) for name in "qkv"}
    k_, v_ = (heads[name].repeat_interleave(HQ // HK, 1) for name in "kv")
    s = heads["q"] @ k_.mT * (D**-0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if "bias" in leaves:
        s = s + leaves["bias"]
    if "slopes" in leaves:
        stop = torch.as_tensor(opt.get("stop", np.full(B, TK)))
        i = torch.arange(TQ)[:, None] + (stop - TQ).reshape(-1, 1, 1, 1)
        s = s - torch.atleast_2d(leaves["slopes"])[..., None, None] * (i - torch.arange(TK)).abs()
    i = torch.arange(TK - TQ, TK)
    if "table" in leaves:
        entry = (i[:, None] - torch.arange(TK) + opt["origin"]).clamp(0, leaves["table"].shape[-1] - 1)
        s = s + leaves["table"][..., entry]
    if "log_f" in leaves:
        c = leaves["log_f"].cumsum(1).transpose(1, 2)
        s = s + (c[..., i, None] - c[..., None, :])
    s = s.masked_fill(~torch.tensor(allowed), -1e30)
    extra = leaves["sinks"].reshape(-1, 1, 1).expand(B, HQ, TQ, 1) if "sinks" in leaves else s[..., :0]
    full = torch.cat([s, extra], -1)
    lse = full.logsumexp(-1)
    p = full.softmax(-1)[..., :TK]
    if dropout:
        p = p * torch.tensor(dropout_kept((B, HQ, TQ, TK), dropout, opt["seed"])) / (1 - dropout)
    o = (p @ v_).transpose(1, 2)
    ((o * torch.tensor(do)).sum() + (lse.transpose(1, 2) * torch.tensor(dlse)).sum()).backward()
    return o, lse.transpose(1, 2), {name: leaf.grad.numpy() for name, leaf in leaves.items()}


OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": (HQ,)},
    "bias": {"bias": (B, HQ, TQ, TK)},
    "bias of a key": {"bias": (1, HQ, 1, TK)},
    "bias of two axes": {"bias": (TQ, TK)},
    "slopes": {"slopes": (HQ,)},
    "slopes of a batch": {"slopes": (B, HQ), "stop": np.array([7, 5])},
    "table": {"table": (HQ, 3), "origin": 1},
    "table of a batch": {"table": (B, HQ, 9), "origin": -1},
    "gates": {"log_f": (B, TK, HQ)},
    "dropout": {"dropout": 0.3, "seed": 2**40 + 7},
    "all": {"softcap": 2.0, "sinks": (HQ,), "bias": (B, 1, TQ, TK), "slopes": (HQ,), "dropout": 0.3, "seed": 5},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_oracle_is_autograd(name: str, rng: np.random.Generator) -> None:
    q, k, v, do, dlse = draw(rng)
    opt = {key: rng.standard_normal(x) if isinstance(x, tuple) else x for key, x in OPTIONS[name].items()}
    allowed = masks.window(3, 0).evaluate(B, HQ, TQ, TK)
    o, lse, grads = autograd(q, k, v, do, dlse, allowed, opt)
    mine = reference.forward(q, k, v, masks.window(3, 0), **opt)
    np.testing.assert_allclose(mine[0], o.detach(), atol=1e-12)
    np.testing.assert_allclose(mine[1], lse.detach(), atol=1e-12)
    dq, dk, dv, extras = reference.backward(do, q, k, v, masks.window(3, 0), dlse=dlse, **opt)
    for key, got in {"q": dq, "k": dk, "v": dv, **extras}.items():
        assert got.shape == grads[key].shape
        np.testing.assert_allclose(got, grads[key], atol=1e-11, err_msg=key)
    assert {"q", "k", "v", *extras} == set(grads)


def test_oracle_is_torch_sdpa(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    q, k, v, *_ = draw(rng)
    mine, _ = reference.forward(q, k, v, masks.causal())
    allowed = torch.tensor(masks.causal().evaluate(B, HQ, TQ, TK))
    heads = [torch.tensor(x).transpose(1, 2) for x in (q, k, v)]
    theirs = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=allowed, enable_gqa=True)
    np.testing.assert_allclose(mine, theirs.transpose(1, 2), atol=1e-12)


def test_an_entry_of_minus_infinity_excludes_like_a_bias(rng: np.random.Generator) -> None:
    q, k, v, do, dlse = draw(rng)
    table = np.where(np.arange(4) < 3, rng.standard_normal((HQ, 4)), -np.inf)
    # the table as a bias: distances from 3 on are excluded
    distance = np.arange(TQ)[:, None] + TK - TQ - np.arange(TK)
    bias = table[:, np.clip(distance, 0, 3)]
    v[0, 0] = k[1, 0] = np.nan
    got, want = (reference.both(do, q, k, v, dlse=dlse, **x) for x in ({"table": table, "origin": 0}, {"bias": bias}))
    for a, b in zip((*got[0], *got[1][:3]), (*want[0], *want[1][:3]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-13)
    assert np.isfinite(got[0][0][:, 1:]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_excluded_keys_never_leak(bad: float, rng: np.random.Generator) -> None:
    q, k, v, do, dlse = draw(rng)
    mask = masks.keys(np.array([4, 2])) & masks.causal()
    want = (*reference.forward(q, k, v, mask), *reference.backward(do, q, k, v, mask, dlse=dlse)[:3])
    for b, stop in enumerate((4, 2)):
        k[b, stop:] = v[b, stop:] = bad
    # a query without a key: the bottom-right rule leaves rows 0 of batch 0 and 0..2 of batch 1 empty
    q[0, 0] = do[0, 0] = q[1, :3] = do[1, :3] = dlse[1, :3] = bad
    got = (*reference.forward(q, k, v, mask), *reference.backward(do, q, k, v, mask, dlse=dlse)[:3])
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_key_reaches_only_the_rows_that_see_it(rng: np.random.Generator) -> None:
    q, k, v, *_ = draw(rng)
    v[:, 3] = np.nan
    o, _ = reference.forward(q, k, v, masks.causal(0))
    assert np.isfinite(o[:, :3]).all()
    assert np.isnan(o[:, 3:]).all()


def test_empty_rows(rng: np.random.Generator) -> None:
    q, k, v, do, dlse = draw(rng)
    o, lse = reference.forward(q, k, v, masks.keys(0))
    assert not o.any()
    assert (lse == -np.inf).all()
    sinks = rng.standard_normal(HQ)
    o, lse = reference.forward(q, k, v, masks.keys(0), sinks=sinks)
    assert not o.any()
    np.testing.assert_allclose(lse, np.broadcast_to(sinks, lse.shape))
    dq, dk, dv, extras = reference.backward(do, q, k, v, masks.keys(0), dlse=dlse, sinks=sinks)
    assert not any(x.any() for x in (dq, dk, dv))
    np.testing.assert_allclose(extras["sinks"], dlse.sum((0, 1)))


@pytest.mark.parametrize("dims", [(0, 5, 5), (1, 0, 5), (1, 5, 0), (1, 1, 1)])
def test_sizes_of_nothing(dims: tuple[int, int, int]) -> None:
    b, tq, tk = dims
    q, k, v, do = (np.ones((b, t, h, 4)) for t, h in ((tq, 4), (tk, 2), (tk, 2), (tq, 4)))
    o, lse = reference.forward(q, k, v)
    assert [o.shape, lse.shape] == [(b, tq, 4, 4), (b, tq, 4)]
    grads = reference.backward(do, q, k, v)[:3]
    assert [g.shape for g in grads] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, "bfloat16"])
def test_standard_attention_rounds_to_its_dtype(dtype, rng: np.random.Generator) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    q, k, v, do, _ = (x.astype(dtype) for x in draw(rng))
    eps = float(ml_dtypes.finfo(dtype).eps)
    exact, _ = reference.forward(q, k, v)
    plain, _ = reference.forward(q, k, v, dtype=dtype)
    assert (plain.astype(dtype) == plain).all()
    assert 0 < abs(plain - exact).max() < 8 * eps
    for a, b in zip(reference.backward(do, q, k, v, dtype=dtype)[:3], reference.backward(do, q, k, v)[:3], strict=True):
        assert 0 < abs(a - b).max() < 32 * eps


def test_three_two_and_one_pass(rng: np.random.Generator) -> None:
    s, v = rng.standard_normal((3, 17)) * 30, rng.standard_normal((17, 4))
    p, lse = reference_softmax.softmax(s)
    np.testing.assert_allclose(p.sum(-1), 1)
    np.testing.assert_allclose(np.exp(s - lse).sum(-1), 1)
    np.testing.assert_allclose(reference_softmax.softmax_two_pass(s), p, atol=1e-15)
    for block in (1, 2, 5, 17, 100):
        o, lse_one = reference_softmax.attend_one_pass(s, v, block)
        np.testing.assert_allclose(o, p @ v, atol=1e-13)
        np.testing.assert_allclose(lse_one, lse[:, 0], atol=1e-13)


def test_philox_known_answers() -> None:
    # from the kat_vectors file of Random123
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    answers = {
        ((0, 0, 0, 0), 0): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ((ones,) * 4, ones << 32 | ones): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        (pi, 0x299F31D0A4093822): (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    }
    for (counter, seed), words in answers.items():
        assert tuple(int(w) for w in philox(np.array(counter, np.uint64), seed)) == words


def test_dropout_by_its_definition() -> None:
    kept = dropout_kept((2, 3, 4, 9), 0.25, 11)
    for b, h, i, j in [(0, 0, 0, 0), (1, 2, 3, 8), (1, 0, 2, 5), (0, 2, 1, 7)]:
        word = philox(np.array([i, j >> 2, b * 3 + h, 0]), 11)[j & 3]
        assert kept[b, h, i, j] == (word >= 0.25 * 2**32)
    assert abs(dropout_kept((4, 4, 64, 64), 0.25, 3).mean() - 0.75) < 0.01
