"""How arrays of each framework reach a backend: one module per framework, and no other code handles its arrays."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np


def framework_of(q: Any) -> ModuleType:
    """The module for arrays like q; raises TypeError for arrays of no known framework."""
    return KNOWN.get(type(q)) or _find(q)


# the framework of each type of array seen so far
KNOWN: dict[type, ModuleType] = {}


def _find(q: Any) -> ModuleType:
    # torch is looked up, never imported: a tensor exists only after torch was imported
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(q, torch.Tensor):
        from . import torch as framework
    elif isinstance(q, np.ndarray):
        from . import numpy as framework
    elif type(q).__module__ == "saccade.backends.webgpu.arrays":
        from . import webgpu as framework
    elif type(q).__module__ == "mlx.core":
        from . import mlx as framework
    elif "jax" in sys.modules and isinstance(q, sys.modules["jax"].Array):
        from . import jax as framework
    else:
        raise TypeError(f"q is {type(q).__name__}; expected a torch tensor or a NumPy array [B, Tq, Hq, D]")
    # a traced function that writes here would be compiled again at its second call
    if torch is None or not torch.compiler.is_compiling():
        KNOWN[type(q)] = framework
    return framework
