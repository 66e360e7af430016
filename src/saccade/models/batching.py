"""Many prompts through one model (S27): sequences join and leave a running batch, and share pages of a common begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from saccade import PagedKVCache
from saccade.models.blocks import Decoder, Step
from saccade.models.sampling import Sampler, allow, check_lengths


@dataclass
class _Running:
    # a prompt at work: its pages in every layer, tokens not yet read, and tokens drawn
    number: int
    sequence: int
    unread: list[int]
    generator: torch.Generator
    known: list[int]
    drawn: list[int] = field(default_factory=list)


@torch.no_grad()
def serve(
    model: Decoder, prompts: Sequence[Sequence[int]], tokens: int, sampler: Sampler, *, batch: int = 8,
    page_size: int = 16, seed: int = 0, first: np.ndarray | None = None, chunk: int = 256,
    quantised: str | None = None, backend: str | None = None,
) -> Iterator[tuple[int, list[int]]]:  # fmt: skip
    """Yields (number of the prompt, its new tokens) as each prompt ends: at an end token, or with ``tokens`` of them.

    At most ``batch`` prompts are at work. A step reads up to ``chunk`` tokens of each that is still being read and
    draws one token of every other, in one pass; a place that becomes free goes to the next prompt, which shares the
    pages of the longest begin that it has in common with one at work. Draws depend on the seed and the prompt's
    number, not on what runs beside it. prompts, first, quantised: as in ``generate``.

    Raises ValueError for a batch or page_size below 1, and as ``generate``.
    """
    if batch < 1 or page_size < 1:
        raise ValueError(f"batch is {batch} and page_size {page_size}; expected at least 1 of both")
    check_lengths(model, prompts, tokens, first)
    if not tokens:
        yield from ((n, []) for n in range(len(prompts)))
        return
    model.eval()
    longest = max((len(prompt) for prompt in prompts), default=0) + tokens
    # a page more each: that which a fork copies
    pages = min(batch, len(prompts)) * (-(-longest // page_size) + 1)
    layers = model.make_pages(pages, page_size, quantised)
    running, waiting = list[_Running](), list(enumerate(prompts))[::-1]
    while waiting or running:
        while waiting and len(running) < batch:
            number, prompt = waiting.pop()
            sequence, shared = _join(layers, running, prompt)
            generator = torch.Generator().manual_seed(seed + number)
            running.append(_Running(number, sequence, list(prompt[shared:]), generator, list(prompt[:shared])))
        taken = [one.unread[:chunk] for one in running]
        cu = np.concatenate([[0], np.cumsum([len(some) for some in taken])])
        sequences = [one.sequence for one in running]
        flat = torch.tensor([token for some in taken for token in some])[None]
        hidden = model.hidden(flat, caches=[Step(x, sequences, cu) for x in layers], backend=backend)[0]
        logits = model.logits(hidden[torch.from_numpy(cu[1:] - 1)])
        for one, some, row in zip(list(running), taken, logits, strict=True):
            one.known += some
            del one.unread[: len(some)]
            if one.unread:
                continue
            if first is not None and not one.drawn:
                row = allow(row[None], first[one.number : one.number + 1])[0]
            token = int(sampler.draw(row[None], one.generator))
            one.drawn.append(token)
            one.unread.append(token)
            if token in model.config.ends or len(one.drawn) == tokens:
                running.remove(one)
                for x in layers:
                    x.remove(one.sequence)
                yield one.number, one.drawn


def _join(layers: list[PagedKVCache], running: list[_Running], prompt: Sequence[int]) -> tuple[int, int]:
    # a sequence in every layer that begins with what is known of the prompt, and how many tokens that is
    best, shared = None, 0
    for one in running:
        # the last token of a prompt is read: its logits are wanted
        most = min(len(one.known), len(prompt) - 1)
        same = next((n for n in range(most) if one.known[n] != prompt[n]), most)
        if same > shared:
            best, shared = one, same
    # layers count their sequences alike
    found = [x.add() if best is None else x.fork(best.sequence, shared) for x in layers]
    return found[0], shared
