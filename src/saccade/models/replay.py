"""Steps of generation with static shapes, so that a GPU can replay one CUDA graph for each.

The graph reads the tokens that were drawn last, computes the model, draws the next tokens, and stores them in an array
of new tokens. Tokens, lengths and the number of steps stay at their addresses and are advanced by the graph itself. The
host only starts replays, and reads several steps at a time. It also draws the random numbers of these steps before:
for each generator that a graph knows, torch starts two kernels in every replay.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..caches.contiguous import KVCache
from ..caches.paged import PagedKVCache
from .blocks import Attention, Decoder, RMSNorm, SwiGLU
from .sampler import Sampler, not_finite, uniform
from .states import StackCache
from .stores import PagedStep

# steps that are started before the host reads their tokens
AHEAD = 16
# steps before the capture, which compile kernels; they need room in the caches, as does the captured one
WARM = 2
# kept caches have room for a multiple of so many tokens
GRAIN = 256
# the methods that surround products with small operations
FUSED = {RMSNorm: "forward", Attention: "project", SwiGLU: "forward"}

# (step, device, undo) -> a function that repeats the step; undo: undoes steps that were only tried
Capture = Callable[[Callable[[], None], torch.device, Callable[[], None]], Callable[[], None]]


def captured(step: Callable[[], None], device: torch.device, undo: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph of the step, on the device."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        undo()
        graph, forget = torch.cuda.CUDAGraph(), torch._C._cuda_clearCublasWorkspaces  # pyright: ignore[reportPrivateUsage]
        # the graph has a workspace of products of its own: torch frees the common one when it captures another graph
        forget()
        # calls of other threads to CUDA do not end the capture
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
        forget()

    def replay() -> None:
        with torch.cuda.device(device):
            graph.replay()

    return replay


@contextmanager
def fused(model: Decoder, rows: int) -> Generator[None]:
    """While it is open, norms, projections and feed-forward layers of the model are compiled, each kind once.

    rows: of the products. Triton reads the weights for one row faster than cuBLAS, with tiles that torch searches for.
    """
    options: dict[str, Any] = {"coordinate_descent_tuning": rows == 1}
    parts = [(part, name) for part in model.modules() for kind, name in FUSED.items() if isinstance(part, kind)]
    for part, name in parts:
        setattr(part, name, torch.compile(getattr(part, name), dynamic=False, options=options))
    try:
        yield
    finally:
        for part, name in parts:
            delattr(part, name)


class Draws:
    """The tokens that steps draw, in arrays that stay at their addresses.

    token: int64 [rows], the last ones. tokens: int64 [steps, rows], those of the first `count` steps. chances: float64
    [steps, rows], the uniform numbers that decide them, or None for a temperature of 0. ended, finite: bool [rows],
    whether an end token was drawn, and whether the logits were finite until then.
    """

    def __init__(self, model: Decoder, sampler: Sampler, rows: int, steps: int) -> None:
        device = model.device
        self.sampler = sampler
        drawing = sampler.temperature > 0
        self.chances = torch.zeros(steps, rows, dtype=torch.float64, device=device) if drawing else None
        # places without a sequence read it, too, so it is a token of the vocabulary
        self.first_end = max(0, model.config.ends[0])
        self.ends = torch.tensor(model.config.ends, device=device)
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(steps, rows, dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self.finite = torch.ones(rows, dtype=torch.bool, device=device)

    @property
    def changing(self) -> list[Tensor]:
        """The arrays that a draw changes, without `tokens`."""
        return [self.token, self.count, self.ended, self.finite]

    def restart(self) -> None:
        """Forget the sequences that have ended."""
        self.ended.zero_()
        self.finite.fill_(True)

    def prepare(self, steps: int, generator: torch.Generator) -> None:
        """Before so many draws: begin with the first of `tokens`, and draw the numbers that each would draw."""
        self.count.zero_()
        if self.chances is not None:
            chances = self.chances[:steps]
            chances.copy_(uniform(chances.numel(), generator).view_as(chances))

    def draw(self, logits: Tensor) -> None:
        """Draw the next token of each row, or the end token again; logits: [rows, vocab]."""
        chances = None if self.chances is None else self.chances.index_select(0, self.count)[0]
        token, finite = self.sampler.choose(logits, chances)
        self.token.copy_(token.masked_fill(self.ended, self.first_end))
        self.finite &= finite | self.ended
        self.ended |= torch.isin(self.token, self.ends)
        self.tokens.index_copy_(0, self.count, self.token[None])
        self.count += 1

    def check(self, numbers: Mapping[int, int] | None = None) -> None:
        """Raise FloatingPointError if the logits of a row were not finite; numbers: of prompts, by row."""
        if not bool(self.finite.all()):
            raise not_finite(self.finite, numbers)


def repeated(
    model: Decoder,
    stores: Sequence[KVCache | PagedStep],
    draws: Draws,
    lengths: Sequence[Tensor],
    settle: Callable[[], None],
    backend: str | None,
    capture: Capture,
) -> Callable[[], None]:
    """A function that replays a step: it reads the last tokens, appends them to the stores, and draws the next ones.

    lengths: the arrays that `settle` brings up to date after a pass of the model.
    """
    changing = [*lengths, *draws.changing]
    before = [x.clone() for x in changing]

    def step() -> None:
        logits = model(draws.token[:, None], caches=stores, backend=backend)[:, -1]
        settle()
        draws.draw(logits)

    def undo() -> None:
        # the keys that were appended are beyond the lengths again
        for x, old in zip(changing, before, strict=True):
            x.copy_(old)

    with fused(model, len(draws.token)) if model.steps_compiled else nullcontext():
        return capture(step, model.device, undo)


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
        self.model, self.caches, self.backend, self.capture = model, caches, backend, capture
        # all layers have stored the same tokens
        self.lengths = caches[0].lengths.clone()
        self.draws = Draws(model, sampler, len(self.lengths), AHEAD)
        self.replay: Callable[[], None] | None = None
        self.running = False

    @property
    def capacity(self) -> int:
        """The tokens for which the caches have room."""
        return self.caches[0].capacity

    @torch.no_grad()
    def run(self, logits: Tensor, tokens: int, generator: torch.Generator) -> Iterator[list[int]]:
        """Yields the next token of every sequence, up to `tokens` times, as `generate` does.

        logits: [B, vocab], after the prompts. generator: of the CPU. Raises as `Sampler.draw`, up to AHEAD steps later.
        """
        self.running = True
        try:
            yield from self._run(logits, tokens, generator)
        finally:
            self.running = False

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
            cache.lengths = self.lengths


def steps_of(
    model: Decoder, rows: int, capacity: int, sampler: Sampler, quantised: str | None, backend: str | None
) -> Steps | None:
    """Steps for `rows` sequences, with empty caches of at least `capacity` tokens; None if none are replayed.

    After `compile_steps`, those of an earlier call if they fit, because a capture takes as long as many steps.
    """

    def new_steps(capacity: int) -> Steps:
        caches = model.make_caches(rows, capacity, quantised)
        assert not isinstance(caches, StackCache)
        return Steps(model, caches, sampler, backend, captured)

    if not model.replayable(model.make_caches(1, 1, quantised)):
        return None
    if not model.steps_compiled:
        return new_steps(capacity)
    # a graph reads the weights where they were
    weights = [x.data_ptr() for x in (*model.parameters(), *model.buffers())]
    key = rows, sampler, quantised, backend, model.config.ends, weights
    old_key, steps = model.kept_steps or (None, None)
    if steps is not None and key == old_key and not steps.running and capacity <= steps.capacity <= 2 * capacity:
        for cache in steps.caches:
            cache.reset()
        return steps
    # their memory is freed before the next ones are made
    model.kept_steps = steps = None
    steps = new_steps(-(-capacity // GRAIN) * GRAIN)
    model.kept_steps = key, steps
    return steps


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
