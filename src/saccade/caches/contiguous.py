"""Keys and values of past tokens in contiguous arrays, for decoding step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays import Array, ArrayOrList
from ..frameworks.source import host, integral
from ..rope import rope, turning
from . import gates
from .choice import arrays_for, device_of
from .lengths import Bounded
from .sequences import path_of
from .storage import Storage, at_least

# options of `rope`
Rotation = Mapping[str, Any]


class KVCache(Bounded, Storage):
    """Contiguous keys and values of a batch of sequences whose lengths may differ. A cache has no gradient.

    Args:
        batch: the number of sequences.
        capacity: the largest number of tokens per sequence.
        kv_heads: heads of keys and values.
        head_dim: the head size of k.
        v_dim: the head size of v; None for head_dim.
        dtype: the dtype of the tokens: a NumPy dtype, a name such as "bfloat16", or a torch dtype, which makes tensors.
        device: a torch device, which makes the arrays tensors; or "webgpu" or the `place` of an open WebGPU device, for
            arrays of float32 or float16 on that device, with lengths in memory. None makes NumPy arrays, or CPU tensors
            for a torch dtype.
        fill: the contents of unused slots; no result depends on them.
        quantised: "int8", "int4" or "fp8" stores codes with scales instead of numbers (`saccade.quantised`). Tokens are
            quantised once, by `append`; attention reads the codes. None stores the numbers.
        group: numbers per scale; None for a whole head, and for 32 with int4.
        gate_heads: the number of query heads if they have forget gates (`saccade.gates`). `append` then needs log_f,
            and `decode` adds the bias.

    Attributes:
        k: [batch, capacity, kv_heads, head_dim], or the codes.
        v: [batch, capacity, kv_heads, v_dim], or the codes.
        lengths: int32 [batch], tokens of each sequence. You may assign others in an array of the same kind.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Examples:
        >>> cache = saccade.KVCache(2, 1024, 8, 64, dtype=torch.float16)
        >>> k, v = torch.randn(2, 2, 10, 8, 64, dtype=torch.float16)  # 10 tokens of 2 sequences
        >>> cache.append(k, v)
        >>> cache.lengths
        tensor([10, 10], dtype=torch.int32)
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
        self._lengths = 0 * self._arrays.steps(batch, "int32")
        # int32 [batch] once tokens were evicted
        self._evicted: Any = 0

    @classmethod
    def like(cls, k: Array, v: Array | None = None, *, capacity: int | None = None, **options: Any) -> KVCache:
        """An empty cache with the sizes, dtype, framework and device of given keys.

        Args:
            k: [batch, T, kv_heads, head_dim].
            v: [batch, T, kv_heads, v_dim], if values have another head size than keys.
            capacity: tokens per sequence; None for T.
            options: the other arguments of the class.

        Raises:
            ValueError: k or v does not have four dimensions.
        """
        shapes = [[*getattr(x, "shape", ())] for x in (k, k if v is None else v)]
        if any(len(shape) != 4 for shape in shapes):
            raise ValueError(f"k, v have shapes {shapes}; expected [batch, T, kv_heads, size] both")
        batch, tokens, heads, size = shapes[0]
        sizes = batch, tokens if capacity is None else capacity, heads, size
        return cls(*sizes, v_dim=shapes[1][3], dtype=k.dtype, device=device_of(k), **options)

    def __repr__(self) -> str:
        # lengths on a device are omitted, because reading them would wait for it
        more = {"lengths": self.lengths.tolist()} if getattr(self.lengths, "is_cpu", True) else {}
        return self.shown(batch=len(self.lengths), capacity=self.capacity, **more)

    def __len__(self) -> int:
        """The number of tokens of the longest sequence. This waits for lengths on a device."""
        return int(self.lengths.max()) if len(self.lengths) else 0

    def __bool__(self) -> bool:
        """True, even for an empty cache, so that `if cache` tests whether there is one."""
        return True

    @property
    def capacity(self) -> int:
        """The largest number of tokens per sequence."""
        return int(self.k.shape[1])

    @property
    def positions(self) -> Any:
        """int32 [batch]: the next position of each sequence, its length plus the tokens that `evict` removed."""
        return self.lengths + self._evicted

    def append(
        self,
        k: Array,
        v: Array,
        lengths: ArrayOrList | None = None,
        *,
        rotation: Rotation | None = None,
        log_f: Array | None = None,
    ) -> None:
        """Append new tokens to each sequence. If it raises an error, nothing has been written.

        Args:
            k: [batch, T, kv_heads, head_dim], in the dtype and on the device of the cache.
            v: [batch, T, kv_heads, v_dim], likewise.
            lengths: int [batch], how many of the T tokens, from the first on, each sequence takes; None for all. A
                cache on a GPU does not wait for lengths on that GPU, and takes numbers below 0 as 0 and numbers above T
                as T. It waits only if the tokens might exceed the capacity.
            rotation: options of `rope`, with which k is first rotated to its positions.
            log_f: [batch, T, gate_heads], floating, the logarithms of the tokens' forget gates; required if and only if
                the cache has gate_heads.

        Raises:
            ValueError: shapes do not fit, or a sequence would exceed the capacity.
            TypeError: k or v has another dtype or framework.
            Unsupported: k or v requires grad or has a tangent; or rotation on a WebGPU device.
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
        self.grow(after, most, self.capacity)
        self._arrays.write_rows(self, k, v, self.lengths, counts, turn)
        if log_f is not None:
            sums = gates.sums_of_rows(self, log_f, self.lengths)
            gates.write(self, sums, *self._arrays.slots(self.lengths, T, counts))
        self._lengths = after

    def counts(self, lengths: Any, T: int) -> tuple[Any, int]:
        """(counts, bound): how many of T new tokens each sequence takes, int32 [batch], and an upper bound.

        lengths: as in `append`. Raises ValueError if they are wrong.
        """
        B = len(self.lengths)
        if lengths is None:
            return 0 * self.lengths + T, T
        # a cache of tensors does not wait for lengths on a device
        far = hasattr(self.lengths, "is_cpu") and not getattr(lengths, "is_cpu", True)
        taken: Any = lengths if far else host(lengths)
        if tuple(taken.shape) != (B,) or (B and not integral(taken.dtype)):
            raise ValueError(f"lengths is {taken.dtype} {list(taken.shape)}; expected integers [{B}], one per sequence")
        if far:
            return taken.clamp(0, T).to(self.lengths), T
        if B and (int(taken.min()) < 0 or int(taken.max()) > T):
            raise ValueError(f"lengths is {taken.tolist()}; expected {B} numbers from 0 to {T}, the tokens given")
        return self._arrays.indices(taken.astype(np.int32)), int(taken.max()) if B else 0

    def evict(self, sinks: int, window: int, *, rotation: Rotation | None = None) -> None:
        """Keep only the first `sinks` and last `window` tokens of each sequence, without a gap (Xiao et al., 2023).

        Masks count positions in the cache: the tokens keep their order, but their distances change.

        Args:
            sinks: how many of the first tokens to keep.
            window: how many of the last tokens to keep.
            rotation: None leaves the keys rotated to their old positions, and `positions` continues as if nothing had
                been removed. If you give the options of `rope` with which the keys were rotated, keys are rotated back
                by the distance that they move. Positions are then indices in the cache and never exceed the capacity,
                and every call rounds k once more.

        Raises:
            ValueError: sinks is negative, or window is less than 1.
            Unsupported: the cache is on a WebGPU device; or rotation of quantised keys, which would be quantised again.
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
            later = moved[0][:, sinks:, :, self.rotary]
            by = 0 * self._arrays.steps(later.shape[1]) - gone[:, None]
            later[...] = rope(later, by, **dict(rotation, factor=1.0))
        for x, new in zip(self.arrays, moved, strict=True):
            x[:, :left] = new
        self._lengths = self.lengths - gone
        self._bound = min(self._bound, left)

    def accept(self, tokens: int, paths: Sequence[Sequence[int]]) -> None:
        """Of the last `tokens` tokens of each sequence keep only those of a path through a tree (`saccade.mask.tree`).

        Stored numbers and codes are moved as they are, and keys stay rotated to the depths of their tokens, which are
        the positions that the path then has.

        Args:
            tokens: how many of the last tokens belong to the tree.
            paths: for each sequence, the tokens to keep, ascending numbers from 0 to tokens - 1; [] for none. Lengths
                on a GPU are trusted to be at least `tokens`.

        Raises:
            ValueError: a path has other numbers, there are fewer tokens, or a path leaves out tokens before others in a
                cache with gates.
            Unsupported: the cache is on a WebGPU device.
        """
        self.in_memory("accept")
        if len(paths) != len(self.lengths):
            raise ValueError(f"paths has {len(paths)} paths; expected {len(self.lengths)}, one per sequence")
        kept = [path_of(path, tokens) for path in paths]
        if getattr(self.lengths, "is_cpu", True) and (self.lengths < tokens).any():
            raise ValueError(f"tokens is {tokens}; expected at most {int(self.lengths.min())}, those of every sequence")
        longest = max(map(len, kept), default=0)
        at = np.stack([np.append(path, np.arange(len(path), longest)) for path in kept] or [np.arange(0)])
        starts = self.lengths - tokens
        if (at != np.arange(longest)).any():
            gates.check_path(self)
            rows, steps = self._arrays.steps(len(kept))[:, None], self._arrays.steps(longest)
            sources = starts[:, None] + self._arrays.indices(at)
            for x, moved in [(x, x[rows, sources]) for x in self.arrays]:
                x[rows, starts[:, None] + steps] = moved
        self._lengths = starts + self._arrays.indices(np.array([len(path) for path in kept], np.int32))
        self._bound = max(0, self._bound - tokens + longest)

    def reset(self) -> None:
        """Remove all tokens; the arrays stay allocated."""
        self._lengths, self._bound = self.lengths * 0, 0
        self._evicted = 0
