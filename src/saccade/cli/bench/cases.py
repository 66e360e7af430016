"""The cases of each suite, with the bar that each has to reach."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from saccade.testing.patterns import PATTERNS

LONG = (131072, 1, 64)
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


@dataclass(frozen=True)
class Case:
    """One thing to measure. `mask` is a name of `PATTERNS` or text for `saccade.mask.parse`, empty for none.

    `kind` is forward, backward, decode, plan or memory. If `against` names a peer, `bar` is a ratio of medians, the
    peer's over Saccade's; otherwise it is an upper limit on Saccade's figure (seconds, or bytes for memory). `grad`
    records the graph in a forward pass.
    """

    group: str
    kind: str
    dtype: str
    B: int
    Tq: int
    Tk: int
    Hq: int
    Hk: int
    D: int
    mask: str = ""
    peers: tuple[str, ...] = ("sdpa",)
    bar: float = 0.0
    against: str = "sdpa"
    aim: float = 0.0
    grad: bool = False

    @property
    def name(self) -> str:
        """A name that no other case of the suite has."""
        form = "".join(c for c in self.mask.replace(" & ", "+") if c not in " ()") or "full"
        length = f"T{self.Tq}" if self.Tq == self.Tk else f"T{self.Tq}x{self.Tk}"
        heads = f"H{self.Hq}" if self.Hq == self.Hk else f"H{self.Hq}:{self.Hk}"
        grad = "-grad" if self.grad else ""
        return f"{self.group}-{SHORT[self.dtype]}-{form}-B{self.B}-{length}-{heads}-D{self.D}{grad}"


# tokens, heads and head size of a case whose queries are its keys
Square = tuple[int, int, int]


def _square(group: str, kind: str, dtype: str, size: Square, mask: str, **more: Any) -> Case:
    t, heads, d = size
    return Case(group, kind, dtype, 1, t, t, heads, heads, d, mask, **more)


def _headline() -> Iterator[Case]:
    peers = ("sdpa", "naive", "flex", "onnxruntime")
    bars = {
        ("forward", "float32"): (1.8, 2.4),
        ("forward", "bfloat16"): (3.0, 4.5),
        ("backward", "float32"): (1.6, 2.3),
        ("backward", "bfloat16"): (1.5, 2.2),
    }
    for (kind, dtype), (bar, aim) in bars.items():
        for d in (64, 128):
            for mask in ("causal()", ""):
                chosen = peers if kind == "forward" else ("sdpa", "naive")
                yield _square(kind, kind, dtype, (4096, 8, d), mask, peers=chosen, bar=bar, aim=aim)


def _decode() -> Iterator[Case]:
    for dtype, bar, aim in (("float32", 4.0, 6.0), ("bfloat16", 15.0, 30.0)):
        for keys in (8192, 32768, 131072):
            # naive repeats k and v for every query head: gigabytes from here on
            peers = ("sdpa", "naive") if keys == 8192 else ("sdpa",)
            yield Case("decode", "decode", dtype, 1, 1, keys, 32, 8, 128, peers=peers, bar=bar, aim=aim)


def _paged() -> Iterator[Case]:
    # keys in pages, and as codes, next to contiguous numbers
    peers = ("paged64", "paged16", "paged1", "int8", "fp8", "int4")
    for case in _decode():
        yield replace(case, group="paged", peers=peers, bar=0.0, aim=0.0)


def _sparse() -> Iterator[Case]:
    size, peers = (4096, 8, 64), ("sdpa", "flex")
    # a window of 256: the query's own key and the 255 before it
    for dtype in ("float32", "bfloat16"):
        yield _square("window", "forward", dtype, size, "causal() & window(255, 0)", peers=peers, bar=15.0, aim=30.0)
        yield _square("stride", "forward", dtype, size, "causal() & strided(4)", peers=peers, bar=8.0, aim=15.0)


def _patterns() -> Iterator[Case]:
    # compared with Saccade without the mask: how much more an allowed pair costs than a pair of a dense call
    for name in PATTERNS:
        for group, kind in (("patterns", "forward"), ("patterns-backward", "backward")):
            yield _square(group, kind, "float32", (4096, 8, 64), name, peers=("dense",), against="dense")


def _plan() -> Iterator[Case]:
    for form in (
        "causal()",
        "causal() & window(1023, 0)",
        "causal() & documents",
        "causal() & documents & window(1023, 0)",
    ):
        yield _square("plan", "plan", "float32", LONG, form, peers=("flex",), bar=1e-3, aim=1e-4, against="")


def _memory() -> Iterator[Case]:
    yield _square("memory", "memory", "float32", LONG, "causal()", peers=(), bar=float(1 << 30), against="")


def _overhead() -> Iterator[Case]:
    yield _square("overhead", "forward", "float32", (1, 1, 64), "causal()", bar=25e-6, against="")
    yield _square("overhead", "forward", "float32", (1, 1, 64), "causal()", bar=80e-6, against="", grad=True)


def _naive() -> Iterator[Case]:
    for dtype in ("float32", "bfloat16"):
        for mask in ("causal()", ""):
            for t in (512, 1024, 2048, 4096, 8192):
                bar = 2.0 if t >= 2048 else 0.0
                yield _square("naive", "forward", dtype, (t, 4, 64), mask, peers=("naive",), bar=bar, against="naive")


def _sweep() -> Iterator[Case]:
    lengths = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    for dtype in ("float32", "bfloat16"):
        for batch in (1, 8, 32):
            for t in lengths:
                for mask in ("causal()", ""):
                    yield Case("sweep", "forward", dtype, batch, t, t, 4, 4, 64, mask, bar=1.0, aim=1.0)
        for batch in (1, 8):
            for t in lengths[::3]:
                yield Case("sweep-backward", "backward", dtype, batch, t, t, 4, 4, 64, "causal()", bar=1.0, aim=1.0)


def _quick() -> Iterator[Case]:
    size = (256, 2, 64)
    yield _square("forward", "forward", "float32", size, "causal()", peers=("sdpa", "naive"), bar=1.0)
    yield _square("forward", "forward", "bfloat16", size, "", bar=1.0)
    yield _square("backward", "backward", "float32", size, "causal()", bar=1.0)
    yield Case("decode", "decode", "float32", 1, 1, 1024, 4, 1, 64, bar=1.0)
    yield _square("window", "forward", "float32", (512, 2, 64), "causal() & window(31, 0)", bar=1.0)
    yield _square("plan", "plan", "float32", (4096, 1, 64), "causal() & documents", peers=(), bar=1e-3, against="")


GROUPS = {
    "headline": _headline,
    "decode": _decode,
    "paged": _paged,
    "sparse": _sparse,
    "patterns": _patterns,
    "plan": _plan,
    "memory": _memory,
    "overhead": _overhead,
    "naive": _naive,
    "sweep": _sweep,
}

# a suite is a list of groups; the name of a group is also a suite
SUITES = {"cpu": tuple(GROUPS), **{name: (name,) for name in GROUPS}}


def cases(suite: str = "cpu", *, quick: bool = False, only: str = "") -> list[Case]:
    """The cases of a suite whose name contains `only`; `quick` gives six tiny ones that finish in seconds.

    Raises ValueError for an unknown suite.
    """
    if suite not in SUITES:
        raise ValueError(f"unknown suite {suite!r}: expected one of {', '.join(SUITES)}")
    chosen = list(_quick()) if quick else [case for group in SUITES[suite] for case in GROUPS[group]()]
    return [case for case in chosen if only in case.name]
