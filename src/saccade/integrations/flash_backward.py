"""The backward of flash-attn's private functions, which takes out and lse and writes into buffers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import attention_backward
from ..mask import Mask
from .flash_arguments import check_tensor
from .flash_packed import Sequences, laid_out


class Backward(NamedTuple):
    """The arrays of a backward: lse [B, Hq, Sq] or [Hq, total], others as in the forward, buffers like q, k and v."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    buffers: tuple[Tensor | None, Tensor | None, Tensor | None]


@torch.no_grad()
def write_gradients(call: Backward, at: Sequences, mask: Mask | None, **options: Any) -> Tensor:
    """Write dq, dk and dv into the buffers; return the sums of dout · out, in the layout of lse.

    lse may belong to more keys than these, as in a ring; the gradients are then the contribution of these keys.
    options: those of `attention_backward`.
    """
    names = "dout", "q", "k", "v", "out", "softmax_lse"
    for name, x in zip(names, call[:6], strict=True):
        check_tensor(name, x)
    for name, x, buffer in zip(("dq", "dk", "dv"), (call.q, call.k, call.v), call.buffers, strict=True):
        if buffer is not None and buffer.shape != x.shape:
            raise ValueError(f"{name} has shape {list(buffer.shape)}; expected {list(x.shape)}, like {name[1:]}")
    heads, rows = call.q.shape[-2], call.q.shape[:-2]
    if call.lse.shape != (*rows[:-1], heads, rows[-1]):
        wanted = [*rows[:-1], heads, rows[-1]]
        raise ValueError(f"softmax_lse has shape {list(call.lse.shape)}; expected {wanted}")
    q, k, v, mask = laid_out(call.q, call.k, call.v, at, mask)
    dout, out, lse = call.dout, call.out, call.lse.mT
    if q.dim() < call.q.dim():
        dout, out, lse = (x.flatten(0, 1) for x in (dout, out, lse))
    *gradients, _ = attention_backward(dout, q, k, v, out, lse, mask, grads=(), **options)
    for buffer, x in zip(call.buffers, gradients, strict=True):
        if buffer is not None:
            buffer.copy_(x.view_as(buffer))
    wide = torch.promote_types(call.out.dtype, torch.float32)
    return (call.dout.to(wide) * call.out.to(wide)).sum(-1).mT.contiguous()
