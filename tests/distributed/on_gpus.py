"""The cases of this folder on real devices, by the tolerance rule:

    torchrun --nproc_per_node 4 tests/distributed/on_gpus.py [--dtype bfloat16] [--only WORD] [--part 1/4]

NCCL and CUDA tensors where there are GPUs, else gloo and the CPU. Rank 0 prints a line for every case; the exit status
is 1 if one is outside the rule. --part is a share of the cases: several at a time compile their kernels in parallel.
With --stop dies, or hangs, there is one case: the last rank stops, and all others must report it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
from cases import MASKS, MORE_MASKS, SHARED, Case, differentiated, inputs, mask_of, sliced

import saccade
from saccade.distributed import PeerError, peers_of, ring_attention, shard
from saccade.testing.compare import measure
from saccade.testing.ranks import start

LAYOUTS = ("contiguous", "zigzag", "striped")
# standard attention is run with its head dimension in as many orders; one may hide its errors by luck
ORDERS = 3


def cases(dtype: str) -> list[Case]:
    """Head sizes and lengths of the Hopper kernels and of the portable ones, uneven slices among them."""
    found = [
        Case(layout, mask, 4, Hk, 1037, 64, dtype) for layout, mask, Hk in itertools.product(LAYOUTS, MASKS, (4, 2, 1))
    ]
    found += [Case(layout, mask, 8, 2, 2048, 128, dtype) for layout, mask in itertools.product(LAYOUTS, MASKS)]
    found += [Case(layout, mask, 4, 2, 517, 40, dtype) for layout, mask in itertools.product(LAYOUTS, MORE_MASKS)]
    found += [Case("zigzag", "causal", 4, 2, 1037, 64, dtype, (("softcap", 3.0), ("scale", 0.2)), sinks=True)]
    found += [
        Case("zigzag", mask, 8, 4, 1037, 64, dtype, strategy="ulysses", bias=bias)
        for mask, bias in (("causal", "gates"), ("causal", "relative"), ("full", "alibi"), ("selected", ""))
    ]
    return found


def added(leaves: dict[str, torch.Tensor], T: int) -> torch.Tensor | float:
    """The bias of arrays by name, as an array that broadcasts to [B, Hq, T, T]."""
    total: torch.Tensor | float = 0.0
    distance = torch.arange(T, device=leaves["q"].device)
    distance = distance[:, None] - distance
    if "slopes" in leaves:
        total = total - leaves["slopes"][..., None, None] * distance.abs()
    if "table" in leaves:
        total = total + leaves["table"][..., (distance + 4).clamp(0, 8)]
    if "log_f" in leaves:
        sums = leaves["log_f"].double().cumsum(1).transpose(1, 2)
        total = total + (sums[..., :, None] - sums[..., None, :])
    return total


def dense(case: Case, x: dict[str, torch.Tensor], dtype: torch.dtype, order: torch.Tensor) -> dict[str, torch.Tensor]:
    """Standard attention, every step rounded to dtype, dimensions of heads in this order."""
    mask, options = mask_of(case), dict(case.options)
    device = x["q"].device
    allowed = torch.ones(1, 1, case.T, case.T, dtype=torch.bool)
    if mask is not None:
        allowed = torch.from_numpy(mask.evaluate(2, case.Hq, case.T, case.T).copy())
    allowed = allowed.to(device)

    def call(leaves: dict[str, torch.Tensor]) -> Any:
        q, k, v = (leaves[name] for name in "qkv")
        sinks, bias = leaves.get("sinks"), added(leaves, case.T)
        k, v = (a.repeat_interleave(case.Hq // case.Hk, 2) for a in (k, v))
        s = torch.einsum("bthd,bjhd->bhtj", q[..., order], k[..., order]) * options.get("scale", case.D**-0.5)
        if "softcap" in options:
            s = options["softcap"] * torch.tanh(s / options["softcap"])
        s = s + (bias.to(s.dtype) if isinstance(bias, torch.Tensor) else bias)
        s = s.masked_fill(~allowed, -torch.inf)
        top = s.amax(-1, keepdim=True)
        if sinks is not None:
            top = torch.maximum(top, sinks.to(s.dtype)[None, :, None, None])
        top = torch.where(top == -torch.inf, 0, top).detach()
        p = torch.exp(s - top)
        total = p.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks.to(s.dtype)[None, :, None, None] - top)
        empty = total == 0
        o = torch.einsum("bhtj,bjhd->bthd", p / torch.where(empty, 1, total), v)
        lse = torch.where(empty, -torch.inf, top + torch.log(torch.where(empty, 1, total)))
        return o, lse[..., 0].transpose(1, 2)

    # arrays of a bias keep their float32
    rounded = ("q", "k", "v", "sinks") if dtype is not torch.float64 else tuple(x.keys() - {"do", "dlse"})
    return differentiated(call, {name: a.to(dtype) if name in rounded else a for name, a in x.items()})


def compare(case: Case, device: torch.device) -> list[str]:
    """What is outside the rule on this rank."""
    x = inputs(case, device)
    got = sliced(case, x)
    for name in SHARED:
        if "d" + name in got:
            dist.all_reduce(got["d" + name])
    natural = torch.arange(case.D, device=device)
    expected = dense(case, x, torch.float64, natural)
    generator = torch.Generator().manual_seed(1)
    orders = [natural] + [torch.randperm(case.D, generator=generator).to(device) for _ in range(ORDERS - 1)]
    plain = [dense(case, x, getattr(torch, case.dtype), order) for order in orders]
    kind = np.dtype(np.float64) if case.dtype == "float64" else saccade.arrays.numpy_dtype(case.dtype)
    found: list[str] = []
    for name, ref in expected.items():
        near = torch.stack([p[name] for p in plain]).double()
        if name[1:] not in SHARED:
            ref = shard(ref, layout=case.layout)
            near = shard(near, layout=case.layout, dim=2)
        met = measure(name, got[name].double().cpu().numpy(), ref.cpu().numpy(), near.cpu().numpy(), kind)
        if not met.ok:
            found.append(str(met))
    again = sliced(case, x)
    for name in ("o", "lse", "dq", "dk", "dv"):
        if not torch.equal(got[name], again[name]):
            found.append(f"{name}: other bits in the second run")
    return found


def mismatch(device: torch.device) -> list[str]:
    """Another shape on the last rank: every rank raises, naming a rank and the step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    q = torch.zeros(1, 16, 4 if rank < size - 1 else 2, 64, device=device, dtype=torch.bfloat16)
    try:
        ring_attention(q, q, q, saccade.mask.causal())
    except PeerError as error:
        wrong = size - 1 if rank < size - 1 else 0
        return [] if f"rank {wrong} failed" in str(error) and "agreement" in str(error) else [str(error)]
    return ["no error"]


