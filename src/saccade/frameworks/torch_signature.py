"""Operators by their schemas: arguments by name, what autograd keeps of them, gradients in their order."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any

import torch

Function = Callable[..., Any]


class Signature:
    """saccade::<name>, its arguments and results as a schema writes them: "Tensor q, Tensor? bias, bool decode"."""

    def __init__(self, name: str, arguments: str, results: str) -> None:
        pairs = [argument.rsplit(" ", 1) for argument in arguments.split(", ")]
        self.name, self.arguments, self.results = name, arguments, results
        self.types = {name: kind for kind, name in pairs}
        # its arguments, or anything else that there is one of for each, by name
        self.bind: Any = namedtuple(name, self.types)  # pyright: ignore[reportUntypedNamedTuple]

    def register(self, kernel: Function, fake: Function, setup: Function, backward: Function) -> None:
        """Define the operator. setup and backward: as `torch.library.register_autograd` has them."""
        name = f"saccade::{self.name}"
        torch.library.define(name, f"({self.arguments}) -> ({self.results})")
        torch.library.impl(name, "CompositeExplicitAutograd", kernel)
        torch.library.register_fake(name, fake)
        torch.library.register_autograd(name, backward, setup_context=setup)

    def save(self, ctx: Any, arguments: Any, outputs: tuple[Any, ...] = ()) -> None:
        """Keep a call's arguments, and tensors among its outputs, for `saved`."""
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
        ctx.set_materialize_grads(False)

    def saved(self, ctx: Any) -> tuple[Any, list[Any]]:
        """The arguments that `save` stored, by name, and the outputs."""
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
        """By name, whether a gradient is wanted."""
        return self.bind(*ctx.needs_input_grad)

    def gradients(self, by_name: Mapping[str, Any]) -> tuple[Any, ...]:
        """A gradient for every argument, None for those that are not named."""
        return tuple(by_name.get(name) for name in self.types)

    def with_lists(self, backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        """The same for `register`: torch.library takes lists of tensors apart, and wants a gradient for each."""

        def wrapped(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
            gradients = dict(zip(self.types, backward(ctx, *cotangents), strict=True))
            for name, kind in self.types.items():
                if kind == "Tensor[]":
                    gradients[name] = [None] * ctx.rest[name]
                elif kind == "SymInt[]" and not ctx.rest[name]:
                    gradients[name] = []
            return tuple(gradients.values())

        return wrapped
