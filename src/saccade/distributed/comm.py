"""Messages between the ranks of a group, with a time limit and errors that name the rank and the step.

    peers = peers_of(group)                  # once per group: a ProcessGroup, a 1-D DeviceMesh, or None for the world
    call = peers.begin("ring", signature)    # on every rank with the same text; compared when a rank first uses it
    pending = call.post("step 1", {to: parcel}, {source: empty_parcel})
    ...                                      # compute here while the messages travel
    pending.wait()                           # the parcels to receive now contain the messages

A `Parcel` is one buffer with a header and tensors. The header contains the sender's call number, the step and a hash of
the signature, so that later messages are checked without further messages. All ranks post in the same order.

A public call runs inside `taking_part(peers)`: if a rank raises in it, the others soon raise too (`refusal.py`).

With gloo `wait` returns when the messages have arrived, or raises `PeerError` after the limit. With NCCL `wait` makes
the current stream wait and returns; headers are read when they arrive, a thread (`watch.py`) detects missing messages,
and the next call on this group raises the error.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import PeerError
from .parcel import MARK, Like, Parcel, hashed, pack
from .refusal import disagreement, first_line, refusal
from .watch import Waiter, Watch

# parcels by rank of the group
Parcels = Mapping[int, Parcel]
# seconds that a rank may keep others waiting
LIMIT = 60.0
# the most signatures that are remembered
_MOST_SIGNATURES = 4096
AGREEMENT = "agreement"


class Peers:
    """The ranks of one group as seen by this rank. limit: seconds that any rank may keep this one waiting."""

    def __init__(self, group: Any, limit: float = LIMIT) -> None:
        # a strong reference would keep the group and its threads alive after destroy_process_group
        self._group, self.limit = weakref.ref(group), limit
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        # messages and bytes sent since the group was first used, for tests and measurements
        self.messages = self.bytes = 0
        self.calls = 0
        # signatures that all ranks agreed on, and this rank's last note in the store
        self.known: dict[str, bool] = {}
        self.agreed = ""
        # GPUs with a communicator; all ranks must take part in its first use, even those without a message
        self.warm: set[torch.device] = set()
        self.streams: dict[torch.device, Any] = {}
        self.store = group.get_group_store()
        self.watch, self.waiter = Watch(self._group), Waiter()

    @property
    def group(self) -> Any:
        """The process group; raises RuntimeError after it was destroyed."""
        group = self._group()
        if group is None:
            raise RuntimeError("the process group was destroyed; make caches and contexts again with a new group")
        return group

    def begin(self, what: str, signature: str, device: torch.device) -> GroupCall:
        """Start a call that every rank of the group makes with the same signature; what: its name in errors.

        When a rank first uses a signature, the ranks compare it through the group's store. Raises PeerError if another
        rank has another signature or none within the limit, and for errors on the device in an earlier call.
        """
        self.watch.check()
        self.calls += 1
        call = GroupCall(self, what, signature, device)
        if signature not in self.known:
            self._agree(call)
            self.known[signature] = True
            # all ranks forget the same signatures, because all make the same calls
            if len(self.known) > _MOST_SIGNATURES:
                del self.known[next(iter(self.known))]
        return call

    def stream(self, device: torch.device) -> Any:
        """On a GPU, a stream for messages that later work of the current stream need not wait for."""
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device, priority=-1)
        return self.streams[device]

    def _agree(self, call: GroupCall) -> None:
        names = [self._note(call, r) for r in range(self.world)]
        store, late = self.store, ""
        store.set(names[self.rank], call.signature.encode())
        try:
            store.wait(names, timedelta(seconds=self.limit))
        except RuntimeError as error:
            late = first_line(error)
        for r, theirs in self._reports(names).items():
            if theirs != call.signature:
                raise self.fail(call, AGREEMENT, r, disagreement(theirs, call.signature))
        missing = [r for r in range(self.world) if not self.has(names[r])]
        if late and missing:
            raise self.fail(call, AGREEMENT, missing[0], f"nothing came for {self.limit:g} s")
        # ranks that reach this point have read the earlier notes
        if self.agreed:
            self.store.delete_key(self.agreed)
        self.agreed = names[self.rank]
        if call.device.type == "cuda" and call.device not in self.warm:
            dist.all_reduce(torch.zeros(1, device=call.device), group=self.group)
            self.warm.add(call.device)

    def _note(self, call: GroupCall, rank: int) -> str:
        return f"saccade/call/{call.number}/{rank}"

    def has(self, name: str) -> bool:
        """Whether the group's store has an entry of this name."""
        try:
            return self.store.check([name])
        except RuntimeError:
            # the store ends with the process that hosts it
            return False

    def _reports(self, names: list[str]) -> dict[int, str]:
        # the entries of these names in the store, by rank
        return {r: self.store.get(name).decode() for r, name in enumerate(names) if self.has(name)}

    def fail(self, call: GroupCall, step: str, rank: int, why: str) -> PeerError:
        """The error to raise, which names the rank at fault; it is reported to the other ranks through the store."""
        error = PeerError(call.what, step, rank, why, self.rank)
        names = [f"saccade/failed/{call.number}/{r}" for r in range(self.world)]
        try:
            self.store.set(names[self.rank], str(error).encode())
            # all waiting ranks notice the error at about the same time; a rank that reports nothing is the one at fault
            end = time.monotonic() + min(1.0, self.limit / 4)
            while time.monotonic() < end and not self.store.check(names):
                time.sleep(0.02)
            error.reports = {r: text for r, text in self._reports(names).items() if r != self.rank}
            error.silent = tuple(r for r in range(self.world) if r != self.rank and r not in error.reports)
            for r, theirs in self._reports([self._note(call, r) for r in range(self.world)]).items():
                # the signature was new to that rank but not to others
                if theirs != call.signature and step != AGREEMENT:
                    error.rank, error.why = r, disagreement(theirs, call.signature)
        except RuntimeError:
            pass
        return error


