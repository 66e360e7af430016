"""Drafts of the next tokens, from n-grams of the text itself, and their verification in one call of the model.

A text often repeats what it has said before. The tokens that followed the last n-gram where it occurred earlier are
drafts of the next tokens (Yang et al., 2023; Saxena, 2023). Several drafts are merged into a tree (Miao et al., 2024).
The model reads the tree in one call and draws a token after each node of a path, for as long as the path continues
with the token that was drawn. Each token is drawn from the same logits as without drafts, except for rounding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import mask as masks
from ..caches.contiguous import KVCache
from ..mask.trees import depths
from .blocks import Decoder
from .fields import OPTIONS, check_fields
from .hybrid_config import ATTENTION
from .states import StackCache

# branches of a draft if the model takes trees
BRANCHES = 2
# occurrences of an n-gram that are looked at, the last ones
PLACES = 32

Caches = list[KVCache] | StackCache


@dataclass
class Draft:
    """How tokens are drafted. It counts calls of the model and the tokens that they drew.

    shortest, longest: tokens of the n-grams that are looked up, the longest first. depth: tokens of a draft. branches:
    the most drafts of a tree; None for 2, or for 1 if the model takes only one draft at a time.
    calls: how often the model was called, once for each text that had not ended; tokens: the tokens that it drew.

    Raises ValueError for numbers out of range.

    Examples:
        >>> from saccade.models.drafts import Draft
        >>> from saccade.models.llama import Llama, LlamaConfig
        >>> from saccade.models.sampling import Sampler, generate
        >>> model = Llama(LlamaConfig(vocab_size=100))
        >>> text = list(generate(model, [[1, 2, 3]], 8, Sampler(0.0), draft=(draft := Draft(branches=3))))
        >>> mean = draft.tokens_per_call
    """

    shortest: int = 2
    longest: int = 4
    depth: int = 10
    branches: int | None = None
    calls: int = field(default=0, init=False)
    tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_fields(vars(self), OPTIONS)
        if self.shortest > self.longest:
            raise ValueError(f"shortest is {self.shortest} and longest {self.longest}; expected the longest last")

    @classmethod
    def of(cls, draft: str | Draft | None) -> Draft | None:
        """A new draft for "ngram"; a draft or None as it is. Raises ValueError for anything else."""
        if draft is None or isinstance(draft, Draft):
            return draft
        if draft != "ngram":
            raise ValueError(f"draft is {draft!r}; expected 'ngram', a saccade.models.drafts.Draft, or None")
        return cls()

    def count(self, calls: int, tokens: int) -> None:
        """Count calls, and the tokens that they drew."""
        self.calls += calls
        self.tokens += tokens

    @property
    def tokens_per_call(self) -> float:
        """The tokens that a call drew on average: 1 if no draft was accepted, and 0 before the first call."""
        return self.tokens / max(self.calls, 1)

    def width(self, model: Decoder) -> int:
        """How many drafts of a text the model reads in one call.

        Raises ValueError for a model with states, and for several branches if the model takes only one.
        """
        config = model.config
        kinds: set[str] = set(getattr(config, "mixers", ("local",) if getattr(config, "sliding_window", 0) else ()))
        if states := kinds.difference(ATTENTION):
            raise ValueError(
                f"draft is given, and the model has layers of {', '.join(sorted(states))}: their states "
                "cannot drop rejected tokens; leave draft out"
            )
        one = "a window, which would count all tokens of a tree" if "local" in kinds else ""
        one = "an indexer, which chooses keys among all tokens of a tree" if getattr(config, "index_topk", 0) else one
        if one and (self.branches or 1) > 1:
            raise ValueError(f"branches is {self.branches}, and the model has {one}; expected 1 or None")
        return self.branches or (1 if one else BRANCHES)


def depth_of(draft: Draft | None, model: Decoder) -> int:
    """The depth of single drafts, 0 for None; raises ValueError as `Draft.width`, and for more than 1 branch."""
    if draft is None:
        return 0
    if draft.width(model) > 1 and draft.branches is not None:
        raise ValueError(f"branches is {draft.branches}; expected 1 or None, because pages are read by single drafts")
    return draft.depth


class Text:
    """The tokens of one sequence, and the places of its n-grams.

    drawn: the tokens that were drawn, at most `most`; done: whether there are that many, or one of `ends`.
    """

    def __init__(self, prompt: Sequence[int], most: int, ends: Sequence[int], draft: Draft | None) -> None:
        self.tokens, self.drawn, self.done = list[int](), list[int](), False
        self.draft, self._most, self._ends = draft, most, ends
        # where the tokens after each n-gram start
        self._places: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for token in prompt:
            self._read(int(token))

    def _read(self, token: int) -> None:
        self.tokens.append(token)
        if self.draft is None:
            return
        for n in range(self.draft.shortest, min(self.draft.longest, len(self.tokens)) + 1):
            self._places[tuple(self.tokens[-n:])].append(len(self.tokens))

    def draw(self, token: int) -> None:
        """Append a token that was drawn."""
        self._read(token)
        self.drawn.append(token)
        self.done = token in self._ends or len(self.drawn) == self._most

    @property
    def left(self) -> int:
        """The number of tokens that may still be drawn."""
        return 0 if self.done else self._most - len(self.drawn)

    def tree(self, width: int) -> Tree:
        """The last token and at most `width` drafts of what follows: of long n-grams first, then of late ones."""
        if self.draft is None or self.done:
            return Tree(self.tokens[-1])
        drafts = list[list[int]]()
        depth = min(self.draft.depth, self._most - len(self.drawn) - 1)
        for n in range(self.draft.longest, self.draft.shortest - 1, -1):
            # the last place is the end of the text
            for place in self._places.get(tuple(self.tokens[-n:]), [])[-1 - PLACES : -1][::-1]:
                if len(drafts) == width:
                    break
                # a draft that reaches the end of the text repeats itself
                period = len(self.tokens) - place
                draft = [self.tokens[place + i % period] for i in range(depth)]
                if draft not in drafts:
                    drafts.append(draft)
        return Tree(self.tokens[-1], drafts)


class Tree:
    """Drafts that share their common beginnings, as nodes in depth-first order; node 0 is the last token of the text.

    tokens, parents: of each node. children: a node by its parent and token.
    """

    def __init__(self, root: int, drafts: Sequence[list[int]] = ()) -> None:
        self.tokens, self.parents, self.children = [root], [-1], dict[tuple[int, int], int]()
        for draft in sorted(drafts):
            node = 0
            for token in draft:
                if (node, token) not in self.children:
                    self.children[node, token] = len(self.tokens)
                    self.tokens.append(token)
                    self.parents.append(node)
                node = self.children[node, token]


@torch.no_grad()
def speculate(
    model: Decoder,
    caches: Caches,
    texts: Sequence[Text],
    logits: Tensor,
    draft: Draft,
    draw: Callable[[Tensor], Tensor],
    backend: str | None,
) -> Iterator[list[int]]:
    """Yields the next token of every text, as `sampling.generate` does.

    caches: of the tokens so far, with room for a tree. logits: [B, vocab], after these tokens. draw: logits [B, vocab]
    -> tokens [B].
    """
    width, count, end = draft.width(model), 0, end_of(model)
    walk(texts, [Tree(0)] * len(texts), logits[:, None], draw)
    while True:
        while count < max(len(text.drawn) for text in texts):
            if any(count >= len(text.drawn) and not text.done for text in texts):
                break
            yield [text.drawn[count] if count < len(text.drawn) else end for text in texts]
            count += 1
        left = sum(not text.done for text in texts)
        if not left:
            return
        trees, drawn = [text.tree(width) for text in texts], sum(len(text.drawn) for text in texts)
        logits = read(model, caches, trees, backend)
        accept(caches, logits.shape[1], walk(texts, trees, logits, draw))
        draft.count(left, sum(len(text.drawn) for text in texts) - drawn)


def end_of(model: Decoder) -> int:
    """The token that a text repeats after its end: the first end token that the model's vocabulary has, 0 if none."""
    return next((token for token in model.config.ends if 0 <= token < model.config.vocab_size), 0)


