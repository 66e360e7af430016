"""The catalogue of shapes: all named cases of tests, `saccade verify` and autotuning.

Tags: primary (common use), edge (likely to break), slow (not in a quick sample), bench (worth timing).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..mask import Mask, parse, patterns
from .masks import MASKS, TK, TQ


@dataclass(frozen=True)
class Case:
    """One complete, printable problem without its arrays. mask: text for `saccade.mask.parse`, "" for none.

    bias: its axes, such as "bhqk" or "1h1k", where 1 is a broadcast axis. alibi, relative: "", "h" or "bh".
    """

    name: str
    Tq: int
    Tk: int
    B: int = 1
    Hq: int = 4
    Hk: int = 2
    D: int = 64
    Dv: int = 64
    mask: str = ""
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    bias: str = ""
    alibi: str = ""
    relative: str = ""
    gates: bool = False
    dropout: float = 0.0
    seed: int = 0
    tags: tuple[str, ...] = ()

    def make_mask(self) -> Mask | None:
        """A new mask object at each call."""
        return parse(self.mask) if self.mask else None


def _case(name: str, tq: int, tk: int | None = None, tags: str = "", **more: object) -> Case:
    case = Case(name, tq, tq if tk is None else tk, tags=tuple(tags.split()))
    if "D" in more and "Dv" not in more:
        more["Dv"] = more["D"]
    return replace(case, **more)  # type: ignore[arg-type]


def _heads() -> Iterator[Case]:
    for name, hq, hk in (("mha", 4, 4), ("gqa", 4, 2), ("gqa3", 6, 2), ("mqa", 8, 1), ("one", 1, 1), ("12to4", 12, 4)):
        yield _case(f"heads-{name}", 97, B=2, Hq=hq, Hk=hk, mask="causal()", tags="primary")


def _lengths() -> Iterator[Case]:
    # around the sizes of tiles and vectors of every backend, and with a short or empty side
    for t in (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257):
        yield _case(f"T{t}", t, D=32, mask="causal()", tags="edge")
    for t in (1, 6, 16, 30):
        yield _case(f"T{t}-full", t, B=2, Hq=6, tags="edge")
        yield _case(f"T{t}-window", t, B=2, Hq=6, mask="window(3, 2)", tags="edge")
    for tq, tk in ((1, 300), (2, 1), (5, 130), (130, 5), (300, 1), (64, 128), (33, 1000), (1000, 33)):
        yield _case(f"T{tq}x{tk}", tq, tk, D=32, tags="edge")
        yield _case(f"T{tq}x{tk}-causal", tq, tk, D=32, mask="causal()", tags="edge")
    for tq, tk in ((0, 0), (0, 9), (9, 0)):
        yield _case(f"T{tq}x{tk}", tq, tk, D=32, tags="edge")
        yield _case(f"T{tq}x{tk}-sinks", tq, tk, D=32, mask="causal()", sinks=True, bias="1h1k", tags="edge")
    yield _case("B0", 5, B=0, D=32, mask="causal()", sinks=True, tags="edge")
    yield _case("B5", 19, B=5, D=32, mask="causal()", tags="edge")
    yield _case("T2048", 2048, Hq=2, Hk=1, mask="causal() & window(500, 0)", tags="slow bench")
    yield _case("T4096", 4096, Hq=1, Hk=1, mask="causal()", tags="slow bench")


def _sizes() -> Iterator[Case]:
    for d in (*range(8, 257, 8), 257, 320, 512, 1, 2, 3, 5, 7, 9, 15, 17, 33, 63, 65, 100, 127, 129, 255):
        yield _case(f"D{d}", 37, Hq=2, Hk=1, D=d, mask="causal()", tags="edge")
    pairs = ((64, 128), (128, 64), (192, 128), (40, 24), (24, 40), (7, 13), (256, 8), (8, 256), (1, 64), (64, 1))
    for d, dv in (*pairs, (512, 40), (24, 512)):
        yield _case(f"D{d}-Dv{dv}", 41, Hq=2, Hk=1, D=d, Dv=dv, mask="causal()", tags="edge")


def _scores() -> Iterator[Case]:
    options: dict[str, dict[str, object]] = {
        "scale": {"scale": 0.31},
        "scale-negative": {"scale": -0.2},
        "scale-zero": {"scale": 0.0},
        "softcap": {"softcap": 1.5},
        "softcap-wide": {"softcap": 30.0, "scale": 2.0},
        "sinks": {"sinks": True},
        "alibi": {"alibi": "h"},
        "alibi-batch": {"alibi": "bh"},
        "relative": {"relative": "h"},
        "relative-batch": {"relative": "bh"},
        "gates": {"gates": True},
        "by-position": {"alibi": "h", "relative": "h", "gates": True, "bias": "1h1k"},
        "dropout": {"dropout": 0.25, "seed": 1 << 40 | 3},
        "dropout-most": {"dropout": 0.9},
        "all": {"scale": 0.3, "softcap": 4.0, "sinks": True, "bias": "bhqk", "dropout": 0.1},
        "all-alibi": {"scale": 0.3, "softcap": 4.0, "sinks": True, "alibi": "bh", "dropout": 0.1},
        "all-relative": {"scale": 0.3, "softcap": 4.0, "sinks": True, "relative": "bh", "dropout": 0.1},
        "all-gates": {"scale": 0.3, "softcap": 4.0, "sinks": True, "gates": True, "dropout": 0.1},
    }
    for bias in ("bhqk", "1hqk", "b1qk", "11qk", "bh1k", "1h1k", "111k", "qk", "bhq1", "1h11"):
        options[f"bias-{bias}"] = {"bias": bias}
    for name, more in options.items():
        yield _case(name, 50, 75, B=2, D=32, mask="causal()", tags="edge", **more)
    for name in ("sinks", "alibi", "relative", "gates", "bias-bhqk", "all"):
        yield _case(f"{name}-ragged", 50, 75, B=2, D=32, mask="causal() & keys([20, 70])", tags="edge", **options[name])
    for name in ("sinks", "all", "all-alibi", "all-relative"):
        yield _case(
            f"{name}-strided", 50, 75, B=2, D=32, mask="strided(4) | window(3, 0)", tags="edge", **options[name]
        )


def _masks() -> Iterator[Case]:
    for name, text in MASKS.items():
        yield _case(f"mask-{name}", TQ, TK, B=2, D=24, mask=text, tags="primary")


def _cuts() -> Iterator[Case]:
    # several tiles of every backend, with edges of the mask at their ends and inside, in common head sizes
    ids = [0] * 70 + [1] * 30 + [2] * 110 + [3] * 120
    masks: dict[str, dict[str, object]] = {
        "window-64": {"D": 64, "mask": "window(70, 40)"},
        "window-128": {"D": 128, "mask": "causal() & window(99, 0)"},
        "window-256": {"D": 256, "mask": "window(33, 120)", "sinks": True},
        "documents": {"D": 128, "mask": f"documents({ids}) & causal()"},
        "documents-64": {"D": 64, "mask": f"documents({ids})", "softcap": 2.0},
        "prefix": {"D": 64, "mask": "prefix(130) | causal()"},
        "keys": {"B": 2, "D": 128, "mask": "keys([330, 77])"},
        "unseen": {"D": 128, "mask": "window(9, 9) & keys(100)"},
        "unseen-64": {"D": 64, "mask": "window(9, 9) & keys(100)"},
        "blocks": {"D": 128, "mask": f"tiles({_blocks(5, 6)}, 64) & window(200, 9)"},
        "blocks-window": {"D": 64, "mask": f"tiles({_blocks(5, 6)}, 64) | window(20, 9)"},
        "blocks-wide": {"D": 256, "mask": f"tiles({_blocks(3, 3)}, 128) & window(200, 120)", "sinks": True},
        "global": {"D": 128, "mask": "window(40, 9) | global_tokens([3, 250])"},
        "latent": {"D": 192, "Dv": 128, "mask": "causal() & window(99, 0)", "sinks": True},
        "latent-documents": {"B": 2, "D": 192, "Dv": 128, "mask": f"documents({ids})", "softcap": 2.0},
        "latent-blocks": {"D": 192, "Dv": 128, "mask": f"tiles({_blocks(5, 6)}, 64) & window(200, 9)"},
    }
    for name, more in masks.items():
        yield _case(f"cut-{name}", 290, 330, Hq=2, Hk=1, tags="slow", **more)


def _blocks(rows: int, columns: int) -> list[list[int]]:
    # two of every three blocks, including the diagonal
    return [[int((a - b) % 3 != 1) for b in range(columns)] for a in range(rows)]


def _models() -> Iterator[Case]:
    yield _case("gpt2", 128, B=1, Hq=12, Hk=12, mask="causal()", tags="primary bench")
    yield _case("llama", 160, B=1, Hq=8, Hk=2, D=128, mask="causal()", tags="primary bench")
    yield _case("mistral", 200, Hq=8, Hk=2, D=128, mask="causal() & window(63, 0)", tags="primary bench")
    yield _case("gemma", 100, Hq=4, Hk=2, D=256, mask="causal()", softcap=50.0, tags="primary bench")
    yield _case("gpt-oss", 130, Hq=8, Hk=1, mask="causal() & window(31, 0)", sinks=True, tags="primary bench")
    yield _case("mla", 90, Hq=4, Hk=4, D=192, Dv=128, mask="causal()", tags="primary bench")
    yield _case("encoder", 150, B=2, Hq=4, Hk=4, mask="keys([150, 66])", tags="primary bench")
    yield _case("packed", 250, mask="documents(cu_seqlens=[0, 40, 57, 190, 250]) & causal()", tags="primary bench")
    longformer = "window(16, 16) | global_tokens([0, 100])"
    yield _case("longformer", 220, Hq=2, Hk=2, mask=longformer, tags="primary bench")
    yield _case("sparse-strided", 130, mask=str(patterns.strided_factors(12)), tags="edge")
    yield _case("sparse-fixed", 130, mask=str(patterns.fixed_factors(16, 3, 130)), tags="edge")
    scattered = str(patterns.fixed_factors(32, 1, 700))
    yield _case("sparse-fixed-long", 700, B=1, Hq=1, Hk=1, D=32, mask=scattered, tags="edge")
    yield _case("big-bird", 150, mask=str(patterns.big_bird(150, 16)), tags="edge")


CASES: tuple[Case, ...] = tuple(
    case for part in (_models, _heads, _masks, _cuts, _scores, _lengths, _sizes) for case in part()
)
_BY_NAME = {case.name: case for case in CASES}


def by_name(name: str) -> Case:
    """The case of this name; raises KeyError if there is none."""
    return _BY_NAME[name]


def select(*tags: str, without: tuple[str, ...] = ()) -> list[Case]:
    """Cases with at least one of the tags (all cases if none are given) and none of `without`."""
    return [c for c in CASES if (not tags or set(tags) & set(c.tags)) and not set(without) & set(c.tags)]
