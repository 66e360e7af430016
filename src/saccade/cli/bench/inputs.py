"""The arrays of a case: torch tensors, or NumPy arrays where there is no torch."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .cases import Case


def has_torch() -> bool:
    """Whether torch can be imported; without it, only Saccade is measured, on NumPy arrays."""
    try:
        importlib.import_module("torch")
    except ImportError:
        return False
    return True


@dataclass
class Inputs:
    """q [B, Tq, Hq, D], k, v [B, Tk, Hk, D], do like q, and the mask (None: all pairs).

    Torch tensors, or NumPy arrays where there is no torch.
    """

    case: Case
    q: Any
    k: Any
    v: Any
    do: Any
    mask: Any = None
    _allowed: list[Any] = field(default_factory=list)

    def allowed(self) -> Any:
        """The mask as a dense boolean tensor [1, 1, Tq, Tk], True where a query sees a key."""
        import torch

        if not self._allowed:
            dense = self.mask.evaluate(1, 1, self.case.Tq, self.case.Tk)
            self._allowed.append(torch.from_numpy(np.array(dense)))
        return self._allowed[0]


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Normal inputs of the case's shapes, the same for every provider."""
    from saccade.testing.patterns import named

    mask = named(case.mask, case.Tk)
    if not has_torch():
        from saccade.arrays import numpy_dtype

        random, kind = np.random.default_rng(seed), numpy_dtype(case.dtype)
        shapes = [(t, h) for t, h in ((case.Tq, case.Hq), (case.Tk, case.Hk), (case.Tk, case.Hk), (case.Tq, case.Hq))]
        arrays = [random.standard_normal((case.B, t, h, case.D)).astype(kind) for t, h in shapes]
        q, k, v, do = arrays
        return Inputs(case, q, k, v, do if case.kind == "backward" else None, mask)
    import torch

    make = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def normal(t: int, h: int) -> Any:
        return torch.randn(case.B, t, h, case.D, generator=make).to(dtype)

    q, k, v = normal(case.Tq, case.Hq), normal(case.Tk, case.Hk), normal(case.Tk, case.Hk)
    do = normal(case.Tq, case.Hq) if case.kind == "backward" else None
    return Inputs(case, q, k, v, do, mask)
