"""Arguments of flash-attn's functions, checked under the names that callers give them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..biases import alibi
from ..caches.storage import whole
from ..errors import Unsupported
from ..frameworks.source import integral
from ..mask import Mask, causal, chunked, window
from ..operands import number

# what flash-attn takes to choose a kernel or its schedule: no result depends on it, so nothing reads it
HINTS = {
    "num_splits": "the plan chooses how keys are split",
    "seqlen_k_per_split": "as num_splits; bits never depend on the schedule",
    "pack_gqa": "the plan chooses whether the query heads of a group share a tile",
    "sm_margin": "no multiprocessor is reserved",
    "scheduler_metadata": "plans are made and kept by the library",
    "disable_scheduler_metadata": "as scheduler_metadata",
    "max_seqlen_q": "lengths are read off cu_seqlens and seqused",
    "max_seqlen_k": "as max_seqlen_q",
    "min_seqlen_k": "as max_seqlen_q",
    "virtual_batch_idx": "an order of work",
    "zero_tensors": "what no query reaches is 0 in any case",
}
# what is not computed under flash-attn's name, and what computes it here
REFUSED = {
    "score_mod": "give saccade.attention its bias=, saccade.alibi, relative or gates, or softcap=",
    "score_mod_bwd": "saccade.attention has the gradients of its bias= and softcap=",
    "mask_mod": "write it as an expression of saccade.mask for saccade.attention, or convert the BlockMask of a torch "
    "function by saccade.integrations.flex.from_block_mask",
    "aux_tensors": "they belong to score_mod and mask_mod, which are not computed either: see saccade.mask and bias=",
    "aux_scalars": "they belong to score_mod and mask_mod, which are not computed either: see saccade.mask and bias=",
    "block_sparse_tensors": "give saccade.attention a mask.tiles, or saccade.integrations.flex.from_block_mask",
    "block_sparse_tensors_bwd": "the backward needs no blocks of its own: see mask.tiles of saccade.attention",
    "gather_kv_indices": "give saccade.attention a mask.dense of the chosen keys, or mask.tiles of chosen blocks",
    "seqused": "leave it out, and do not read the rows beyond it",
}


def refuse(**arguments: Any) -> None:
    """Unsupported with what to use instead, for arguments that are in `REFUSED` and not None or empty."""
    asked = [name for name, x in arguments.items() if x is not None and not (isinstance(x, (tuple, list)) and not x)]
    if asked:
        raise Unsupported("flash_attn", [f"{name} is not computed: {REFUSED[name]}" for name in asked])


def outside_graphs(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """The function, never traced by torch.compile: the graph breaks there, and fullgraph=True raises with a reason."""
    return torch.compiler.disable(function, reason=f"{what} read lengths on the host: leave fullgraph out")


def mask_of(causally: bool, window_size: Any) -> Mask | None:
    """The mask of causal and window_size, None where every query sees every key."""
    if isinstance(window_size, int) or not hasattr(window_size, "__len__") or len(window_size) != 2:
        raise ValueError(f"window_size is {window_size!r}; expected (left, right), with -1 or None for no bound")
    left, right = (-1 if n is None else whole("a number of window_size", n) for n in window_size)
    if causally:
        right = 0
    if left < 0 and right < 0:
        return None
    if left < 0 and right == 0:
        return causal()
    return window(None if left < 0 else left, None if right < 0 else right)


def chunked_mask_of(causally: bool, window_size: Any, attention_chunk: Any) -> Mask | None:
    """`mask_of`, and keys of the query's own chunk of attention_chunk positions, 0 for no chunks."""
    mask, size = mask_of(causally, window_size), whole("attention_chunk", attention_chunk)
    if size < 0:
        raise ValueError(f"attention_chunk is {size}; expected a number of positions, or 0")
    return mask if not size else chunked(size) if mask is None else mask & chunked(size)


