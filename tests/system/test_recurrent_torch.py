"""Recurrences as torch operators: opcheck, gradcheck, compile, refusals, and comparison with NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from saccade import Unsupported, recurrent
from saccade.testing import diagonal
from saccade.testing import recurrent as catalogue
from saccade.testing.recurrent import Sizes

torch = pytest.importorskip("torch")

OPS = [pytest.param(op, id=op.name) for op in catalogue.OPS]
EVERY = [pytest.param(op, id=op.name) for op in (*catalogue.OPS, *diagonal.OPS)]


def tensors(op, sizes, dtype="float64", grad=True):
    arrays = catalogue.make(op, sizes, dtype)
    return {n: catalogue.put(x).requires_grad_(grad and x.dtype.kind == "f") for n, x in arrays.items()}


@pytest.mark.parametrize("borders", [None, (0, 3, 9)])
@pytest.mark.parametrize("op", OPS)
def test_gradcheck(op, borders):
    given = tensors(op, Sizes(1, 9, 2, 1, 3, 2, borders))
    integers = {n: x for n, x in given.items() if not x.is_floating_point()}
    names = [n for n in given if n not in integers]

    def call(*rows):
        return op.call(**dict(zip(names, rows, strict=True)), **integers, **op.options, return_state=True, chunk=4)

    assert torch.autograd.gradcheck(call, [given[n] for n in names])


@pytest.mark.parametrize("decay", [None, "head", "channel"])
@pytest.mark.parametrize("rule", ["add", "delta"])
def test_opcheck(rule, decay):
    q, k, v = (torch.randn(2, 5, 2, n, dtype=torch.float64, requires_grad=True) for n in (3, 3, 4))
    g = {None: None, "head": -torch.rand(2, 5, 2), "channel": -torch.rand(2, 5, 2, 3)}[decay]
    g = None if g is None else g.double().requires_grad_()
    beta = torch.rand(2, 5, 2, dtype=torch.float64).requires_grad_() if rule == "delta" else None
    state = torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    recurrent.linear_attention(q, k, v)
    args = (q, k, v, g, beta, state, None, rule, "", False, True, None, 4, "", rule == "add", "", None)
    torch.library.opcheck(torch.ops.saccade.matrix_state.default, args)
    borders = torch.tensor([0, 2, 5])
    packed = [x[:1] if x is not None else None for x in (q, k, v, g, beta)]
    stored = "bfloat16" if rule == "add" else ""
    args = (*packed, state, borders, rule, "", False, True, None, 4, "", rule == "add", stored, None)
    torch.library.opcheck(torch.ops.saccade.matrix_state.default, args)


@pytest.mark.parametrize("op", EVERY)
def test_compiled_in_one_graph(op):
    torch.compiler.reset()
    given = tensors(op, Sizes(T=20), "float32")

    def call(rows):
        o, state = op.call(**rows, **op.options, return_state=True)
        return o.square().sum() + state.square().sum()

    call(given).backward()
    eager = {n: x.grad.clone() for n, x in given.items()}
    for x in given.values():
        x.grad = None
    torch.compile(call, fullgraph=True, backend="aot_eager")(given).backward()
    for n, x in given.items():
        torch.testing.assert_close(x.grad, eager[n], msg=n)


def test_lengths_change_without_another_graph():
    compiled = torch.compile(recurrent.scalar_decay, fullgraph=True, backend="eager", dynamic=True)
    for T in (8, 21, 34):
        q, k, v = (torch.randn(1, T, 2, 8) for _ in range(3))
        g = -torch.rand(1, T, 2)
        torch.testing.assert_close(compiled(q, k, v, g), recurrent.scalar_decay(q, k, v, g))


def test_only_what_is_wanted_has_a_gradient():
    q, k, v = (torch.randn(1, 8, 2, 4) for _ in range(3))
    g = -torch.rand(1, 8, 2)
    k.requires_grad_()
    recurrent.scalar_decay(q, k, v, g).sum().backward()
    assert k.grad is not None
    assert q.grad is v.grad is g.grad is None
    with torch.no_grad():
        assert not recurrent.scalar_decay(q, k, v, g).requires_grad


def test_second_derivatives_are_refused():
    q = torch.randn(1, 4, 1, 2, requires_grad=True)
    o = recurrent.linear_attention(q, q, q)
    (first,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(Unsupported, match="second derivatives"):
        first.sum().backward()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("op", OPS)
def test_numpy_gives_the_same(op, dtype):
    arrays = catalogue.make(op, Sizes(T=40), dtype)
    o, state = op.call(**arrays, **op.options, return_state=True)
    expected = catalogue.computed(op, arrays, "cpu")
    assert o.dtype == arrays["x" if "x" in arrays else "v"].dtype
    for got, name in ((o, "o"), (state, "state")):
        # the steps around a state space are NumPy's and torch's own
        close = np.testing.assert_allclose if "ssd" in op.name else np.testing.assert_array_equal
        options = {"rtol": 1e-2, "atol": 1e-2} if "ssd" in op.name else {}
        close(got.astype(np.float64), expected[name].astype(np.float64), **options)


def test_a_step_at_a_time_is_one_call():
    q, k, v = (torch.randn(2, 12, 3, 8) for _ in range(3))
    g, beta = -torch.rand(2, 12, 3), torch.rand(2, 12, 3)
    k = torch.nn.functional.normalize(k, dim=-1)
    whole, last = recurrent.gated_delta_rule(q, k, v, beta, g, return_state=True)
    state, steps = None, []
    for t in range(12):
        rows = (x[:, t : t + 1] for x in (q, k, v, beta, g))
        o, state = recurrent.gated_delta_rule(*rows, initial_state=state, return_state=True)
        steps.append(o)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)


def test_ranks_exchange_float32_states() -> None:
    distributed = pytest.importorskip("saccade.distributed")
    with pytest.raises(ValueError, match="return_state is 'bfloat16'; expected True or False: ranks exchange"):
        distributed.recurrent(recurrent.scalar_decay, return_state="bfloat16")


def test_ranks_refuse_a_beta_per_value_channel() -> None:
    passing = pytest.importorskip("saccade.distributed.state_passing")
    x = torch.ones(1, 5, 2, 4)
    with pytest.raises(ValueError, match=r"beta has shape \[1, 5, 2, 4\]; expected \[B, n, H\], a beta per head, over"):
        passing.bind(recurrent.gated_delta_rule, (x, x, x, x), {})


@pytest.mark.parametrize("op", EVERY)
def test_forward_mode_is_refused(op) -> None:
    """torch would take every tangent for zero."""
    given = {n: x.float().detach() for n, x in tensors(op, Sizes(T=9), "float32").items()}
    first, *rest = given
    others = {n: given[n] for n in rest}

    def through(x):
        return op.call(**{first: x}, **others, **op.options)

    with pytest.raises(Unsupported, match="forward mode of recurrences is not computed"):
        torch.func.jvp(through, (given[first],), (torch.ones_like(given[first]),))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(Unsupported, match="forward mode of recurrences"):
        through(torch.autograd.forward_ad.make_dual(given[first], torch.ones_like(given[first])))
