"""A call on slices, checked and described once for all calls of the same kind."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..backends import choose
from ..errors import Unsupported
from ..frameworks.call import check_mask
from ..frameworks.torch_run import spec
from ..frameworks.torch_state import transforms_active
from ..mask import Mask
from ..mask.algebra import selected
from ..mask.contents import host
from ..mask.memo import Memo
from ..operands import Options, Request
from ..problem import Problem, check_kind, describe
from .comm import Like, Peers
from .layout import Layout, Runs, count, runs_of
from .local import Local
from .schedule import Schedule, make_schedule

_CALLS = Memo(64)
_DIGESTS = Memo(64)
# numbers that are mixed at a time, on a CPU so few that one thread keeps them in its cache; and the factors of
# SplitMix64 (Steele et al., 2014) as signed numbers
_CHUNK, _CHUNK_CPU = 1 << 22, 1 << 14
_ODD = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
BACKENDS = ("cpu", "triton")
HEADS = 'call saccade.distributed.attention(..., strategy="ulysses")'
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class DistributedCall:
    """A checked call on slices, for all calls with the same shapes, mask and ranks; all ranks have one signature."""

    what: str
    peers: Peers
    schedule: Schedule
    problem: Problem
    local: Local
    signature: str

    def keys(self, block: int) -> list[Like]:
        """Shapes and dtypes of the keys and values of a block."""
        p, n = self.problem, self.schedule.counts[block]
        dtype = getattr(torch, p.dtype)
        return [Like((p.B, n, p.Hk, p.D), dtype), Like((p.B, n, p.Hk, p.Dv), dtype)]


class Partition(NamedTuple):
    """How a sequence is divided among the ranks of a group. length: of the whole; None if all slices are equal."""

    peers: Peers
    layout: Layout
    length: int | None


def untraced(function: Function) -> Function:
    """A function that torch.compile calls between its graphs, because messages cannot be traced."""
    disabled: Any = torch.compiler.disable
    return disabled(function)


def prepare(what: str, partition: Partition, q: Tensor, k: Tensor, v: Tensor, request: Request) -> DistributedCall:
    """Describe, plan and schedule a call, or return an equal one from the cache.

    Raises TypeError, ValueError and Unsupported.
    """
    (peers, layout, length), (mask, side, options, _) = partition, request
    refuse(request, (q, k, v))
    n = q.shape[1] if q.dim() == 4 else 0
    T = n * peers.world if length is None else int(length)
    runs = runs_of(layout, peers.world, T)
    arrays = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
    key = what, id(peers), arrays, runs, options, side.map(lambda x: (x.shape, x.dtype, x.device))
    place, call = _CALLS.get(mask, key)
    if call is None:
        # the mask is for the whole sequence
        of_slice = Request(None, side.map(spec), Options(options.scale, options.softcap))
        problem = describe(spec(q), spec(k), spec(v), of_slice, grads=frozenset())
        _check_slice(problem, runs, partition)
        call = _make(what, peers, problem, mask, runs, T, options.backend)
        _CALLS.put(mask, place, call)
    return call


def refuse(request: Request, tensors: tuple[Any, ...]) -> None:
    """Raise Unsupported, with every reason, for arguments that no strategy supports; TypeError for other types."""
    check_kind(request.mask)
    reasons: list[str] = []
    options = request.options
    if request.side.bias is not None:
        reasons.append(f"a bias lies at whole rows and columns: {HEADS}")
    if selected(request.mask) is not None:
        reasons.append(f"lists of selected keys are those of whole rows: {HEADS}")
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


def _check_slice(problem: Problem, runs: Runs, partition: Partition) -> None:
    rank, (_, layout, length) = partition.peers.rank, partition
    if problem.Tq != problem.Tk:
        raise ValueError(f"q has {problem.Tq} rows and k {problem.Tk}; expected the same positions in both")
    if problem.Tq != count(runs[rank]):
        total = (
            f"length = {length}"
            if length is not None
            else f"{len(runs)} slices of {problem.Tq}, because length is not given"
        )
        raise ValueError(
            f"rank {rank} has a slice of {problem.Tq} positions; layout {layout!r} gives it {count(runs[rank])} of "
            f"{total}: cut q, k and v with `shard`, and give length= if slices differ"
        )


def _make(
    what: str, peers: Peers, whole: Problem, mask: Mask | None, runs: Runs, T: int, backend: str | None
) -> DistributedCall:
    # sinks are added once, after the partial results of all ranks
    p = replace(whole, scores=replace(whole.scores, sinks=False))
    if mask is not None:
        check_mask(mask, replace(p, Tq=T, Tk=T))
    chosen = choose(p, backend)
    schedule = make_schedule(mask, p.B, p.Hq, T, runs)
    sizes = f"B {p.B}; T {T}; heads {p.Hq}/{p.Hk}; sizes {p.D}/{p.Dv}; dtype {p.dtype}"
    scores = f"scale {p.scores.scale}; softcap {p.scores.softcap}; sinks {whole.scores.sinks}"
    signature = f"strategy {what}; {sizes}; {scores}; layout {digest(runs)}; mask {fingerprint(mask)}"
    return DistributedCall(what, peers, schedule, p, Local(schedule, peers.rank, p, chosen), signature)


def fingerprint(mask: Mask | None) -> str:
    """A mask as text that identifies it; arrays are represented by a hash of their contents."""
    if mask is None:
        return "none"
    key, text = _DIGESTS.get(mask, ())
    if text is None:
        structure, ints, data = mask.flatten()
        contents = [(tuple(array.shape), _mixed(array)) for array in data]
        text = f"{structure[:200]} {digest(structure)} {digest((ints, contents))}"
        _DIGESTS.put(mask, key, text)
    return text


def digest(value: object) -> str:
    """A short hash of the `repr` of a value."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def _mixed(array: Any) -> int:
    # 64 bits that depend on all numbers of an array and their places, computed where the array is: lists of selected
    # keys are large, and new in every call
    x = array.detach() if isinstance(array, Tensor) else torch.from_numpy(np.array(host(array)))
    x = x.reshape(-1)
    chunk = _CHUNK_CPU if x.is_cpu else _CHUNK
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, len(x), chunk):
        part = x[start : start + chunk].to(torch.int64)
        part = part + _ODD[0] * torch.arange(start, start + len(part), device=x.device)
        for odd in _ODD[1:]:
            part = (part ^ (part >> 30)) * odd
        total += (part ^ (part >> 31)).sum()
    return int(total)
