"""Rows of benchmarks: one form, read as they were written; the clocks that fill them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from saccade.cli.bench.clocks import by_clock, in_turn, timing
from saccade.cli.bench.rows import NAN, Row, kept, note, read, update, write

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
ROW = Row("abc", "a device", "a driver", "a case", "saccade", "forward", median=0.25, error=0.0)


def test_every_committed_row_has_the_one_form() -> None:
    for path in sorted(RESULTS.glob("*.csv")):
        rows = read(path)
        assert rows, path
        assert all(row.device or row.kind == "train" for row in rows), path
        # a row has a figure, or says why not
        assert all(row.measured or not math.isnan(row.rate) or row.note for row in rows), path


def test_what_was_not_measured_has_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    write(path, [ROW])
    assert path.read_text().splitlines()[1] == "abc,a device,a driver,a case,saccade,forward,,,,,0.25,,,,,,,,0,,"
    (row,) = read(path)
    assert (row.median, row.error, row.samples, row.pairs) == (0.25, 0.0, 0, 0)
    assert math.isnan(row.p10)
    assert math.isnan(row.rate)
    assert math.isnan(row.allowed)
    assert "250 ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda line: line[:-1], "line 3: 20 cells; expected 21: remove the line"),
        (lambda line: line + ",more", "line 3: 22 cells; expected 21"),
        (lambda line: line.replace("0.25", "0.2.5"), "line 3: could not convert string to float: '0.2.5'; remove"),
    ],
)
def test_a_damaged_line_is_named(spoil: Callable[[str], str], words: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    write(path, [ROW, replace(ROW, case="another case")])
    path.write_text("\n".join((lines := path.read_text().splitlines())[:2] + [spoil(lines[2])]))
    with pytest.raises(ValueError, match=rf"rows\.csv, {words}"):
        read(path)


def test_a_run_goes_on_after_a_line_that_a_kill_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    write(path, [ROW, replace(ROW, case="another case"), replace(ROW, case="a third case")])
    path.write_text(path.read_text()[:-5])
    assert [row.case for row in kept(path, (ROW.commit, ROW.device, ROW.driver))] == ["a case"]


def test_notes_are_values_and_text() -> None:
    text = note({"bar": 1.8, "against": "sdpa", "aim": 0.0, "unknown": NAN}, "64 splits; decode: 39 us")
    assert text == "bar=1.8; against=sdpa; 64 splits; decode: 39 us"
    assert replace(ROW, note=text).notes == {"bar": "1.8", "against": "sdpa"}
    assert ROW.with_text("").note == ""
    assert ROW.with_text("one").with_text("two").note == "one; two"


def test_rows_measured_again_replace_the_old_ones(tmp_path: Path) -> None:
    path, new = tmp_path / "rows.csv", tmp_path / "new.csv"
    write(new, [ROW, replace(ROW, provider="torch")])
    update(path, new)
    # digits that a reader of numbers would lose
    path.write_text(path.read_text().replace("0.25", "0.250000000000000001"))
    write(new, [replace(ROW, provider="torch", median=0.5), replace(ROW, kind="backward")])
    update(path, new)
    assert [(row.provider, row.kind, row.median) for row in read(path)] == [
        ("saccade", "forward", 0.25),
        ("torch", "forward", 0.5),
        ("saccade", "backward", 0.25),
    ]
    assert "0.250000000000000001" in path.read_text()
    # another size of the same case
    write(new, [replace(ROW, shape="B=1", median=0.5)])
    update(path, new)
    assert [row.median for row in read(path) if row.kind == "forward"] == [0.25, 0.5, 0.5]


def test_the_host_clock_counts_its_calls() -> None:
    calls: list[str] = []
    samples = by_clock(
        lambda: calls.append("call"),
        rounds=3,
        warm=2,
        inside=4,
        before=lambda: calls.append("before"),
        after=lambda: calls.append("after"),
    )
    assert calls == ["call"] * 2 + (["before"] + ["call"] * 4 + ["after"]) * 3
    assert len(samples) == 3
    assert min(samples) >= 0


def test_timings() -> None:
    assert timing([3.0, 1.0, 2.0]) == pytest.approx((2.0, 1.2, 2.8, 3))
    both = in_turn({"one": lambda: None, "other": lambda: None}, seconds=0.0, rounds=(2, 3))
    assert [t.samples for t in both.values()] == [2, 2]
