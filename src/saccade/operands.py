"""The arguments of a call besides q, k and v, and checks of their shapes, dtypes and ranges.

`problem.py` has the dimension key.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Set
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from .mask import Mask

DTYPES = ("float32", "bfloat16", "float16", "float64")
FP8 = ("float8_e4m3fn", "float8_e5m2")


class Side(NamedTuple):
    """The side arrays of a call: those besides q, k and v that have gradients (or their specs); None if missing.

    bias: broadcasts to [B, Hq, Tq, Tk]. slopes of ALiBi: [Hq] or [B, Hq]. sinks: [Hq]. table of `relative`: [Hq, R] or
    [B, Hq, R]. log_f of `gates`: [B, Tk, Hq]. table and log_f are the caller's, or in the form that
    `biases.for_kernels` returns.
    """

    bias: Any = None
    slopes: Any = None
    sinks: Any = None
    table: Any = None
    log_f: Any = None

    def map(self, function: Callable[[Any], Any]) -> Side:
        """function applied to each array that is not None."""
        return Side(*[None if x is None else function(x) for x in self])

    def checked(self, function: Callable[[str, Any], Any]) -> Side:
        """function(words, array) for each array that is not None; words: how error messages name it."""
        return Side(*[None if x is None else function(words, x) for words, x in zip(_WORDS, self, strict=True)])


# how error messages name the side arrays
_WORDS = Side("bias", "the slopes of alibi", "sinks", "the table of relative", "log_f of gates")
NO_SIDE = Side()


class Options(NamedTuple):
    """The numeric options of a call as the caller passed them, and how to compute it.

    descale: the factors of 8-bit q, k and v, arrays or specs. origin: the index of distance 0 in the table. summed:
    log_f already holds running sums, from a cache. return_max, return_entropy: whether these results are wanted.
    """

    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    descale: Any = None
    deterministic: bool | str = True
    backend: str | None = None
    origin: int = 0
    summed: bool = False
    return_max: bool = False
    return_entropy: bool = False


DEFAULTS = Options()


class Request(NamedTuple):
    """The arguments besides q, k and v. seed: the seed of the dropout, an integer, a 0-d integer array, or None."""

    mask: Mask | None = None
    side: Side = NO_SIDE
    options: Options = DEFAULTS
    seed: Any = None


PLAIN = Request()


class Spec(NamedTuple):
    """Shape, dtype name and device name of an array of any framework."""

    shape: tuple[int, ...]
    dtype: str
    device: str


def in_use(options: Any, known: Set[str]) -> frozenset[str]:
    """The fields of a dataclass that differ from their defaults, except those in `known`.

    The fields are read from the class, so a field that is added later is included.
    """
    names = [f.name for f in fields(options) if f.name not in known and getattr(options, f.name) != f.default]
    return frozenset(names)


def number(name: str, value: object, expected: str) -> float:
    """value as a finite float; raises TypeError if it is not a real number, ValueError if it is not finite."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); expected {expected}")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; expected {expected}")
    return float(value)


