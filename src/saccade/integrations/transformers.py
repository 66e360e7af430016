"""transformers: `import saccade.integrations.transformers`, then `from_pretrained(..., attn_implementation="saccade")`.

The library describes a mask as a tree of small functions. Those that it makes itself are read off that tree and become
an expression of `saccade.mask`; no T×T mask is made. What cannot be said so raises `saccade.Unsupported`.
Written for transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from ..api import attention
from ..errors import Unsupported
from ..mask import Mask, causal, dense, documents, full, keys, window

NAME = "saccade"
Function = Callable[..., Any]


class Described(BlockMask):
    """A mask on its way through a model, of the one type beside tensors that the library lets through as it is."""

    def __init__(self, mask: Mask, B: int, Tq: int, Tk: int) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.mask, self._shape = mask, (B, 1, Tq, Tk)

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, 1, Tq, Tk]"""
        return self._shape

    @property
    def ndim(self) -> int:
        """4"""
        return len(self._shape)

    def contiguous(self) -> Described:
        """Itself, for `generate`, which asks for it with a static cache."""
        return self

    def __repr__(self) -> str:
        return f"Described({self.mask}, {list(self._shape)})"

    __str__ = __repr__


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, position_bias: Tensor | None = None, cache: Any = None,
    output_attentions: bool = False, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention of a layer: query [B, Hq, Tq, D], key, value [B, Hk, Tk, D] to ([B, Tq, Hq, D], None).

    attention_mask is what `mask_of` made; or None, then `is_causal` and the module say; or a 4-D tensor of the caller's
    own: booleans, True where attention goes, or numbers to add to the scores.

    Raises Unsupported for attention weights, which are never made, and for the library's own paged cache.
    """
    if output_attentions:
        raise Unsupported(NAME, ["attention weights are never made: use attn_implementation='eager' to look at them"])
    if cache is not None:
        raise Unsupported(NAME, ["generate_batch keeps its own pages: use saccade.paged_attention, or sdpa there"])
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    mask, bias = attention_mask, position_bias
    if isinstance(mask, Described):
        mask = mask.mask
    elif mask is None:
        causally = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # as sdpa has it: queries from position 0, of keys that may be longer
        mask = causal(0) if causally and q.shape[1] > 1 else None
    elif isinstance(mask, Tensor):
        mask, bias = _given(mask, k.shape[1], bias)
    o = attention(q, k, v, mask, scale=scaling, softcap=softcap, sinks=s_aux, bias=bias, dropout=dropout)
    return o.contiguous(), None


def mask_of(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
    mask_function: Function = masking_utils.causal_mask_function, attention_mask: Tensor | None = None, **_: Any,
) -> Described:  # fmt: skip
    """The mask of a forward pass: query t stands at position q_offset + t, key j at kv_offset + j.

    attention_mask: [B, n], False where a position is padding; what is not must be one run of each row. Raises
    Unsupported for other padding, and for functions that transformers did not make.
    """
    place = _Place(q_length, kv_length, int(q_offset), int(kv_offset))
    found = _translate(mask_function, place)
    if attention_mask is not None:
        found = _and(found, _padding(attention_mask, place))
    return Described(found, batch_size, q_length, kv_length)


class _Place:
    def __init__(self, Tq: int, Tk: int, q_offset: int, kv_offset: int) -> None:
        self.q_offset, self.kv_offset = q_offset, kv_offset
        self.Tq, self.Tk = Tq, Tk
        self.offset = q_offset - kv_offset

    def of_queries(self, x: Tensor) -> Tensor:
        """Columns of x [B, positions] at the queries."""
        return x[:, self.q_offset : self.q_offset + self.Tq]

    def of_keys(self, x: Tensor) -> Tensor:
        """Columns of x [B, positions] at the keys."""
        return x[:, self.kv_offset : self.kv_offset + self.Tk]


def _and(a: Mask, b: Mask) -> Mask:
    return b if a.kind == "full" else a if b.kind == "full" else a & b


def _translate(function: Function, at: _Place) -> Mask:
    name = getattr(function, "__qualname__", repr(function)).replace(".<locals>", "")
    known = getattr(function, "__module__", "") == masking_utils.__name__
    rule = RULES.get(name) if known else None
    if rule is None:
        reason = f"the mask function {name} is not one that can be read: pass a 4-D mask, or use sdpa"
        raise Unsupported(NAME, [reason])
    return rule(_captured(function), at)


def _captured(function: Function) -> dict[str, Any]:
    code: Any = function.__code__
    cells: Any = function.__closure__ or ()
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _all_of(x: Mapping[str, Any], at: _Place) -> Mask:
    found = full()
    for part in x["mask_functions"]:
        found = _and(found, _translate(part, at))
    return found


def _any_of(x: Mapping[str, Any], at: _Place) -> Mask:
    first, *rest = (_translate(part, at) for part in x["mask_functions"])
    for part in rest:
        first = first | part
    return first


def _chunked(x: Mapping[str, Any], at: _Place) -> Mask:
    # chunks are counted from the first position that is no padding
    size, start = int(x["chunk_size"]), x["left_padding"].reshape(-1, 1).cpu()
    here = (torch.arange(n) + first for n, first in ((at.Tq, at.q_offset), (at.Tk, at.kv_offset)))
    of_q, of_k = (((t - start).div(size, rounding_mode="floor")).to(torch.int32).numpy() for t in here)
    return documents(of_q, of_k)


def _packed(x: Mapping[str, Any], at: _Place) -> Mask:
    ids = x["packed_sequence_mask"].to(torch.int32)
    return documents(at.of_queries(ids), at.of_keys(ids))


def _remapped(x: Mapping[str, Any], at: _Place) -> Mask:
    # inside a packed sequence positions differ as columns do, which is all that these ask
    inner = _translate(x["mask_function"], at)
    if inner.has_data:
        raise Unsupported(NAME, [f"{inner} inside packed sequences: pass them one by one, or use sdpa"])
    return inner


def _padding(mask: Tensor, at: _Place) -> Mask:
    real = at.of_keys(mask.bool()).cpu().numpy()
    if real.shape[1] < at.Tk:
        # keys that a static cache holds behind the prompt
        real = np.pad(real, ((0, 0), (0, at.Tk - real.shape[1])))
    if real.all():
        return full()
    counts = real.sum(1)
    start = real.argmax(1)
    stop = start + counts
    here = np.arange(at.Tk)
    if (real != ((here >= start[:, None]) & (here < stop[:, None]))).any():
        raise Unsupported(NAME, ["attention_mask has padding between tokens: pad at one end, or pass a 4-D mask"])
    return keys(start.astype(np.int32), stop.astype(np.int32))


def _given(mask: Tensor, Tk: int, bias: Tensor | None) -> tuple[Mask | None, Tensor | None]:
    mask = mask[..., :Tk]
    if mask.dtype is torch.bool and mask.shape[1] == 1:
        return dense(mask[:, 0]), bias
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))
    return None, mask if bias is None else mask + bias


# of every function that transformers.masking_utils makes: what its captured values mean
RULES: dict[str, Callable[[Mapping[str, Any], _Place], Mask]] = {
    "causal_mask_function": lambda _, at: causal(at.offset),
    "bidirectional_mask_function": lambda _, at: full(),
    "and_masks.and_mask": _all_of,
    "or_masks.or_mask": _any_of,
    "sliding_window_overlay.inner_mask": lambda x, at: window(int(x["sliding_window"]) - 1, None, at.offset),
    "sliding_window_bidirectional_overlay.inner_mask": lambda x, at: window(
        int(x["sliding_window"]), int(x["sliding_window"]), at.offset
    ),
    "chunked_overlay.inner_mask": _chunked,
    "packed_sequence_mask_function.inner_mask": _packed,
    "remap_positions_for_packed_sequence.inner_mask": _remapped,
}

AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, mask_of)
