"""Attention of slices: by a ring, by exchanging heads for positions, by gathered keys, or by both ring and heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..api import attention as whole_attention
from ..arrays import ArrayOrTuple
from ..biases import Bias
from ..frameworks.torch_run import spec
from ..frameworks.torch_state import autocast
from ..mask import Mask
from ..mask.algebra import selected
from ..mask.checks import check_shapes
from ..mask.selection import others
from ..operands import Options, Request, Side, check_sinks
from ..problem import check_kind, check_selection
from .call import Partition, fingerprint, prepare, untraced
from .comm import Peers, peers_of
from .gather import gathered
from .heads import Exchange, ToHeads, ToSlices, bias_of, check_heads, joined, mask_of
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
        bias: as in `saccade.attention`, of the whole sequence and the same on every rank; log_f of `gates` is this
            rank's slice, [B, n, Hq]. Only "ulysses" computes it, and masks with `select`; "auto" then chooses it. The
            gradients of arrays that all ranks have are this rank's contributions.
        layout, length, scale, softcap, sinks, dropout, return_lse, backend: as in `ring_attention`.

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
    q, k, v = autocast(q, k, v)
    if getattr(group, "ndim", 1) == 2:
        rows, heads = peers_of(group[group.mesh_dim_names[0]]), peers_of(group[group.mesh_dim_names[1]])
        with taking_part(rows, heads):
            check_kind(mask)
            if strategy not in ("auto", "mesh"):
                raise ValueError(f"strategy is {strategy!r} on a mesh of two dimensions; expected 'auto'")
            o, lse = _by_mesh(Partition(rows, layout, length), heads, q, k, v, request)
        return (o, lse) if return_lse else o
    peers = peers_of(group)
    with taking_part(peers):
        check_kind(mask)
        if strategy not in ("auto", *STRATEGIES):
            raise ValueError(f"strategy is {strategy!r}; expected 'auto' or one of {', '.join(STRATEGIES)}")
        partition = Partition(peers, layout, length)
        if strategy == "auto":
            strategy = _fastest(partition, q, k, v, request)
        if strategy == "ulysses":
            o, lse = _by_heads(partition, q, k, v, request)
        else:
            setting = prepare(f"{strategy} attention", partition, q, k, v, request)
            way = ring(setting, True) if strategy == "ring" else gathered(setting)
            o, lse = OverRanks.apply(q, k, v, sinks, way)
    return (o, lse) if return_lse else o


def _fastest(partition: Partition, q: Tensor, k: Tensor, v: Tensor, request: Request) -> str:
    # a bias and lists of keys are those of whole rows, which only the exchange of heads computes
    if request.side.bias is not None or selected(request.mask) is not None:
        return "ulysses"
    setting = prepare("attention", partition, q, k, v, request)
    return estimates(setting.schedule, setting.problem)[0].strategy


def _by_heads(partition: Partition, q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    mask, side, peers = request.mask, request.side, partition.peers
    bias = side.bias if isinstance(side.bias, Bias) else Bias(array=side.bias)
    rest = Request(others(mask), Side(sinks=side.sinks), request.options)
    setting = prepare(f"ulysses attention{_of_whole_rows(bias, mask)}", partition, q, k, v, rest)
    p, T = setting.problem, sum(setting.schedule.counts)
    require(p.Hq, p.Hk, peers.world)
    if mask is not None and selected(mask) is not None:
        # `prepare` has checked the others
        check_selection(mask, p.Hk)
        check_shapes(mask, p.B, T, T, p.Hq)
    check_heads(bias, (p.B, p.Hq, T, T))
    if bias.log_f is not None and bias.log_f.shape != q.shape[:3]:
        raise ValueError(
            f"log_f has shape {list(bias.log_f.shape)}; expected [B, n, Hq] = {list(q.shape[:3])}, of this rank's slice"
        )
    exchange = Exchange(peers, setting.schedule.runs, p.Hq, setting.signature)
    mine, keys = (exchange.heads(H, peers.rank) for H in (p.Hq, p.Hk))
    gates = [] if bias.log_f is None else [bias.log_f[..., None]]
    q, k, v, *gates = ToHeads.apply(exchange, q, k, v, *gates)
    bias = bias_of(bias, mine, gates[0][..., 0] if gates else None)
    options = _options(request, mine)
    options["bias"] = None if side.bias is None else bias
    o, lse = whole_attention(q, k, v, mask_of(mask, mine, keys), return_lse=True, **options)
    return ToSlices.apply(exchange, o, lse)


def _of_whole_rows(bias: Bias, mask: Mask | None) -> str:
    # on which all ranks agree
    arrays = {"array": bias.array, "slopes": bias.slopes, "table": bias.table}
    words = [f"; {name} {list(x.shape)} {x.dtype}" for name, x in arrays.items() if x is not None]
    if bias.table is not None:
        words.append(f" from {-bias.origin}")
    if bias.log_f is not None:
        words.append(f"; gates {bias.log_f.dtype}, prune {bias.prune}")
    chosen = selected(mask)
    return "".join(words) + ("" if chosen is None else f"; {fingerprint(chosen)}")


def _by_mesh(
    partition: Partition, heads: Peers, q: Tensor, k: Tensor, v: Tensor, request: Request
) -> tuple[Tensor, Tensor]:
    rows, layout, length = partition
    # row i, column u of the mesh has slice i · columns + u
    T = q.shape[1] * rows.world * heads.world if length is None else length
    runs: Runs = runs_of(layout, rows.world * heads.world, T)
    shares = [runs[i * heads.world : (i + 1) * heads.world] for i in range(rows.world)]
    require(q.shape[2], k.shape[2], heads.world)
    if request.mask is not None:
        check_shapes(request.mask, q.shape[0], T, T, q.shape[2])
    if request.side.sinks is not None:
        check_sinks(spec(request.side.sinks), q.shape[2], str(q.device))
    _, into = joined(shares[rows.rank])
    signature = f"{list(q.shape[2:])}; {list(k.shape[2:])}; {list(v.shape[2:])}; {q.dtype}; {T}; {runs}"
    exchange = Exchange(heads, into, q.shape[2], signature)
    mine = exchange.heads(q.shape[2], heads.rank)
    q, k, v = ToHeads.apply(exchange, q, k, v)
    options: dict[str, Any] = _options(request, mine) | {"bias": request.side.bias, "dropout": request.options.dropout}
    runs_of_rows = [joined(share)[0] for share in shares]
    mask = mask_of(request.mask, mine, exchange.heads(k.shape[2], heads.rank))
    o, lse = ring_attention(q, k, v, mask, layout=runs_of_rows, group=rows.group, length=T, return_lse=True, **options)
    return ToSlices.apply(exchange, o, lse)


def _options(request: Request, heads: slice) -> dict[str, Any]:
    # the options of a call on some of the heads
    options, sinks = request.options, request.side.sinks
    mine = None if sinks is None else sinks[heads]
    return {"scale": options.scale, "softcap": options.softcap, "sinks": mine, "backend": options.backend}
