"""The versions of Triton with which its less stable parts are used: Gluon, for Hopper, and the launcher, for replay."""

from __future__ import annotations

import torch

import triton

from ..tested import TRITON_COMPILED as COMPILED
from ..tested import TRITON_RUN as RUN

CURRENT = ".".join(triton.__version__.split(".")[:2])
# the launcher takes the arguments one by one; later versions take one list
FLAT_LAUNCHER = CURRENT == "3.6"


def why_not() -> str:
    """The reason not to use these parts with this version; "" if they are used."""
    if torch.version.hip:
        return "torch is built for AMD GPUs, and these kernels need an NVIDIA GPU"
    if CURRENT in RUN:
        return ""
    known = "they compile, but have not run on a GPU" if CURRENT in COMPILED else "they are not known to compile"
    return f"Triton is {triton.__version__}, with which {known}; they have run with {', '.join(RUN)}"
