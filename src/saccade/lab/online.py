"""The online softmax (Milakov and Gimelshein, 2018) of one head, tile by tile, with every number that a kernel has."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..mask import Mask, causal
from ..plan import Limits, Plan, make_plan
from .query import Query, chosen, mask_of, problem_of, shape_of, whole

Array = NDArray[np.float64]

# the weights of the second worked example; its scores are their logarithms
WEIGHTS = ((1.0,), (0.6405, 0.3595), (0.3258, 0.3123, 0.3619), (0.0247, 0.0236, 0.0253, 0.9264))
EXAMPLES = ("grid", "weights", "own")
LONGEST = 32


class Head(NamedTuple):
    """q, k [T, D] and v [T, Dv] of one head, its scale and its mask."""

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


def steps(head: Head, tile_q: int, tile_k: int) -> list[dict[str, Any]]:
    """Every tile of queries with every tile of keys, in the order of a kernel.

    Each step has i and j and, unless the plan skips the tile, the scores s [bq, bk] with -inf outside the mask, m_old
    and m [bq], correction [bq] = exp(m_old - m), p [bq, bk] = exp(s - m), l_old and l [bq], and acc [bq, Dv]. The last
    step of a query tile that sees any key also has o [bq, Dv] = acc / l and lse [bq].
    """
    T = len(head.q)
    visited = _visited(make_plan(problem_of(head.mask, shape_of(T, T, 1)), Limits("lab", tile_q, tile_k)))
    allowed = np.ones((T, T), bool) if head.mask is None else head.mask.evaluate(1, 1, T, T)[0, 0]
    trace: list[dict[str, Any]] = []
    for i in range(-(-T // tile_q)):
        rows = slice(i * tile_q, min(T, (i + 1) * tile_q))
        state = _State(head, rows)
        for j in range(-(-T // tile_k)):
            keys = slice(j * tile_k, min(T, (j + 1) * tile_k))
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

    def add(self, keys: slice, allowed: NDArray[np.bool_]) -> dict[str, Any]:
        s = np.where(allowed, self.head.scale * (self.q @ self.head.k[keys].T), -np.inf)
        m_old, l_old = self.m, self.l
        self.m = np.maximum(m_old, s.max(-1))
        # a row that has seen no key yet has nothing to correct
        floor = np.where(self.m == -np.inf, 0.0, self.m)
        correction, p = np.exp(np.where(m_old == -np.inf, -np.inf, m_old - floor)), np.exp(s - floor[:, None])
        self.l = l_old * correction + p.sum(-1)
        self.acc = self.acc * correction[:, None] + p @ self.head.v[keys]
        return {
            "s": s,
            "m_old": m_old,
            "m": self.m,
            "correction": correction,
            "p": p,
            "l_old": l_old,
            "l": self.l,
            "acc": self.acc,
        }

    def ending(self) -> dict[str, Any]:
        safe = np.where(self.l == 0, 1.0, self.l)
        with np.errstate(divide="ignore"):
            return {"o": self.acc / safe[:, None], "lse": self.m + np.log(safe)}


def trace(query: Query) -> dict[str, Any]:
    """The `steps` of an example, which the page shows one by one."""
    name = chosen(query, "example", EXAMPLES)
    T, D = whole(query, "t", 12, 1, LONGEST), whole(query, "d", 8, 1, 128)
    head = example(name, T, D, whole(query, "seed", 0, 0, 2**31), mask_of(query, "full()"))
    tile_q, tile_k = (whole(query, side, 2, 1, LONGEST) for side in ("bq", "bk"))
    return {
        "tokens": len(head.q),
        "head_dim": head.q.shape[1],
        "v_dim": head.v.shape[1],
        "scale": head.scale,
        "mask": "" if head.mask is None else str(head.mask),
        "tile_q": tile_q,
        "tile_k": tile_k,
        "steps": steps(head, tile_q, tile_k),
    }
