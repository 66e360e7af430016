"""A call on slices, checked and described once for all that look alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..backends import choose
from ..errors import Unsupported
from ..frameworks.call import Options, check_mask
from ..frameworks.torch_run import spec
from ..frameworks.torch_state import transforms_active
from ..mask import Mask
from ..mask.contents import host
from ..mask.memo import Memo
from ..operands import Side
from ..problem import Problem, describe
from .comm import Like, Peers
from .layout import Layout, Runs, count, runs_of
from .local import Local
from .schedule import Schedule, make_schedule

_KEPT = Memo(64)
_DIGESTS = Memo(64)
BACKENDS = ("cpu", "triton")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class DistributedCall:
    """What calls with these shapes, this mask and these ranks have in common. signature: the same on every rank."""

    what: str
    peers: Peers
    schedule: Schedule
    problem: Problem
    local: Local
    signature: str

    def keys(self, block: int) -> list[Like]:
        """Shapes and dtypes of a block's keys and values."""
        p, n = self.problem, self.schedule.counts[block]
        dtype = getattr(torch, p.dtype)
        return [Like((p.B, n, p.Hk, p.D), dtype), Like((p.B, n, p.Hk, p.Dv), dtype)]


def untraced(function: Function) -> Function:
    """A function that torch.compile calls between its graphs: messages are no part of them."""
    disabled: Any = torch.compiler.disable
    return disabled(function)


def prepare(
    what: str, peers: Peers, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, side: Side, options: Options,
    layout: Layout, length: int | None,
) -> DistributedCall:  # fmt: skip
    """The setting of a call, or the one kept of an equal call. Raises TypeError, ValueError and Unsupported."""
    refuse(side, options, (q, k, v))
    n = q.shape[1] if q.dim() == 4 else 0
    T = n * peers.world if length is None else int(length)
    runs = runs_of(layout, peers.world, T)
    key = (
        what, id(peers), q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, runs,
        options, side.map(lambda x: (x.shape, x.dtype, x.device)),
    )  # fmt: skip
    if mask is not None and not isinstance(mask, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"mask is {type(mask).__name__}; expected None or an expression of saccade.mask")
    place, found = _KEPT.get(mask, key)
    if found is None:
        problem = describe(
            spec(q), spec(k), spec(v), side=side.map(spec), scale=options.scale, softcap=options.softcap,
            needs_grad=True,
        )  # fmt: skip
        _check_slice(problem, runs, peers.rank, length, layout)
        found = _make(what, peers, problem, mask, runs, T, options.backend)
        _KEPT.put(mask, place, found)
    return found


def refuse(side: Side, options: Options, tensors: tuple[Any, ...]) -> None:
    """Raises Unsupported, with every reason, for what no strategy offers."""
    reasons: list[str] = []
    if side.bias is not None:
        reasons.append("a bias lies at whole rows and columns: leave it out, or call saccade.attention on one rank")
    if options.dropout:
        reasons.append("dropout draws by local rows and keys: leave it out")
    if options.backend not in (None, *BACKENDS):
        reasons.append(f"backend {options.backend!r} is not one of {', '.join(BACKENDS)}: leave it out")
    if not all(isinstance(x, Tensor) for x in tensors):
        raise TypeError(f"q, k, v are {', '.join(type(x).__name__ for x in tensors)}; expected torch tensors")
    if transforms_active():
        reasons.append("torch.func transforms do not reach other ranks: call it outside of them")
    if reasons:
        raise Unsupported("distributed", reasons)


def _check_slice(problem: Problem, runs: Runs, rank: int, length: int | None, layout: Layout) -> None:
    if problem.Tq != problem.Tk:
        raise ValueError(f"q has {problem.Tq} rows and k {problem.Tk}; expected the same positions in both")
    if problem.Tq != count(runs[rank]):
        total = (
            f"length = {length}"
            if length is not None
            else f"{len(runs)} slices of {problem.Tq}, for no length is given"
        )
        raise ValueError(
            f"rank {rank} has a slice of {problem.Tq} positions; layout {layout!r} gives it {count(runs[rank])} of "
            f"{total}: cut q, k and v by `shard`, and give length= where slices differ"
        )


def _make(
    what: str, peers: Peers, whole: Problem, mask: Mask | None, runs: Runs, T: int, backend: str | None
) -> DistributedCall:  # fmt: skip
    # sinks join once, after the ranks' parts
    p = replace(whole, scores=replace(whole.scores, sinks=False))
    if mask is not None:
        check_mask(mask, replace(p, Tq=T, Tk=T))
    chosen = choose(p, backend)
    schedule = make_schedule(mask, p.B, p.Hq, T, runs)
    fields = {
        "strategy": what, "B": p.B, "T": T, "heads": f"{p.Hq}/{p.Hk}", "sizes": f"{p.D}/{p.Dv}", "dtype": p.dtype,
        "scale": p.scores.scale, "softcap": p.scores.softcap, "sinks": whole.scores.sinks,
        "layout": digest(runs), "mask": fingerprint(mask),
    }  # fmt: skip
    signature = "; ".join(f"{name} {value}" for name, value in fields.items())
    return DistributedCall(what, peers, schedule, p, Local(schedule, peers.rank, p, chosen), signature)


def fingerprint(mask: Mask | None) -> str:
    """A mask as text that tells it from others, arrays by a hash of their contents."""
    if mask is None:
        return "none"
    key, found = _DIGESTS.get(mask, ())
    if found is None:
        structure, ints, data = mask.flatten()
        contents = hashlib.sha256(repr(ints).encode())
        for array in data:
            array = np.ascontiguousarray(host(array))
            contents.update(f"{array.shape}".encode() + array.astype(np.int64).tobytes())
        found = f"{structure[:200]} {digest(structure)} {contents.hexdigest()[:16]}"
        _DIGESTS.put(mask, key, found)
    return found


def digest(value: object) -> str:
    """A short hash of what a value prints."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]
