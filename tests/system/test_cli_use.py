"""Wrong use of the command line gives one sentence that names the option, and status 2; and what helps a user."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

typer_testing = pytest.importorskip("typer.testing")

from saccade.cli import show  # noqa: E402
from saccade.cli.main import app  # noqa: E402

runner = typer_testing.CliRunner()


def call(*words: str) -> str:
    result = runner.invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def wrong(*words: str) -> str:
    """The one sentence of a command that is used wrongly."""
    result = runner.invoke(app, list(words))
    assert result.exit_code == 2, result.output
    assert len(result.stderr.strip().splitlines()) == 1
    return str(result.stderr)


def apart(code: str, *words: str, blocked: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, in which some modules are not installed."""
    start = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); sys.argv = ['saccade', *{words!r}]; {code}"
    return subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=False, timeout=100)


MAIN = "from saccade.cli.main import main; main()"


def test_saccade_alone_prints_its_help() -> None:
    assert call() == call("--help")
    assert "--install-completion" in call()


@pytest.mark.parametrize("words", [("bench", "--quick"), ("bench", "--suite", "plan", "--peers", "flex")])
def test_bench_without_torch_says_how_to_go_on(words: tuple[str, ...]) -> None:
    done = apart(MAIN, *words, blocked=("torch",))
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "saccade: torch is not installed; run pip install '.[torch]' in a clone of Saccade, "
        "or measure Saccade alone with --peers none"
    )


def test_bench_of_saccade_alone_needs_no_torch(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    done = apart(MAIN, "bench", "--quick", "--peers", "none", "--out", str(out), blocked=("torch",))
    assert done.returncode == 0, done.stderr
    with out.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert {row["provider"] for row in rows} == {"saccade"}
    assert {row["kind"] for row in rows} == {"forward", "backward", "decode", "plan"}
    for row in rows:
        assert float(row["median"]) > 0, row["note"]
        # a plan has no output
        assert row["kind"] == "plan" or float(row["error"]) <= float(row["allowed"])


def test_a_picture_without_matplotlib_is_refused_before_the_table() -> None:
    done = apart(MAIN, "explain", "--q", "1x128x2x16", "--plot", "x.svg", blocked=("matplotlib",))
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr.strip() == "saccade: matplotlib is not installed; run pip install '.[train]' in a clone of Saccade"
    )


def test_lab_without_its_packages_names_them_and_its_extra() -> None:
    done = apart(MAIN, "lab", blocked=("anyio",))
    assert (done.returncode, done.stderr.strip()) == (
        2,
        "saccade: anyio is not installed; run pip install '.[lab]' in a clone of Saccade",
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("verify", "--backend", "cuda"), "--backend is 'cuda'; expected one of cpu, triton, metal, webgpu"),
        (("verify", "--only", "zzz"), "--only is 'zzz', and no case has it in its name"),
        (("verify", "--dtype", "int8"), "--dtype has 'int8'; expected one of"),
        (("verify", "--brief", "--tags", "edge"), "--brief and --tags edge are both given; give one of them"),
        (("verify", "--tags", "edge,primry"), "--tags has 'primry'; expected some of bench, edge, primary, slow, or"),
        (("verify", "--tags", "all,edge"), "--tags has 'all'; expected some of"),
        (("verify", "--seed", "-1"), "--seed is -1; expected at least 0"),
        (("explain", "--q=-1x64x4x64"), "--q is '-1x64x4x64'; expected four integers"),
        (("explain", "--q", "1x64x4x64", "--keys", "-2"), "--keys is -2; expected at least 0"),
        (("explain", "--q", "1x64x4x64", "--kv-heads", "-2"), "--kv-heads is -2; expected at least 0"),
        (("explain", "--q", "1x64x4x64", "--ranks", "-2"), "--ranks is -2; expected at least 0"),
        (("explain", "--q", "1x64x4x64", "--batch", "-1"), "--batch is -1; expected at least 1"),
        (("explain", "--q", "1x64x4x64", "--layout", "foo"), "--layout is 'foo'; expected one of contiguous"),
        (("explain", "--q", f"1x{'9' * 5000}x4x64"), "--q is '1x999"),
        (("explain", "--q", "1x64x4x64", "--batch", "2"), "--batch is 2, the sequences in the KV cache of --model"),
        (("explain", "--q", "1x64x4x64", "--layout", "striped"), "--layout is 'striped', that of --ranks"),
        (("explain", "--q", "1x8x1x64", "--mask", "keys(9)"), "keys: stop runs from 9 to 9, expected 0 to 8"),
        (("draw", "causal", "--q", "4", "--out", "/tmp"), "--out is '/tmp', which is a folder; name a file"),
        (("bench", "--only", "zzz"), "--only is 'zzz', and no case of this suite has it in its name"),
        (("bench", "--quick", "--out", "/nope/rows.csv"), "there is no folder '/nope'"),
        (("bench", "--threads", "-1"), "--threads is -1; expected at least 0"),
        (("bench", "--seconds", "nan"), "--seconds is nan; expected a finite number of at least 0"),
        (("bench", "--out", "/tmp"), "--out is '/tmp', which is a folder; name a file"),
        (("bench", "--quick", "--peers", "sdap"), "--peers has 'sdap'; expected some of sdpa, naive, none"),
        (("bench", "--read", "/nope"), "/nope: no such file or directory"),
        (("draw", "causal("), "cannot read the mask"),
        (("draw", "causal", "--queries", "0"), "--queries is 0; expected at least 1"),
        (("draw", "causal", "--out", "x.gif"), "expected .svg, .png or .txt"),
        (("draw", "causal", "--head", "1"), "saccade draw: head is 1, expected 0 to 0"),
        (("draw", "documents([1, 1, 0])"), "give padding the highest id"),
        (("draw", "documents([1, 1])", "--k", "3"), "ids has shape [2], expected [3]"),
        pytest.param(
            ("lab", "--model", "/nope"),
            "no config.json in /nope",
            marks=pytest.mark.skipif(not find_spec("uvicorn"), reason="uvicorn is not installed"),
        ),
    ],
)
def test_wrong_use_is_one_sentence(words: tuple[str, ...], message: str) -> None:
    assert message in wrong(*words)


