"""Convert splash attention's masks from and to masks: with JAX's classes if it is installed, and with mock classes."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import saccade
from saccade import Unsupported
from saccade import mask as masks
from saccade.integrations.splash import MODULE, from_splash, to_splash
from saccade.testing.cases import MASKS

H, TQ, TK = 4, 70, 101


class StandIn:
    """What splash attention asks of a mask: attributes by position, pairs by slices, | and & with others."""

    fields = ()

    def __init__(self, *args) -> None:
        self.__dict__.update(zip(self.fields, args, strict=True))
        self.shape = args[0] if self.fields[0] == "shape" else args[0].shape

    def __getitem__(self, at) -> np.ndarray:
        return np.broadcast_to(self.rule(*np.ogrid[: self.shape[0], : self.shape[1]]), self.shape)[at]

    def __or__(self, other):
        return STAND_INS.LogicalOr(self, other)

    def __and__(self, other):
        return STAND_INS.LogicalAnd(self, other)


def sides(mask, t, j) -> np.ndarray:
    left, right = (np.inf if side is None else side for side in mask.window_size)
    return (t + mask.offset - left <= j) & (j <= t + mask.offset + right)


RULES = {
    "FullMask": (("shape",), lambda mask, t, j: t + j >= 0),
    "CausalMask": (("shape", "offset"), lambda mask, t, j: t + mask.offset >= j),
    "LocalMask": (("shape", "window_size", "offset"), sides),
    "ChunkedCausalMask": (
        ("shape", "chunk_size"), lambda mask, t, j: (t // mask.chunk_size == j // mask.chunk_size) & (t >= j),
    ),
    "NumpyMask": (("array",), lambda mask, t, j: mask.array),
    "LogicalOr": (("left", "right"), lambda mask, t, j: mask.left[:, :] | mask.right[:, :]),
    "LogicalAnd": (("left", "right"), lambda mask, t, j: mask.left[:, :] & mask.right[:, :]),
}  # fmt: skip
STAND_INS = SimpleNamespace(
    **{name: type(name, (StandIn,), {"fields": fields, "rule": rule}) for name, (fields, rule) in RULES.items()}
)


class MultiHeadMask:
    """One mask a head."""

    def __init__(self, masks) -> None:
        self.masks, self.shape = masks, (len(masks), *masks[0].shape)


STAND_INS.MultiHeadMask = MultiHeadMask


@pytest.fixture(params=["mocks", "jax"])
def splash(request, monkeypatch: pytest.MonkeyPatch):
    """The classes of splash attention's masks."""
    if request.param == "jax":
        pytest.importorskip("jax", reason="JAX is not installed")
        return pytest.importorskip(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, STAND_INS)
    return STAND_INS


def pairs(mask) -> np.ndarray:
    """bool [Tq, Tk], or [Hq, Tq, Tk]."""
    return np.stack([one[:, :] for one in mask.masks]) if len(mask.shape) == 3 else np.asarray(mask[:, :])


def evaluated(mask: masks.Mask, shape: tuple[int, ...]) -> np.ndarray:
    found = mask.evaluate(1, shape[0] if len(shape) == 3 else 1, *shape[-2:])[0]
    return np.broadcast_to(found, shape) if len(shape) == 3 else found[0]


@pytest.mark.parametrize("name", MASKS)
def test_every_kind_of_mask(splash, name) -> None:
    mask = masks.parse(MASKS[name])
    shape = (H, TQ, TK) if "per-head" in name else (TQ, TK)
    try:
        want = evaluated(mask, shape)
    except ValueError:
        with pytest.raises(ValueError, match="for this problem"):
            to_splash(mask, TQ, TK)
        return
    made = to_splash(mask, TQ, TK)
    assert made.shape == shape
    np.testing.assert_array_equal(pairs(made), want)
    np.testing.assert_array_equal(evaluated(from_splash(made), shape), want)


LAZY = {
    "full()": "FullMask",
    "causal()": "CausalMask",
    "causal(-7) & prefix(101)": "CausalMask",
    "window(13, 5)": "LocalMask",
    "window(13, None)": "LocalMask",
    "~causal()": "LocalMask",
    "causal() & window(16, 0)": "LocalMask",
    "window(2, 2) | ~causal(50)": "LogicalOr",
    "prefix(3) | causal()": "NumpyMask",
    "keys(0)": "NumpyMask",
    "documents(cu_seqlens=[0, 24, 48, 72]) & causal()": "NumpyMask",
}


