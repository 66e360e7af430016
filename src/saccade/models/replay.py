"""Steps of generation with static shapes, so that a GPU can replay one CUDA graph for each.

The graph reads the tokens that were drawn last, computes the model, draws the next tokens, and stores them in an array
of all new tokens. Tokens, lengths and the number of steps stay at their addresses and are advanced by the graph itself.
The host only starts replays, and reads several steps at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..caches.contiguous import KVCache
from .experts import Experts
from .sampler import Sampler, not_finite
from .states import StackCache

if TYPE_CHECKING:
    from .blocks import Decoder

# steps that are started before the host reads their tokens
AHEAD = 16
# steps before the capture, which compile kernels; they need room in the caches, as does the captured one
WARM = 2

# (step, generator, undo) -> a function that repeats the step; undo: undoes steps that were only tried
Capture = Callable[[Callable[[], None], torch.Generator, Callable[[], None]], Callable[[], None]]


def captured(step: Callable[[], None], generator: torch.Generator, undo: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph of the step; each of its replays draws new numbers."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    undo()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class Steps:
    """Steps that read the tokens drawn last, one per sequence, and draw the next ones.

    caches: one per layer, with room for WARM + 1 tokens more than are drawn.
    """

    def __init__(
        self,
        model: Decoder,
        caches: Sequence[KVCache],
        sampler: Sampler,
        generator: torch.Generator,
        backend: str | None = None,
        capture: Capture = captured,
    ) -> None:
        self.model, self.caches, self.sampler, self.generator = model, caches, sampler, generator
        self.backend, self.capture = backend, capture
        self.lengths = [cache.lengths.clone() for cache in caches]
        self._settle()
        batch, device = len(self.lengths[0]), model.device
        self.ends = torch.tensor(model.config.ends, device=device)
        self.token = torch.zeros(batch, dtype=torch.int64, device=device)
        self.ended = torch.zeros(batch, dtype=torch.bool, device=device)
        self.finite = torch.ones(batch, dtype=torch.bool, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def run(self, logits: Tensor, tokens: int) -> Iterator[list[int]]:
        """Yields the next token of every sequence, up to `tokens` times, as `generate` does.

        logits: [B, vocab], after the prompts. Raises as `Sampler.draw`, up to AHEAD steps later.
        """
        # steps that are tried before the capture need rows, too
        drawn = self.token.new_zeros(tokens + WARM, len(self.token))
        self._draw(logits, drawn)
        replay = self._captured(drawn) if tokens > 1 else None
        ended, read, written = set[int](), 0, 1
        while True:
            if not bool(self.finite.all()):
                raise not_finite(self.finite)
            for row in drawn[read:written].tolist():
                yield row
                ended |= {b for b, token in enumerate(row) if token in self.model.config.ends}
                if len(ended) == len(row):
                    return
            if written == tokens or replay is None:
                return
            read, written = written, min(tokens, written + AHEAD)
            for _ in range(written - read):
                replay()

    def _draw(self, logits: Tensor, drawn: Tensor) -> None:
        token, finite = self.sampler.choose(logits, self.generator)
        self.token.copy_(token.masked_fill(self.ended, self.model.config.ends[0]))
        self.finite &= finite
        self.ended |= torch.isin(self.token, self.ends)
        drawn.index_copy_(0, self.count, self.token[None])
        self.count += 1

    def _captured(self, drawn: Tensor) -> Callable[[], None]:
        changed = [*self.lengths, self.token, self.ended, self.finite, self.count]
        before, state = [x.clone() for x in changed], self.generator.get_state()

        def step() -> None:
            logits = self.model(self.token[:, None], caches=self.caches, backend=self.backend)[:, -1]
            for cache, lengths in zip(self.caches, self.lengths, strict=True):
                lengths.copy_(cache.lengths)
            self._settle()
            self._draw(logits, drawn)

        def undo() -> None:
            # the keys that were appended are beyond the lengths again
            for x, old in zip(changed, before, strict=True):
                x.copy_(old)
            self.generator.set_state(state)

        return self.capture(step, self.generator, undo)

    def _settle(self) -> None:
        # an append makes new lengths; a graph needs them where it reads them
        for cache, lengths in zip(self.caches, self.lengths, strict=True):
            cache.lengths = lengths


def of_static_shapes(model: Decoder, caches: list[KVCache] | StackCache) -> list[KVCache] | None:
    """The caches if steps of the model can be replayed: on a GPU, without states of layers and without experts."""
    experts = any(isinstance(module, Experts) for module in model.modules())
    return None if model.device.type != "cuda" or isinstance(caches, StackCache) or experts else caches
