"""transformers: `import saccade.integrations.transformers`, then `from_pretrained(..., attn_implementation="saccade")`.

transformers describes a mask as a tree of small functions. They are read and converted to an expression of
`saccade.mask`, without a T×T mask. Functions that cannot be read, and unknown arguments of attention, raise
`saccade.Unsupported`. `routed(model)` lists the layers that use Saccade. Written for transformers 5.23;
docs/transformers.md lists its models and their limitations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from ...api import attention
from ...mask import Mask, causal, dense, keys
from .described import INSTEAD, NAME, Described, described, refuse
from .functions import Place, read, require
from .routing import routed, watch

__all__ = ["Described", "attend", "mask_of", "routed"]

Function = Callable[..., Any]
# arguments that some models pass to attention and that change no result, because they are for other layers, or because
# the mask or q, k and v already contain them; eager attention and sdpa ignore them, too
_IN_MASK = {"sliding_window", "position_ids", "cache_position", "cu_seq_lens_k", "max_length_q", "max_length_k"}
_IN_ARRAYS = {"position_embeddings", "past_key_values", "cache_params", "input_ids", "inputs_embeds", "grid_thw"}
_DECODER = {"decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask", "decoder_position_ids"}
_OUTPUTS = {"use_cache", "return_dict", "output_hidden_states", "output_router_logits", "logits_to_keep"}
_OF_MODEL = {"encoder_outputs", "num_items_in_batch", "deterministic", *_DECODER, *_OUTPUTS}
IGNORED = frozenset(_IN_MASK | _IN_ARRAYS | _OF_MODEL)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    output_attentions: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer, ([B, Tq, Hq, D], None), of query [B, Hq, Tq, D], key and value [B, Hk, Tk, D].

    attention_mask: a result of `mask_of`; or None, then `is_causal` and the module decide; or a 4-D tensor of booleans,
    True where a query sees a key, or of numbers to add to the scores.

    Raises Unsupported for attention weights, which no kernel returns, for the paged cache of transformers, for a mask
    of other lengths, and for every unknown argument that is not None.
    """
    if output_attentions:
        refuse("attention weights are never stored: use attn_implementation='eager' to look at them")
    if cache is not None:
        refuse("generate_batch uses its own paged cache: use saccade.paged_attention, or sdpa there")
    for name, argument in others.items():
        if argument is not None and name not in IGNORED:
            refuse(f"the model passes `{name}`, an argument that Saccade does not know: {INSTEAD}")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    mask, bias = attention_mask, position_bias
    if isinstance(mask, Described):
        _check_sizes(mask, q, k)
        mask = mask.mask
    elif mask is None:
        causally = getattr(module, "is_causal", None) if is_causal is None else is_causal
        if causally is None and q.shape[1] > 1:
            # sdpa treats it as causal, eager attention does not
            refuse(f"{type(module).__name__} passes no mask and does not say whether it is causal: {INSTEAD}")
        # as in sdpa: queries count from position 0, and there may be more keys
        mask = causal(0) if causally and q.shape[1] > 1 else None
    elif isinstance(mask, Tensor):
        mask, bias = _of_tensor(mask, q.shape[1], k.shape[1], bias)
    if cu_seq_lens_q is not None:
        _check_packed(cu_seq_lens_q, attention_mask)
    o = attention(q, k, v, mask, scale=scaling, softcap=softcap, sinks=s_aux, bias=bias, dropout=dropout)
    return o.contiguous(), None


def mask_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Function = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    **_: Any,
) -> Described:
    """The mask of a forward pass: query t is at position q_offset + t, key j at kv_offset + j.

    attention_mask: [B, n], False where a position is padding; the tokens of each row must be one run. Raises
    Unsupported for other padding, and for functions that cannot be read.

    The other arguments control how transformers makes its own masks (vmap, dtype, whether at all); they are ignored.
    """
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.reshape(1) if torch.compiler.is_compiling() else int(q_offset)
    at = Place(batch_size, q_length, kv_length, q_offset, kv_offset, device)
    return _at(at, mask_function, attention_mask)


def _at(at: Place, mask_function: Function, attention_mask: Tensor | None) -> Described:
    allowed = read(mask_function, at)
    mask = allowed.mask
    if attention_mask is not None:
        real = _padding(attention_mask[:, at.kv_offset : at.kv_offset + at.Tk].bool(), at.Tk)
        mask = mask if real is None else real if mask.kind == "full" else mask & real
    return described(mask, at, lambda place: _at(place, mask_function, attention_mask), allowed.packed)


def _check_sizes(mask: Described, q: Tensor, k: Tensor) -> None:
    B, Tq, Tk = mask.place[:3]
    if Tq != q.shape[1] or Tk != k.shape[1] or B not in (1, q.shape[0]):
        here = [q.shape[0], 1, q.shape[1], k.shape[1]]
        refuse(f"the mask is made for [B, 1, Tq, Tk] = {[B, 1, Tq, Tk]}, q and k are of {here}: {INSTEAD}")


def _check_packed(cu_seq_lens: Tensor, mask: Any) -> None:
    # position_ids that restart have the same meaning, and are in the mask
    if cu_seq_lens.numel() > 2 and not (isinstance(mask, Described) and mask.packed):
        reason = (
            "cu_seq_lens_q is given and the mask has no packed sequences: pass position_ids that start at 0 in each"
        )
        refuse(f"{reason}, use_cache=False and no attention_mask")


def _padding(real: Tensor, Tk: int) -> Mask | None:
    # the keys that are not padding; None if all are
    if real.shape[1] < Tk:
        # keys in a static cache after the prompt
        real = torch.nn.functional.pad(real, (0, Tk - real.shape[1]))
    traced = torch.compiler.is_compiling()
    if not traced:
        real = real.cpu()
        if bool(real.all()):
            return None
    counts = real.sum(1)
    start = real.int().argmax(1)
    stop = start + counts
    here = torch.arange(Tk, device=real.device)
    run = (here >= start[:, None]) & (here < stop[:, None])
    require((real == run).all(), "attention_mask has padding between tokens: pad at one end, or pass a 4-D mask")
    start, stop = start.to(torch.int32), stop.to(torch.int32)
    return keys(start, stop) if traced else keys(start.numpy(), stop.numpy())


def _of_tensor(mask: Tensor, Tq: int, Tk: int, bias: Tensor | None) -> tuple[Mask | None, Tensor | None]:
    mask = mask[..., :Tk]
    if mask.dtype is torch.bool and mask.shape[1] == 1 and mask.shape[2] == Tq:
        return dense(mask[:, 0]), bias
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))
    return None, mask if bias is None else mask + bias


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, mask_of)
watch()
