"""Generation through the KV cache: prompts in chunks, then token by token, also for ragged batches."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..caches.contiguous import KVCache
from ..caches.storage import whole
from .blocks import Decoder
from .drafts import Draft, Text, end_of, speculate
from .fields import is_whole
from .graphs import WARM
from .replay import caches_of
from .sampler import Sampler
from .states import StackCache
from .stores import check_tokens, lengths_of, undoing

# tokens of each prompt, and of all prompts together, that `prefill` computes at a time; a GPU would wait for the host
# between short chunks
CHUNK, AT_ONCE, AT_ONCE_ON_GPU = 256, 2048, 32768


@torch.no_grad()
def prefill(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    capacity: int,
    chunk: int | None = None,
    backend: str | None = None,
    quantised: str | None = None,
    into: list[KVCache] | StackCache | None = None,
) -> tuple[Tensor, list[KVCache] | StackCache]:
    """Fills caches with prompts of any lengths, `chunk` tokens of each prompt at a time; None as in `generate`.

    into: empty caches, by default new ones. After an error they are empty again.
    Returns the logits [B, vocab] after each prompt's last token, and the caches of `capacity` tokens: one per layer,
    or one `StackCache`.
    Raises ValueError for no prompts, for an empty one or one beyond the capacity, for a chunk below 1, and for caches
    with tokens.
    """
    _check_chunk(chunk)
    counts = [len(prompt) for prompt in prompts]
    if not counts:
        raise ValueError("prompts is empty; expected at least one prompt")
    longest = max(counts)
    together = AT_ONCE_ON_GPU if model.device.type == "cuda" else AT_ONCE
    chunk = chunk or max(CHUNK, together // len(prompts))
    if longest > capacity or min(counts) < 1:
        raise ValueError(f"prompts of {counts} tokens; each needs 1 to {capacity}")
    padded = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = torch.as_tensor(prompt)
    padded, lengths = padded.to(model.device), torch.tensor(counts, dtype=torch.int32, device=model.device)
    caches = model.make_caches(len(prompts), capacity, quantised) if into is None else _checked_empty(into)
    undo, last = undoing(caches), torch.zeros(0)
    try:
        if isinstance(caches, StackCache) and len(set(counts)) > 1:
            caches.ends = lengths.long()
        for start in range(0, longest, chunk):
            hidden = model.hidden(padded[:, start : start + chunk], caches=caches, backend=backend)
            last = last if start else hidden.new_zeros(len(prompts), hidden.shape[-1])
            ends = lengths - 1 - start
            here = (ends >= 0) & (ends < chunk)
            last[here] = hidden[here, ends[here]]
    except BaseException:
        undo()
        raise
    # padding is beyond the length of its prompt: it is never read, and new tokens overwrite it
    if isinstance(caches, StackCache):
        caches.settle()
        return model.logits(last), caches
    for cache in caches:
        cache.lengths = lengths.clone()
    return model.logits(last), caches


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sampler: Sampler,
    *,
    seed: int = 0,
    first: np.ndarray | None = None,
    chunk: int | None = None,
    keep: tuple[int, int] | None = None,
    quantised: str | None = None,
    draft: str | Draft | None = None,
    backend: str | None = None,
) -> Iterator[list[int]]:
    """Yields the next token of every prompt, up to `tokens` times; a sequence that has ended repeats the end token.

    prompts: token ids, at least one per prompt. first: bool [B, n], which of the first n tokens the first draw allows.
    chunk: how many tokens of each prompt are computed at a time; None computes 2048 of all prompts together, on a GPU
    32768, and at least 256 of each.
    keep: (sinks, window), how many of the first and last tokens keep their keys when the cache is full; the cache has
    room for a quarter of a window more. Positions are counted in the cache, so a text may continue without end.
    quantised: the codes in which caches store keys and values, as in `KVCache`; not with keep, which rotates keys.
    draft: "ngram" or a `Draft`, by which several tokens are drafted and read in one call; None reads one token in each
    call. Greedy texts are the same, and so are draws of a single prompt; those of several prompts have the same
    probabilities. Rounding may differ, because a call reads more rows, and then decides between almost equal logits.
    On an NVIDIA GPU, without keep and draft, steps after the first token are replays of one CUDA graph.
    Raises ValueError if prompt and new tokens exceed the model's positions, for tokens that the model does not have,
    and for drafts with keep or with states; TypeError for arguments of other types.

    Examples:
        >>> from saccade.models.llama import Llama, LlamaConfig
        >>> from saccade.models.sampling import Sampler, generate
        >>> model = Llama(LlamaConfig(vocab_size=100))
        >>> text = [token for (token,) in generate(model, [[1, 2, 3]], 8, Sampler(0.8))]
    """
    check_prompts(prompts, model.config.vocab_size)
    check_draws(tokens, sampler, seed)
    config, longest = model.config, max((len(prompt) for prompt in prompts), default=0)
    capacity = longest + tokens
    if keep is not None:
        _check_keep(model, keep, quantised)
        capacity = min(capacity, max(longest, sum(keep)) + keep[1] // 4 + 1)
        _check_window(keep, capacity, longest, config.max_position_embeddings)
    draft, room = Draft.of(draft), WARM + 1 if model.device.type == "cuda" else 0
    if draft is not None:
        if keep is not None:
            raise ValueError(f"keep is {keep} and draft is given; expected one of them: a tree needs all its tokens")
        room = draft.depth * draft.width(model)
    check_lengths(model, prompts, capacity - longest, first, chunk)
    if not tokens or not len(prompts):
        return
    model.eval()
    generator = torch.Generator().manual_seed(int(seed))
    caches, steps, room = None, None, capacity + room
    if keep is draft is None:
        caches, steps = caches_of(model, len(prompts), room, sampler, quantised, backend)
    else:
        model.forget_steps()
    logits, caches = prefill(model, prompts, room, chunk, backend, quantised, caches)
    if first is not None:
        logits = allow(logits, first)
    if draft is not None:
        texts = [Text(prompt, tokens, config.ends, draft) for prompt in prompts]
        yield from speculate(model, caches, texts, logits, draft, partial(sampler.draw, generator=generator), backend)
        return
    if steps is not None:
        yield from steps.run(logits, tokens, generator)
        return
    ends, end = torch.tensor(config.ends, device=model.device), end_of(model)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
    for count in range(tokens):
        drawn = sampler.draw(logits, generator).masked_fill(ended, end)
        ended |= torch.isin(drawn, ends)
        yield drawn.tolist()
        if ended.all() or count + 1 == tokens:
            return
        if keep is not None and not isinstance(caches, StackCache) and int(caches[0].lengths.max()) == capacity:
            for cache in caches:
                cache.evict(*keep, rotation=model.rotation)
        logits = model(drawn[:, None], caches=caches, backend=backend)[:, -1]


def check_draws(tokens: int, sampler: Sampler, seed: int) -> None:
    """Raises TypeError for arguments of other types, ValueError for a seed beyond 64 bits."""
    if not isinstance(sampler, Sampler):
        raise TypeError(f"sampler is {sampler!r}; expected a Sampler, such as Sampler(0.8)")
    whole("tokens", tokens)
    if not -(1 << 63) <= whole("seed", seed) < 1 << 63:
        raise ValueError(f"seed is {seed}; expected an integer of 64 bits, from -2**63 to 2**63 - 1")


def _checked_empty(caches: list[KVCache] | StackCache) -> list[KVCache] | StackCache:
    lengths = lengths_of(caches)
    if lengths is not None and bool(lengths.any()):
        raise ValueError(f"into has caches of {lengths.tolist()} tokens; expected empty ones: call the model to go on")
    return caches


def _check_chunk(chunk: int | None) -> None:
    if chunk is not None and whole("chunk", chunk) < 1:
        raise ValueError(f"chunk is {chunk}; expected at least 1 token, or None")


def check_lengths(
    model: Decoder, prompts: Sequence[Sequence[int]], tokens: int, first: np.ndarray | None, chunk: int | None
) -> None:
    """Raises ValueError for prompts that are empty or too long, and for a `first` that does not fit them or the model.

    tokens: the number of new tokens per prompt; chunk: the number of tokens read at a time, or None.
    """
    limit, vocabulary = model.config.max_position_embeddings, model.config.vocab_size
    if tokens < 0:
        raise ValueError(f"tokens is {tokens}; expected at least 0")
    _check_chunk(chunk)
    for n, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {n} is empty; expected at least one token")
        if len(prompt) >= limit:
            raise ValueError(
                f"prompt {n} has {len(prompt)} tokens, and the model has {limit} positions; shorten the prompt to at "
                f"most {limit - 1} tokens"
            )
        if len(prompt) + tokens > limit:
            raise ValueError(
                f"a prompt of {len(prompt)} and {tokens} new tokens exceed the model's {limit} positions; "
                f"ask for at most {limit - len(prompt)} new tokens"
            )
    if first is None:
        return
    if not isinstance(first, np.ndarray):
        raise TypeError(f"first is a {type(first).__name__}; expected a NumPy array, bool [{len(prompts)}, n]")
    if first.ndim != 2 or len(first) != len(prompts) or first.dtype != bool:
        raise ValueError(
            f"first is {first.dtype} {list(first.shape)}; expected bool [{len(prompts)}, n], one row a prompt"
        )
    if first.shape[1] > vocabulary:
        raise ValueError(f"the tokenizer has {first.shape[1]} tokens; expected at most the model's {vocabulary}")
    if len(none := np.flatnonzero(~first.any(1))):
        raise ValueError(f"first allows no token for prompt {none[0]}; expected at least one")


def check_prompts(prompts: Sequence[Sequence[int]], vocabulary: int) -> None:
    """Raises ValueError for the first prompt that does not consist of a vocabulary's tokens; empty ones pass."""
    for n, prompt in enumerate(prompts):
        _check_prompt(n, prompt, vocabulary)


