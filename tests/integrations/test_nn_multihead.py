"""saccade.nn.MultiheadAttention compared with torch's: outputs, weights and gradients for all that torch accepts."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

import saccade
from saccade import mask as masks
from saccade.nn import MultiheadAttention

B, H, E, TQ, TK = 2, 2, 16, 5, 7

# torch says that booleans together with numbers are deprecated
pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched")

SETTINGS = {
    "plain": {},
    "no bias": {"bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero": {"add_zero_attn": True},
    "bias_kv and zero": {"add_bias_kv": True, "add_zero_attn": True},
    "kdim, vdim": {"kdim": 12, "vdim": 10, "dropout": 0.5},
    "all": {"kdim": 12, "vdim": 10, "bias": False, "add_bias_kv": True, "add_zero_attn": True},
}
LAYOUTS = ("batch first", "batch second", "no batch")
MASKS = ("none", "bool", "bool of heads", "float", "float of heads", "causal", "causal float", "false hint")
PADDING = ("none", "bool", "float")


def pair(**options) -> tuple[torch.nn.MultiheadAttention, MultiheadAttention]:
    """torch's module and ours with the same parameters, biases other than 0, in eval mode."""
    theirs = torch.nn.MultiheadAttention(E, H, dtype=torch.float64, **options)
    ours = MultiheadAttention(E, H, dtype=torch.float64, **options)
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.5)
    ours.load_state_dict(theirs.state_dict())
    return theirs.eval(), ours.eval()


def attn_mask(kind: str, batch: int) -> dict:
    if kind == "none":
        return {}
    later = torch.ones(TQ, TK, dtype=torch.bool).triu(1)
    if kind == "causal":
        return {"attn_mask": later, "is_causal": True}
    if kind == "causal float":
        return {"attn_mask": torch.zeros(TQ, TK).masked_fill(later, float("-inf")).double(), "is_causal": True}
    shape = (batch * H, TQ, TK) if "heads" in kind else (TQ, TK)
    if kind.startswith("float"):
        return {"attn_mask": torch.randn(shape, dtype=torch.float64).requires_grad_()}
    hidden = torch.rand(shape) < 0.4
    # torch gives NaN where nothing is seen
    hidden[..., 0] = False
    return {"attn_mask": hidden, "is_causal": kind == "false hint"}


def padding(kind: str, shape: tuple[int, ...]) -> dict:
    if kind == "none":
        return {}
    if kind == "float":
        return {"key_padding_mask": torch.randn(shape, dtype=torch.float64).requires_grad_()}
    hidden = torch.rand(shape) < 0.4
    hidden[..., 0] = False
    return {"key_padding_mask": hidden}


def results(module, arrays, options) -> list[torch.Tensor | None]:
    """The output, the weights, and gradients of arrays, parameters and masks."""
    arrays = [x.detach().requires_grad_() for x in arrays]
    o, weights = module(*arrays, **options)
    learn = [x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    generator = torch.Generator().manual_seed(0)
    loss = sum((x * torch.randn(x.shape, generator=generator)).sum() for x in (o, weights) if x is not None)
    leaves = [*arrays, *module.parameters(), *learn]
    return [o, weights, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)]


def check(theirs, ours, arrays, options) -> None:
    for need in (
        {"need_weights": False},
        {"need_weights": True},
        {"need_weights": True, "average_attn_weights": False},
    ):
        pairs = zip(results(ours, arrays, options | need), results(theirs, arrays, options | need), strict=True)
        for got, want in pairs:
            assert (got is None) == (want is None)
            if got is not None:
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.sample(60)
@pytest.mark.parametrize("padded", PADDING)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SETTINGS)
def test_torchs_module(name, layout, kind, padded, seed) -> None:
    torch.manual_seed(seed)
    theirs, ours = pair(**SETTINGS[name], batch_first=layout == "batch first")
    lone = layout == "no batch"
    sizes = [(TQ, E), (TK, theirs.kdim), (TK, theirs.vdim)]
    batch = {"batch first": lambda T, n: (B, T, n), "batch second": lambda T, n: (T, B, n)}.get(layout, lambda *s: s)
    arrays = [torch.randn(batch(*size), dtype=torch.float64) for size in sizes]
    options = attn_mask(kind, 1 if lone else B) | padding(padded, (TK,) if lone else (B, TK))
    check(theirs, ours, arrays, options)


