"""Models exported to ONNX, run by ONNX Runtime and compared with the float64 oracle."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

import saccade
from saccade import mask as masks
from saccade import reference

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx", reason="onnx is not installed")
runtime = pytest.importorskip("onnxruntime", minversion="1.28", reason="no ONNX Runtime whose attention is right")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")
from saccade.integrations.onnx import translation_table  # noqa: E402

B, TQ, TK, HQ, HK, D = 2, 12, 15, 4, 2, 8
pytestmark = pytest.mark.filterwarnings("ignore")


class Model(torch.nn.Module):
    """A call of attention with a mask made of the model's inputs, or with a fixed one."""

    def __init__(self, mask=None, **options) -> None:
        super().__init__()
        self.mask, self.options = mask, options

    def forward(self, q, k, v, *arrays):
        mask = self.mask(*arrays) if arrays else self.mask
        return saccade.attention(q, k, v, mask, **self.options)


def rows(tq: int = TQ, tk: int = TK, batch: int = B, dtype: str = "float32"):
    rng = np.random.default_rng(tq * tk)
    shapes = ((batch, tq, HQ, D), (batch, tk, HK, D), (batch, tk, HK, D))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def exported(model, inputs, dynamic: bool = False, square: bool = False, opset: int = 23):
    """The ONNX model of a torch model with dynamic batch and lengths, or with fixed ones."""
    shapes = None
    if dynamic:
        batch, tq = (torch.export.Dim(name) for name in ("batch", "queries"))
        tk = tq if square else torch.export.Dim("keys")
        dims = {inputs[0].shape[0]: batch, inputs[1].shape[1]: tk, inputs[0].shape[1]: tq}
        of_rows = [{0: batch, 1: n} for n in (tq, tk, tk)]
        more = tuple({n: dims[m] for n, m in enumerate(x.shape) if m in dims} for x in inputs[3:])
        shapes = dict(zip("qkv", of_rows, strict=True)) | ({"arrays": more} if more else {})
    program = torch.onnx.export(
        model.eval(), tuple(map(torch.from_numpy, inputs)), dynamo=True, opset_version=opset, verbose=False,
        custom_translation_table=translation_table(), dynamic_shapes=shapes,
    )  # fmt: skip
    onnx.checker.check_model(program.model_proto, full_check=True)
    assert [node.op_type for node in program.model_proto.graph.node].count("Attention") == 1
    return program.model_proto


def run(proto, inputs) -> np.ndarray:
    session = runtime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip((x.name for x in session.get_inputs()), inputs, strict=True)))[0]


def near(o, inputs, mask, atol: float = 2e-6, **options) -> None:
    want, _ = reference.forward(*inputs[:3], mask, **options)
    np.testing.assert_allclose(o, want, atol=atol, rtol=1e-5)


