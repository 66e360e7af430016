"""The versions of Triton with which its less stable parts are used: Gluon, for Hopper, and the launcher, for replay."""

from __future__ import annotations

import torch

import triton

from ..tested import TRITON_RUN as RUN
from ..tested import triton_known

CURRENT = ".".join(triton.__version__.split(".")[:2])
# the launcher takes the arguments one by one; later versions take one list
FLAT_LAUNCHER = CURRENT == "3.6"


def why_not() -> str:
    """The reason not to use these parts with this version; "" if they are used."""
    if torch.version.hip:
        return "torch is built for AMD GPUs, and these kernels need an NVIDIA GPU"
    if CURRENT in RUN:
        return ""
    return f"Triton is {triton.__version__} ({triton_known(CURRENT)}); they are used with {', '.join(RUN)}"