def read(model: Decoder, caches: Caches, trees: Sequence[Tree], backend: str | None) -> Tensor:
    """Appends the tokens of the trees to the caches, and returns the logits [B, n, vocab] after each node."""
    n = max(len(tree.tokens) for tree in trees)
    # short trees are filled up with nodes that are not accepted
    tokens, parents = (
        np.array([x + more * (n - len(x)) for x, more in rows])
        for rows in ([(tree.tokens, [0]) for tree in trees], [(tree.parents, [-1]) for tree in trees])
    )
    options: dict[str, Any] = {}
    steps = np.arange(n)
    if any(tree.parents != list(range(-1, len(tree.parents) - 1)) for tree in trees):
        options, steps = {"mask": masks.tree(parents)}, depths(parents)
    first = (caches if isinstance(caches, StackCache) else caches[0]).positions[:, None]
    # nodes that fill up a tree may be beyond the last position
    positions = (first + torch.from_numpy(steps).to(first.device)).clamp(max=model.config.max_position_embeddings - 1)
    options["positions"] = positions
    return model(torch.from_numpy(tokens).to(model.device), caches=caches, backend=backend, **options)


def walk(
    texts: Sequence[Text], trees: Sequence[Tree], logits: Tensor, draw: Callable[[Tensor], Tensor]
) -> list[list[int]]:
    """Draws tokens of each text for as long as its tree has them, and the one after; returns the path of each.

    logits: [B, n, vocab], after each node. A path starts with node 0; it is empty if the text was done before.
    """
    paths = [[] if text.done else [0] for text in texts]
    walking = {b for b, text in enumerate(texts) if not text.done}
    rows = torch.arange(len(texts))
    while walking:
        nodes = torch.tensor([path[-1] if path else 0 for path in paths])
        drawn = draw(logits[rows, nodes]).tolist()
        for b in sorted(walking):
            texts[b].draw(drawn[b])
            child = trees[b].children.get((paths[b][-1], drawn[b]))
            if texts[b].done or child is None:
                walking.remove(b)
            else:
                paths[b].append(child)
    return paths


def accept(caches: Caches, nodes: int, paths: list[list[int]]) -> None:
    """Of the last `nodes` tokens of each sequence keep only those of its path."""
    if isinstance(caches, StackCache):
        caches.accept(nodes, paths)
        return
    for cache in caches:
        cache.accept(nodes, paths)