IDS = np.arange(TK) // 4
PAIRS = np.random.default_rng(0).random((B, TQ, TK)) < 0.3
FIXED = {
    "none": None,
    "causal": masks.causal(),
    "causal from the first key": masks.causal(0),
    "empty rows": masks.causal(-3),
    "window": masks.window(3, 1),
    "window and causal": masks.causal() & masks.window(4, 0),
    "keys": masks.keys(9) & masks.causal(),
    "lengths": masks.keys([15, 6]) & masks.causal(),
    "between": masks.keys([2, 1], [15, 6]),
    "prefix": masks.prefix([5, 2]) | masks.causal(),
    "padding": masks.padding(np.arange(TK) < np.array([[15], [6]])) & masks.causal(),
    "documents": masks.documents(IDS) & masks.causal(),
    "two lists": masks.documents(np.arange(TQ) // 3, IDS),
    "each entry": masks.documents(np.stack([IDS, np.arange(TK) // 7])),
    "dense": masks.dense(PAIRS),
    "dense for all": masks.dense(PAIRS[0]) & masks.causal(),
    "complement": ~masks.window(2, 2),
    "strided": masks.strided(4, 1) | masks.window(2, 0),
    "dilated": masks.dilated(3, 2),
    "chunked": masks.chunked(4),
    "global": masks.global_tokens(2) | masks.window(1, 1),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", FIXED)
def test_masks(name: str) -> None:
    inputs, mask = rows(), FIXED[name]
    near(run(exported(Model(mask), inputs), inputs), inputs, mask)


@pytest.mark.sample(4)
@pytest.mark.parametrize("shape", [(12, 12), (12, 15), (15, 12)], ids=str)
@pytest.mark.parametrize(
    "name", ["causal", "causal from the first key", "window and causal", "global", "chunked", "keys"]
)
def test_lengths_that_are_known_later(name: str, shape: tuple[int, int]) -> None:
    """Causality of rectangles: the last query is aligned with the last key, and rows before the first key are 0."""
    inputs, mask = rows(*shape), FIXED[name]
    square = shape[0] == shape[1]
    proto = exported(Model(mask), inputs, dynamic=True, square=square)
    near(run(proto, inputs), inputs, mask)
    larger = rows(20, 20 if square else 31 - shape[0], 3)
    near(run(proto, larger), larger, mask)
    kinds = [node.op_type for node in proto.graph.node]
    assert ("Range" in kinds) != (name == "causal from the first key" or (name == "causal" and square))


OF_ARRAYS: dict[str, tuple[Callable, Callable]] = {
    "keys": (lambda n: masks.keys(n) & masks.causal(), lambda b, t: [np.arange(1, b + 1) * t // b]),
    "padding": (masks.padding, lambda b, t: [np.arange(t) < np.arange(1, b + 1)[:, None] * t // b]),
    "documents": (lambda ids: masks.documents(ids) & masks.causal(), lambda b, t: [np.arange(t) // 4]),
}


@pytest.mark.parametrize("name", OF_ARRAYS)
def test_masks_of_inputs(name: str) -> None:
    make, arrays = OF_ARRAYS[name]
    inputs = [*rows(), *arrays(B, TK)]
    proto = exported(Model(make), inputs, dynamic=True)
    for case in (inputs, [*rows(9, 20, 3), *arrays(3, 20)]):
        near(run(proto, case), case, make(*case[3:]))


@pytest.mark.parametrize("opset", [23, 24])
def test_softcap_comes_before_the_mask(opset: int) -> None:
    inputs, mask = rows(), masks.dense(PAIRS)
    o = run(exported(Model(mask, softcap=1.5, scale=0.7), inputs, opset=opset), inputs)
    near(o, inputs, mask, softcap=1.5, scale=0.7)


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [(B, HQ, TQ, TK), (1, 1, TQ, 1), (B, 1, 1, TK), (TQ, TK)], ids=str)
def test_biases(shape: tuple[int, ...]) -> None:
    inputs, bias = rows(), np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    bias[np.random.default_rng(2).random(shape) < 0.1] = -np.inf
    for mask in (None, masks.causal()):
        o = run(exported(Model(mask, bias=torch.from_numpy(bias), softcap=3.0), inputs), inputs)
        near(o, inputs, mask, bias=bias, softcap=3.0)


def test_alibi() -> None:
    inputs, slopes = rows(), np.linspace(0.1, 1, HQ, dtype=np.float32)
    model = Model(masks.causal(), bias=saccade.alibi(torch.from_numpy(slopes)))
    near(run(exported(model, inputs), inputs), inputs, masks.causal(), slopes=slopes)


@pytest.mark.parametrize("make", [masks.keys, lambda n: masks.keys(n) & masks.window(3, 2)], ids=["keys", "window"])
def test_alibi_counts_from_the_end_of_the_keys_in_use(make: Callable) -> None:
    slopes = np.linspace(0.1, 1, HQ, dtype=np.float32)
    inputs = [*rows(), np.array([14, 5])]
    model = Model(make, bias=saccade.alibi(torch.from_numpy(slopes)))
    proto = exported(model, inputs, dynamic=True)
    for case in (inputs, [*rows(9, 20, 3), np.array([20, 9, 3])]):
        near(run(proto, case), case, make(case[3]), slopes=slopes, stop=case[3])


# ONNX Runtime multiplies by a scale in float32
@pytest.mark.parametrize("dtype, atol", [("float16", 4e-3), ("float64", 2e-7)])
def test_other_dtypes(dtype: str, atol: float) -> None:
    inputs = rows(dtype=dtype)
    near(run(exported(Model(masks.causal()), inputs), inputs), inputs, masks.causal(), atol=atol)
    bias = np.random.default_rng(1).standard_normal((TQ, TK)).astype(dtype)
    o = run(exported(Model(masks.causal(), bias=torch.from_numpy(bias)), inputs), inputs)
    near(o, inputs, masks.causal(), atol=atol, bias=bias)


def test_decode_step_of_one_query() -> None:
    inputs = rows(1, TK)
    near(run(exported(Model(masks.causal()), inputs), inputs), inputs, masks.causal())


REFUSED = {
    "sinks": (Model(sinks=torch.zeros(HQ)), "no sinks"),
    "relative": (Model(bias=saccade.relative(torch.zeros(HQ, 3), 1)), "no table"),
    "gates": (Model(masks.causal(), bias=saccade.gates(-torch.ones(B, TK, HQ))), "no log_f"),
    "dropout": (Model(dropout=0.1, seed=3), "no dropout"),
    "lse": (Model(return_lse=True), "no lse"),
    "max": (Model(return_max=True), "no max and no entropy"),
    "negative": (Model(scale=-1.0), "above 0"),
    "tiles": (Model(masks.tiles([[1, 0]], 12)), "masks of tiles"),
    "packed": (Model(masks.documents(cu_seqlens=[0, 4, 15])), "masks of packed"),
    "per head": (Model(masks.per_head([masks.causal()] * HQ)), "masks of per_head"),
    "stop": (Model(masks.documents(IDS) & masks.keys(7)), "ids of queries and of keys"),
    "global": (Model(masks.global_tokens([1, 3])), "global_tokens with an array"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", REFUSED)
def test_what_differs_is_refused(name: str) -> None:
    model, message = REFUSED[name]
    with pytest.raises(Exception, match="export") as error:
        exported(model, rows())
    causes = []
    cause: BaseException | None = error.value
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__
    assert any(isinstance(x, saccade.Unsupported) and message in str(x) for x in causes), causes


def test_old_opsets_are_refused() -> None:
    with pytest.raises(Exception, match="export"):
        exported(Model(), rows(), opset=20)


def test_without_onnxscript() -> None:
    code = "import sys; sys.modules['onnxscript'] = None; import saccade.integrations.onnx"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "run pip install '.[onnx]' in a clone of Saccade" in done.stderr