def signed_mask_of(causally: bool, window_size: Any) -> Mask | None:
    """`mask_of`, for FlashAttention-4, where None alone is no bound and a negative one is a position.

    There two negative bounds open both sides, and under causal, which replaces the right one, a negative left one opens
    the left side. Other negative bounds are refused: FlashAttention-4 reads (-1, 0) as no window at all, and
    FlashAttention-2 and -3 read it as causal.
    """
    mask = mask_of(causally, window_size)
    negative = [n is not None and n < 0 for n in window_size]
    if not causally and any(negative) and not all(negative):
        raise ValueError(f"window_size is {window_size!r}; expected numbers of at least 0, or None for no bound")
    return mask


def bias_of(slopes: Tensor | None, batch: int, heads: int) -> Any:
    """alibi_slopes, [heads] or [batch, heads], as the bias of `attention`."""
    if slopes is None:
        return None
    check_tensor("alibi_slopes", slopes)
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(f"alibi_slopes has shape {list(slopes.shape)}; expected [{heads}] or [{batch}, {heads}]")
    return alibi(slopes)


def check_numbers(softmax_scale: Any, softcap: Any, dropout_p: Any = 0.0) -> None:
    """Raise unless they are the numbers that `attention` takes, softcap 0 or None for no cap."""
    if torch.compiler.is_compiling():
        # symbols there, which `attention` checks
        return
    if softmax_scale is not None:
        number("softmax_scale", softmax_scale, "a finite number, or None")
    if softcap is not None and number("softcap", softcap, "a number of at least 0") < 0:
        raise ValueError(f"softcap is {softcap!r}; expected a number of at least 0")
    if not 0 <= number("dropout_p", dropout_p, "a probability, 0 <= dropout_p < 1") < 1:
        raise ValueError(f"dropout_p is {dropout_p!r}; expected 0 <= dropout_p < 1")


def check_tensor(name: str, x: Any) -> None:
    """TypeError for what is no tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}; expected a torch tensor")


def check_integers(name: str, x: Any, shape: tuple[int | None, ...], called: str) -> None:
    """Raise unless x is a tensor of integers of this shape, None for any size; called: the shape in words."""
    check_tensor(name, x)
    fits = x.dim() == len(shape) and all(n is None or n == m for n, m in zip(shape, x.shape, strict=True))
    if not fits or not integral(x.dtype):
        raise ValueError(f"{name} is {x.dtype} {list(x.shape)}; expected integers {called}")


def check_bounds(name: str, cu: Any, tokens: int | None) -> None:
    """Raise unless cu is int [sequences + 1]; on the host, unless it runs from 0 or above to at most `tokens`."""
    check_integers(name, cu, (None,), "[sequences + 1]")
    if not len(cu):
        raise ValueError(f"{name} is empty; expected [sequences + 1], 0 first")
    if looked_at(cu):
        listed: list[int] = cu.tolist()
        if listed[0] < 0 or listed != sorted(listed) or (tokens is not None and listed[-1] > tokens):
            last = "" if tokens is None else f" to at most {tokens}, the tokens"
            raise ValueError(f"{name} is {listed}; expected numbers from 0{last}, never down")


def check_packed(name: str, x: Any, dims: int, parts: int) -> None:
    """Raise unless x [..., parts, heads, D] packs that many tensors."""
    check_tensor(name, x)
    if x.dim() != dims or x.shape[-3] != parts:
        lead = "B, S" if dims == 5 else "total"
        raise ValueError(f"{name} has shape {list(x.shape)}; expected [{lead}, {parts}, heads, D]")


def looked_at(*tensors: Tensor) -> bool:
    """Whether the contents of these can be looked at without waiting for a device or breaking a graph."""
    return not torch.compiler.is_compiling() and all(x.is_cpu for x in tensors)


def needs_gradient(*tensors: Any) -> bool:
    """Whether autograd would follow one of these."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


class Forward(torch.autograd.Function):
    """(o, lse) of `compute`, which records no gradient: a backward through them raises instead of giving none."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], tuple[Tensor, Tensor]], reason: str, *inputs: Tensor) -> Any:
        ctx.reason = reason
        return compute()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:  # type: ignore[override]
        raise Unsupported("flash_attn", [ctx.reason])
