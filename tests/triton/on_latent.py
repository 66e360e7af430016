"""Decode over latent rows by the kernel for Hopper, compared with float64. Run by `make test-gpu`."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from on_gpu import rms

import saccade
from saccade.backends.triton import hopper
from saccade.backends.triton.hopper import latent as latent_rows
from saccade.testing import forms

# the longest sequence, query heads, queries, page or 0
LATENT = [(8192, 128, 1, 0), (8192, 64, 2, 64), (700, 128, 3, 0), (64, 64, 1, 128), (20000, 192, 1, 0), (1, 64, 1, 64)]
# less than a tile of heads, and a tile and a half
LATENT += [(4000, 16, 1, 64), (9000, 3, 1, 0), (3000, 96, 2, 0)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("T", "heads", "Tq", "page"), LATENT)
def test_latent_rows_on_hopper(T, heads, Tq, page, causal, dtype, monkeypatch) -> None:
    torch.manual_seed(T)
    kind = {"device": "cuda", "dtype": dtype}
    lengths = [T, *(max(Tq, n) for n in (T // 2, T - 65, T - 128, 0))]
    q = torch.randn(5, Tq, heads, 576, **kind)
    # maxima that rise from tile to tile
    q[0] *= 30
    latent, k_rope = torch.randn(5, T, 512, **kind), torch.randn(5, T, 64, **kind)
    if page:
        pool = saccade.PagedLatentKVCache(5 * (-(-T // page)), page, fill=float("nan"), **kind)
        sequences = [pool.add() for _ in lengths]
        for n, sequence in enumerate(sequences):
            pool.append([sequence], latent[n, : lengths[n]], k_rope[n, : lengths[n]])
        cache = pool.view(sequences)
    else:
        cache = saccade.LatentKVCache(5, T + 70, fill=float("nan"), **kind)
        cache.append(latent, k_rope, lengths)
    decode = partial(saccade.decode, q, cache, causal=causal, scale=192**-0.5, return_lse=True)
    # of any size; recorded calls are dropped before and after
    monkeypatch.setattr(latent_rows, "LEAST", 0)
    with forms.using([]):
        (o, lse), (again, _) = decode(), decode()
    assert torch.equal(o, again)
    monkeypatch.setattr(hopper, "decodes", lambda call: False)
    with forms.using([]):
        plain = decode()
    t, j = torch.arange(Tq, device="cuda")[:, None], torch.arange(T, device="cuda")
    for n, length in enumerate(lengths):
        key = torch.cat([latent[n], k_rope[n]], -1).double()
        seen = j <= t + length - Tq if causal else j < length
        s = (q[n].double() @ key.T * 192**-0.5).masked_fill_(~seen.expand(Tq, T)[:, None], float("-inf"))
        exact, sums = s.softmax(-1) @ key[:, :512], s.logsumexp(-1)
        least = rms(plain[0][n].double() - exact) + 2**-10 * rms(exact)
        assert rms(o[n].double() - exact) < 1.5 * least
        assert float((lse[n] - sums).abs().max()) < 1e-3 + 2 * float((plain[1][n] - sums).abs().max())
