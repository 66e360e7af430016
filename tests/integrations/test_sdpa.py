"""scaled_dot_product_attention compared with torch's: shapes, masks, gradients, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as theirs

import saccade
from saccade.integrations.sdpa import scaled_dot_product_attention as ours

SHAPES = {
    "4-D": ((2, 4, 9, 16), (2, 4, 13, 16), (2, 4, 13, 24)),
    "3-D": ((3, 9, 16), (3, 13, 16), (3, 13, 16)),
    "5-D": ((2, 3, 4, 5, 8), (2, 3, 4, 6, 8), (2, 3, 4, 6, 8)),
    "batch": ((2, 4, 9, 16), (1, 4, 13, 16), (2, 4, 13, 16)),
    "one head": ((2, 4, 9, 16), (2, 1, 13, 16), (2, 1, 13, 16)),
    "heads of v": ((2, 4, 9, 16), (2, 1, 13, 16), (2, 4, 13, 16)),
    "head of query": ((2, 1, 9, 16), (2, 3, 13, 16), (2, 3, 13, 16)),
    "head of query, of v": ((2, 1, 9, 16), (2, 3, 13, 16), (2, 1, 13, 16)),
    "batch of 3-D": ((1, 9, 16), (3, 13, 16), (3, 13, 16)),
    "no query": ((2, 3, 0, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "no key": ((2, 3, 4, 8), (2, 3, 0, 8), (2, 3, 0, 8)),
    "no element": ((2, 3, 4, 0), (2, 3, 7, 0), (2, 3, 7, 8)),
    "no element of v": ((2, 3, 4, 8), (2, 3, 7, 8), (2, 3, 7, 0)),
    "no head": ((2, 0, 4, 8), (2, 0, 7, 8), (2, 0, 7, 8)),
    "no batch": ((0, 3, 4, 8), (0, 3, 7, 8), (0, 3, 7, 8)),
    "no 3-D batch": ((0, 4, 8), (0, 7, 8), (0, 7, 8)),
}
MASKS = {
    "none": None,
    "causal": "causal",
    "bool": lambda r, q, k: r(q, k) < 0.5,
    "bool of heads": lambda r, q, k: r(4, q, k) < 0.5,
    "bool of batch": lambda r, q, k: r(2, 1, q, k) < 0.5,
    "padding": lambda r, q, k: (torch.arange(k) < torch.tensor([[k], [5]]))[:, None, None],
    "numbers": lambda r, q, k: r(2, 4, q, k) - 0.5,
    "row": lambda r, q, k: r(1, k),
}


def made(shapes) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g).requires_grad_() for shape in shapes]


def check(shapes, **options) -> None:
    x, y = made(shapes), made(shapes)
    o, want = ours(*x, **options), theirs(*y, **options)
    torch.testing.assert_close(o, want, rtol=1e-4, atol=1e-5)
    do = torch.randn(want.shape)
    for a, b in zip(torch.autograd.grad(o, x, do), torch.autograd.grad(want, y, do), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def skip_wrong(name: str) -> None:
    """Skip a shape that this torch's own attention computes wrongly."""
    wrong = {"no head": ("2.12", "divides by the number of heads"), "no element": ("2.13", "returns 0")}
    version, does = wrong.get(name, ("0", ""))
    if torch.__version__ < version:
        pytest.skip(f"torch's own attention {does} for {name} before {version}")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, causal) -> None:
    skip_wrong(name)
    check(SHAPES[name], is_causal=causal)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name) -> None:
    make, g = MASKS[name], torch.Generator().manual_seed(1)
    if not callable(make):
        return check(SHAPES["4-D"], is_causal=make == "causal", scale=0.3)
    return check(SHAPES["4-D"], attn_mask=make(lambda *s: torch.rand(s, generator=g), 9, 13))


GROUPED = {
    "4-D": ((2, 6, 9, 16), (2, 2, 13, 16), (2, 2, 13, 16)),
    "3-D": ((6, 5, 8), (3, 7, 8), (3, 7, 8)),
    "fewer of value": ((2, 12, 5, 8), (2, 6, 7, 8), (2, 3, 7, 8)),
    "neither divides": ((2, 12, 5, 8), (2, 4, 7, 8), (2, 6, 7, 8)),
}


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_heads(name) -> None:
    check(GROUPED[name], enable_gqa=True)


