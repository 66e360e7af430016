"""Masks in torch: as arguments of operators, and as a pytree."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

from ..mask import Mask, structures
from ..mask.algebra import _rebuild  # pyright: ignore[reportPrivateUsage]
from ..mask.contents import to_tensor
from .call import memo_of
from .torch_state import exporting

# masks by their operator arguments: all that are alive, and the last few for compiled graphs
_live: weakref.WeakValueDictionary[Any, Mask] = weakref.WeakValueDictionary()
_recent: deque[Mask] = deque(maxlen=4)


def split(mask: Mask | None) -> tuple[str, list[Any], list[Any]]:
    """A mask as operator arguments (structure, ints, data); NumPy leaves are copied to tensors once."""
    if exporting():
        return _exported(mask)
    if mask is None:
        return "", [], []
    if torch.compiler.is_compiling():
        # not `flatten`, which stores its result with the mask; integers may be symbolic
        ints: list[Any] = []
        data: list[Any] = []
        structure = structures.text(mask, ints, data)
        return structure, ints, [torch.as_tensor(x) for x in data]
    structure, ints, data = mask.flatten()
    if not data:
        return structure, ints, data
    if all(isinstance(x, Tensor) for x in data):
        _live[_key(structure, ints, data)] = mask
        return structure, ints, data
    memo = memo_of(mask)
    if "tensors" not in memo:
        memo["tensors"] = mask.map_arrays(lambda x: x if isinstance(x, Tensor) else to_tensor(x))
    return split(memo["tensors"])


def _exported(mask: Mask | None) -> tuple[str, list[Any], list[Any]]:
    # AOTInductor passes None for an empty list (torch 2.13), so lists have at least one entry, which `used` removes
    ints: list[Any] = []
    data: list[Any] = []
    structure = "" if mask is None else structures.text(mask, ints, data)
    if torch.compiler.is_dynamo_compiling() and any(isinstance(x, np.ndarray) for x in data):
        reason = "torch.export(strict=True) stores no NumPy arrays: make the mask of tensors, or leave strict out"
        raise ValueError(reason)
    # torch warns about read-only arrays
    data = [torch.as_tensor(x.copy()) if isinstance(x, np.ndarray) else x for x in data]
    return structure, ints or [0], data or [torch.zeros(0)]


def used(structure: str, ints: list[Any], data: list[Any]) -> tuple[list[Any], list[Any]]:
    """The integers and arrays that belong to the mask of this structure."""
    bits = structure.count("%")
    return list(ints[: structure.count("#") + bits]), list(data[: structure.count("@") + bits])


def join(structure: str, ints: list[int], data: list[Tensor]) -> Mask | None:
    """The mask of these operator arguments; the same object, with its cached plans, if it was seen before."""
    if not structure:
        return None
    ints, data = used(structure, ints, data)
    if not data:
        return Mask.unflatten(structure, ints, data)
    key = _key(structure, ints, data)
    mask = _live.get(key)
    if mask is None:
        mask = Mask.unflatten(structure, ints, data)
        _live[key] = mask
        _recent.append(mask)
    return mask


def seen(structure: str, ints: list[int], data: list[Tensor]) -> Mask | None:
    """The living mask that was split into these arguments, or None; never one with symbolic integers or fake arrays."""
    ints, data = used(structure, ints, data)
    if not data or not all(type(x) is int for x in ints):
        return None
    return _live.get(_key(structure, ints, data))


def _key(structure: str, ints: list[Any], data: list[Tensor]) -> tuple[Any, ...]:
    # a living mask keeps its arrays alive, so their ids are unique
    return structure, tuple(ints), tuple(map(id, data))


def _flatten(mask: Mask) -> tuple[list[Any], tuple[str, int]]:
    structure, ints, data = mask.flatten()
    return [*ints, *data], (structure, len(ints))


def _unflatten(leaves: Any, context: tuple[str, int]) -> Mask:
    structure, count = context
    leaves = list(leaves)
    return Mask.unflatten(structure, leaves[:count], leaves[count:])


def _flatten_with_keys(mask: Mask) -> tuple[list[Any], tuple[str, int]]:
    leaves, context = _flatten(mask)
    return [(_pytree.SequenceKey(n), leaf) for n, leaf in enumerate(leaves)], context


_pytree.register_pytree_node(
    Mask,
    _flatten,
    _unflatten,
    serialized_type_name="saccade.Mask",
    flatten_with_keys_fn=_flatten_with_keys,
    # a stored program holds the context as JSON, which has no tuples
    to_dumpable_context=list,
    from_dumpable_context=tuple,
)
# programs store masks that are inputs as examples; rebuilding one only checks its arrays
torch.serialization.add_safe_globals([_rebuild])
