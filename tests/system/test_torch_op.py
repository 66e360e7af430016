"""torch: the operators, the eager gradient, dtypes, strides, autocast, checkpoints, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import saccade
from saccade import Unsupported, reference
from saccade import mask as masks
from saccade.operands import NO_SIDE, Options, Request, Side

torch = pytest.importorskip("torch")
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint
pytree = pytest.importorskip("torch.utils._pytree")
torch_op = pytest.importorskip("saccade.frameworks.torch_op")
torch_arguments = pytest.importorskip("saccade.frameworks.torch_arguments")

IDS = torch.tensor([0, 0, 1, 1, 1, 2, 2])


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


@pytest.fixture(autouse=True)
def same_numbers(seed: int) -> None:
    torch.manual_seed(seed)


@pytest.fixture
def qkv() -> tuple[torch.Tensor, ...]:
    return leaf(2, 5, 4, 8), leaf(2, 7, 2, 8), leaf(2, 7, 2, 6)


def operator_cases() -> dict[str, list]:
    sinks, slopes, bias, distances = leaf(4), leaf(2, 4), leaf(1, 4, 5, 7), leaf(1, 4, 18)
    sums = torch.rand(2, 7, 4, dtype=torch.float64).neg().cumsum(1).requires_grad_()
    banded, drop = masks.causal() & masks.window(3, 0), torch.tensor(5)
    requests = {
        "bands": Request(banded),
        "array": Request(masks.documents(IDS) & masks.causal(), NO_SIDE, Options(scale=0.3)),
        "sinks and softcap": Request(None, Side(sinks=sinks), Options(softcap=2.0)),
        "slopes": Request(masks.causal(), Side(slopes=slopes)),
        "bias": Request(None, Side(bias=bias)),
        "distances": Request(masks.causal(), Side(table=distances)),
        "running sums": Request(masks.causal(), Side(log_f=sums)),
        "dropout": Request(None, NO_SIDE, Options(dropout=0.3), drop),
    }
    return {name: torch_arguments.arguments(request) for name, request in requests.items()}


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_arrays_without_a_batch(qkv: tuple[torch.Tensor, ...], grad: bool, return_lse: bool) -> None:
    one = tuple(x[0].detach().requires_grad_(grad) for x in qkv)
    found = saccade.attention(*one, masks.causal(), return_lse=return_lse)
    expected = saccade.attention(*(x[:1] for x in qkv), masks.causal(), return_lse=True)
    torch.testing.assert_close(found, (expected[0][0], expected[1][0]) if return_lse else expected[0][0])


def plain(x: object) -> object:
    return x.detach() if isinstance(x, torch.Tensor) else x


# what has no second derivative
ONCE = ("distances", "running sums")


def side_of(rest: list) -> list:
    return rest[3 : 3 + len(Side._fields)]


@pytest.mark.parametrize("name", operator_cases())
def test_opcheck(name: str, qkv: tuple[torch.Tensor, ...]) -> None:
    rest, ops = operator_cases()[name], torch.ops.saccade
    torch.library.opcheck(ops.forward.default, (*qkv, *rest, False))
    o, lse = (x.detach() for x in ops.forward.default(*qkv, *rest, False))
    grads = [x is not None for x in side_of(rest)]
    do, dlse = torch.randn_like(o).requires_grad_(), torch.randn_like(lse).requires_grad_()
    of_backward = (do, dlse, None, *qkv, o, lse, None, *rest, grads)
    once = name in ONCE
    torch.library.opcheck(ops.backward.default, tuple(plain(x) for x in of_backward) if once else of_backward)
    cotangents = [x if x is None else torch.randn_like(x) for x in (*qkv, *side_of(rest))]
    of_second = [plain(x) for x in (*cotangents, do, dlse, *qkv, *rest)]
    if once:
        with pytest.raises(saccade.Unsupported, match="second derivatives with"):
            ops.second.default(*of_second, grads)
    else:
        torch.library.opcheck(ops.second.default, (*of_second, grads))


@pytest.mark.parametrize("name", [name for name in operator_cases() if name != "running sums"])
def test_the_operator_and_the_eager_call_agree(name: str, qkv: tuple[torch.Tensor, ...]) -> None:
    rest = operator_cases()[name]
    structure, ints, data, *_, seed, scale, softcap, dropout, _, _ = rest
    mask = masks.Mask.unflatten(structure, ints, data) if structure else None
    bias, slopes, sinks, distances, _ = side_of(rest)
    bias = saccade.alibi(slopes) if slopes is not None else bias
    if distances is not None:
        # as many as there are distances between 5 queries and 7 keys, of which the least comes first
        bias = saccade.relative(distances, origin=11)
    options = {"scale": scale, "softcap": softcap, "dropout": dropout, "seed": seed, "sinks": sinks, "bias": bias}
    one = torch.ops.saccade.forward.default(*qkv, *rest, False)
    two = saccade.attention(*qkv, mask, return_lse=True, **options)
    leaves = [x for x in (*qkv, *side_of(rest)) if x is not None]
    d_one, d_two = (torch.autograd.grad(o.sin().sum() + lse.cos().sum(), leaves) for o, lse in (one, two))
    for x, y in zip((*one, *d_one), (*two, *d_two), strict=True):
        assert torch.equal(x, y)


def differentiable(name: str) -> tuple[list[torch.Tensor], dict]:
    wide = torch.float64
    sinks, bias, row, slopes = (leaf(*s, dtype=wide) for s in ((4,), (2, 1, 3, 5), (1, 4, 1, 5), (2, 4)))
    return {
        "plain": ([], {}),
        "softcap": ([], {"softcap": 1.5}),
        "sinks": ([sinks], {"sinks": sinks, "scale": 0.7}),
        "bias": ([bias], {"bias": bias, "softcap": 2.0}),
        "bias of keys": ([row], {"bias": row}),
        "slopes": ([slopes, sinks], {"bias": saccade.alibi(slopes), "sinks": sinks}),
        "slopes of heads": ([sinks], {"bias": saccade.alibi(sinks)}),
        "dropout": ([], {"dropout": 0.4, "seed": 11}),
    }[name]


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    "name", ["plain", "softcap", "sinks", "bias", "bias of keys", "slopes", "slopes of heads", "dropout"]
)
def test_gradcheck(name: str, ragged: bool) -> None:
    more, options = differentiable(name)
    wide = torch.float64
    q, k, v = leaf(2, 3, 4, 3, dtype=wide), leaf(2, 5, 2, 3, dtype=wide), leaf(2, 5, 2, 2, dtype=wide)
    mask = masks.causal() & masks.keys(torch.tensor([5, 2])) if ragged else masks.causal()

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        o, lse = saccade.attention(q, k, v, mask, return_lse=True, **options)
        return o, torch.where(torch.isinf(lse), 0.0, lse)

    assert torch.autograd.gradcheck(f, (q, k, v, *more))


def test_only_lse_or_only_o_may_have_a_gradient(qkv: tuple[torch.Tensor, ...]) -> None:
    o, lse = saccade.attention(*qkv, masks.causal(), return_lse=True)
    of_lse = torch.autograd.grad(lse.sum(), qkv, retain_graph=True)
    of_o = torch.autograd.grad(o.sum(), qkv, retain_graph=True)
    of_both = torch.autograd.grad(lse.sum() + o.sum(), qkv)
    assert not of_lse[2].any()
    for a, b, c in zip(of_lse, of_o, of_both, strict=True):
        torch.testing.assert_close(a + b, c)


def test_three_axes_and_strides() -> None:
    packed = leaf(5, 3, 2, 8)
    q, k, v = packed.unbind(1)
    o, lse = saccade.attention(q, k, v, masks.causal(), return_lse=True)
    assert (o.shape, lse.shape) == ((5, 2, 8), (5, 2))
    copies = [x.detach().contiguous() for x in (q, k, v)]
    expected = saccade.attention(*(x[None] for x in copies), masks.causal())[0]
    assert torch.equal(o, expected)
    columns = torch.randn(1, 5, 8, 2).transpose(2, 3)
    assert torch.equal(saccade.attention(columns, columns, columns), saccade.attention(*[columns.contiguous()] * 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_come_back(dtype: torch.dtype) -> None:
    q = leaf(1, 4, 2, 8, dtype=dtype)
    sinks = leaf(2, dtype=dtype)
    o, lse = saccade.attention(q, q, q, masks.causal(), sinks=sinks, return_lse=True)
    assert (o.dtype, lse.dtype) == (dtype, torch.float64 if dtype is torch.float64 else torch.float32)
    o.sum().backward()
    assert (q.grad.dtype, sinks.grad.dtype) == (dtype, dtype)
    ref, _ = reference.forward(
        *[q.detach().double().numpy()] * 3, masks.causal(), sinks=sinks.detach().double().numpy()
    )
    error = np.abs(o.detach().double().numpy() - ref).max()
    assert error <= 8 * torch.finfo(dtype).eps * np.abs(ref).max()


def test_backward_without_autograd(qkv: tuple[torch.Tensor, ...]) -> None:
    sinks, slopes = leaf(4), leaf(4)
    options = {"sinks": sinks, "bias": saccade.alibi(slopes), "dropout": 0.2, "seed": torch.tensor(3)}
    o, lse = saccade.attention(*qkv, masks.causal(), return_lse=True, **options)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    expected = torch.autograd.grad((o, lse), (*qkv, slopes, sinks), (do, dlse))
    dq, dk, dv, more = saccade.attention_backward(do, *qkv, o, lse, masks.causal(), dlse=dlse, **options)
    for x, y in zip((dq, dk, dv, more["slopes"], more["sinks"]), expected, strict=True):
        assert torch.equal(x, y)
        assert not x.requires_grad


def test_dropout_draws_from_torchs_generator(qkv: tuple[torch.Tensor, ...]) -> None:
    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return saccade.attention(*qkv, dropout=0.5)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    large = (1 << 64) - 3
    same = saccade.attention(*qkv, dropout=0.5, seed=large)
    assert torch.equal(same, saccade.attention(*qkv, dropout=0.5, seed=large))


def test_a_changed_mask_array_makes_a_new_plan(qkv: tuple[torch.Tensor, ...]) -> None:
    ids = IDS.clone()
    mask = masks.documents(ids)
    before = saccade.attention(*qkv, mask)
    ids[:] = 0
    after = saccade.attention(*qkv, mask)
    assert not torch.equal(before, after)
    assert torch.equal(after, saccade.attention(*qkv))


def test_decode_and_forward_agree() -> None:
    cache = saccade.KVCache(2, 16, 2, 8, v_dim=6, dtype=torch.float32, fill=float("nan"))
    for tokens, lengths in ((5, [5, 3]), (1, None), (2, None)):
        cache.append(torch.randn(2, tokens, 2, 8), torch.randn(2, tokens, 2, 6), lengths=lengths)
        q = torch.randn(2, 2, 4, 8)
        o, lse = saccade.decode(q, cache, mask=masks.causal(), return_lse=True)
        for b, n in enumerate(cache.lengths.tolist()):
            one, lse_one = saccade.attention(q[b], cache.k[b, :n], cache.v[b, :n], masks.causal(), return_lse=True)
            torch.testing.assert_close(o[b], one)
            torch.testing.assert_close(lse[b], lse_one)


def test_autocast(qkv: tuple[torch.Tensor, ...]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, lse = saccade.attention(*qkv, masks.causal(), return_lse=True)
        wide = saccade.attention(*(x.double() for x in qkv))
    assert (o.dtype, lse.dtype, wide.dtype) == (torch.bfloat16, torch.float32, torch.float64)
    o.float().sum().backward()
    assert all(x.grad.dtype is torch.float32 for x in qkv)
    assert torch.equal(o, saccade.attention(*(x.bfloat16() for x in qkv), masks.causal()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool, qkv: tuple[torch.Tensor, ...]) -> None:
    def f(*x: torch.Tensor) -> torch.Tensor:
        return saccade.attention(*x, masks.causal() & masks.documents(IDS), dropout=0.5)

    torch.manual_seed(0)
    kept = torch.autograd.grad(f(*qkv).sin().sum(), qkv)
    torch.manual_seed(0)
    checkpoint(f, *qkv, use_reentrant=reentrant).sin().sum().backward()
    for x, y in zip(qkv, kept, strict=True):
        assert torch.equal(x.grad, y)


def test_negated_views(qkv: tuple[torch.Tensor, ...]) -> None:
    q = torch.complex(torch.zeros(2, 5, 4, 8), qkv[0].detach()).conj().imag
    assert q.is_neg()
    assert torch.equal(saccade.attention(q, *qkv[1:]), saccade.attention(-qkv[0], *qkv[1:]))


@pytest.mark.parametrize("which", range(5), ids=["q", "k", "v", "do", "dlse"])
def test_the_negative_bit(which: int, qkv: tuple[torch.Tensor, ...]) -> None:
    """Memory that holds minus the numbers of a tensor, in the layout that kernels read."""
    results = []
    for negated in (torch._neg_view, torch.neg):
        given = [x.detach() for x in (*qkv, torch.ones(2, 5, 4, 6), torch.ones(2, 5, 4))]
        given[which] = negated(given[which])
        *leaves, do, dlse = (x.requires_grad_() for x in given)
        o, lse = saccade.attention(*leaves, masks.causal(), return_lse=True)
        results.append([o, *torch.autograd.grad((o, lse), leaves, (do, dlse))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_storages_stay_resizable(qkv: tuple[torch.Tensor, ...]) -> None:
    sinks = leaf(4)
    saccade.attention(*qkv, sinks=sinks).sum().backward()
    for x in (*qkv, sinks):
        x.detach().untyped_storage().resize_(0)


def test_inference_mode(qkv: tuple[torch.Tensor, ...]) -> None:
    with torch.inference_mode():
        o = saccade.attention(*qkv, masks.documents(IDS.clone()))
    assert torch.equal(o, saccade.attention(*qkv, masks.documents(IDS)).detach())


def test_meta_tensors_have_shapes(qkv: tuple[torch.Tensor, ...]) -> None:
    o, lse = saccade.attention(*(x.to("meta") for x in qkv), masks.causal(), return_lse=True)
    assert (o.shape, lse.shape) == ((2, 5, 4, 6), (2, 5, 4))


def test_a_mask_is_a_pytree() -> None:
    mask = masks.causal() & masks.window(3, 0) & masks.documents(IDS)
    leaves, structure = pytree.tree_flatten({"mask": mask})
    assert leaves[:2] == [3, 0]
    assert leaves[2] is IDS
    assert pytree.tree_unflatten(leaves, structure)["mask"] == mask
    doubled = pytree.tree_map(lambda x: 2 * x, mask)
    assert str(doubled) == str(masks.causal() & masks.window(6, 0) & masks.documents(2 * IDS))


def test_a_backend_by_name_never_falls_back(qkv: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(Unsupported, match="triton"):
        saccade.attention(*qkv, backend="triton")
