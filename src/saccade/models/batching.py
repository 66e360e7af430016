"""Many prompts through one model: sequences join and leave a running batch, and share pages of a common prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..caches.prefixes import PrefixCache
from .blocks import Decoder, PagedTokens
from .experts import Experts
from .sampling import Sampler, allow, check_lengths


@dataclass
class _Running:
    # a running prompt: its pages in every layer, tokens not yet read, and tokens drawn
    number: int
    sequence: int
    unread: list[int]
    generator: torch.Generator
    known: list[int]
    drawn: list[int] = field(default_factory=list)


@torch.no_grad()
def serve(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sampler: Sampler,
    *,
    batch: int = 8,
    page_size: int = 16,
    seed: int = 0,
    first: np.ndarray | None = None,
    chunk: int = 256,
    rows: int | None = None,
    quantised: str | None = None,
    backend: str | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """Yields (number of the prompt, its new tokens) when a prompt ends: at an end token, or after `tokens` tokens.

    At most `batch` prompts run at the same time. Each step is one pass: it reads up to `chunk` tokens of every prompt
    that has unread ones, and draws one token for every other prompt. When a prompt ends, the next one takes its place.
    It shares the pages of the longest prefix that it has in common with a running prompt, or with a prompt that has
    ended and whose pages were not reused (`PrefixCache`). Draws depend on the seed and the prompt's number, not on
    the other prompts.
    rows: compute exactly so many tokens in each pass, the last ones as padding, and attention with
    deterministic="batch". A text then has the same tokens with any other prompts, if the matrix products of the linear
    layers give a row the same bits in any place among these rows. A pass costs as much as one with `rows` tokens.
    prompts, first, quantised: as in `generate`.

    Raises ValueError for a batch or page_size below 1, for fewer rows than `batch`, and as `generate` does.
    """
    if batch < 1 or page_size < 1:
        raise ValueError(f"batch is {batch} and page_size {page_size}; expected at least 1 of both")
    _check_rows(model, rows, batch)
    check_lengths(model, prompts, tokens, first, chunk)
    if not tokens:
        yield from ((n, []) for n in range(len(prompts)))
        return
    model.eval()
    longest = max((len(prompt) for prompt in prompts), default=0) + tokens
    # a page more per prompt, because forks copy one, and the pages of one more prompt, for prefixes of ended prompts
    pages = (min(batch, len(prompts)) + 1) * (-(-longest // page_size) + 1)
    layers = model.make_pages(pages, page_size, quantised)
    begins = PrefixCache(layers)
    running, waiting = list[_Running](), list(enumerate(prompts))[::-1]
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(_start(*waiting.pop(), begins, seed))
        taken = _taken(running, chunk, rows)
        cu = np.concatenate([[0], np.cumsum([len(some) for some in taken])])
        sequences = [one.sequence for one in running]
        begins.free(
            sum(_wanted(len(one.known), len(some), page_size) for one, some in zip(running, taken, strict=True))
        )
        flat = _padded([token for some in taken for token in some], rows)[None]
        order = True if rows is None else "batch"
        hidden = model.hidden(flat, caches=[PagedTokens(x, sequences, cu, order) for x in layers], backend=backend)[0]
        logits = model.logits(hidden[_padded(cu[1:] - 1, rows)])
        for one, some, row in zip(list(running), taken, logits[: len(running)], strict=True):
            one.known += some
            del one.unread[: len(some)]
            if not one.drawn:
                begins.keep(one.sequence, one.known)
            if one.unread:
                continue
            if first is not None and not one.drawn:
                row = allow(row[None], first[one.number : one.number + 1])[0]
            token = int(sampler.draw(row[None], one.generator))
            one.drawn.append(token)
            one.unread.append(token)
            if token in model.config.ends or len(one.drawn) == tokens:
                running.remove(one)
                begins.keep(one.sequence, one.known)
                for x in layers:
                    x.remove(one.sequence)
                yield one.number, one.drawn


def _check_rows(model: Decoder, rows: int | None, batch: int) -> None:
    if rows is not None and rows < batch:
        raise ValueError(f"rows is {rows}; expected at least {batch}, a token of each prompt of the batch")
    if rows is not None and any(isinstance(module, Experts) for module in model.modules()):
        raise ValueError(f"rows is {rows} for a model with experts; expected None: experts have rows of their own")


def _taken(running: Sequence[_Running], chunk: int, rows: int | None) -> list[list[int]]:
    # the tokens of each prompt that the next pass reads: one of each, and more while there are rows
    if rows is None:
        return [one.unread[:chunk] for one in running]
    taken, left = list[list[int]](), rows - len(running)
    for one in running:
        taken.append(one.unread[: min(chunk, 1 + left)])
        left -= len(taken[-1]) - 1
    return taken


def _padded(numbers: Sequence[int] | np.ndarray, rows: int | None) -> torch.Tensor:
    # int64 [rows], zeros after the numbers
    padded = torch.zeros(len(numbers) if rows is None else rows, dtype=torch.int64)
    padded[: len(numbers)] = torch.as_tensor(numbers)
    return padded


def _start(number: int, prompt: Sequence[int], begins: PrefixCache, seed: int) -> _Running:
    # the last token of a prompt is read: its logits are needed
    sequence, shared = begins.begin(prompt[:-1])
    generator = torch.Generator().manual_seed(seed + number)
    return _Running(number, sequence, list(prompt[shared:]), generator, list(prompt[:shared]))


def _wanted(cached: int, more: int, page_size: int) -> int:
    # pages that new tokens may take: the pages that they fill, and a copy of the page that they continue
    return -(-(cached + more) // page_size) - cached // page_size
