"""What only a GPU shows: bits that repeat, and calls that neither slow down nor keep memory. Run by `make test-gpu`."""

from __future__ import annotations

import gc
import random
import time

import pytest
import torch

import saccade
from saccade import mask as masks

# of the Hopper kernels, with documents too, and of the portable ones
REPEATED = {
    "hopper": (2, 1500, 8, 2, 128, torch.bfloat16, "causal()", False),
    "hopper, documents on the device": (1, 3000, 4, 4, 64, torch.bfloat16, "causal()", True),
    "hopper, 256": (1, 1111, 4, 1, 256, torch.float16, "causal() & window(300, 0)", False),
    "portable": (2, 1500, 8, 2, 80, torch.bfloat16, "causal() | global_tokens(3)", False),
    "portable, documents on the device": (1, 1500, 4, 2, 96, torch.bfloat16, "causal()", True),
    "float32": (1, 700, 4, 2, 64, torch.float32, "strided(3) | window(20, 0)", False),
}


def inputs(B: int, T: int, Hq: int, Hk: int, D: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(T)
    heads = (Hq, Hk, Hk, Hq)
    return [torch.randn(B, T, h, D, device="cuda", dtype=dtype) for h in heads]


def run(mask: masks.Mask | None, x: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    q, k, v, do = x
    o, lse = saccade.attention(q, k, v, mask, return_lse=True)
    return o, lse, *saccade.attention_backward(do, q, k, v, o, lse, mask)[:3]


@pytest.mark.parametrize("name", REPEATED)
def test_fifty_repeats_have_the_same_bits(name) -> None:
    B, T, Hq, Hk, D, dtype, text, documents = REPEATED[name]
    mask = masks.parse(text)
    if documents:
        mask = mask & masks.documents((torch.arange(T, device="cuda") // 470).int())
    x = inputs(B, T, Hq, Hk, D, dtype)
    first = run(mask, x)
    for _ in range(49):
        for a, b in zip(first, run(mask, x), strict=True):
            assert torch.equal(a, b)


def test_no_call_waits_for_the_device() -> None:
    ids = (torch.arange(4096, device="cuda") // 700).int()
    cu = torch.tensor([0, 1000, 4096], device="cuda")
    x = inputs(1, 4096, 4, 4, 128, torch.bfloat16)
    for make in (lambda: masks.documents(ids + 1), lambda: masks.documents(cu_seqlens=cu + 0), masks.causal):
        run(masks.causal() & make(), x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(masks.causal() & make(), x)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_two_hundred_shapes_leave_nothing_behind() -> None:
    x = inputs(1, 2048, 8, 8, 128, torch.bfloat16)
    first = timed(x)
    r, held = random.Random(0), 0
    for n in range(200):
        T, D = r.randint(1, 700), r.choice([64, 80, 128])
        text = r.choice(["causal()", "window(%d, 0)", "causal() & window(%d, 3)", "keys(%d) & causal()"])
        mask = masks.parse(text % r.randint(1, 90) if "%" in text else text)
        run(mask, inputs(1, T, 4, 2, D, torch.bfloat16))
        if n == 100:
            held = kept()
    # plans of so many shapes and masks are kept, small ones
    assert kept() - held < 1 << 20
    assert timed(x) < 1.3 * first


def kept() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def timed(x: list[torch.Tensor]) -> float:
    found = []
    for _ in range(30):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run(masks.causal(), x)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return sorted(found)[15]
