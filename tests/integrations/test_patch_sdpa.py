"""saccade.patch_sdpa: which calls Saccade computes in it, and that results equal torch's."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as by_name
from torch.utils.checkpoint import checkpoint

import saccade
from saccade.integrations import sdpa_mode

# reentrant checkpoints and nested tensors warn that they are old, or new
pytestmark = pytest.mark.filterwarnings(
    "ignore:None of the inputs", "ignore:The PyTorch API of nested", "ignore:.*jit.trace"
)


@pytest.fixture
def backends(monkeypatch) -> list[str | None]:
    """The backends that the calls of Saccade name, in order."""
    calls: list[str | None] = []
    ours = sdpa_mode.scaled_dot_product_attention

    def counting(*args, backend=None, **options):
        calls.append(backend)
        return ours(*args, backend=backend, **options)

    monkeypatch.setattr(sdpa_mode, "scaled_dot_product_attention", counting)
    return calls


@pytest.fixture(autouse=True)
def fresh(seed) -> None:
    torch.manual_seed(seed)
    torch._dynamo.reset()


def heads(T: int = 9) -> torch.Tensor:
    return torch.randn(2, 4, T, 8, requires_grad=True)


class Block(torch.nn.Module):
    """A block of a small GPT."""

    def __init__(self, width: int = 32, n: int = 4) -> None:
        super().__init__()
        self.n, self.drop = n, 0.0
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(self.norms[0](x)).split(C, dim=2)
        q, k, v = (y.view(B, T, self.n, C // self.n).transpose(1, 2) for y in (q, k, v))
        dropped = self.drop if self.training else 0
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropped, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlp(self.norms[1](x))


class Vision(torch.nn.Module):
    """A small vision transformer: patches, a class token, an encoder of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.cls = torch.nn.Conv2d(3, 32, 4, 4), torch.nn.Parameter(torch.randn(1, 1, 32))
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.encoder(torch.cat([self.cls.expand(len(x), -1, -1), x], 1))[:, 0]


def both(f, module, *args, within=saccade.patch_sdpa):
    """f() and the gradients of its square, in the context and out of it."""
    leaves = [x for x in (*args, *module.parameters()) if x.requires_grad]
    want = f(*args)
    expected = torch.autograd.grad(want.square().sum(), leaves)
    with within():
        got = f(*args)
        gradients = torch.autograd.grad(got.square().sum(), leaves)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-4)
    return got


def test_by_any_name_and_only_inside(backends) -> None:
    q = heads()
    want = by_name(q, q, q)
    with saccade.patch_sdpa():
        for call in (by_name, functional.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention):
            torch.testing.assert_close(call(query=q, key=q, value=q), want)
        o = by_name(q, q[:, :2], q[:, :2], torch.zeros(9, 9), 0.0, False, scale=0.3, enable_gqa=True)
    assert len(backends) == 4
    torch.testing.assert_close(o, by_name(q, q[:, :2], q[:, :2], scale=0.3, enable_gqa=True))
    assert len(backends) == 4


@pytest.mark.parametrize(("make", "shape", "calls"), [(Block, (2, 9, 32), 1), (Vision, (2, 3, 8, 8), 2)])
def test_models(make, shape, calls, backends) -> None:
    model = make()
    both(model, model, torch.randn(shape, requires_grad=True))
    assert len(backends) == calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype, backends) -> None:
    model, x = Block().to(dtype), torch.randn(2, 9, 32, dtype=dtype)
    with saccade.patch_sdpa():
        got = model(x)
    rounding = 2e-2 if dtype is torch.bfloat16 else 1e-9
    torch.testing.assert_close(got, model(x), rtol=rounding, atol=rounding)
    assert got.dtype is dtype
    assert len(backends) == 1


def test_autocast(backends) -> None:
    model, x = Block(), torch.randn(2, 9, 32)
    with torch.autocast("cpu", torch.bfloat16):
        want = model(x)
        with saccade.patch_sdpa():
            torch.testing.assert_close(model(x), want, rtol=2e-2, atol=2e-2)
    assert len(backends) == 1


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_torchs_modules(training, grad, backends) -> None:
    attention = torch.nn.MultiheadAttention(32, 4, batch_first=True).train(training)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).train(training)
    decoder = torch.nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True).train(training)
    x, hidden = torch.randn(3, 6, 32), torch.arange(6) >= torch.tensor([[6], [4], [1]])
    later = torch.nn.Transformer.generate_square_subsequent_mask(6)
    calls = {
        "attention": (lambda: attention(x, x, x, need_weights=False)[0], 1),
        "encoder": (lambda: encoder(x), 2),
        "causal encoder": (lambda: encoder(x, later, is_causal=True), 2),
        "padded encoder": (lambda: encoder(x, src_key_padding_mask=hidden)[~hidden], 2),
        "decoder": (lambda: decoder(x, x, later, memory_key_padding_mask=hidden), 2),
    }
    with torch.set_grad_enabled(grad):
        for name, (call, count) in calls.items():
            want = call()
            with saccade.patch_sdpa():
                torch.testing.assert_close(call(), want, rtol=1e-4, atol=1e-5, msg=name)
            assert len(backends) == count, name
            backends.clear()