@pytest.mark.parametrize("shape", [(5, 1), (3, 1, 1), (1, 1), (2, 1, 5, 1), (1, 7), (3, 5, 7), (7,)])
def test_the_gradient_of_a_mask_of_any_shape_that_broadcasts(shape) -> None:
    shapes = ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))
    x, y = made(shapes), made(shapes)
    masks = [torch.randn(shape, generator=torch.Generator().manual_seed(2)).requires_grad_() for _ in range(2)]
    o, want = ours(*x, attn_mask=masks[0]), theirs(*y, attn_mask=masks[1])
    torch.testing.assert_close(o, want, rtol=1e-4, atol=1e-5)
    do = torch.randn(want.shape)
    found, wanted = (torch.autograd.grad(a, [*b, m], do) for a, b, m in ((o, x, masks[0]), (want, y, masks[1])))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def test_all_weights_dropped() -> None:
    check(SHAPES["4-D"], dropout_p=1.0)
    assert not ours(*made(SHAPES["4-D"]), dropout_p=1).any()


@pytest.mark.parametrize("mask", [torch.zeros(0), torch.zeros(4, 0), torch.zeros(0, dtype=torch.bool)])
def test_masks_of_no_key(mask) -> None:
    if mask.ndim < 2 and torch.__version__ < "2.12":
        pytest.skip("torch's own attention takes no mask of one dimension before 2.12")
    check(SHAPES["no key"], attn_mask=mask)


@pytest.mark.parametrize("name", ["no query", "no key", "no element", "batch of 3-D", "head of query"])
def test_compiled(name) -> None:
    skip_wrong(name)
    given = [x.detach() for x in made(SHAPES[name])]
    torch.testing.assert_close(torch.compile(ours, backend="aot_eager", fullgraph=True)(*given), theirs(*given))


def test_a_mask_that_learns() -> None:
    x, y = made(SHAPES["4-D"]), made(SHAPES["4-D"])
    masks = [torch.randn(1, 4, 9, 13, generator=torch.Generator().manual_seed(2)).requires_grad_() for _ in range(2)]
    o, want = ours(*x, attn_mask=masks[0]), theirs(*y, attn_mask=masks[1])
    do = torch.randn(want.shape)
    (a,), (b,) = torch.autograd.grad(o, masks[:1], do), torch.autograd.grad(want, masks[1:], do)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_dropout_keeps_the_mean() -> None:
    q, k, v = (x.detach() for x in made(((1, 2, 4, 16), (1, 2, 64, 16), (1, 2, 64, 16))))
    torch.manual_seed(0)
    mean = sum(ours(q, k, v, dropout_p=0.3) for _ in range(400)) / 400
    torch.testing.assert_close(mean, theirs(q, k, v), rtol=0, atol=0.08)


@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        (SHAPES["4-D"], {"is_causal": True, "attn_mask": torch.ones(9, 13) > 0}, "with is_causal=True"),
        (((2, 6, 9, 16), (2, 2, 13, 16), (2, 2, 13, 16)), {}, r"\[6, 2, 2\] heads; expected the same"),
        (((2, 6, 9, 16), (2, 4, 13, 16), (2, 2, 13, 16)), {"enable_gqa": True}, "key and value to divide query's"),
        (SHAPES["4-D"], {"attn_mask": torch.zeros(9, 12)}, "broadcasts to"),
        (SHAPES["4-D"], {"dropout_p": 1.5}, "dropout_p is 1.5"),
        (((2, 3, 5, 8), (2, 3, 7, 9), (2, 3, 7, 9)), {}, "expected one E in query and key"),
        (((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 6, 8)), {}, "one S in key and value"),
        (((2, 3, 5, 8), (3, 3, 7, 8), (3, 3, 7, 8)), {}, "expected leading dimensions that broadcast"),
        (((9, 16), (13, 16), (13, 16)), {}, r"expected at least \[N, L, E\]"),
    ],
)
def test_refused(shapes, options, words) -> None:
    with pytest.raises(ValueError, match=words):
        ours(*made(shapes), **options)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        (
            "attn_mask",
            saccade.mask.causal(),
            r"attn_mask is the expression causal\(\); it belongs to",
        ),
        ("attn_mask", [[True]], "attn_mask is list; expected a torch tensor"),
        ("value", None, "value is NoneType; expected a torch tensor"),
        ("query", np.zeros((1, 1, 2, 4)), "query is ndarray; expected a torch tensor"),
    ],
)
def test_arguments_that_are_no_tensors(name: str, wrong: object, message: str) -> None:
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(TypeError, match=message):
        ours(**{"query": x, "key": x, "value": x, name: wrong})
