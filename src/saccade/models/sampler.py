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
        check_fields(vars(self), OPTIONS, optional=False)

    def draw(self, logits: Tensor, generator: Generators = None, numbers: Mapping[int, int] | None = None) -> Tensor:
        """logits [B, vocab] -> int64 [B]; logits of −inf are never drawn.

        generator: one of the CPU for all rows, or one for each, whose row then draws as alone. numbers: of the prompts
        in the rows, for the error.
        Raises FloatingPointError if a row has NaN, +inf, or nothing above −inf.
        """
        chances = None if self.temperature == 0 else uniform(len(logits), generator).to(logits.device)
        drawn, finite = self.choose(logits, chances)
        if not finite.all():
            raise not_finite(finite, numbers)
        return drawn

    def choose(self, logits: Tensor, chances: Tensor | None) -> tuple[Tensor, Tensor]:
        """logits [B, vocab] -> int64 [B] as `draw`, and bool [B], whether the row can be drawn from.

        chances: float64 [B], uniform numbers from 0 up to 1, unless the temperature is 0. On a GPU this waits for
        nothing.
        """
        largest = logits.amax(-1, keepdim=True)
        finite = largest.isfinite()[:, 0]
        if chances is None:
            return logits.argmax(-1), finite
        # the largest is now 0, so that a small temperature overflows to −inf, never to +inf
        logits = (logits - largest).double().div(self.temperature).float()
        if self.top_k:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p < 1:
            ordered, index = logits.softmax(-1).sort(-1, descending=True)
            beyond = ordered.cumsum(-1) - ordered >= self.top_p
            # float32 may round top_p to 0
            beyond[:, 0] = False
            logits = logits.masked_fill(beyond.gather(-1, index.argsort(-1)), -torch.inf)
        sums = logits.softmax(-1).double().cumsum(-1)
        total = sums[:, -1:]
        # below the total, even if the product is rounded up, so that no token of probability 0 is drawn at the end
        chosen = torch.minimum(chances[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        return torch.searchsorted(sums, chosen, right=True)[:, 0].clamp(max=logits.shape[-1] - 1), finite


def uniform(rows: int, generator: Generators) -> Tensor:
    """Uniform numbers from 0 up to 1, float64 [rows], on the CPU; a generator for all rows, or one for each."""
    if isinstance(generator, Sequence):
        return torch.cat([uniform(1, one) for one in generator])
    return torch.rand(rows, dtype=torch.float64, generator=generator)


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
