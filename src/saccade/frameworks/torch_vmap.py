"""vmap of the operators: folded into the batch where that is exact, else one call after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# leading tensor arguments with a batch dimension, and where structure comes after them
FOLDED = {"forward": 3, "backward": 7}


def vmap_rule(name: str, op: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """The rule of saccade::<name>, called as `op`, for `torch.library.register_vmap` and autograd Functions."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        if name in FOLDED and _foldable(FOLDED[name], in_dims, args):
            return _fold(op, info.batch_size, FOLDED[name], in_dims, args)
        return _loop(op, info.batch_size, in_dims, args)

    return rule


def _foldable(n: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> bool:
    # dropout counts batch entries, arrays of masks and of bias may hold one entry each, and their gradients
    # are sums over the batch of one call
    _, _, data, bias, slopes, _, seed = args[n : n + 7]
    alone = all(x is None or x.dim() < 2 or x.shape[0] == 1 for x in (bias, slopes))
    grads = args[-1] if isinstance(args[-1], (list, tuple)) else ()
    batched = any(d is not None for d in in_dims[n + 3 : n + 7])
    return alone and not data and seed is None and not batched and not any(grads)


def _fold(op: Any, size: int, n: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, Any]:
    leading = zip(args[:n], in_dims[:n], strict=True)
    folded = [_to_front(x, d, size).flatten(0, 1) if isinstance(x, Tensor) else x for x, d in leading]
    results = op(*folded, *args[n:])
    # an empty tensor stands for a gradient that was not asked for
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
