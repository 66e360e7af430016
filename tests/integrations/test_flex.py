"""Convert every kind of mask to FlexAttention's masks and back, and compare every pair."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import saccade
from saccade import Unsupported
from saccade import mask as masks
from saccade.integrations.flex import from_block_mask, to_block_mask, to_mask_mod
from saccade.testing.cases import MASKS

B, H, TQ, TK = 2, 4, 70, 101
# their tiles are of keys apart
STRIDED = {
    "strided", "strided-phase", "strided-window", "strided-two", "strided-documents", "dilated", "dilated-causal",
    "per-head",
}  # fmt: skip


def pairs(mod, tq: int, tk: int) -> np.ndarray:
    b, h, t, j = torch.meshgrid(*map(torch.arange, (B, H, tq, tk)), indexing="ij")
    return mod(b, h, t, j).expand(B, H, tq, tk).numpy()


@pytest.mark.parametrize("name", MASKS)
def test_functions(name) -> None:
    mask = masks.parse(MASKS[name])
    want = np.broadcast_to(mask.evaluate(B, H, TQ, TK), (B, H, TQ, TK))
    np.testing.assert_array_equal(pairs(to_mask_mod(mask, B, H, TQ, TK), TQ, TK), want)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("block", [16, 32])
def test_blocks(name, block) -> None:
    """No allowed pair outside the blocks, no forbidden one in a full block, and the way back gives the mask."""
    mask = masks.parse(MASKS[name])
    if name in STRIDED:
        with pytest.raises(Unsupported, match="a mask of strides"):
            to_block_mask(mask, B, H, TQ, TK, block=block)
        return
    made = to_block_mask(mask, B, H, TQ, TK, block=block)
    want = np.broadcast_to(mask.evaluate(B, H, TQ, TK), (B, H, TQ, TK))
    back = from_block_mask(made).evaluate(B, H, TQ, TK)
    np.testing.assert_array_equal(np.broadcast_to(back, want.shape), want)


@pytest.mark.parametrize("name", ["causal", "documents-causal", "packed-causal-batch", "per-head-and", "tiles-odd"])
def test_flex_attention_with_our_blocks(name) -> None:
    T = 256
    text = {
        "documents-causal": f"causal() & documents({[0] * 100 + [1] * 156})",
        "packed-causal-batch": "documents(cu_seqlens=[[0, 31, 132, 256], [0, 40, 90, 256]]) & causal()",
        "per-head-and": "per_head([causal(), window(5, 5), keys(30), full()])",
    }.get(name, MASKS[name])
    if name == "tiles-odd":
        text = f"tiles({[[(a * b) % 3 == 1 or a == b for b in range(52)] for a in range(52)]!r}, (5, 5))"
    mask = masks.parse(text)
    q, k, v = (torch.randn(B, H, T, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    o = flex_attention(q, k, v, block_mask=to_block_mask(mask, B, H, T, T))
    want = saccade.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask)
    torch.testing.assert_close(o.transpose(1, 2), want, rtol=1e-4, atol=1e-5)


def test_a_block_mask_of_torch() -> None:
    made = create_block_mask(lambda b, h, i, j: (j <= i) & (i - j < 90) & (h + j > 3), B, H, 300, 300, device="cpu")
    want = pairs(made.mask_mod, 300, 300)
    np.testing.assert_array_equal(from_block_mask(made).evaluate(B, H, 300, 300), want)
    causal = from_block_mask(create_block_mask(lambda b, h, i, j: j <= i, None, None, 256, 256, device="cpu"))
    np.testing.assert_array_equal(causal.evaluate(1, 1, 256, 256)[0, 0], np.tri(256, dtype=bool))


def test_a_function_is_no_block_mask() -> None:
    with pytest.raises(TypeError, match="block_mask is a function; expected a BlockMask, as create_block_mask"):
        from_block_mask(lambda b, h, i, j: i >= j)


def test_functions_of_tables_are_called_with_scalars() -> None:
    """What FlexAttention allows: rows of a table taken one index at a time, and data by position (as in Flamingo)."""
    T = 96
    table = torch.rand(T, T, generator=torch.Generator().manual_seed(0)) < 0.3
    media = torch.tensor([0] * 30 + [1] * 40 + [2] * 26)
    functions = {
        "table": lambda b, h, i, j: table[i][j],
        "flamingo": lambda b, h, i, j: media[i] == j // 32 + 1,
        "batch and head": lambda b, h, i, j: (j <= i) & (table[b][h] | table[i, j]),
    }
    for name, mod in functions.items():
        made = create_block_mask(mod, B, H, T, T, device="cpu", BLOCK_SIZE=32)
        want = create_mask(mod, B, H, T, T, device="cpu").numpy()
        found = from_block_mask(made).evaluate(B, H, T, T)
        np.testing.assert_array_equal(np.broadcast_to(found, want.shape), want, err_msg=name)


@pytest.mark.parametrize("block", [(16, 32), 0, 16.0])
def test_blocks_that_have_no_size(block) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(f"block is {block}; expected ")):
        to_block_mask(masks.causal(), 1, 1, 64, 64, block=block)
