"""The exported lab, opened from its folder: the plans of `saccade explain`, links, and states that it lacks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from saccade.lab import export, masks
from saccade.lab.views import VIEWS, answer

pytestmark = pytest.mark.timeout(600)
CARDS = {"cpu": "zen5", "h100": "h100", "m3": "m3", "webgpu": "webgpu"}
SOME = 50


@pytest.fixture(scope="module")
def texts(request: pytest.FixtureRequest) -> list[str]:
    """Random masks of those that an exported lab has."""
    rng = np.random.default_rng(request.config.getoption("--seed"))
    return [str(text) for text in rng.permutation(np.array(export.FAMILIES, object))[:SOME]]


@pytest.fixture(scope="module")
def folder(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lab") / "static"
    states = [one for one in export.grids(texts, devices=export.CARDS) if one.view != "roofline"]
    counted = export.export(directory, "../", states)
    assert counted["visits"] == SOME * 2 * 2 * 4
    return directory


@pytest.fixture
def static(watched_at: Callable[..., Any], folder: Path) -> Iterator[Any]:
    """The exported page in a browser without WebGPU, from its folder."""
    script = "Object.defineProperty(Navigator.prototype, 'gpu', {get: () => undefined});"
    with watched_at((folder / "index.html").as_uri(), script=script) as it:
        yield it


def test_plans_are_those_of_explain(
    static: Any, texts: list[str], explained: Callable[[str, int, dict[str, str]], dict[str, Any]]
):
    rng = np.random.default_rng(1)
    for text in texts:
        sizes = {"dtype": str(rng.choice(["bfloat16", "float32"])), "d": str(rng.choice([64, 128]))}
        page = static.open(f"mask?mask={quote(text)}&dtype={sizes['dtype']}&d={sizes['d']}")
        for card, device in CARDS.items():
            printed = explained(device, 1, {**sizes, "mask": text, "tq": "1024", "tk": "1024"})
            shown = page.locator(f"[data-device={card}]").inner_text().replace("\u202f", "")
            if "tiles of" not in shown:
                assert {"not computed", "not known here"} & set(printed["kernels"]), (text, device)
                continue
            count = printed["count"]
            assert f"tiles of {printed['tile_q']} × {printed['tile_k']}" in shown, (text, device)
            assert f"{count['full'] + count['partial']} of {count['tiles']}" in shown, (text, device)
            assert f"{count['full']}, {count['partial']}" in shown, (text, device)
            assert str(count["visited"]) in shown, (text, device)


def test_a_link_has_the_state(static: Any):
    page = static.open("caches")
    page.locator("[name=model]").select_option("deepseek-v3")
    static.until("location.hash.includes('deepseek-v3')")
    static.drawn()
    address, seen = page.url.partition("#")[2], page.locator(".out").inner_html()
    assert "latent of 576 numbers" in page.locator(".out").inner_text()
    assert static.open(address).locator(".out").inner_html() == seen


def test_states_that_it_lacks_are_refused(static: Any):
    page = static.open("mask?mask=causal()%20%26%20window(5,%205)")
    said = page.get_by_role("alert").inner_text()
    assert said.startswith('Mask is "causal() & window(5, 5)"; this copy of the lab has answers for 50 others')
    assert said.endswith("For any other: pip install '.[lab]' in a clone of Saccade, then saccade lab.")
    assert page.locator("[aria-invalid]").get_attribute("name") == "mask"
    page = static.open("mask?tq=77")
    assert (
        page.get_by_role("alert").inner_text().startswith('Queries is "77"; this copy of the lab has answers for 1024.')
    )
    # the views without a table are not offered
    assert page.locator("nav a").all_inner_texts() == ["Masks", "Online softmax", "Cache sizes", "Your GPU"]


def test_its_other_views(static: Any, axe: str):
    page = static.open("softmax?example=weights&step=3")
    assert "0.9264" in page.locator(".out").inner_text()
    assert page.locator("a[href='../inside/derivation.html']").count() == 1
    page = static.open("kernels")
    assert "does not support WebGPU" in page.get_by_role("alert").inner_text()
    page.locator("[data-recorded=tiled], .card .error").first.wait_for()
    page = static.open("mask")
    page.get_by_role("button", name="Copy SVG").click()
    page.get_by_text("SVG copied").wait_for()
    page.evaluate(axe)
    # a folder does not answer the requests by which axe would read the style sheet again
    found = page.evaluate("axe.run(document, {resultTypes: ['violations'], preload: false})")
    assert found["violations"] == [], json.dumps(found["violations"], indent=1)[:3000]


def test_its_kernels_run_on_the_visitors_gpu(watched_at: Callable[..., Any], folder: Path):
    pytest.importorskip("wgpu")
    with watched_at((folder / "index.html").as_uri()) as it:
        page = it.open("kernels")
        page.get_by_role("button", name="Run").click()
        page.get_by_role("button", name="Run again").wait_for(timeout=240000)
        cards = page.locator("[data-set]")
        assert cards.count() == 2, page.locator(".out").inner_text()
        for n in range(2):
            assert cards.nth(n).get_attribute("data-ok") == "true", cards.nth(n).inner_text()


def test_its_page_needs_no_other_file(folder: Path):
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    tables = {f"tables/{view}.js" for view in ("about", "mask", "visits", "softmax", "caches", "kernel")}
    assert files == {"index.html", "style.css", "icon.svg", *tables}
    assert "from './" not in export.document(export.files())


def test_equal_answers_are_stored_once():
    one = export.Grid("visits", {"mask": ("causal()",), "tq": ("128",), "d": ("32", "64"), "device": ("cpu",)})
    content, total = export.table([one])
    assert (total, len(content["answers"]), content["grids"][0]["index"]) == (2, 1, [0, 0])
    asked = {"mask": "causal()", "tq": "128", "d": "64", "device": "cpu"}
    assert content["answers"][0] == export.shorter(json.loads(json.dumps(answer(VIEWS["visits"], asked)[1])))


def test_its_masks_are_different_and_can_be_drawn():
    assert len(set(export.FAMILIES)) == len(export.FAMILIES) >= SOME
    for text in export.FAMILIES:
        assert masks.picture({"mask": text, "tq": "1024", "tk": "1024"})["heads"] == 1


def test_other_files_are_not_overwritten(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="has other files"):
        export.export(tmp_path, states=())
    command = [sys.executable, "-m", "saccade.cli.main", "lab", "--export", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, [path.name for path in tmp_path.iterdir()]) == (2, ["thesis.txt"])
    assert "has other files" in done.stderr
    done = subprocess.run([*command, "--port", "9"], capture_output=True, text=True, check=False)
    assert "--port or --no-browser is given with --export" in done.stderr
    # an exported lab is replaced
    lab = tmp_path / "lab"
    export.export(lab, states=())
    before = (lab / export.MARK).read_text()
    export.export(lab, "../", states=())
    assert (lab / export.MARK).read_text() != before


@pytest.mark.slow
def test_the_whole_lab_is_small(tmp_path: Path):
    export.export(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 10e6
