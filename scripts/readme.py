"""Writes what README.md shows: the pictures in docs/readme and the table of support. `python scripts/readme.py`."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from saccade import mask
from saccade.cli.bench.rows import read
from saccade.mask.drawing import cell_states
from saccade.plot.canvas import OURS, drawing
from saccade.plot.cells import svg
from saccade.plot.providers import provider

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SUPPORT = runpy.run_path(str(ROOT / "scripts" / "support.py"))
README, PICTURES = ROOT / "README.md", ROOT / "docs" / "readme"
MARKS = "<!-- support: scripts/readme.py -->\n", "\n<!-- /support -->"

STRIP = {
    "causal()": None,
    "causal() & window(9, 0)": None,
    "causal() & documents(ids)": [0] * 10 + [1] * 17 + [2] * 13,
    "causal() | prefix(12)": None,
    "causal() & window(5, 0) | global_tokens(3)": None,
    "causal() & (window(3, 0) | strided(8))": None,
}
TOKENS, CELL, GAP = 40, 3, 10

# a row of the table: forward and backward of these problems, or their forward alone
TABLE = {
    "float32, bfloat16, float16": ["float32", "bfloat16", "float16"],
    "float64": ["float64"],
    "8-bit floats (H100, H200)": ["float8_e4m3fn"],
    "grouped heads, sizes to 256": ["multi-query, 8 on 1", "D = 80, Dv = 80", "D = 192, Dv = 128", "D = 256, Dv = 256"],
    "head sizes to 1024": ["D = 512, Dv = 512", "D = 1024, Dv = 1024"],
    "softcap, sinks, bias, ALiBi, dropout": ["softcap", "sinks", "bias [B, Hq, Tq, Tk]", "ALiBi", "dropout"],
    "decode from pages, 8 or 4 bits": ["in pages", "codes, int8", "codes, fp8", "codes, int4"],
    "linear attention": ["linear attention"],
    "Mamba, Mamba-2": ["selective scan (Mamba)", "a decay per head (RetNet, Mamba-2)"],
    "gated delta rule, GLA, RG-LRU": ["gated delta rule", "a decay per channel (GLA)", "RG-LRU (Griffin)"],
}


def strip() -> str:
    """Pictures of masks side by side: 40 queries go down, 40 keys to the right, dark pairs are allowed."""
    side, parts = TOKENS * CELL, list[str]()
    for place, (text, ids) in enumerate(STRIP.items()):
        expression = mask.parse(text.replace("ids", f"[{', '.join(map(str, ids))}]") if ids else text)
        x = place * (side + 2 * GAP) + GAP
        cells = cell_states(expression, TOKENS, TOKENS)
        parts.append(f'<g transform="translate({x} {GAP})">{svg(cells, text, CELL)}</g>')
        # a long expression has a second line
        for line, words in enumerate(re.split(r" (?=[&|] \()| (?=\|)", text, maxsplit=1)):
            y, shown = side + GAP + 13 + 11 * line, words.replace("&", "&amp;")
            parts.append(f'<text x="{x + side / 2:g}" y="{y}" text-anchor="middle">{shown}</text>')
    width, height = len(STRIP) * (side + 2 * GAP), side + 2 * GAP + 24
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
            f'<rect width="{width}" height="{height}" rx="4" fill="#ffffff"/>',
            f'<g font-family="ui-monospace, monospace" font-size="9" fill="{OURS}">',
            *parts,
            "</g></svg>",
            "",
        ]
    )


def measured(name: str) -> dict[tuple[str, str], Any]:
    """Rows by case and provider, the first where a case was measured again."""
    rows: dict[tuple[str, str], Any] = {}
    for row in read(RESULTS / f"{name}.csv"):
        rows.setdefault((row.case, row.provider), row)
    return rows


# names and cases of the file
ON_H100 = {
    "forward, causal": "forward-B1-T16384x16384-H16-D128-causal()-bfloat16",
    "forward, window 1024": "forward-B1-T16384x16384-H16-D128-causal() & window(1023, 0)-bfloat16",
    "forward, documents": "forward-B1-T16384x16384-H16-D128-causal()-documents4096-bfloat16",
    "backward, causal": "backward-B1-T16384x16384-H16-D128-causal()-bfloat16",
    "backward, window 1024": "backward-B1-T16384x16384-H16-D128-causal() & window(1023, 0)-bfloat16",
}
# cuDNN has no patterns, for which torch has FlexAttention
SHOWN = ("saccade", "torch cuDNN", "FlexAttention", "FlashAttention-4")
ON_CPU = {
    "forward, float32": ("cpu-headline", "forward-fp32-causal-B1-T4096-H8-D128"),
    "backward, float32": ("cpu-headline", "backward-fp32-causal-B1-T4096-H8-D128"),
    "forward, bfloat16": ("cpu-headline", "forward-bf16-causal-B1-T4096-H8-D128"),
    "backward, bfloat16": ("cpu-headline", "backward-bf16-causal-B1-T4096-H8-D128"),
    "decode, float32, 32k keys": ("cpu-decode", "decode-fp32-full-B1-T1x32768-H32:8-D128"),
    "window of 256, float32": ("cpu-sparse", "window-fp32-causal+window255,0-B1-T4096-H8-D64"),
}


def rate(row: Any) -> float:
    """TFLOP/s of the allowed pairs."""
    heads, size = row.shape.split("x")[3], row.shape.split("x")[-1]
    products = 2 if row.kind == "forward" else 5
    return row.rate if row.rate == row.rate else 2e-12 * products * row.pairs * int(heads) * int(size) / row.median


def speed(path: Path) -> None:
    """The chart of speed: one H100 on the left, two CPU cores on the right."""
    gpu = measured("nvidia-h100")
    with drawing(path, 9.0, [4.2], across=2) as (left, right):
        for place, case in enumerate(ON_H100.values()):
            measured_here = [name for name in SHOWN if (case, name) in gpu]
            for n, name in enumerate(measured_here):
                at, tflops = place + 0.21 * (n - (len(measured_here) - 1) / 2), rate(gpu[case, name])
                left.barh(at, tflops, 0.19, color=provider(name).colours.light, label=None if place else name)
                left.annotate(f" {tflops:.0f}", (tflops, at), va="center", fontsize=9)
        left.set_yticks(range(len(ON_H100)), list(ON_H100))
        left.set(xlabel="TFLOP/s: bfloat16, 16k tokens, 16 heads of 128", title="One NVIDIA H100")
        bars, names = left.get_legend_handles_labels()
        left.figure.legend(bars, [provider(name).name for name in names], loc="outside lower left", ncols=4)
        for place, (name, case) in enumerate(ON_CPU.values()):
            rows = measured(name)
            times = rows[case, "sdpa"].median / rows[case, "saccade"].median
            right.barh(place, times, 0.6, color=OURS)
            right.annotate(f" {times:.1f} ×", (times, place), va="center", fontsize=9)
        right.set_yticks(range(len(ON_CPU)), list(ON_CPU))
        right.set_xscale("log", base=2)
        right.set_xlim(1, 45)
        right.xaxis.set_major_formatter("{x:g}")
        right.set(xlabel="times as fast as torch 2.13's own attention", title="Two CPU cores (AMD EPYC, Zen 5)")
        for axis in (left, right):
            axis.invert_yaxis()
            axis.tick_params(length=0)


def cells(problems: Iterable[Any]) -> Iterator[str]:
    """✓, forward, some or – for each backend."""
    asked = list(problems)
    for name, device in SUPPORT["DEVICES"].items():
        computed: list[str] = []
        for title, problem in asked:
            example = problem(device)
            forward = not SUPPORT["reasons"](name, example)
            both = forward and (title == "Keys" or SUPPORT["differentiable"](name, example))
            computed.append("forward" if forward and not both else "✓" if both else "–")
        yield computed[0] if len(set(computed)) == 1 else "some"


def table() -> str:
    """The table of support, ten rows by four backends."""
    rows = {row.what: (title, row.problem) for title, group in SUPPORT["sections"]().items() for row in group}
    lines = [f"| | {' | '.join(SUPPORT['NAMES'].values())} |", "|---|" + ":-:|" * len(SUPPORT["NAMES"])]
    for what, names in TABLE.items():
        lines.append(f"| {what} | {' | '.join(cells(rows[name] for name in names))} |")
    return "\n".join(lines)


def filled(text: str) -> str:
    """README.md with its table written again."""
    start, stop = MARKS
    return re.sub(f"(?s){re.escape(start)}.*{re.escape(stop)}", lambda _: f"{start}\n{table()}\n{stop}", text)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "masks.svg").write_text(strip(), encoding="utf-8")
    speed(PICTURES / "speed.svg")
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
