"""Peers for the cases of nvidia.py: each function returns the call to time, or None for an unsupported case."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from nvidia_cases import BUCKETS, HOST, Case, ids_of, term_of
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from saccade.integrations.flex import to_mask_mod
from saccade.testing.patterns import PATTERNS

Call = Callable[[], Any]


def reach_of(case: Case) -> int:
    """How far back a window reaches, 0 without one."""
    return int(case.mask.partition("window(")[2].partition(",")[0] or 0)


def sdpa(case: Case, x: list[Tensor], backend: SDPBackend) -> Call | None:
    """torch's scaled_dot_product_attention, by one of its kernels."""
    special = (
        case.scores
        or case.pattern
        or case.documents
        or "window" in case.mask
        or "prefix" in case.mask
        or case.verb == "first"
    )
    if special or (case.mask and case.Tq != case.Tk) or x[0].dtype.itemsize == 1:
        return None
    q, k, v, do = (a.transpose(1, 2).contiguous() for a in x)
    options = {"is_causal": bool(case.mask), "enable_gqa": case.Hq != case.Hk}

    def alone() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return alone()

    if case.verb in HOST:
        # choosing the kernel costs as much as the call; chosen once, because providers are timed one after another
        flash = backend is SDPBackend.FLASH_ATTENTION
        torch.backends.cuda.enable_flash_sdp(flash)
        torch.backends.cuda.enable_cudnn_sdp(not flash)
        call = alone
    if case.verb in ("forward", "decode", "eager"):
        return call
    for a in (q, k, v):
        a.requires_grad_()
    if case.verb == "recorded":
        return call
    if case.verb == "host":
        return lambda: torch.autograd.grad(call(), (q, k, v), do)
    o = call()
    return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)


def flex(case: Case, x: list[Tensor]) -> Call | None:
    """FlexAttention, compiled for this shape and mask; of a pattern it gets the element test that Saccade exports."""
    lacks = case.verb in ("decode", "first", *HOST) or "prefix" in case.mask
    if lacks or x[0].dtype.itemsize == 1 or case.Tq != case.Tk:
        return None
    q, k, v, do = (a.transpose(1, 2).contiguous() for a in x)
    ids = ids_of(case).cuda() if case.documents else None
    causal, reach = "causal" in case.mask, reach_of(case) or case.Tk
    torch._dynamo.reset()
    attend = torch.compile(flex_attention, dynamic=False)

    def block_mask(ids: Any) -> Any:
        if case.pattern:
            test = to_mask_mod(PATTERNS[case.mask](case.Tk), 1, 1, case.Tq, case.Tk, device="cuda")
            return create_block_mask(test, None, None, case.Tq, case.Tk, device="cuda", _compile=True)

        def allowed(b: Any, h: Any, i: Any, j: Any) -> Any:
            seen = (j <= i) & (j >= i - reach) if causal else j < case.Tk
            return seen if ids is None else seen & (ids[i] == ids[j])

        return create_block_mask(allowed, None, None, case.Tq, case.Tk, device="cuda", _compile=True)

    gqa, term = case.Hq != case.Hk, term_of(case)
    if term is not None:
        term.requires_grad_(case.verb != "forward")
        attend = partial(attend, score_mod=score_mod_of(case, term.cumsum(1) if case.scores == "gates" else term))
    if case.verb == "forward":
        mask = block_mask(ids)
        return lambda: attend(q, k, v, block_mask=mask, enable_gqa=gqa)
    leaves = [a.requires_grad_() for a in (q, k, v)] + ([] if term is None else [term])
    if case.verb == "step":
        step = lambda: attend(q, k, v, block_mask=block_mask(ids + 1), enable_gqa=gqa)  # noqa: E731
        return lambda: torch.autograd.grad(step(), leaves, do)
    o = attend(q, k, v, block_mask=block_mask(ids), enable_gqa=gqa)
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


def score_mod_of(case: Case, term: Tensor) -> Callable[..., Tensor]:
    """The function that FlexAttention calls for each score."""

    def slopes(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score - term[h] * (i - j).abs()

    def table(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + term[h, (i - j + BUCKETS).clamp(0, 2 * BUCKETS)]

    def gates(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + (term[b, i, h] - term[b, j, h])

    return {"slopes": slopes, "table": table, "gates": gates}[case.scores]


def flash4(case: Case, x: list[Tensor], deterministic: bool = False) -> Call | None:
    """FlashAttention-4. Documents are packed sequences; its dq is summed in any order unless deterministic."""
    lacks = case.verb in ("step", "first") or case.pattern or case.scores or "prefix" in case.mask
    if lacks or x[0].dtype.itemsize == 1 or (deterministic and case.verb != "backward"):
        return None
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    q, k, v, do = x
    options: dict[str, Any] = {"causal": "causal" in case.mask and case.Tq == case.Tk}
    if deterministic:
        options["deterministic"] = True
    if reach := reach_of(case):
        options["window_size"] = (reach, 0)
    if case.documents:
        q, k, v, do = (a.flatten(0, 1) for a in x)
        counts = ids_of(case).unique_consecutive(return_counts=True)[1].repeat(case.B)
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().cuda()
        most = int(starts.diff().max())
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": most, "max_seqlen_k": most}
    attend = flash_attn_varlen_func if case.documents else flash_attn_func

    def call() -> Tensor:
        got = attend(q, k, v, **options)
        return got[0] if isinstance(got, tuple) else got

    if case.verb in ("forward", "decode", "eager"):
        return torch.no_grad()(call)
    q, k, v = (a.detach().requires_grad_() for a in (q, k, v))
    if case.verb == "recorded":
        return call
    if case.verb == "host":
        return lambda: torch.autograd.grad(call(), (q, k, v), do)
    o = call()
    return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)


def flashinfer(case: Case, x: list[Tensor], page: int) -> Call | None:
    """Decode by FlashInfer over keys in scattered pages."""
    if case.verb != "decode":
        return None
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    q, k, v, _ = x
    n = -(-case.Tk // page)
    # [pages, 2, page, Hk, D]
    pages = torch.empty(case.B * n, 2, page, case.Hk, case.D, dtype=k.dtype, device="cuda")
    table = torch.randperm(case.B * n, device="cuda")
    pages[table] = torch.stack([a.reshape(-1, page, case.Hk, case.D) for a in (k, v)], 1)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 28, dtype=torch.uint8, device="cuda"), "NHD")
    starts = torch.arange(case.B + 1, dtype=torch.int32, device="cuda") * n
    last = torch.full((case.B,), page, dtype=torch.int32, device="cuda")
    kind = {"q_data_type": q.dtype, "kv_data_type": k.dtype}
    wrapper.plan(starts, table.int(), last, case.Hq, case.Hk, case.D, page, **kind)
    query = q[:, 0].contiguous()
    return lambda: wrapper.run(query, pages)


PEERS: dict[str, Callable[[Case, list[Tensor]], Call | None]] = {
    "torch flash": partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "torch cuDNN": partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "FlashAttention-4": flash4,
    "FlashAttention-4, deterministic": partial(flash4, deterministic=True),
    "FlashInfer, pages of 64": partial(flashinfer, page=64),
    "FlashInfer, pages of 16": partial(flashinfer, page=16),
    "FlexAttention": flex,
}
