"""Properties that need a GPU: repeatable bits, no waiting, no growth of time or memory. Run by `make test-gpu`."""

from __future__ import annotations

import gc
import random
import time

import pytest
import torch
import triton.language as tl

import saccade
import triton
from saccade import mask as masks
from saccade.integrations.flash_attn import flash_attn_with_kvcache
from saccade.testing.cases import Case
from saccade.testing.compare import require
from saccade.testing.inputs import make as made
from saccade.testing.run import verify

# problems of the Hopper kernels, also with documents, and of the portable ones
REPEATED = {
    "hopper": (2, 1500, 8, 2, 128, torch.bfloat16, "causal()", False),
    "hopper, documents on the device": (1, 3000, 4, 4, 64, torch.bfloat16, "causal()", True),
    "hopper, long tiles": (1, 3000, 4, 2, 128, torch.bfloat16, "window(9, 9) | global_tokens(3)", False),
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
        T, D = r.randint(90, 700), r.choice([64, 80, 128])
        text = r.choice(["causal()", "window(%d, 0)", "causal() & window(%d, 3)", "keys(%d) & causal()"])
        mask = masks.parse(text % r.randint(1, 90) if "%" in text else text)
        run(mask, inputs(1, T, 4, 2, D, torch.bfloat16))
        if n == 100:
            held = kept()
    # so many plans stay in the cache, but they are small
    assert kept() - held < 1 << 20
    assert timed(x) < 1.3 * first


# masks of so many tiles that tiles which all rows or keys see have long lists and start before the others
LARGE = {
    "window and global tokens": "window(9, 9) | global_tokens(3)",
    "window and keys": "window(9, 9) | keys(2900, 3000) | keys(5)",
    "big-bird": str(masks.patterns.big_bird(3000, 64, near=0, random=1)),
    "blocks": f"{masks.patterns.big_bird(3000, 64, near=0, ends=0, random=5, seed=3)} & causal()",
    "blocks and window": f"{masks.patterns.big_bird(3000, 128, near=0, random=1)} | window(3, 0)",
}


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("name", LARGE)
def test_masks_of_many_tiles(name, D) -> None:
    case = Case(name, 3000, 3000, B=1, Hq=2, Hk=1, D=D, Dv=D, mask=LARGE[name])
    require(verify(made(case, "float16" if D == 256 else "bfloat16"), "triton"), f"{case}")


@pytest.mark.parametrize(
    "text",
    ["causal()", "causal() & window(130, 0)", "window(None, 40)", "window(30, 30) | global_tokens(3)", "big-bird"],
)
@pytest.mark.parametrize(("B", "T", "Hq", "Hk", "D"), [(2, 700, 4, 4, 64), (1, 1030, 4, 2, 128), (1, 513, 2, 1, 256)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_eight_bits_err_as_their_weights_do(text, B, T, Hq, Hk, D, softcap) -> None:
    mask = masks.patterns.big_bird(T, 128) if text == "big-bird" else masks.parse(text)
    q, k, v, _ = (x.float() for x in inputs(B, T, Hq, Hk, D, torch.bfloat16))
    factors = [torch.rand(shape, device="cuda") + 0.5 for shape in ((B, Hq), (Hk,), (B, Hk))]
    small = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    sinks = torch.randn(Hq, device="cuda") if softcap else None
    o, lse = saccade.attention(*small, mask, descale=factors, return_lse=True, softcap=softcap, sinks=sinks)
    assert o.dtype is torch.bfloat16
    assert lse.dtype is torch.float32
    wide = [x.double() * f.expand(B, x.shape[2])[:, None, :, None] for x, f in zip(small, factors, strict=True)]
    allowed = torch.from_numpy(mask.evaluate(B, Hq, T, T).copy()).cuda()
    exact, rounded, sums = weighed(*wide, allowed, softcap, sinks)
    assert float((lse.mT - sums).abs().max()) < 2e-3
    # the error of weights in e4m3, scaled so that a row's largest is 2^8; products of 14 bits and o of 8 bits add to it
    least = rms(rounded - exact) + 2**-9 * rms(exact)
    assert rms(o.double() - exact) < 1.5 * least
    again = saccade.attention(*small, mask, descale=factors, softcap=softcap, sinks=sinks)
    assert torch.equal(again, o)


def weighed(q, k, v, allowed, softcap, sinks) -> list[torch.Tensor]:
    """o in float64, o of weights rounded to e4m3, and lse [B, Hq, T]."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    s = torch.einsum("bthd,bjhd->bhtj", q, k) * q.shape[-1] ** -0.5
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~allowed, float("-inf"))
    lse = torch.logsumexp(s, -1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double()[None, :, None])
    top = s.amax(-1, keepdim=True)
    w = torch.exp(s - top)
    small = (256 * w).to(torch.float8_e4m3fn).double() / 256
    share = torch.exp(top - lse[..., None])
    return [*(torch.einsum("bhtj,bjhd->bthd", p * share, v) for p in (w, small)), lse]


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def test_eight_bits_are_refused_with_reasons() -> None:
    x = [a.to(torch.float8_e4m3fn) for a in inputs(1, 64, 2, 2, 64, torch.bfloat16)[:3]]
    ones = (torch.ones(2, device="cuda"),) * 3
    with pytest.raises(ValueError, match="descale"):
        saccade.attention(*x)
    with pytest.raises(saccade.Unsupported, match="strides"):
        saccade.attention(*x, masks.strided(3), descale=ones)
    with pytest.raises(saccade.Unsupported, match="no gradient"):
        saccade.attention(x[0].requires_grad_(), *x[1:], descale=ones)
    odd = torch.zeros(1 + 64 * 128, device="cuda", dtype=torch.uint8)[1:].view(1, 64, 2, 64).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="contiguous"):
        saccade.attention(odd, odd, odd, descale=ones)


def kept() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def timed(x: list[torch.Tensor]) -> float:
    """Median seconds of a call at the clocks of a busy device: they take a while to rise after an idle time."""
    busy = time.perf_counter() + 0.5
    while time.perf_counter() < busy:
        run(masks.causal(), x)
    found = []
    for _ in range(101):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run(masks.causal(), x)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return sorted(found)[50]


# ways to write document ids: torch's count of in-place writes sees the first and not the second
WRITES = {"copy_": lambda ids, new: ids.copy_(new), "data": lambda ids, new: ids.data.copy_(new)}


@triton.jit
def copy_numbers(old, new, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(new + at, tl.load(old + at, mask=at < n), mask=at < n)


def documents_of(T: int, size: int) -> torch.Tensor:
    return torch.arange(T, device="cuda") // size


@pytest.mark.parametrize("D", [80, 128], ids=["portable", "hopper"])
@pytest.mark.parametrize("write", [*WRITES, "a Triton kernel in the graph"])
def test_a_captured_graph_follows_the_document_ids(D, write) -> None:
    T = 1500
    x = inputs(1, T, 4, 2, D, torch.bfloat16)
    ids, source = documents_of(T, 470), documents_of(T, 470)
    mask = masks.causal() & masks.documents(ids)

    def step() -> tuple[torch.Tensor, ...]:
        if write not in WRITES:
            copy_numbers[(triton.cdiv(T, 256),)](source, ids, T, BLOCK=256)
        return run(mask, x)

    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for size in (470, 100, 700):
        new = documents_of(T, size)
        WRITES.get(write, lambda _, new: source.copy_(new))(ids, new)
        graph.replay()
        for replayed, eager in zip(results, run(masks.causal() & masks.documents(new), x), strict=True):
            assert torch.equal(replayed, eager), size


def test_an_uncounted_write_is_seen_after_torch_counts_it() -> None:
    x = inputs(1, 900, 2, 2, 128, torch.bfloat16)
    ids, new = documents_of(900, 300), documents_of(900, 128)
    mask = masks.causal() & masks.documents(ids)
    run(mask, x)
    copy_numbers[(4,)](new, ids, 900, BLOCK=256)
    torch.autograd.graph.increment_version(ids)
    for a, b in zip(run(mask, x), run(masks.causal() & masks.documents(new), x), strict=True):
        assert torch.equal(a, b)


def test_masks_of_cuda_tensors_equal_themselves_alone() -> None:
    ids = documents_of(6, 2)
    mask = masks.documents(ids)
    assert mask == masks.documents(ids)
    assert mask != masks.documents(ids.clone())
    assert hash(mask) == hash(masks.documents(ids.clone()))
    assert masks.parse(str(mask)) == masks.documents(ids.cpu())


def test_a_mask_of_the_host_is_not_captured_unseen() -> None:
    x = inputs(1, 700, 2, 2, 80, torch.bfloat16)
    run(masks.causal(), x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="before the capture"), torch.cuda.graph(graph):
        run(masks.causal() & masks.window(123, 0), x)


@pytest.mark.parametrize("D", [80, 128], ids=["portable", "hopper"])
def test_a_captured_graph_keeps_what_it_reads(D) -> None:
    x, mask = inputs(1, 900, 2, 2, D, torch.bfloat16), masks.window(100, 0) | masks.global_tokens(5)
    # the second call of a layout is recorded, and the third replays the recording
    expected, graph = [run(mask, x) for _ in range(3)][-1], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(mask, x)
    # other plans take the places of this one in all caches, and their arrays its memory
    for n in range(200, 500):
        saccade.attention(*(y[:, :n] for y in x[:3]), masks.window(n // 3, 0) | masks.global_tokens(7))
    gc.collect()
    torch.cuda.empty_cache()
    filler = [torch.full((1 << 16,), -1, dtype=torch.int32, device="cuda") for _ in range(100)]
    graph.replay()
    assert [torch.equal(*pair) for pair in zip(results, expected, strict=True)] == [True] * 5, len(filler)


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_an_append_writes_nothing_out_of_range_and_waits_for_nothing(paged) -> None:
    torch.manual_seed(0)
    rows, page = (8, 16) if paged else (3, 32)
    k_cache, v_cache = (torch.randn(rows, page, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    new = [torch.randn(3, 2, h, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2)]
    table = torch.tensor([[0, -1], [3, 8], [5, 6]], dtype=torch.int32, device="cuda") if paged else None
    # the first two tokens are beyond their pages, or below 0 and beyond the capacity
    lengths = torch.tensor([16, 15, 9] if paged else [-3, 31, 9], dtype=torch.int32, device="cuda")
    before = [x.clone() for x in (k_cache, v_cache)]
    given = new[0][:, :1], k_cache, v_cache, *new[1:]
    flash_attn_with_kvcache(*given, cache_seqlens=lengths, block_table=table)
    for x, old in zip((k_cache, v_cache), before, strict=True):
        x.copy_(old)
    torch.cuda.set_sync_debug_mode("error")
    try:
        o = flash_attn_with_kvcache(*given, cache_seqlens=lengths, block_table=table)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for x, old, fresh in zip((k_cache, v_cache), before, new[1:], strict=True):
        want = old.clone()
        if paged:
            want[3, 15], want[5, 9:11] = fresh[1, 0], fresh[2]
        else:
            want[1, 31], want[2, 9:11] = fresh[1, 0], fresh[2]
        assert torch.equal(x, want)
    assert o.isfinite().all()