def test_a_picture_in_a_missing_folder_makes_no_folder(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "none" / "x.svg"
    assert "make it first" in wrong("explain", "--q", "1x128x2x16", "--plot", str(path))
    assert not path.parent.exists()
    path.mkdir(parents=True)
    assert "is a folder; name a file" in wrong("explain", "--q", "1x128x2x16", "--plot", str(path))


def test_the_picture_shows_the_mask_and_its_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "x.svg"
    given = ["explain", "--q", "1x128x2x16", "--device", "h100", "--mask", "causal & window(31, 0)", "--plot"]
    result = runner.invoke(app, [*given, str(path)])
    assert result.exit_code == 0, result.output
    assert result.stderr.strip() == f"drawn in {path}"
    assert "window(31, 0)" in path.read_text()


@pytest.mark.parametrize("device", ["h100", "h200", "a100"])
@pytest.mark.parametrize("blocked", [(), ("triton",)])
def test_explain_of_a_gpu_says_that_float64_is_not_computed(device: str, blocked: tuple[str, ...]) -> None:
    done = apart(MAIN, "explain", "--q", "1x64x2x64", "--device", device, "--dtype", "float64", blocked=blocked)
    reason = "not known here  it needs the package triton" if blocked else "not computed  float64"
    assert reason in done.stdout


def test_a_size_has_one_unit() -> None:
    text = call("explain", "--q", "1x4096x32x128", "--device", "h100", "--model", "llama-2-70b")
    assert "MiB" in text
    assert not re.search(r"\b\d+ [kMGT]B\b", text)


def test_tables_fold_and_cite_what_readers_have() -> None:
    text = call("devices")
    assert max(map(len, text.splitlines())) <= show.PIPED
    assert not re.search(r"\bS\d+\b", text)


def test_devices_names_what_triton_kernels_have_not_run_on() -> None:
    text = call("devices")
    assert re.search(r"only compile +with Triton 3\.7, 3\.8", text)
    assert "gfx942 (MI300X)" in text


@pytest.mark.parametrize(("device", "status"), [("a100", "sm_80: compiled, not run; to report"), ("h200", "sm_90\n")])
def test_explain_says_whether_a_chip_has_run(device: str, status: str) -> None:
    pytest.importorskip("triton")
    assert f"chip            {status}" in call("explain", "--q", "1x64x2x72", "--device", device)


def test_devices_imports_no_torch_where_there_is_no_gpu() -> None:
    code = (
        "from saccade.cli import devices; print(devices.no_nvidia(), devices.backends(['cpu', 'triton'])[1]['reasons'])"
    )
    done = apart(f"{code}; print('torch' in sys.modules)")
    nothing, _, message = done.stdout.partition(" ")
    if nothing == "True":
        assert message.splitlines() == ["['no NVIDIA driver is on this machine']", "False"]


def test_a_brief_check_prints_one_line_per_backend() -> None:
    from saccade.backends import ORDER

    head, lines = call("verify", "--brief").split("\n\n")
    assert "float64" in head
    assert [line.split()[0] for line in lines.splitlines()] == list(ORDER)
    cpu = r"cpu +\d\d results checked against float64; the nearest to its limit has \d+ % of the error it may have"
    assert re.match(cpu, lines)


def test_a_wrong_result_is_named_and_gives_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    import saccade

    def wrong(*args: object, **options: object) -> object:
        o, lse = decode(*args, **options)
        return o + 1, lse

    decode = saccade.decode
    monkeypatch.setattr(saccade, "decode", wrong)
    words = ["verify", "--brief", "--backend", "cpu", "--dtype", "float32", "--only", "decode"]
    result = runner.invoke(app, words)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "cpu      2 of 4 results are WRONG"
    assert "FAILED cpu float32 decode-1-64-300-T1-H8:2-D64 random o: error" in result.stderr


@pytest.mark.parametrize("only", ["mla", "decode-2049"])
def test_verify_takes_tags_with_spaces_and_the_names_it_prints(only: str) -> None:
    text = call("verify", "--backend", "cpu", "--dtype", "float32", "--only", only, "--tags", "edge, primary")
    assert only in text
    assert "1 cases, " in text


def test_the_table_of_verify_is_explained() -> None:
    text = call("verify", "--backend", "cpu", "--dtype", "float32", "--only", "heads-one")
    head, table = text.split("\n\n")
    assert all(word in head for word in ("float64", "`o_alone`", "`within`"))
    assert "1 of 1" in table


def test_lab_names_its_six_views() -> None:
    text = " ".join(call("lab", "--help").split())
    for view in ("Masks", "Online softmax", "Attention maps", "Roofline", "Caches", "Your GPU"):
        assert view in text


def test_draw_prints_the_mask_and_writes_it(tmp_path: Path) -> None:
    from saccade.mask import parse

    out = tmp_path / "mask.svg"
    text = call("draw", "causal & window(3, 0)", "--queries", "9", "--keys", "7", "--out", str(out))
    *picture, message = text.splitlines()
    assert "\n".join(picture) == parse("causal & window(3, 0)").draw(9, 7)
    assert message == "causal() & window(3, 0): 9 queries, 7 keys"
    assert out.read_text().startswith("<svg")


def test_draw_takes_the_sizes_of_the_arrays() -> None:
    text = call("draw", "documents([[0, 0, 1], [0, 1, 1]])")
    assert text.splitlines() == ["██·", "██·", "··█", "documents(<int32[2, 3]>): 3 queries, 3 keys; entry 0 of 2"]


def test_draw_of_tiles_counts_them() -> None:
    text = call("draw", "causal & window(150, 0)", "--q", "200", "--k", "200", "--tiles")
    *picture, message = text.splitlines()
    assert picture == ["▒···", "█▒··", "▒█▒·", "▒██▒"]
    assert message.endswith("a cell is 64 × 64: 4 full, 6 in part, 6 empty")


def test_draw_writes_json() -> None:
    data = json.loads(call("draw", "causal", "--q", "2", "--k", "3", "--json"))
    sizes = {"queries": 2, "keys": 3, "batch": 1, "head": 0, "cell": 1}
    counts = {"none": 1, "part": 0, "all": 5}
    assert data == {"mask": "causal()", **sizes, "cells": counts, "states": [[2, 2, 0], [2, 2, 2]]}


@pytest.mark.parametrize("no_color", ["", "1"])
def test_draw_fits_the_terminal_and_colours_it(no_color: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", "NO_COLOR": no_color}
    for name, value in terminal.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("COLORTERM", raising=False)
    text = runner.invoke(app, ["draw", "causal"], color=True).stdout
    if no_color:
        assert "\x1b" not in text
        assert text.count("█") == 21 * 22 // 2
    else:
        # two cells above one another, dark and light of 256 colours
        assert text.count("▀") == 42 * 21
        assert text.count("\x1b[38;5;24;48;5;24m") == 21 * 21
    assert len(text.splitlines()) == 22


def test_explain_of_too_many_ranks_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def summary(*_: object) -> dict[str, str]:
        raise MemoryError

    monkeypatch.setattr("saccade.distributed.strategy.summary", summary)
    done = runner.invoke(app, ["explain", "--q", "1x8x1x64", "--device", "h100", "--ranks", "1000000"])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "--ranks 1000000; give fewer" in done.stderr
