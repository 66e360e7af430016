"""Functions that ranks run: attention of slices compared with attention of the whole, with gloo or NCCL."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import saccade
from saccade import mask as sm
from saccade.distributed import attention, peers_of, ring_attention, runs_of, shard
from saccade.distributed.layout import positions

MASKS: dict[str, Any] = {
    "full": lambda T: None,
    "causal": lambda T: sm.causal(),
    "window": lambda T: sm.causal() & sm.window(T // 5, 0),
    "documents": lambda T: sm.causal() & sm.documents(np.sort(np.arange(T) * 7 % 4)),
    "sink + window": lambda T: sm.causal() & (sm.window(T // 5, 0) | sm.prefix(2)),
    "window + global": lambda T: sm.window(T // 6, T // 6) | sm.global_tokens(3),
}
MORE_MASKS: dict[str, Any] = {
    "strided": lambda T: sm.causal() & (sm.strided(3) | sm.window(4, 0)),
    "blocks": lambda T: sm.tiles(np.add.outer(np.arange(-(-T // 4)), np.arange(-(-T // 4))) % 3 > 0, 4),
    "documents of rows": lambda T: sm.documents(np.sort(np.arange(2 * T).reshape(2, T) * 7 % 5, 1)) & sm.causal(),
    "dense": lambda T: sm.dense(np.add.outer(np.arange(T), np.arange(T)) % 5 > 1),
    "lengths": lambda T: sm.causal() & sm.keys([T - 3, T // 2]),
    "chunked": lambda T: sm.causal() & sm.chunked(5),
    "packed": lambda T: sm.documents(cu_seqlens=[0, 3, T // 2, T - 2], each=sm.causal() & sm.window(4, 0)),
    "columns": lambda T: sm.columns(np.arange(T), np.minimum(np.arange(T) + 7, T)),
    "per head": lambda T: sm.per_head([sm.causal(), sm.window(3, 3), None, sm.causal() & sm.window(6, 0)]),
    "nothing": lambda T: sm.keys(0),
    "listed": lambda T: sm.causal() & (sm.window(3, 0) | sm.global_tokens([1, 5, 9])),
}
ALL_MASKS = MASKS | MORE_MASKS
# shapes of the arrays of a bias for B, Hq, T
BIASES: dict[str, dict[str, Any]] = {
    "array": {"array": lambda B, Hq, T: (B, Hq, T, T)},
    "array of all heads": {"array": lambda B, Hq, T: (T, T)},
    "alibi": {"slopes": lambda B, Hq, T: (B, Hq)},
    "relative": {"table": lambda B, Hq, T: (Hq, 9)},
    "gates": {"log_f": lambda B, Hq, T: (B, T, Hq)},
    "gates, pruned": {"log_f": lambda B, Hq, T: (B, T, Hq)},
    "relative and gates": {"table": lambda B, Hq, T: (B, Hq, 9), "log_f": lambda B, Hq, T: (B, T, Hq)},
}
# with gradients to add up over ranks
SHARED = ("sinks", "array", "slopes", "table")


class Case(NamedTuple):
    """One call: layout, name of the mask, heads, length; options of the call; name of the bias."""

    layout: Any
    mask: str
    Hq: int = 4
    Hk: int = 2
    T: int = 37
    D: int = 8
    dtype: str = "float64"
    options: tuple[tuple[str, Any], ...] = ()
    sinks: bool = False
    strategy: str = "ring"
    bias: str = ""


def mask_of(case: Case) -> Any:
    """The mask of a case; "selected" has three blocks of four keys for every row and key head."""
    if case.mask != "selected":
        return ALL_MASKS[case.mask](case.T)
    g = torch.Generator().manual_seed(case.T)
    lists = torch.rand(2, case.Hk, case.T, -(-case.T // 4), generator=g).argsort(-1)[..., :3]
    return sm.causal() & sm.select(lists, 4)


def inputs(case: Case, device: Any = "cpu") -> dict[str, torch.Tensor]:
    """q, k, v, do, dlse, sinks and arrays of the bias of the whole, the same on every rank."""
    g = torch.Generator().manual_seed(case.T * 31 + case.Hq)
    T, D, dtype = case.T, case.D, getattr(torch, case.dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(device)

    shapes = {"q": (2, T, case.Hq, D), "k": (2, T, case.Hk, D), "v": (2, T, case.Hk, D), "do": (2, T, case.Hq, D)}
    found = {name: draw(*shape).to(dtype) for name, shape in shapes.items()}
    found["dlse"] = draw(2, T, case.Hq).to(wide) * 0.1
    if case.sinks:
        found["sinks"] = draw(case.Hq).to(wide)
    for name, shape in BIASES.get(case.bias, {}).items():
        x = draw(*shape(2, case.Hq, T)).to(wide)
        found[name] = torch.nn.functional.logsigmoid(x) if name == "log_f" else x
    return found


def bias_of(case: Case, leaves: dict[str, torch.Tensor]) -> Any:
    """The argument bias= of a case, made of its arrays."""
    terms = [leaves["array"]] if "array" in leaves else []
    terms += [saccade.alibi(leaves["slopes"])] if "slopes" in leaves else []
    terms += [saccade.relative(leaves["table"], 4)] if "table" in leaves else []
    if "log_f" in leaves:
        terms.append(saccade.gates(leaves["log_f"], prune=1e-15 if "pruned" in case.bias else None))
    return sum(terms[1:], terms[0]) if terms else None


def differentiated(call: Any, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """o, lse and the gradients of a call of the arrays by name."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in x.items() if name not in ("do", "dlse")}
    o, lse = call(leaves)
    # rows without a key have lse = -inf, which nothing may be multiplied with
    total = (o.double() * x["do"].double()).sum() + torch.where(lse == -torch.inf, 0, lse * x["dlse"]).sum()
    total.backward()
    return {"o": o.detach(), "lse": lse.detach()} | {"d" + name: t.grad for name, t in leaves.items()}


