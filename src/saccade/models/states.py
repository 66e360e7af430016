"""The cache of a stack with recurrent layers, and how its layers use it.

A cache of keys can be cut at any token. A state cannot, because it is a sum over all tokens read so far. So a stack's
cache copies its states at regular intervals, and goes back to the nearest copy before the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..caches.contiguous import KVCache
from ..caches.storage import whole
from ..distributed.context import ContextParallel, Where

# cosine and sine of every position's angles [.., T, 1, D / 2]
Turn = tuple[Tensor, Tensor]
# parts of a layer's state by name, each [B, ...]; none before the first token
State = dict[str, Tensor]


class Carry(NamedTuple):
    """The context of a recurrent layer's call: the state to replace, the borders of packed sequences, the backend.

    turn: the rotation of the positions, for layers that rotate keys.
    """

    state: State | None = None
    cu_seqlens: Tensor | None = None
    turn: Turn | None = None
    backend: Where = None

    def through(self, part: str, op: Callable[..., Any], *arrays: Any, **options: Any) -> Tensor:
        """The output of op, a function of `saccade.recurrent` that starts from a part of the state and updates it."""
        if isinstance(self.backend, ContextParallel):
            return self.backend.recurrent(op, *arrays, **options)
        options = {**options, "cu_seqlens": self.cu_seqlens, "backend": self.backend}
        if self.state is None:
            return op(*arrays, **options)
        y, self.state[part] = op(*arrays, initial_state=self.state.get(part), return_state=True, **options)
        return y


class Packing(NamedTuple):
    """Sequences in a batch [B, T] with borders cu_seqlens [N + 1]: all tokens, or those in `selected`, bool [B, T]."""

    cu_seqlens: Tensor
    selected: Tensor | None = None

    @classmethod
    def of_documents(cls, positions: Tensor | None) -> Packing | None:
        """Borders at each row and at each position 0 of positions [B, T]; None if each row is one sequence."""
        if positions is None or positions.ndim < 2:
            return None
        begins = positions == 0
        begins[:, 0] = True
        borders = begins.flatten().nonzero()[:, 0]
        if len(borders) == len(positions):
            return None
        return cls(torch.cat([borders, borders.new_tensor([positions.numel()])]).int())

    @classmethod
    def of_lengths(cls, taken: Tensor, T: int) -> Packing | None:
        """The first `taken` [B] of the T tokens of each row; None if these are all of them."""
        if bool((taken == T).all()):
            return None
        selected = torch.arange(T, device=taken.device) < taken[:, None]
        return cls(torch.cat([taken.new_zeros(1), taken.cumsum(0)]).int(), selected)

    def pack(self, x: Tensor) -> Tensor:
        """x [B, T, ...] -> [1, tokens, ...]."""
        return (x.flatten(0, 1) if self.selected is None else x[self.selected])[None]

    def unpack(self, packed: Tensor, B: int, T: int) -> Tensor:
        """[1, tokens, ...] -> [B, T, ...], with 0 for tokens that were not packed."""
        if self.selected is None:
            return packed[0].unflatten(0, (B, T))
        x = packed.new_zeros(B, T, *packed.shape[2:])
        x[self.selected] = packed[0]
        return x


class StackCache:
    """The caches of a stack, one per layer: a `KVCache` of its keys, or the `State` of a recurrent layer.

    layers: the caches, first to last; batch: the number of sequences; every: tokens between two copies of the states,
    None for no copies; device: of the lengths. lengths: int64 [B], the tokens read. If `ends` [B] is set, a sequence
    takes no token beyond its end, which prompts of different lengths in one batch need.
    """

    def __init__(
        self, layers: list[KVCache | State], batch: int, every: int | None = None, device: torch.device | None = None
    ) -> None:
        if every is not None and whole("every", every) < 1:
            raise ValueError(f"every is {every}; expected at least 1 token between checkpoints of states, or None")
        self.layers, self.every = layers, every
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.ends: Tensor | None = None
        self._checkpoints: dict[int, list[State]] = {}
        self._tokens = list[Tensor]()

    def __getitem__(self, layer: int) -> KVCache | State:
        return self.layers[layer]

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def positions(self) -> Tensor:
        """int64 [B]: the position of each sequence's next token."""
        return self.lengths

    @property
    def keys(self) -> list[KVCache]:
        """The caches of the attention layers."""
        return [layer for layer in self.layers if isinstance(layer, KVCache)]

    @property
    def states(self) -> list[State]:
        """The states of the recurrent layers."""
        return [layer for layer in self.layers if isinstance(layer, dict)]

    def pieces(self, tokens: Tensor) -> Iterator[tuple[int, int]]:
        """Ranges of the new tokens [B, T], to be read one after the other; each ends where the states are copied."""
        T = tokens.shape[1]
        if self.every is None or not len(self.lengths):
            yield 0, T
            return
        if bool((self.lengths != self.lengths[0]).any()) or self.ends is not None:
            counts = self.lengths if self.ends is None else self.ends
            raise ValueError(
                f"sequences of {counts.tolist()} tokens have checkpoints every {self.every}; expected one length "
                "for all: leave `every` out, or keep a cache for each sequence"
            )
        start = 0
        while start < T:
            stop = min(T, start + self.every - int(self.lengths[0]) % self.every)
            yield start, stop
            start = stop

    def packing(self, T: int) -> Packing | None:
        """The tokens that each sequence takes of T new ones."""
        return None if self.ends is None else Packing.of_lengths((self.ends - self.lengths).clamp(0, T), T)

    def read(self, tokens: Tensor) -> None:
        """Count tokens [B, T] that every layer has read, and copy the states if a copy is due."""
        taken = tokens.shape[1] + 0 * self.lengths
        if self.ends is not None:
            taken = (self.ends - self.lengths).clamp(min=0).minimum(taken)
        self.lengths = self.lengths + taken
        if self.every is None or not len(self.lengths):
            return
        self._tokens.append(tokens)
        length = int(self.lengths[0])
        if length % self.every == 0:
            # parts are replaced, never written to, so that a copy needs no new memory
            self._checkpoints[length] = [dict(state) for state in self.states]

    def accept(self, tokens: int, paths: Sequence[Sequence[int]]) -> None:
        """Of the last `tokens` tokens keep only those of a path, as `KVCache.accept`.

        Raises ValueError for a stack with states, and for one that copies them, as its record of tokens would be wrong.
        """
        if self.states or self.every is not None or self.ends is not None:
            raise ValueError("accept on a stack with states, checkpoints or ends; expected one with only keys")
        for cache in self.keys:
            cache.accept(tokens, paths)
        self.lengths = self.lengths - tokens + self.lengths.new_tensor([len(path) for path in paths])

    def undoing(self) -> Callable[[], None]:
        """A function that goes back to the tokens read until now."""
        # states and copies are replaced, never written to
        lengths, ends, keys = self.lengths, self.ends, [x.lengths for x in self.keys]
        states = [dict(state) for state in self.states]
        checkpoints, tokens = dict(self._checkpoints), list(self._tokens)

        def undo() -> None:
            self.lengths, self.ends, self._checkpoints, self._tokens = lengths, ends, checkpoints, tokens
            for state, old in zip(self.states, states, strict=True):
                state.clear()
                state.update(old)
            for cache, old in zip(self.keys, keys, strict=True):
                cache.lengths = old

        return undo

    def settle(self) -> None:
        """Forget the keys beyond `ends`, where every sequence continues."""
        if self.ends is not None:
            for cache in self.keys:
                cache.lengths = self.ends.to(cache.lengths.dtype)
            self.lengths, self.ends = self.ends.clone(), None

    def rewind(self, length: int) -> Tensor:
        """Go back to the last copy at or before `length` tokens; returns the tokens to read again, [B, n].

        Raises TypeError for a length that is not an integer, and ValueError for one that is not in the past, for
        sequences of different lengths, and if states must be cut but were not copied.
        """
        length = whole("length", length)
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        if not 0 <= length <= longest or bool((self.lengths != longest).any()):
            raise ValueError(
                f"crop to {length} tokens of sequences of {self.lengths.tolist()}; expected a length from 0 to theirs, "
                "one for all"
            )
        if length == longest:
            return self.lengths.new_zeros(len(self.lengths), 0)
        if self.every is None and self.states and length:
            raise ValueError(
                f"crop to {length} of {longest} tokens: a state cannot be shortened, and it has no checkpoint; "
                "make the caches with every=n, tokens between checkpoints, or crop to 0"
            )
        nearest = max((count for count in self._checkpoints if count <= length), default=0)
        if not self.states:
            nearest = length
        checkpoint = self._checkpoints.get(nearest, [{} for _ in self.states])
        for state, old in zip(self.states, checkpoint, strict=True):
            state.clear()
            state.update(old)
        for cache in self.keys:
            cache.lengths = cache.lengths * 0 + nearest
        self._checkpoints = {count: states for count, states in self._checkpoints.items() if count <= nearest}
        tokens = torch.cat(self._tokens, 1) if self._tokens else self.lengths.new_zeros(len(self.lengths), 0)
        self._tokens = [tokens[:, :nearest]]
        self.lengths = torch.full_like(self.lengths, nearest)
        return tokens[:, nearest:length]
