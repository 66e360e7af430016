"""Steps of generation with static shapes, so that a GPU can replay one CUDA graph for each (`graphs.py`).

The host only starts replays, and reads several steps at a time. It also draws the random numbers of these steps before:
for each generator that a graph knows, torch starts two kernels in every replay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..caches.contiguous import KVCache
from ..caches.paged import PagedKVCache
from .blocks import Decoder
from .graphs import Capture, Draws, captured, repeated
from .sampler import Sampler, uniform
from .states import StackCache
from .stores import PagedStep

# steps that are started before the host reads their tokens
AHEAD = 16
# kept caches have room for a multiple of so many tokens
GRAIN = 256


class Steps:
    """Steps that read the tokens drawn last, one per sequence, and draw the next ones.

    The first run captures the graph, which later runs replay. caches: one per layer, with room for WARM + 1 tokens more
    than are drawn.
    """

    def __init__(
        self,
        model: Decoder,
        caches: list[KVCache],
        sampler: Sampler,
        backend: str | None = None,
        capture: Capture = captured,
    ) -> None:
        self.caches, self.backend, self.capture = caches, backend, capture
        # a model that keeps these steps is freed at once
        self._model = weakref.ref(model)
        # all layers have stored the same tokens
        self.lengths = caches[0].lengths.clone()
        self.draws = Draws(model, sampler, len(self.lengths), AHEAD)
        self.replay: Callable[[], None] | None = None
        # what they depend on, if the model keeps them after a run
        self.key: Any = None

    @property
    def model(self) -> Decoder:
        """The model, which the caller of a run refers to."""
        model = self._model()
        assert model is not None
        return model

    @property
    def capacity(self) -> int:
        """The tokens for which the caches have room."""
        return self.caches[0].capacity

    @torch.no_grad()
    def run(self, logits: Tensor, tokens: int, generator: torch.Generator) -> Iterator[list[int]]:
        """Yields the next token of every sequence, up to `tokens` times, as `generate` does.

        logits: [B, vocab], after the prompts. generator: of the CPU. Raises as `Sampler.draw`, up to AHEAD steps later.
        """
        try:
            yield from self._run(logits, tokens, generator)
        finally:
            if self.key is not None:
                self.model.kept_steps = self

    def _run(self, logits: Tensor, tokens: int, generator: torch.Generator) -> Iterator[list[int]]:
        draws, ended, read, count = self.draws, set[int](), 0, 1
        self.lengths.copy_(self.caches[0].lengths)
        self._settle()
        draws.restart()
        draws.prepare(count, generator)
        draws.draw(logits)
        while True:
            draws.check()
            for row in draws.tokens[:count].tolist():
                yield row
                ended |= {b for b, token in enumerate(row) if token in self.model.config.ends}
                if len(ended) == len(row):
                    return
            read += count
            if read == tokens:
                return
            count = min(AHEAD, tokens - read)
            draws.prepare(count, generator)
            # after the first token, which does not wait for the capture
            self.replay = self.replay or self._captured()
            for _ in range(count):
                self.replay()

    def _captured(self) -> Callable[[], None]:
        def settle() -> None:
            self.lengths.copy_(self.caches[0].lengths)
            self._settle()

        return repeated(self.model, self.caches, self.draws, [self.lengths], settle, self.backend, self.capture)

    def _settle(self) -> None:
        # an append makes new lengths; a graph needs them where it reads them
        for cache in self.caches:
            cache.follow(self.lengths)


def caches_of(
    model: Decoder, rows: int, capacity: int, sampler: Sampler, quantised: str | None, backend: str | None
) -> tuple[list[KVCache] | StackCache, Steps | None]:
    """Empty caches of at least `capacity` tokens for `rows` sequences, and the steps that read them if a GPU can.

    After `compile_steps`, those of an earlier call if they fit, because a capture takes as long as many steps.
    """
    # taken from the model, so that no other call has them at the same time
    key, kept = None, vars(model).pop("kept_steps", None)
    if model.steps_compiled:
        # a graph reads the weights where they were
        weights = [x.data_ptr() for x in (*model.parameters(), *model.buffers())]
        key = rows, sampler, quantised, backend, model.config.ends, weights
        capacity = -(-capacity // GRAIN) * GRAIN
        if kept is not None and kept.key == key and capacity <= kept.capacity <= 2 * capacity:
            for cache in kept.caches:
                cache.reset()
            return kept.caches, kept
    # their memory is freed before the next ones are made
    del kept
    caches = model.make_caches(rows, capacity, quantised)
    if isinstance(caches, StackCache) or not model.replayable(caches):
        return caches, None
    steps = Steps(model, caches, sampler, backend, captured)
    steps.key = key
    return caches, steps


class PagedSteps:
    """Steps for the places of a running batch, whose sequences are in pages and come and go.

    A place without a sequence writes to a page that no sequence uses.
    layers: pages of each layer, one of which this takes. columns: the most pages of a sequence. generators: one of the
    CPU for each place.
    """

    def __init__(
        self,
        model: Decoder,
        layers: Sequence[PagedKVCache],
        columns: int,
        sampler: Sampler,
        generators: Sequence[torch.Generator],
        backend: str | None = None,
        capture: Capture = captured,
    ) -> None:
        self.layers, self.generators, self.rows = layers, generators, len(generators)
        spare = [x.add() for x in layers]
        for x, one in zip(layers, spare, strict=True):
            x.reserve([one], np.array([0, 1]))
        self.spare = int(layers[0].view(spare[:1]).block_table[0, 0])
        # tokens beyond a sequence's pages go to the spare one
        self.table = torch.full((self.rows, columns + 1), self.spare, dtype=torch.int32, device=model.device)
        self.lengths = torch.zeros(self.rows, dtype=torch.int32, device=model.device)
        self.draws = Draws(model, sampler, self.rows, AHEAD)
        stores = [PagedStep(x, self.table, self.lengths) for x in layers]

        def settle() -> None:
            self.lengths += 1

        self.replay = repeated(model, stores, self.draws, [self.lengths], settle, backend, capture)

    def run(
        self,
        places: Sequence[int],
        sequences: Sequence[int],
        numbers: Sequence[int],
        last: Sequence[int],
        counts: Sequence[int],
    ) -> list[list[int]]:
        """The next counts[r] <= AHEAD tokens of each sequence r, all but the last of which are then in its pages, too.

        places: in the running batch. numbers: of the prompts, for errors. last: the token of each sequence that was
        drawn last and not read. Raises FloatingPointError as `Sampler.draw`, and ValueError as `PagedKVCache.append`.
        """
        pool = self.layers[0]
        table, lengths = np.full(self.table.shape, self.spare, np.int32), np.zeros(self.rows, np.int32)
        token, idle = np.zeros(self.rows, np.int64), np.ones(self.rows, bool)
        lengths[list(places)] = [pool.length(one) for one in sequences]
        token[list(places)], idle[list(places)] = last, False
        for x in self.layers:
            x.reserve(sequences, np.concatenate([[0], np.cumsum(counts)]))
        pages = pool.view(sequences).block_table.numpy()
        for place, row in zip(places, pages, strict=True):
            table[place, : len(row)] = np.where(row < 0, self.spare, row)
        draws = self.draws
        for array, new in ((self.table, table), (self.lengths, lengths), (draws.token, token), (draws.ended, idle)):
            array.copy_(torch.from_numpy(new))
        if draws.chances is not None:
            chances = torch.zeros(draws.chances.shape, dtype=torch.float64)
            for place, n in zip(places, counts, strict=True):
                chances[:n, place] = uniform(n, self.generators[place])
            draws.chances.copy_(chances)
        draws.count.zero_()
        draws.finite.fill_(True)
        for _ in range(max(counts)):
            self.replay()
        draws.check(dict(zip(places, numbers, strict=True)))
        drawn = draws.tokens[: max(counts), list(places)].T.tolist()
        return [tokens[:n] for tokens, n in zip(drawn, counts, strict=True)]