def _check_prompt(n: int, prompt: Sequence[int], vocabulary: int) -> None:
    try:
        ids = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.zeros(())
    real = ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool
    if ids.ndim != 1 or (real and ids.numel()):
        raise ValueError(f"prompt {n} is {reprlib.repr(prompt)}; expected a list of tokens' numbers")
    check_tokens(f"prompt {n}", ids, vocabulary)


def _check_keep(model: Decoder, keep: tuple[int, int], quantised: str | None) -> None:
    if quantised is not None:
        raise ValueError(f"keep is {keep} and quantised {quantised!r}; expected one of them: keep rotates keys again")
    if model.rotation is None:
        raise ValueError(
            "keep is given, and the model's positions are learned or in its states, not rotary alone; leave it out"
        )
    if getattr(model.config, "index_topk", 0):
        raise ValueError("keep is given, and the keys of the model's indexer would not be rotated again; leave it out")
    if not isinstance(keep, Sequence) or len(keep) != 2 or not all(map(is_whole, keep)) or keep[0] < 0 or keep[1] < 1:
        raise ValueError(f"keep is {keep}; expected sinks of at least 0 and a window of at least 1, integers")


def _check_window(keep: tuple[int, int], capacity: int, longest: int, limit: int) -> None:
    # a prompt that alone exceeds the positions has an error of its own
    if longest >= limit or capacity <= limit:
        return
    fits = min((4 * (limit - 1 - keep[0]) + 3) // 5, 4 * (limit - 1 - longest) + 3)
    remedy = f"give a window of at most {fits}" if fits > 0 else "give fewer sinks"
    raise ValueError(
        f"keep is {keep}, sinks and window; with a prompt of {longest} tokens its cache has {capacity} positions, and "
        f"the model has {limit}: {remedy}"
    )


def allow(logits: Tensor, first: np.ndarray) -> Tensor:
    """logits [B, vocab], set to −inf for tokens that first, bool [B, n], does not allow, and for tokens from n on."""
    allowed = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    allowed[:, : first.shape[1]] = torch.as_tensor(first).to(logits.device)
    return logits.masked_fill(~allowed, -torch.inf)
