"""Gradients of recurrences over ranks: none, some, only that of the first state, under autocast, and twice."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_states import Tensors, furthest, together
from world import world

from saccade import attention as whole_attention
from saccade import mask, recurrent
from saccade.distributed import attention, shard, unshard
from saccade.distributed import recurrent as over_ranks


def test_no_gradient_no_graph() -> None:
    for needs in world(2).run(without_gradients):
        assert not needs


def without_gradients() -> bool:
    q = torch.ones(1, 4, 2, 4, requires_grad=True)
    with torch.no_grad():
        y, state = over_ranks(recurrent.linear_attention, q, q, q, return_state=True)
    return y.requires_grad or state[0].requires_grad


def partly_wanted() -> float:
    """Gradients of sums without a normaliser, if only keys or only a skip need one."""
    given = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=given, dtype=torch.float64)  # noqa: E731
    x, dt, A, B, C, D = (
        draw(1, 9, 2, 3),
        draw(1, 9, 2).abs(),
        -draw(2).abs(),
        draw(1, 9, 1, 4),
        draw(1, 9, 1, 4),
        draw(2),
    )
    worst = 0.0
    for wanted in (("D",), ("B",), ("A", "C")):
        named = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D}
        grads: list[Tensors] = []
        for alone in (True, False):
            cut = lambda n, v, alone=alone: v if alone or n in "AD" else shard(v, layout="contiguous")  # noqa: E731
            leaves = {n: cut(n, v).clone().requires_grad_(n in wanted) for n, v in named.items()}
            y = recurrent.ssd(**leaves) if alone else over_ranks(recurrent.ssd, **leaves)
            (y * y).sum().backward()
            found = {f"d{n}": leaves[n].grad for n in wanted}
            grads.append(found if alone else together(found, {"B", "C"}))
        worst = max(worst, furthest(*grads))
    return worst


def test_some_gradients_alone() -> None:
    assert max(world(3).run(partly_wanted)) <= 1e-12


def of_the_state() -> tuple[float, str]:
    """The error of the first state's gradient, the only one that is wanted, and what a second backward raises."""
    q = torch.randn(1, 8, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    g = -q[..., 0].abs()
    alone, state = (torch.ones(1, 2, 4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    recurrent.scalar_decay(q, q, q, g, initial_state=alone).sum().backward()
    rows = [shard(x, layout="contiguous") for x in (q, q, q, g)]
    loss = over_ranks(recurrent.scalar_decay, *rows, initial_state=state).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    if dist.get_rank():
        assert state.grad is None
        return 0.0, str(caught.value)
    assert state.grad is not None
    assert alone.grad is not None
    return float((state.grad - alone.grad).abs().max()), str(caught.value)


def test_the_first_state_alone() -> None:
    for error, told in world(3).run(of_the_state):
        assert error <= 1e-12
        assert "has one backward" in told


def unequal() -> str:
    from saccade.distributed import PeerError

    x = torch.ones(1, 4, 4, requires_grad=dist.get_rank() > 0)
    with pytest.raises(PeerError) as caught:
        over_ranks(recurrent.causal_conv1d, x, torch.ones(4, 3))
    return str(caught.value)


def test_all_ranks_take_part_in_a_backward() -> None:
    for told in world(2).run(unequal):
        assert "gradients " in told
    # calls of these ranks no longer agree
    world(2).close()


def under_autocast(strategy: str) -> float:
    """The largest difference of o and dq from those of one process; both run under autocast."""
    whole = torch.randn(1, 12, 4, 16, generator=torch.Generator().manual_seed(0))
    alone, rows = whole.clone().requires_grad_(), shard(whole, layout="zigzag").requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        o = whole_attention(alone, alone, alone, mask.causal())
        ours = attention(rows, rows, rows, mask.causal(), strategy=strategy)
        assert o.dtype == ours.dtype == torch.bfloat16
    o.float().sum().backward()
    ours.float().sum().backward()
    assert alone.grad is not None
    assert rows.grad is not None
    pairs = ((o.detach(), ours.detach()), (alone.grad, rows.grad))
    return max(float((x - unshard(y, layout="zigzag")).abs().max()) for x, y in pairs)


@pytest.mark.parametrize("strategy", ["ring", "ulysses", "gather"])
def test_autocast(strategy: str) -> None:
    assert max(world(2).run(under_autocast, strategy)) <= 0.05


def rule_under_autocast() -> float:
    """The largest difference of the delta rule's outputs from those of one process, in float32 under autocast."""
    given = torch.Generator().manual_seed(0)
    q, k, v = (torch.nn.functional.normalize(torch.randn(1, 8, 2, 4, generator=given), dim=-1) for _ in range(3))
    arrays = q, k, v, torch.rand(1, 8, 2, generator=given), -torch.rand(1, 8, 2, generator=given)
    with torch.autocast("cpu", torch.bfloat16):
        rows = (shard(x, layout="contiguous") for x in arrays)
        y = over_ranks(recurrent.gated_delta_rule, *rows)
    return float((unshard(y, layout="contiguous") - recurrent.gated_delta_rule(*arrays)).abs().max())


def test_autocast_rounds_no_states() -> None:
    assert max(world(3).run(rule_under_autocast)) <= 1e-5
