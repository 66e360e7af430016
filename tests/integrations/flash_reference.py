"""Shared by the tests of flash-attn's interfaces: plain attention in float64, options, pages."""

from __future__ import annotations

import inspect

import torch

B, SQ, SK, HQ, HK, D = 2, 7, 11, 4, 2, 16


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(q, k, v, **options):
    """(o [Sq, Hq, Dv], lse [Hq, Sq]) of one sequence, bottom-right, by the options of `scores`; sinks [Hq]."""
    sinks = options.pop("sinks", None)
    s, v = scores(q, k, v, **options), v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    lse = s.logsumexp(-1)
    lse = lse if sinks is None else torch.logaddexp(lse, sinks.double()[:, None])
    p = torch.exp(s - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    return torch.einsum("hij,jhd->ihd", p, v), lse


def scores(q, k, v, *, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None, first=0, chunk=0, qv=None):
    """[Hq, Sq, Sk], -inf where a query does not see a key; keys before `first` are missing, and chunks start there."""
    q, k = (q, k) if qv is None else (torch.cat([q, qv], -1), torch.cat([k, v], -1))
    q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    i, j = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))
    if slopes is not None:
        s = s - slopes[:, None, None] * (i - j).abs()
    left, right = (-1 if n is None else n for n in window)
    right = 0 if causal else right
    seen = (j >= first) & ((left < 0) | (j >= i - left)) & ((right < 0) | (j <= i + right))
    if chunk:
        seen = seen & ((i - first) // chunk == (j - first) // chunk)
    return s.masked_fill(~seen, float("-inf"))


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "window of a tensor": {"window_size": torch.tensor([2, -1])},
    "causal window": {"window_size": (4, 4), "causal": True},
    "softcap": {"softcap": 2.0, "softmax_scale": 0.4, "causal": True},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]), "causal": True},
}


def wanted(options):
    names = {"softmax_scale": "scale", "window_size": "window", "alibi_slopes": "slopes"}
    names |= {"attention_chunk": "chunk", "learnable_sink": "sinks"}
    return {names.get(name, name): x for name, x in options.items()}


def signature(function) -> str:
    """Names and defaults in their order, as one would write them."""
    parameters = inspect.signature(function).parameters.values()
    assert all(x.kind is x.POSITIONAL_OR_KEYWORD for x in parameters)
    return ", ".join(x.name if x.default is x.empty else f"{x.name}={x.default!r}" for x in parameters)


def sequences(q, k, v, cu_q, cu_k, **options):
    """`plain` of each packed sequence; options in lists are each sequence's own, used_q and used_k cut it."""
    used = [options.pop(name, cu.diff().tolist()) for name, cu in (("used_q", cu_q), ("used_k", cu_k))]
    parts = []
    for r, (n, m) in enumerate(zip(*used, strict=True)):
        a, b = slice(int(cu_q[r]), int(cu_q[r]) + n), slice(int(cu_k[r]), int(cu_k[r]) + m)
        own = {name: x[r] if isinstance(x, list) else x for name, x in options.items()}
        own |= {"qv": own["qv"][a]} if own.get("qv") is not None else {}
        parts.append(plain(q[a], k[b], v[b], **own))
    return parts


def close(found, want, name="") -> None:
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name} {text}")


def check_signed(weights, o, q, k, v, options, kept) -> None:
    # the weights of one sequence [Hq, Sq, Sk]: what dropout took is negative, the rest make o
    one = torch.eye(len(k)).double()[:, None].expand(-1, HK, -1)
    p = plain(q, k, one, **wanted(options))[0].transpose(0, 1)
    close(weights, torch.where(torch.from_numpy(kept), p, -p))
    close(
        o, torch.einsum("hij,jhd->ihd", weights.double().clamp(min=0) / 0.6, v.double().repeat_interleave(HQ // HK, 1))
    )


def drawn(seed: int = 5) -> int:
    # what the call will draw
    torch.manual_seed(seed)
    found = int(torch.randint(0, (1 << 63) - 1, ()).item())
    torch.manual_seed(seed)
    return found


def paged(x: torch.Tensor, cu: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    counts = cu.diff().tolist()
    most = max(-(-n // page) for n in counts)
    table = torch.randperm(len(counts) * most, generator=torch.Generator().manual_seed(3)).reshape(-1, most).int()
    pages = torch.full((table.numel(), page, *x.shape[1:]), float("nan"))
    for r, n in enumerate(counts):
        for j in range(n):
            pages[table[r, j // page], j % page] = x[int(cu[r]) + j]
    return pages, table
