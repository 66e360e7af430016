"""Keys and values of past tokens, kept between steps of decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays import cast, integral, is_torch, namespace
from ..rope import Turn, rope, turning
from .storage import Storage, at_least

# options of `rope`
Rotation = Mapping[str, Any]


class KVCache(Storage):
    """Contiguous keys and values of a batch of sequences whose lengths may differ (S26).

    batch, capacity (tokens a sequence may hold), kv_heads, head_dim; v_dim, the head size of v, is head_dim unless
    given. The arrays are NumPy's, unless dtype is a torch dtype or device is one of torch's: then they are tensors
    there; for device "webgpu", or the place of a device open there, device arrays of float32 or float16 that change
    with every append, and lengths in memory. fill is what unused slots hold; no result depends on it.
    quantised: "int8", "int4" or "fp8" keeps codes in place of numbers, each `group` of them with a scale
    (`saccade.quantised` says how); tokens are given in dtype, coded once, where they lie, and attention reads the
    codes; device arrays of codes are rows that hold their scales.

    k [batch, capacity, kv_heads, head_dim], v [batch, capacity, kv_heads, v_dim], lengths int32 [batch].
    No gradient runs through a cache.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        *,
        v_dim: int | None = None,
        dtype: Any = "float32",
        device: Any = None,
        fill: float = 0.0,
        quantised: str | None = None,
        group: int | None = None,
    ) -> None:
        at_least("batch", batch, 0)
        at_least("capacity", capacity, 0)
        super().__init__((batch, capacity), kv_heads, (head_dim, v_dim), dtype, device, fill, quantised, group)
        self.lengths: Any = np.zeros(batch, np.int32)
        if is_torch(self.k):
            import torch

            self.lengths = torch.zeros(batch, dtype=torch.int32, device=self.k.device)
        self._evicted: Any = self.lengths
        # no length exceeds it: known here, so that an append need not wait for a device
        self._bound = 0

    def __repr__(self) -> str:
        # lengths on a device are not waited for
        near = not is_torch(self.lengths) or self.lengths.is_cpu
        more = {"lengths": self.lengths.tolist()} if near else {}
        return self.shown(batch=len(self.lengths), capacity=self.capacity, **more)

    @property
    def capacity(self) -> int:
        """Tokens that each sequence may hold."""
        return int(self.k.shape[1])

    @property
    def positions(self) -> Any:
        """int32 [batch]: the position of each sequence's next token, its length and what `evict` took."""
        return self.lengths + self._evicted

    def append(self, k: Any, v: Any, lengths: Any = None, *, rotation: Rotation | None = None) -> None:
        """Write new tokens behind those of each sequence, and lengthen it.

        k [batch, T, kv_heads, head_dim] and v [batch, T, kv_heads, v_dim], in the cache's dtype and place; lengths, int
        [batch], tells how many of the T tokens, the first ones, each sequence takes: all of them unless given.
        rotation: options of `rope`, by which k is then turned at the positions that it takes.

        A cache on a GPU does not wait for lengths that lie there: a number below 0 counts as 0, one above T as T. It
        waits only where the tokens might exceed the capacity.

        Raises ValueError for shapes that do not fit and for a sequence that would exceed the capacity, TypeError for
        another dtype or framework, Unsupported for k or v that require grad. Nothing is then written.
        """
        B = int(self.k.shape[0])
        self.check_tokens(k, v, f"{B}, T", (B,))
        T = k.shape[1]
        new, most = self.counts(lengths, T)
        turn = None
        if rotation is not None:
            self.in_memory("rotation")
            turn = turning(k, self.positions[:, None] + self._steps(T), **rotation)
        self._bound = bound_of(self.lengths, new, self._bound + most, self.capacity)
        if hasattr(self.k, "gpu"):
            from ..backends.webgpu.arrays import write_rows

            for held, given in zip(self.arrays, self.stored(k, v), strict=True):
                write_rows(held, given, self.lengths, new)
        elif lengths is None and turn is self.quantised is None and B:
            self._place(*self.stored(k, v))
        else:
            self._scatter(k, v, T, new, turn)
        self.lengths = cast(self.lengths + new, self.lengths.dtype)

    def counts(self, lengths: Any, T: int) -> tuple[Any, int]:
        """How many of T new tokens each sequence takes, int32 [batch] where the lengths lie, and a bound of them.

        lengths: None or int [batch], as `append` takes them. Raises ValueError if they are not.
        """
        B = len(self.lengths)
        if lengths is None:
            return self.lengths.new_full((B,), T) if is_torch(self.lengths) else np.full(B, T, np.int32), T
        far = is_torch(self.lengths) and is_torch(lengths) and not lengths.is_cpu
        given: Any = lengths if far else np.asarray(lengths.cpu() if is_torch(lengths) else lengths)
        if tuple(given.shape) != (B,) or (B and not integral(given.dtype)):
            raise ValueError(f"lengths is {given.dtype} {list(given.shape)}; expected integers [{B}], one a sequence")
        if far:
            return given.clamp(0, T).to(self.lengths), T
        if B and (int(given.min()) < 0 or int(given.max()) > T):
            raise ValueError(f"lengths is {given.tolist()}; expected {B} numbers from 0 to {T}, the tokens given")
        return self._same_place(given.astype(np.int32)), int(given.max()) if B else 0

    def _place(self, k: Any, v: Any) -> None:
        # numbers as they are: a slice where all lengths are known to be one, else rows by their indices
        T = k.shape[1]
        in_memory = not is_torch(self.k) or self.k.is_cpu
        where: Any = self._steps(len(self.lengths))[:, None], self.lengths[:, None] + self._steps(T)
        if in_memory and (self.lengths == self.lengths[0]).all():
            first = int(self.lengths[0])
            where = slice(None), slice(first, first + T)
        self.k[where], self.v[where] = k, v

    def _scatter(self, k: Any, v: Any, T: int, new: Any, turn: Turn | None) -> None:
        # tokens beyond those that a sequence takes have slots below 0; nothing waits for a device
        B, steps = len(self.lengths), self._steps(T)
        n = B * T
        slots = self.lengths[:, None] + steps
        slots = namespace(slots).where(steps < new[:, None], slots, -1)
        rows = self._steps(B)[:, None] + 0 * slots
        k, v = (x.reshape(n, *x.shape[2:]) for x in (k, v))
        rows, slots = (cast(x.reshape(n), namespace(x).int64) for x in (rows, slots))
        self.write(k, v, rows, slots, turn)

    def evict(self, sinks: int, window: int, *, rotation: Rotation | None = None) -> None:
        """Keep the first `sinks` tokens and the last `window` of each sequence, side by side (Xiao et al. 2023).

        The keys that move keep the positions by which they were turned, and `positions` counts on as if nothing had
        gone. With rotation, the options of `rope` by which keys were turned, they are turned back by as many positions
        as they move: positions are then those in the cache, and never reach further than it (one rounding of k for
        every call). Masks count in the cache: what was before stays before, but distances are other ones.

        Raises ValueError for negative sinks or an empty window, Unsupported for keys on a WebGPU device, and for
        rotation where keys are quantised: every call would code them anew.
        """
        at_least("sinks", sinks, 0)
        at_least("window", window, 1)
        self.check_turning(rotation)
        self.in_memory("evict")
        kept = min(sinks + window, self.capacity)
        gone = (self.lengths - kept).clip(0)
        steps = self._steps(kept)
        slots = self._same_place(steps + gone[:, None] * (steps >= sinks))
        rows = self._steps(len(gone))[:, None]
        moved = [x[rows, slots] for x in self.arrays]
        if rotation is not None:
            later = moved[0][:, sinks:]
            moved[0][:, sinks:] = turned(later, self._steps(later.shape[1]) * 0 - gone[:, None], rotation)
        else:
            self._evicted = self._evicted + gone
        for held, x in zip(self.arrays, moved, strict=True):
            held[:, :kept] = x
        self.lengths = cast(self.lengths - gone, self.lengths.dtype)
        self._bound = min(self._bound, kept)

    def reset(self) -> None:
        """Forget every token; the arrays stay."""
        self.lengths = self.lengths * 0
        self._evicted = self.lengths
        self._bound = 0

    def _steps(self, n: int) -> Any:
        # 0 .. n - 1 where the lengths lie, so that nothing waits for them
        if is_torch(self.lengths):
            import torch

            return torch.arange(n, dtype=torch.int32, device=self.lengths.device)
        return np.arange(n, dtype=np.int32)

    def _same_place(self, x: Any) -> Any:
        if is_torch(self.lengths):
            import torch

            return torch.as_tensor(x, device=self.lengths.device)
        return np.asarray(x)


def bound_of(lengths: Any, new: Any, bound: int, capacity: int) -> int:
    """What no length exceeds once each sequence took `new` tokens; ValueError where one exceeds the capacity.

    bound: what is known of it on the host. Only where that is above the capacity are the lengths looked at.
    """
    if bound <= capacity:
        return bound
    after = lengths + new
    longest = int(after.max()) if len(after) else 0
    if longest > capacity:
        full = int(after.argmax())
        raise ValueError(
            f"sequence {full} holds {int(lengths[full])} tokens and would take {int(new[full])} more; "
            f"expected at most {capacity}, the capacity: make a larger cache or append fewer"
        )
    return longest


def turned(k: Any, by: Any, rotation: Rotation) -> Any:
    """Keys that `rope` turned by these options, at positions that differ by `by` ([T] or [B, T])."""
    options: dict[str, Any] = {**rotation, "factor": 1.0}
    return rope(k, by, **options)
