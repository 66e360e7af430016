"""What torch tells about its own state by private names only; nothing else here reads those."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.utils.dlpack import to_dlpack

# whether a torch.func transform is at work
transforms_active = torch._C._are_functorch_transforms_active
# how many torch_dispatch modes are (fake tensors, tracing, counting)
modes_active = torch._C._len_torch_dispatch_stack
# whether autocast is on for any kind of device
autocast_active = torch._C._is_any_autocast_enabled
# a tensor as a DLPack capsule; the newer kind says that it may be written to
capsule = getattr(torch._C, "_to_dlpack_versioned", to_dlpack)


def forward_mode_active() -> bool:
    """Whether tensors may carry tangents."""
    return forward_ad._current_level >= 0
