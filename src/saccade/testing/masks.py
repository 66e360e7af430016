"""Masks for tests, as text: a catalogue and random expressions. MASKS and LEAVES contain every constructor."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..mask import Mask, parse
from ..mask.text import numbers

# sizes of the catalogue: not square, and not multiples of a tile
TQ, TK = 70, 101

# every constructor, alone and combined; arrays fit TQ, TK and a batch of 2
MASKS = {
    "full": "full()",
    "causal": "causal()",
    "causal-offset": "causal(-7)",
    "causal-offset-batch": "causal([3, 40])",
    "window": "window(13, 5)",
    "window-left": "window(20, None)",
    "window-right": "window(None, 4)",
    "window-offset": "window(9, 2, 11)",
    "window-causal": "causal() & window(16, 0)",
    "documents": f"documents({[0] * 20 + [1] * 1 + [3] * 48 + [4] * 32})",
    "documents-batch": f"documents({[[0] * 50 + [1] * 51, [0] * 99 + [2] * 2]})",
    "documents-causal": f"causal() & documents({[0] * 33 + [1] * 34 + [2] * 34})",
    "documents-two": f"documents({[0] * 40 + [2] * 30}, {[0] * 10 + [1] * 50 + [2] * 41})",
    "packed": "documents(cu_seqlens=[0, 31, 32, 32, 90])",
    "packed-causal-batch": "documents(cu_seqlens=[[0, 31, 32, 101], [5, 40, 90, 96]]) & causal()",
    "packed-two": "documents(cu_q=[0, 8, 40, 66], cu_k=[0, 40, 55, 101])",
    "packed-each": "documents(cu_q=[0, 8, 40, 66], cu_k=[0, 40, 55, 101], each=causal() & window(9, 0))",
    "keys": "keys(60)",
    "keys-batch": "keys([101, 17]) & causal()",
    "keys-between": "keys([3, 50], [40, 90])",
    "keys-none": "keys([0, 101]) & causal()",
    "prefix": "prefix(12) | causal()",
    "prefix-batch": "prefix([0, 90]) | causal()",
    "padding": f"padding({[[0] * 9 + [1] * 92, [1] * 60 + [0] * 41]})",
    "padding-causal": f"causal() & padding({[0] * 9 + [1] * 80 + [0] * 12})",
    "global": "window(6, 0) | global_tokens(3)",
    "global-list": "(window(6, 6) | global_tokens([0, 37, 64, 100])) & causal()",
    "global-batch": "global_tokens([[1, 50], [60, 60]])",
    "columns": f"columns({[7 * j % 40 for j in range(TK)]}, {[40 + 3 * j % 31 for j in range(TK)]})",
    "columns-batch": f"causal() & columns(None, {[[50] * 40 + [70] * 61, [70] * 90 + [60] * 11]})",
    "columns-not": f"causal() & ~columns({[j // 2 for j in range(TK)]}, {[j // 2 + j % 9 for j in range(TK)]})",
    "ranges": f"ranges({[t // 2 for t in range(TQ)]}, {[t // 2 + t % 9 for t in range(TQ)]})",
    "ranges-batch": f"causal() & ranges(None, {[[50] * 40 + [70] * 30, [7 * t % 101 for t in range(TQ)]]})",
    "strided": "strided(7)",
    "strided-phase": "strided(5, 3) & causal()",
    "strided-window": "(strided(8) | window(7, 0)) & causal()",
    "strided-two": "strided(4) | strided(8, 2)",
    "strided-documents": f"strided(3) & documents({[0] * 33 + [1] * 68})",
    "strided-not": "~strided(3) & causal()",
    "dilated": "dilated(4, 6)",
    "dilated-causal": "dilated(3, 2) & causal()",
    "chunked": "chunked(16)",
    "chunked-causal": "chunked(24) & causal()",
    "tiles": "tiles([[1, 0, 1, 0], [0, 0, 0, 1], [1, 1, 0, 0]], (32, 32))",
    "tiles-batch": "tiles([[[1, 0], [0, 1]], [[0, 1], [0, 0]]], (35, 64)) & causal()",
    "tiles-odd": f"tiles({[[(a * b) % 3 == 1 for b in range(15)] for a in range(14)]!r}, (5, 7))",
    "dense": f"dense({[[int((3 * t + j * j) % 5 < 2) for j in range(TK)] for t in range(TQ)]})",
    "tree": f"tree({[-1, *[t // 2 for t in range(59)]]})",
    "tree-depth-first": f"causal() & tree({[t - 1 if t % 9 else max(t - 5, -1) for t in range(90)]})",
    "tree-batch": f"tree({[[-1, 0, 0, 2, -1, 1, 5, 3], [-1, 0, 1, 2, 3, 1, 5, -1]]}) & keys([90, 37])",
    "per-head": "per_head([causal(), window(5, 5), strided(4), full()])",
    "per-head-and": "per_head([causal(), window(5, 5), keys(30), ~causal()]) & keys(90)",
    "not": "~causal()",
    "not-window": "causal() & ~window(9, 0)",
    "not-documents": f"~documents({[0] * 33 + [1] * 68}) & causal()",
    "not-keys": "~keys(20, 60)",
    "union": "window(3, 3) | keys(10, 14) | prefix(2)",
    "nothing": "keys(0)",
}


class MaskCase(NamedTuple):
    """A mask and the sizes it fits."""

    mask: Mask
    B: int
    Hq: int
    Tq: int
    Tk: int

    def allowed(self) -> NDArray[np.bool_]:
        """The predicate, bool [B, Hq, Tq, Tk]."""
        return np.broadcast_to(self.mask.evaluate(*self[1:]), self[1:])


def random_case(r: random.Random) -> MaskCase:
    """Any expression over at most 9 queries and 11 keys, one in ten with a mask for each of two heads."""
    B, Tq = r.randint(1, 2), r.randint(0, 9)
    Tk = r.choice((Tq, r.randint(0, 11)))
    draw = Draw(r, B, Tq, Tk, tuple(LEAVES), small=True)
    if r.random() >= 0.1:
        return MaskCase(parse(expression(draw, r.randint(1, 4))), B, 1, Tq, Tk)
    text = f"per_head([{expression(draw, 1)}, {expression(draw, 1)}])"
    return MaskCase(parse(r.choice((text, f"{text} & ({expression(draw, 1)})"))), B, 2, Tq, Tk)


def inside(r: random.Random, depth: int) -> str:
    """A mask that is allowed inside each document."""
    return expression(Draw(r, 0, 4, 4, INSIDE, small=True), depth)


def expression(draw: Draw, depth: int) -> str:
    """A leaf, a complement, an intersection or a union, with at most `depth` nested operators."""
    n = draw.r.random()
    if depth == 0 or n < 0.4:
        return draw.leaf()
    if n < 0.5:
        return f"~({expression(draw, depth - 1)})"
    sign = "&" if n < 0.8 else "|"
    return f"({expression(draw, depth - 1)}) {sign} ({expression(draw, depth - 1)})"


class Draw:
    """Random arguments for B batch entries, Tq queries and Tk keys, as text; only integers if B is 0.

    names: the keys of LEAVES to choose from. small: numbers for a dozen tokens instead of a hundred.
    """

    def __init__(self, r: random.Random, B: int, Tq: int, Tk: int, names: Sequence[str], small: bool = False) -> None:
        self.r, self.B, self.Tq, self.Tk, self.names, self.small = r, B, Tq, Tk, names, small
        self.step = 1

    def leaf(self) -> str:
        """One constructor."""
        self.step = self.r.randint(1, 4 if self.small else 9)
        return LEAVES[self.r.choice(self.names)](self)

    def upto(self, n: int) -> int:
        return self.r.randint(0, max(n, 0))

    def maybe(self, value: int) -> int | None:
        return self.r.choice((None, value, value))

    def batch(self, n: int) -> int | list[int]:
        return self.r.choice((self.upto(n), [self.upto(n) for _ in range(self.B)])) if self.B else self.upto(n)

    def ids(self, n: int) -> list[int]:
        new = self.r.choice((0.1, 0.4, 0.7) if self.small else (0.02, 0.1, 0.4))
        now, out = 0, []
        for _ in range(n):
            now += self.r.random() < new
            out.append(now)
        return out

    def booleans(self, *shape: int) -> str:
        return numbers(np.array([self.r.randint(0, 1) for _ in range(prod(shape))], np.bool_).reshape(shape))


def _packed(d: Draw) -> str:
    parts = d.r.randint(1, 5)
    if d.r.random() < 0.5:
        inner = sorted(d.upto(d.Tk) for _ in range(parts - 1))
        cuts = d.r.choice(([0, *inner, d.Tk], sorted([*inner, d.upto(d.Tk), d.upto(d.Tk)])))
        return f"documents(cu_seqlens={cuts})"
    each = d.r.choice(("", ", each=causal()", f", each=window({d.upto(20)}, {d.upto(5)})", ", each=strided(3)"))
    inner = [sorted(d.upto(n) for _ in range(parts - 1)) for n in (d.Tq, d.Tk)]
    return f"documents(cu_q={[0, *inner[0], d.Tq]}, cu_k={[0, *inner[1], d.Tk]}{each})"


def _packed_each(d: Draw) -> str:
    # bounds that differ in each batch entry and leave rows and keys out at both ends
    parts = d.r.randint(1, 4)
    cu_q, cu_k = ([sorted(d.upto(n) for _ in range(parts)) for _ in range(d.B)] for n in (d.Tq, d.Tk))
    bounds = d.r.choice((f"cu_seqlens={cu_k}", f"cu_q={cu_q}, cu_k={cu_k[0]}"))
    return f"documents({bounds}, each={inside(d.r, 2)})"


def _columns(d: Draw) -> str:
    rows = [sorted((d.upto(d.Tq), d.upto(d.Tq))) for _ in range(d.Tk)]
    start, stop = ([pair[n] for pair in rows] for n in (0, 1))
    return f"columns({d.r.choice((None, start, start))}, {stop})"


def _bounds_batch(d: Draw, name: str, count: int, other: int) -> str:
    rows = [[sorted(d.r.randint(-1, other + 1) for _ in "ab") for _ in range(count)] for _ in range(d.B)]
    start, stop = ([[pair[n] for pair in entry] for entry in rows] for n in (0, 1))
    return d.r.choice((f"{name}({start}, {stop})", f"{name}({start[0]})", f"{name}(None, {stop})"))


def _padding(d: Draw) -> str:
    # at least one token in each sequence
    runs = [sorted((d.r.randrange(d.Tk), d.r.randrange(d.Tk))) for _ in range(d.B)] if d.Tk else []
    return f"padding({[[int(a <= j <= b) for j in range(d.Tk)] for a, b in runs]})" if runs else "padding(empty(0))"


def _tiles(d: Draw) -> str:
    if d.small:
        bq, bk = d.r.randint(1, 3), d.r.randint(1, 3)
        return f"tiles({d.booleans(d.B, -(-d.Tq // bq), -(-d.Tk // bk))}, ({bq}, {bk}))"
    bq, bk = d.r.choice((1, 8, 16, 33, d.upto(40) + 1)), d.r.choice((4, 8, 16, 33, d.upto(40) + 1))
    share = d.r.choice((0.2, 0.5, 0.9))
    layout = [[int(d.r.random() < share) for _ in range(-(-d.Tk // bk))] for _ in range(-(-d.Tq // bq))]
    return f"tiles({layout}, ({bq}, {bk}))"


def _parents(d: Draw, n: int) -> list[int]:
    # every order of a tree, or chains that branch now and then
    near = d.r.choice((0.0, 0.9))
    return [t - 1 if d.r.random() < near else d.r.randint(-1, t - 1) for t in range(n)]


def _trees(d: Draw) -> str:
    n = d.upto(d.Tk)
    return f"tree({[_parents(d, n) for _ in range(d.B)]})"


# the order of this table determines the masks of each seed
LEAVES: dict[str, Callable[[Draw], str]] = {
    "full": lambda d: "full()",
    "causal": lambda d: f"causal({d.r.choice(('', '', '', d.r.randint(-d.Tk, d.Tk)))})",
    "causal-batch": lambda d: f"causal({[d.r.randint(-3, 5) for _ in range(d.B)]})",
    "window": lambda d: f"window({d.maybe(d.upto(d.Tk // 2))}, {d.maybe(d.upto(d.Tk // 4))})",
    "window-offset": lambda d: f"window({d.upto(d.Tk)}, {d.upto(9)}, {d.r.randint(-d.Tk, d.Tk)})",
    "documents": lambda d: f"documents({d.ids(d.Tk)})",
    "documents-batch": lambda d: f"documents({[d.ids(d.Tk) for _ in range(d.B)]})",
    "documents-two": lambda d: f"documents({d.ids(d.Tq)}, {d.ids(d.Tk)})",
    "packed": _packed,
    "packed-each": _packed_each,
    "keys": lambda d: f"keys({d.batch(d.Tk)})",
    "keys-between": lambda d: f"keys({d.batch(d.Tk // 2)}, {d.batch(d.Tk)})",
    "prefix": lambda d: f"prefix({d.batch(d.Tk)})",
    "global": lambda d: f"global_tokens({d.upto(min(d.Tk, 6))})",
    "global-list": lambda d: f"global_tokens({sorted(d.upto(d.Tk - 1) for _ in range(d.Tk and d.r.randint(1, 4)))})",
    "global-batch": lambda d: f"global_tokens({[[d.upto(d.Tk - 1) for _ in 'abcd'] for _ in range(d.B)]})",
    "columns": _columns,
    "columns-batch": lambda d: _bounds_batch(d, "columns", d.Tk, d.Tq),
    "ranges": lambda d: _bounds_batch(d, "ranges", d.Tq, d.Tk),
    "padding": _padding,
    "strided": lambda d: f"strided({d.step}, {d.r.randrange(d.step)})",
    "dilated": lambda d: f"dilated({d.upto(3 if d.small else 12)}, {d.step})",
    "chunked": lambda d: f"chunked({d.step if d.small else d.r.randint(1, 40)})",
    "tiles": _tiles,
    "dense": lambda d: f"dense({d.booleans(d.Tq, d.Tk)})",
    "dense-batch": lambda d: f"dense({d.booleans(d.B, d.Tq, d.Tk)})",
    "tree": lambda d: f"tree({_parents(d, d.upto(d.Tk))})",
    "tree-batch": _trees,
}
# leaves with only integers
INSIDE = (
    "full", "causal", "window", "window-offset", "keys", "keys-between", "prefix", "global", "strided", "dilated",
    "chunked",
)  # fmt: skip
