"""flash-attn's module `bert_padding`: rows of a padded batch, packed and put back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .flash_arguments import check_integers, check_tensor

__all__ = [
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """input [n, ..] to its rows [len(indices), ..], indices int [m]; differentiable."""
    _check("input", input, 2, "[n, ..]")
    check_integers("indices", indices, (None,), "[m]")
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """values [m, ..] to [first_axis_dim, ..], row n at indices[n] and 0 elsewhere; indices int [m], each once."""
    _check("values", values, 2, "[m, ..]")
    check_integers("indices", indices, (len(values),), f"[{len(values)}], one a row of values")
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """hidden_states [total, ..] to [batch, seqlen, ..], row n at indices[n] of the flat batch, and 0 elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of hidden_states [B, S, ..] where a mask [B, S], bool or int, is not 0.

    unused_mask: rows that are taken too, but are not in use. Returns (rows [total, ..], indices int64 [total] in the
    flat batch, cu_seqlens int32 [B + 1], the longest sequence, seqused int32 [B], the rows of attention_mask alone).
    """
    _check_rows(hidden_states, "attention_mask", attention_mask)
    taken = attention_mask != 0
    if unused_mask is not None:
        _check_rows(hidden_states, "unused_mask", unused_mask)
        taken = taken | (unused_mask != 0)
    used = (attention_mask != 0).sum(-1, dtype=torch.int32)
    indices = taken.flatten().nonzero().flatten()
    return (*_packed(hidden_states, indices, taken.sum(-1)), used)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """`unpad_input` of rows [B, S, ..] that hold short sequences one after the other, without the last result.

    attention_mask_in_length: int [B, S], in each row the lengths of its sequences, and 0 behind them.
    """
    lengths = attention_mask_in_length
    check_integers("attention_mask_in_length", lengths, (None, None), "[B, S]")
    _check_rows(hidden_states, "attention_mask_in_length", lengths)
    places = torch.arange(lengths.shape[1], device=lengths.device)
    indices = (places < lengths.sum(-1, keepdim=True)).flatten().nonzero().flatten()
    return _packed(hidden_states, indices, lengths[lengths != 0])


def _packed(x: Tensor, indices: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    cu = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    return index_first_axis(x.flatten(0, 1), indices), indices, cu, longest


def _check(name: str, x: Any, dims: int, shape: str) -> None:
    check_tensor(name, x)
    if x.dim() < dims:
        raise ValueError(f"{name} has shape {list(x.shape)}; expected {shape}")


def _check_rows(x: Any, name: str, mask: Any) -> None:
    _check("hidden_states", x, 3, "[B, S, ..]")
    check_tensor(name, mask)
    if mask.shape != x.shape[:2]:
        raise ValueError(f"{name} has shape {list(mask.shape)}; expected {list(x.shape[:2])}, as hidden_states")
