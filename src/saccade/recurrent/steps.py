"""Delta rules with several steps per token or a beta per value channel, as calls of the plain rule."""

from __future__ import annotations

import sys
from typing import Any

from ..arrays import is_mlx, namespace
from .family import kind_of

Arrays = dict[str, Any]


def in_steps(arrays: Arrays) -> Arrays:
    """The arrays of n T tokens for k, v [B, T, n, ...] and beta [B, T, n, H]: decays are first, queries last.

    Raises ValueError if shapes do not fit together.
    """
    n = _steps(arrays)
    k, v, beta = (_flat(arrays[name]) for name in ("k", "v", "beta"))
    q, g, borders = _among(arrays["q"], n, last=True), arrays["g"], arrays["cu_seqlens"]
    if isinstance(borders, (list, tuple)):
        borders = [n * border for border in borders]
    elif borders is not None:
        borders = n * borders
    g = None if g is None else _among(g, n, last=False)
    return {**arrays, "q": q, "k": k, "v": v, "beta": beta, "g": g, "cu_seqlens": borders}


def last_steps(o: Any, T: int) -> Any:
    """The outputs [B, T, H, V] after the last step of each of T tokens, from those of all steps."""
    return o.reshape(o.shape[0], T, o.shape[1] // T, *o.shape[2:])[:, :, -1] if T else o


def in_columns(arrays: Arrays) -> Arrays:
    """The arrays of H · V heads with one value channel each, for beta [B, T, H, V].

    Raises ValueError if shapes do not fit together.
    """
    v, beta, g, state = (arrays[name] for name in ("v", "beta", "g", "initial_state"))
    (B, T, H, V), K = v.shape, arrays["k"].shape[3]
    xp = sys.modules["mlx.core"] if is_mlx(v) else namespace(v)
    if tuple(beta.shape) != (B, T, H, V):
        raise ValueError(f"beta is {kind_of(beta)}; expected [B, T, H], or [B, T, H, V] = {[B, T, H, V]}")
    if H % (arrays["k"].shape[2] or 1):
        raise ValueError(f"q and k have {arrays['k'].shape[2]} heads and v has {H}; expected a multiple of them")
    if g is not None:
        if tuple(g.shape[:3]) != (B, T, H):
            raise ValueError(f"g is {kind_of(g)}; expected [B, T, H] or [B, T, H, K] with B, T, H = {[B, T, H]}")
        channels = g.shape[3:]
        g = xp.broadcast_to(g[:, :, :, None], (B, T, H, V, *channels)).reshape(B, T, H * V, *channels)
    if state is not None:
        if tuple(getattr(state, "shape", ()))[1:] != (H, K, V):
            raise ValueError(f"initial_state is {kind_of(state)}; expected [N, H, K, V] = [N, {H}, {K}, {V}]")
        state = state.swapaxes(2, 3).reshape(state.shape[0], H * V, K, 1)
    columns = {"v": v.reshape(B, T, H * V, 1), "beta": beta.reshape(B, T, H * V), "g": g, "initial_state": state}
    return {**arrays, **columns}


def from_columns(o: Any, state: Any, H: int) -> tuple[Any, Any]:
    """o [B, T, H, V] and the state [N, H, K, V] of the outputs of `in_columns`' arrays."""
    N, heads, K, _ = state.shape
    return o.reshape(*o.shape[:2], H, heads // H), state.reshape(N, H, heads // H, K).swapaxes(2, 3)


def _flat(x: Any) -> Any:
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def _among(x: Any, n: int, last: bool) -> Any:
    # x [B, T, ...] as the last or the first of n steps [B, n T, ...]; the others are 0
    xp = sys.modules["mlx.core"] if is_mlx(x) else namespace(x)
    x = x[:, :, None]
    others = [xp.zeros_like(x)] * (n - 1)
    return _flat(xp.concatenate([*others, x] if last else [x, *others], 2))


def _steps(arrays: Arrays) -> int:
    # the number of steps per token, if the shapes fit
    q, k, v, beta, g = (arrays[name] for name in ("q", "k", "v", "beta", "g"))
    for name, x, layout in (("v", v, "[B, T, n, H, V]"), ("beta", beta, "[B, T, n, H]")):
        if len(getattr(x, "shape", ())) != layout.count(",") + 1:
            raise ValueError(f"{name} is {kind_of(x)}; expected {layout}, n steps per token as k has")
    (B, T, n, *rows), (H, _) = k.shape, v.shape[3:]
    expected = {
        "q": (q, (B, T, *rows), "[B, T, Hk, K] with the B, T, Hk and K of k"),
        "v": (v, (B, T, n, *v.shape[3:]), "[B, T, n, H, V] with the B, T and n of k"),
        "beta": (beta, (B, T, n, H), "[B, T, n, H]"),
    }
    if g is not None:
        channels = len(g.shape) == 4
        expected["g"] = g, (B, T, H, rows[1]) if channels else (B, T, H), "[B, T, H, K]" if channels else "[B, T, H]"
    for name, (x, shape, layout) in expected.items():
        if tuple(getattr(x, "shape", ())) != shape:
            raise ValueError(f"{name} is {kind_of(x)}; expected {layout} = {list(shape)}")
    if n < 1:
        raise ValueError(f"k is {kind_of(k)}; expected [B, T, n, Hk, K] with at least one step per token")
    return n
