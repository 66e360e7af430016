"""Tests an installed wheel in a few seconds: forward, backward and decode, compared with plain attention."""

from __future__ import annotations

import sys

import numpy as np

import saccade


def written_out(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention of [T, H, D] arrays, in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(q.shape[-1])
    scores[:, ~np.tri(len(q), dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v)


def main() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((37, 4, 24), dtype=np.float32) for _ in range(3))
    causal = saccade.mask.causal()
    o, lse = saccade.attention(q, k, v, causal, return_lse=True)
    assert np.abs(o - written_out(q, k, v)).max() < 1e-5

    # a small step along a gradient must change sum(o * do) by |gradient|^2 times the step
    do = rng.standard_normal(o.shape, dtype=np.float32)
    dq, dk, dv, _ = saccade.attention_backward(do, q, k, v, o, lse, causal)
    for x, dx, args in ((q, dq, 0), (k, dk, 1), (v, dv, 2)):
        moved = [q, k, v]
        slope = 0.0
        for sign in (1, -1):
            moved[args] = x + sign * np.float32(1e-3) * dx
            slope += sign * float((written_out(*moved) * do).sum()) / 2e-3
        assert abs(slope / float((dx.astype(np.float64) ** 2).sum()) - 1) < 1e-2

    cache = saccade.KVCache(1, 37, 4, 24, dtype="float32")
    cache.append(k[None], v[None])
    last = saccade.decode(q[None, -1:], cache)
    assert np.abs(np.asarray(last)[0, 0] - o[-1]).max() < 1e-5
    assert "torch" not in sys.modules
    print(f"saccade {saccade.__version__}, Python {sys.version.split()[0]}, numpy {np.__version__}: smoke test passed")


if __name__ == "__main__":
    main()
