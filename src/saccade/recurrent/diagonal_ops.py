"""The recurrences over diagonal states as public calls: what each computes, in which layouts, from which paper."""

from __future__ import annotations

from typing import Any

from .diagonal import CAUSAL_CONV1D, RG_LRU, SELECTIVE_SCAN, ConvOptions, GatedOptions, ScanOptions
from .ops import compute


def selective_scan(
    u: Any,
    delta: Any,
    A: Any,
    B: Any,
    C: Any,
    *,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    initial_state: Any = None,
    return_state: bool = False,
    cu_seqlens: Any = None,
    chunk: int | None = None,
    backend: str | None = None,
) -> Any:
    """Mamba's scan (Gu and Dao, 2023), for each channel d with N numbers of state:

        h_t = exp(Δ_t A_d) ⊙ h_{t-1} + Δ_t u_t B_t        y_t = (C_t · h_t + D_d u_t) · silu(z_t)

    Δ is delta + delta_bias, through softplus where `delta_softplus`. B is discretised by Euler's rule, as in Mamba's
    code; its paper has the zero-order hold. B and C may be the same at all times: h_t = a h_{t-1} + b u_t with constant
    a > 0 is delta = 1, A = log a.

    Args:
        u, delta: [B, T, D], torch tensors or NumPy arrays. u is float32, bfloat16, float16 or float64; every other
            array has its dtype, or float32.
        A: [D, N], at most 0 where states are to stay bounded; any number is computed.
        B, C: by the number of their dimensions [B, T, G, N] (G divides D, channel d reads group d // (D / G)),
            [B, T, N] (one group), [D, N] or [N] (constant).
        D: [D], no term if None.
        z: [B, T, D], no gate if None.
        delta_bias: [D].
        initial_state: [B, D, N] float32 (float64 for float64 inputs), zeros if None; with cu_seqlens one a sequence.
        return_state: return (y, h_T), to go on from with the next tokens.
        cu_seqlens: [S + 1] integers from 0 to T, the borders of packed sequences; B must be 1.
        chunk: tokens between two states that the backward keeps, 1 to 1024. None: the plan's choice.
        backend: "cpu", "triton", "webgpu" (`selective_scan` alone), or None to choose by where the arrays live.

    Returns:
        y [B, T, D] in the dtype of u; with `return_state` also the final state, shaped as the initial one.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        Unsupported: the backend cannot compute this.
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
    return (y, state) if return_state else y


def rg_lru(
    x: Any,
    r: Any,
    i: Any,
    a_param: Any,
    *,
    initial_state: Any = None,
    return_state: bool = False,
    cu_seqlens: Any = None,
    chunk: int | None = None,
    backend: str | None = None,
) -> Any:
    """The real-gated linear recurrent unit of Griffin (De et al., 2024), one number of state a channel:

        log a_t = −8 softplus(Λ) σ(r_t)        h_t = a_t h_{t-1} + sqrt(1 − a_t²) σ(i_t) x_t

    A sequence without an initial state begins a document: its first h is σ(i) x, with neither decay nor root. With
    one, even of zeros, it goes on. 1 − a² is computed without a difference, so slow decays keep their digits. In
    gradients the root's slope 1 / (2 sqrt(1 − a²)) is at most 1000, as published; beyond that they are not exact.

    Args:
        x: [B, T, D], torch tensor or NumPy array of float32, bfloat16, float16 or float64.
        r, i: [B, T, D], the recurrence and input gates before their sigmoid. In the dtype of x or float32.
        a_param: [D], Λ.
        initial_state: [B, D] float32 (float64 for float64 inputs); with cu_seqlens one a sequence.
        return_state, cu_seqlens, chunk, backend: as in `selective_scan`.

    Returns:
        h [B, T, D] in the dtype of x; with `return_state` also the last one, [B, D] in float32 (float64).

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        Unsupported: the backend cannot compute this.
    """
    arrays = {"x": x, "r": r, "i": i, "a_param": a_param, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    _require(arrays, "r", "i", "a_param")
    h, state = compute(RG_LRU, arrays, GatedOptions(chunk, backend))
    return (h, state) if return_state else h


def causal_conv1d(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    activation: str | None = None,
    initial_state: Any = None,
    return_state: bool = False,
    cu_seqlens: Any = None,
    backend: str | None = None,
) -> Any:
    """A convolution of each channel over its last K tokens, the part that Mamba, DeltaNet and Griffin have in common:

        y_t = f(bias + Σ_j weight_j x_{t−K+1+j})

    Args:
        x: [B, T, D], torch tensor or NumPy array of float32, bfloat16, float16 or float64.
        weight: [D, K] with K from 1 to 8, its last column for the token itself. In the dtype of x or float32.
        bias: [D].
        activation: None, or "silu" for f.
        initial_state: [B, D, K − 1] float32 (float64 for float64 inputs), the tokens before x, oldest first; zeros if
            None; with cu_seqlens one a sequence.
        return_state: return (y, the last K − 1 tokens), to go on from with the next ones.
        cu_seqlens, backend: as in `selective_scan`.

    Returns:
        y [B, T, D] in the dtype of x; with `return_state` also the state, shaped as the initial one.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        Unsupported: the backend cannot compute this.
    """
    arrays = {"x": x, "weight": weight, "bias": bias, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    _require(arrays, "weight")
    y, state = compute(CAUSAL_CONV1D, arrays, ConvOptions("" if activation is None else activation, backend))
    return (y, state) if return_state else y


def _require(arrays: dict[str, Any], *names: str) -> None:
    for name in names:
        if arrays[name] is None:
            raise TypeError(f"{name} is None; expected an array")
