"""Many prompts through one model: sequences join and leave a running batch, and share pages of a common prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..caches.prefixes import PrefixCache
from .blocks import Decoder, PagedTokens
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
    quantised: str | None = None,
    backend: str | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """Yields (number of the prompt, its new tokens) when a prompt ends: at an end token, or after `tokens` tokens.

    At most `batch` prompts run at the same time. Each step is one pass: it reads up to `chunk` tokens of every prompt
    that has unread ones, and draws one token for every other prompt. When a prompt ends, the next one takes its place.
    It shares the pages of the longest prefix that it has in common with a running prompt, or with a prompt that has
    ended and whose pages were not reused (`PrefixCache`). Draws depend on the seed and the prompt's number, not on
    the other prompts.
    prompts, first, quantised: as in `generate`.

    Raises ValueError for a batch or page_size below 1, and as `generate` does.
    """
    if batch < 1 or page_size < 1:
        raise ValueError(f"batch is {batch} and page_size {page_size}; expected at least 1 of both")
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
        taken = [one.unread[:chunk] for one in running]
        cu = np.concatenate([[0], np.cumsum([len(some) for some in taken])])
        sequences = [one.sequence for one in running]
        begins.free(
            sum(_wanted(len(one.known), len(some), page_size) for one, some in zip(running, taken, strict=True))
        )
        flat = torch.tensor([token for some in taken for token in some])[None]
        hidden = model.hidden(flat, caches=[PagedTokens(x, sequences, cu) for x in layers], backend=backend)[0]
        logits = model.logits(hidden[torch.from_numpy(cu[1:] - 1)])
        for one, some, row in zip(list(running), taken, logits, strict=True):
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


def _start(number: int, prompt: Sequence[int], begins: PrefixCache, seed: int) -> _Running:
    # the last token of a prompt is read: its logits are needed
    sequence, shared = begins.begin(prompt[:-1])
    generator = torch.Generator().manual_seed(seed + number)
    return _Running(number, sequence, list(prompt[shared:]), generator, list(prompt[:shared]))


def _wanted(cached: int, more: int, page_size: int) -> int:
    # pages that new tokens may take: the pages that they fill, and a copy of the page that they continue
    return -(-(cached + more) // page_size) - cached // page_size
