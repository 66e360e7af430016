"""Pictures: what they say, and that the same numbers give the same bytes."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from saccade import cost
from saccade.cli.bench import report
from saccade.cli.bench.rows import read
from saccade.plot import costs, measured, training

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
    "ratios": (draw_ratios, ("forward-fp32-causal-B1-T4096-H8-D64", "times as fast as torch SDPA", "of ceiling")),
    "costs": (draw_costs, ("roofline of h100, bfloat16", "prefill: compute-bound", "GiB per head and layer")),
    "rates": (
        lambda path: measured.rates({"a case": {"saccade": 2.0, "torch": 1.0}, "other": {"torch": 3.0}}, "GB/s", path),
        ("a case", "other", "saccade", "torch", "GB/s"),
    ),
    "spread": (
        lambda path: measured.spread({"forward": [3.0, 1.0, 2.0], "backward": [5.0]}, "µs", path),
        ("forward", "backward", "µs"),
    ),
    "over tokens": (
        lambda path: measured.over_tokens({"saccade": {"both": [(64, 0.1), (128, 0.2)], "forward": [(64, 0.1)]}}, path),
        ("saccade", "tokens", "seconds"),
    ),
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
    with pytest.raises(ValueError, match="nothing to draw"):
        measured.rates({}, "GB/s", tmp_path / "a.svg")
    with pytest.raises(ValueError, match="1 cases of 9 providers"):
        measured.rates({"a": {str(n): 1.0 for n in range(9)}}, "GB/s", tmp_path / "a.svg")


def test_rows_have_pictures() -> None:
    """Every file of rows is drawn, except those of single figures."""
    drawn = runpy.run_path(str(ROOT / "scripts" / "measured.py"))["FILES"]
    single = {"cpu-memory", "cpu-overhead", "cpu-plan", "zen4-overhead", "nvidia-h200x2-speeds"}
    # the same cases of other commits or forms, and a few cases of Saccade and one other library
    single |= {"nvidia-h200-redesign", "nvidia-h200-scores", "nvidia-h200-forms", "nvidia-h200-backward"}
    single |= {"nvidia-h200-eight-bits", "nvidia-h100-recurrent", "nvidia-h200"}
    single |= {"nvidia-h100-latent-training", "nvidia-h200-head-sizes", "nvidia-h200-triton-3.9", "cpu-methods"}
    single |= {"cpu-latent-decode", "cpu-selected", "cpu-batch-invariant", "cpu-forward-mode"}
    single |= {"cpu-outputs", "cpu-drafts", "cpu-training", "cpu-generation"}
    assert {path.stem for path in RESULTS.glob("*.csv")} - single <= drawn


def test_the_readme_shows_what_was_measured(tmp_path: Path) -> None:
    draw_ratios(tmp_path / "now.svg")
    assert (tmp_path / "now.svg").read_text() == (RESULTS / "cpu-headline.svg").read_text()
