"""Convert NumPy arrays to torch tensors and back, for backends that accept only tensors; on the GPU if there is one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import saccade

from ..arrays import numpy_dtype
from ..biases import Bias


def put(x: Any) -> Any:
    """An array, a cache or a bias as tensors; anything else as it is."""
    import torch

    if isinstance(x, saccade.KVCache):
        x = copy.copy(x)
        x.k, x.v = _put_both(x.k, x.v)
        x.follow(put(x.lengths))
        x.k_scale, x.v_scale = _scales(x.k_scale), _scales(x.v_scale)
        return x
    if isinstance(x, saccade.PagedKeys):
        keys = saccade.PagedKeys(*_put_both(x.k, x.v), *map(put, x[2:]))
        return keys._replace(k_scale=_scales(x.k_scale), v_scale=_scales(x.v_scale))
    if isinstance(x, Bias):
        return replace(x, array=put(x.array), slopes=put(x.slopes), table=put(x.table), log_f=put(x.log_f))
    if not isinstance(x, np.ndarray):
        return x
    if min(x.strides, default=0) < 0 or not x.flags.aligned or not x.flags.writeable:
        # torch supports neither negative strides nor fields of records, and warns about read-only arrays
        x = x.copy()
    bits = x.view(np.uint16) if x.dtype.name == "bfloat16" else x
    tensor = torch.from_numpy(bits)
    tensor = tensor.view(torch.bfloat16) if bits is not x else tensor
    return tensor.cuda() if torch.cuda.is_available() else tensor


def _put_both(k: Any, v: Any) -> tuple[Any, Any]:
    # values that are the first numbers of keys, as in a latent cache, stay a view of them
    if isinstance(k, np.ndarray) and v.strides == k.strides and np.shares_memory(k, v):
        first = put(k)
        return first, first[..., : v.shape[-1]]
    return put(k), put(v)


def _scales(x: Any) -> Any:
    return None if x is None else put(x.view(numpy_dtype("bfloat16")))


def get(x: Any) -> Any:
    """Tensors, also in tuples and dictionaries, as NumPy arrays."""
    import torch

    if isinstance(x, (tuple, list)):
        return tuple(map(get, x))
    if isinstance(x, dict):
        return {name: get(value) for name, value in x.items()}
    if not isinstance(x, torch.Tensor):
        return x
    if x.dtype is torch.bfloat16:
        return x.cpu().view(torch.uint16).numpy().view(numpy_dtype("bfloat16"))
    return x.cpu().numpy()


def converted(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """The function on NumPy arrays, converted to tensors if the backend accepts only tensors."""
    if backend != "triton":
        return function

    def call(*args: Any, **options: Any) -> Any:
        return get(function(*map(put, args), **{name: put(x) for name, x in options.items()}))

    return call
