"""Recurrences of sequences with a contiguous slice on each rank; states cross the borders in one exchange.

A slice turns the state S that enters it into D S + S_own (`state_passing`). Every rank computes D and S_own of its
slice and gathers those of all ranks. Then it combines those of earlier ranks into its initial state, from which it
computes the same as one process would. In the backward, gradients of the entering states are gathered and combined from
the last rank to the first, and each rank's own backward computes the rest (LASP-2 of Sun et al., 2025, does so for
linear attention).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..arrays import ArrayOrList, ArrayOrTuple
from .comm import GroupCall, peers_of
from .layout import count, runs_of
from .refusal import taking_part
from .slices import Slice
from .state_passing import RecurrentCall, act, bind, passage, run


class Stretch(NamedTuple):
    """A call on the slice of a rank, and the exchange with other ranks."""

    call: RecurrentCall
    slice: Slice
    exchange: GroupCall
    keep: bool

    @property
    def matrix(self) -> bool:
        """Whether D is a matrix."""
        return self.call.name in ("gated_delta_rule", "causal_conv1d")

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self.exchange.peers.rank

    @property
    def last(self) -> int:
        """The rank with the last tokens."""
        return self.exchange.peers.world - 1


def recurrent(
    op: Callable[..., Any],
    *arrays: Any,
    group: Any = None,
    initial_state: Tensor | tuple[Tensor, Tensor] | None = None,
    return_state: bool = False,
    cu_seqlens: ArrayOrList | None = None,
    **options: Any,
) -> ArrayOrTuple:
    """A call of `saccade.recurrent` on sequences that are divided among ranks: `recurrent(scalar_decay, q, k, v, g)`.

    Outputs and gradients are those of one process with the whole sequences. Forward and backward send two small
    messages to each other rank: a state and its decay. Ranks have contiguous slices, in the order of ranks.

    Args:
        op: a function of `saccade.recurrent`.
        arrays, options: its arguments by position and by name. Arrays with tokens are this rank's slices [B, n, ...],
            torch tensors (`shard(x, layout="contiguous")`); n may differ between ranks. Weights are the same on all
            ranks; their gradient is the contribution of this rank's tokens, to be summed over ranks.
        group: a ProcessGroup, a DeviceMesh with one dimension, or None for all ranks.
        initial_state: of the whole sequences, as in op. That of the first rank is used and has a gradient; if it
            requires one, those of all ranks must. Not with cu_seqlens.
        return_state: return (output, final state of the whole sequences), the same on every rank. Not with cu_seqlens.
        cu_seqlens: [N + 1], the bounds of packed sequences in the whole, the same on every rank; the slices must then
            be those of `shard`.

    Raises:
        TypeError, ValueError, Unsupported: as in op; also if op is not one of these, or slices do not fit.
        PeerError: another rank died, hangs, or makes another call.

    Examples:
        >>> from saccade.distributed import recurrent, shard  # on every rank, after init_process_group
        >>> arrays = *torch.randn(3, 2, 1024, 8, 64), -torch.rand(2, 1024, 8)
        >>> q, k, v, g = (shard(x, layout="contiguous") for x in arrays)
        >>> o = recurrent(saccade.recurrent.scalar_decay, q, k, v, g)
    """
    if isinstance(return_state, str):
        raise ValueError(f"return_state is {return_state!r}; expected True or False: ranks exchange float32 states")
    peers = peers_of(group)
    with taking_part(peers):
        call = bind(op, arrays, options)
        if cu_seqlens is None:
            piece, whole = Slice.of_rows(len(call.first), peers.rank > 0), ""
        else:
            if initial_state is not None or return_state:
                raise ValueError(
                    "states of packed sequences are on many ranks; leave out initial_state and return_state"
                )
            borders = torch.as_tensor(cu_seqlens, device=call.first.device)
            piece, whole = _packed(borders, call.first.shape[1], peers.world, peers.rank), f"{borders.tolist()}"
        y, state = on_slice(call, piece, group, whole, initial_state, return_state)
    return (y, state) if return_state else y


def on_slice(
    call: RecurrentCall, piece: Slice, group: Any, whole: str = "", initial_state: Any = None, keep: bool = False
) -> tuple[Tensor, Any]:
    """`recurrent` for a described slice; whole: text about the borders of the sequences on which ranks must agree."""
    peers = peers_of(group)
    with taking_part(peers):
        shapes = [
            f"{n} {[len(piece.heads), *x.shape[2:]] if n in call.rows else [*x.shape]} {x.dtype}"
            for n, x in call.arrays.items()
        ]
        pair = isinstance(initial_state, (tuple, list))
        initial = torch.cat([initial_state[0], initial_state[1][..., None]], -1) if pair else initial_state
        if initial is not None and initial.dtype.itemsize < 4:
            initial = initial.float()
        inputs = [initial, *call.arrays.values()]
        grads = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        # every rank takes part in the backward, or none
        words = [f"{call.options}", f"keep {keep}", f"gradients {grads}", whole]
        signature = "; ".join([f"recurrent {call.name}", *shapes, *words])
        exchange = peers.begin(f"recurrent({call.name})", signature, call.first.device)
        stretch = Stretch(call._replace(arrays=dict.fromkeys(call.arrays)), piece, exchange, keep)
        y, state = _Carried.apply(stretch, *inputs) if grads else _compute(stretch, inputs).results
        if keep and call.name == "linear_attention" and call.options.get("normalize", True):
            state = state[..., :-1], state[..., -1]
        return y, state


def _packed(borders: Tensor, tokens: int, world: int, rank: int) -> Slice:
    # borders of the whole, and the slice that `shard` gives this rank
    if borders.ndim != 1 or len(borders) < 1 or int(borders[0]) or bool((borders.diff() < 0).any()):
        raise ValueError(f"cu_seqlens is {borders.tolist()}; expected numbers from 0 that never decrease")
    runs = runs_of("contiguous", world, int(borders[-1]))
    if count(runs[rank]) != tokens:
        raise ValueError(
            f"rank {rank} has a slice of {tokens} tokens; expected the {count(runs[rank])} of {int(borders[-1])} (the "
            "end of cu_seqlens) that shard(x, layout='contiguous') gives it"
        )
    return Slice.of_borders(borders, sum(count(before) for before in runs[:rank]), tokens)


# for each lane whether a state passes a rank, and its D there
_Passing = tuple[Tensor, Tensor]


class _Computed(NamedTuple):
    # results of a forward for its backward; final and total: the states after this slice and after the last one
    stretch: Stretch
    entering: list[Tensor]
    passing: list[_Passing]
    y: Tensor
    final: Tensor
    total: Tensor

    @property
    def results(self) -> tuple[Tensor, Tensor]:
        return self.y.detach(), self.total


def _compute(stretch: Stretch, inputs: Sequence[Tensor | None]) -> _Computed:
    # inputs: the initial state of the first rank, and the arrays
    initial, *arrays = inputs
    initial = None if stretch.rank else initial
    stretch = stretch._replace(call=stretch.call._replace(arrays=dict(zip(stretch.call.arrays, arrays, strict=True))))
    with torch.no_grad():
        entering, passing, total = _enter(stretch, initial)
    for x in entering:
        x.requires_grad_(torch.is_grad_enabled())
    piece, call = stretch.slice, stretch.call
    begin = _placed(piece, entering, initial, call.causal)
    y, final = run(call, piece.sequences, begin, [new and initial is None for new in piece.fresh])
    return _Computed(stretch, entering, passing, y, final, total)


class _Carried(torch.autograd.Function):
    """(stretch, initial state, arrays) -> (outputs, final states of the whole).

    The operator's own graph runs backward twice: for the gradients of the entering states and, after the ranks have
    exchanged these, for all others.
    """

    @staticmethod
    def forward(ctx: Any, stretch: Stretch, *inputs: Tensor | None) -> Any:
        needs = ctx.needs_input_grad[1:]
        ctx.leaves = [None if x is None else x.detach().requires_grad_(n) for x, n in zip(inputs, needs, strict=True)]
        with torch.enable_grad():
            ctx.computed = _compute(stretch, ctx.leaves)
        if not stretch.keep:
            ctx.mark_non_differentiable(ctx.computed.total)
        return ctx.computed.results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        done, ctx.computed = ctx.computed, None
        if done is None:
            raise RuntimeError("a recurrence over ranks has one backward, also with retain_graph=True: call it again")
        dy, dtotal = grads
        entered = [torch.zeros_like(x) for x in done.entering]
        if done.stretch.rank or not done.stretch.call.causal:
            gradients = torch.autograd.grad(done.y, done.entering, dy, retain_graph=True, allow_unused=True)
            entered = [x if g is None else g for x, g in zip(entered, gradients, strict=True)]
        dfinal = _leave(done, entered, dtotal)
        wanted = [x for x in ctx.leaves if x is not None and x.requires_grad]
        cotangents = {x: d for x, d in ((done.y, dy), (done.final, dfinal)) if x.requires_grad}
        results = iter(torch.autograd.grad(list(cotangents), wanted, list(cotangents.values()), allow_unused=True))
        return None, *(next(results) if x is not None and x.requires_grad else None for x in ctx.leaves)


def _enter(stretch: Stretch, initial: Tensor | None) -> tuple[list[Tensor], list[_Passing], Tensor]:
    """The states that enter each lane, from the left and, if all tokens are read, from the right; how they pass every
    rank; and the state after the last rank, with 0 elements if it is not needed."""
    call, piece, rank, last = stretch.call, stretch.slice, stretch.rank, stretch.last
    needed = rank < last or stretch.keep or not call.causal
    of_tails, tails = call.only(piece.sequences, piece.tails, _reach(call) if needed else 1)
    fresh = [piece.fresh[n] and initial is None for n in piece.tails]
    factor, own = passage(of_tails, tails, initial, fresh)
    parts = [torch.tensor(piece.passed, device=own.device), factor, own]
    if not call.causal:
        of_heads, heads = call.only(piece.sequences, piece.heads)
        of_head = passage(of_heads, heads, None, [True] * len(piece.heads))[1]
        parts.append(_of_lanes(piece.entered, of_head))
    ranks = stretch.exchange.gather("states", parts)
    passing = [(x[0], x[1]) for x in ranks]
    steps = [(x[0], x[1], x[2]) for x in ranks]
    entering = [_fold(steps[:rank], own, stretch.matrix)]
    total = _fold(steps, own, stretch.matrix) if stretch.keep else own.new_empty(0)
    if not call.causal:
        entering.append(_fold([(x[0], x[1], x[3]) for x in reversed(ranks[rank + 1 :])], own, False))
    return entering, passing, total


def _leave(done: _Computed, entered: list[Tensor], dtotal: Tensor) -> Tensor:
    """The gradients of the final states of the sequences here, from those of the states that entered every rank."""
    stretch, final = done.stretch, done.final
    piece, rank = stretch.slice, stretch.rank
    ranks = stretch.exchange.gather("gradients of states", [*entered, *([dtotal] if stretch.keep else [])])
    start = torch.stack([x[-1] for x in ranks]).sum(0) if stretch.keep else torch.zeros_like(entered[0])
    steps = [(*way, x[0]) for way, x in zip(done.passing, ranks, strict=True)]
    left = _fold(reversed(steps[rank + 1 :]), start, stretch.matrix, True)
    dfinal = torch.zeros_like(final).index_add(0, torch.tensor(piece.tails, device=final.device), left)
    if stretch.call.causal:
        return dfinal
    steps = [(*way, x[1]) for way, x in zip(done.passing, ranks, strict=True)]
    right = _of_lanes(piece.entered, _fold(steps[:rank], torch.zeros_like(start), False))
    return dfinal.index_add(0, torch.tensor(piece.heads, device=final.device), right)


def _fold(steps: Iterable[tuple[Tensor, Tensor, Tensor]], start: Tensor, matrix: bool, back: bool = False) -> Tensor:
    # steps: for each rank whether lanes pass, their factor, and the added state; back: from `start`, else from 0
    state = start if back else torch.zeros_like(start)
    for passed, factor, own in steps:
        state = _of_lanes(passed, act(factor, state, matrix, back)) + own
    return state


def _placed(piece: Slice, entering: list[Tensor], initial: Tensor | None, causal: bool) -> Tensor | None:
    # the initial state of every sequence
    if initial is not None:
        return initial if causal else initial + entering[1]
    left = _of_lanes(piece.entered, entering[0])
    if not any(piece.entered) and causal:
        return None
    state = left.new_zeros(piece.size, *left.shape[1:])
    state = state.index_add(0, torch.tensor(piece.heads, device=left.device), left)
    return state if causal else state.index_add(0, torch.tensor(piece.tails, device=left.device), entering[1])


def _of_lanes(which: tuple[bool, ...] | Tensor, x: Tensor) -> Tensor:
    # selected rather than multiplied, because 0 · NaN is NaN
    chosen = torch.as_tensor(which, device=x.device).view(-1, *[1] * (x.ndim - 1))
    return torch.where(chosen, x, torch.zeros_like(x))


def _reach(call: RecurrentCall) -> int | None:
    # the number of last tokens on which a state depends; None for all
    return max(1, call.arrays["weight"].shape[1] - 1) if call.name == "causal_conv1d" else None
