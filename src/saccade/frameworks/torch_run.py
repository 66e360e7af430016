"""Tensors in, tensors out, without autograd: the step from torch's arrays to a backend's and back."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..backends import Extras, Inputs, Outputs
from ..mask import Mask
from ..operands import NO_SIDE, Side, Spec
from ..problem import Problem, check_gradients, describe
from .call import Options, Ready, find, make
from .source import STRIDED, Source
from .torch_state import capsule

NONE = Extras()
_WORDS = 1 << 64
# torch's number and ours when a call last looked
_threads: tuple[int, int] | None = None


def spec(x: Tensor) -> Spec:
    """Shape, dtype and device of a tensor by their common names."""
    return Spec(tuple(x.shape), str(x.dtype)[6:], str(x.device))


def prepare(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, side: Side, options: Options, needs_grad: bool,
    bias_grad: bool, source: Source = STRIDED,
) -> Ready:  # fmt: skip
    """Check, choose and plan, or find this kind of call in the table; source tells what k and v are."""
    key = (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, options, needs_grad,
        None if side is NO_SIDE else (bias_grad, *side.map(_kind)),
        None if source is STRIDED else source.key,
    )  # fmt: skip
    found = find(mask, key)
    if found is None:
        problem = describe_tensors(q, k, v, mask, side, options, needs_grad, bias_grad, source)
        found = make(mask, key, problem, options.backend)
    return found


def _kind(x: Tensor) -> Any:
    return x.shape, x.dtype, x.device


def describe_tensors(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, side: Side, options: Options, needs_grad: bool = False,
    bias_grad: bool = False, source: Source = STRIDED,
) -> Problem:  # fmt: skip
    """`describe` of tensors; their sizes may be symbolic."""
    of_q, of_k, of_v = spec(q), spec(k), spec(v)
    if source is not STRIDED:
        of_k, of_v = source.spec(of_k, of_q.dtype), source.spec(of_v, of_q.dtype)
    return describe(
        of_q, of_k, of_v, source=source.kind, quantised=source.quantised, mask=mask, side=side.map(spec),
        scale=options.scale, softcap=options.softcap, dropout=options.dropout, descale=options.descale,
        needs_grad=needs_grad, bias_grad=bias_grad, deterministic=options.deterministic,
    )  # fmt: skip


def check_rows(problem: Problem, do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None) -> None:
    """`check_gradients` of tensors."""
    given = {"do": do, "o": o, "lse": lse, "dlse": dlse}
    check_gradients(problem, {name: spec(x) for name, x in given.items() if x is not None})


def forward(
    call: Ready, q: Tensor, k: Tensor, v: Tensor, side: Side, seed: int, decode: bool = False, want_lse: bool = True,
    descale: Any = None, source: Source = STRIDED,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, lse) of tensors that fit `call`; lse may be left out (None) where nobody wants it."""
    problem, plan, backend, direct = call
    threads = follow_threads(backend)
    short = direct.get(decode)
    if short is None:
        short = direct[decode] = backend.direct(problem, plan, Tensor, decode) or _nothing
    found = short(threads, q, k, v, want_lse)
    if found is not None:
        return found
    give = giver(backend)
    extras = _extras(give, side, seed)
    if descale is not None:
        extras = extras._replace(descale=descale)
    extras = source.carried(extras, give)
    compute = backend.decode if decode else backend.forward
    o, lse = compute(problem, plan, Inputs(give(dense(q)), give(dense(k)), give(dense(v)), extras))
    return tensor(o, q.dtype), tensor(lse)


def decode(
    call: Ready,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    source: Source = STRIDED,
) -> tuple[Tensor, Tensor]:
    """(o, lse) of the last queries of sequences that are as long as `lengths` [B] on the device says."""
    problem, plan, backend, _ = call
    extras = source.carried(Extras(sinks=sinks, lengths=lengths))
    return backend.decode(problem, plan, Inputs(dense(q), dense(k), dense(v), extras))


def _nothing(*_: Any) -> None:
    return None


