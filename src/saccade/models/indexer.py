"""DeepSeek sparse attention: a small indexer scores all keys, attention sees the best of them (DeepSeek-V3.2, 2025).

The score of key s for query t is I[t, s] = Σ_j w[t, j] · relu(q[t, j] · k[s]) over few heads j, with one key head.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .blocks import turned
from .states import Turn

# queries whose scores are in memory at a time
ROWS = 128


class Index(NamedTuple):
    """The parts of index scores: q [B, T, heads, size], k [B, S, size] and w [B, T, heads], S >= T.

    Query t is at position t + S - T and is scored against the keys up to its own.

    Examples:
        >>> from saccade.models.indexer import Index
        >>> index = Index(torch.randn(1, 8, 2, 16), torch.randn(1, 8, 16), torch.rand(1, 8, 2))
        >>> index.ends()
        tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    """

    q: Tensor
    k: Tensor
    w: Tensor

    def ends(self, lengths: Tensor | None = None) -> Tensor:
        """How many keys each query sees, [B, T]; lengths: int [B], if not all S keys are tokens."""
        B, T = self.q.shape[:2]
        lengths = torch.full((B,), self.k.shape[1], device=self.q.device) if lengths is None else lengths
        return lengths[:, None] - T + 1 + torch.arange(T, device=self.q.device)


class LightningIndexer(nn.Module):
    """The indexer of one attention layer; parameters are named as in DeepSeek-V3.2's Hugging Face layout.

    Its inputs are detached, so that only `indexer_loss` trains it and this loss trains nothing else. The published
    code multiplies q and k by an orthogonal (Hadamard) matrix before it quantises them; this changes no score.

    Args:
        width: the size of x.
        q_width: the size of what queries are computed from; None for x itself.
        heads: of the queries.
        size: of a head.
        count: how many keys a query sees.

    Examples:
        >>> from saccade.models.indexer import LightningIndexer, best_keys
        >>> x, layer = torch.randn(1, 100, 64), LightningIndexer(64, heads=4, size=16, count=32)
        >>> keys = best_keys(layer(x), layer.count)
        >>> chosen = saccade.mask.causal() & saccade.mask.select(keys)
    """

    def __init__(self, width: int, q_width: int | None = None, heads: int = 64, size: int = 128, count: int = 2048):
        super().__init__()
        self.heads, self.size, self.count = heads, size, count
        self.wq_b = nn.Linear(width if q_width is None else q_width, heads * size, bias=False)
        self.wk = nn.Linear(width, size, bias=False)
        self.k_norm = nn.LayerNorm(size, eps=1e-6)
        self.weights_proj = nn.Linear(width, heads, bias=False)

    def forward(self, x: Tensor, source: Tensor | None = None, turn: Turn | None = None) -> Index:
        """The parts of the scores of tokens among themselves.

        x: [B, T, width]. source: [B, T, q_width], in DeepSeek-V3.2 the normalised latent row of queries; None for x.
        turn: angles of pairs (i, i + half) of the first numbers of q and k.
        """
        x = x.detach()
        q = self.wq_b(x if source is None else source.detach()).unflatten(-1, (self.heads, self.size))
        k = turned(self.k_norm(self.wk(x))[..., None, :], turn)[..., 0, :]
        w = _wide(self.weights_proj(x)) * (self.heads * self.size) ** -0.5
        return Index(turned(q, turn), k, w)


@torch.no_grad()
def best_keys(index: Index, count: int, lengths: Tensor | None = None) -> Tensor:
    """The keys with the highest scores for each query, for `mask.select` with block = rows = 1.

    Which of several keys with the same score are taken is not defined; a key has 0 if no head has a positive product.
    It takes memory for the scores of 128 queries at a time, [B, 128, heads, S].

    Args:
        index: as the indexer returns; contents of k beyond `lengths` do not matter.
        count: how many keys; a query at a position below that gets all keys up to its own.
        lengths: int [B], the number of keys of each sequence; None for S.

    Returns:
        int64 [B, 1, T, min(count, S)]; -1 for none.

    Raises:
        ValueError: count is not positive.

    Examples:
        >>> from saccade.models.indexer import LightningIndexer, best_keys
        >>> index = LightningIndexer(64, heads=4, size=16)(torch.randn(1, 100, 64))
        >>> best_keys(index, 32).shape
        torch.Size([1, 1, 100, 32])
    """
    if count < 1:
        raise ValueError(f"count is {count}; expected at least 1 key for each query")
    lists: list[Tensor] = []
    steps = torch.arange(index.k.shape[1], device=index.k.device)
    for q, w, ends in _chunks(index.q, index.w, index.ends(lengths)):
        scores = _scores(q, index.k[:, None], w).masked_fill(steps >= ends[..., None], -torch.inf)
        best = scores.topk(min(count, len(steps)))
        lists.append(best.indices.masked_fill(best.values == -torch.inf, -1))
    return torch.cat(lists, 1)[:, None]


def indexer_loss(
    index: Index, q: Tensor, k: Tensor, selected: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """The loss of each query, KL(p || softmax(I)), where p is the mean of attention's probabilities over its heads.

    p is the target distribution of the paper, the probabilities summed over heads and divided by their sum. It has no
    gradient. The paper's loss is the sum over queries. Memory is for 128 queries at a time, in the backward too:
    [B, heads, 128, S] scores, or for selected keys their rows of k, [B, 128, n, Hk, D].

    Args:
        index: as the indexer returns.
        q: [B, T, Hq, D] of the main attention.
        k: [B, S, Hk, D]; for latent attention the absorbed q and the latent rows, or the expanded ones.
        selected: [B, 1, T, n] without repetitions, as `best_keys` returns: p and the softmax are over these keys, as in
            sparse training. None for all keys up to the query's own, as in the dense warm-up.
        scale: of the main attention; None for 1/sqrt(D).

    Returns:
        [B, T], float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes do not fit.

    Examples:
        >>> from saccade.models.indexer import LightningIndexer, indexer_loss
        >>> index = LightningIndexer(64, heads=4, size=16)(torch.randn(1, 100, 64))
        >>> q, k = torch.randn(1, 100, 8, 64), torch.randn(1, 100, 2, 64)
        >>> indexer_loss(index, q, k).sum().backward()
    """
    B, T = index.q.shape[:2]
    lists = torch.empty(B, 1, T, 0) if selected is None else selected
    if q.shape[:2] != (B, T) or k.shape[:2] != index.k.shape[:2] or lists.shape[:3] != (B, 1, T):
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)}, selected {list(lists.shape)}; expected [{B}, {T}, Hq, D], "
            f"[{B}, {index.k.shape[1]}, Hk, D] and [{B}, 1, {T}, n], as the index has"
        )
    scale, q, k = q.shape[-1] ** -0.5 if scale is None else scale, q.detach(), k.detach()
    chosen = [None] * T if selected is None else selected[:, 0].split(ROWS, 1)
    losses = [
        cast("Tensor", checkpoint(_loss, iq, index.k, w, ends, rows * scale, k, lists, use_reentrant=False))
        for (iq, w, ends, rows), lists in zip(_chunks(index.q, index.w, index.ends(), q), chosen, strict=False)
    ]
    return torch.cat(losses, 1)


def _loss(iq: Tensor, ik: Tensor, w: Tensor, ends: Tensor, q: Tensor, k: Tensor, chosen: Tensor | None) -> Tensor:
    # the loss of a chunk of queries [B, r]; q is scaled
    if chosen is None:
        seen = torch.arange(k.shape[1], device=k.device) < ends[..., None]
        ik, k = ik[:, None], k[:, None]
    else:
        seen = (chosen >= 0) & (chosen < ends[..., None])
        batch, at = torch.arange(len(k), device=k.device)[:, None, None], chosen.clamp(min=0)
        ik, k = ik[batch, at], k[batch, at]
    # [B, r or 1, n, ..], the keys of each query
    low = torch.finfo(w.dtype).min
    with torch.no_grad():
        grouped = _wide(q).unflatten(2, (k.shape[3], -1))
        s = torch.einsum("brhgd,brnhd->brhgn", grouped, _wide(k)).flatten(2, 3)
        p = s.masked_fill(~seen[:, :, None], low).softmax(-1).mean(2).to(w.dtype)
    log = _scores(iq, ik, w).masked_fill(~seen, low).log_softmax(-1)
    return torch.where(seen, torch.xlogy(p, p) - p * log, 0).sum(-1)


def _scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    # q [B, r, heads, size], k [B, r or 1, n, size], w [B, r, heads] -> [B, r, n]
    return torch.einsum("brjn,brj->brn", torch.einsum("brjd,brnd->brjn", _wide(q), _wide(k)).relu(), w)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _chunks(*rows: Tensor) -> Any:
    return zip(*(x.split(ROWS, 1) for x in rows), strict=True)
