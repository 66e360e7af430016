"""Names that other libraries use for arguments, and what to write instead."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

_CAUSAL = "mask=saccade.mask.causal()"
_WINDOW = "mask=saccade.mask.causal() & saccade.mask.window(left, 0), left keys before the query's own"
_PACKED = "mask=saccade.mask.documents(cu_seqlens=...), and arrays [1, total, H, D]"
_ARRAY = (
    "mask=saccade.mask.from_dense(x) for booleans that are True where a query may look, bias=x for numbers that are "
    "added to the scores"
)
INSTEAD = {
    "is_causal": _CAUSAL,
    "causal": _CAUSAL,
    "attn_mask": _ARRAY,
    "attention_mask": f"mask=saccade.mask.padding(x) for [B, Tk]; {_ARRAY}",
    "key_padding_mask": "mask=saccade.mask.padding(~x): torch's is True for padding, Saccade's for tokens",
    "block_mask": "mask=saccade.integrations.flex.from_block_mask(x)",
    "mask_mod": "mask= with an expression of saccade.mask",
    "score_mod": "bias= with an array or saccade.alibi, saccade.relative, saccade.gates; or softcap=",
    "attn_bias": "bias=x",
    "dropout_p": "dropout=p",
    "need_weights": "saccade.attention_weights(q, k, mask) for the weights themselves",
    "return_attn_probs": "return_lse=True, and saccade.attention_weights(q, k, mask) for the weights themselves",
    "softmax_scale": "scale=x",
    "sm_scale": "scale=x",
    "logits_soft_cap": "softcap=x",
    "window_size": _WINDOW,
    "sliding_window": _WINDOW,
    "alibi_slopes": "bias=saccade.alibi(x)",
    "learnable_sink": "sinks=x",
    "s_aux": "sinks=x",
    "cu_seqlens": _PACKED,
    "cu_seqlens_q": _PACKED,
    "cu_seqlens_k": _PACKED,
    "enable_gqa": "the call without it: k and v may have fewer heads than q",
}


def refuse(function: Callable[..., Any], unknown: dict[str, Any]) -> NoReturn:
    """Raise TypeError for keywords that a function does not have, and say what to write instead."""
    name = next(iter(unknown))
    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    instead = "causal=" if name == "is_causal" and "causal" in known else INSTEAD.get(name)
    if instead is None or instead.partition("=")[0] not in (*known, instead):
        near = difflib.get_close_matches(name, known, 1)
        instead = f"{near[0]}=" if near else f"one of {', '.join(known)}"
    raise TypeError(f"{function.__name__}() has no argument {name!r}; write {instead}")
