"""The online softmax (Milakov and Gimelshein, 2018) of one head, tile by tile, with every number that a kernel has."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..mask import Mask, causal
from ..plan import Limits, Plan, make_plan
from .query import FieldError, Query, chosen, label, mask_of, problem_of, shape_of, whole

Array = NDArray[np.float64]

# scores of which exp overflows float32 in the first row
SCORES = "1 2 3 100\n4 3 2 1"
# the weights of the second worked example; its scores are their logarithms
WEIGHTS = ((1.0,), (0.6405, 0.3595), (0.3258, 0.3123, 0.3619), (0.0247, 0.0236, 0.0253, 0.9264))
EXAMPLES = ("grid", "weights", "scores", "own")
LONGEST, LARGEST = 32, 1e6


class Head(NamedTuple):
    """q [Tq, D], k [Tk, D] and v [Tk, Dv] of one head, its scale and its mask."""

    q: Array
    k: Array
    v: Array
    scale: float
    mask: Mask | None


def example(name: str, T: int = 8, D: int = 128, seed: int = 0, mask: Mask | None = None) -> Head:
    """One of the worked examples, or random numbers of any size.

    "grid": 8 tokens of 128 numbers, without a mask. "weights": 4 tokens, causal; the scores are the logarithms of
    chosen weights and v is the identity, so that the output is these weights. "own": these T, D, seed and mask.
    """
    if name == "weights":
        scores = np.zeros((4, 4))
        for row, weights in zip(scores, WEIGHTS, strict=True):
            row[: len(weights)] = np.log(weights)
        return Head(scores, np.eye(4), np.eye(4), 1.0, causal())
    tokens, size = (8, 128) if name == "grid" else (T, D)
    q, k, v = np.random.default_rng(seed).standard_normal((3, tokens, size))
    return Head(q, k, v, size**-0.5, None if name == "grid" else mask)


def scored(scores: Array, mask: Mask | None) -> Head:
    """A head with these scores [Tq, Tk], whose values are the identity, so that its output is the weights."""
    eye = np.eye(scores.shape[1])
    return Head(scores, eye, eye, 1.0, mask)


def scores_of(query: Query) -> Array:
    """The rows of numbers in the field `scores`. Raises ValueError for rows of different lengths and other text."""
    lines = [line for line in query.get("scores", SCORES).replace(";", "\n").splitlines() if line.strip()]
    try:
        rows = [[float(word) for word in line.replace(",", " ").split()] for line in lines]
    except ValueError as error:
        word = str(error).rpartition(":")[2].strip()
        raise FieldError(
            "scores", f"{label('scores')} have {word[:40]}; expected numbers, one line per query"
        ) from None
    if not rows or len({len(row) for row in rows}) > 1 or max(len(rows), len(rows[0])) > LONGEST:
        sizes = ", ".join(str(len(row)) for row in rows[:LONGEST]) or "no"
        wanted = f"1 to {LONGEST} lines of equally many numbers, at most {LONGEST}"
        raise FieldError("scores", f"{label('scores')} have {len(rows)} lines of {sizes} numbers; expected {wanted}")
    if not np.abs(rows).max() <= LARGEST:
        raise FieldError("scores", f"{label('scores')} have a number outside ±{LARGEST:g}: use smaller ones")
    return np.array(rows)


def steps(head: Head, tile_q: int, tile_k: int) -> list[dict[str, Any]]:
    """Every tile of queries with every tile of keys, in the order of a kernel.

    Each step has i and j and, unless the plan skips the tile, the scores s [bq, bk] with -inf outside the mask, m_old
    and m [bq], correction [bq] = exp(m_old - m), p [bq, bk] = exp(s - m), l_old and l [bq], and acc [bq, Dv]. naive
    [bq] is the sum of exp(s) in float32, without the largest score, or "overflow". The last step of a query tile that
    sees any key also has o [bq, Dv] = acc / l and lse [bq].
    """
    Tq, Tk = len(head.q), len(head.k)
    visited = _visited(make_plan(problem_of(head.mask, shape_of(Tq, Tk, 1)), Limits("lab", tile_q, tile_k)))
    allowed = np.ones((Tq, Tk), bool) if head.mask is None else head.mask.evaluate(1, 1, Tq, Tk)[0, 0]
    trace: list[dict[str, Any]] = []
    for i in range(-(-Tq // tile_q)):
        rows = slice(i * tile_q, min(Tq, (i + 1) * tile_q))
        state = _State(head, rows)
        for j in range(-(-Tk // tile_k)):
            keys = slice(j * tile_k, min(Tk, (j + 1) * tile_k))
            step: dict[str, Any] = {"i": i, "j": j}
            if visited[rows, keys].any():
                step |= state.add(keys, allowed[rows, keys])
            trace.append(step)
        seen = [step for step in trace if step["i"] == i and "s" in step]
        if seen:
            seen[-1] |= state.ending()
    return trace


def _visited(plan: Plan) -> NDArray[np.bool_]:
    # [Tq, Tk]: pairs in any segment, at their positions in the mask, even if the plan divides it by a stride
    visited = np.zeros((plan.Tq, plan.Tk), bool)
    for part in plan.parts:
        for c in range(len(part.nq)):
            rows = part.q_start[c] + part.step * np.arange(part.nq[c])
            for n in range(part.n_tiles):
                tile = c * len(part.masks) * part.Bm * part.n_tiles + n
                for begin, end, _ in part.ranges.seg[part.ranges.ptr[tile] : part.ranges.ptr[tile + 1]]:
                    keys = part.k_start[c] + part.step * np.arange(begin, end)
                    visited[np.ix_(rows[n * plan.tile_q : (n + 1) * plan.tile_q], keys)] = True
    return visited


class _State:
    """The running m, l and acc of a tile of queries."""

    def __init__(self, head: Head, rows: slice):
        self.head, self.q = head, head.q[rows]
        n = len(self.q)
        self.m, self.l, self.acc = np.full(n, -np.inf), np.zeros(n), np.zeros((n, head.v.shape[1]))
        self.naive = np.zeros(n, np.float32)

    def add(self, keys: slice, allowed: NDArray[np.bool_]) -> dict[str, Any]:
        s = np.where(allowed, self.head.scale * (self.q @ self.head.k[keys].T), -np.inf)
        m_old, l_old = self.m, self.l
        self.m = np.maximum(m_old, s.max(-1))
        # a row that has seen no key yet has nothing to correct
        floor = np.where(self.m == -np.inf, 0.0, self.m)
        correction, p = np.exp(np.where(m_old == -np.inf, -np.inf, m_old - floor)), np.exp(s - floor[:, None])
        self.l = l_old * correction + p.sum(-1)
        self.acc = self.acc * correction[:, None] + p @ self.head.v[keys]
        with np.errstate(over="ignore"):
            self.naive = self.naive + np.exp(s.astype(np.float32)).sum(-1)
        return {
            "s": s,
            "m_old": m_old,
            "m": self.m,
            "correction": correction,
            "p": p,
            "l_old": l_old,
            "l": self.l,
            "acc": self.acc,
            "naive": [float(x) if np.isfinite(x) else "overflow" for x in self.naive],
        }

    def ending(self) -> dict[str, Any]:
        safe = np.where(self.l == 0, 1.0, self.l)
        with np.errstate(divide="ignore"):
            return {"o": self.acc / safe[:, None], "lse": self.m + np.log(safe)}


def trace(query: Query) -> dict[str, Any]:
    """The `steps` of an example, which the page shows one by one."""
    name = chosen(query, "example", EXAMPLES)
    T, D = whole(query, "t", 12, 1, LONGEST), whole(query, "d", 8, 1, 128)
    mask, seed = mask_of(query, "full()"), whole(query, "seed", 0, 0, 2**31)
    head = scored(scores_of(query), mask) if name == "scores" else example(name, T, D, seed, mask)
    tile_q, tile_k = (whole(query, side, 2, 1, LONGEST) for side in ("bq", "bk"))
    return {
        "queries": len(head.q),
        "keys": len(head.k),
        "head_dim": head.q.shape[1],
        "v_dim": head.v.shape[1],
        "scale": head.scale,
        "mask": "" if head.mask is None else str(head.mask),
        "tile_q": tile_q,
        "tile_k": tile_k,
        "steps": steps(head, tile_q, tile_k),
    }
