"""Attention of slices: by a ring, by exchanging heads for positions, by gathered keys, or by both ring and heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..api import attention as whole_attention
from ..arrays import ArrayOrTuple
from ..mask import Mask
from ..operands import Options, Request, Side
from .call import DistributedCall, Partition, prepare, untraced
from .comm import Peers, peers_of
from .gather import gathered
from .heads import Exchange, ToHeads, ToSlices, joined, mask_of
from .layout import Layout, Runs, runs_of
from .local import OverRanks
from .refusal import taking_part
from .ring import ring, ring_attention
from .strategy import STRATEGIES, estimates, require


@untraced
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    *,
    strategy: str = "auto",
    layout: Layout = "zigzag",
    group: Any = None,
    length: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Any = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    backend: str | None = None,
) -> ArrayOrTuple:
    """Exact attention of a sequence that is divided among the ranks of a group, by a choice of strategies.

    Args:
        q, k, v, mask: as in `ring_attention`.
        strategy: "ring" is `ring_attention`. "ulysses" exchanges heads for positions, so that each rank attends over
            the whole sequence for its share of the heads (Jacobs et al., 2023); the number of ranks must divide Hq.
            "gather" copies all keys to each rank, in O(T) memory. "auto" chooses the fastest by a model of compute and
            links, which `saccade explain --ranks` prints.
        group: as in `ring_attention`; or a DeviceMesh of two dimensions, ring × ulysses: its ranks have the slices row
            by row, heads are exchanged along its rows, and keys travel along its columns (Fang and Zhao, 2024).
        layout, length, scale, softcap, sinks, bias, dropout, return_lse, backend: as in `ring_attention`.

    Returns:
        o [B, n, Hq, Dv]; with `return_lse` also lse [B, n, Hq], as in `ring_attention`.

    Raises:
        TypeError, ValueError, Unsupported, PeerError: as in `ring_attention`.
        Unsupported: also if the heads cannot be divided among the ranks.

    Examples:
        >>> from saccade.distributed import attention, shard  # on every rank, after init_process_group
        >>> q, k, v = (shard(x, layout="contiguous") for x in torch.randn(3, 2, 1024, 8, 64))
        >>> o = attention(q, k, v, saccade.mask.window(127, 0), strategy="ulysses", layout="contiguous")
    """
    request = Request(mask, Side(bias, sinks=sinks), Options(scale, softcap, dropout, backend=backend))
    if getattr(group, "ndim", 1) == 2:
        rows, heads = peers_of(group[group.mesh_dim_names[0]]), peers_of(group[group.mesh_dim_names[1]])
        with taking_part(rows, heads):
            if strategy not in ("auto", "mesh"):
                raise ValueError(f"strategy is {strategy!r} on a mesh of two dimensions; expected 'auto'")
            o, lse = _by_mesh(Partition(rows, layout, length), heads, q, k, v, request)
        return (o, lse) if return_lse else o
    peers = peers_of(group)
    with taking_part(peers):
        if strategy not in ("auto", *STRATEGIES):
            raise ValueError(f"strategy is {strategy!r}; expected 'auto' or one of {', '.join(STRATEGIES)}")
        partition = Partition(peers, layout, length)
        if strategy == "auto":
            setting = prepare("attention", partition, q, k, v, request)
            strategy = estimates(setting.schedule, setting.problem)[0].strategy
        setting = prepare(f"{strategy} attention", partition, q, k, v, request)
        if strategy == "ring":
            o, lse = OverRanks.apply(q, k, v, sinks, ring(setting, True))
        elif strategy == "gather":
            o, lse = OverRanks.apply(q, k, v, sinks, gathered(setting))
        else:
            o, lse = _by_heads(setting, q, k, v, request)
    return (o, lse) if return_lse else o


def _by_heads(setting: DistributedCall, q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    p, peers = setting.problem, setting.peers
    require(p.Hq, p.Hk, peers.world)
    exchange = Exchange(peers, setting.schedule.runs, p.Hq, setting.signature)
    mine = exchange.heads(p.Hq, peers.rank)
    q, k, v = ToHeads.apply(exchange, q, k, v)
    o, lse = whole_attention(q, k, v, mask_of(request.mask, mine), return_lse=True, **_options(request, mine))
    return ToSlices.apply(exchange, o, lse)


def _by_mesh(
    partition: Partition, heads: Peers, q: Tensor, k: Tensor, v: Tensor, request: Request
) -> tuple[Tensor, Tensor]:
    rows, layout, length = partition
    # row i, column u of the mesh has slice i · columns + u
    T = q.shape[1] * rows.world * heads.world if length is None else length
    runs: Runs = runs_of(layout, rows.world * heads.world, T)
    shares = [runs[i * heads.world : (i + 1) * heads.world] for i in range(rows.world)]
    require(q.shape[2], k.shape[2], heads.world)
    _, into = joined(shares[rows.rank])
    signature = f"{list(q.shape[2:])}; {list(k.shape[2:])}; {list(v.shape[2:])}; {q.dtype}; {T}; {runs}"
    exchange = Exchange(heads, into, q.shape[2], signature)
    mine = exchange.heads(q.shape[2], heads.rank)
    q, k, v = ToHeads.apply(exchange, q, k, v)
    options: dict[str, Any] = _options(request, mine) | {"bias": request.side.bias, "dropout": request.options.dropout}
    runs_of_rows = [joined(share)[0] for share in shares]
    mask = mask_of(request.mask, mine)
    o, lse = ring_attention(q, k, v, mask, layout=runs_of_rows, group=rows.group, length=T, return_lse=True, **options)
    return ToSlices.apply(exchange, o, lse)


def _options(request: Request, heads: slice) -> dict[str, Any]:
    # the options of a call on some of the heads
    options, sinks = request.options, request.side.sinks
    mine = None if sinks is None else sinks[heads]
    return {"scale": options.scale, "softcap": options.softcap, "sinks": mine, "backend": options.backend}
