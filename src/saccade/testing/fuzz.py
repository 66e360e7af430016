"""Random cases: small sizes, any mask expression, any options. A case follows from its seed alone."""

from __future__ import annotations

import random

from .cases import Case

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
    if r.random() < 0.1:
        return ""
    if r.random() < 0.08:
        return f"per_head([{', '.join(_term(r, B, Tq, Tk, 1) for _ in range(Hq))}])"
    return _term(r, B, Tq, Tk, 2)


def _term(r: random.Random, B: int, Tq: int, Tk: int, depth: int) -> str:
    draw = r.random()
    if depth == 0 or draw < 0.4:
        return _leaf(r, B, Tq, Tk)
    if draw < 0.5:
        return f"~({_term(r, B, Tq, Tk, depth - 1)})"
    sign = "&" if draw < 0.8 else "|"
    return f"({_term(r, B, Tq, Tk, depth - 1)}) {sign} ({_term(r, B, Tq, Tk, depth - 1)})"


def _columns(r: random.Random, Tq: int, Tk: int) -> str:
    rows = [sorted((r.randint(0, Tq), r.randint(0, Tq))) for _ in range(Tk)]
    start, stop = ([pair[n] for pair in rows] for n in (0, 1))
    return f"columns({r.choice((None, start, start))}, {stop})"


def _leaf(r: random.Random, B: int, Tq: int, Tk: int) -> str:
    def upto(n: int) -> int:
        return r.randint(0, max(n, 0))

    def maybe(value: int) -> int | None:
        return r.choice((None, value, value))

    def batch(n: int) -> int | list[int]:
        return r.choice((upto(n), [upto(n) for _ in range(B)]))

    def ids(n: int) -> list[int]:
        new = r.choice((0.02, 0.1, 0.4))
        now, out = 0, []
        for _ in range(n):
            now += r.random() < new
            out.append(now)
        return out

    def cuts(n: int, parts: int) -> list[int]:
        inner = sorted(upto(n) for _ in range(parts - 1))
        return r.choice(([0, *inner, n], sorted([*inner, upto(n), upto(n)])))

    def packed() -> str:
        parts = r.randint(1, 5)
        if r.random() < 0.5:
            return f"documents(cu_seqlens={cuts(Tk, parts)})"
        each = r.choice(("", ", each=causal()", f", each=window({upto(20)}, {upto(5)})", ", each=strided(3)"))
        inner = [sorted(upto(n) for _ in range(parts - 1)) for n in (Tq, Tk)]
        return f"documents(cu_q={[0, *inner[0], Tq]}, cu_k={[0, *inner[1], Tk]}{each})"

    def tiles() -> str:
        bq, bk = r.choice((1, 8, 16, 33, upto(40) + 1)), r.choice((4, 8, 16, 33, upto(40) + 1))
        share = r.choice((0.2, 0.5, 0.9))
        layout = [[int(r.random() < share) for _ in range(-(-Tk // bk))] for _ in range(-(-Tq // bq))]
        return f"tiles({layout}, ({bq}, {bk}))"

    step = r.randint(1, 9)
    makers = {
        "causal": lambda: f"causal({r.choice(('', '', '', r.randint(-Tk, Tk)))})",
        "window": lambda: f"window({maybe(upto(Tk // 2))}, {maybe(upto(Tk // 4))})",
        "window-offset": lambda: f"window({upto(Tk)}, {upto(9)}, {r.randint(-Tk, Tk)})",
        "documents": lambda: f"documents({ids(Tk)})",
        "documents-two": lambda: f"documents({ids(Tq)}, {ids(Tk)})",
        "packed": packed,
        "keys": lambda: f"keys({batch(Tk)})",
        "keys-between": lambda: f"keys({batch(Tk // 2)}, {batch(Tk)})",
        "prefix": lambda: f"prefix({batch(Tk)})",
        "global": lambda: f"global_tokens({upto(min(Tk, 6))})",
        "global-list": lambda: f"global_tokens({sorted(upto(Tk - 1) for _ in range(r.randint(1, 4) if Tk else 0))})",
        "columns": lambda: _columns(r, Tq, Tk),
        "strided": lambda: f"strided({step}, {r.randrange(step)})",
        "dilated": lambda: f"dilated({upto(12)}, {step})",
        "chunked": lambda: f"chunked({r.randint(1, 40)})",
    }
    if Tq and Tk:
        makers["tiles"] = tiles
    if 0 < Tq * Tk < 2000:
        makers["dense"] = lambda: f"dense({[[r.randint(0, 1) for _ in range(Tk)] for _ in range(Tq)]})"
    return makers[r.choice(["causal", "causal", "window", *makers])]()
