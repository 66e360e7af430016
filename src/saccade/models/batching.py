"""Many prompts through one model: sequences join and leave a running batch, and share pages of a common prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..caches.paged import PagedKVCache
from ..caches.prefixes import PrefixCache
from ..caches.storage import whole
from .blocks import Decoder
from .drafts import Draft, Text, Tree, depth_of, walk
from .replay import AHEAD, PagedSteps
from .sampling import CHUNK, Sampler, allow, check_draws, check_lengths, check_prompts
from .stores import PagedTokens


@dataclass
class _Running:
    # a running prompt: its place in the batch, its pages in every layer, tokens of the prompt that are not yet read,
    # tokens read, and the text; tree: the nodes whose logits are needed
    number: int
    place: int
    sequence: int
    unread: list[int]
    generator: torch.Generator
    known: list[int]
    text: Text
    tree: Tree

    def take(self, chunk: int) -> list[int]:
        """The tokens to read next: at most `chunk` of the prompt, or the last token that was drawn and a draft."""
        if self.unread:
            return self.unread[:chunk]
        self.tree = self.text.tree(1)
        return self.tree.tokens


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
    chunk: int | None = None,
    rows: int | None = None,
    quantised: str | None = None,
    draft: str | Draft | None = None,
    backend: str | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """Yields (number of the prompt, its new tokens) when a prompt ends: at an end token, or after `tokens` tokens.

    At most `batch` prompts run at the same time. Each step is one pass: it reads up to `chunk` tokens of every prompt
    that has unread ones (256 for None), and draws one token, or those of a draft, for every other prompt. When a prompt
    ends, the next one takes its place. It shares the pages of the longest prefix that it has in common with a running
    prompt, or with a prompt that has ended and whose pages were not reused (`PrefixCache`). Draws depend on the seed
    and the prompt's number, not on the other prompts. On an NVIDIA GPU, while no prompt has unread tokens, steps are
    replays of one CUDA graph, up to 16 before the next prompt may begin.
    rows: compute exactly so many tokens in each pass, the last ones as padding, and attention with
    deterministic="batch". A text then has the same tokens with any other prompts, if the matrix products of the linear
    layers give a row the same bits in any place among these rows. A pass costs as much as one with `rows` tokens.
    prompts, first, quantised: as in `generate`. draft: likewise, with one branch; the draws are the same, too.

    Raises ValueError for a batch or page_size below 1, for fewer rows than `batch`, for rows with a draft, for a draft
    with branches, and as `generate` does.

    Examples:
        >>> from saccade.models.batching import serve
        >>> from saccade.models.llama import Llama, LlamaConfig
        >>> from saccade.models.sampling import Sampler
        >>> model = Llama(LlamaConfig(vocab_size=100))
        >>> texts = dict(serve(model, [[1, 2, 3], [1, 2], [9]], 8, Sampler(0.8), batch=2))
    """
    check_draws(tokens, sampler, seed)
    if whole("batch", batch) < 1 or whole("page_size", page_size) < 1:
        raise ValueError(f"batch is {batch} and page_size {page_size}; expected at least 1 of both")
    _check_rows(model, rows, batch, draft)
    check_prompts(prompts, model.config.vocab_size)
    check_lengths(model, prompts, tokens, first, chunk)
    if not tokens:
        yield from ((n, []) for n in range(len(prompts)))
        return
    draft, model, chunk = Draft.of(draft), model.eval(), chunk or CHUNK
    model.forget_steps()
    longest = max((len(prompt) for prompt in prompts), default=0) + tokens + depth_of(draft, model)
    columns, most = -(-longest // page_size) + 1, min(batch, len(prompts))
    # a page more per prompt, because forks copy one, the pages of one more prompt, for prefixes of ended prompts, and
    # one for places without a prompt
    layers = model.make_pages((most + 1) * columns + 1, page_size, quantised)
    prefixes = PrefixCache(layers)
    generators = [torch.Generator() for _ in range(most)]
    static = rows is None and draft is None and model.replayable(layers)
    steps = PagedSteps(model, layers, columns, sampler, generators, backend) if static and most else None
    running, waiting = list[_Running](), list(enumerate(prompts))[::-1]
    while waiting or running:
        while waiting and len(running) < batch:
            number, prompt = waiting.pop()
            place = min(set(range(most)) - {one.place for one in running})
            generator = generators[place].manual_seed(_seed_of(seed, number))
            running.append(_start(number, place, Text(prompt, tokens, model.config.ends, draft), prefixes, generator))
        if steps is not None and not any(one.unread for one in running):
            _replay(steps, running, prefixes, page_size)
        else:
            taken = _taken(running, chunk, rows)
            prefixes.free(sum(_wanted(one, len(some), page_size) for one, some in zip(running, taken, strict=True)))
            logits = _read(model, layers, running, taken, rows, backend)
            _advance(running, taken, logits, sampler, first, prefixes, layers)
        for one in [one for one in running if one.text.done]:
            prefixes.keep(one.sequence, one.known)
            running.remove(one)
            for x in layers:
                x.remove(one.sequence)
            yield one.number, one.text.drawn


def _read(
    model: Decoder,
    layers: Sequence[PagedKVCache],
    running: Sequence[_Running],
    taken: Sequence[list[int]],
    rows: int | None,
    backend: str | None,
) -> Sequence[Tensor]:
    """Read the tokens taken of each prompt; the logits after each node of its tree, [n, vocab]."""
    cu = np.concatenate([[0], np.cumsum([len(some) for some in taken])])
    sequences = [one.sequence for one in running]
    flat = _padded([token for some in taken for token in some], rows).to(model.device)[None]
    stores = [PagedTokens(x, sequences, cu, True if rows is None else "batch") for x in layers]
    hidden = model.hidden(flat, caches=stores, backend=backend)[0]
    counts = [len(one.tree.tokens) for one in running]
    at = np.concatenate([np.arange(end - n, end) for n, end in zip(counts, cu[1:], strict=True)])
    return model.logits(hidden[_padded(at, rows)])[: len(at)].split(counts)


def _advance(
    running: Sequence[_Running],
    taken: Sequence[list[int]],
    logits: Sequence[Tensor],
    sampler: Sampler,
    first: np.ndarray | None,
    prefixes: PrefixCache,
    layers: Sequence[PagedKVCache],
) -> None:
    """Draw after the tokens that each prompt has read, and drop rejected drafts from its pages."""
    reading = [one for one in running if one.unread]
    for one, some in zip(running, taken, strict=True):
        one.known += some
        del one.unread[: len(some)]
    drawing: list[tuple[_Running, Tensor]] = []
    for one, rows in zip(running, logits, strict=True):
        if not one.unread:
            begins = None if first is None or one not in reading else first[one.number : one.number + 1]
            drawing.append((one, rows if begins is None else allow(rows, begins)))
    if not any(one.text.draft for one, _ in drawing):
        for (one, _), token in zip(drawing, _draw(drawing, sampler), strict=True):
            one.text.draw(token)
    else:
        for one, rows in drawing:
            _accept(one, rows, sampler, layers, drafted=one not in reading)
    for one in reading:
        prefixes.keep(one.sequence, one.known)


def _draw(drawing: Sequence[tuple[_Running, Tensor]], sampler: Sampler) -> list[int]:
    """The next token of each prompt, drawn at once from its logits [1, vocab], by its own generator."""
    if not drawing:
        return []
    numbers = {row: one.number for row, (one, _) in enumerate(drawing)}
    rows = torch.cat([rows for _, rows in drawing])
    return sampler.draw(rows, [one.generator for one, _ in drawing], numbers).tolist()


def _accept(one: _Running, logits: Tensor, sampler: Sampler, layers: Sequence[PagedKVCache], *, drafted: bool) -> None:
    """Draw tokens of a prompt as far as its draft has them, and the one after; drop the rest of the draft."""
    draw = partial(sampler.draw, generator=one.generator, numbers={0: one.number})
    (path,) = walk([one.text], [one.tree], logits[None], draw)
    if drafted and one.text.draft is not None:
        one.text.draft.count(1, len(path))
    if rejected := len(logits) - len(path):
        del one.known[-rejected:]
        for x in layers:
            x.crop(one.sequence, len(one.known))


def _replay(steps: PagedSteps, running: Sequence[_Running], prefixes: PrefixCache, page_size: int) -> None:
    """Draw up to AHEAD tokens for every prompt, none of which has unread tokens."""
    counts = [min(AHEAD, one.text.left) for one in running]
    prefixes.free(sum(_wanted(one, n, page_size) for one, n in zip(running, counts, strict=True)))
    last = [one.text.tokens[-1] for one in running]
    numbers = [one.number for one in running]
    drawn = steps.run([one.place for one in running], [one.sequence for one in running], numbers, last, counts)
    for one, tokens in zip(running, drawn, strict=True):
        for token in tokens:
            if not one.text.done:
                one.known.append(one.text.tokens[-1])
                one.text.draw(token)
        for x in steps.layers:
            x.crop(one.sequence, len(one.known))


def _seed_of(seed: int, number: int) -> int:
    # a sum would give the texts of one seed to the next prompts of another
    return int(np.random.SeedSequence([int(seed) % 2**64, number]).generate_state(1, np.uint64)[0])


def _check_rows(model: Decoder, rows: int | None, batch: int, draft: object) -> None:
    if rows is None:
        return
    if whole("rows", rows) < batch:
        raise ValueError(f"rows is {rows}; expected at least {batch}, a token of each prompt of the batch")
    if draft is not None:
        raise ValueError(f"rows is {rows} with a draft; expected one of them: other prompts leave less room for drafts")
    if model.has_experts:
        raise ValueError(f"rows is {rows} for a model with experts; expected None: experts have rows of their own")


def _taken(running: Sequence[_Running], chunk: int, rows: int | None) -> list[list[int]]:
    # the tokens of each prompt that the next pass reads: one of each, and more while there are rows
    if rows is None:
        return [one.take(chunk) for one in running]
    taken, left = list[list[int]](), rows - len(running)
    for one in running:
        taken.append(one.take(min(chunk, 1 + left)))
        left -= len(taken[-1]) - 1
    return taken


def _padded(numbers: Sequence[int] | np.ndarray, rows: int | None) -> torch.Tensor:
    # int64 [rows], zeros after the numbers
    padded = torch.zeros(len(numbers) if rows is None else rows, dtype=torch.int64)
    padded[: len(numbers)] = torch.as_tensor(numbers)
    return padded


def _start(number: int, place: int, text: Text, prefixes: PrefixCache, generator: torch.Generator) -> _Running:
    # the last token of a prompt is read: its logits are needed
    prompt = text.tokens
    sequence, shared = prefixes.begin(prompt[:-1])
    return _Running(number, place, sequence, prompt[shared:], generator, prompt[:shared], text, Tree(0))


def _wanted(one: _Running, more: int, page_size: int) -> int:
    # pages that new tokens may take: the pages that they fill, and a copy of the page that they continue
    return -(-(len(one.known) + more) // page_size) - len(one.known) // page_size
