"""Forward-mode derivatives of a case: with the oracle, with standard attention, and with the library through torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import numpy_dtype
from ..reference_more import tangents
from .compare import Met, measure_all
from .inputs import ORIGIN, CaseInputs
from .run import MOST_ORDERS, ORDERS

Array = NDArray[Any]
NAMES = ("q", "k", "v", "sinks", "bias", "slopes", "table", "log_f")


def make_tangents(x: CaseInputs, seed: int = 0) -> dict[str, Array]:
    """Random tangents of all arrays of a call, NaN where the array itself may not be read."""
    rng, moved = np.random.default_rng([seed, 2]), {}
    for name in NAMES:
        array = getattr(x, name)
        if array is not None:
            moved[name] = rng.standard_normal(array.shape).astype(array.dtype)
            moved[name][~np.isfinite(array.astype(np.float32))] = np.nan
    return moved


def expected(x: CaseInputs, moved: Mapping[str, Array], dtype: Any = np.float64) -> dict[str, Array]:
    """The tangents of o and lse by the oracle, every step rounded to `dtype`."""
    options = {**x.scores, **x.added, "origin": ORIGIN, "sinks": x.sinks, "stop": x.stop, "dtype": dtype}
    do, dlse = tangents(moved, x.q, x.k, x.v, x.mask, **options)
    return {"do": do, "dlse": dlse}


def plain(x: CaseInputs, moved: Mapping[str, Array], orders: int) -> dict[str, Array]:
    """Standard attention in the dtype of the inputs, with a leading axis of orders of summation, as in `run.plain`."""
    results: list[dict[str, Array]] = []
    for n in range(orders):
        rng = np.random.default_rng(n)
        d, dv = (rng.permutation(size) if n else np.arange(size) for size in (x.q.shape[-1], x.v.shape[-1]))
        order = {"q": d, "k": d, "v": dv}
        turned = replace(x, **{name: getattr(x, name)[..., to] for name, to in order.items()})
        also = {name: a[..., order[name]] if name in order else a for name, a in moved.items()}
        out = expected(turned, also, numpy_dtype(x.q.dtype))
        results.append({**out, "do": out["do"][..., np.argsort(dv)]})
    return {name: np.stack([out[name] for out in results]) for name in results[0]}


def attend(x: CaseInputs, backend: str | None = None) -> Callable[[dict[str, Any]], Any]:
    """A function from tensors by name, in place of those of the case, to (o, lse)."""
    from ..api import attention
    from .tensors import put

    fixed = {name: put(getattr(x, name)) for name in NAMES}

    def f(arrays: dict[str, Any]) -> Any:
        y = replace(x, **fixed | arrays)
        options: dict[str, Any] = {**x.scores, "backend": backend, "sinks": y.sinks, "bias": y.bias_argument}
        return attention(y.q, y.k, y.v, x.mask, return_lse=True, **options)

    return f


def computed(x: CaseInputs, moved: Mapping[str, Array], backend: str | None = None) -> dict[str, Array]:
    """The same as `expected`, by torch.func.jvp of the public call."""
    import torch

    from .tensors import get, put

    primals = {name: put(getattr(x, name)) for name in moved}
    _, results = torch.func.jvp(attend(x, backend), (primals,), ({name: put(t) for name, t in moved.items()},))[:2]
    do, dlse = results
    return {"do": get(do), "dlse": get(dlse)}


def verify(x: CaseInputs, moved: Mapping[str, Array], backend: str | None = None) -> list[Met]:
    """The measures of the tangents of a case against the oracle, with as many orders as `run.verify`."""
    got, ref = computed(x, moved, backend), expected(x, moved)
    mets: list[Met] = []
    for orders in (ORDERS, MOST_ORDERS):
        mets = measure_all(got, ref, plain(x, moved, orders), x.q.dtype)
        if all(met.ok for met in mets):
            break
    return mets
