"""flash-attn's module `bert_padding`: pack the rows of a padded batch, and unpack them."""

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
    """The rows of input [n, ...] at indices, int [m]: [m, ...]; differentiable."""
    _check("input", input, 2, "[n, ..]")
    check_integers("indices", indices, (None,), "[m]")
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """[first_axis_dim, ...], row n of values [m, ...] at indices[n] and 0 elsewhere; indices: int [m], each once."""
    _check("values", values, 2, "[m, ..]")
    check_integers("indices", indices, (len(values),), f"[{len(values)}], one per row of values")
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put packed rows back into a padded batch; the inverse of `unpad_input`.

    Args:
        hidden_states: [total, ...], the packed rows.
        indices: int [total], the index of each row in the flat batch.
        batch, seqlen: sizes of the padded batch.

    Returns:
        [batch, seqlen, ...], with 0 in all other rows.

    Examples:
        >>> from saccade.integrations.bert_padding import pad_input, unpad_input
        >>> attention_mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
        >>> rows, indices, *_ = unpad_input(torch.randn(2, 5, 64), attention_mask)
        >>> pad_input(rows, indices, 2, 5).shape
        torch.Size([2, 5, 64])
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the rows of a padded batch that a mask selects.

    Args:
        hidden_states: [B, S, ...].
        attention_mask: bool or int [B, S]; rows where it is not 0 are in use.
        unused_mask: bool or int [B, S], further rows that are packed, but are not in use.

    Returns:
        (rows, indices, cu_seqlens, max_seqlen, seqused): the packed rows [total, ...], their indices in the flat batch
        (int64 [total]), the bounds of the sequences (int32 [B + 1]), the length of the longest (int), and the rows of
        attention_mask in each sequence (int32 [B]).

    Examples:
        >>> from saccade.integrations.bert_padding import unpad_input
        >>> attention_mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
        >>> rows, indices, cu_seqlens, max_seqlen, _ = unpad_input(torch.randn(2, 5, 64), attention_mask)
        >>> rows.shape, cu_seqlens
        (torch.Size([8, 64]), tensor([0, 3, 8], dtype=torch.int32))
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
    """Pack the rows of a padded batch in which each entry is a concatenation of short sequences.

    Args:
        hidden_states: [B, S, ...].
        attention_mask_in_length: int [B, S]; each entry has the lengths of its sequences, then 0.

    Returns:
        (rows, indices, cu_seqlens, max_seqlen), as in `unpad_input`.

    Examples:
        >>> from saccade.integrations.bert_padding import unpad_input_for_concatenated_sequences
        >>> lengths = torch.tensor([[2, 1, 0, 0, 0], [5, 0, 0, 0, 0]])  # 2 and 1 tokens, 5 tokens
        >>> rows, _, cu_seqlens, _ = unpad_input_for_concatenated_sequences(torch.randn(2, 5, 64), lengths)
        >>> cu_seqlens
        tensor([0, 2, 3, 8], dtype=torch.int32)
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
        raise ValueError(f"{name} has shape {list(mask.shape)}; expected {list(x.shape[:2])}, like hidden_states")