def test_weights_stay_torchs(backends) -> None:
    module, x = torch.nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 5, 32)
    with saccade.patch_sdpa():
        torch.testing.assert_close(module(x, x, x), module(x, x, x, need_weights=True))
    assert not backends


def test_the_innermost_context_decides(backends) -> None:
    q = heads()
    with saccade.patch_sdpa():
        with saccade.patch_sdpa(backend="cpu"), saccade.patch_sdpa(backend="cpu"):
            by_name(q, q, q)
        by_name(q, q, q)
        with pytest.raises(ZeroDivisionError), saccade.patch_sdpa(backend="cpu"):
            raise ZeroDivisionError
        by_name(q, q, q)
    assert backends == ["cpu", None, None]


def test_other_modes_see_what_ours_calls(backends) -> None:
    seen = []

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    module, x = torch.nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 5, 32)
    with saccade.patch_sdpa(), Watching():
        module(x, x, x, need_weights=False)
    assert functional.multi_head_attention_forward in seen
    assert len(backends) == 1


def test_as_a_decorator(backends) -> None:
    q = heads()

    @saccade.patch_sdpa(backend="cpu")
    def attend(q: torch.Tensor) -> torch.Tensor:
        """Of itself."""
        return by_name(q, q, q)

    torch.testing.assert_close(attend(q), by_name(q, q, q))
    assert backends == ["cpu"]
    assert attend.__doc__ == "Of itself."


def test_a_context_is_of_its_thread(backends) -> None:
    q, counts = heads(), []

    def work() -> None:
        by_name(q, q, q)
        counts.append(len(backends))
        with saccade.patch_sdpa():
            by_name(q, q, q)
        counts.append(len(backends))

    with saccade.patch_sdpa():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        by_name(q, q, q)
    assert counts == [0, 1]
    assert len(backends) == 2


# activation checkpoints run the forward again


def backward(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y.backward()
    return x.grad


BACKWARDS = {
    "backward": backward,
    "autograd.backward": lambda y, x: torch.autograd.backward([y]) or x.grad,
    "grad": lambda y, x: torch.autograd.grad(y, x)[0],
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", BACKWARDS)
def test_checkpoints(name, reentrant, backends) -> None:
    if reentrant and name == "grad":
        # torch has no such gradient
        name = "backward"
    q = heads()
    (want,) = torch.autograd.grad(by_name(q, q, q).square().sum(), q)
    with saccade.patch_sdpa():
        y = checkpoint(lambda q: by_name(q, q, q).square(), q, use_reentrant=reentrant).sum()
        got = BACKWARDS[name](y, q)
    assert len(backends) == 2
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_whose_backward_is_outside_raises() -> None:
    q = heads()
    with saccade.patch_sdpa():
        y = checkpoint(lambda q: by_name(q, q, q), q, use_reentrant=False).sum()
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        y.backward()


# what ours refuses raises: nothing falls back


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout) -> None:
    q = torch.nested.nested_tensor([torch.randn(n, 4, 8) for n in (3, 5)], layout=layout).transpose(1, 2)
    with saccade.patch_sdpa(), pytest.raises(saccade.Unsupported, match="nested tensors have no common length"):
        by_name(q, q, q)


def test_traces_of_jit_are_refused() -> None:
    with saccade.patch_sdpa(), pytest.raises(saccade.Unsupported, match=r"torch\.jit\.trace would store results"):
        torch.jit.trace(lambda q: by_name(q, q, q), heads().detach())


@pytest.mark.parametrize(
    ("backend", "options", "error", "words"),
    [
        ("cuda", {}, ValueError, "backend is 'cuda'; expected None or one of"),
        (None, {"attn_mask": torch.zeros(9, 8)}, ValueError, "attn_mask has shape"),
        (None, {"dropout_p": -1.0}, ValueError, "dropout_p is -1.0"),
    ],
)
def test_refused(backend, options, error, words) -> None:
    q = heads()
    with saccade.patch_sdpa(backend=backend), pytest.raises(error, match=words):
        by_name(q, q, q, **options)


def test_a_vision_model_of_transformers(backends) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.ViTConfig(image_size=16, patch_size=4, attn_implementation="sdpa", **sizes)
    model = transformers.ViTModel(config).eval()
    both(lambda x: model(x).last_hidden_state, model.embeddings, torch.randn(2, 3, 16, 16, requires_grad=True))
    assert len(backends) == 2
