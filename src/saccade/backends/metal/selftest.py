"""For owners of a Mac: `python -m saccade.backends.metal.selftest` prints a report to paste into an issue.

It shows the chip, versions, each kernel's error against float64, and times next to those of MLX's own attention.
"""

from __future__ import annotations

import platform
import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np

from ... import reference
from ...mask import Mask, causal, documents, strided, window
from ...operands import Spec
from ...plan import make_plan
from ...problem import Problem, Scores
from ...recurrent import reference as recurrences
from ...recurrent.problem import MATRIX, MatrixOptions
from .. import Inputs, Outputs
from . import backward, decode, forward, limits, missing
from . import recurrent as linear
from .device import runtime
from .single_head import single_head

MASKS: dict[str, Mask | None] = {
    "full": None,
    "causal": causal(),
    "window": causal() & window(20, 0),
    "documents": documents(np.repeat(np.arange(3), [30, 41, 29])) & causal(),
    "strided": (strided(4) | window(3, 0)) & causal(),
}
DTYPES = ("float32", "float16")
ORDERS = {"causal": True, "not causal": False}
SIZES = ((64, 64), (128, 128), (80, 40), (256, 256))


def errors(dtype: str, mask: Mask | None, D: int, Dv: int) -> dict[str, tuple[float, float]]:
    """Per array: the largest error against float64, and the error that the tolerance rule allows."""
    rng = np.random.default_rng(D)
    p = Problem(2, 100, 100, 4, 2, D, Dv, dtype=dtype, mask=mask, scores=Scores(scale=D**-0.5))
    plan = make_plan(p, limits(p))
    shapes = ((2, 100, 4, D), (2, 100, 2, D), (2, 100, 2, Dv), (2, 100, 4, Dv))
    q, k, v, do = (rng.standard_normal(s).astype(dtype) for s in shapes)
    inputs = Inputs(q, k, v)
    o, lse = forward(p, plan, inputs)
    dq, dk, dv, _ = backward(p, plan, inputs, Outputs(o, lse, do))
    o_last = decode(p, plan, inputs)[0]
    results = {"o": o, "lse": lse, "o by decode": o_last, "dq": dq, "dk": dk, "dv": dv}
    exact, plain = (_expected(q, k, v, do, mask, p.scores.scale, kind) for kind in (np.float64, dtype))
    return _compared(results, exact, plain, dtype)


def linear_errors(dtype: str, causal: bool) -> dict[str, tuple[float, float]]:
    """`errors` for linear attention with two sequences of three chunks."""
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 75, 2, 40), "k": (2, 75, 2, 40), "v": (2, 75, 4, 13), "do": (2, 75, 4, 13)}
    inputs = {n: rng.standard_normal(s).astype(dtype) for n, s in shapes.items()}
    do = inputs.pop("do")
    specs = {n: Spec(inputs[n].shape, dtype, "cpu") if n in inputs else None for n in MATRIX.names}
    p = MATRIX.describe(specs, MatrixOptions("add", "elu+1", True, causal))
    arrays = {n: inputs.get(n) for n in MATRIX.names}
    results: dict[str, Any] = {"o": linear.forward(p, arrays)[0]}
    results |= {f"d{n}": x for n, x in linear.backward(p, arrays, (do, None), frozenset(inputs)).items() if n in inputs}
    both: list[dict[str, Any]] = []
    for kind in (np.float64, np.dtype(dtype)):
        rule: dict[str, Any] = {"feature_map": "elu+1", "normalize": True, "causal": causal, "dtype": kind}
        grads = recurrences.matrix_state_backward(do, None, **inputs, **rule)
        both.append({"o": recurrences.matrix_state(**inputs, **rule)[0], **{f"d{n}": grads[n] for n in inputs}})
    exact, plain = both
    return _compared(results, exact, plain, dtype)


def _compared(
    results: dict[str, Any], exact: dict[str, Any], plain: dict[str, Any], dtype: str
) -> dict[str, tuple[float, float]]:
    result: dict[str, tuple[float, float]] = {}
    for name, x in results.items():
        key = name.partition(" ")[0]
        size = float(abs(exact[key]).max())
        eps = float(np.finfo(np.float32 if key == "lse" else dtype).eps)
        band = 8 * eps * max(1.0, size) if key == "lse" else 4 * eps * size
        result[name] = _largest(x, exact[key]), 2 * _largest(plain[key], exact[key]) + band
    return result


