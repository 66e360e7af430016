"""vmap of the operators: folded into the batch if that is exact, else one call per entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..operands import Side
from .torch_signature import Signature


def vmap_rule(signature: Signature, op: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """The rule of an operator, called as `op`, for `torch.library.register_vmap` and autograd Functions."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        a, dims = signature.bind(*args), signature.bind(*in_dims)
        if signature.name != "second" and _foldable(a, dims):
            return _fold(op, info.batch_size, a, dims)
        return _loop(op, info.batch_size, in_dims, args)

    return rule


def _foldable(a: Any, dims: Any) -> bool:
    # folding changes the batch: dropout depends on the batch entry, arrays of the mask and the bias may have one entry
    # per batch entry, and gradients of side arrays are sums over the batch of one call
    alone = a.log_f is None and all(x is None or x.dim() < 2 or x.shape[0] == 1 for x in (a.bias, a.slopes, a.table))
    grads = getattr(a, "grads", ())
    whole = [f"{kind}{name}" for kind in ("", "t") for name in Side._fields]
    batched = dims.seed is not None or any(getattr(dims, name, None) is not None for name in whole)
    return alone and not a.data and a.seed is None and not batched and not any(grads)


# the arguments that have a batch of their own
ROWS = ("do", "dlse", "dentropy", "tq", "tk", "tv", "q", "k", "v", "o", "lse", "entropy")


def _fold(op: Any, size: int, a: Any, dims: Any) -> tuple[Any, Any]:
    rows = {name: getattr(a, name) for name in ROWS if name in a._fields}
    folded = {name: _to_front(x, getattr(dims, name), size).flatten(0, 1) for name, x in rows.items() if x is not None}
    results = op(*a._replace(**folded))
    # an empty tensor is a gradient that is not needed
    return tuple(x if x.dim() == 1 else x.unflatten(0, (size, x.shape[0] // size)) for x in results), tuple(
        None if x.dim() == 1 else 0 for x in results
    )


def _to_front(x: Tensor, dim: int | None, size: int) -> Tensor:
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _loop(op: Any, size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, Any]:
    each = [op(*(_entry(x, d, n) for x, d in zip(args, in_dims, strict=True))) for n in range(size)]
    results = tuple(torch.stack(x) for x in zip(*each, strict=True))
    return results, (0,) * len(results)


def _entry(x: Any, dim: Any, n: int) -> Any:
    if isinstance(x, (list, tuple)):
        dims = dim if isinstance(dim, (list, tuple)) else [None] * len(x)
        return [_entry(y, d, n) for y, d in zip(x, dims, strict=True)]
    return x.select(dim, n) if isinstance(x, Tensor) and dim is not None else x
