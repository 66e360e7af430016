"""Operators by their schemas: arguments by name, saving them for autograd, and gradients in their order."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .torch_state import forward_mode_active

Function = Callable[..., Any]


class Signature:
    """saccade::<name> with arguments and results in the form of a schema: "Tensor q, Tensor? bias, bool decode"."""

    def __init__(self, name: str, arguments: str, results: str) -> None:
        pairs = [argument.rsplit(" ", 1) for argument in arguments.split(", ")]
        self.name, self.arguments, self.results = name, arguments, results
        self.types = {name: kind for kind, name in pairs}
        # a named tuple of the arguments, or of one value per argument
        self.bind: Any = namedtuple(name, self.types)  # pyright: ignore[reportUntypedNamedTuple]

    def register(self, kernel: Function, fake: Function, setup: Function, backward: Function) -> None:
        """Define the operator. setup and backward: as in `torch.library.register_autograd`."""
        name = f"saccade::{self.name}"
        torch.library.define(name, f"({self.arguments}) -> ({self.results})")
        torch.library.impl(name, "CompositeExplicitAutograd", kernel)
        torch.library.register_fake(name, fake)
        torch.library.register_autograd(name, backward, setup_context=setup)

    def save(self, ctx: Any, arguments: Any, outputs: tuple[Any, ...] = ()) -> None:
        """Store the arguments of a call, and tensors among its outputs, for `saved`."""
        tensors, ctx.rest = list(outputs), {}
        for name, kind in self.types.items():
            x = getattr(arguments, name)
            if kind in ("Tensor", "Tensor?"):
                tensors.append(x)
            elif kind == "Tensor[]":
                tensors += x
                ctx.rest[name] = len(x)
            else:
                ctx.rest[name] = x
        ctx.outputs = len(outputs)
        ctx.save_for_backward(*tensors)
        if forward_mode_active():
            ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    def saved(self, ctx: Any) -> tuple[Any, list[Any]]:
        """The arguments by name and the outputs that `save` stored."""
        tensors = iter(ctx.saved_tensors)
        outputs = [next(tensors) for _ in range(ctx.outputs)]
        arguments: list[Any] = []
        for name, kind in self.types.items():
            if kind in ("Tensor", "Tensor?"):
                arguments.append(next(tensors))
            elif kind == "Tensor[]":
                arguments.append([next(tensors) for _ in range(ctx.rest[name])])
            else:
                arguments.append(ctx.rest[name])
        return self.bind(*arguments), outputs

    def needs(self, ctx: Any) -> Any:
        """By name, whether the argument needs a gradient."""
        return self.bind(*ctx.needs_input_grad)

    def gradients(self, by_name: Mapping[str, Any]) -> tuple[Any, ...]:
        """A gradient per argument; None for those that are not in `by_name`."""
        return tuple(by_name.get(name) for name in self.types)

    def with_lists(self, backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        """`backward` for `register`: torch.library needs a list of gradients for each argument that is a list."""

        def wrapped(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
            gradients = dict(zip(self.types, backward(ctx, *cotangents), strict=True))
            for name, kind in self.types.items():
                if kind == "Tensor[]":
                    gradients[name] = [None] * ctx.rest[name]
                elif kind == "SymInt[]" and not ctx.rest[name]:
                    gradients[name] = []
            return tuple(gradients.values())

        return wrapped