def _expected(q: Any, k: Any, v: Any, do: Any, mask: Mask | None, scale: float, dtype: Any) -> dict[str, Any]:
    o, lse = reference.forward(q, k, v, mask, scale=scale, dtype=dtype)
    dq, dk, dv, _ = reference.backward(do, q, k, v, mask, scale=scale, dtype=dtype)
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def _largest(x: Any, y: Any) -> float:
    return float(abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max())


def times() -> list[str]:
    """Milliseconds of a causal window over 8192 tokens and of plain causal attention, next to MLX's own kernel."""
    import mlx.core as mx

    lines: list[str] = []
    q, k, v = (mx.random.normal((1, 8192, h, 128)).astype(mx.float16) for h in (8, 2, 2))
    for name, mask in (("causal", causal()), ("window of 512", causal() & window(511, 0))):
        p = Problem(
            1, 8192, 8192, 8, 2, 128, 128, dtype="float16", mask=mask, scores=Scores(scale=128**-0.5), device="mlx"
        )
        plan = make_plan(p, limits(p))
        heads = [x.swapaxes(1, 2) for x in (q, k, v)]
        away = mx.arange(8192)[:, None] - mx.arange(8192)
        theirs: Any = "causal" if name == "causal" else (away >= 0) & (away < 512)
        for who, call in (
            ("saccade", lambda: forward(p, plan, Inputs(q, k, v))[0]),  # noqa: B023
            ("mlx", lambda: mx.fast.scaled_dot_product_attention(*heads, scale=128**-0.5, mask=theirs)),  # noqa: B023
        ):
            mx.eval(call())
            spent: list[float] = []
            for _ in range(10):
                begin = time.perf_counter()
                mx.eval(call())
                spent.append(1000 * (time.perf_counter() - begin))
            lines.append(f"{name}, 8192 tokens, 8:2 heads of 128, float16: {who} {min(spent):.2f} ms")
    return lines


def _outside(what: str, runs: list[tuple[str, dict[str, tuple[float, float]]]]) -> int:
    # prints the arrays outside the tolerance rule and returns their number
    bad = 0
    for text, arrays in runs:
        for array, (error, allowed) in arrays.items():
            if not error <= allowed:
                bad += 1
                print(f"OUTSIDE {what} {text} {array}: error {error:.2e}, allowed {allowed:.2e}")
    return bad


def main() -> int:
    """Print the report; returns 1 if a result is outside the tolerance rule, 2 if no kernel can run, otherwise 0."""
    print(f"saccade selftest on {platform.platform()}, Python {platform.python_version()}, NumPy {np.__version__}")
    if reasons := missing():
        print("no Metal kernel can run here:", "; ".join(reasons))
        return 2
    here, bad = runtime(), 0
    print(f"kernels run by {here.name}")
    if here.name == "mlx":
        import mlx.core as mx

        print(f"MLX {version('mlx')}, {mx.device_info()}")
    q = np.random.default_rng(0).standard_normal((33, 64)).astype(np.float32)
    x = q[None, :, None]
    exact = reference.forward(x, x, x, None, scale=64**-0.5, dtype=np.float64)[0][0, :, 0]
    print(f"single head: error {_largest(single_head(q, q, q)[0], exact):.1e}")
    for dtype in DTYPES:
        for name, mask in MASKS.items():
            runs = [(f"D{D} Dv{Dv}", errors(dtype, mask, D, Dv)) for D, Dv in SIZES]
            bad += _outside(f"{dtype} {name}", runs)
            print(f"{dtype} {name}: {len(SIZES)} head sizes computed")
        runs = [(text, linear_errors(dtype, one)) for text, one in ORDERS.items()]
        bad += _outside(f"{dtype} linear", runs)
        print(f"{dtype} linear attention computed")
    print("\n".join(times()) if here.name == "mlx" else "no times: an emulator's mean nothing")
    print("all within the tolerance rule" if not bad else f"{bad} arrays outside the tolerance rule")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
