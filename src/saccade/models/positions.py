"""Angles of rotary positions: plain, or scaled for longer texts in the ways that checkpoints use.

Sources: Chen et al. 2023 (linear), Peng et al. 2023 (YaRN), Llama 3.1's `rope_scaling`; names as in Hugging Face's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .fields import ROPE, check_fields

Floats = NDArray[np.float64]


def rotary(scaling: Mapping[str, Any] | None, base: float, D: int, positions: int) -> tuple[Floats | None, float]:
    """(angle per position of every pair [D / 2], factor of cosine and sine), as `saccade.rope` takes them.

    scaling: a config's `rope_scaling`, None for plain angles; positions: its max_position_embeddings.
    Raises ValueError for an unsupported kind, for a missing number, and for numbers that give no valid angles.
    """
    if scaling is None:
        return None, 1.0
    check_fields(scaling, ROPE, "rope_scaling")
    scaling = {name: value for name, value in scaling.items() if value is not None}
    plain = base ** (-np.arange(0, D, 2) / max(D, 1))
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in KINDS:
        raise ValueError(f"rope_scaling is {dict(scaling)}; expected rope_type to be one of {', '.join(KINDS)}")
    try:
        with np.errstate(all="raise", under="ignore"):
            return KINDS[kind](plain, scaling, base, D, positions)
    except KeyError as error:
        raise ValueError(f"rope_scaling is {dict(scaling)}; expected {error} in it for rope_type {kind!r}") from None
    except ArithmeticError as error:
        raise ValueError(
            f"rope_scaling is {dict(scaling)} for rope_theta {base}; it gives no angles: {error}"
        ) from None


def _default(plain: Floats, *_: Any) -> tuple[Floats, float]:
    return plain, 1.0


def _linear(plain: Floats, x: Mapping[str, Any], *_: Any) -> tuple[Floats, float]:
    return plain / x["factor"], 1.0


def _llama3(plain: Floats, x: Mapping[str, Any], *_: Any) -> tuple[Floats, float]:
    # the factor slows long waves but not short ones; those between are mixed by their turns in the old length
    turns = x["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = x["low_freq_factor"], x["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return plain * (smooth + (1 - smooth) / x["factor"]), 1.0


def stretch(x: Mapping[str, Any], positions: int) -> float:
    """How many times longer the texts of a `rope_scaling` are than those before it; positions: as in `rotary`."""
    if x.get("rope_type", x.get("type")) == "default":
        return 1.0
    old = x.get("original_max_position_embeddings") or positions
    return x.get("factor") or positions / old


def _yarn(plain: Floats, x: Mapping[str, Any], base: float, D: int, positions: int) -> tuple[Floats, float]:
    old = x.get("original_max_position_embeddings") or positions
    factor = stretch(x, positions)

    def pair_of(turns: float) -> float:
        # the pair that makes this many turns in the old length
        return D * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_of(x.get("beta_fast") or 32), pair_of(x.get("beta_slow") or 1)
    if x.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, D - 1)
    slowed = np.clip((np.arange(D // 2) - low) / (high - low or 0.001), 0, 1)
    return plain * (1 - slowed + slowed / factor), _attention_factor(x, factor)


def _attention_factor(x: Mapping[str, Any], factor: float) -> float:
    attention_factor = x.get("attention_factor")
    if attention_factor is not None:
        return float(attention_factor)

    def of(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    one, all_dims = x.get("mscale"), x.get("mscale_all_dim")
    return of(one) / of(all_dims) if one and all_dims else of(1)


KINDS: dict[str, Callable[..., tuple[Floats, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