class GroupCall:
    """One call of a group, which numbers its messages and checks those that arrive."""

    def __init__(self, peers: Peers, what: str, signature: str, device: torch.device) -> None:
        self.peers, self.what, self.signature, self.device = peers, what, signature, device
        self.key, self.number = hashed(signature), peers.calls

    def post(self, step: str, sends: Parcels, receives: Parcels, *, kind: str = "", after: Any = None) -> Pending:
        """Start sending parcels to ranks of the group and receiving parcels, both by rank.

        No parcel may be written to before `wait` of the result. step: the name of these messages in errors. kind: must
        equal that of the rank that sent a message first; step by default. after: on a GPU, an event of the current
        stream after which buffers may be read and written; None waits for all queued work.
        """
        if after is not None:
            with torch.cuda.stream(self.peers.stream(self.device)):
                torch.cuda.current_stream().wait_event(after)
                return self.post(step, sends, receives, kind=kind)
        group, kind = self.peers.group, kind or step
        ops: list[dist.P2POp] = []
        if new := [parcel for parcel in dict.fromkeys(sends.values()) if parcel.origin is None]:
            me = self.peers.rank
            head = torch.tensor([MARK, self.key, self.number, hashed(kind), me])
            for parcel in new:
                parcel.origin = me
                parcel.head.copy_(head, non_blocking=True)
        # in the order of ranks, so that both ends of every pair agree
        for r in range(self.peers.world):
            if r in sends:
                ops.append(dist.P2POp(dist.isend, sends[r].buffer, group=group, group_peer=r))
                self.peers.messages += 1
                self.peers.bytes += sends[r].buffer.numel()
            if r in receives:
                ops.append(dist.P2POp(dist.irecv, receives[r].buffer, group=group, group_peer=r))
        try:
            works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            raise self.peers.fail(self, step, min([*receives, *sends]), first_line(error)) from error
        return Pending(self, step, kind, works, ops, dict(sends), dict(receives))

    def gather(self, step: str, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """The tensors of every rank, by rank; shapes and dtypes must be the same on all ranks. Waits for them."""
        parcel, me = pack(tensors), self.peers.rank
        likes = [Like(tuple(x.shape), x.dtype) for x in tensors]
        others = [r for r in range(self.peers.world) if r != me]
        parts = {r: Parcel(likes, self.device) for r in others}
        self.post(step, dict.fromkeys(others, parcel), parts).wait()
        return [parcel.tensors if r == me else parts[r].tensors for r in range(self.peers.world)]


@dataclass(eq=False)
class Pending:
    """Messages in flight; step and kind: as in `GroupCall.post`."""

    call: GroupCall
    step: str
    kind: str
    works: list[Any]
    ops: list[dist.P2POp]
    # keeps the parcels alive until the messages have arrived
    sends: dict[int, Parcel]
    receives: dict[int, Parcel]

    def __post_init__(self) -> None:
        self.limit = self.call.peers.limit
        self.origins = {r: r if parcel.origin is None else parcel.origin for r, parcel in self.receives.items()}

    def wait(self) -> None:
        """Wait until all messages have arrived; raises PeerError."""
        peers, works = self.call.peers, self.works
        # waiting for a message twice would never return
        self.works = []
        if not works:
            return
        if self.call.device.type == "cuda":
            for work in works:
                work.wait()
            peers.watch.add(self)
            self.sends, self.receives = {}, {}
            return
        end = time.monotonic() + peers.limit

        def through() -> tuple[int, str, RuntimeError] | None:
            # receives first: a missing message means that its rank stopped, a pending send may be due to any rank
            for work, op in sorted(zip(works, self.ops, strict=True), key=lambda pair: pair[1].op is dist.isend):
                try:
                    work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
                except RuntimeError as error:
                    late = f"{'nothing came' if op.op is dist.irecv else 'it took nothing'} for {peers.limit:g} s"
                    return op.group_peer, late if time.monotonic() >= end else first_line(error), error
            return None

        failed = peers.waiter.wait(through, lambda: refusal(peers, self.call.number, self.call.signature))
        if failed is not None:
            rank, why, *cause = failed
            raise peers.fail(self.call, self.step, rank, why) from (cause[0] if cause else None)
        for rank, parcel in self.receives.items():
            self.verify(rank, parcel.head.tolist())

    def refused(self) -> PeerError | None:
        """The error to raise if another rank raised in this call, else None."""
        cause = refusal(self.call.peers, self.call.number, self.call.signature)
        return cause and self.call.peers.fail(self.call, self.step, *cause)

    def late(self, rank: int | None) -> PeerError:
        """The error to raise if nothing came from this rank; None: from the first rank of the step."""
        rank = self.ops[0].group_peer if rank is None else rank
        return self.call.peers.fail(self.call, self.step, rank, f"nothing came for {self.limit:g} s")

    def verify(self, rank: int, head: Sequence[int]) -> None:
        """Raise PeerError unless the header of a message from `rank` is the expected one."""
        call = self.call
        mark, key, number, kind, origin = head
        why = ""
        if mark != MARK or not 0 <= origin < call.peers.world:
            why = "it sent a message that is not Saccade's: use the group for nothing else meanwhile"
        elif number != call.number:
            why = f"it is in call {number} of this group and this rank in call {call.number}: one made a call alone"
        elif key != call.key:
            why = "it makes another call: shapes, dtypes, masks or options differ"
        elif kind != hashed(self.kind) or origin != self.origins[rank]:
            why = "it is in another step of this call"
        if why:
            raise call.peers.fail(call, self.step, rank, why)


_peers: MutableMapping[Any, Peers] = weakref.WeakKeyDictionary()


def peers_of(group: Any = None, limit: float | None = None) -> Peers:
    """The peers of a ProcessGroup, of a DeviceMesh with one dimension, or of all ranks for None.

    limit: seconds that a rank may keep others waiting, also in later calls. Raises ValueError if torch.distributed is
    not initialised or the mesh has more dimensions.
    """
    if not dist.is_initialized():
        raise ValueError("torch.distributed has no process group; call torch.distributed.init_process_group first")
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(f"the mesh has {group.ndim} dimensions; expected 1: take mesh['name']")
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    peers = _peers.get(group) or _peers.setdefault(group, Peers(group))
    if limit is not None:
        peers.limit = float(limit)
    return peers
