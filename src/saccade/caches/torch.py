"""Caches of torch tensors on any device; writing never waits for the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import Unsupported
from ..frameworks.torch_run import lent
from ..frameworks.torch_state import beyond_memory, exporting, forward_level, is_zero, transforms_active
from ..quantised import Quantised
from ..rope import Turn
from .storage import Arrays, Shape, Storage, Target, append_of, rows_of


class TorchArrays(Arrays):
    """Strided torch tensors on one device."""

    name = "Tensor"
    on_host = staticmethod(torch.from_numpy)
    tile = staticmethod(torch.tile)

    def __init__(self, dtype: str, device: Any) -> None:
        try:
            place = None if device is None else torch.device(device)
        except (RuntimeError, TypeError):
            raise ValueError(
                f"device is {device!r}; expected None, one of torch, such as 'cpu' or 'cuda:0', or 'webgpu'"
            ) from None
        like = torch.empty(0, dtype=getattr(torch, dtype), device=place)
        self.dtype, self.device = like.dtype, like.device
        self.shown = {"dtype": self.dtype, "device": str(self.device)}

    def full(self, shape: Shape, fill: float) -> Any:
        return torch.full(shape, fill, dtype=self.dtype, device=self.device)

    def check(self, name: str, x: Any) -> None:
        if not isinstance(x, Tensor) or x.dtype != self.dtype:
            raise self.mismatch(name, x)
        self.check_place(name, x)

    def holds(self, x: Any) -> bool:
        return isinstance(x, Tensor)

    def check_place(self, name: str, x: Any) -> None:
        if x.device != self.device or x.layout != torch.strided:
            raise ValueError(
                f"{name} is {x.layout} on {x.device}; expected {torch.strided} on {self.device}, as in the cache"
            )
        compiling = torch.compiler.is_compiling()
        if compiling and exporting():
            raise Unsupported(
                "torch", ["a cache is written in place, which torch.export does not keep: export attention"]
            )
        if x.requires_grad and torch.is_grad_enabled():
            reason = f"{name} requires grad, and a cache has no gradient"
            raise Unsupported("torch", [f"{reason}: append {name}.detach(), or call under torch.no_grad()"])
        odd = type(x) is not Tensor or transforms_active() or forward_level() >= 0 or is_zero(x)
        if odd and not compiling and (more := beyond_memory(x)):
            reason = f"{name} is {more}, and a cache stores plain numbers"
            raise Unsupported("torch", [f"{reason}: append outside of transforms and modes"])

    def sums(self, shape: Shape) -> Any:
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def steps(self, n: int, dtype: str = "int64") -> Any:
        return torch.arange(n, dtype=getattr(torch, dtype), device=self.device)

    def indices(self, x: NDArray[Any]) -> Any:
        return torch.as_tensor(x, device=self.device)

    def write_rows(self, cache: Storage, k: Any, v: Any, starts: Any, counts: Any, turn: Turn | None) -> None:
        plain = counts is turn is cache.quantised is None and not (k.is_neg() or v.is_neg())
        append = None
        if plain and not starts.is_cpu and not torch.compiler.is_compiling():
            append = append_of(starts.device.type, "append_rows")
        if append is None or not append(k, None if cache.aliased else v, cache.arrays, starts):
            super().write_rows(cache, k, v, starts, counts, turn)

    @staticmethod
    def write(targets: Iterable[Target], first: Any, second: Any, how: Quantised | None) -> None:
        near, traced = first.is_cpu, torch.compiler.is_compiling()
        append = None if traced else append_of(first.device.type)
        for x, array, scale, turn in targets:
            if append is not None and (array.stride(-1) == 1 or array.shape[-1] == 1):
                scales = None if scale is None else lent(scale)
                angles = (None, None, False) if turn is None else (lent(turn.cos), lent(turn.sin), turn.interleaved)
                if append(lent(x), lent(array), scales, lent(first), lent(second), *angles, how):
                    continue
            if not x.shape[0]:
                continue
            at: Any = second >= 0
            some: Any = True
            if traced or not near:
                # tokens that must not be written are replaced by the first one that must, so that the host need not
                # know their number; if there is none, all of them write to slot (0, 0) what it already has
                some, each = at.any(), torch.arange(len(at), device=at.device)
                at = torch.where(at, each, at.int().argmax())
            where = first[at] * some, second[at] * some
            for rows, new in rows_of((x, array, scale, turn), at, how):
                rows[where] = new if some is True else torch.where(some, new, rows[where])
