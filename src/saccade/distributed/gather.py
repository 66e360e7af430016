"""Attention with the keys of all ranks gathered on each: O(T) memory for keys, one exchange per direction."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..backends import Outputs
from .call import DistributedCall
from .local import WHOLE, Sums, Total, Way
from .parcel import Parcel, pack
from .sharding import put, take


def gathered(setting: DistributedCall) -> Way:
    """The strategy "gather": keys of all ranks arrive once, and their gradients return once."""
    return Way(partial(_forward, setting), partial(_backward, setting))


def _forward(setting: DistributedCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    whole = _gathered(setting, k, v, "")
    sums = Sums(q, v.shape[3], setting.local.wide)
    for call in setting.local.calls(WHOLE):
        setting.local.forward(sums, call, q, *whole)
    return sums.finish(q.dtype, sinks)


def _backward(
    setting: DistributedCall, q: Tensor, k: Tensor, v: Tensor, outputs: Outputs
) -> tuple[Tensor, Tensor, Tensor]:
    # gathered again, because a rank stores only its own keys between the passes
    k, v = _gathered(setting, k, v, "backward, keys; ")
    totals = [Total(x, setting.local.wide) for x in (q, k, v)]
    for call in setting.local.calls(WHOLE):
        where = call.piece.rows, call.piece.keys, call.piece.keys
        parts = setting.local.backward(call, q, k, v, outputs)
        for total, at, part in zip(totals, where, parts, strict=True):
            total.add(at, part)
    dq, dk, dv = (total.sum() for total in totals)
    return dq, *_returned(setting, dk, dv)


def _gathered(setting: DistributedCall, k: Tensor, v: Tensor, what: str) -> list[Tensor]:
    # only keys that a rank sees are sent to it; the others stay 0 and are not read
    peers, sees = setting.peers, setting.schedule.sees
    call = peers.begin(setting.what, f"{what}{setting.signature}", k.device)
    mine = pack([k, v])
    ranks = [r for r in range(peers.world) if r != peers.rank]
    parts = {r: Parcel(setting.keys(r), k.device) for r in ranks if sees[peers.rank, r]}
    call.post("keys", {r: mine for r in ranks if sees[r, peers.rank]}, parts).wait()
    T = sum(setting.schedule.counts)
    whole = [x.new_zeros((x.shape[0], T, *x.shape[2:])) for x in (k, v)]
    for r, part in [*parts.items(), (peers.rank, mine)]:
        for x, own in zip(whole, part.tensors, strict=True):
            put(x, own, setting.schedule.runs[r], 1)
    return whole


def _returned(setting: DistributedCall, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    # each rank sends its partial gradients of a block to the owner, which adds them in the order of ranks
    peers, sees = setting.peers, setting.schedule.sees
    call = peers.begin(f"{setting.what}, backward", f"backward; {setting.signature}", dk.device)
    ranks = [r for r in range(peers.world) if r != peers.rank]
    sends = {r: pack([take(x, setting.schedule.runs[r], 1) for x in (dk, dv)]) for r in ranks if sees[peers.rank, r]}
    likes = [like._replace(dtype=setting.local.wide) for like in setting.keys(peers.rank)]
    parts = {r: Parcel(likes, dk.device) for r in ranks if sees[r, peers.rank]}
    call.post("gradients", sends, parts).wait()
    own = [take(x, setting.schedule.runs[peers.rank], 1).clone() for x in (dk, dv)]
    for r in sorted(parts):
        for x, part in zip(own, parts[r].tensors, strict=True):
            x += part
    return own[0], own[1]
