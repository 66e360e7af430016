"""How the next token is drawn from its logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .fields import OPTIONS, check_fields

if TYPE_CHECKING:
    Generators = torch.Generator | Sequence[torch.Generator] | None


@dataclass(frozen=True)
class Sampler:
    """How the next token is drawn from its logits.

    temperature: 0 takes the largest logit; top_k: tokens to draw from, 0 for all; top_p: draw from the fewest tokens
    whose probabilities reach this sum. Raises ValueError for values out of range.

    Examples:
        >>> from saccade.models.sampler import Sampler
        >>> Sampler(temperature=0.0).draw(torch.tensor([[0.1, 2.0, 0.3]]))
        tensor([1])
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_fields(vars(self), OPTIONS)

    def draw(self, logits: Tensor, generator: Generators = None, numbers: Mapping[int, int] | None = None) -> Tensor:
        """logits [B, vocab] -> int64 [B]; logits of −inf are never drawn.

        generator: as in `choose`; numbers: of the prompts in the rows, for the error.
        Raises FloatingPointError if a row has NaN, +inf, or nothing above −inf.
        """
        drawn, finite = self.choose(logits, generator)
        if not finite.all():
            raise not_finite(finite, numbers)
        return drawn

    def choose(self, logits: Tensor, generator: Generators = None) -> tuple[Tensor, Tensor]:
        """logits [B, vocab] -> int64 [B] as `draw`, and bool [B], whether the row can be drawn from.

        generator: one for all rows, or one for each, whose row then draws as alone. On a GPU this waits for nothing.
        """
        largest = logits.amax(-1, keepdim=True)
        finite = largest.isfinite()[:, 0]
        if self.temperature == 0:
            return logits.argmax(-1), finite
        if logits.is_cpu and not finite.all():
            # the probabilities below would be NaN, which torch refuses with words of its own
            return logits.argmax(-1), finite
        # the largest is now 0, so that a small temperature overflows to −inf, never to +inf
        logits = (logits - largest).double().div(self.temperature).float()
        if self.top_k:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p < 1:
            ordered, index = logits.softmax(-1).sort(-1, descending=True)
            beyond = ordered.cumsum(-1) - ordered >= self.top_p
            logits = logits.masked_fill(beyond.gather(-1, index.argsort(-1)), -torch.inf)
        return _multinomial(logits.softmax(-1), generator), finite


def _multinomial(p: Tensor, generator: Generators) -> Tensor:
    """p [B, vocab] -> int64 [B]. On a GPU by the race of exponentials that torch.multinomial runs after its checks."""
    if isinstance(generator, Sequence):
        return torch.cat([_multinomial(row, one) for row, one in zip(p.split(1), generator, strict=True)])
    if p.is_cpu:
        return torch.multinomial(p, 1, generator=generator)[:, 0]
    return (p / torch.empty_like(p).exponential_(generator=generator)).argmax(-1)


def not_finite(finite: Tensor, numbers: Mapping[int, int] | None = None) -> FloatingPointError:
    """The error for rows, bool [B], whose logits are not finite; numbers: of the prompts in rows, None for a batch."""
    rows = (~finite).nonzero()[:, 0].tolist()
    which = f"sequences {rows[:8]} of the batch"
    if numbers is not None:
        which = f"prompts {[numbers[r] for r in rows if r in numbers][:8]}"
    return FloatingPointError(
        f"the model's logits for {which} are not finite, so no token can be drawn; "
        "check its weights, or compute in a dtype of wider range"
    )