@pytest.mark.parametrize("batch_first", [False, True])
def test_self_attention_and_shared_keys(batch_first, seed) -> None:
    torch.manual_seed(seed)
    theirs, ours = pair(batch_first=batch_first)
    x, y = torch.randn(2, B, TQ, E, dtype=torch.float64)
    for arrays in ((x, x, x), (x, y, y)):
        got, want = ours(*arrays)[0], theirs(*arrays, need_weights=False)[0]
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    assert ours(x, x, x)[1] is None
    assert theirs(x, x, x)[1] is not None
    with torch.no_grad():
        # torch's fused operator
        torch.testing.assert_close(ours(x, x, x, need_weights=True), theirs(x, x, x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["plain", "bias_kv and zero"])
def test_causal_needs_no_mask(name, seed) -> None:
    torch.manual_seed(seed)
    theirs, ours = pair(**SETTINGS[name], batch_first=True)
    arrays = [torch.randn(B, T, E, dtype=torch.float64) for T in (TQ, TK, TK)]
    later = torch.ones(TQ, TK, dtype=torch.bool).triu(1)
    want = theirs(*arrays, attn_mask=later, need_weights=False)[0]
    torch.testing.assert_close(ours(*arrays, is_causal=True)[0], want, rtol=1e-9, atol=1e-11)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        theirs(*arrays, is_causal=True)


def test_a_mask_of_ours(seed) -> None:
    torch.manual_seed(seed)
    theirs, ours = pair(batch_first=True)
    x = torch.randn(B, TQ, E, dtype=torch.float64)
    seen = masks.causal() & masks.window(2, 0)
    distance = torch.arange(TQ)[:, None] - torch.arange(TQ)
    hidden = (distance < 0) | (distance > 2)
    got, want = ours(x, x, x, mask=seen, need_weights=True), theirs(x, x, x, attn_mask=hidden)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    both = ours(x, x, x, mask=masks.window(2, None), is_causal=True)[0]
    torch.testing.assert_close(both, want[0], rtol=1e-9, atol=1e-11)


def test_rows_that_see_nothing_are_zero(seed) -> None:
    torch.manual_seed(seed)
    theirs, ours = pair(batch_first=True)
    x = torch.randn(B, TQ, E, dtype=torch.float64, requires_grad=True)
    hidden = torch.zeros(TQ, TQ, dtype=torch.bool)
    hidden[1] = True
    (o, weights), (want, theirs_weights) = (m(x, x, x, attn_mask=hidden, need_weights=True) for m in (ours, theirs))
    rest = [0, 2, 3, 4]
    torch.testing.assert_close(o[:, rest], want[:, rest], rtol=1e-9, atol=1e-11)
    assert want[:, 1].isnan().all()
    assert theirs_weights[:, 1].isnan().all()
    assert torch.equal(o[:, 1], ours.out_proj.bias.expand(B, E))
    assert not weights[:, 1].any()
    o.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(("queries", "n", "batch"), [(0, 3, 2), (3, 0, 2), (3, 3, 0)])
def test_nothing_at_all(queries, n, batch) -> None:
    theirs, ours = pair(batch_first=True)
    q, k = torch.randn(batch, queries, E, dtype=torch.float64), torch.randn(batch, n, E, dtype=torch.float64)
    torch.testing.assert_close(ours(q, k, k, need_weights=True), theirs(q, k, k))


def test_dropout_is_for_training_and_shows_in_the_weights() -> None:
    torch.manual_seed(0)
    module = MultiheadAttention(E, H, dropout=0.5, batch_first=True, bias=False)
    x = torch.randn(1, 300, E)
    whole = module.eval()(x, x, x, need_weights=True, average_attn_weights=False)[1]
    o, weights = module.train()(x, x, x, need_weights=True, average_attn_weights=False)
    assert 0.45 < (weights == 0).float().mean() < 0.55
    torch.testing.assert_close(weights, torch.where(weights == 0, 0, 2 * whole))
    # the output is of these weights
    v = torch.nn.functional.linear(x, module.in_proj_weight[2 * E :]).unflatten(-1, (H, E // H)).transpose(1, 2)
    torch.testing.assert_close(o, module.out_proj((weights @ v).transpose(1, 2).flatten(-2)), rtol=1e-4, atol=1e-5)
    assert not torch.equal(module(x, x, x)[0], o)


def test_parameters_are_torchs() -> None:
    for options in SETTINGS.values():
        torch.manual_seed(1)
        theirs = torch.nn.MultiheadAttention(E, H, **options)
        torch.manual_seed(1)
        ours = MultiheadAttention(E, H, **options)
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
        theirs.load_state_dict(ours.state_dict())
        again = pickle.loads(pickle.dumps(ours))
        x = [torch.randn(4, n) for n in (E, ours.kdim, ours.vdim)]
        assert torch.equal(again.eval()(*x)[0], ours.eval()(*x)[0])


@pytest.mark.parametrize(
    ("shape", "settings", "options", "error", "words"),
    [
        ((2, 5, 16), {}, {"attn_mask": torch.zeros(5, 4)}, ValueError, r"attn_mask has shape \[5, 4\]; .* \[5, 5\] or"),
        ((2, 5, 16), {}, {"attn_mask": torch.zeros(2, 5, 5)}, ValueError, r"or \[4, 5, 5\]"),
        ((2, 5, 16), {}, {"attn_mask": torch.zeros(5, 5).int()}, TypeError, "attn_mask has dtype int32"),
        ((2, 5, 16), {}, {"key_padding_mask": torch.zeros(5)}, ValueError, r"expected \[2, 5\]"),
        ((2, 5, 1, 16), {}, {}, ValueError, r"expected all \[T, B, E\], or all \[T, E\]"),
        ((2, 5, 16), {"add_zero_attn": True}, {"mask": masks.causal()}, saccade.Unsupported, "give attn_mask"),
        ((2, 5, 16), {}, {"mask": torch.zeros(5, 5)}, TypeError, "expected None or an expression of saccade.mask"),
        ((2, 5, 16), {}, {"mask": torch.zeros(5, 5), "is_causal": True}, TypeError, "mask is an array"),
        ((2, 5, 16), {}, {"attn_mask": masks.causal()}, TypeError, "attn_mask is a Mask; .* as mask="),
    ],
)
def test_refused(shape, settings, options, error, words) -> None:
    x = torch.randn(shape)
    with pytest.raises(error, match=words):
        MultiheadAttention(E, H, batch_first=True, **settings)(x, x, x, **options)


def test_torch_is_imported_with_the_first_module() -> None:
    code = "import sys, saccade; saccade.nn; assert 'torch' not in sys.modules; saccade.nn.Attention(8, 2)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_features_and_flags() -> None:
    module, x = MultiheadAttention(E, H, kdim=12), torch.zeros(TQ, B, E)
    with pytest.raises(ValueError, match=r"query, key, value have \[16, 16, 16\] features; expected \[16, 12, 16\]"):
        module(x, x, x)
    with pytest.raises(TypeError, match="is_causal is 'no'; expected True or False"):
        module(x, x[..., :12], x, is_causal="no")