def check_flag(name: str, value: object) -> None:
    """Raise TypeError unless value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; expected True or False")


def check_descale(descale: object, dtype: str, B: int, heads: tuple[int, int, int], device: str) -> None:
    """Raise ValueError or TypeError unless descale is the three factors [H] or [B, H] of 8-bit q, k and v."""
    if not isinstance(descale, (tuple, list)) or len(descale) != 3:  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(
            f"descale is {type(descale).__name__} for {dtype} arrays; expected three float32 arrays, the factors of q, "
            f"k and v: [B, H] or [H]"
        )
    factors: list[Any] = list(descale)  # pyright: ignore[reportUnknownArgumentType]
    for name, x, H in zip("qkv", factors, heads, strict=True):
        if not isinstance(x, Spec):
            raise TypeError(f"descale of {name} is {type(x).__name__}; expected an array like q, [{H}] or [{B}, {H}]")
        if tuple(x.shape) not in ((H,), (B, H)):
            raise ValueError(f"descale of {name} has shape {list(x.shape)}; expected [{H}] or [{B}, {H}]")
        if x.dtype != "float32" or x.device != device:
            raise ValueError(f"descale of {name} is {x.dtype} on {x.device}; expected float32 on {device}, like q")


def _range(dtype: str) -> tuple[str, float, float]:
    # the dtype in which scores are computed, its smallest normal number and its largest number
    wide = np.finfo(np.float64 if dtype == "float64" else np.float32)
    return wide.dtype.name, float(wide.tiny), float(wide.max)


def scale_of(scale: float, dtype: str) -> float:
    """scale as a float; raises unless it is within the range of the scores."""
    value = number("scale", scale, "a finite number")
    wide, _, largest = _range(dtype)
    if abs(value) > largest:
        raise ValueError(f"scale is {scale!r}; expected at most {largest:.4g} in size, the range of {wide} scores")
    return value


def softcap_of(softcap: float | None, dtype: str) -> float:
    """softcap as a float, 0.0 for None; raises unless it is positive and within the range of the scores."""
    if softcap is None:
        return 0.0
    value = number("softcap", softcap, "a positive number, or None")
    if value <= 0:
        raise ValueError(f"softcap is {softcap!r}; expected a positive number, or None for no cap")
    wide, smallest, largest = _range(dtype)
    if not smallest <= value <= largest:
        raise ValueError(
            f"softcap is {softcap!r}; expected {smallest:.4g} to {largest:.4g}, the range of {wide} scores, or None "
            f"for no cap"
        )
    return value


def table_shape(table: Spec, B: int, Hq: int, device: str) -> tuple[int, int]:
    """[1 | B, Hq], the first dimensions of a table [Hq, R] or [B, Hq, R]."""
    _floating("the table of relative", table, device)
    shape = (1, *table.shape) if len(table.shape) == 2 else tuple(table.shape)
    if shape[:2] not in ((1, Hq), (B, Hq)):
        raise ValueError(
            f"relative has a table of shape {list(table.shape)}; expected [Hq, R] = [{Hq}, R] or [{B}, {Hq}, R]"
        )
    return shape[0], shape[1]


def check_gates(log_f: Spec, B: int, Tk: int, Hq: int, device: str) -> bool:
    """Return True; raise ValueError or TypeError unless log_f has a gate per position and query head."""
    _floating("log_f", log_f, device)
    if tuple(log_f.shape) != (B, Tk, Hq):
        raise ValueError(f"log_f has shape {list(log_f.shape)}; expected [B, Tk, Hq] = [{B}, {Tk}, {Hq}]")
    return True


def dropout_of(dropout: float) -> float:
    """dropout as a float; raises unless 0 <= dropout < 1."""
    value = number("dropout", dropout, "a probability, 0 <= dropout < 1")
    if not 0.0 <= value < 1.0:
        raise ValueError(f"dropout is {dropout!r}; expected 0 <= dropout < 1")
    return value


def _floating(name: str, spec: Spec, device: str) -> None:
    if spec.dtype not in DTYPES:
        hint = "booleans go to mask=saccade.mask.dense(array)" if spec.dtype == "bool" else "cast it first"
        raise TypeError(f"{name} has dtype {spec.dtype}; expected one of {', '.join(DTYPES)}: {hint}")
    if spec.device != device:
        raise ValueError(f"{name} lives on {spec.device} and q on {device}; move them together")


def check_sinks(sinks: Spec, Hq: int, device: str) -> bool:
    """Return True; raise ValueError or TypeError unless sinks has one floating logit per query head."""
    _floating("sinks", sinks, device)
    if tuple(sinks.shape) != (Hq,):
        raise ValueError(f"sinks has shape {list(sinks.shape)}; expected [Hq] = [{Hq}], one logit per query head")
    return True


def slopes_shape(slopes: Spec, B: int, Hq: int, device: str) -> tuple[int, int]:
    """[1 | B, Hq], the shape of ALiBi slopes [Hq] or [B, Hq]."""
    _floating("the slopes of alibi", slopes, device)
    shape = (1, *slopes.shape) if len(slopes.shape) == 1 else tuple(slopes.shape)
    if shape not in ((1, Hq), (B, Hq)):
        raise ValueError(f"alibi has slopes of shape {list(slopes.shape)}; expected [Hq] = [{Hq}] or [B, Hq]")
    return shape[0], shape[1]


def bias_shape(bias: Spec, full: tuple[int, int, int, int], device: str, grad: bool) -> tuple[int, int, int, int]:
    """The shape of a bias, extended to the four dimensions of the scores, `full`; grad: whether it needs a gradient."""
    _floating("bias", bias, device)
    shape = (1,) * (4 - len(bias.shape)) + tuple(bias.shape)
    if len(shape) != 4 or any(n not in (1, m) for n, m in zip(shape, full, strict=True)):
        raise ValueError(f"bias has shape {list(bias.shape)}; expected one that broadcasts to [B, Hq, Tq, Tk] = {full}")
    if grad and shape[3] != full[3]:
        raise ValueError(
            f"bias of shape {list(bias.shape)} needs a gradient; only [1|B, 1|Hq, Tq, Tk] and [1|B, 1|Hq, 1, Tk] "
            f"have one: expand it to [..., {full[3]}] first, or detach it"
        )
    return shape[0], shape[1], shape[2], shape[3]
