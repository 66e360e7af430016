"""The options of `saccade bench`: what is measured, read and drawn, and what is refused before anything is measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

typer_testing = pytest.importorskip("typer.testing")

from saccade.cli.bench import command, report, rows  # noqa: E402
from saccade.cli.main import app  # noqa: E402

runner = typer_testing.CliRunner()
ORIGIN = ("abc", "a device", "a driver", "one-fp32-case", "saccade", "forward", "float32", "1x2x2x1x1x8")
ROW = rows.Row(*ORIGIN, median=1.0, samples=5, error=0.0, allowed=1e-6, note="bar=2; against=sdpa")


def call(*words: object, status: int = 0) -> Any:
    """The result of a command; wrong use is one line."""
    result = runner.invoke(app, ["bench", *map(str, words)])
    assert result.exit_code == status, result.output
    if status == 2:
        assert len(result.stderr.strip().splitlines()) == 1
    return result


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    rows.write(path, [ROW, replace(ROW, provider="sdpa", median=3.0), replace(ROW, case="two-fp32-case")])
    return path


def test_a_peer_without_a_row_has_no_ratio_and_no_bar() -> None:
    (verdict,) = report.verdicts([ROW])
    assert (verdict.text, verdict.bar_text, verdict.met) == ("not measured", "none", False)
    (verdict,) = report.verdicts([ROW, rows.Row("", "", "", ROW.case, "sdpa", "forward", note="not installed")])
    assert (verdict.text, verdict.bar_text, verdict.met) == ("not measured", "2 × sdpa", False)


def test_rows_of_a_file_are_chosen_by_name(table: Path) -> None:
    (row,) = json.loads(call("--read", table, "--only", "two", "--json").stdout)
    assert row["case"] == "two-fp32-case"
    assert "one-fp32" not in call("--read", table, "--only", "two", "--markdown").stdout
    assert f"no case in {table} has it in its name" in call("--read", table, "--only", "zzz", status=2).stderr
    for words in (
        ["--out", "x.csv"],
        ["--suite", "decode"],
        ["--peers", "sdpa"],
        ["--quick"],
        ["--threads", "4"],
        ["--seconds", "3"],
    ):
        told = call("--read", table, *words, status=2).stderr
        assert f"{words[0]} is given with --read, which measures nothing" in told


@pytest.mark.parametrize(
    ("first", "words"),
    [
        *(("--list, which prints names alone", words) for words in ("--plot x.svg", "--markdown", "--check")),
        *(("--list, which prints names alone", words) for words in ("--out x.csv", "--peers sdpa", "--threads 2")),
        ("--json, which prints no table", "--markdown"),
    ],
)
def test_options_that_another_would_ignore(first: str, words: str) -> None:
    option, told = words.split()[0], call(first.partition(",")[0], *words.split(), status=2).stderr
    assert f"{option} is given with {first}; give one of them" in told


def test_a_file_that_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"\xd0\xff\x00\n")
    assert f"{path} is no table" in call("--read", path, status=2).stderr


def test_a_list_may_be_json(table: Path) -> None:
    names = json.loads(call("--suite", "decode", "--list", "--json").stdout)
    assert names == call("--suite", "decode", "--list").stdout.split()
    assert call("--read", table, "--list").stdout.split() == ["one-fp32-case", "two-fp32-case"]


def test_peers_may_have_spaces_and_the_file_is_replaced(table: Path) -> None:
    pytest.importorskip("torch")
    call("--quick", "--only", "forward-fp32", "--peers", "naive, sdpa", "--out", table)
    assert [row.provider for row in rows.read(table)] == ["saccade", "sdpa", "naive"]


def test_a_file_stays_until_there_are_rows(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> Any:
        raise OSError(28, "No space left on device")

    before = table.read_text()
    monkeypatch.setattr(command, "run_all", failing)
    assert "no space left" in call("--quick", "--peers", "none", "--out", table, status=2).stderr
    assert table.read_text() == before


def test_a_picture_without_ratios_is_refused_before_anything_is_measured(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(command, "run_all", None)
    for words in (["--quick", "--peers", "none"], ["--suite", "memory"]):
        told = call(*words, "--plot", table.with_suffix(".svg"), status=2).stderr
        assert "--plot draws times compared with a peer's" in told
    # of a file, after its table
    result = call("--read", table, "--only", "two", "--plot", table.with_suffix(".svg"), status=2)
    assert "nothing to draw" in result.stderr
    assert "two-fp32-case" in result.stdout
