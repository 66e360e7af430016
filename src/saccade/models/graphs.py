"""A step of generation as a CUDA graph: what it computes, what it draws, and how it is captured.

The graph reads the tokens that were drawn last, computes the model, draws the next tokens, and stores them in an array
of new tokens. Tokens, lengths and the number of steps stay at their addresses and are advanced by the graph itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..caches.contiguous import KVCache
from ..captures import holding
from . import gpt2
from .blocks import Attention, Block, Decoder
from .one_row import step_of
from .sampler import Sampler, not_finite, uniform
from .stores import PagedStep

# steps before the capture, which compile kernels; they need room in the caches, as does the captured one
WARM = 2
# the methods between the kernels of caches: products, and the small operations around them
FUSED = {
    Block: ("input_layernorm.forward", "finish"),
    Attention: ("project", "o_proj.forward"),
    gpt2.Block: ("ln_1.forward", "finish"),
    gpt2.Attention: ("project", "c_proj.forward"),
}
# one call at a time replaces methods of a model
_fusing = threading.Lock()

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
        with holding() as read, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
        forget()
    alive = graph, read

    def replay() -> None:
        with torch.cuda.device(device):
            alive[0].replay()

    return replay


@contextmanager
def fused(model: Decoder, draws: Draws, one: bool) -> Generator[None]:
    """While it is open, norms, projections and feed-forward layers of the model are compiled, each kind once.

    So is the draw of the largest logits; sums of probabilities keep their order. Triton reads the weights for one row
    faster than cuBLAS, with tiles that torch searches for. What two products of one row make together is stored once:
    else each program of the next product computes it again. one: the step is that of `one_row.py`, without the model's
    own methods.
    """
    alone = len(draws.token) == 1
    options: dict[str, Any] = {"coordinate_descent_tuning": alone}
    finish = {**options, "realize_acc_reads_threshold": 1} if alone else options
    parts: list[tuple[Any, str]] = [
        (module.get_submodule(at), name)
        for module in ([] if one else model.modules())
        for kind, paths in FUSED.items()
        if isinstance(module, kind)
        for at, _, name in (path.rpartition(".") for path in paths)
    ]
    if draws.chances is None:
        parts.append((draws, "draw"))
    with _fusing:
        before = [vars(part).get(name) for part, name in parts]
        for part, name in parts:
            chosen = finish if name == "finish" else options
            setattr(part, name, torch.compile(getattr(part, name), dynamic=False, options=chosen))
        try:
            yield
        finally:
            for (part, name), own in zip(parts, before, strict=True):
                delattr(part, name)
                if own is not None:
                    setattr(part, name, own)


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
        end = model.config.ends[0]
        self.first_end = end if 0 <= end < model.config.vocab_size else 0
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

    one = step_of(model, stores, backend) if len(draws.token) == 1 else None

    def step() -> None:
        logits = one(draws.token) if one else model(draws.token[:, None], caches=stores, backend=backend)[:, -1]
        settle()
        draws.draw(logits)

    def undo() -> None:
        # the keys that were appended are beyond the lengths again
        for x, old in zip(changing, before, strict=True):
            x.copy_(old)

    with fused(model, draws, one is not None) if model.steps_compiled else nullcontext():
        return capture(step, model.device, undo)
