"""Ring attention: queries stay, keys travel from rank to rank, and partial results are merged by lse."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..arrays import ArrayOrTuple
from ..backends import Outputs
from ..frameworks.torch_state import autocast
from ..mask import Mask
from ..operands import Options, Request, Side
from .call import DistributedCall, Partition, prepare, untraced
from .comm import GroupCall, Pending, peers_of
from .layout import Layout
from .local import OverRanks, Sums, Total, Way
from .parcel import Like, Parcel, pack, size_of
from .refusal import taking_part


@untraced
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    *,
    layout: Layout = "zigzag",
    group: Any = None,
    length: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Any = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    overlap: bool = True,
    backend: str | None = None,
) -> ArrayOrTuple:
    """Exact attention of a sequence that is divided among the ranks of a group, in O(T / P) memory per rank.

    Every rank calls this function with its slices, cut by `shard`, and gets its slice of the result. At step t rank r
    works on the keys of rank r - t while those of the next step arrive; blocks that no later rank sees are not sent on
    (Liu et al., 2023). q, k, v and sinks have gradients; those of keys travel with the keys.

    Args:
        q: [B, n, Hq, D], this rank's queries, a torch tensor of float32, bfloat16, float16 or float64.
        k: [B, n, Hk, D], the keys at the same positions; Hk divides Hq.
        v: [B, n, Hk, Dv].
        mask: of the whole sequence, Tq = Tk = T, the same on every rank; any expression of `saccade.mask`.
        layout: "zigzag" (balances a causal mask), "contiguous" (stops early with a window; required by recurrences),
            "striped", or a list of at most 16 runs (start, step, length) per rank.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all ranks; gloo or NCCL.
        length: T, if the slices differ in length; None for n · P.
        scale, softcap: as in `saccade.attention`.
        sinks: [Hq]. Its gradient is this rank's contribution: sum it over the ranks, as for any parameter.
        bias, dropout: not supported, nor are masks with `select`; they raise Unsupported. `attention` with the strategy
            "ulysses" computes a bias and selected keys.
        return_lse: return (o, lse).
        overlap: False waits for every message before computing, for measurements.
        backend: "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        o [B, n, Hq, Dv] in the dtype of q; with `return_lse` also lse [B, n, Hq], differentiable.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        Unsupported: the backend cannot compute this call.
        PeerError: a rank died, hangs longer than the group's limit, or makes another call; it names rank and step.

    Examples:
        >>> from saccade.distributed import ring_attention, shard  # on every rank, after init_process_group
        >>> q, k, v = (shard(x, layout="zigzag") for x in torch.randn(3, 2, 1024, 8, 64))  # the same on every rank
        >>> o = ring_attention(q, k, v, saccade.mask.causal(), layout="zigzag")
    """
    peers = peers_of(group)
    with taking_part(peers):
        request = Request(mask, Side(bias, sinks=sinks), Options(scale, softcap, dropout, backend=backend))
        q, k, v = autocast(q, k, v)
        setting = prepare("ring attention", Partition(peers, layout, length), q, k, v, request)
        o, lse = OverRanks.apply(q, k, v, sinks, ring(setting, overlap))
    return (o, lse) if return_lse else o


def ring(setting: DistributedCall, overlap: bool) -> Way:
    """The strategy "ring": keys travel from rank to rank, and their gradients with them."""
    return Way(partial(forward, setting, overlap), partial(backward, setting, overlap))


def forward(
    setting: DistributedCall, overlap: bool, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(o, lse) of this rank's rows."""
    local = setting.local
    sums = Sums(q, v.shape[3], local.wide)
    blocks = Blocks(setting, setting.peers.begin(setting.what, setting.signature, q.device), k, v, overlap)
    for step in range(setting.peers.world):
        block, (k, v), pending = blocks.next(step)
        for call in local.calls(block):
            local.forward(sums, call, q, k, v)
        pending.wait()
    return sums.finish(q.dtype, sinks)


class Blocks:
    """Keys and values of one rank after another, fetched ahead into one of three buffers.

    One buffer is in use, one is full, one is being filled. So messages on a GPU wait only for the work of the step
    before last, and need not share the GPU with kernels that occupy it.
    """

    def __init__(self, setting: DistributedCall, call: GroupCall, k: Tensor, v: Tensor, overlap: bool) -> None:
        self.setting, self.call, self.overlap = setting, call, overlap
        self.here: list[Tensor] = [k, v]
        schedule, (rank, P) = setting.schedule, (setting.peers.rank, setting.peers.world)
        first = schedule.moves(rank, 0)
        self.parcel = pack([k, v]) if first else None
        coming = [(rank - t - 1) % P for t in range(P - 1) if schedule.moves((rank - t - 1) % P, t)]
        room = max((size_of(setting.keys(block)) for block in coming), default=0)
        self.rooms = [torch.empty(room, dtype=torch.uint8, device=k.device) for _ in range(min(3, len(coming)))]
        self.received = 0
        self.marks: list[Any] = []

    def next(self, step: int) -> tuple[int, list[Tensor], Pending]:
        """(block, [k, v], messages to wait for before the next step); k and v are empty if nothing came."""
        peers, schedule = self.setting.peers, self.setting.schedule
        P, rank = peers.world, peers.rank
        block, coming = (rank - step) % P, (rank - step - 1) % P
        if step:
            self.here = self.parcel.tensors if self.parcel else []
        sends: dict[int, Parcel] = {}
        if self.parcel is not None and schedule.moves(block, step):
            sends[(rank + 1) % P] = self.parcel
        receives: dict[int, Parcel] = {}
        after = None
        if step + 1 < P and schedule.moves(coming, step):
            room = self.rooms[self.received % 3]
            self.received += 1
            after = Parcel(self.setting.keys(coming), self.call.device, room, coming)
            receives[(rank - 1) % P] = after
        pending = self.call.post(f"step {step}", sends, receives, kind="keys", after=self._mark())
        if not self.overlap:
            pending.wait()
        self.parcel = after
        here = self.here or [torch.empty(0), torch.empty(0)]
        return block, here, pending

    def _mark(self) -> Any:
        # on a GPU, an event at the end of the work before the last step
        if self.call.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        self.marks = [*self.marks[-1:], event]
        return self.marks[0]


