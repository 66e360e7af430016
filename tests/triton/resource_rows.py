"""The kernels whose resources are recorded in resources.csv, with which the tests compare.

`python tests/triton/resource_rows.py [CHIP ...]` replaces the rows of these chips, or of all, and of the version of
Triton that it imports; `make resources` does so for every version.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from offline import (
    CHIPS,
    Taken,
    of_append,
    of_branch,
    of_hopper,
    of_latent,
    of_lists,
    of_one_row,
    of_pages,
    of_problem,
    of_recurrent,
    of_selected,
    recorded,
)

from saccade.backends import Extras, Inputs, tested
from saccade.backends.triton import hopper, limits, tangent, versions
from saccade.mask import parse
from saccade.plan import make_plan
from saccade.problem import Problem, Scores


def of_tangent(dtype: str, D: int, mask: str = "causal()", chip: str = "sm_90", **options: Any) -> dict[str, Taken]:
    """The resources of the kernel of forward mode, with tangents of all arrays."""
    p = Problem(
        2, 300, 300, 4, 2, D, D, dtype=dtype, device=f"cuda:{chip}", mask=parse(mask),
        scores=Scores(scale=0.1, **options),
    )  # fmt: skip
    q, k, v, o = (torch.empty(2, 300, heads, D, dtype=getattr(torch, dtype)) for heads in (4, 2, 2, 4))
    extras, lse = Extras(seed=3 << 33), torch.empty(2, 300, 4)
    shapes = {"bias": p.scores.bias, "slopes": p.scores.alibi, "sinks": (4,) if p.scores.sinks else None}
    shapes |= {
        "distances": (1, 4, 899) if p.scores.relative else None,
        "gates": (2, 300, 4) if p.scores.gates else None,
    }
    for name, shape in shapes.items():
        wide = torch.float64 if name == "gates" else torch.float32
        extras = extras._replace(**{name: None if shape is None else torch.empty(shape, dtype=wide)})
    inputs = Inputs(q, k, v, extras)
    with recorded(chip) as found:
        tangent(p, make_plan(p, limits(p)), inputs, o, lse, inputs)
    return found


TABLE = Path(__file__).parent / "resources.csv"
KEYS = ["triton", "chip", "dtype", "D", "mask", "kernel"]
# every branch of the kernels once: of those for Hopper, and of the portable ones for a chip
OF_HOPPER: dict[str, Callable[[], dict[str, Taken]]] = {
    "blocks of 512 on Hopper": partial(of_hopper, "tiles([[1, 0], [1, 1]], 512)", 64),
    "results of Hopper in float32": partial(of_hopper, "causal()", 128, wide=True),
    "results of Hopper in float32, of large heads": partial(of_hopper, "causal()", 256, wide=True),
    "results of Hopper in float32, of latent attention": partial(of_hopper, "causal()", 192, wide=True),
    "Hopper, D = 80": partial(of_hopper, "causal()", 80),
    "Hopper, D = 96": partial(of_hopper, "documents(cu_seqlens=[0, 300, 1000]) & causal()", 96),
    "results of Hopper in float32, D = 96": partial(of_hopper, "causal()", 96, wide=True),
    "Hopper, D = Dv = 192": partial(of_hopper, "causal()", 192, Dv=192),
    "results of Hopper in float32, D = Dv = 192": partial(of_hopper, "causal()", 192, wide=True, Dv=192),
    # so many heads that they fill the chip without ranges
    "latent rows on Hopper": partial(of_latent, 1, None, 2240, hopper=True),
    "latent rows on Hopper, in ranges": partial(of_latent, 2, None, 64, torch.float16, hopper=True),
}
BRANCHES: dict[str, Callable[..., dict[str, Taken]]] = {
    "lengths": partial(of_branch, "window(9, 0)", 2, sinks=True),
    "union": partial(
        of_branch, "causal() | documents(cu_seqlens=[0, 70, 300])", softcap=2.0, sinks=True, dropout=0.25,
        bias=(1, 4, 300, 300),
    ),
    "parts": partial(of_branch, "strided(5) | window(9, 0)", alibi=(1, 4)),
    "blocks": partial(of_branch, "tiles([[1, 1, 1], [1, 1, 1], [1, 1, 1]], 128)", bias=(2, 1, 1, 300)),
    "blocks that fit": partial(
        of_branch, "tiles([[1, 0, 1], [0, 1, 0], [1, 0, 1]], 100) | window(9, 0) & chunked(20)", D=128, dtype="bfloat16"
    ),
    "odd": partial(of_branch, "documents(cu_seqlens=[0, 70, 300]) & causal()", D=255),
    "stride": partial(of_branch, "strided(5, 3) & causal()", D=24),
    "few pairs": partial(of_branch, "causal()", 13),
    "more results": partial(of_branch, "causal()", sinks=True, dropout=0.25, more=True),
    "more results of few pairs": partial(of_branch, "causal()", 13, 40, more=True),
    "more results of large heads": partial(of_branch, "causal()", D=256, dtype="bfloat16", more=True),
    "more results of two parts": partial(of_branch, "strided(5) | window(9, 0)", sinks=True, more=True),
    "more results of few queries": partial(of_branch, "window(9, 0)", 2, sinks=True, more=True),
    "lists": of_lists,
    "one row": partial(of_one_row, 1024, 2816),
    "one row, long": partial(of_one_row, 4096, 14336, torch.float32),
    "pages": partial(of_pages, 1),
    "long pages": partial(of_pages, 1, 128),
    "pages of a prompt": partial(of_pages, 100),
    "long pages of a prompt": partial(of_pages, 100, 128),
    "append int8": partial(of_append, "int8"),
    "append int4": partial(of_append, "int4"),
    "append fp8": partial(of_append, "fp8"),
    "codes of 8 bits": partial(of_pages, 1, 16, "int8"),
    "floats of 8 bits": partial(of_pages, 1, 128, "fp8"),
    "codes of 4 bits": partial(of_pages, 1, 128, "int4"),
    "latent rows": partial(of_latent, 1),
    "selected blocks": partial(of_selected, 100, 64, 1),
    "selected blocks, groups of rows": partial(of_selected, 100, 64, 64),
    "selected tokens of one query": partial(of_selected, 1, 1, 1),
    "selected tokens": partial(of_selected, 100, 1, 1, 512),
    "selected blocks in float32": partial(of_selected, 100, 16, 1, 64, torch.float32),
    "latent rows, values apart": partial(of_latent, 1, apart=True),
    "latent rows of codes": partial(of_latent, 4, "int8"),
    "latent rows of a prompt": partial(of_latent, 100, None, 16),
    "latent rows in float32": partial(of_latent, 1, None, 16, torch.float32),
    "tangents": partial(
        of_tangent, dtype="float32", D=64, mask="causal() | documents(cu_seqlens=[0, 70, 300])", softcap=2.0,
        sinks=True, dropout=0.25, bias=(1, 4, 300, 300),
    ),
    "tangents by position, of parts": partial(
        of_tangent, dtype="bfloat16", D=128, mask="causal() & (strided(5) | window(9, 0))", alibi=(1, 4),
        relative=(1, 4), gates=True,
    ),
    "recurrent, mapped": partial(of_recurrent, "bfloat16", "linear-exp"),
    "recurrent, over all": partial(of_recurrent, "float16", "linear-all"),
    "recurrent, packed": partial(of_recurrent, "bfloat16", "ssd", True),
    "recurrent, without the state": partial(
        of_recurrent, "bfloat16", "gated_delta_rule", state=False, H=2, Hk=2, K=128, V=128
    ),
    "recurrent, channels without the state": partial(
        of_recurrent, "bfloat16", "gated_delta_rule-channels", True, state=False, H=2, Hk=1, K=128, V=128
    ),
    "recurrent, channels of large heads": partial(
        of_recurrent, "float16", "gated_delta_rule-channels", H=2, Hk=1, K=256, V=256
    ),
    "recurrent, a token": partial(of_recurrent, "bfloat16", "gated_delta_rule", T=1, H=2, Hk=1, K=128, V=128),
    "recurrent, ungated": partial(of_recurrent, "float16", "delta_rule", True, H=2, Hk=1, K=256, V=256),
    "recurrent, large heads": partial(of_recurrent, "bfloat16", "delta_rule", H=2, Hk=1, K=256, V=256),
    "recurrent, few rows": partial(of_recurrent, "float32", "delta_rule", K=3, V=40),
    "recurrent, channels": partial(of_recurrent, "float16", "gated_linear", True, H=2, Hk=1, K=256, V=256),
    "scan, packed": partial(of_recurrent, "bfloat16", "selective_scan", True, K=16, V=16),
    "scan of constants": partial(of_recurrent, "float32", "selective_scan-N", K=16, V=16),
    "gated unit": partial(of_recurrent, "bfloat16", "rg_lru-documents"),
    "convolution": partial(of_recurrent, "bfloat16", "causal_conv1d", True),
    "codes of 4 bits, in float32": partial(of_pages, 100, 16, "int4", torch.float32),
}  # fmt: skip

# chip, dtype, head size and name of every row of the table, and the function that compiles its kernels
ROWS: dict[tuple[str, str, int, str], Callable[[], dict[str, Taken]]] = (
    {
        (chip, dtype, D, "portable"): partial(of_problem, chip, dtype, D)
        for chip in CHIPS
        for dtype in ("bfloat16", "float32")
        for D in (64, 128, 256, 512)
    }
    | {
        ("sm_90", dtype, D, "tangents"): partial(of_tangent, dtype, D)
        for dtype in ("bfloat16", "float32")
        for D in (64, 128, 256, 512)
    }
    | {
        ("sm_90", "bfloat16", D, mask): partial(of_hopper, mask, D)
        for mask in ("causal()", "documents(cu_seqlens=[0, 300, 1000]) & causal()", "longformer")
        for D in (64, 128, 192, 256)
    }
    | {("sm_90", "bfloat16", D, "big-bird"): partial(of_hopper, "big-bird", D) for D in (64, 128, 192)}
    | {
        (chip, dtype, 128, name): partial(of_recurrent, dtype, name, chip=chip, H=2, Hk=2, K=128, V=128)
        for chip in CHIPS
        for dtype in ("bfloat16", "float32")
        for name in ("scalar_decay", "gated_linear", "gated_delta_rule", "gated_delta_rule-channels")
    }
    | {
        (chip, "bfloat16", 16, "selective_scan"): partial(
            of_recurrent, "bfloat16", "selective_scan", chip=chip, H=2, Hk=1, K=16, V=64
        )
        for chip in CHIPS
    }
    | {
        ("sm_90", hopper.EIGHT_BITS, D, "causal()"): partial(of_hopper, "causal()", D, hopper.EIGHT_BITS)
        for D in (64, 128, 256)
    }
)


def chips_of(version: str) -> Collection[str]:
    """The chips that the table has for a version: all of them only for the first."""
    return CHIPS if version == tested.TRITON_COMPILED[0] else ("sm_80", "sm_90")


def read() -> list[list[str]]:
    """The rows of the table, each with the values of KEYS and of Taken."""
    with TABLE.open() as file:
        return list(csv.reader(file))[1:]


def write(chips: Collection[str]) -> None:
    """Replace the rows of these chips and of this version of Triton."""
    new: list[list[str]] = []
    for row, measure in ROWS.items():
        if row[0] in chips:
            print(versions.CURRENT, *row, flush=True)
            new += ([versions.CURRENT, *map(str, row), name, *map(str, values)] for name, values in measure().items())
    kept = [row for row in read() if row[0] != versions.CURRENT or row[1] not in chips]
    order = {tuple(map(str, row)): n for n, row in enumerate(ROWS)}
    with TABLE.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([*KEYS, *Taken._fields])
        table.writerows(sorted(kept + new, key=lambda row: (row[0], order[tuple(row[1:5])])))


if __name__ == "__main__":
    write(sys.argv[1:] or chips_of(versions.CURRENT))
