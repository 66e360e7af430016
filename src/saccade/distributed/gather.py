"""Keys of all ranks gathered on each: O(T) memory for keys, one exchange each way, rows stay where they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .local import WHOLE, Sums, row_terms, sinks_gradient
from .parcel import Parcel, pack
from .setting import Setting
from .sharding import put, take


class Gathered(torch.autograd.Function):
    """(o, lse) of this rank's rows over gathered keys."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, setting: Setting
    ) -> tuple[Tensor, Tensor]:
        whole = _gathered(setting, k, v, "")
        sums = Sums(q, v.shape[3], setting.local.wide)
        for call in setting.local.calls(WHOLE):
            setting.local.forward(sums, call, q, *whole)
        o, lse = sums.finish(q.dtype, sinks)
        ctx.save_for_backward(q, k, v, o, lse, sinks)
        ctx.setting = setting
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, o, lse, sinks = ctx.saved_tensors
        setting: Setting = ctx.setting
        do = torch.zeros_like(o) if do is None else do
        delta = row_terms(do, o, lse, dlse)
        # gathered again: between the passes a rank holds its own keys alone
        k, v = _gathered(setting, k, v, "backward, keys; ")
        wide = setting.local.wide
        dq, dk, dv = (x.new_zeros(x.shape, dtype=wide) for x in (q, k, v))
        for call in setting.local.calls(WHOLE):
            parts = setting.local.backward(call, do, q, k, v, o, lse, delta)
            dq[:, call.piece.rows] += parts[0]
            dk[:, call.piece.keys] += parts[1]
            dv[:, call.piece.keys] += parts[2]
        dk, dv = _returned(setting, dk, dv)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), sinks_gradient(ctx, sinks, lse, delta), None


def _gathered(setting: Setting, k: Tensor, v: Tensor, what: str) -> list[Tensor]:
    # only what a rank sees is sent to it; the rest stays 0 and unread
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


def _returned(setting: Setting, dk: Tensor, dv: Tensor) -> list[Tensor]:
    # each rank's share of a block's gradients goes to its owner, who adds them by rank
    peers, sees = setting.peers, setting.schedule.sees
    call = peers.begin(f"{setting.what}, backward", f"backward; {setting.signature}", dk.device)
    ranks = [r for r in range(peers.world) if r != peers.rank]
    sends = {
        r: pack([take(x, setting.schedule.runs[r], 1) for x in (dk, dv)]) for r in ranks if sees[peers.rank, r]
    }  # fmt: skip
    likes = [like._replace(dtype=setting.local.wide) for like in setting.keys(peers.rank)]
    parts = {r: Parcel(likes, dk.device) for r in ranks if sees[r, peers.rank]}
    call.post("gradients", sends, parts).wait()
    own = [take(x, setting.schedule.runs[peers.rank], 1).clone() for x in (dk, dv)]
    for r in sorted(parts):
        for x, part in zip(own, parts[r].tensors, strict=True):
            x += part
    return own
