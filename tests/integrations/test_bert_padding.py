"""bert_padding: rows of a padded batch, packed and put back, with gradients."""

from __future__ import annotations

import pytest
import torch

from saccade.integrations import bert_padding, flash_attn

from .flash_reference import close, plain, rand

MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 1, 1, 0, 0]])


def test_rows_are_packed_and_put_back() -> None:
    x = rand(3, 5, 2, 4).requires_grad_()
    rows, indices, cu, longest, used = bert_padding.unpad_input(x, MASK)
    assert torch.equal(rows, x[MASK.bool()])
    assert indices.dtype is torch.int64
    assert indices.tolist() == [0, 1, 2, 5, 6, 7, 8, 9, 11, 12]
    assert cu.dtype is torch.int32
    assert cu.tolist() == [0, 3, 8, 10]
    assert longest == 5
    assert used.tolist() == [3, 5, 2]
    back = bert_padding.pad_input(rows, indices, 3, 5)
    assert torch.equal(back, x * MASK[..., None, None])
    do = rand(*back.shape, seed=1)
    assert torch.equal(torch.autograd.grad(back, x, do)[0], do * MASK[..., None, None])
    assert all(
        torch.equal(a, b) for a, b in zip((rows, indices, cu), bert_padding.unpad_input(x, MASK.bool()), strict=False)
    )


def test_rows_that_are_not_in_use_are_taken_and_not_counted() -> None:
    unused = torch.tensor([[0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]])
    rows, _, cu, longest, used = bert_padding.unpad_input(rand(3, 5, 4), MASK, unused)
    assert cu.tolist() == [0, 4, 9, 12]
    assert len(rows) == 12
    assert (longest, used.tolist()) == (5, [3, 5, 2])


def test_short_sequences_in_one_row() -> None:
    lengths = torch.tensor([[2, 1, 0, 0, 0], [5, 0, 0, 0, 0], [1, 1, 2, 0, 0]])
    x = rand(3, 5, 4)
    rows, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert cu.tolist() == [0, 2, 3, 8, 9, 10, 12]
    assert longest == 5
    assert indices.tolist() == [0, 1, 2, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert torch.equal(rows, x.flatten(0, 1)[indices])


def test_indexing_the_first_axis() -> None:
    x, at = rand(6, 2, 3).requires_grad_(), torch.tensor([4, 0, 4])
    rows = bert_padding.index_first_axis(x, at)
    assert torch.equal(rows, x[at])
    rows.sum().backward()
    assert x.grad[:, 0, 0].tolist() == [1, 0, 0, 0, 2, 0]
    put = bert_padding.index_put_first_axis(rows[:2], at[:2], 6)
    assert torch.equal(put[4], x[4])
    assert put[1:4].abs().sum() == 0


def test_a_padded_batch_by_way_of_packed_sequences() -> None:
    """What models with padding do: unpad, attend, pad."""
    q, k, v = (rand(3, 5, h, 8, seed=n) for n, h in enumerate((4, 2, 2)))
    unpad = flash_attn.bert_padding.unpad_input
    (q1, at, cu, most, _), (k1, *_), (v1, *_) = (unpad(x, MASK) for x in (q, k, v))
    o = flash_attn.flash_attn_varlen_func(q1, k1, v1, cu, cu, most, most, causal=True)
    o = flash_attn.bert_padding.pad_input(o, at, 3, 5)
    for b in range(3):
        there = MASK[b].bool()
        close(o[b, there], plain(q[b, there], k[b, there], v[b, there], causal=True)[0])
        assert not o[b, ~there].any()


def test_nothing_to_pack() -> None:
    rows, _, cu, longest, _ = bert_padding.unpad_input(rand(2, 3, 4), torch.zeros(2, 3))
    assert (len(rows), cu.tolist(), longest) == (0, [0, 0, 0], 0)


WRONG = {
    "mask": (lambda: bert_padding.unpad_input(rand(2, 3, 4), MASK), ValueError, r"attention_mask has shape \[3, 5\]"),
    "unused": (lambda: bert_padding.unpad_input(rand(3, 5, 4), MASK, MASK[:2]), ValueError, "unused_mask has shape"),
    "states": (lambda: bert_padding.unpad_input(MASK, MASK), ValueError, r"hidden_states has shape .*\[B, S, ..\]"),
    "list": (lambda: bert_padding.unpad_input(rand(1, 2, 4), [[1, 1]]), TypeError, "attention_mask is list"),
    "indices": (lambda: bert_padding.pad_input(rand(4, 2), torch.arange(3), 2, 3), ValueError, r"integers \[4\]"),
    "floats": (lambda: bert_padding.index_first_axis(rand(4, 2), rand(2)), ValueError, "indices is torch.float32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name) -> None:
    call, kind, words = WRONG[name]
    with pytest.raises(kind, match=words):
        call()
