"""Parts of torch's state that only private names reveal; no other module uses private names of torch."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.utils.dlpack import to_dlpack

from ..errors import Unsupported

# whether a torch.func transform is active
transforms_active = torch._C._are_functorch_transforms_active
# the number of active torch_dispatch modes (fake tensors, tracing, counting)
modes_active = torch._C._len_torch_dispatch_stack
# whether autocast is on for any kind of device
autocast_active = torch._C._is_any_autocast_enabled
# 0 or more if tensors may carry tangents; like the names above, a call without a Python function
forward_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level")
# whether a tensor is zero without memory, as torch makes them in derivatives
is_zero = Tensor._is_zerotensor
_ORDINARY: Any = Tensor
# a tensor as a DLPack capsule; only the newer kind can be written to
capsule = getattr(torch._C, "_to_dlpack_versioned", to_dlpack)


def exporting() -> bool:
    """Whether torch.export traces; for Dynamo of torch 2.9, `torch.compiler.is_exporting` is true in every graph."""
    return torch.compiler._is_exporting_flag


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of autocast, all except float64, if it is on for the device of the first."""
    if not autocast_active() or not all(isinstance(x, Tensor) for x in tensors):
        return tensors
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x for x in tensors)


def legacy_batched(*tensors: Any) -> bool:
    """Whether one is a batch of gradients, as `torch.autograd.grad(is_grads_batched=True)` passes it."""
    return any(x is not None and is_legacy_batchedtensor(x) for x in tensors)


def beyond_memory(x: Tensor) -> str:
    """Why a tensor is more or less than the numbers in its memory, in words; "" for one that is just these numbers."""
    kind: Any = type(x)
    if kind.__torch_dispatch__ is not _ORDINARY.__torch_dispatch__:
        return f"a {kind.__name__}"
    if transforms_active() and is_functorch_wrapped_tensor(x):
        return "a tensor of torch.func"
    if forward_level() >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        return "a tensor with a tangent"
    return "an efficient zero" if is_zero(x) else ""


def forward_mode_active() -> bool:
    """Whether tensors may carry tangents."""
    return forward_level() >= 0


def drops_tangents() -> bool:
    """Whether forward mode is on outside of autograd Functions, where an operator would lose tangents."""
    return forward_mode_active() and torch._C._is_fwd_grad_enabled()


def refusing_tangents(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """function, which raises Unsupported where an operator would take every tangent for zero."""

    def checked(*args: Any) -> Any:
        if drops_tangents():
            raise Unsupported("torch", [reason])
        return function(*args)

    return checked