def whole(case: Case, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The call in one process."""
    mask = mask_of(case)

    def call(leaves: dict[str, torch.Tensor]) -> Any:
        more = {"sinks": leaves.get("sinks"), "bias": bias_of(case, leaves), **dict(case.options)}
        return saccade.attention(leaves["q"], leaves["k"], leaves["v"], mask, return_lse=True, **more)

    return differentiated(call, x)


def sliced(case: Case, x: dict[str, torch.Tensor], **more: Any) -> dict[str, torch.Tensor]:
    """The call on this rank's slices."""
    mask = mask_of(case)
    parts = {name: t if name in SHARED else shard(t, layout=case.layout) for name, t in x.items()}

    def call(leaves: dict[str, torch.Tensor]) -> Any:
        q, k, v = (leaves[name] for name in "qkv")
        given = {"layout": case.layout, "length": case.T, "sinks": leaves.get("sinks"), "return_lse": True}
        given |= {"bias": bias_of(case, leaves), **dict(case.options)}
        if case.strategy == "ring":
            return ring_attention(q, k, v, mask, **given, **more)
        group = None
        if case.strategy == "mesh":
            group = mesh_of(x["q"].device.type)
            given["strategy"] = "auto"
        else:
            given["strategy"] = case.strategy
        return attention(q, k, v, mask, group=group, **given)

    return differentiated(call, parts)


@cache
def mesh_of(device: str) -> DeviceMesh:
    """All ranks as two columns."""
    return init_device_mesh(device, (dist.get_world_size() // 2, 2), mesh_dim_names=("ring", "heads"))


def errors(case: Case, device: Any = "cpu") -> dict[str, float]:
    """The largest differences between slices of the whole and the call on slices."""
    x = inputs(case, device)
    expected, got = whole(case, x), sliced(case, x)
    found: dict[str, float] = {}
    for name, there in expected.items():
        here = got[name]
        if name[1:] in SHARED:
            dist.all_reduce(here)
        else:
            there = shard(there, layout=case.layout)
        assert here.shape == there.shape, (name, here.shape, there.shape)
        same = torch.where(there == here, 0, (there.double() - here.double()).abs())
        found[name] = float(same.max()) if same.numel() else 0.0
        assert not torch.isnan(same).any(), (case, name)
    return found


def all_errors(cases: list[Case]) -> list[dict[str, float]]:
    """`errors` of many cases."""
    return [errors(case) for case in cases]


def messages(case: Case) -> tuple[int, int]:
    """How many messages this rank sends forward, and in both passes, when the call is known."""
    x = inputs(case)
    sliced(case, x)
    parts = {name: shard(t, layout=case.layout) for name, t in x.items()}
    peers, mask = peers_of(), mask_of(case)
    before = peers.messages
    with torch.no_grad():
        ring_attention(parts["q"], parts["k"], parts["v"], mask, layout=case.layout, length=case.T)
    forward = peers.messages - before
    before = peers.messages
    sliced(case, x)
    return forward, peers.messages - before


def places(layout: Any, size: int, T: int) -> list[np.ndarray]:
    """The positions of every rank."""
    return [positions(rank) for rank in runs_of(layout, size, T)]