def backward(
    call: Ready, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    side: Side, seed: int, grads: Set[str],
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
    """(dq, dk, dv, extras) of tensors that fit `call`; extras holds what `grads` names."""
    problem, plan, backend, direct = call
    threads = follow_threads(backend)
    short = getattr(direct.get(False), "backward", None)
    if short is not None:
        found = short(threads, plan.owners, do, q, k, v, o, lse, dlse)
        if found is not None:
            return (*found, {})
    give = giver(backend)
    extras = _extras(give, side, seed)
    inputs = Inputs(give(dense(q)), give(dense(k)), give(dense(v)), extras)
    outputs = Outputs(give(dense(o)), give(dense(lse)), give(dense(do)), None if dlse is None else give(dense(dlse)))
    dq, dk, dv, more = backend.backward(problem, plan, inputs, outputs, grads=grads)
    extra = {name: tensor(x) for name, x in more.items()}
    return tensor(dq, q.dtype), tensor(dk, q.dtype), tensor(dv, q.dtype), extra


def widen(q: Tensor, side: Side) -> Side:
    """The side arrays in the accumulator's dtype for inputs like q, differentiably."""
    if side is NO_SIDE:
        return side
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    return side.map(lambda x: x.to(dtype))


def signed(seed: int) -> int:
    """A 64-bit seed as the int64 that a tensor can hold; `int(tensor) % 2**64` undoes it."""
    return seed - _WORDS if seed >= _WORDS // 2 else seed


def unsigned(seed: Tensor | None) -> int:
    """The 64-bit seed that an int64 tensor holds, 0 for None."""
    return 0 if seed is None else int(seed) % _WORDS


def _extras(give: Callable[[Tensor], Any], side: Side, seed: int) -> Extras:
    if side is NO_SIDE and not seed:
        return NONE
    if side.slopes is not None and side.slopes.dim() == 1:
        side = side._replace(slopes=side.slopes[None])
    return Extras(*side.map(give), seed)


def dense(x: Tensor) -> Tensor:
    """x with a contiguous last dimension, the only one whose stride kernels do not read."""
    return x.contiguous() if x.stride(-1) != 1 and x.shape[-1] != 1 else x


def giver(backend: Any) -> Callable[[Tensor], Any]:
    """What makes of a tensor the array that this backend takes."""
    return tensor if backend.TAKES_TENSORS else lent


def lent(x: Tensor) -> Any:
    """A CPU tensor as the NumPy array that kernels take, its memory shared; a tensor elsewhere as it is."""
    if not x.is_cpu:
        return x
    if x.is_neg():
        x = x.resolve_neg()
    return np.from_dlpack(_Lent(x.view(torch.uint16) if x.dtype is torch.bfloat16 else x))


class _Lent:
    """A tensor that NumPy may read. Unlike `Tensor.numpy` it leaves the storage free to be resized, as FSDP does."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return capsule(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def tensor(x: Any, dtype: torch.dtype | None = None) -> Tensor:
    """What a backend returned as a tensor; numbers that travelled in a carrier are seen in `dtype` again."""
    if isinstance(x, Tensor):
        return x
    x = torch.from_numpy(x)
    return x if dtype is None or x.dtype is dtype else x.view(dtype)


def _openmp() -> str | None:
    # the runtime that torch carries, on systems that tell
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if "libgomp" in line}
    except OSError:
        return None
    return next((path for path in sorted(paths) if "/torch" in path), None)


def follow_threads(backend: Any) -> int:
    """The threads of a call: of torch's setting and ours the one made last; before either changes, the smaller."""
    global _threads
    host = backend.THREADS
    if host is None:
        return 1
    threads, ours = torch.get_num_threads(), host.number
    if _threads == (threads, ours):
        return ours
    if _threads is None or _threads[0] != threads:
        ours = min(threads, ours) if _threads is None else threads
        host.set_num_threads(ours)
    # where the numbers agree; a runtime asked for another one makes and ends threads at every change of hands
    host.join_team(_openmp() if ours == threads else None)
    _threads = threads, ours
    return ours
