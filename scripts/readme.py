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


ON_H200 = {
    "training, packed documents": ("nvidia-h200-training", "llama-350m-8192", "causal() & documents(...)"),
    "training, causal": ("nvidia-h200-training", "llama-350m-8192", "causal()"),
    "generation, 64 prompts": ("nvidia-h200-generation", "llama-350m-1024-64-prompts", ""),
    "generation, 16 prompts": ("nvidia-h200-generation", "llama-350m-1024-16-prompts", ""),
    "generation, 1 prompt": ("nvidia-h200-generation", "llama-350m-1024", ""),
}
MODELS = ("saccade", "saccade, causal", "sdpa, bool mask", "sdpa, causal", "FlexAttention", "FlashAttention-4")
MODELS += ("FlashAttention-4, causal", "saccade, compiled steps", "transformers sdpa, static cache")
# the words of the legend, where they are not the library's name
LEGEND = {"torch": "torch (cuDNN on the H100)", "FlashAttention": "FlashAttention-4"}
LEGEND["transformers"] = "transformers, static cache"


def rate(row: Any) -> float:
    """TFLOP/s of the allowed pairs."""
    heads, size = row.shape.split("x")[3], row.shape.split("x")[-1]
    products = 2 if row.kind == "forward" else 5
    return row.rate if row.rate == row.rate else 2e-12 * products * row.pairs * int(heads) * int(size) / row.median


def speed(path: Path) -> None:
    """The chart of speed: one H100, two CPU cores, and below whole models on one H200."""
    with drawing(path, 9.0, [4.2, 2.4], across=2) as (on_h100, on_cpu, training, generation):
        calls(on_h100)
        for place, (name, case) in enumerate(ON_CPU.values()):
            rows = measured(name)
            times = rows[case, "sdpa"].median / rows[case, "saccade"].median
            on_cpu.barh(place, times, 0.6, color=OURS)
            on_cpu.annotate(f" {times:.1f} ×", (times, place), va="center", fontsize=9)
        on_cpu.set_yticks(range(len(ON_CPU)), list(ON_CPU))
        on_cpu.set_xscale("log", base=2)
        on_cpu.set_xlim(1, 45)
        on_cpu.xaxis.set_major_formatter("{x:g}")
        on_cpu.set(xlabel="times as fast as torch 2.13's own attention", title="Two CPU cores (AMD EPYC, Zen 5)")
        models(training, list(ON_H200)[:2], "training, 350 M, rows of 8k")
        models(generation, list(ON_H200)[2:], "generation, 350 M, after 1k")
        generation.set_xscale("log", base=2)
        generation.set_xlim(0.25, 40)
        generation.xaxis.set_major_formatter("{x:g}")
        labels: dict[str, Any] = {}
        for axis in (on_h100, on_cpu, training, generation):
            axis.invert_yaxis()
            axis.tick_params(length=0)
            handles, names = axis.get_legend_handles_labels()
            labels |= dict(zip(names, handles, strict=True))
        on_h100.figure.legend(labels.values(), labels, loc="outside lower left", ncols=5)


def bars(axis: Any, place: int, values: dict[str, float], shown: str) -> None:
    """A bar for each provider around a place."""
    for n, (name, value) in enumerate(values.items()):
        at, one = place + 0.21 * (n - (len(values) - 1) / 2), provider(name)
        axis.barh(at, value, 0.19, color=one.colours.light, label=LEGEND.get(one.library, one.library))
        axis.annotate(f" {format(value, shown)}", (value, at), va="center", fontsize=9)


def calls(axis: Any) -> None:
    """Calls on one H100."""
    gpu = measured("nvidia-h100")
    for place, case in enumerate(ON_H100.values()):
        bars(axis, place, {name: rate(gpu[case, name]) for name in SHOWN if (case, name) in gpu}, ".0f")
    axis.set_yticks(range(len(ON_H100)), list(ON_H100))
    axis.set(xlabel="TFLOP/s: bfloat16, 16k tokens, 16 heads of 128", title="One NVIDIA H100")


def models(axis: Any, cases: list[str], what: str) -> None:
    """Tokens per second of whole models on one H200; generation in its fastest form."""
    for place, case in enumerate(cases):
        file, name, mask = ON_H200[case]
        rates = {
            row.provider: row.rate for row in read(RESULTS / f"{file}.csv") if (row.case, row.mask) == (name, mask)
        }
        if "saccade, compiled steps" in rates:
            del rates["saccade"]
        bars(axis, place, {name: rates[name] / 1e3 for name in MODELS if name in rates}, ".3g")
    axis.set_yticks(range(len(cases)), [case.split(", ")[1] for case in cases])
    axis.set(xlabel="thousand tokens per second", title=f"H200: {what}")


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
