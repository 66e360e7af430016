"""How a stretch of tokens changes the state of each recurrence: S_out = D S_in + S_own. D depends only on the tokens.

D is a factor that broadcasts with S; for the delta rule and the convolution it is a matrix on the left.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .. import recurrent
from .slices import Sequences, inverse

Arrays = dict[str, Any]
# the arrays of each operator that have tokens in dimension 1
TOKENS = {
    "linear_attention": ("q", "k", "v"),
    "scalar_decay": ("q", "k", "v", "g"),
    "gated_linear": ("q", "k", "v", "g"),
    "gated_delta_rule": ("q", "k", "v", "beta", "g"),
    "ssd": ("x", "dt", "B", "C", "z"),
    "selective_scan": ("u", "delta", "B", "C", "z"),
    "rg_lru": ("x", "r", "i"),
    "causal_conv1d": ("x",),
}
WEIGHTS = ("A", "D", "dt_bias", "delta_bias", "a_param", "weight", "bias")


class RecurrentCall(NamedTuple):
    """An operator of `saccade.recurrent` by name, its floating arrays by name, and its options."""

    name: str
    arrays: Arrays
    options: Arrays

    @property
    def rows(self) -> Arrays:
        """The arrays with tokens, [B, T, ...]; constant B and C of a scan have none."""
        return {n: x for n, x in self.arrays.items() if n in TOKENS[self.name] and x.ndim > 2}

    @property
    def first(self) -> Tensor:
        """The array that determines B, T, dtype and device."""
        return self.arrays[TOKENS[self.name][0]]

    @property
    def causal(self) -> bool:
        """Whether no token reads later ones."""
        return self.options.get("causal", True)

    def among(self, choose: Callable[[Tensor], Tensor]) -> RecurrentCall:
        """The call on some of the tokens."""
        return self._replace(arrays={**self.arrays, **{n: choose(x) for n, x in self.rows.items()}})

    def only(
        self, sequences: Sequences, which: Sequence[int], last: int | None = None
    ) -> tuple[RecurrentCall, Sequences]:
        """The call on some of the sequences; last: only on this many tokens at the end of each."""
        choose, part = sequences.only(self.first, which, last)
        return self.among(choose), part

    def __call__(self, initial: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        """The outputs and the final states; a normaliser is the last column of both states."""
        pair = self.name == "linear_attention" and self.options.get("normalize", True)
        start = (initial[..., :-1], initial[..., -1]) if pair and initial is not None else initial
        rest = {**self.options, "initial_state": start, "cu_seqlens": cu_seqlens, "return_state": True}
        y, state = getattr(recurrent, self.name)(**self.arrays, **rest)
        return y, torch.cat([state[0], state[1][..., None]], -1) if pair else state


def bind(op: Callable[..., Any], arrays: Sequence[Any], options: Arrays) -> RecurrentCall:
    """The call op(*arrays, **options).

    Raises TypeError if op is not an operator of `saccade.recurrent` or an array is not a tensor, and the errors of op.
    """
    name = getattr(op, "__name__", "")
    if name not in TOKENS or getattr(recurrent, name) is not op:
        raise TypeError(f"op is {op!r}; expected one of saccade.recurrent: {', '.join(TOKENS)}")
    arguments = inspect.signature(op).bind(*arrays, **options).arguments
    known = (*TOKENS[name], *WEIGHTS)
    tensors = {n: x for n, x in arguments.items() if n in known and x is not None}
    for n, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{n} is {type(x).__name__}; expected a torch tensor, the slice of this rank")
    if name == "gated_delta_rule" and tensors["k"].ndim == tensors["beta"].ndim == 4:
        raise ValueError(
            f"beta has shape {list(tensors['beta'].shape)}; expected [B, n, H], a beta per head, over ranks"
        )
    return RecurrentCall(name, tensors, {n: x for n, x in arguments.items() if n not in known})


def run(
    call: RecurrentCall, sequences: Sequences, initial: Tensor | None, fresh: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """(outputs, final states) from these initial states; an RG-LRU has none for a fresh sequence."""
    if call.name != "rg_lru" or initial is None or not any(fresh):
        return call(initial, sequences.cu_seqlens)
    if all(fresh):
        return call(None, sequences.cu_seqlens)
    kinds = [[n for n, new in enumerate(fresh) if new is kind] for kind in (True, False)]
    outputs: list[tuple[Sequence[int], Tensor]] = []
    states: list[Tensor] = []
    for which, state in zip(kinds, (None, initial[kinds[1]]), strict=True):
        part, of_part = call.only(sequences, which)
        y, final = part(state, of_part.cu_seqlens)
        outputs.append((which, y))
        states.append(final)
    return sequences.place(outputs), torch.cat(states)[inverse([*kinds[0], *kinds[1]])]


def passage(
    call: RecurrentCall, sequences: Sequences, initial: Tensor | None, fresh: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """(D, S_own) of each sequence; S_own is the final state from `initial`, or from zeros."""
    if call.name == "gated_delta_rule":
        return _of_the_rule(call, sequences, initial)
    if call.name == "rg_lru" and initial is None:
        x = wide(call.first)
        initial = x.new_zeros(len(fresh), x.shape[2])
    own = run(call, sequences, initial, fresh)[1]
    if call.name == "causal_conv1d":
        return torch.stack([_shift(own, n) for n in _lengths(call, sequences, len(own))])[:, None], own
    return _factor(call, sequences, own), own


def act(D: Tensor, S: Tensor, matrix: bool, transposed: bool = False) -> Tensor:
    """D S, or Dᵀ S; the state of a convolution [.., D, K - 1] has no columns."""
    if not matrix:
        return D * S
    by = D.mT if transposed else D
    # states stay in float32, also under autocast
    with torch.autocast(S.device.type, enabled=False):
        return by @ S if S.ndim == 4 else (by @ S[..., None])[..., 0]


def wide(x: Tensor) -> Tensor:
    """x in the dtype of states."""
    return x if x.dtype == torch.float64 else x.float()


def _of_the_rule(call: RecurrentCall, sequences: Sequences, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    # K more columns that start as the identity and absorb no values become D
    k, v = call.arrays["k"], call.arrays["v"]
    N, H, (K, V) = _count(call, sequences), v.shape[-2], (k.shape[-1], v.shape[-1])
    start = wide(v).new_zeros(N, H, K, V) if initial is None else initial
    identity = torch.eye(K, dtype=start.dtype, device=start.device).expand(N, H, K, K)
    more = call._replace(arrays={**call.arrays, "v": functional.pad(v, (0, K))})
    both = more(torch.cat([start, identity], -1), sequences.cu_seqlens)[1]
    return both[..., V:], both[..., :V]


def _factor(call: RecurrentCall, sequences: Sequences, own: Tensor) -> Tensor:
    # decays over all tokens of a sequence, from sums of their logarithms
    a = {n: wide(x) for n, x in call.arrays.items()}

    def total(x: Tensor) -> Tensor:
        if sequences.borders is None:
            return x.sum(1)
        return torch.stack([x[0, i:j].sum(0) for i, j in pairwise(sequences.borders)])

    if call.name in ("scalar_decay", "gated_linear"):
        g = total(a["g"]).exp()
        return g[..., None] if g.ndim == 3 else g[..., None, None]
    if call.name == "rg_lru":
        return (-8 * functional.softplus(a["a_param"]) * total(a["r"].sigmoid())).exp()
    if call.name == "linear_attention":
        return own.new_ones(len(own), 1, 1, 1)
    step, bias, soft = (
        ("dt", "dt_bias", "dt_softplus") if call.name == "ssd" else ("delta", "delta_bias", "delta_softplus")
    )
    steps = a[step] + a[bias] if bias in a else a[step]
    steps = functional.softplus(steps) if call.options.get(soft) else steps
    limit = call.options.get("dt_limit")
    steps = total(steps if limit is None else steps.clamp(*limit))
    return (
        (steps[..., None] * a["A"]).exp() if call.name == "selective_scan" else (steps * a["A"]).exp()[..., None, None]
    )


def _count(call: RecurrentCall, sequences: Sequences) -> int:
    return len(call.first) if sequences.borders is None else len(sequences.borders) - 1


def _lengths(call: RecurrentCall, sequences: Sequences, count: int) -> list[int]:
    if sequences.borders is None:
        return [call.first.shape[1]] * count
    return [j - i for i, j in pairwise(sequences.borders)]


def _shift(own: Tensor, tokens: int) -> Tensor:
    # the matrix that moves the last K - 1 inputs by so many tokens: from i + tokens to i
    place = torch.arange(own.shape[2], device=own.device)
    return (place[:, None] + tokens == place).to(own.dtype)
