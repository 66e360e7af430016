"""Second derivatives: gradgradcheck through o and lse, memory by blocks, what cannot leak, and no third ones."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import saccade
from saccade import Unsupported
from saccade import mask as masks

torch = pytest.importorskip("torch")
second = pytest.importorskip("saccade.frameworks.torch_second")
pairs = pytest.importorskip("saccade.frameworks.torch_pairs")

WIDE = torch.float64


def leaf(*shape: int, dtype: Any = WIDE) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


@pytest.fixture(autouse=True)
def same_numbers(seed: int) -> None:
    torch.manual_seed(seed)


def mask_cases() -> dict[str, masks.Mask | None]:
    dense = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 0, 0, 1]]).bool()
    return {
        "none": None,
        "causal": masks.causal(),
        "ragged": masks.causal() & masks.keys(torch.tensor([5, 2])),
        "empty rows": masks.dense(dense),
        "tiles": masks.tiles(torch.tensor([[True, False, True], [False, True, False]]), 2) | masks.prefix(1),
        "documents": ~masks.documents(torch.tensor([0, 0, 1, 1, 2])) | masks.causal(),
        "heads": masks.per_head([None, masks.causal(), masks.window(1, 0), masks.strided(2)]),
    }


def extra_cases() -> dict[str, tuple[list[torch.Tensor], dict[str, Any]]]:
    sinks, slopes = leaf(4), leaf(2, 4)
    bias, row = leaf(2, 1, 3, 5), leaf(1, 4, 1, 5)
    excluding = torch.randn(2, 1, 3, 5, dtype=WIDE)
    excluding[0, 0, 1] = excluding[1, 0, 0, 3] = -torch.inf
    return {
        "plain": ([], {}),
        "softcap": ([], {"softcap": 1.5, "scale": 0.8}),
        "sinks": ([sinks], {"sinks": sinks}),
        "bias": ([bias], {"bias": bias, "softcap": 2.0}),
        "bias of keys": ([row, sinks], {"bias": row, "sinks": sinks}),
        "bias that excludes": ([], {"bias": excluding}),
        "slopes": ([slopes, sinks], {"bias": saccade.alibi(slopes), "sinks": sinks, "softcap": 3.0}),
        "dropout": ([sinks], {"dropout": 0.4, "seed": 11, "bias": saccade.alibi(sinks)}),
    }


def check(mask: masks.Mask | None, more: list[torch.Tensor], options: dict[str, Any]) -> None:
    q, k, v = leaf(2, 3, 4, 3), leaf(2, 5, 2, 3), leaf(2, 5, 2, 2)

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        o, lse = saccade.attention(q, k, v, mask, return_lse=True, **options)
        return o, torch.where(torch.isinf(lse), 0.0, lse)

    assert torch.autograd.gradgradcheck(f, (q, k, v, *more), fast_mode=True)


@pytest.mark.parametrize("name", extra_cases())
def test_options(name: str) -> None:
    more, options = extra_cases()[name]
    check(masks.causal(), more, options)


@pytest.mark.parametrize("name", mask_cases())
def test_masks(name: str) -> None:
    sinks = leaf(4)
    check(mask_cases()[name], [sinks], {"sinks": sinks, "softcap": 2.0})


def test_every_entry_of_the_jacobian() -> None:
    q, sinks = leaf(1, 3, 2, 2), leaf(2)
    options = {"sinks": sinks, "softcap": 1.0}

    def f(q: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return saccade.attention(q, q, q, masks.causal(), return_lse=True, **options)

    assert torch.autograd.gradgradcheck(f, (q, sinks))


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = leaf(2, 37, 4, 8), leaf(2, 41, 2, 8), leaf(2, 41, 2, 8)
    sinks, bias = leaf(4), leaf(1, 4, 37, 41)
    mask = masks.causal() & (masks.window(9, 0) | masks.prefix(3))

    def curvature() -> list[torch.Tensor]:
        options = {"sinks": sinks, "bias": bias, "dropout": 0.2, "seed": 5}
        o, lse = saccade.attention(q, k, v, mask, return_lse=True, **options)
        first = torch.autograd.grad(o.sin().sum() + lse.cos().sum(), (q, k, v, sinks, bias), create_graph=True)
        return list(torch.autograd.grad(sum(x.square().sum() for x in first), (q, k, v, sinks, bias)))

    whole = curvature()
    monkeypatch.setattr(second, "BLOCK", 1)
    for a, b in zip(whole, curvature(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_element_test_is_the_lowered_masks() -> None:
    import numpy as np

    from saccade.mask.lowering import lower

    for mask in mask_cases().values():
        lowered = lower(mask, 2, 4, 3, 5)
        for b in range(2):
            for h, n in enumerate(lowered.head):
                at = pairs.Where(b, h, slice(h, h + 1), slice(0, 3), slice(0, 5))
                t, j = np.arange(3)[:, None], np.arange(5)[None]
                got = pairs._test(lowered.masks[n], at, torch.from_numpy(t), torch.from_numpy(j))
                np.testing.assert_array_equal(got.numpy(), lowered.masks[n].test(t, j, b))


def test_what_nobody_sees_does_not_leak() -> None:
    mask = masks.keys(torch.tensor([3, 5]))
    q, k, v = leaf(2, 3, 2, 4), leaf(2, 5, 2, 4), leaf(2, 5, 2, 4)
    with torch.no_grad():
        k[0, 3:], v[0, 3:] = float("nan"), float("inf")
    o = saccade.attention(q, k, v, mask)
    first = torch.autograd.grad(o.sin().sum(), (q, k, v), create_graph=True)
    for x in torch.autograd.grad(sum(g.square().sum() for g in first), (q, k, v)):
        assert torch.isfinite(x).all()
        assert not x[0, 3:].any()


@pytest.mark.parametrize("when", ["after the forward", "after the backward"])
def test_the_mask_is_that_of_the_forward(when: str) -> None:
    """What is written into its array later reaches neither the first nor the second derivative."""
    ids, (q, k, v), curvature = torch.tensor([0, 0, 1, 1, 1]), [leaf(2, 5, 2, 3) for _ in range(3)], []
    for mask in (masks.documents(ids), masks.documents([0, 0, 1, 1, 1])):
        o = saccade.attention(q, k, v, mask)
        if when == "after the forward":
            ids.zero_()
        first = torch.autograd.grad(o.sin().sum(), (q, k, v), create_graph=True)
        ids.zero_()
        curvature.append([*first, *torch.autograd.grad(sum(x.square().sum() for x in first), (q, k, v))])
    for a, b in zip(*curvature, strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_rounds_no_second_derivative() -> None:
    """A graph of float32 has the derivatives of float64 where its backward runs under autocast."""

    def curvature(dtype: torch.dtype) -> torch.Tensor:
        y = x.to(dtype).requires_grad_()
        o = saccade.attention(y, y, y, masks.causal())
        with torch.autocast("cpu", torch.bfloat16):
            first = torch.autograd.grad(o.sin().sum(), y, create_graph=True)[0]
            return torch.autograd.grad(first.square().sum(), y)[0]

    x = torch.randn(1, 6, 2, 8)
    got, want = curvature(torch.float32), curvature(WIDE)
    assert (got.double() - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_follow_float64(dtype: torch.dtype) -> None:
    x = torch.randn(1, 6, 2, 8).to(dtype)

    def curvature(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        first = torch.autograd.grad(saccade.attention(x, x, x, masks.causal()).sin().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), x)[0]

    got, ref = curvature(x), curvature(x.double())
    assert got.dtype is dtype
    assert (got.double() - ref).abs().max() <= 16 * torch.finfo(dtype).eps * ref.abs().max()


def test_a_gradient_penalty_trains() -> None:
    x, w = torch.randn(1, 8, 2, 4), leaf(4, 4, dtype=torch.float32)
    penalties = []
    for _ in range(20):
        y = (x @ w).requires_grad_()
        o = saccade.attention(y, y, x, masks.causal())
        penalty = torch.autograd.grad(o.square().sum(), y, create_graph=True)[0].square().sum()
        step = torch.autograd.grad(penalty, w)[0]
        with torch.no_grad():
            w -= 0.01 * step / step.norm()
        penalties.append(penalty.item())
    assert penalties[-1] < penalties[0]


def test_third_derivatives_are_refused() -> None:
    q = leaf(1, 3, 1, 2)
    first = torch.autograd.grad(saccade.attention(q, q, q).sin().sum(), q, create_graph=True)[0]
    again = torch.autograd.grad(first.square().sum(), q, create_graph=True)[0]
    with pytest.raises(Unsupported, match="third derivatives"):
        torch.autograd.grad(again.sum(), q)


PEAK = """
import sys, torch, saccade
from saccade import mask
from saccade.memory import resident
torch.set_num_threads(1)
def go(Tq, Tk, mask):
    q = torch.randn(1, Tq, 1, 8, requires_grad=True)
    k = torch.randn(1, Tk, 1, 8, requires_grad=True)
    o, lse = saccade.attention(q, k, k, mask, return_lse=True)
    first = torch.autograd.grad(o.sum() + lse.sum(), (q, k), create_graph=True)
    sum(x.square().sum() for x in first).backward()
    assert torch.isfinite(q.grad).all() and torch.isfinite(k.grad).all()
peak = lambda: resident()[1] / 2**20
go(64, 64, None)
before = peak()
go(*eval(sys.argv[1]))
print(peak() - before)
"""


@pytest.mark.sample(1)
@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not report the peak")
@pytest.mark.parametrize(
    "call", ["(32768, 32768, mask.causal() & mask.window(511, 0))", "(96, 32768, None)", "(32768, 64, None)"]
)
def test_memory_grows_with_length_times_block(call: str) -> None:
    done = subprocess.run([sys.executable, "-c", PEAK, call], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    # one matrix of scores alone would be 4096 MiB at T = 32768
    assert float(done.stdout) < 256
