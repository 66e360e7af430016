"""Rotary positions, forward and inverse."""

from __future__ import annotations

from typing import Any

import numpy as np

from .arrays import cast, is_torch, namespace


def rope(
    x: Any, positions: Any, *, base: float = 10000.0, interleaved: bool = False, inverse: bool = False,
    frequencies: Any = None, factor: float = 1.0,
) -> Any:  # fmt: skip
    """Rotate pair i of each head's elements by the angle position * base**(-2i / D) (Su et al. 2021; S17).

    x: [B, T, H, D] or [T, H, D], D even, NumPy array or torch tensor. positions: [T] or [B, T], any numbers.
    Pairs are (i, i + D/2), or (2i, 2i + 1) when interleaved. inverse turns back, which is also the gradient.
    frequencies: [D/2], the angle of each pair per position in place of base's; the result is multiplied by factor.

    Returns an array like x. Angles are made in float64 and the rotation in float32 (float64 for float64 inputs).
    Raises ValueError for an odd D, a wrong rank or positions that do not fit, TypeError for NumPy mixed with torch.
    """
    shape, D = tuple(x.shape), x.shape[-1]
    if len(shape) not in (3, 4) or D % 2:
        raise ValueError(f"x has shape {list(shape)}; expected [B, T, H, D] or [T, H, D] with D even")
    positions = positions if is_torch(positions) else np.asarray(positions)
    if is_torch(positions) and not is_torch(x):
        raise TypeError("x is a NumPy array and positions a torch tensor; convert one to the other")
    fits = (shape[:1],) if len(shape) == 3 else (shape[1:2], shape[:2], (1, shape[1]))
    if tuple(positions.shape) not in fits:
        expected = "[T]" if len(shape) == 3 else "[T] or [B, T]"
        raise ValueError(f"positions has shape {list(positions.shape)}; expected {expected} for x {list(shape)}")
    xp = namespace(x)
    if frequencies is None:
        frequencies = float(base) ** (-np.arange(0, D, 2, dtype=np.float64) / max(D, 1))
    if tuple(frequencies.shape) != (D // 2,):
        raise ValueError(f"frequencies has shape {list(frequencies.shape)}; expected [D / 2] = [{D // 2}]")
    cos, sin = _turn(x, positions, frequencies)
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    sin = -sin if inverse else sin
    wide = cast(x, cos.dtype)
    x0, x1 = (wide[..., 0::2], wide[..., 1::2]) if interleaved else (wide[..., : D // 2], wide[..., D // 2 :])
    y0, y1 = x0 * cos - x1 * sin, x0 * sin + x1 * cos
    y = xp.stack([y0, y1], -1).reshape(shape) if interleaved else xp.concatenate([y0, y1], -1)
    return cast(y, x.dtype)


def _turn(x: Any, positions: Any, frequencies: Any) -> tuple[Any, Any]:
    # cosine and sine [.., T, 1, D/2] of every angle
    xp = namespace(x)
    work = xp.float64 if x.dtype == xp.float64 else xp.float32
    if xp is np:
        positions = positions.astype(np.float64)
    else:
        # metal has no float64
        fine = xp.float32 if x.device.type == "mps" else xp.float64
        frequencies = xp.as_tensor(frequencies, device=x.device).to(fine)
        positions = xp.as_tensor(positions, device=x.device).to(fine)
    angle = (positions[..., None] * frequencies)[..., None, :]
    return cast(xp.cos(angle), work), cast(xp.sin(angle), work)
