"""Rotary position embedding, forward and inverse."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .arrays import Array, ArrayOrList, ArrayT, cast, is_torch, namespace
from .operands import check_flag, number

POSITIVE = "a finite number above 0"


class Turn(NamedTuple):
    """Cosine and sine [..., T, 1, D / 2] of the angles of pairs, which are (2i, 2i + 1) if interleaved."""

    cos: Any
    sin: Any
    interleaved: bool


def rope(
    x: ArrayT,
    positions: ArrayOrList,
    *,
    base: float = 10000.0,
    interleaved: bool = False,
    inverse: bool = False,
    frequencies: Array | None = None,
    factor: float = 1.0,
) -> ArrayT:
    """Rotate pair i of the elements of each head by the angle position * base**(-2i / D) (Su et al., 2021).

    Args:
        x: [B, T, H, D] or [T, H, D] with D even, a NumPy array or torch tensor.
        positions: [T] or [B, T], integers or real numbers.
        base: the base of the frequencies.
        interleaved: pairs are (2i, 2i + 1) instead of (i, i + D / 2).
        inverse: rotate back; this is also the gradient of the rotation.
        frequencies: [D / 2], radians per position for each pair, in place of base**(-2i / D).
        factor: the result is multiplied by this number.

    Returns:
        An array with the shape and dtype of x. Angles are computed in float64 (float32 on MPS), the rotation
        in float32 (float64 for float64 inputs).

    Raises:
        ValueError: D is odd, the shapes of x, positions and frequencies do not fit, base is not finite and above 0, or
            factor is not finite.
        TypeError: x is a NumPy array and positions a torch tensor; or an option has another type.

    Examples:
        >>> x = torch.randn(2, 1024, 8, 64)
        >>> x = saccade.rope(x, torch.arange(1024))
    """
    turn = turning(
        x, positions, base=base, interleaved=interleaved, inverse=inverse, frequencies=frequencies, factor=factor
    )
    return cast(rotated(cast(x, turn.cos.dtype), *turn), x.dtype)


# with their defaults
OPTIONS: dict[str, Any] = rope.__kwdefaults__ or {}


def turning(x: Any, positions: Any, **options: Any) -> Turn:
    """The rotation that `rope` applies to x; arguments and errors are those of `rope`. TypeError for other options."""
    if unknown := options.keys() - OPTIONS.keys():
        raise TypeError(f"rotation has {', '.join(map(str, unknown))}; expected options of rope: {', '.join(OPTIONS)}")
    base, interleaved, inverse, frequencies, factor = (OPTIONS | options).values()
    if number("base", base, POSITIVE) <= 0:
        raise ValueError(f"base is {base}; expected {POSITIVE}")
    number("factor", factor, "a finite number")
    check_flag("interleaved", interleaved)
    check_flag("inverse", inverse)
    if frequencies is not None and not hasattr(frequencies, "shape"):
        raise TypeError(f"frequencies is a {type(frequencies).__name__}; expected an array [D / 2]")
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
    if frequencies is not None and tuple(frequencies.shape) != (D // 2,):
        raise ValueError(f"frequencies has shape {list(frequencies.shape)}; expected [D / 2] = [{D // 2}]")
    cos, sin = angles(x, positions, D, base=base, frequencies=frequencies, factor=factor)
    return Turn(cos, -sin if inverse else sin, interleaved)


def rotated(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """x [..., D] with its pairs rotated; cos and sin broadcast to [..., D / 2]."""
    xp, half = namespace(x), x.shape[-1] // 2
    x0, x1 = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    y0, y1 = x0 * cos - x1 * sin, x0 * sin + x1 * cos
    return xp.stack([y0, y1], -1).reshape(tuple(x.shape)) if interleaved else xp.concatenate([y0, y1], -1)


def angles(
    x: Any, positions: Any, D: int, *, base: float = 10000.0, frequencies: Any = None, factor: float = 1.0
) -> tuple[Any, Any]:
    """Cosine and sine [..., T, 1, D / 2] of the angles at positions [..., T], in the framework of x."""
    xp = namespace(x)
    work = xp.float64 if x.dtype == xp.float64 else xp.float32
    if xp is np:
        pair, positions = np.arange(0, D, 2, dtype=np.float64), positions.astype(np.float64)
    else:
        # Metal has no float64
        fine = xp.float32 if x.device.type == "mps" else xp.float64
        pair = xp.arange(0, D, 2, dtype=fine, device=x.device)
        positions = xp.as_tensor(positions, device=x.device).to(fine)
        frequencies = None if frequencies is None else xp.as_tensor(frequencies, device=x.device).to(fine)
    if frequencies is None:
        # on the device of x, so that nothing is copied
        frequencies = float(base) ** (-pair / max(D, 1))
    angle = (positions[..., None] * frequencies)[..., None, :]
    cos, sin = cast(xp.cos(angle), work), cast(xp.sin(angle), work)
    # NumPy's float64 would make float64 of float32
    return (cos, sin) if factor == 1.0 else (cos * float(factor), sin * float(factor))
