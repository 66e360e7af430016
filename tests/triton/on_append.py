"""Caches on a device: the kernel that appends tokens to rows, the gradient of decode, and codes of small values.

Run in Triton's interpreter by tests/system, and on a GPU by `make test-gpu`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import saccade
from saccade import mask
from saccade.backends.triton import append_rows
from saccade.backends.triton.chip import interpreted

DEVICE = "cpu" if interpreted() else "cuda:0"


@pytest.mark.parametrize("sizes", [(64, 64), (24, 80), (1, 1), (7, 1), (576, 0)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_from_each_length_on(dtype: str, sizes: tuple[int, int], rng: np.random.Generator) -> None:
    """Tokens of one call go to all rows; those that have no slot are written nowhere. 0: values are a part of keys."""
    kind, starts = getattr(torch, dtype), torch.tensor([2, -1, 5], dtype=torch.int32, device=DEVICE)
    given = [torch.from_numpy(rng.standard_normal((3, 2, 4, D))).to(DEVICE, kind)[:, :, ::2] for D in sizes if D]
    held = [torch.full((3, 6, 2, D), torch.nan, dtype=kind, device=DEVICE) for D in sizes if D]
    want = [x.clone() for x in held]
    for x, array in zip(given, want, strict=True):
        array[0, 2:4], array[1, 0], array[2, 5] = x[0], x[1, 1], x[2, 0]
    k, v = (*given, None)[:2]
    assert append_rows(k, v, held, starts)
    for x, array in zip(held, want, strict=True):
        assert torch.equal(x.nan_to_num(99.0), array.nan_to_num(99.0))
    # numbers that lie apart are left to the formula
    apart = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in held]
    assert append_rows(k, v, apart, starts) is (sizes == (1, 1))


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention to all keys by torch: a machine with a GPU need not have the CPU core."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


def test_decode_keeps_the_gradient_of_q(rng: np.random.Generator) -> None:
    """Also where lengths are read on the device, by kernels without a gradient."""
    lengths, draw = [40, 23], [rng.standard_normal((2, t, h, 16)) for t, h in ((1, 4), (40, 2), (40, 2))]
    q, k, v = (torch.from_numpy(x).to(DEVICE, torch.float32) for x in draw)
    cache = saccade.KVCache(2, 64, 2, 16, dtype=torch.float32, device=DEVICE)
    cache.append(k, v, torch.tensor(lengths, device=DEVICE))
    o = saccade.decode(q.requires_grad_(), cache, mask=mask.causal(), backend="triton")
    (found,) = torch.autograd.grad(o.sin().sum(), q)
    for b, n in enumerate(lengths):
        one = [x[b : b + 1].detach().double().cpu().requires_grad_() for x in (q, k[:, :n], v[:, :n])]
        # the only query sees all keys
        want = exact(*one)
        (dq,) = torch.autograd.grad(want.sin().sum(), one[0])
        torch.testing.assert_close(o[b].double().cpu(), want[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[b].double().cpu(), dq[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-5])
def test_codes_of_small_values(kind: str, size: float, rng: np.random.Generator) -> None:
    """Scales of float16 values may be so small that their products with weights are subnormal in float16."""
    q, k, v = (torch.from_numpy(rng.standard_normal((1, t, 2, 32))).to(DEVICE) for t in (1, 200, 200))
    cache = saccade.KVCache(1, 200, 2, 32, dtype=torch.float16, quantised=kind, device=DEVICE)
    cache.append(k.half(), (v * size).half())
    found = saccade.decode(q.half(), cache, backend="triton").double()
    numbers = (torch.as_tensor(x).to(q) for x in cache.numbers())
    want = exact(*(x.cpu() for x in (q.half().double(), *numbers)))
    error = (found.cpu() - want).abs().max().item()
    # o is rounded to float16, whose smallest numbers are multiples of 6e-8
    assert error <= 2e-3 * want.abs().max().item() + 6e-8


def test_lengths_that_were_changed_in_place_are_read() -> None:
    cache = saccade.KVCache(2, 6, 1, 16, dtype=torch.float32, device=DEVICE)
    tokens = torch.ones(2, 2, 1, 16, device=DEVICE)
    cache.append(tokens, tokens)
    cache.lengths[0] = 5
    with pytest.raises(ValueError, match="sequence 0 holds 5 tokens and would take 2 more; expected at most 6"):
        cache.append(tokens, tokens)
    cache.lengths[0] = 4
    cache.append(tokens, tokens)
    assert cache.lengths.tolist() == [6, 4]
