"""Checks of the arguments of flash-attn's functions, with messages under flash-attn's names."""

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

# arguments that choose a kernel or its schedule in flash-attn; they are accepted and ignored
HINTS = {
    "num_splits": "the plan chooses how keys are split",
    "seqlen_k_per_split": "like num_splits; bits never depend on the schedule",
    "pack_gqa": "the plan chooses whether the query heads of a group share a tile",
    "sm_margin": "no multiprocessor is reserved",
    "scheduler_metadata": "the library makes and caches plans",
    "disable_scheduler_metadata": "as scheduler_metadata",
    "max_seqlen_q": "lengths are read from cu_seqlens and seqused",
    "max_seqlen_k": "as max_seqlen_q",
    "min_seqlen_k": "as max_seqlen_q",
    "virtual_batch_idx": "an order of the work",
    "zero_tensors": "results without a query or key are 0 in any case",
}
# arguments that are not supported here, and what to use instead
REFUSED = {
    "score_mod": "give saccade.attention its bias=, saccade.alibi, relative or gates, or softcap=",
    "score_mod_bwd": "saccade.attention has the gradients of its bias= and softcap=",
    "mask_mod": "write it as an expression of saccade.mask for saccade.attention, or convert the BlockMask of a torch "
    "function by saccade.integrations.flex.from_block_mask",
    "aux_tensors": "they belong to score_mod and mask_mod, which are not supported: see saccade.mask and bias=",
    "aux_scalars": "they belong to score_mod and mask_mod, which are not supported: see saccade.mask and bias=",
    "block_sparse_tensors": "give saccade.attention a mask.tiles, or saccade.integrations.flex.from_block_mask",
    "block_sparse_tensors_bwd": "the backward uses the mask of the forward: give saccade.attention a mask.tiles",
    "gather_kv_indices": "give saccade.attention a mask.dense of the chosen keys, or mask.tiles of chosen blocks",
    "seqused": "leave it out, and do not read the rows beyond it",
}


def refuse(**arguments: Any) -> None:
    """Raise Unsupported, which says what to use instead, for arguments in `REFUSED` that are not None or empty."""
    asked = [name for name, x in arguments.items() if x is not None and not (isinstance(x, (tuple, list)) and not x)]
    if asked:
        raise Unsupported("flash_attn", [f"{name} is not computed: {REFUSED[name]}" for name in asked])


def outside_graphs(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """The function with a graph break under torch.compile; with fullgraph=True it raises an error with a reason."""
    return torch.compiler.disable(function, reason=f"{what} read lengths on the host: leave fullgraph out")


def mask_of(causally: bool, window_size: Any) -> Mask | None:
    """The mask of causal and window_size; None if every query sees every key."""
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
    """`mask_of` restricted to the query's own chunk of attention_chunk positions; 0 for no chunks."""
    mask, size = mask_of(causally, window_size), whole("attention_chunk", attention_chunk)
    if size < 0:
        raise ValueError(f"attention_chunk is {size}; expected a number of positions, or 0")
    return mask if not size else chunked(size) if mask is None else mask & chunked(size)


def signed_mask_of(causally: bool, window_size: Any) -> Mask | None:
    """`mask_of` for FlashAttention-4, where only None means no bound and a negative bound is a position.

    In it, two negative bounds mean no bounds. With causal, which replaces the right bound, a negative left bound means
    none. Other negative bounds are refused: FlashAttention-4 reads (-1, 0) as no window, FlashAttention-2 and -3 as
    causal.
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
    """Raise unless `attention` accepts these numbers; softcap may be 0 or None for no cap."""
    if torch.compiler.is_compiling():
        # they may be symbolic; `attention` checks them
        return
    if softmax_scale is not None:
        number("softmax_scale", softmax_scale, "a finite number, or None")
    if softcap is not None and number("softcap", softcap, "a number of at least 0") < 0:
        raise ValueError(f"softcap is {softcap!r}; expected a number of at least 0")
    if not 0 <= number("dropout_p", dropout_p, "a probability, 0 <= dropout_p < 1") < 1:
        raise ValueError(f"dropout_p is {dropout_p!r}; expected 0 <= dropout_p < 1")


def check_tensor(name: str, x: Any) -> None:
    """Raise TypeError unless x is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}; expected a torch tensor")


def check_integers(name: str, x: Any, shape: tuple[int | None, ...], called: str) -> None:
    """Raise unless x is a tensor of integers of this shape (None: any size); called: the shape in messages."""
    check_tensor(name, x)
    fits = x.dim() == len(shape) and all(n is None or n == m for n, m in zip(shape, x.shape, strict=True))
    if not fits or not integral(x.dtype):
        raise ValueError(f"{name} is {x.dtype} {list(x.shape)}; expected integers {called}")


def check_bounds(name: str, cu: Any, tokens: int | None) -> None:
    """Raise unless cu is int [sequences + 1] and, on the host, ascends from at least 0 to at most `tokens`."""
    check_integers(name, cu, (None,), "[sequences + 1]")
    if not len(cu):
        raise ValueError(f"{name} is empty; expected [sequences + 1], 0 first")
    if looked_at(cu):
        listed: list[int] = cu.tolist()
        if listed[0] < 0 or listed != sorted(listed) or (tokens is not None and listed[-1] > tokens):
            last = "" if tokens is None else f" to at most {tokens}, the tokens"
            raise ValueError(f"{name} is {listed}; expected numbers from 0{last}, that never decrease")


def check_packed(name: str, x: Any, dims: int, parts: int) -> None:
    """Raise unless x is [..., parts, heads, D], that many tensors in one."""
    check_tensor(name, x)
    if x.dim() != dims or x.shape[-3] != parts:
        lead = "B, S" if dims == 5 else "total"
        raise ValueError(f"{name} has shape {list(x.shape)}; expected [{lead}, {parts}, heads, D]")


def looked_at(*tensors: Tensor) -> bool:
    """Whether the contents of these tensors can be read without waiting for a device or breaking a graph."""
    return not torch.compiler.is_compiling() and all(x.is_cpu for x in tensors)


def needs_gradient(*tensors: Any) -> bool:
    """Whether autograd records operations on one of these."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


class Forward(torch.autograd.Function):
    """(o, lse) of `compute`, without a gradient: a backward through them raises, rather than giving no gradient."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], tuple[Tensor, Tensor]], reason: str, *inputs: Tensor) -> Any:
        ctx.reason = reason
        return compute()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:  # type: ignore[override]
        raise Unsupported("flash_attn", [ctx.reason])
