"""Recurrences with diagonal states as torch operators: opcheck, gradcheck, compile, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from saccade import Unsupported, recurrent
from saccade.recurrent.diagonal import CAUSAL_CONV1D, RG_LRU, SELECTIVE_SCAN
from saccade.testing import diagonal as catalogue
from saccade.testing import recurrent as run
from saccade.testing.recurrent import Sizes

torch = pytest.importorskip("torch")

FAMILIES = {family.name: family for family in (SELECTIVE_SCAN, RG_LRU, CAUSAL_CONV1D)}
OPS = [pytest.param(op, id=op.name) for op in catalogue.OPS]


@pytest.mark.parametrize("borders", [None, (0, 2, 2, 6)])
@pytest.mark.parametrize("op", OPS)
def test_gradcheck(op, borders) -> None:
    sizes = Sizes(1, 6, 2, 2, 3, 2, borders)
    given = {n: torch.from_numpy(x) for n, x in run.make(op, sizes, "float64").items() if x.size}
    integers = {n: given.pop(n) for n in ("cu_seqlens",) if n in given}
    if "a_param" in given:
        # where the root's slope is the published one
        given["a_param"] = given["a_param"].clamp(-2, 1)

    def function(*rows):
        return op.call(**dict(zip(given, rows, strict=True)), **integers, **op.options, return_state=True)

    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in given.values()])


@pytest.mark.parametrize("borders", [None, (0, 4, 9)])
@pytest.mark.parametrize("op", OPS)
def test_opcheck(op, borders) -> None:
    """The operator's schema, its fake, and its gradient, as torch requires them."""
    recurrent.causal_conv1d(torch.ones(1, 1, 1), torch.ones(1, 1))
    family = FAMILIES[op.name.partition("-")[0]]
    arrays = run.make(op, Sizes(1, 9, V=2, borders=borders), "float32")
    given = [None if n not in arrays else run.put(arrays[n]) for n in family.names]
    given = [x.requires_grad_() if x is not None and x.is_floating_point() else x for x in given]
    torch.library.opcheck(getattr(torch.ops.saccade, family.name).default, (*given, *family.Options(**op.options)))


def test_lengths_change_without_another_graph() -> None:
    compiled = torch.compile(recurrent.causal_conv1d, fullgraph=True, backend="eager", dynamic=True)
    weight = torch.randn(16, 4)
    for T in (8, 21, 34):
        x = torch.randn(1, T, 16)
        torch.testing.assert_close(compiled(x, weight), recurrent.causal_conv1d(x, weight))


def test_only_what_is_wanted_has_a_gradient() -> None:
    u, delta = torch.randn(2, 8, 6), torch.rand(2, 8, 6)
    A, B = -torch.rand(6, 3), torch.randn(2, 8, 3)
    B.requires_grad_()
    recurrent.selective_scan(u, delta, A, B, B).sum().backward()
    assert B.grad is not None
    assert u.grad is delta.grad is A.grad is None
    with torch.no_grad():
        assert not recurrent.selective_scan(u, delta, A, B, B).requires_grad


def test_parameters_keep_their_precision() -> None:
    """A in float32 with activations in bfloat16, and its gradient."""
    u, delta, B = (torch.randn(1, 9, n, dtype=torch.bfloat16) for n in (6, 6, 3))
    A = (-torch.rand(6, 3)).requires_grad_()
    y, state = recurrent.selective_scan(u, delta.abs(), A, B, B, return_state=True)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    y.float().sum().backward()
    assert A.grad.dtype == torch.float32


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(1, 4, 2, requires_grad=True)
    (first,) = torch.autograd.grad(recurrent.causal_conv1d(x, torch.ones(2, 3)).sum(), x, create_graph=True)
    with pytest.raises(Unsupported, match="second derivatives"):
        first.sum().backward()


def test_a_cell_at_a_time_in_a_model() -> None:
    """Mamba's mixer token by token: convolution, then scan, each with its state."""
    rng = np.random.default_rng(0)
    x, A = rng.standard_normal((2, 12, 8)).astype(np.float32), -np.ones((8, 4), np.float32)
    weight, B = rng.standard_normal((8, 4)).astype(np.float32), rng.standard_normal((2, 12, 4)).astype(np.float32)

    def mixer(x, B, conv, scan):
        y, conv = recurrent.causal_conv1d(x, weight, activation="silu", initial_state=conv, return_state=True)
        y, scan = recurrent.selective_scan(
            y, y, A, B, B, delta_softplus=True, initial_state=scan, return_state=True
        )  # fmt: skip
        return y, conv, scan

    whole, *last = mixer(x, B, None, None)
    conv = scan = None
    for t in range(12):
        y, conv, scan = mixer(x[:, t : t + 1], B[:, t : t + 1], conv, scan)
        np.testing.assert_array_equal(y[:, 0], whole[:, t])
    for got, want in zip((conv, scan), last, strict=True):
        np.testing.assert_array_equal(got, want)
