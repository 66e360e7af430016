"""The public calls of recurrences over matrix states."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..arrays import Array, ArrayOrList, ArrayOrTuple, is_mlx, namespace
from ..operands import check_flag, number
from .family import Family, kind_of
from .problem import MAPS, MATRIX, MatrixOptions, kept
from .steps import from_columns, in_columns, in_steps, last_steps


def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = True,
    feature_map: str | None = "elu+1",
    normalize: bool = True,
    scale: float | None = None,
    initial_state: Array | tuple[Array, Array] | None = None,
    return_state: bool | str = False,
    cu_seqlens: ArrayOrList | None = None,
    chunk: int | None = None,
    backend: str | None = None,
) -> ArrayOrTuple:
    """Linear attention: o_t = φ(q_t)ᵀ S_t / φ(q_t)ᵀ z_t with S_t = Σ φ(k_j) v_jᵀ and z_t = Σ φ(k_j), j <= t or all j.

    Source: Katharopoulos et al., 2020. A query whose weights sum to 0 has o = 0.

    Args:
        q, k, v, cu_seqlens, chunk, backend: as in `scalar_decay`.
        causal: True sums over j <= t; False over all keys of a sequence, in two products.
        feature_map: φ. "elu+1", "relu", "exp" and None (identity) apply to each number; "taylor" has
            φ(q) · φ(k) = 1 + s + s²/2 with s = scale q · k, in 1 + K + K (K + 1) / 2 features (Arora et al., 2024).
        normalize: divide by φ(q)ᵀ z. It needs a feature map, because sums of signed weights pass through 0.
        scale: factor of o, or of q · k in the Taylor map; None for 1/sqrt(K). With normalize it cancels, except in the
            Taylor map.
        initial_state: (S [B, H, F, V], z [B, H, F]), with cu_seqlens [N, ...], in the dtypes of `scalar_decay`; F is K,
            or the number of features of the Taylor map. Without normalize only S. None for zeros.
        return_state: return (o, (S, z)), or (o, S) without normalize; a name of a dtype as in `scalar_decay`.

    Returns:
        o [B, T, H, V] in the dtype of q; with `return_state` also the final state, in the form of initial_state.

    Raises:
        TypeError, ValueError, Unsupported: as in `scalar_decay`.

    Examples:
        >>> q, k, v = torch.randn(3, 2, 1024, 8, 64)
        >>> o = saccade.recurrent.linear_attention(q, k, v)
    """
    if feature_map is not None and feature_map not in MAPS:
        raise ValueError(f"feature_map is {feature_map!r}; expected None or one of {', '.join(MAPS)}")
    check_flag("normalize", normalize)
    check_flag("causal", causal)
    if normalize and feature_map is None:
        raise ValueError(
            "normalize without a feature map divides by sums that pass through 0; give one, or normalize=False"
        )
    if normalize and scale == 0:
        raise ValueError(f"scale is {scale!r} and normalize divides by sums that contain it; expected another number")
    if feature_map == "taylor" and scale is not None and not number("scale", scale, "a positive number") > 0:
        raise ValueError(f"scale is {scale!r} in the Taylor map; expected a positive number")
    joined = _join(initial_state) if normalize and initial_state is not None else initial_state
    arrays = {"q": q, "k": k, "v": v, "initial_state": joined, "cu_seqlens": cu_seqlens}
    options = MatrixOptions("add", feature_map or "", normalize, causal, scale, chunk, "", *kept(return_state), backend)
    o, state = compute(MATRIX, arrays, options)
    if not return_state:
        return o
    return o, (state[..., :-1], state[..., -1]) if normalize else state


def scalar_decay(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    return_state: bool | str = False,
    cu_seqlens: ArrayOrList | None = None,
    chunk: int | None = None,
    backend: str | None = None,
) -> ArrayOrTuple:
    """A recurrence with one decay per head and token: S_t = exp(g_t) S_{t-1} + k_t v_tᵀ, o_t = scale S_tᵀ q_t.

    It is RetNet (Sun et al., 2023) if g is constant in time, otherwise the simple form of GLA and Mamba-2's SSD.

    Args:
        q, k: [B, T, Hk, K], torch tensors, NumPy or MLX arrays of float32, bfloat16, float16 or float64. Hk divides H;
            head h reads head h // (H / Hk).
        v: [B, T, H, V].
        g: [B, T, H], logarithm of the decay, at most 0; -inf resets the state. In the dtype of q or float32.
        scale: factor of o; None for 1/sqrt(K).
        initial_state: [B, H, K, V], with cu_seqlens [N, H, K, V], float32 (float64 for float64 inputs), bfloat16 or
            float16; None for zeros.
        return_state: return (o, S_T); pass S_T as initial_state with the next tokens. "bfloat16" or "float16" rounds
            S_T once, after the last token, to store it in half the memory; True returns float32 (float64).
        cu_seqlens: integers [N + 1] from 0 to T, the bounds of N packed sequences; B must be 1.
        chunk: tokens that the CPU computes at a time, 1 to 128; 1 is the recurrence itself. None for the plan's choice.
        backend: "cpu", "triton", "webgpu", "metal" (linear attention); None chooses by the device of the arrays.

    Returns:
        o [B, T, H, V] in the dtype of q; with `return_state` also the final state, shaped as the initial one.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        Unsupported: the backend cannot compute this.

    Examples:
        >>> q, k, v, g = *torch.randn(3, 2, 1024, 8, 64), -torch.rand(2, 1024, 8)
        >>> o, state = saccade.recurrent.scalar_decay(q, k, v, g, return_state=True)
        >>> state.shape
        torch.Size([2, 8, 64, 64])
    """
    arrays = {"q": q, "k": k, "v": v, "g": g, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    if len(getattr(g, "shape", ())) != 3:
        raise ValueError(f"g is {kind_of(g)}; expected [B, T, H], one decay per head: gated_linear takes [B, T, H, K]")
    options = MatrixOptions("add", "", False, True, scale, chunk, "", *kept(return_state), backend)
    o, state = compute(MATRIX, arrays, options)
    return (o, state) if return_state else o


def gated_linear(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    return_state: bool | str = False,
    cu_seqlens: ArrayOrList | None = None,
    chunk: int | None = None,
    backend: str | None = None,
) -> ArrayOrTuple:
    """A recurrence with one decay per key channel: S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ, o_t = scale S_tᵀ q_t.

    Source: GLA (Yang et al., 2024).

    Args:
        g: [B, T, H, K], logarithms of the decays, at most 0; -inf resets a channel. In the dtype of q or float32.
        q, k, v, scale, initial_state, return_state, cu_seqlens, chunk, backend: as in `scalar_decay`.

    Returns:
        o [B, T, H, V], with `return_state` also the final state, as in `scalar_decay`.

    Raises:
        TypeError, ValueError, Unsupported: as in `scalar_decay`.

    Examples:
        >>> q, k, v = torch.randn(3, 2, 1024, 8, 64)
        >>> o = saccade.recurrent.gated_linear(q, k, v, -torch.rand(2, 1024, 8, 64))
    """
    if len(getattr(g, "shape", ())) != 4:
        raise ValueError(
            f"g is {kind_of(g)}; expected [B, T, H, K], one decay per channel: scalar_decay takes [B, T, H]"
        )
    arrays = {"q": q, "k": k, "v": v, "g": g, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    options = MatrixOptions("add", "", False, True, scale, chunk, "", *kept(return_state), backend)
    o, state = compute(MATRIX, arrays, options)
    return (o, state) if return_state else o


def gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    g: Array | None = None,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    return_state: bool | str = False,
    cu_seqlens: ArrayOrList | None = None,
    chunk: int | None = None,
    backend: str | None = None,
) -> ArrayOrTuple:
    """The delta rule: S_t = (I - beta_t k_t k_tᵀ) exp(g_t) S_{t-1} + beta_t k_t v_tᵀ, o_t = scale S_tᵀ q_t.

    DeltaNet (Schlag et al., 2021) without g, gated DeltaNet (Yang et al., 2025) with one decay per head, Kimi delta
    attention (Kimi Linear; Kimi Team, 2025) with one per key channel, diag(exp(g_t)). Within a chunk the values that
    the state absorbs solve a triangular system, the UT transform of Yang et al., 2024.

    With n keys per token it is DeltaProduct (Siems et al., 2025): the state decays once per token, follows the rule n
    times and is then read. It is computed as n T tokens, of which every n-th has an output.

    Args:
        q, k, v: as in `scalar_decay`, or k [B, T, n, Hk, K], v [B, T, n, H, V] and beta [B, T, n, H] for n steps. Keys
            are not normalised here: the state stays bounded if the norm of k is 1 and beta is between 0 and 1, or up
            to 2.
        beta: [B, T, H], the share of the state's value for a key that the new value replaces. In the dtype of q or
            float32. With one per value channel, [B, T, H, V], each channel is computed as a head of its own, which
            takes V times the work and memory of a head.
        g: [B, T, H] or [B, T, H, K], logarithm of the decay of a head or of each of its key channels, at most 0; -inf
            resets the state or a channel. In the dtype of q or float32. None for no decay.
        scale, initial_state, return_state, cu_seqlens, chunk, backend: as in `scalar_decay`.

    Returns:
        o [B, T, H, V], with `return_state` also the final state, as in `scalar_decay`.

    Raises:
        TypeError, ValueError, Unsupported: as in `scalar_decay`.

    Examples:
        >>> q, k, v = torch.randn(3, 2, 1024, 8, 64)
        >>> k, beta = torch.nn.functional.normalize(k, dim=-1), torch.rand(2, 1024, 8)
        >>> o = saccade.recurrent.gated_delta_rule(q, k, v, beta, -torch.rand(2, 1024, 8))
    """
    if beta is None:  # pyright: ignore[reportUnnecessaryComparison]
        raise TypeError("beta is None; expected an array [B, T, H]: scalar_decay has no delta rule")
    if g is not None and len(getattr(g, "shape", ())) not in (3, 4):
        raise ValueError(f"g is {kind_of(g)}; expected [B, T, H] or [B, T, H, K], a decay per head or channel, or None")
    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    ranks = [len(getattr(x, "shape", ())) for x in (k, v, beta)]
    several, by_column = ranks[0] == 5, ranks == [4, 4, 4]
    options = MatrixOptions("delta", "", False, True, scale, chunk, "", *kept(return_state), backend)
    o, state = compute(MATRIX, (in_steps if several else in_columns if by_column else dict)(arrays), options)
    if by_column:
        o, state = from_columns(o, state, v.shape[2])
    o = last_steps(o, k.shape[1]) if several else o
    return (o, state) if return_state else o


def compute(family: Family, arrays: dict[str, Any], options: Any) -> tuple[Any, ...]:
    """The outputs of a family's operator, in the framework of its first array; omitted arrays are None."""
    operands = {name: arrays.get(name) for name in family.names}
    first = family.names[0]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(operands[first], torch.Tensor):
        from ..frameworks import torch_recurrent as framework
    elif isinstance(operands[first], np.ndarray):
        from ..frameworks import numpy_recurrent as framework
    elif is_mlx(operands[first]):
        from ..frameworks import mlx_recurrent as framework
    else:
        kind = type(operands[first]).__name__
        raise TypeError(f"{first} is {kind}; expected a torch tensor or a NumPy array, or one of MLX")
    return framework.compute(family, operands, options)


def _join(state: Any) -> Any:
    # S and z in the form of the kernels: the normaliser is one more column
    if not isinstance(state, (tuple, list)) or len(state) != 2:
        raise TypeError(
            f"initial_state is {kind_of(state)}; expected (S [B, H, K, V], z [B, H, K]) with normalize, as calls return"
        )
    S, z = state
    if not (hasattr(S, "shape") and tuple(getattr(z, "shape", ())) == tuple(S.shape[:-1])):
        raise ValueError(f"initial_state is {kind_of(S)} and {kind_of(z)}; expected S [B, H, K, V] and z [B, H, K]")
    xp = sys.modules["mlx.core"] if is_mlx(S) else namespace(S)
    return xp.concatenate([S, z[..., None]], -1)