def stop(how: str, device: torch.device) -> int:
    """The last rank dies or hangs; 0 if this rank reports it within the limit of 5 s and some tolerance."""
    last, limit = dist.get_world_size() - 1, 5.0
    q = torch.zeros(1, 16, 4, 64, device=device, dtype=torch.bfloat16)
    ring_attention(q, q, q, saccade.mask.causal())
    peers_of(limit=limit)
    if dist.get_rank() == last:
        time.sleep(0 if how == "dies" else 6 * limit)
        # as a success, or torchrun would end the others itself
        os._exit(0)
    begin, message = time.monotonic(), ""
    while not message and time.monotonic() < begin + 5 * limit:
        try:
            ring_attention(q, q, q, saccade.mask.causal())
            time.sleep(0.1)
        except PeerError as error:
            message = str(error)
    right = "step" in message and f"rank {last}" in message
    print(f"{'ok' if right else 'FAILED':6} {time.monotonic() - begin:6.2f} s  {message or 'no error'}", flush=True)
    # the group is no more
    os._exit(not right)


def report(name: str, wrong: list[str], seconds: float) -> bool:
    """Gather what went wrong on any rank; rank 0 prints it."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, wrong)
    bad = [f"    rank {rank}: {line}" for rank, lines in enumerate(every) for line in lines]
    if dist.get_rank() == 0:
        print("\n".join([f"{'FAILED' if bad else 'ok':6} {seconds:6.2f} s  {name}", *bad]), flush=True)
    return not bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--part", default="1/1", help="1/4 for the first quarter of the cases")
    parser.add_argument("--stop", choices=["dies", "hangs"])
    given = parser.parse_args()
    device = start()
    cuda = device.type == "cuda"
    if not cuda:
        torch.set_num_threads(1)
    peers_of(limit=120.0)
    if given.stop:
        return stop(given.stop, device)
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if cuda else "CPU"
        print(f"{dist.get_world_size()} × {name}, {dist.get_backend()}, torch {torch.__version__}", flush=True)
    fine = many = 0
    part, parts = map(int, given.part.split("/"))
    every = [(case, " ".join(str(field) for field in case)) for case in cases(given.dtype)]
    for case, name in [(case, name) for case, name in every if given.only in name][part - 1 :: parts]:
        begin = time.perf_counter()
        fine += report(name, compare(case, device), time.perf_counter() - begin)
        many += 1
    if not given.only:
        fine += report("another shape on one rank", mismatch(device), 0.0)
        many += 1
    if dist.get_rank() == 0:
        print(f"{fine} of {many} cases within the rule", flush=True)
    dist.destroy_process_group()
    return int(fine < many)


if __name__ == "__main__":
    sys.exit(main())
