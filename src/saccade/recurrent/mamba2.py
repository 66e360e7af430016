"""Mamba-2's state-space duality: a scalar decay with the names of state-space models."""

from __future__ import annotations

from numbers import Real
from typing import Any

from ..arrays import Array, ArrayOrList, ArrayOrTuple, cast, namespace
from ..operands import DTYPES, Spec, check_flag
from .family import accumulator, check_array, check_floating
from .ops import compute
from .problem import MATRIX, MatrixOptions, kept


def ssd(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    *,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    initial_state: Array | None = None,
    return_state: bool | str = False,
    cu_seqlens: ArrayOrList | None = None,
    chunk: int | None = None,
    backend: str | None = None,
) -> ArrayOrTuple:
    """Mamba-2's SSD: h_t = exp(Δ_t A) h_{t-1} + Δ_t B_t x_tᵀ, y_t = h_tᵀ C_t + D x_t, gated by SiLU(z).

    Source: Dao and Gu, 2024. Δ = dt + dt_bias, or its softplus with `dt_softplus`, clamped with `dt_limit`. Small
    arrays and the gate are computed in float32 (float64 for float64 inputs).

    Args:
        x: [B, T, H, P], a torch tensor or NumPy array of float32, bfloat16, float16 or float64.
        dt: [B, T, H], in the dtype of x or float32.
        A: [H], negative.
        B, C: [B, T, G, N]; G divides H, and head h reads group h // (H / G).
        D: [H] or [H, P]; None omits the term.
        z: [B, T, H, P]; None for no gate.
        dt_bias: [H]; None for 0.
        dt_limit: (least, largest) Δ, transformers' `time_step_limit`; Δ outside has no gradient. None for no limit.
        initial_state: [B, H, N, P], with cu_seqlens [sequences, H, N, P], in the dtypes of `scalar_decay`; this is
            Mamba-2's state [B, H, P, N] with the last two dimensions transposed. None for zeros.
        return_state, cu_seqlens, chunk, backend: as in `scalar_decay`.

    Returns:
        y [B, T, H, P] in the dtype of x; with `return_state` also the final state.

    Raises:
        TypeError, ValueError, Unsupported: as in `scalar_decay`.

    Examples:
        >>> x, dt, A = torch.randn(2, 1024, 8, 64), torch.rand(2, 1024, 8), -torch.rand(8)
        >>> B, C = torch.randn(2, 2, 1024, 1, 16)  # one group, states of 16 numbers
        >>> y = saccade.recurrent.ssd(x, dt, A, B, C)
    """
    check_flag("dt_softplus", dt_softplus)
    dtype = _check({"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias})
    xp = namespace(x)
    wide = getattr(xp, accumulator(dtype))
    step = cast(dt, wide)
    if dt_bias is not None:
        step = step + cast(dt_bias, wide)
    if dt_softplus:
        step = xp.logaddexp(step, xp.zeros_like(step))
    if dt_limit is not None:
        step = xp.clip(step, *_limit(dt_limit))
    arrays = {
        "q": C,
        "k": B,
        "v": x,
        "g": step * cast(A, wide),
        "beta": step,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
    }
    out = "" if D is z is None else accumulator(dtype)
    options = MatrixOptions("add", "", False, True, 1.0, chunk, out, *kept(return_state), backend)
    y, state = compute(MATRIX, arrays, options)
    if D is not None:
        skip = cast(D, wide)
        y = y + (skip if skip.ndim == 2 else skip[:, None]) * cast(x, wide)
    if z is not None:
        gate = cast(z, wide)
        # the sigmoid as e^-softplus, whose value and gradient do not overflow
        y = y * gate * xp.exp(-xp.logaddexp(-gate, xp.zeros_like(gate)))
    y = cast(y, x.dtype)
    return (y, state) if return_state else y


def _limit(limit: Any) -> tuple[float, float]:
    numbers = isinstance(limit, (tuple, list)) and all(isinstance(x, Real) for x in limit)
    if not numbers or len(limit) != 2:
        raise TypeError(f"dt_limit is {limit!r}; expected two numbers, (least, largest), or None")
    if not limit[0] <= limit[1]:
        raise ValueError(f"dt_limit is {limit!r}; expected (least, largest) with least <= largest")
    return float(limit[0]), float(limit[1])


def _check(arrays: dict[str, Any]) -> str:
    # the dtype of x
    named = {name: array for name, array in arrays.items() if array is not None or name in "xABCdt"}
    specs = {name: _spec(name, array, arrays["x"]) for name, array in named.items()}
    check_floating("x", specs["x"], 4, "[B, T, H, P]")
    check_floating("B", specs["B"], 4, "[B, T, G, N]")
    (b, T, H, P), (G, N) = specs["x"].shape, specs["B"].shape[2:]
    dtype, like = specs["x"].dtype, specs["x"]
    wide = dtype, accumulator(dtype)
    check_array("dt", specs["dt"], (b, T, H), "[B, T, H]", wide, like)
    check_array("A", specs["A"], (H,), "[H]", DTYPES, like)
    check_array("B", specs["B"], (b, T, G, N), "[B, T, G, N] with the B and T of x", (dtype,), like)
    check_array("C", specs["C"], (b, T, G, N), "that of B, [B, T, G, N]", (dtype,), like)
    if H % G:
        raise ValueError(f"B and C have {G} groups and x has {H} heads; expected the groups to divide the heads")
    if "D" in specs and len(specs["D"].shape) == 2:
        check_array("D", specs["D"], (H, P), "[H, P]", DTYPES, like)
    elif "D" in specs:
        check_array("D", specs["D"], (H,), "[H] or [H, P]", DTYPES, like)
    if "z" in specs:
        check_array("z", specs["z"], (b, T, H, P), "that of x, [B, T, H, P]", (dtype,), like)
    if "dt_bias" in specs:
        check_array("dt_bias", specs["dt_bias"], (H,), "[H]", DTYPES, like)
    return dtype


def _spec(name: str, array: Any, x: Any) -> Spec:
    if not hasattr(array, "shape") or namespace(array) is not namespace(x):
        expected = "a torch tensor or a NumPy array" if name == "x" else "an array like x"
        raise TypeError(f"{name} is {type(array).__name__}; expected {expected}")
    return Spec(tuple(array.shape), str(array.dtype).removeprefix("torch."), str(getattr(array, "device", "cpu")))
