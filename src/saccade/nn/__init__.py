"""torch modules that use Saccade's attention. torch is imported when one of them is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.lazily import names

if TYPE_CHECKING:
    from .decoder import Attention
    from .multihead import MultiheadAttention

__all__ = ["Attention", "MultiheadAttention"]

_HOMES = {"Attention": "decoder", "MultiheadAttention": "multihead"}


__getattr__ = names(globals(), _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