def backward(
    setting: DistributedCall, overlap: bool, q: Tensor, k: Tensor, v: Tensor, outputs: Outputs
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of this rank's rows and keys, in their dtype or in the accumulator's."""
    local, peers, mine = setting.local, setting.peers, (k, v)
    what = f"{setting.what}, backward"
    call = peers.begin(what, f"backward; {setting.signature}", q.device)
    blocks = Blocks(setting, call, k, v, overlap)
    dq, *own = (Total(x, local.wide) for x in (q, k, v))
    travelling = Travelling(setting, call, overlap)
    for step in range(peers.world):
        block, (k, v), pending = blocks.next(step)
        parts: list[tuple[slice, Tensor, Tensor]] = []
        for one in local.calls(block):
            dq_part, dk_part, dv_part = local.backward(one, q, k, v, outputs)
            dq.add(one.piece.rows, dq_part)
            parts.append((one.piece.keys, dk_part, dv_part))
        into = own if step == 0 else travelling.arrived(step, block)
        for keys, *of_keys in parts:
            for total, part in zip(into, of_keys, strict=True):
                total.add(keys, part)
        travelling.leave(step, block)
        pending.wait()
    home = travelling.home()
    if home is None:
        return dq.sum(), own[0].sum(), own[1].sum()
    # one pass, which also rounds
    dk, dv = (torch.add(a.sum(), b, out=torch.empty_like(x)) for a, b, x in zip(own, home, mine, strict=True))
    return dq.sum(), dk, dv


class Travelling:
    """Gradients of keys and values, which travel from the first rank that sees a block over the others to its owner."""

    def __init__(self, setting: DistributedCall, call: GroupCall, overlap: bool) -> None:
        self.setting, self.call, self.overlap = setting, call, overlap
        self.rank, self.world = setting.peers.rank, setting.peers.world
        self.here: Parcel | None = None
        self.back: Parcel | None = None
        self.pending: Pending | None = None
        self.coming: Parcel | None = None
        self.sums: list[Total] = []

    def arrived(self, step: int, block: int) -> list[Total]:
        """The sums of the block's gradients so far, from the previous rank; empty ones on the first rank."""
        self._wait()
        self.here, self.coming = self.coming, None
        filled = self.here is not None
        if self.here is None and self.setting.schedule.returns(block, step):
            self.here = Parcel(self._likes(block), self.call.device)
        tensors = self.here.tensors if self.here else []
        self.sums = [Total(x, x.dtype, x, filled) for x in tensors]
        return self.sums

    def leave(self, step: int, block: int) -> None:
        """Send the sums to the next rank, or from the last to the owner, and prepare for those of the next step."""
        schedule, P, rank = self.setting.schedule, self.world, self.rank
        sends: dict[int, Parcel] = {}
        receives: dict[int, Parcel] = {}
        for total in self.sums:
            total.sum()
        if step and self.here is not None and schedule.returns(block, step):
            sends[block if step == schedule.reach[block][1] else (rank + 1) % P] = self.here
        coming = (rank - 1 - step) % P
        if schedule.returns(coming, step) and step < schedule.reach[coming][1]:
            self.coming = receives[(rank - 1) % P] = self._parcel(coming)
        if schedule.returns(rank, step) and step == schedule.reach[rank][1]:
            self.back = receives[(rank + step) % P] = self._parcel(rank)
        self._wait()
        self.pending = self.call.post(f"gradients of step {step}", sends, receives, kind="gradients")
        if not self.overlap:
            self._wait()

    def home(self) -> list[Tensor] | None:
        """The gradients of this rank's own block from the other ranks; None if no other rank sees it."""
        self._wait()
        return None if self.back is None else self.back.tensors

    def _parcel(self, block: int) -> Parcel:
        # the header is that of the first rank that sees the block
        first = (block + self.setting.schedule.reach[block][0]) % self.world
        return Parcel(self._likes(block), self.call.device, origin=first)

    def _likes(self, block: int) -> list[Like]:
        return [like._replace(dtype=self.setting.local.wide) for like in self.setting.keys(block)]

    def _wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
