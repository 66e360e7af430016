"""Pictures: what they say, and that the same numbers give the same bytes."""

from __future__ import annotations

import re
import runpy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from saccade import cost
from saccade.cli.bench import report
from saccade.cli.bench.rows import Row, read
from saccade.plot import costs, labels, measured, providers, training

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MAPS = np.where(np.triu(np.ones((3, 3, 3)), 1), np.nan, np.eye(3))
STEPS = [{"step": n, "loss": 5.0 / n, "seconds": 0.1 * n} for n in range(1, 30)]


def draw_ratios(path: Path) -> None:
    measured.ratios(report.verdicts(read(RESULTS / "cpu-headline.csv")), path)


def draw_costs(path: Path) -> None:
    shape = cost.Shape(1, 4096, 4096, 32, 8, 128, 128, "bfloat16")
    machine = cost.device("h100")
    costs.costs([cost.roofline(work(shape), machine) for work in (cost.prefill, cost.backward)], machine, path)


PICTURES = {
    "ratios": (
        draw_ratios,
        ("forward, float32, causal, 8 heads of 64", "times as fast as torch SDPA", "4096 tokens", "of ceiling"),
    ),
    "costs": (draw_costs, ("roofline of h100, bfloat16", "prefill: compute-bound", "GiB per head and layer")),
    "losses": (lambda path: training.losses(path, STEPS, [(10, 1.0), (20, 0.5)]), ("running mean", "held-out text")),
    "comparison": (
        lambda path: training.comparison(path, {"attention": STEPS, "linear": STEPS}, 512),
        ("attention", "linear", "training speed"),
    ),
    "attention": (
        lambda path: training.attention(path, MAPS, ["a", "$", "\n"], ["head 0", "head 1", "head 7"], "three heads"),
        ("three heads", "head 7", "⏎", "$", "masked"),
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture(name: str, tmp_path: Path) -> None:
    draw, words = PICTURES[name]
    for file in ("a.svg", "b.svg", "c.png"):
        draw(tmp_path / file)
    text = (tmp_path / "a.svg").read_text()
    assert not [word for word in words if word not in text]
    assert (tmp_path / "b.svg").read_text() == text
    assert (tmp_path / "c.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ValueError, match=r"\.svg or \.png, got 'd\.gif'"):
        draw(tmp_path / "d.gif")


def test_masked_pairs_and_weights_of_zero_have_different_colours(tmp_path: Path) -> None:
    from matplotlib import image
    from matplotlib.colors import to_rgb

    training.attention(tmp_path / "a.png", MAPS[:1], ["a", "b", "c"], ["head 0"], "")
    pixels = np.round(image.imread(tmp_path / "a.png")[..., :3] * 255).astype(int)
    for colour in (training.MASKED, "#ffffff"):
        same = (pixels == np.round(np.array(to_rgb(colour)) * 255)).all(-1)
        # three of nine cells each
        assert same.sum() > 5000


def test_the_heads_that_differ_most_are_chosen() -> None:
    weights = np.zeros((2, 3, 2, 2))
    weights[0, 1, 1] = 1, 0
    weights[1, 2, 1] = 0, 1
    assert set(training.most_different(weights, 2)) == {(0, 1), (1, 2)}
    three = training.most_different(weights, 3)
    assert {(0, 1), (1, 2)} < set(three)
    assert three == sorted(three)
    assert len(training.most_different(weights, 9)) == 6


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        measured.ratios([], tmp_path / "a.svg")


LABELS = {
    ("cpu-headline", 0): "forward, float32, causal, 4096 tokens, 8 heads of 64",
    ("cpu-decode", -1): "decode, bfloat16, 128k keys, 32:8 heads of 128",
    ("cpu-sparse", 0): "forward, float32, causal window of 256, 4096 tokens, 8 heads of 64",
    ("cpu-sweep", 0): "forward, float32, causal, 1 token, 4 heads of 64",
    ("cpu-generation", -1): "generation, bfloat16, 32 M parameters, 48 prompts, up to 1024 tokens, served",
    ("cpu-training", 0): "training, float32, 32 M parameters, causal documents, rows of 4096 tokens",
    ("zen4-patterns", 0): "forward, float32, Longformer, 4096 tokens, 8 heads of 64",
    ("zen4-recurrent", 0): "linear attention, forward, float32, 128 tokens",
    ("zen4-recurrent-diagonal", -1): "selective scan (Mamba), forward, float32, 1 token",
    ("nvidia-h200-recurrent", 0): "decay per head, forward, bfloat16, 8192 tokens, 96 heads of 128",
    ("nvidia-h200x4-distributed", 0): "8192 tokens per GPU, forward",
    ("nvidia-h200-tiles", 0): "forward, 2 bytes per number, heads of 64",
    ("webgpu-h200", -1): "selective scan (Mamba), backward, float32, 8192 tokens, 1536 channels",
    ("webgpu-h200-splits", 0): "float32, 8192 keys",
}


@pytest.mark.parametrize("name, place", LABELS)
def test_a_case_in_words(name: str, place: int) -> None:
    assert ", ".join(labels.words(read(RESULTS / f"{name}.csv")[place])) == LABELS[name, place]


def test_masks_in_words() -> None:
    masks = ("", "causal() & window(1023, 0)", "causal() | prefix(32768)", "sparse-transformer-fixed", "block(3)")
    assert [labels.mask_words(mask) for mask in masks] == [
        "no mask", "causal window of 1024", "causal or prefix of 32k", "Sparse Transformer, fixed", "block(3)",
    ]  # fmt: skip
    assert labels.mask_words("causal()", "forward-causal()-documents4096-bfloat16") == "causal documents of 4096"


def test_parts_that_all_rows_share() -> None:
    rows = [["forward", "float32", "causal"], ["forward", "float32", "no mask"]]
    assert labels.shared(rows) == (["forward", "float32"], [["causal"], ["no mask"]])
    assert labels.shared(rows[:1]) == ([], rows[:1])


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of contrast of two colours."""

    def luminance(colour: str) -> float:
        parts = (int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5))
        linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_are_visible_in_both_themes() -> None:
    for library, colours in providers.LIBRARIES.items():
        assert contrast(colours.light, "#faf8f4") >= 3, library
        assert contrast(colours.dark, "#131416") >= 3, library
    assert len(set(providers.LIBRARIES.values())) == len(providers.LIBRARIES)


def test_every_provider_has_a_mark_and_an_unknown_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"'a new library' has no colour.*add 'a new library' there"):
        providers.provider("a new library")
    charts = script("charts", monkeypatch)
    assert {one.mark for one in providers.PROVIDERS.values()} <= set(charts["PATHS"])
    line = charts["Line"]("a case", "1", {"a new library": 1.0})
    with pytest.raises(ValueError, match=r"src/saccade/plot/providers\.py"):
        charts["html_of"](charts["Chart"]("GB/s", [line]), "a-name")


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of a script, which imports others of its folder."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return runpy.run_path(str(ROOT / "scripts" / f"{name}.py"))


def test_a_chart_as_html(monkeypatch: pytest.MonkeyPatch) -> None:
    charts = script("charts", monkeypatch)
    lines = [
        charts["Line"]("a < b", "2.00 ×", {"saccade": 2.0, "FlexAttention": 0.5}, target=4.0),
        charts["Line"]("c", "1.00 ×", {"saccade": 1.0}, span=(0.5, 2.0), group="a device"),
    ]
    chart = charts["Chart"]("times as fast", lines, ["One note."], log=True, origin=1)
    text = charts["html_of"](chart, "a-name")
    assert "\n\n" not in text
    for part in ("a &lt; b", "One note.", "a device", "FlexAttention: 0.5 times as fast", "target, set before"):
        assert part in text
    # the axis has three octaves from 4 to 96 percent of the width
    assert re.findall(r'left:([\d.]+)%">([\d.]+)<', text) == [
        ("4.00", "0.5"), ("34.67", "1"), ("65.33", "2"), ("96.00", "4"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="nothing to draw"):
        charts["html_of"](charts["Chart"]("GB/s", [charts["Line"]("a", "", {})]), "a-name")
    with pytest.raises(ValueError, match="-1 GB/s has no place"):
        charts["html_of"](charts["Chart"]("GB/s", [charts["Line"]("a", "", {"saccade": -1.0})], log=True), "a-name")


def test_marks_of_a_chart_differ_without_their_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, draw in script("measured", monkeypatch)["DRAWINGS"].items():
        shown = {providers.provider(mark) for line in draw().lines for mark in line.marks}
        marks = {(one.mark, one.filled) for one in shown}
        assert len(marks) == len({one.name for one in shown}), f"{name}: {shown}"


def test_verdicts_compare_with_the_fastest_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    verdicts = script("verdicts", monkeypatch)
    row = Row("", "", "", "a case", "saccade", "forward", median=2.0)
    peers = [Row("", "", "", "a case", peer, "forward", median=m) for peer, m in (("sdpa", 3.0), ("flex", 1.0))]
    alone = Row("", "", "", "another case", "saccade", "forward", median=1.0)
    monkeypatch.setitem(verdicts["ratios"].__globals__, "rows", lambda file: [row, *peers, alone])
    assert verdicts["ratios"](verdicts["Task"]("a task", ["a file"])) == [0.5]
    assert verdicts["ratios"](verdicts["Task"]("a task", ["a file"], without=("flex",))) == [1.5]
    assert verdicts["line"](verdicts["Task"]("a task", ["a file"]), "").label == "a task (1 of 1 slower)"
    with pytest.raises(ValueError, match="no case of"):
        verdicts["ratios"](verdicts["Task"]("a task", ["a file"], without=("flex", "sdpa")))


def test_rows_have_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file of rows is drawn, except those of single figures."""
    drawn = script("measured", monkeypatch)["FILES"]
    single = {"cpu-memory", "cpu-overhead", "cpu-plan", "zen4-overhead", "nvidia-h200x2-speeds"}
    single |= {"nvidia-h200x2-training"}
    # the same cases of other commits or forms, and a few cases of Saccade and one other library
    single |= {"nvidia-h200-redesign", "nvidia-h200-scores", "nvidia-h200-forms", "nvidia-h200-backward"}
    single |= {"nvidia-h200-eight-bits", "nvidia-h200"}
    single |= {"nvidia-h100-latent-training", "nvidia-h200-models", "nvidia-h200-head-sizes", "nvidia-h200-triton-3.9"}
    single |= {"cpu-latent-decode", "xeon-latent-decode", "cpu-selected", "cpu-batch-invariant", "cpu-forward-mode"}
    single |= {"cpu-outputs", "cpu-drafts", "cpu-losses"}
    assert {path.stem for path in RESULTS.glob("*.csv")} - single <= drawn


@pytest.mark.skipif(
    f"matplotlib=={version('matplotlib')}" not in (ROOT / "constraints.txt").read_text() or np.__version__ < "2",
    reason="drawn by the Matplotlib of constraints.txt, whose names of clip paths depend on NumPy's repr",
)
def test_the_readme_shows_what_was_measured(tmp_path: Path) -> None:
    draw_ratios(tmp_path / "now.svg")
    assert (tmp_path / "now.svg").read_text() == (RESULTS / "cpu-headline.svg").read_text()
