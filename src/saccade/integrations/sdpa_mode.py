"""The mode behind `saccade.patch_sdpa`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .sdpa import scaled_dot_product_attention

_THEIRS = functional.scaled_dot_product_attention


def _unchecked(function: Any) -> Callable[..., Any]:
    # a copy of the function that does not check for modes. Its globals have no __name__, otherwise torch.compile would
    # look them up in the module
    scope = {name: x for name, x in function.__globals__.items() if name != "__name__"}
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
        scope[name] = _no_function
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _no_function(*_: Any) -> bool:
    return False


# torch removes the mode while it handles a function. These functions call attention themselves, the last three in
# activation checkpoints
_CALLERS: dict[Any, Callable[..., Any]] = {
    function: _unchecked(function)
    for function in (
        functional.multi_head_attention_forward,
        Tensor.backward,
        torch.autograd.backward,
        torch.autograd.grad,
    )
}


class SdpaMode(TorchFunctionMode, ContextDecorator):
    """The context of `saccade.patch_sdpa`. It has no state, so any number of contexts and threads can share one."""

    def __init__(self, backend: str | None) -> None:
        super().__init__()
        self.backend = backend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, or Saccade's function in its place."""
        kwargs = kwargs or {}
        if func is _THEIRS:
            return scaled_dot_product_attention(*args, **kwargs, backend=self.backend)
        if func in _CALLERS:
            with self:
                return _CALLERS[func](*args, **kwargs)
        if func is Tensor.unflatten and torch.compiler.is_compiling():
            # the method calls super(), which torch.compile does not support under a mode
            return torch.unflatten(*args, **kwargs)
        return func(*args, **kwargs)


# one mode per backend, because torch.compile traces again for every new mode object
_modes: dict[str | None, SdpaMode] = {}


def mode(backend: str | None) -> SdpaMode:
    """The mode of this backend."""
    if backend not in _modes:
        _modes[backend] = SdpaMode(backend)
    return _modes[backend]
