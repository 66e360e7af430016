"""The mask that travels through a model: a tensor in type and shape, whose contents are an expression of `saccade.mask`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ...errors import Unsupported
from ...mask import Mask

NAME = "saccade"
INSTEAD = 'use attn_implementation="sdpa" (or "eager") for this model'


class Place(NamedTuple):
    """Where the rows and keys of a mask stand: query t at position q_offset + t, key j at kv_offset + j.

    q_offset is an integer, or an integer tensor [1] while torch.compile traces a cache of fixed size.
    """

    B: int
    Tq: int
    Tk: int
    q_offset: Any
    kv_offset: int
    device: Any

    @property
    def offset(self) -> Any:
        """Of queries against keys: query t stands where key t + offset does."""
        offset = self.q_offset - self.kv_offset
        return offset.to(torch.int32).expand(self.B) if isinstance(offset, Tensor) else offset

    def positions(self, axis: str) -> Tensor:
        """[Tq] of the queries or [Tk] of the keys."""
        T, offset = (self.Tq, self.q_offset) if axis == "query" else (self.Tk, self.kv_offset)
        return torch.arange(T, device=self.device) + offset


class Described(Tensor):
    """A mask [B, 1, Tq, Tk] without elements, made by `described`.

    transformers passes masks of four dimensions through a model if they are tensors. This one has the shape, and
    storage for one element, whatever its length. An operation on it raises Unsupported, because a model that computes
    with its mask would compute with that element. What leaves a mask as it is passes, and so do slices of its rows and
    columns, which are masks again.

    It overrides `__torch_function__` alone. torch.compile traces such a subclass and its attributes where one is made
    inside the graph, so that a model compiles whole.

    Attributes:
        mask: the expression.
        place: where its rows and columns stand.
        remake: the same mask at another place.
    """

    mask: Mask
    place: Place
    remake: Callable[[Place], Described]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`func` if it leaves the mask as it is; raises Unsupported otherwise."""
        if func in ASKED:
            return super().__torch_function__(func, types, args, kwargs or {})
        if func in UNCHANGED:
            return args[0]
        if func in MOVED:
            return _moved(func.__name__, *args, **(kwargs or {}))
        if func is Tensor.__getitem__ and isinstance(args[0], Described):
            return _part(*args)
        name = getattr(getattr(func, "__self__", None), "__name__", func.__name__)
        refuse(f"the model computes with its mask ({name}), which has no elements here: {INSTEAD}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Described({self.mask}, {list(self.shape)})"


def described(mask: Mask, place: Place, remake: Callable[[Place], Described]) -> Described:
    """The mask [B, 1, Tq, Tk] of this place that says what `mask` does."""
    one = torch.empty((), dtype=torch.bool, device=place.device)
    made: Any = one.expand(place.B, 1, place.Tq, place.Tk).as_subclass(Described)
    made.mask, made.place, made.remake = mask, place, remake
    return made


def refuse(reason: str) -> NoReturn:
    """Raise Unsupported with this reason. torch.compile gives the reason for the graph break that it makes of it."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=reason)
    raise Unsupported(NAME, [reason])


def _moved(name: str, mask: Described, *args: Any, **kwargs: Any) -> Described:
    device = kwargs.get("device", args[0] if args else name)
    for x in (*args, *kwargs.values()):
        if isinstance(x, (torch.dtype, Tensor)):
            refuse(f"the model casts its mask, which has no elements here: {INSTEAD}")
    there = mask.mask.map_arrays(lambda x: x.to(device) if isinstance(x, Tensor) else x)
    return described(there, mask.place._replace(device=device), lambda place: mask.remake(place).to(device))


def _part(mask: Described, index: Any) -> Described:
    at = mask.place
    given = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in given:
        here = given.index(Ellipsis)
        given[here : here + 1] = [slice(None)] * (5 - len(given))
    given += [slice(None)] * (4 - len(given))
    for x in given:
        if not isinstance(x, slice) or x.step not in (None, 1):
            refuse(f"the model takes {index} of its mask, which has no elements here: {INSTEAD}")
    (first_q, Tq), (first_k, Tk) = _range(given[2], at.Tq), _range(given[3], at.Tk)
    if _range(given[0], at.B) != (0, at.B) or _range(given[1], 1) != (0, 1):
        refuse(f"the model takes some entries of its mask ({index}), which has no elements here: {INSTEAD}")
    moved = at._replace(Tq=Tq, Tk=Tk, q_offset=at.q_offset + first_q, kv_offset=at.kv_offset + first_k)
    return mask.remake(moved)


def _range(part: slice, n: int) -> tuple[int, int]:
    # the first of n that a slice takes, and how many
    first, last = (
        default if x is None else max(x + n, 0) if x < 0 else min(x, n)
        for x, default in ((part.start, 0), (part.stop, n))
    )
    return first, max(last - first, 0)


ASKED = {
    Tensor.shape.__get__, Tensor.ndim.__get__, Tensor.device.__get__, Tensor.requires_grad.__get__, Tensor.requires_grad.__set__,
    Tensor.is_leaf.__get__, Tensor.grad_fn.__get__, Tensor.is_cuda.__get__, Tensor.is_sparse.__get__, Tensor.layout.__get__, Tensor.dim, Tensor.size,
    Tensor.__hash__, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex,
}
UNCHANGED = {Tensor.contiguous, Tensor.detach}
MOVED = {Tensor.to, Tensor.cuda, Tensor.cpu}
