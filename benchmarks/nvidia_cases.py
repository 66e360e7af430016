"""The cases of nvidia.py: shapes, masks, documents."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from saccade import mask as masks
from saccade.testing.patterns import PATTERNS, named

# verbs whose time is the host's share of a call
HOST = ("eager", "recorded", "host")


class Case(NamedTuple):
    """One shape under one mask; `documents` is the mean length of documents, 0 without any.

    verb: forward, backward, decode, step, or first (the first call of a process). Verbs of the host's share of a call:
    eager (without gradients), recorded (with gradients), host (with gradients and the backward). scores: a name of
    `TERMS` that is added to the scores, or "".
    """

    verb: str
    B: int
    Tq: int
    Tk: int
    Hq: int
    Hk: int
    D: int
    mask: str = "causal()"
    documents: int = 0
    dtype: str = "bfloat16"
    scores: str = ""

    @property
    def shape(self) -> str:
        """B, Tq, Tk, Hq, Hk, D."""
        return "x".join(map(str, self[1:7]))

    @property
    def pattern(self) -> bool:
        """Whether the mask is a name of `PATTERNS`."""
        return self.mask in PATTERNS

    @property
    def name(self) -> str:
        heads = f"{self.Hq}" if self.Hq == self.Hk else f"{self.Hq}:{self.Hk}"
        mask = (self.mask or "full") + (f"-documents{self.documents}" if self.documents else "")
        mask += f"-{self.scores}" if self.scores else ""
        return f"{self.verb}-B{self.B}-T{self.Tq}x{self.Tk}-H{heads}-D{self.D}-{mask}-{self.dtype}"


def values_of(D: int) -> int:
    """The numbers of a row of v for rows of q and k of D: of latent attention they differ."""
    return 128 if D == 192 else D


def dense() -> Iterator[Case]:
    for verb in ("forward", "backward"):
        for mask in ("causal()", ""):
            yield Case(verb, 1, 16384, 16384, 16, 16, 128, mask)
        yield Case(verb, 1, 16384, 16384, 32, 32, 64)
        yield Case(verb, 1, 16384, 16384, 8, 8, 256)
        yield Case(verb, 4, 4096, 4096, 32, 8, 128)


def eight_bits() -> Iterator[Case]:
    for mask in ("causal()", ""):
        for H, D in ((32, 64), (16, 128), (8, 256)):
            yield Case("forward", 1, 16384, 16384, H, H, D, mask, dtype="float8_e4m3fn")


def decoding() -> Iterator[Case]:
    for B, Tk in ((32, 8192), (64, 8192), (1, 131072), (1, 8192), (1, 1024), (8, 32768)):
        yield Case("decode", B, 1, Tk, 32, 8, 128, "")


def sparse() -> Iterator[Case]:
    for T in (16384, 131072):
        for verb in ("forward", "backward"):
            yield Case(verb, 1, T, T, 16, 16, 128, "causal() & window(1023, 0)")
            yield Case(verb, 1, T, T, 16, 16, 128, "causal() & window(4095, 0)")
            yield Case(verb, 1, T, T, 16, 16, 128, f"causal() | prefix({T // 4})")
            yield Case(verb, 1, T, T, 16, 16, 128, documents=4096)
        yield Case("step", 1, T, T, 16, 16, 128, documents=4096)


def patterns() -> Iterator[Case]:
    for verb in ("forward", "backward"):
        for name in PATTERNS:
            yield Case(verb, 1, 16384, 16384, 16, 16, 128, name)


def hosts() -> Iterator[Case]:
    for verb in HOST:
        for D in (128, 80):
            yield Case(verb, 1, 256, 256, 4, 4, D)


def terms() -> Iterator[Case]:
    for verb in ("forward", "backward"):
        for scores in ("", *TERMS):
            yield Case(verb, 1, 8192, 8192, 16, 16, 64, scores=scores)


def first() -> Iterator[Case]:
    yield Case("first", 1, 4096, 4096, 16, 16, 128)


SUITES = {
    "dense": dense,
    "eight bits": eight_bits,
    "decode": decoding,
    "sparse": sparse,
    "patterns": patterns,
    "host": hosts,
    "scores": terms,
    "first": first,
}


# the largest distance in the table of `saccade.relative`, and at most how far a gate is from 1
BUCKETS, FORGOTTEN = 128, 0.02
TERMS = ("slopes", "table", "gates")


def term_of(case: Case) -> torch.Tensor | None:
    """Slopes of ALiBi [Hq], a table by distance [Hq, 2 BUCKETS + 1], log_f of gates [B, Tk, Hq], or None."""
    r = torch.Generator("cuda").manual_seed(0)
    shape = {"slopes": (case.Hq,), "table": (case.Hq, 2 * BUCKETS + 1), "gates": (case.B, case.Tk, case.Hq)}
    if not case.scores:
        return None
    x = torch.rand(shape[case.scores], device="cuda", generator=r)
    return -FORGOTTEN * x if case.scores == "gates" else x


def ids_of(case: Case) -> torch.Tensor:
    """The document of every position. Lengths are from half to one and a half times the mean."""
    r = torch.Generator().manual_seed(0)
    lengths = (case.documents * (0.5 + torch.rand(2 * case.Tk // case.documents + 2, generator=r))).int()
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)[: case.Tk].int()


def mask_of(case: Case, ids: torch.Tensor | None) -> masks.Mask | None:
    """The mask, and-ed with the documents of `ids` if given; None for every pair."""
    mask = named(case.mask, case.Tk)
    return mask if ids is None else masks.documents(ids) & (masks.full() if mask is None else mask)


@cache
def allowed_of(pattern: str, T: int) -> int:
    """Pairs that a pattern allows in one head, counted with its dense predicate."""
    return int(np.count_nonzero(PATTERNS[pattern](T).evaluate(1, 1, T, T)))
