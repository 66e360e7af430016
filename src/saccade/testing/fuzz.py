"""Random cases with small sizes, any mask expression and any options. A case depends only on its seed."""

from __future__ import annotations

import random

from .cases import Case
from .masks import Draw, expression

# the leaves of masks; every change of this list or its order gives each seed another case, and then the numbers that
# tests/contract/lacks lists as near misses are wrong
STREAM = (
    "causal", "window", "window-offset", "documents", "documents-two", "packed", "keys", "keys-between", "prefix",
    "global", "global-list", "columns", "strided", "dilated", "chunked",
)  # fmt: skip
DTYPES = ("float32", "float32", "bfloat16", "float16", "float64")


def random_case(seed: int) -> Case:
    """The case of this seed."""
    r = random.Random(seed)
    B = r.choice((1, 1, 2, 3))
    Hk, G = r.choice((1, 1, 2, 3)), r.choice((1, 1, 2, 4))
    Tq = r.choice((1, 1, 2, 5, r.randrange(80), r.randrange(80), r.randrange(200)))
    Tk = r.choice((Tq, Tq, Tq + r.randrange(60), r.randrange(1, 80), r.randrange(1, 260)))
    D = r.choice((8, 16, 24, 32, 64, r.randrange(1, 80)))
    Dv = r.choice((D, D, D, r.randrange(1, 80)))
    mask = random_mask(r, B, Hk * G, Tq, Tk)
    options: dict[str, object] = {
        "scale": r.choice((None, None, None, 0.2, 1.0, -0.3)),
        "softcap": r.choice((None, None, None, None, 2.0, 30.0)),
        "sinks": r.random() < 0.15,
        "dropout": r.choice((0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.1)),
        "seed": r.getrandbits(64),
    }
    more = r.choice(("", "", "", "", "alibi", "bias"))
    if more == "alibi":
        options["alibi"] = r.choice(("h", "bh"))
    if more == "bias":
        options["bias"] = "".join((r.choice("1b"), r.choice("1h"), r.choice("1q"), r.choice("1kk")))
    return Case(f"fuzz-{seed}", Tq, Tk, B, Hk * G, Hk, D, Dv, mask, **options)  # type: ignore[arg-type]


def random_dtype(seed: int) -> str:
    """The dtype that goes with `random_case(seed)`."""
    return random.Random(seed + (1 << 32)).choice(DTYPES)


def random_mask(r: random.Random, B: int, Hq: int, Tq: int, Tk: int) -> str:
    """The text of a mask that fits these sizes, "" for none."""
    names = ["causal", "causal", "window", *STREAM, *["tiles"] * bool(Tq and Tk), *["dense"] * (0 < Tq * Tk < 2000)]
    draw = Draw(r, B, Tq, Tk, names)
    if r.random() < 0.1:
        return ""
    if r.random() < 0.08:
        return f"per_head([{', '.join(expression(draw, 1) for _ in range(Hq))}])"
    return expression(draw, 2)
