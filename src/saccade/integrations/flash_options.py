"""The options of flash-attn 2's functions, and attention with them and with the weights that dropout removed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import attention
from ..frameworks.torch_run import describe_tensors
from ..frameworks.torch_weights import signed_weights
from ..mask import Mask
from ..operands import Options, Request, Side
from .flash_arguments import bias_of


class FlashOptions(NamedTuple):
    """The arguments of flash-attn's functions after the arrays, in their order; `flash_attn_func` describes them."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: Any
    softcap: float
    alibi_slopes: Tensor | None
    deterministic: bool
    return_attn_probs: bool


class FlashResult(NamedTuple):
    """out, lse [B, Hq, Sq] or [Hq, total], S_dmask (empty unless requested), and the seed of the dropout."""

    o: Tensor
    lse: Tensor
    weights: Tensor
    seed: int | None

    def returned(self, probs: bool) -> Any:
        """The return value of flash-attn's functions."""
        return (self.o, self.lse, self.weights) if probs else self.o


def attend_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    options: FlashOptions,
    cu: tuple[Tensor, Tensor] | None = None,
    keep_seed: bool = False,
) -> FlashResult:
    """Attention of q [B, Sq, Hq, D], or of sequences packed with bounds cu; keep_seed: whether to return the seed."""
    scale, softcap, dropout = options.softmax_scale, options.softcap or None, options.dropout_p
    probs, seed = options.return_attn_probs, None
    bias = bias_of(options.alibi_slopes, len(q) if cu is None else 1, q.shape[-2])
    if dropout and (probs or keep_seed):
        # drawn here, because the pattern is needed again
        seed = int(torch.randint(0, (1 << 63) - 1, ()).item())
    numbers: dict[str, Any] = {"scale": scale, "softcap": softcap, "dropout": dropout}
    exact = options.deterministic
    o, lse = attention(q, k, v, mask, bias=bias, seed=seed, deterministic=exact, return_lse=True, **numbers)
    if seed is None or not probs:
        return FlashResult(o, lse.mT, q.new_empty(0), seed)
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = q.to(o.dtype), k.to(o.dtype), v.to(o.dtype)
    blocks = [(b, slice(0, q.shape[1]), slice(0, k.shape[1])) for b in range(len(q))]
    rows = lse
    if cu is not None:
        blocks = [(0, rows, seen) for rows, seen in slices_of(cu)]
        q, k, v, rows = q[None], k[None], v[None], lse[None]
    request = Request(mask, Side(slopes=options.alibi_slopes), Options(**numbers))
    problem = describe_tensors(q, k, v, request)
    weights = signed_weights(problem, q, k, options.alibi_slopes, rows, seed, blocks)
    return FlashResult(o, lse.mT, weights, seed)


def slices_of(cu: tuple[Tensor, Tensor]) -> list[tuple[slice, slice]]:
    """The rows and the keys of every sequence."""
    rows, seen = ([slice(*pair) for pair in pairwise(x.tolist())] for x in cu)
    return list(zip(rows, seen, strict=True))
