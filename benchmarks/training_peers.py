"""The attentions that `training.py` compares: their masks, and their calls in the place of Saccade's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Peer(NamedTuple):
    """An attention: what its mask is for a batch, and its call on q [B, T, Hq, D], k, v [B, T, Hk, D].

    mask_of: None for the mask that a training run makes. device: where it is measured, if not everywhere.
    """

    documents: bool
    mask_of: Callable[..., Any] | None
    attention: Callable[..., Any] | None
    device: str = ""


def same_document(batch: Any, device: Any) -> Any:
    """bool [B, T, T]: the earlier tokens of each token's document."""
    import torch

    from saccade.models.transfers import sent

    ids = sent(torch.from_numpy(batch.documents), device)
    T = ids.shape[1]
    return (ids[:, :, None] == ids[:, None, :]) & torch.ones(T, T, dtype=torch.bool, device=device).tril()


def sdpa(q: Any, k: Any, v: Any, mask: Any, **_: object) -> Any:
    """torch's own attention with a bool mask [B, T, T], or causal if mask is no tensor."""
    import torch
    from torch.nn import functional

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    more = {"attn_mask": mask[:, None]} if torch.is_tensor(mask) else {"is_causal": True}
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **more).transpose(1, 2)


def sdpa_parts(q: Any, k: Any, v: Any, mask: Any, **_: object) -> Any:
    """torch's own attention, causal, for one document after another; mask: the borders of each row."""
    import torch

    rows = []
    for row, borders in enumerate(mask):
        parts = [(x[row : row + 1].split(borders, 1)) for x in (q, k, v)]
        rows.append(torch.cat([sdpa(*part, None) for part in zip(*parts, strict=True)], 1))
    return torch.cat(rows)


def lengths_of(batch: Any) -> list[list[int]]:
    """The lengths of the documents in each row."""
    import numpy as np

    return [np.bincount(row).tolist() for row in batch.documents]


def block_mask(batch: Any, device: Any) -> Any:
    """FlexAttention's mask of the earlier tokens of each token's document."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    from saccade.models.transfers import sent

    ids = sent(torch.from_numpy(batch.documents), device)
    B, T = ids.shape

    def allowed(b: Any, _: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (ids[b, i] == ids[b, j])

    return torch.compile(create_block_mask)(allowed, B, None, T, T, device=device)


def flex(q: Any, k: Any, v: Any, mask: Any, **_: object) -> Any:
    """FlexAttention; the caller compiles it."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def borders_of(batch: Any, device: Any) -> Any:
    """cu_seqlens of the documents of all rows, and the longest."""
    import numpy as np
    import torch

    from saccade.models.transfers import sent

    lengths = np.concatenate(lengths_of(batch))
    cu = sent(torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)), device)
    return cu, int(lengths.max())


def flash_4(q: Any, k: Any, v: Any, mask: Any, **_: object) -> Any:
    """FlashAttention-4 on packed documents, or on whole rows if mask has no borders."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    if not isinstance(mask, tuple):
        return flash_attn_func(q, k, v, causal=True)[0]
    cu, longest = mask
    packed = (x.flatten(0, 1) for x in (q, k, v))
    o = flash_attn_varlen_func(
        *packed, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest, causal=True
    )
    return o[0].unflatten(0, q.shape[:2])


def causal(*_: object) -> Any:
    """Saccade's mask of all earlier tokens of a row."""
    from saccade import mask as masks

    return masks.causal()


def any_order(*arrays: Any, **options: Any) -> Any:
    """Saccade's attention, whose gradients are sums in any order, as FlashAttention-4's are."""
    import saccade

    return saccade.attention(*arrays, deterministic=False, **options)


PEERS = {
    "saccade": Peer(True, None, None),
    "saccade, any order": Peer(True, None, any_order, "cuda"),
    "sdpa, bool mask": Peer(True, same_document, sdpa),
    # a GPU would wait for its many small calls
    "sdpa by document": Peer(True, lambda batch, _: lengths_of(batch), sdpa_parts, "cpu"),
    "FlexAttention": Peer(True, block_mask, flex),
    "FlashAttention-4": Peer(True, borders_of, flash_4, "cuda"),
    "saccade, causal": Peer(False, causal, None),
    "saccade, causal, any order": Peer(False, causal, any_order, "cuda"),
    "sdpa, causal": Peer(False, causal, sdpa),
    "FlashAttention-4, causal": Peer(False, causal, flash_4, "cuda"),
}
# those whose calls differ with each batch, or that torch.compile cannot trace: they are left out of the compiled blocks
NOT_COMPILED = ("sdpa by document", "FlashAttention-4", "FlashAttention-4, causal")
