"""Convert masks to the functions and block masks of torch's FlexAttention, and its block masks to masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import BlockMask

from ..caches.storage import at_least
from ..errors import Unsupported
from ..mask import Mask, dense, per_head, tiles
from ..mask import forms as f
from ..mask.lowering import lower
from ..plan import Limits, make_plan
from ..problem import Problem

MaskMod = Callable[[Any, Any, Any, Any], Any]


def to_mask_mod(mask: Mask, B: int, Hq: int, Tq: int, Tk: int, *, device: Any = "cpu") -> MaskMod:
    """A mask as FlexAttention's function (b, h, query, key) -> bool.

    Args:
        mask: the mask.
        B, Hq, Tq, Tk: the sizes for which the function is valid.
        device: where its arrays are: integers of bands, and int32 arrays of O(T) for documents and lengths.

    Returns:
        A `mask_mod` for `torch.nn.attention.flex_attention`.

    Examples:
        >>> from saccade.integrations.flex import to_mask_mod
        >>> mask_mod = to_mask_mod(saccade.mask.causal(), 1, 8, 1024, 1024)  # B, Hq, Tq, Tk
    """
    lowered = lower(mask, B, Hq, Tq, Tk)
    tests = [_test_of(low, device) for low in lowered.masks]
    if len(tests) == 1:
        return tests[0]
    head = torch.from_numpy(np.ascontiguousarray(lowered.head)).to(device)

    def by_head(b: Any, h: Any, t: Any, j: Any) -> Any:
        allowed = (head[h] == 0) & tests[0](b, h, t, j)
        for n, test in enumerate(tests[1:], 1):
            allowed = allowed | ((head[h] == n) & test(b, h, t, j))
        return allowed

    return by_head


def to_block_mask(mask: Mask, B: int, Hq: int, Tq: int, Tk: int, *, device: Any = "cpu", block: int = 128) -> BlockMask:
    """A mask as FlexAttention's BlockMask, from the tiles of Saccade's plan; single pairs are not tested.

    Args:
        mask: the mask.
        B, Hq, Tq, Tk: the sizes for which the block mask is valid.
        device: where its tensors are.
        block: queries and keys per block.

    Returns:
        A BlockMask with `mask_mod` as in `to_mask_mod`.

    Raises:
        Unsupported: the mask has strides, whose tiles are not neighbouring keys.
        TypeError, ValueError: block is not an integer of at least 1.

    Examples:
        >>> from saccade.integrations.flex import to_block_mask
        >>> block_mask = to_block_mask(saccade.mask.causal(), 1, 8, 1024, 1024)  # B, Hq, Tq, Tk
        >>> block_mask.sparsity()  # percent
        43.75
    """
    at_least("block", block, 1)
    limits = Limits("flex", block, block, quantum=block)
    plan = make_plan(Problem(B, Tq, Tk, Hq, Hq, 64, 64, mask=mask), limits)
    part: Any = plan.parts[0]
    if len(plan.parts) > 1 or part.step > 1:
        reason = "a mask of strides: its tiles are not neighbouring keys; use create_block_mask(to_mask_mod(...))"
        raise Unsupported("flex", [reason])
    shape = -(-Tq // block), -(-Tk // block)
    kinds = np.zeros((B, Hq, *shape), np.uint8)
    ptr, seg = part.ranges.ptr, part.ranges.seg
    for b, h, row in np.ndindex(B, Hq, shape[0]):
        at = (int(part.head[h if len(part.head) > 1 else 0]) * part.Bm + min(b, part.Bm - 1)) * part.n_tiles + row
        for begin, end, kind in seg[ptr[at] : ptr[at + 1]]:
            inside = kinds[b, h, row, begin // block : -(-end // block)]
            whole = kind == 2 and begin % block == 0 and end % block == 0
            inside[:] = np.where(inside > 0, 1, 2 if whole else 1)
    # FlexAttention tests blocks that extend over an end pair by pair
    if Tq % block:
        kinds[:, :, -1] = np.minimum(kinds[:, :, -1], 1)
    if Tk % block:
        kinds[..., -1] = np.minimum(kinds[..., -1], 1)
    lists: list[Any] = []
    for kind in (1, 2):
        chosen = kinds == kind
        order = np.argsort(~chosen, axis=-1, kind="stable")
        lists += [torch.from_numpy(x.astype(np.int32)).to(device) for x in (chosen.sum(-1), order)]
    mod = to_mask_mod(mask, B, Hq, Tq, Tk, device=device)
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, mask_mod=mod, seq_lengths=(Tq, Tk))


def from_block_mask(block_mask: BlockMask) -> Mask:
    """The mask of FlexAttention's BlockMask: full blocks become `tiles`, partial ones `dense`.

    Its `mask_mod` is called as in FlexAttention, with scalars under `torch.vmap`, and only for pairs of partial blocks.
    If there are any, the result contains a boolean per pair: O(Tq · Tk) memory.

    Args:
        block_mask: a `torch.nn.attention.flex_attention.BlockMask`.

    Returns:
        A mask of `saccade.mask`.

    Raises:
        TypeError: block_mask is not a BlockMask.

    Examples:
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> from saccade.integrations.flex import from_block_mask
        >>> block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
        >>> print(from_block_mask(block_mask).draw(256, 256, size=4))
        ▒···
        █▒··
        ██▒·
        ███▒
    """
    if not isinstance(block_mask, BlockMask):
        kind = type(block_mask).__name__
        raise TypeError(f"block_mask is a {kind}; expected a BlockMask, as create_block_mask makes of a function")
    B, H, Tq, Tk = (int(n) for n in block_mask.shape)
    size = int(block_mask.BLOCK_SIZE[0]), int(block_mask.BLOCK_SIZE[1])
    shape = -(-Tq // size[0]), -(-Tk // size[1])
    partial = _layout(block_mask.kv_num_blocks, block_mask.kv_indices, shape)
    whole = np.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None:
        whole = _layout(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, shape)
    device = block_mask.kv_indices.device
    heads: list[Mask] = []
    for h in range(H):
        mask = tiles(whole[0, h] if B == 1 else whole[:, h], size)
        if partial[:, h].any():
            bits = _bits_of(block_mask.mask_mod, partial[:, h], h, size, (Tq, Tk), device)
            mask = mask | dense(bits[0] if B == 1 else bits)
        heads.append(mask)
    return heads[0] if H == 1 else per_head(heads)


def _bits_of(
    mod: MaskMod, partial: np.ndarray[Any, Any], h: int, size: tuple[int, int], lengths: tuple[int, int], device: Any
) -> np.ndarray[Any, Any]:
    # bool [B, Tq, Tk]: the function on the pairs of a head's partial blocks, [B, query blocks, key blocks]
    b, row, column = (torch.from_numpy(x).to(device) for x in np.nonzero(partial))
    # positions beyond the end are clipped to the last one and cut off below
    t, j = (
        (block[:, None] * n + torch.arange(n, device=device)).clamp(max=T - 1)
        for block, n, T in zip((row, column), size, lengths, strict=True)
    )
    of_row = torch.vmap(mod, in_dims=(None, None, None, 0))
    of_block = torch.vmap(of_row, in_dims=(None, None, 0, None))
    # table[i] accepts a vmap tensor as an index only in this mode, which FlexAttention also uses
    with TransformGetItemToIndex():
        blocks = torch.vmap(of_block, in_dims=(0, None, 0, 0))(b, torch.tensor(h, device=device), t, j).cpu().numpy()
    rows, columns = partial.shape[1] * size[0], partial.shape[2] * size[1]
    bits = np.zeros((partial.shape[0], partial.shape[1], size[0], partial.shape[2], size[1]), bool)
    bits[b.cpu(), row.cpu(), :, column.cpu()] = blocks
    return bits.reshape(-1, rows, columns)[:, : lengths[0], : lengths[1]]


def _layout(counts: Tensor | None, indices: Tensor | None, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    # bool [B, H, query blocks, key blocks]
    assert counts is not None
    assert indices is not None
    counts, indices = counts[:, :, : shape[0]], indices[:, :, : shape[0]].long()
    used = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    present = torch.zeros(*counts.shape, max(shape[1], indices.shape[-1]), dtype=torch.int32, device=indices.device)
    present.scatter_add_(-1, indices, used.int())
    return (present > 0)[..., : shape[1]].cpu().numpy()


def _test_of(low: f.Lowered, device: Any) -> MaskMod:
    # the element test of a lowered mask, in torch
    def put(x: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(device)

    bands = put(low.bands.astype(np.int64)) if len(low.bands) > 1 else low.bands[0].tolist()
    rows = [(r.axis, put(r.lo), put(r.hi)) for r in low.rows]
    grids = [(g.block_q, g.block_k, put(g.states)) for g in low.grids]
    uses = low.uses.tolist()

    def entry(x: Tensor, b: Any) -> Any:
        return b if x.shape[0] > 1 else b * 0

    def test(b: Any, _: Any, t: Any, j: Any) -> Any:
        d, allowed = t - j, (t < 0) & (j < 0)
        inside_rows = [
            (lo[entry(lo, b), at] <= x) & (x < hi[entry(hi, b), at])
            for lo, hi, at, x in ((lo, hi, *((t, j) if axis == "q" else (j, t))) for axis, lo, hi in rows)
        ]
        inside_grids = [states[entry(states, b), j // k, t // q] != 0 for q, k, states in grids]
        for n, use in enumerate(uses):
            band = bands[n] if isinstance(bands, list) else [bands[b, n, i] for i in range(8)]
            inside_band = (d >= band[f.D_LO]) & (d <= band[f.D_HI]) & (j >= band[f.K_LO]) & (j < band[f.K_HI])
            inside_band = inside_band & (t >= band[f.Q_LO]) & (t < band[f.Q_HI])
            step = band[f.STRIDE]
            if isinstance(step, Tensor) or step != 1:
                met = d % abs(step) == band[f.PHASE]
                inside_band = inside_band & torch.where(torch.as_tensor(step > 0, device=device), met, ~met)
            for r, inside in enumerate(inside_rows):
                if use[f.ROWS_IN] >> r & 1:
                    inside_band = inside_band & inside
                if use[f.ROWS_OUT] >> r & 1:
                    inside_band = inside_band & ~inside
            for g, inside in enumerate(inside_grids):
                if use[f.GRIDS_IN] >> g & 1:
                    inside_band = inside_band & inside
                if use[f.GRIDS_OUT] >> g & 1:
                    inside_band = inside_band & ~inside
            allowed = allowed | inside_band
        return allowed

    return test
