"""The public calls of recurrences over diagonal states."""

from __future__ import annotations

from typing import Any

from ..arrays import Array, ArrayOrList, ArrayOrTuple
from .diagonal import CAUSAL_CONV1D, RG_LRU, SELECTIVE_SCAN, ConvOptions, GatedOptions, ScanOptions
from .ops import compute


def selective_scan(
    u: Array,
    delta: Array,
    A: Array,
    B: Array,
    C: Array,
    *,
    D: Array | None = None,
    z: Array | None = None,
    delta_bias: Array | None = None,
    delta_softplus: bool = False,
    initial_state: Array | None = None,
    return_state: bool = False,
    cu_seqlens: ArrayOrList | None = None,
    chunk: int | None = None,
    backend: str | None = None,
) -> ArrayOrTuple:
    """Mamba's selective scan (Gu and Dao, 2023), for each channel d with N numbers of state:

        h_t = exp(Δ_t A_d) ⊙ h_{t-1} + Δ_t u_t B_t        y_t = (C_t · h_t + D_d u_t) · silu(z_t)

    Δ is delta + delta_bias, or its softplus with `delta_softplus`. B is discretised by Euler's rule, as in Mamba's
    code; the paper uses a zero-order hold. B and C may be constant in time: h_t = a h_{t-1} + b u_t with constant
    a > 0 is delta = 1, A = log a.

    Args:
        u, delta: [B, T, D], torch tensors or NumPy arrays. u is float32, bfloat16, float16 or float64; every other
            array has its dtype, or float32.
        A: [D, N]; numbers of at most 0 keep states bounded, but any number is allowed.
        B, C: [B, T, G, N], where G divides D and channel d reads group d // (D / G); [B, T, N] for one group; or [D, N]
            or [N], constant in time.
        D: [D]; None omits the term.
        z: [B, T, D]; None for no gate.
        delta_bias: [D]; None for 0.
        initial_state: [B, D, N], with cu_seqlens [S, D, N], float32 (float64 for float64 inputs); None for zeros.
        return_state: return (y, h_T); pass h_T as initial_state with the next tokens.
        cu_seqlens: integers [S + 1] from 0 to T, the bounds of S packed sequences; B must be 1.
        chunk: tokens between two states that the backward stores, 1 to 1024; None for the plan's choice.
        backend: "cpu", "triton" or "webgpu" (`selective_scan` only); None chooses by the device of the arrays.

    Returns:
        y [B, T, D] in the dtype of u; with `return_state` also the final state, shaped as the initial one.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        Unsupported: the backend cannot compute this.

    Examples:
        >>> u, delta, A = torch.randn(2, 1024, 64), torch.rand(2, 1024, 64), -torch.rand(64, 16)
        >>> B, C = torch.randn(2, 2, 1024, 16)
        >>> y = saccade.recurrent.selective_scan(u, delta, A, B, C)
    """
    arrays = {
        "u": u,
        "delta": delta,
        "A": A,
        "B": B,
        "C": C,
        "D": D,
        "z": z,
        "delta_bias": delta_bias,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
    }
    _require(arrays, "delta", "A", "B", "C")
    y, state = compute(SELECTIVE_SCAN, arrays, ScanOptions(delta_softplus, chunk, backend))
    return _with_state(y, state, return_state)


def rg_lru(
    x: Array,
    r: Array,
    i: Array,
    a_param: Array,
    *,
    initial_state: Array | None = None,
    return_state: bool = False,
    cu_seqlens: ArrayOrList | None = None,
    chunk: int | None = None,
    backend: str | None = None,
) -> ArrayOrTuple:
    """The real-gated linear recurrent unit of Griffin (De et al., 2024), with one number of state per channel:

        log a_t = −8 softplus(Λ) σ(r_t)        h_t = a_t h_{t-1} + sqrt(1 − a_t²) σ(i_t) x_t

    A sequence without an initial state starts a document: its first h is σ(i) x, without decay and square root. With
    an initial state, even of zeros, it continues one. 1 − a² is computed without a subtraction, so slow decays lose no
    digits. In gradients the slope of the square root, 1 / (2 sqrt(1 − a²)), is limited to 1000, as published; beyond
    that limit gradients are not exact.

    Args:
        x: [B, T, D], torch tensor or NumPy array of float32, bfloat16, float16 or float64.
        r, i: [B, T, D], the recurrence and input gates before their sigmoid. In the dtype of x or float32.
        a_param: [D], Λ.
        initial_state: [B, D], with cu_seqlens [S, D], float32 (float64 for float64 inputs).
        return_state, cu_seqlens, chunk, backend: as in `selective_scan`.

    Returns:
        h [B, T, D] in the dtype of x; with `return_state` also the last h, [B, D], in float32 (float64).

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        Unsupported: the backend cannot compute this.

    Examples:
        >>> x, r, i = torch.randn(3, 2, 1024, 64)
        >>> h = saccade.recurrent.rg_lru(x, r, i, torch.ones(64))
    """
    arrays = {"x": x, "r": r, "i": i, "a_param": a_param, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    _require(arrays, "r", "i", "a_param")
    h, state = compute(RG_LRU, arrays, GatedOptions(chunk, backend))
    return _with_state(h, state, return_state)


def causal_conv1d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    activation: str | None = None,
    initial_state: Array | None = None,
    return_state: bool = False,
    cu_seqlens: ArrayOrList | None = None,
    backend: str | None = None,
) -> ArrayOrTuple:
    """A convolution of each channel over its last K tokens, as in Mamba, DeltaNet and Griffin:

        y_t = f(bias + Σ_j weight_j x_{t−K+1+j})

    Args:
        x: [B, T, D], torch tensor or NumPy array of float32, bfloat16, float16 or float64.
        weight: [D, K] with K from 1 to 8; the last column is for the token itself. In the dtype of x or float32.
        bias: [D]; None for 0.
        activation: None, or "silu" for f.
        initial_state: [B, D, K − 1], with cu_seqlens [S, D, K − 1], float32 (float64 for float64 inputs): the tokens
            before x, oldest first; None for zeros.
        return_state: return (y, state), the last K − 1 tokens; pass it as initial_state with the next tokens.
        cu_seqlens, backend: as in `selective_scan`.

    Returns:
        y [B, T, D] in the dtype of x; with `return_state` also the state, shaped as the initial one.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        Unsupported: the backend cannot compute this.

    Examples:
        >>> x, weight = torch.randn(2, 1024, 64), torch.randn(64, 4)
        >>> y = saccade.recurrent.causal_conv1d(x, weight, activation="silu")
    """
    arrays = {"x": x, "weight": weight, "bias": bias, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    _require(arrays, "weight")
    y, state = compute(CAUSAL_CONV1D, arrays, ConvOptions("" if activation is None else activation, backend))
    return _with_state(y, state, return_state)


def _with_state(y: Any, state: Any, return_state: object) -> Any:
    if isinstance(return_state, str):
        raise ValueError(f"return_state is {return_state!r}; expected True or False: only matrices are kept in 16 bits")
    return (y, state) if return_state else y


def _require(arrays: dict[str, Any], *names: str) -> None:
    for name in names:
        if arrays[name] is None:
            raise TypeError(f"{name} is None; expected an array")
