"""Keys and values of past tokens in contiguous arrays, for decoding step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays import is_torch
from ..frameworks.source import host, integral
from ..rope import rope, turning
from . import gates
from .choice import arrays_for
from .storage import Storage, at_least

# options of `rope`
Rotation = Mapping[str, Any]


class KVCache(Storage):
    """Contiguous keys and values of a batch of sequences whose lengths may differ.

    batch, capacity (tokens that each sequence may hold), kv_heads, head_dim. v_dim, the head size of v, is head_dim
    by default. The arrays are NumPy's by default, tensors if dtype is a torch dtype or device one of torch's. For
    device "webgpu", or the place of an open device, they are device arrays of float32 or float16 that change with
    every append, and lengths stay in memory. fill is what unused slots hold; no result depends on it.
    quantised: "int8", "int4" or "fp8" stores codes instead of numbers, and a scale for each `group` of them
    (`saccade.quantised` describes both). Tokens come in dtype and are encoded once, where the cache is; attention
    reads the codes. On a WebGPU device the rows of codes hold their scales too.
    gate_heads: query heads with forget gates (`saccade.gates`). `append` then takes log_f, and `decode` adds the bias.

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
        gate_heads: int | None = None,
    ) -> None:
        at_least("batch", batch, 0)
        at_least("capacity", capacity, 0)
        arrays = arrays_for(dtype, device)
        super().__init__((batch, capacity), kv_heads, (head_dim, v_dim), arrays, fill, quantised, group)
        if gate_heads is not None:
            gates.add_room(self, gate_heads)
        self.lengths: Any = 0 * self._arrays.steps(batch, "int32")
        self._evicted: Any = self.lengths
        # no length exceeds it: known on the host, so that an append need not wait for a device
        self._bound = 0

    @classmethod
    def like(cls, k: Any, v: Any = None, *, capacity: int | None = None, **options: Any) -> KVCache:
        """An empty cache for keys like k [batch, T, kv_heads, head_dim], with their sizes, dtype, framework and device.

        v [batch, T, kv_heads, v_dim] where values have another size. capacity: T by default. options: the others of the
        class. Raises ValueError for k that has another number of dimensions.
        """
        shapes = [[*getattr(x, "shape", ())] for x in (k, k if v is None else v)]
        if any(len(shape) != 4 for shape in shapes):
            raise ValueError(f"k, v have shapes {shapes}; expected [batch, T, kv_heads, size] both")
        batch, tokens, heads, size = shapes[0]
        device = k.gpu.place if hasattr(k, "gpu") else k.device if is_torch(k) else None
        sizes = batch, tokens if capacity is None else capacity, heads, size
        return cls(*sizes, v_dim=shapes[1][3], dtype=k.dtype, device=device, **options)

    def __repr__(self) -> str:
        # lengths on a device are not waited for
        more = {"lengths": self.lengths.tolist()} if getattr(self.lengths, "is_cpu", True) else {}
        return self.shown(batch=len(self.lengths), capacity=self.capacity, **more)

    def __len__(self) -> int:
        """Tokens of the longest sequence; lengths on a device are waited for."""
        return int(self.lengths.max()) if len(self.lengths) else 0

    def __bool__(self) -> bool:
        """True, for an empty cache too: `if cache` asks whether there is one."""
        return True

    @property
    def capacity(self) -> int:
        """Tokens that each sequence may hold."""
        return int(self.k.shape[1])

    @property
    def positions(self) -> Any:
        """int32 [batch]: the position of each sequence's next token, its length plus the tokens that `evict` took."""
        return self.lengths + self._evicted

    def append(
        self, k: Any, v: Any, lengths: Any = None, *, rotation: Rotation | None = None, log_f: Any = None
    ) -> None:
        """Write new tokens behind those of each sequence, and lengthen it.

        k [batch, T, kv_heads, head_dim] and v [batch, T, kv_heads, v_dim], in the cache's dtype and place. lengths, int
        [batch]: how many of the T tokens each sequence takes, the first ones; None for all. rotation:
        options of `rope`, by which k is first rotated to the positions that it takes. log_f: [batch, T, gate_heads],
        floating, the logarithms of the tokens' forget gates, for a cache that was made with gate_heads.

        A cache on a GPU does not wait for lengths on that GPU: a number below 0 counts as 0, one above T as T. It
        waits only if the tokens might exceed the capacity.

        Raises ValueError for shapes that do not fit and for a sequence that would exceed the capacity, TypeError for
        another dtype or framework, Unsupported for k or v that require grad. Nothing is then written.
        """
        B = int(self.k.shape[0])
        self.check_tokens(k, v, f"{B}, T", (B,))
        T = k.shape[1]
        if log_f is not self.gates:
            gates.check(self, log_f, (B, T))
        counts, most = (None, T) if lengths is None else self.counts(lengths, T)
        turn = None
        if rotation is not None:
            self.in_memory("rotation")
            turn = turning(k, self.positions[:, None] + self._arrays.steps(T), **rotation)
        after = self.lengths + (T if counts is None else counts)
        self._bound = bound_of(self.lengths, after, self._bound + most, self.capacity)
        self._arrays.write_rows(self, k, v, self.lengths, counts, turn)
        if log_f is not None:
            sums = gates.sums_of_rows(self, log_f, self.lengths)
            gates.write(self, sums, *self._arrays.slots(self.lengths, T, counts))
        self.lengths = after

    def counts(self, lengths: Any, T: int) -> tuple[Any, int]:
        """How many of T new tokens each sequence takes, int32 [batch] where the lengths are, and a bound of them.

        lengths: None or int [batch], as `append` takes them. Raises ValueError if they are not.
        """
        B = len(self.lengths)
        if lengths is None:
            return 0 * self.lengths + T, T
        # lengths on a device are not waited for by a cache of tensors
        far = hasattr(self.lengths, "is_cpu") and not getattr(lengths, "is_cpu", True)
        taken: Any = lengths if far else host(lengths)
        if tuple(taken.shape) != (B,) or (B and not integral(taken.dtype)):
            raise ValueError(f"lengths is {taken.dtype} {list(taken.shape)}; expected integers [{B}], one a sequence")
        if far:
            return taken.clamp(0, T).to(self.lengths), T
        if B and (int(taken.min()) < 0 or int(taken.max()) > T):
            raise ValueError(f"lengths is {taken.tolist()}; expected {B} numbers from 0 to {T}, the tokens given")
        return self._arrays.indices(taken.astype(np.int32)), int(taken.max()) if B else 0

    def evict(self, sinks: int, window: int, *, rotation: Rotation | None = None) -> None:
        """Keep the first `sinks` tokens and the last `window` of each sequence, side by side (Xiao et al. 2023).

        Without rotation, the keys that move stay rotated to their old positions, and `positions` counts on as if
        nothing had been removed. With rotation, the options of `rope` by which keys were rotated, they are rotated back
        by as many positions as they move: positions are then those in the cache and never exceed its capacity, at the
        cost of one rounding of k for every call. Masks count in the cache: the order stays, but distances change.

        Raises ValueError for negative sinks or an empty window. Raises Unsupported for keys on a WebGPU device, and for
        rotation of quantised keys, because every call would encode them again.
        """
        at_least("sinks", sinks, 0)
        at_least("window", window, 1)
        self.check_rotation(rotation)
        self.in_memory("evict")
        left = min(sinks + window, self.capacity)
        gone = (self.lengths - left).clip(0)
        steps = self._arrays.steps(left)
        at = self._arrays.steps(len(gone))[:, None], steps + gone[:, None] * (steps >= sinks)
        moved = [x[at] for x in self.arrays]
        if rotation is None:
            self._evicted = self._evicted + gone
        else:
            later = moved[0][:, sinks:]
            by = 0 * self._arrays.steps(later.shape[1]) - gone[:, None]
            moved[0][:, sinks:] = rope(later, by, **dict(rotation, factor=1.0))
        for x, new in zip(self.arrays, moved, strict=True):
            x[:, :left] = new
        self.lengths = self.lengths - gone
        self._bound = min(self._bound, left)

    def reset(self) -> None:
        """Forget every token; the arrays stay."""
        self.lengths = self.lengths * 0
        self._evicted = self.lengths
        self._bound = 0


def bound_of(lengths: Any, after: Any, bound: int, capacity: int) -> int:
    """What no length exceeds once `lengths` [B] become `after`; ValueError where one exceeds the capacity.

    bound: what the host knows of it. The lengths are looked at only if that is above the capacity.
    """
    if bound <= capacity:
        return bound
    longest = int(after.max()) if len(after) else 0
    if longest > capacity:
        full = int(after.argmax())
        raise ValueError(
            f"sequence {full} holds {int(lengths[full])} tokens and would take {int(after[full] - lengths[full])} "
            f"more; expected at most {capacity}, the capacity: make a larger cache or append fewer"
        )
    return longest