@pytest.mark.parametrize("text", LAZY)
def test_what_splash_can_compute(splash, text) -> None:
    made = to_splash(masks.parse(text), TQ, TK)
    assert type(made).__name__ == LAZY[text]
    np.testing.assert_array_equal(pairs(made), evaluated(masks.parse(text), (TQ, TK)))


@pytest.mark.parametrize("shape", [(72, 72), (72, 90), (90, 72), (20, 20)], ids=str)
def test_chunks_there_and_back(splash, shape) -> None:
    one = splash.ChunkedCausalMask(shape, 24)
    mask = from_splash(one)
    np.testing.assert_array_equal(evaluated(mask, shape), pairs(one))
    back = to_splash(masks.per_head([mask, masks.causal(0), mask]), *shape)
    assert [type(head).__name__ for head in back.masks] == ["ChunkedCausalMask", "CausalMask", "ChunkedCausalMask"]
    np.testing.assert_array_equal(pairs(back)[0], pairs(one))
    assert back.masks[0] is back.masks[2]


def draw(r: random.Random, splash, shape: tuple[int, int], depth: int):
    """A mask of any classes and arguments."""

    def side() -> int | None:
        return r.choice((None, r.randint(-4, 6)))

    if depth and r.random() < 0.6:
        parts = (draw(r, splash, shape, depth - 1) for _ in range(2))
        return next(parts) | next(parts) if r.random() < 0.5 else next(parts) & next(parts)
    makers = (
        lambda: splash.FullMask(shape),
        lambda: splash.CausalMask(shape, r.randint(-5, 5)),
        lambda: splash.LocalMask(shape, (side(), side()), r.randint(-5, 5)),
        lambda: splash.ChunkedCausalMask(shape, r.randint(1, 9)),
        lambda: splash.NumpyMask(np.array([r.random() < 0.5 for _ in range(shape[0] * shape[1])]).reshape(shape)),
    )
    return r.choice(makers)()


def test_random_masks_there_and_back(splash, seed) -> None:
    r = random.Random(seed)
    for _ in range(150):
        shape = r.randint(1, 9), r.randint(1, 11)
        one = draw(r, splash, shape, 2)
        one = splash.MultiHeadMask([one, draw(r, splash, shape, 1)]) if r.random() < 0.2 else one
        mask = from_splash(one)
        np.testing.assert_array_equal(evaluated(mask, one.shape), pairs(one))
        np.testing.assert_array_equal(pairs(to_splash(mask, *shape)), pairs(one))


def test_what_cannot_be_read_is_refused(splash) -> None:
    class EverySecond(splash.FullMask):
        pass

    with pytest.raises(Unsupported, match=r"class EverySecond; expected FullMask.*NumpyMask"):
        from_splash(EverySecond((2, 2)))
    mask = splash.CausalMask((4, 4), 0)
    mask.q_sequence = np.array([0, 3, 1, 2])
    with pytest.raises(Unsupported, match="q_sequence"):
        from_splash(mask)


def test_without_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    with pytest.raises(Unsupported, match="pip install jax"):
        to_splash(masks.causal(), 3, 3)
    assert from_splash(STAND_INS.CausalMask((3, 3), 2)) == masks.causal(2)


@pytest.mark.parametrize("text", [
    "causal() & window(100, 0)", "causal() | prefix(70)", "per_head([window(9) | causal(-9), chunked(64) & causal()])",
])  # fmt: skip
def test_splash_attention_with_our_masks(text) -> None:
    """JAX's interpreted kernel compared with Saccade."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    kernel = pytest.importorskip(MODULE.replace("attention_mask", "attention_kernel"))
    classes = pytest.importorskip(MODULE)
    rng = np.random.default_rng(0)
    T, D, mask = 256, 128, masks.parse(text)
    q, k, v = (rng.standard_normal((1, T, 2, D), dtype=np.float32) for _ in range(3))
    made = to_splash(mask, T, T)
    made = made if len(made.shape) == 3 else classes.MultiHeadMask([made] * 2)
    attend = kernel.make_splash_mha_single_device(made, interpret=True)
    o = attend(*(jax.numpy.asarray(x[0].swapaxes(0, 1)) for x in (q * D**-0.5, k, v)))
    np.testing.assert_allclose(np.asarray(o).swapaxes(0, 1), saccade.attention(q, k, v, mask)[0], atol=1e-5)
