"""Times head sizes that are no power of two, D = 192 with Dv = 128 of latent attention among them, on an NVIDIA GPU.

`python benchmarks/head_sizes.py rows.csv [D,Dv,heads ...]`. Rates are TFLOP/s of the allowed pairs; the error of a row
is its largest difference from the portable kernels, relative in norm. Peers that are not installed have no rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import saccade
from saccade import mask
from saccade.backends.triton import hopper
from saccade.cli.bench.clocks import by_events, timing
from saccade.cli.bench.machine import gpu_environment
from saccade.cli.bench.rows import Row, write
from saccade.testing import forms

T = 16384
SIZES = (192, 128, 16), (192, 128, 128), (80, 80, 32), (96, 96, 32), (192, 192, 16)
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


@contextmanager
def portable() -> Iterator[None]:
    """Without the kernels for Hopper."""
    known, hopper.sizes.SIZES = hopper.sizes.SIZES, {}
    try:
        # recorded calls are dropped before and after
        with forms.using([]):
            yield
    finally:
        hopper.sizes.SIZES = known


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's attention by cuDNN."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)


def flash4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-4."""
    from flash_attn.cute import flash_attn_func

    got = flash_attn_func(q, k, v, causal=True)
    return got[0] if isinstance(got, tuple) else got


def ours(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Saccade."""
    return saccade.attention(q, k, v, mask.causal(), backend="triton", **how)


def results(call: Call, verb: str, x: list[Tensor], do: Tensor) -> tuple[Callable[[], Any], list[Tensor]]:
    """What is timed of a verb, forward or backward, and its results."""
    if verb == "forward":
        run = torch.no_grad()(partial(call, *x))
        return run, [run()]
    leaves = [a.detach().requires_grad_() for a in x]
    run = partial(torch.autograd.grad, call(*leaves), leaves, do, retain_graph=True)
    return run, list(run())


def rows(sizes: tuple[int, int, int], row: Row) -> Iterator[Row]:
    """Rows of forward and backward with D, Dv and a number of heads."""
    D, Dv, heads = sizes
    x = [torch.randn(1, T, heads, n, device="cuda", dtype=torch.bfloat16) for n in (D, D, Dv)]
    do = torch.randn_like(x[2])
    calls: dict[str, Call] = {
        "saccade hopper": ours, "saccade hopper, deterministic=False": partial(ours, deterministic=False),
        "torch cuDNN": cudnn, "flash-attention 4": flash4,
    }  # fmt: skip
    for verb, products in (("forward", D + Dv), ("backward", 3 * D + 2 * Dv)):
        with portable():
            run, exact = results(ours, verb, x, do)
            seconds = {"saccade portable": (timing(by_events(run)), 0.0)}
        for provider, call in calls.items():
            if verb == "forward" and "deterministic" in provider:
                continue
            try:
                run, got = results(call, verb, x, do)
            except Exception as error:  # a peer may lack the package or the sizes
                print(f"{provider} {verb}: {type(error).__name__} {str(error)[:300]}", flush=True)
                continue
            far = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(got, exact, strict=True))
            seconds[provider] = timing(by_events(run)), far
        work = 2.0 * products * heads * T * (T + 1) / 2
        for provider, (time, far) in seconds.items():
            line = replace(row, case=f"{verb}-D{D}-{Dv}-H{heads}", provider=provider, kind=verb, dtype="bfloat16")
            line = replace(line, shape=f"1x{T}x{T}x{heads}x{heads}x{D}x{Dv}", mask="causal()", error=far)
            yield replace(line, rate=work / time.median / 1e12, rate_unit="TFLOP/s", **time._asdict())


def main() -> None:
    """Write the rows."""
    out, *sizes = sys.argv[1:]
    row = Row(*gpu_environment(), "", "", "")
    cases = [(int(D), int(Dv), int(heads)) for D, Dv, heads in (words.split(",") for words in sizes)] or SIZES
    write(out, (line for case in cases for line in rows(case, row)))


if __name__ == "__main__":
    main()
