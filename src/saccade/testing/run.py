"""Run a case with the oracle, with standard attention, and with the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import reference
from ..arrays import numpy_dtype
from ..reference_more import max_and_entropy
from .compare import Met, measure_all
from .inputs import ORIGIN, CaseInputs

Array = NDArray[Any]

# the results of a forward
RESULTS: tuple[str, ...] = ("o", "lse", "max", "entropy")
# numbers of orders of summation for standard attention: at first, and at most if these leave doubt
ORDERS, MOST_ORDERS = 3, 24


def expected(x: CaseInputs, dtype: Any = np.float64, *, backward: bool = True, more: bool = False) -> dict[str, Array]:
    """o, lse, dq, dk, dv and the gradients of side arrays by the oracle, every step rounded to `dtype`.

    "o_alone" is o again, because the library may compute it in another way if no lse is requested. more: also max and
    entropy, whose gradient `dentropy_of` gives; then o_alone comes from a call that returns the maximum.
    """
    options = {**x.scores, **x.added, "origin": ORIGIN, "sinks": x.sinks, "stop": x.stop, "dtype": dtype}
    of_rows: dict[str, Array] = {}
    if more:
        of_rows["max"], of_rows["entropy"] = max_and_entropy(x.q, x.k, x.mask, **options)
    if not backward:
        o, lse = reference.forward(x.q, x.k, x.v, x.mask, **options)
        return {"o": o, "lse": lse, "o_alone": o, **of_rows}
    cotangents = {"dlse": x.dlse, "dentropy": dentropy_of(x) if more else None}
    (o, lse), (dq, dk, dv, extras) = reference.both(x.do, x.q, x.k, x.v, x.mask, **cotangents, **options)
    return {"o": o, "lse": lse, "o_alone": o, **of_rows, "dq": dq, "dk": dk, "dv": dv, **extras}


def dentropy_of(x: CaseInputs) -> Array:
    """The gradient of the entropy [B, Tq, Hq]: random numbers, and NaN where that of lse is NaN."""
    numbers = np.random.default_rng(x.case.seed % 1000).standard_normal(x.dlse.shape)
    return np.where(np.isnan(x.dlse), np.nan, numbers).astype(x.dlse.dtype)


def plain(x: CaseInputs, *, backward: bool = True, more: bool = False, orders: int = ORDERS) -> dict[str, Array]:
    """Standard attention in the dtype of the inputs, each array with a leading axis of orders of summation.

    The dtype does not determine the order, and with a single order a small problem may be exact by luck.
    """
    D, Dv = x.q.shape[-1], x.v.shape[-1]
    results: list[dict[str, Array]] = []
    for n in range(orders):
        rng = np.random.default_rng(n)
        d, dv = (rng.permutation(size) if n else np.arange(size) for size in (D, Dv))
        turned = replace(x, q=x.q[..., d], k=x.k[..., d], v=x.v[..., dv], do=x.do[..., dv])
        out = expected(turned, numpy_dtype(x.q.dtype), backward=backward, more=more)
        back = {"o": dv, "o_alone": dv, "dq": d, "dk": d, "dv": dv}
        results.append({name: a[..., np.argsort(back[name])] if name in back else a for name, a in out.items()})
    return {name: np.stack([out[name] for out in results]) for name in results[0]}


def computed(
    x: CaseInputs,
    backend: str | None = None,
    *,
    backward: bool = True,
    more: bool = False,
    deterministic: bool | str = True,
) -> dict[str, Array]:
    """The same as `expected`, by the public calls, as NumPy arrays."""
    import saccade

    from .tensors import converted

    attend, differentiate = (converted(f, backend or "") for f in (saccade.attention, saccade.attention_backward))
    options: dict[str, Any] = {**x.scores, "backend": backend, "sinks": x.sinks, "bias": x.bias_argument}
    options["deterministic"] = deterministic
    flags = {"return_max": more, "return_entropy": more}
    results = attend(x.q, x.k, x.v, x.mask, return_lse=True, **flags, **options)
    out: dict[str, Array] = dict(zip(RESULTS, results, strict=False))
    alone = attend(x.q, x.k, x.v, x.mask, return_max=more, **options)
    out["o_alone"] = alone[0] if more else alone
    if backward:
        o, lse, *of_rows = results
        cotangents = {"dlse": x.dlse} | ({"entropy": of_rows[1], "dentropy": dentropy_of(x)} if more else {})
        wanted = {*x.added} - ({"bias"} if not has_gradient(x) else set()) | (
            {"sinks"} if x.sinks is not None else set()
        )
        gradients = differentiate(x.do, x.q, x.k, x.v, o, lse, x.mask, grads=wanted, **cotangents, **options)
        out.update(zip(("dq", "dk", "dv"), gradients[:3], strict=True))
        out.update(gradients[3])
    return out


def has_gradient(x: CaseInputs) -> bool:
    """Whether the bias has a shape that gradients are defined for: [1|B, 1|Hq, Tq, Tk] or [1|B, 1|Hq, 1, Tk]."""
    return x.bias is not None and x.case.bias[-2:] in ("qk", "1k") and x.bias.ndim == 4


def verify(
    x: CaseInputs,
    backend: str | None = None,
    *,
    backward: bool = True,
    more: bool = False,
    compute: Callable[..., Any] | None = None,
) -> list[Met]:
    """The measures of every output of a case, against the oracle; more: as in `expected`.

    compute: a function like `computed`, which is the default.

    The allowed error grows with the number of orders in which standard attention runs. The verdict is that of
    `MOST_ORDERS` orders; most of them are skipped if fewer already allow the error.
    """
    parts = {"backward": backward, "more": more}
    got = computed(x, backend, **parts) if compute is None else compute(x, backend, backward=backward)
    ref = expected(x, **parts)
    mets: list[Met] = []
    for orders in (ORDERS, MOST_ORDERS):
        mets = measure_all(got, ref, plain(x, **parts, orders=orders), x.q.dtype)
        if all(met.ok for met in mets):
            break
    return mets
