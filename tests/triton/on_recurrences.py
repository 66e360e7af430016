"""Recurrences whose later calls replay the launches of the first, on a GPU. Run by `make test-gpu`."""

from __future__ import annotations

import pytest
import torch

from saccade.backends.triton import replay
from saccade.testing import diagonal
from saccade.testing import recurrent as recurrences
from saccade.testing.tensors import put


@pytest.mark.parametrize(
    "op", [op for op in (*recurrences.OPS, *diagonal.OPS) if "taylor" not in op.name], ids=lambda op: op.name
)
def test_replayed_recurrences_have_the_bits_of_a_first_call(op) -> None:
    def run_with(seed: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(seed)
        leaves = {n: torch.rand_like(x).requires_grad_() if n in changed else x.clone() for n, x in given.items()}
        o, state = op.call(**leaves, **op.options, return_state=True)
        return o, state, *torch.autograd.grad([o], [leaves[n] for n in changed], [torch.ones_like(o)])

    arrays = recurrences.make(op, recurrences.Sizes(B=2, T=300), "bfloat16")
    given = {n: put(x).cuda() for n, x in arrays.items()}
    changed = [n for n in ("v", "u", "x") if n in given]
    # the first call of its layout
    replay._replay_of.cache_clear()
    expected = run_with(2)
    replay._replay_of.cache_clear()
    run_with(1)
    for one, other in zip(expected, run_with(2), strict=True):
        assert torch.equal(one, other)
