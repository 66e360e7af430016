"""Terms, which are conjunctions of interval, stride, rows and grid factors, and unions of terms.

A term is a list of 12 entries: d_lo d_hi k_lo k_hi q_lo q_hi stride phase, then four bit sets: rows inside, rows
outside, grids inside, grids outside. The first six and the phase are ints, or int64 arrays over the batch. Bounds are
inclusive or exclusive as in `forms.Lowered`. A union of terms is a list of terms; [] allows nothing.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np

from .forms import D_HI, D_LO, INF, K_HI, K_LO, PHASE, Q_HI, Q_LO, STRIDE
from .size import MOST, MOST_EXPANDED, SIMPLER, Size, TooManyBands

Term = list[Any]
Terms = list[Term]
BITS = 8


def term(**factors: Any) -> Term:
    """A term with the given factors (d_lo=, d_hi=, k_lo=, k_hi=, q_lo=, q_hi=, stride=, phase=), else unbounded."""
    columns = [-INF, INF, -INF, INF, -INF, INF, 1, 0, 0, 0, 0, 0]
    for name, value in factors.items():
        columns[_COLUMNS[name]] = value
    return columns


_COLUMNS = {n: c for c, n in enumerate(("d_lo", "d_hi", "k_lo", "k_hi", "q_lo", "q_hi", "stride", "phase"))}


def low(a: Any, b: Any) -> Any:
    """The smaller of two ints or arrays."""
    if type(a) is int:
        if type(b) is int:
            return a if a < b else b
        if a == INF:
            return b
    elif type(b) is int and b == INF:
        return a
    return np.minimum(a, b)


def high(a: Any, b: Any) -> Any:
    """The larger of two ints or arrays."""
    if type(a) is int:
        if type(b) is int:
            return a if a > b else b
        if a == -INF:
            return b
    elif type(b) is int and b == -INF:
        return a
    return np.maximum(a, b)


def always(condition: Any) -> bool:
    """Whether a condition holds for every batch entry."""
    return condition if type(condition) is bool else bool(condition.all())


def same(a: Any, b: Any) -> bool:
    """Whether two ints or arrays agree for every batch entry."""
    return a == b if type(a) is int and type(b) is int else bool(np.all(a == b))


def both(left: Terms, right: Terms, size: Size) -> Terms:
    """The intersection of two unions."""
    count = len(left) * len(right)
    if count <= MOST_EXPANDED:
        count = sum(_stride_terms(a[STRIDE], b[STRIDE]) for a in left for b in right)
    if count > MOST_EXPANDED:
        raise TooManyBands(f"the mask expands to {count} bands or more while it is simplified; {SIMPLER}")
    if len(left) == 1 and len(right) == 1:
        return _meet(left[0], right[0])
    return tidy([t for a in left for b in right for t in _meet(a, b)], size)


def negated(of: Term) -> Terms:
    """The complement of one term."""
    terms: Terms = []
    for lo, hi, step in ((D_LO, D_HI, 1), (K_LO, K_HI, 0), (Q_LO, Q_HI, 0)):
        if not same(of[lo], -INF):
            terms.append(_with(hi, of[lo] - step))
        if not same(of[hi], INF):
            terms.append(_with(lo, of[hi] + step))
    s = of[STRIDE]
    if s == 2 or s < -1:
        terms.append(_with(STRIDE, abs(s), PHASE, 1 - of[PHASE] if s == 2 else of[PHASE]))
    elif s > 2:
        terms.append(_with(STRIDE, -s, PHASE, of[PHASE]))
    for n in range(4):
        bits = of[BITS + n]
        while bits:
            bit = bits & -bits
            terms.append(_with(BITS + (n ^ 1), bit))
            bits ^= bit
    return terms


def _with(*pairs: Any) -> Term:
    result = term()
    for column, value in zip(pairs[::2], pairs[1::2], strict=True):
        result[column] = value
    return result


def _meet(a: Term, b: Term) -> Terms:
    joint: Term = []
    for column in range(6):
        joint.append((low if column & 1 else high)(a[column], b[column]))
    joint += (1, 0)
    for column in range(BITS, BITS + 4):
        joint.append(a[column] | b[column])
    for n in range(0, 4, 2):
        if joint[BITS + n] & joint[BITS + n + 1]:
            return []
    return _set_stride(joint, (a[STRIDE], a[PHASE]), (b[STRIDE], b[PHASE]))


def _set_stride(joint: Term, one: tuple[int, Any], two: tuple[int, Any]) -> Terms:
    # the terms with both stride tests
    if one[0] == 1 or two[0] == 1:
        joint[STRIDE], joint[PHASE] = one if two[0] == 1 else two
        return [joint]
    (s, p), (r, q) = sorted((one, two), key=lambda pair: -pair[0])
    if s > 0 and r > 0:
        g = gcd(s, r)
        _drop(joint, (q - p) % g != 0)
        step = (q - p) // g * pow(s // g, -1, r // g) % (r // g) if r > g else 0
        return [] if _never(joint) else _one_class(joint, s // g * r, p + s * step)
    if s > 0 and s % -r == 0:
        # the residue mod s determines the residue mod r
        _drop(joint, p % -r == q)
        joint[STRIDE], joint[PHASE] = s, p
        return [] if _never(joint) else [joint]
    if s == r and same(p, q):
        joint[STRIDE], joint[PHASE] = s, p
        return [joint]
    # replace an excluded class by the union of the others; of two excluded classes the one with fewer others
    cut, rest = ((r, q), (s, p)) if s > 0 else ((s, p), (r, q))
    terms: Terms = []
    for other in range(1, -cut[0]):
        terms += _set_stride(list(joint), rest, (-cut[0], (cut[1] + other) % -cut[0]))
    return terms


def _stride_terms(s: int, r: int) -> int:
    # an upper bound of the number of terms that `_set_stride` makes of two strides
    if s == 1 or r == 1:
        return 1
    s, r = max(s, r), min(s, r)
    if r > 0:
        return 2
    if s > 0:
        return 1 if s % -r == 0 else -r - 1
    return (-s - 1) * (-r - 1)


def _one_class(joint: Term, s: int, p: Any) -> Terms:
    # a stride longer than any sequence leaves at most one difference of each sign
    p = p % s
    if s < INF:
        joint[STRIDE], joint[PHASE] = s, p
        return [joint]
    terms: Terms = []
    for d in (p, p - s):
        one = list(joint)
        one[D_LO], one[D_HI] = high(joint[D_LO], d), low(joint[D_HI], d)
        terms.append(one)
    return terms


def _drop(joint: Term, where: Any) -> None:
    # nothing is allowed in the batch entries `where`
    if type(where) is bool:
        joint[K_HI] = -INF if where else joint[K_HI]
    elif np.any(where):
        joint[K_HI] = np.where(where, -INF, joint[K_HI])


def _never(joint: Term) -> bool:
    return same(joint[K_HI], -INF)


def fit(of: Term, size: Size, alone: bool = False) -> Term | None:
    """The term clipped to `size`, without bounds that exclude nothing; None if it allows nothing.

    The only term of a union (`alone`) may remain although it allows nothing, because testing arrays is expensive.
    """
    Tq, Tk = size.Tq, size.Tk
    clipped = list(of)
    clipped[K_LO], clipped[K_HI] = high(of[K_LO], 0), low(of[K_HI], Tk)
    clipped[Q_LO], clipped[Q_HI] = high(of[Q_LO], 0), low(of[Q_HI], Tq)
    first, last = clipped[Q_LO] - clipped[K_HI] + 1, clipped[Q_HI] - clipped[K_LO] - 1
    d_lo, d_hi = clipped[D_LO], clipped[D_HI]
    if not (type(d_lo) is int and d_lo == -INF) and always(d_lo <= first):
        clipped[D_LO] = -INF
    if not (type(d_hi) is int and d_hi == INF) and always(d_hi >= last):
        clipped[D_HI] = INF
    if alone and not (type(first) is int and type(d_lo) is int and type(d_hi) is int):
        return clipped
    empty = (clipped[K_LO] >= clipped[K_HI]) | (clipped[Q_LO] >= clipped[Q_HI])
    if always(empty | (d_lo > last) | (d_hi < first) | (d_lo > d_hi)):
        return None
    return clipped


def tidy(terms: Terms, size: Size, settled: int = 0) -> Terms:
    """The union without empty and contained terms, adjacent ones joined; the first `settled` terms are tidy already."""
    if len(terms) > MOST_EXPANDED:
        raise TooManyBands(f"the mask expands to {len(terms)} bands while it is simplified; {SIMPLER}")
    fitted = [(fit(t, size, len(terms) == 1), n >= settled) for n, t in enumerate(terms)]
    while True:
        joined = _joined([(t, new) for t, new in fitted if t is not None], size)
        if not any(changed for _, changed in joined):
            return [t for t, _ in joined]
        fitted = [(fit(t, size) if changed else t, changed) for t, changed in joined]


def _joined(terms: list[tuple[Term, bool]], size: Size) -> list[tuple[Term, bool]]:
    # one round: each term is joined to the first other that allows it. terms: (term, new); returns (term, changed)
    union: list[tuple[Term, bool, bool]] = []
    for t, new in terms:
        size.compare(len(union) if new else 0)
        for n, (other, also_new, changed) in enumerate(union):
            # two terms that are not new were compared before
            one = _join(other, t) if new or also_new or changed else None
            if one is not None:
                union[n] = one, also_new, True
                break
        else:
            union.append((t, new, False))
            if len(union) > MOST:
                raise TooManyBands(f"the mask expands to more than {MOST} bands while it is simplified; {SIMPLER}")
    # the next round compares changed terms with all others
    size.compare(len(union) * sum(changed for *_, changed in union))
    return [(t, changed) for t, _, changed in union]


def _join(a: Term, b: Term) -> Term | None:
    # the union of two terms as one term, None if it is not one
    if _holds(a, b):
        return a
    if _holds(b, a):
        return b
    differ = [n for n in (D_LO, K_LO, Q_LO) if not (same(a[n], b[n]) and same(a[n + 1], b[n + 1]))]
    same_stride = a[STRIDE] == b[STRIDE] and same(a[PHASE], b[PHASE])
    same_bits = a[BITS:] == b[BITS:]
    if len(differ) == 1 and same_stride and same_bits:
        n = differ[0]
        step = 1 if n == D_LO else 0
        if always(a[n] <= b[n + 1] + step) and always(b[n] <= a[n + 1] + step) and _alive(a, n) and _alive(b, n):
            joined = list(a)
            joined[n], joined[n + 1] = low(a[n], b[n]), high(a[n + 1], b[n + 1])
            return joined
    if not differ and same_bits and _complete(a, b):
        return [*a[:STRIDE], 1, 0, *a[BITS:]]
    if not differ and same_stride:
        return _without_split(a, b)
    return None


def _alive(of: Term, n: int) -> bool:
    # whether the interval is not empty in any batch entry; joining an empty one could add pairs
    return always(of[n] <= of[n + 1])


def _complete(a: Term, b: Term) -> bool:
    s, r = a[STRIDE], b[STRIDE]
    if s == -r:
        return same(a[PHASE], b[PHASE])
    return s == r == 2 and always(a[PHASE] != b[PHASE])


def _without_split(a: Term, b: Term) -> Term | None:
    # (x and R) or (x and not R) is x
    for n in range(BITS, BITS + 4):
        m = BITS + ((n - BITS) ^ 1)
        bit = a[n] & ~b[n]
        others = all(a[o] == b[o] for o in range(BITS, BITS + 4) if o not in (n, m))
        if bit and others and a[n] ^ bit == b[n] and b[m] == a[m] | bit:
            joined = list(a)
            joined[n] ^= bit
            return joined
    return None


def _holds(a: Term, b: Term) -> bool:
    # whether a allows all that b allows
    for n in range(BITS, BITS + 4):
        if a[n] & ~b[n]:
            return False
    s, p, r, q = a[STRIDE], a[PHASE], b[STRIDE], b[PHASE]
    if s != 1 and not (s == r and same(p, q)):
        coarser = r > 0 and r % abs(s) == 0
        if not coarser or not always((q % abs(s) == p) if s > 0 else (q % -s != p)):
            return False
    return all(always(a[n] <= b[n]) and always(a[n + 1] >= b[n + 1]) for n in (D_LO, K_LO, Q_LO))
