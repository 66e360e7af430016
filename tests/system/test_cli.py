"""The command line through its own parser: what each command writes, and what makes it fail."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

typer_testing = pytest.importorskip("typer.testing")

from saccade.cli.bench import report, rows  # noqa: E402
from saccade.cli.bench.cases import GROUPS, cases  # noqa: E402
from saccade.cli.main import COMMANDS, app  # noqa: E402

runner = typer_testing.CliRunner()


def call(*words: str, status: int = 0) -> str:
    result = runner.invoke(app, list(words))
    assert result.exit_code == status, result.output
    return str(result.stdout)


def call_json(*words: str) -> Any:
    return json.loads(call(*words, "--json"))


def test_help_names_every_command() -> None:
    text = call("--help")
    assert all(name in text for name in COMMANDS)


def test_help_and_explain_of_a_device_import_no_torch() -> None:
    code = "import sys; from saccade.cli.main import app; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]


def test_without_typer_it_says_how_to_get_it() -> None:
    code = "import sys; sys.modules['typer'] = None; import saccade.cli.main"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "'.[cli]'" in done.stderr


def test_version() -> None:
    import saccade

    assert call("--version").strip() == saccade.__version__


def test_devices() -> None:
    data = call_json("devices")
    assert [b["name"] for b in data["backends"]] == ["cpu", "triton", "metal", "webgpu"]
    assert all(b["ready"] or b["reasons"] for b in data["backends"])
    assert data["devices"]["h100"]["ridge"]["bfloat16"] == pytest.approx(298.5, abs=0.05)
    assert "h100" in call("devices")


WINDOW = (
    "explain",
    "--q",
    "1x4096x32x128",
    "--kv-heads",
    "8",
    "--mask",
    "causal & window(1023, 0)",
    "--device",
    "h100",
)


def test_explain_the_example() -> None:
    data = call_json(*WINDOW)
    pairs = 32 * (1024 * 1025 // 2 + (4096 - 1024) * 1024)
    assert data["count"]["exact"]
    assert data["count"]["allowed"] == pairs
    assert data["count"]["visited"] >= pairs
    assert 0.7 < data["count"]["skipped"] < 0.8
    forward, backward = data["work"]
    assert forward["flops"] == pairs * 2 * (128 + 128)
    assert backward["flops"] == 2.5 * forward["flops"]
    assert forward["bytes"] == 2 * 4096 * 128 * (2 * 32 + 2 * 8) + 4 * 4096 * 32
    assert forward["bound"] == "compute"
    text = call(*WINDOW)
    assert all(word in text for word in ("causal() & window(1023, 0)", "skipped", "compute-bound", "GFLOP", "MiB"))


def test_explain_decode_is_bandwidth_bound() -> None:
    data = call_json("explain", "--q", "1x1x32x128", "--keys", "8192", "--kv-heads", "8", "--device", "h100")
    (work,) = data["work"]
    assert (work["kind"], work["bound"]) == ("decode", "bandwidth")
    assert work["intensity"] == pytest.approx(4, rel=0.01)


@pytest.mark.parametrize(
    "mask", ["", "causal", "strided(4)", "causal & strided(4)", "window(7, 3)", "prefix(9) | causal"]
)
def test_explain_counts_what_the_predicate_allows(mask: str) -> None:
    from saccade.mask import parse

    t, heads = 96, 2
    data = call_json("explain", "--q", f"2x{t}x{heads}x64", "--mask", mask, "--device", "a100")["count"]
    allowed = parse(mask).evaluate(1, 1, t, t).sum() if mask else t * t
    assert data["exact"]
    assert data["allowed"] == 2 * heads * allowed
    assert data["allowed"] <= data["visited"]
    assert data["full"] + data["partial"] <= data["tiles"]


def test_explain_prints_the_scratch_of_the_short_backward() -> None:
    text = call(
        "explain",
        "--q",
        "1x512x12x64",
        "--kv-heads",
        "4",
        "--mask",
        "causal",
        "--device",
        "webgpu",
        "--dtype",
        "float32",
    )
    assert "24 MiB" in text
    data = call_json("explain", "--q", "1x1024x12x64", "--device", "webgpu", "--dtype", "float32")
    assert data["scratch_bytes"] == 96 * 1024**2
    assert data["scratch_max_heads"] == 32
    assert not data["scratch_refused"]


def test_explain_sizes_a_cache_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "cost.svg"
    words = ("--q", "1x1x64x128", "--keys", "4096", "--kv-heads", "8", "--device", "h100", "--batch", "64")
    data = call_json("explain", *words, "--model", "llama-2-70b", "--plot", str(picture))
    assert data["cache"]["batch_bytes"] == 80 * 1024**3
    assert data["cache"]["fits"] is False
    wide = call_json("explain", *words, "--model", "llama-2-70b", "--dtype", "float32")["cache"]
    assert (wide["dtype"], wide["batch_bytes"]) == ("float32", 160 * 1024**3)
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    "words",
    [
        ("--q", "1x4096x32"),
        ("--q", "1x16x3x64", "--kv-heads", "2"),
        ("--q", "1x16x2x64", "--mask", "causal & nonsense(1)"),
        ("--q", "1x16x2x64", "--device", "abacus"),
        ("--q", "1x16x2x64", "--dtype", "int8"),
        ("--q", "1x16x2x64", "--device", "h100", "--model", "gpt-9"),
        ("--q", "1x16x2x64", "--plot", "cost.gif"),
    ],
)
def test_explain_refuses_with_one_line(words: tuple[str, ...]) -> None:
    result = runner.invoke(app, ["explain", *words])
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stderr.startswith("saccade: ")


def test_bench_catalogue() -> None:
    names = [case.name for case in cases("cpu")]
    assert len(names) == len(set(names))
    assert set(GROUPS) <= {case.group for case in cases("cpu")} | {"headline", "sparse"}
    listed = call("bench", "--suite", "decode", "--list").split()
    assert len(listed) == 6
    result = runner.invoke(app, ["bench", "--suite", "nothing"])
    assert result.exit_code == 2


def test_bench_quick(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out, picture = tmp_path / "rows.csv", tmp_path / "rows.svg"
    words = ["bench", "--quick", "--threads", "1", "--out", str(out)]
    result = runner.invoke(app, words)
    assert result.exit_code == 0, result.output
    with out.open(newline="") as stream:
        texts = list(csv.DictReader(stream))
    assert {"saccade", "sdpa", "naive"} == {row["provider"] for row in texts}
    for row in texts:
        assert row["commit"]
        assert row["device"]
        assert float(row["p10"]) <= float(row["median"]) <= float(row["p90"])
        if row["kind"] != "plan":
            assert float(row["rate"]) > 0
            assert float(row["fraction"]) > 0
    ours = [row for row in texts if row["provider"] == "saccade" and row["kind"] != "plan"]
    assert all(float(row["error"]) <= float(row["allowed"]) for row in ours)
    if _has("matplotlib"):
        call("bench", "--read", str(out), "--plot", str(picture))
        assert picture.stat().st_size > 1000
    table = call("bench", "--read", str(out), "--markdown")
    assert table.splitlines()[0].startswith("| case | saccade |")


def _has(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def _row(provider: str, **change: Any) -> rows.Row:
    base: dict[str, Any] = dict.fromkeys(("p10", "p90", "rate", "ceiling", "fraction", "error"), 0.0)
    base |= dict.fromkeys(("commit", "device", "driver", "rate_unit", "shape", "mask"), "x")
    base |= {"case": "case", "provider": provider, "kind": "forward", "dtype": "float32"}
    base |= {"pairs": 1, "median": 1.0, "samples": 5, "allowed": 1e-6, "note": "bar=2; against=sdpa"}
    return rows.Row(**{**base, **change})


@pytest.mark.parametrize(("theirs", "met"), [(1.9, False), (2.0, True), (3.5, True)])
def test_a_bar_is_the_peers_median_over_ours(theirs: float, met: bool) -> None:
    (verdict,) = report.verdicts([_row("saccade"), _row("sdpa", median=theirs)])
    assert verdict.figure == pytest.approx(theirs)
    assert verdict.met is met


def test_a_peer_that_did_not_run_meets_no_bar() -> None:
    (verdict,) = report.verdicts([_row("saccade"), _row("sdpa", samples=0, median=math.nan, note="absent")])
    assert not verdict.met


def test_a_wrong_answer_fails_the_run() -> None:
    good, wrong, nan = _row("saccade"), _row("saccade", error=1.0), _row("saccade", error=float("nan"))
    assert report.failures([good, _row("sdpa", error=1.0)]) == []
    assert report.failures([wrong, nan]) == [wrong, nan]
    # neither a time nor an output to check is a failure only where there is no time
    plan, absent = (_row("saccade", error=math.nan, allowed=math.nan, median=x) for x in (1.0, math.nan))
    assert report.failures([plan, absent]) == [absent]


def test_rows_survive_the_csv(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    table = [_row("saccade", note='bar=2; a "quoted", note'), _row("sdpa", median=0.25)]
    with path.open("w", newline="") as stream:
        rows.Writer(stream).add(table)
    assert rows.read(path) == table
    assert table[0].notes == {"bar": "2"}
    path.write_text("a,b\n1,2\n")
    assert runner.invoke(app, ["bench", "--read", str(path)]).exit_code == 2
