"""The page in a real browser: every view, every control, the keyboard, accessibility, and the kernels' results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from saccade.cli.watch import DEFAULT_OUT
from saccade.lab.query import LABELS

VIEWS = ("mask", "softmax", "maps", "roofline", "caches", "kernels")
Watch = Callable[..., Any]
CUT = "(e) => e.scrollWidth > e.clientWidth"

# another value for each control, by view and name; a select takes its last choice
VALUES = {
    "mask": {"mask": "causal() & window(99, 0)", "tq": "300", "tk": "200", "d": "64", "head": "1"},
    "softmax": {"t": "9", "d": "4", "seed": "3", "mask": "causal()", "bq": "3", "bk": "4", "step": "2"},
    "maps": {"text": "if x:\n    pass", "layer": "1", "head": "2", "token": "4"},
    "roofline": {"batch": "2", "t": "512", "heads": "16", "kv": "4", "d": "64", "mask": "window(9, 9)"},
    "caches": {"tokens": "100", "batch": "3"},
    "kernels": {"t": "64", "heads": "2", "kv": "1", "d": "32", "seed": "5", "mask": "full()"},
}
# where every control of a view is shown
FULL = {"mask": "mask?mask=per_head([causal(), window(9, 9)])", "softmax": "softmax?example=own"}


def overflow(page: Any) -> int:
    return page.evaluate("Math.max(0, document.documentElement.scrollWidth - document.documentElement.clientWidth)")


@pytest.mark.sample(2)
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_accessible_at_every_width(watched: Watch, axe: str, view: str):
    for width, theme in ((1280, "light"), (768, "light"), (375, "dark")):
        with watched(width, theme) as it:
            page = it.open(view)
            assert page.locator("h1").inner_text()
            assert page.locator(".out").inner_text().strip()
            assert page.locator(".error").count() == 0
            assert overflow(page) == 0, (view, width)
            if width == 1280:
                assert page.evaluate(f"[...document.querySelectorAll('.scroll')].filter({CUT}).length") == 0, view
            assert page.evaluate("document.documentElement.dataset.theme") == theme
            if width == 768:
                continue
            # the results fade in, and axe measures the contrast of the moment
            it.until("getComputedStyle(document.querySelector('.out')).opacity === '1'")
            page.evaluate(axe)
            found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
            assert found["violations"] == [], json.dumps(found["violations"], indent=1)[:3000]


@pytest.mark.sample(1)
@pytest.mark.parametrize("view", VIEWS)
def test_every_control_changes_the_page_and_its_address(watched: Watch, view: str):
    with watched() as it:
        page = it.open(FULL.get(view, view))
        controls = page.locator("form [name]:visible")
        names = [controls.nth(n).get_attribute("name") for n in range(controls.count())]
        assert set(VALUES[view]) <= set(names)
        # another example hides fields
        names.sort(key=lambda name: name == "example")
        for name in names:
            control = page.locator(f"form [name={name}]")
            if not control.is_visible():
                continue
            before = page.locator(".out").inner_html(), page.url
            if control.evaluate("e => e.tagName") == "SELECT":
                choices = control.locator("option").evaluate_all("all => all.map((o) => o.value)")
                control.select_option(next(c for c in reversed(choices) if c != control.input_value()))
            else:
                control.evaluate(
                    "(e, value) => { e.value = value; e.dispatchEvent(new Event('input')); }", VALUES[view][name]
                )
            if name in ("sign", "part"):
                # of the mask that `Add` makes
                continue
            it.until(f"location.href !== {json.dumps(before[1])}")
            it.drawn()
            assert page.locator(".error").count() == 0, (name, page.locator(".error").all_inner_texts())
        # the address alone makes the same page
        seen, address = page.locator(".out").inner_html(), page.url.partition("#")[2]
        controls_seen = page.locator("form [name]:visible").evaluate_all("all => all.map((e) => [e.name, e.value])")
        it.open(address)
        assert page.locator(".out").inner_html() == seen
        again = page.locator("form [name]:visible").evaluate_all("all => all.map((e) => [e.name, e.value])")
        skipped = ("example", "sign", "part") if view == "mask" else ()
        assert [e for e in again if e[0] not in skipped] == [e for e in controls_seen if e[0] not in skipped]


@pytest.mark.parametrize("view", VIEWS)
def test_the_keyboard_reaches_everything(watched: Watch, view: str):
    with watched() as it:
        page = it.open(view)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        everything = "document.querySelectorAll('form [name], button, nav a, summary')"
        count = page.evaluate(f"(window.left = new Set([...{everything}].filter((e) => e.checkVisibility()))).size")
        assert count > 10
        for _ in range(3 * count + 20):
            page.evaluate("left.delete(document.activeElement)")
            if not page.evaluate("left.size"):
                break
            page.keyboard.press("Tab")
        assert page.evaluate("[...left].map((e) => e.outerHTML.slice(0, 120))") == []


@pytest.mark.parametrize("view", VIEWS)
def test_fields_have_the_labels_that_errors_use(watched: Watch, view: str):
    with watched() as it:
        page = it.open(FULL.get(view, view))
        labels = page.locator("form [name]").evaluate_all("all => all.map((e) => [e.name, e.labels[0].textContent])")
        assert [(name, text) for name, text in labels if name in LABELS and not text.startswith(LABELS[name])] == []


def test_ones_own_scores(watched: Watch):
    with watched() as it:
        page = it.open("softmax?example=scores&bk=4")
        # exp(100) is no float32 number
        assert "overflow" in page.locator(".out").inner_text()
        page.locator("[name=scores]").fill("0 0\n0 1")
        it.until("document.querySelector('.out').textContent.includes('2 queries, 2 keys')")
        assert "0.2689" in page.locator(".out").inner_text()
        page.locator("[name=scores]").fill("0 0\n1")
        it.until("document.querySelector('.error')?.textContent.startsWith('Scores have 2 lines')")
        assert page.locator("[aria-invalid]").get_attribute("name") == "scores"


def test_stepping_through_the_worked_example(watched: Watch):
    """The page shows the weights of the worked example, and the tile that the plan skips."""
    with watched() as it:
        page = it.open("softmax?example=weights")
        texts = []
        for _ in range(4):
            texts.append(page.locator(".out").inner_text())
            page.get_by_role("button", name="Next").click()
            it.drawn()
        assert "skips this tile" in texts[1]
        assert all(row in texts[3] for row in ("0.3258", "0.3123", "0.3619", "0.0247", "0.0236", "0.0253", "0.9264"))
        assert "0.6405" in texts[0]
        # arrows move the slider, and focus stays on it
        page.locator("[name=step]").focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        it.until("location.hash.includes('step=1')")
        page.get_by_role("button", name="Back").click()
        page.get_by_role("button", name="Play").click()
        it.until("document.querySelector('.out h2').textContent.startsWith('Step 4 of 4')")
        it.until("document.querySelector('[data-key=play]').textContent === 'Play'")


def test_choosing_heads_and_tokens(watched: Watch):
    with watched() as it:
        page = it.open("maps?text=abcdef")
        page.get_by_role("button", name="layer 1, head 3").click()
        it.until("location.hash.includes('layer=1')")
        it.drawn()
        # what was chosen keeps the focus although the pictures were drawn again
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "layer 1, head 3"
        page.locator(".tokens button").nth(0).click()
        it.until("location.hash.includes('token=0')")
        it.drawn()
        # the first token sees itself alone
        assert re.sub(r"\s+", " ", page.locator("dl.narrow").inner_text()).strip() == "a at 0 100.0 %"


def test_a_lab_without_a_model_or_webgpu_says_so(watched: Watch):
    with watched(script="Object.defineProperty(Navigator.prototype, 'gpu', {get: () => undefined});") as it:
        page = it.open("kernels?t=40&d=32")
        assert "does not support WebGPU" in page.get_by_role("alert").inner_text()
        # what would be submitted is shown all the same
        for which in ("documented", "tiled"):
            card = page.locator(f"[data-recorded={which}]")
            entry = card.locator("table").first.locator("tbody th").first.inner_text()
            assert f"fn {entry}(" in card.locator("pre").first.evaluate("e => e.textContent")
            assert "q [" in card.locator("details table").first.evaluate("e => e.textContent")
        # a wrong field is marked here too, and the last job stays
        page.locator("[name=kv]").fill("3")
        it.until("document.querySelector('.error')?.textContent.startsWith('KV heads is 3')")
        assert page.locator("[aria-invalid]").get_attribute("name") == "kv"
        assert page.locator(".out.stale [data-recorded]").count() == 2
    with watched(
        script="Object.defineProperty(Navigator.prototype, 'gpu', {get: () => ({requestAdapter: async () => null})});"
    ) as it:
        page = it.open("kernels")
        assert "no adapter" in page.get_by_role("alert").inner_text()
    with watched() as it:
        it.page.route("**/api/about?", lambda route: route.fulfill(json={**route.fetch().json(), "model": None}))
        # what `saccade train` writes
        assert f"saccade lab --model {DEFAULT_OUT}" in it.open("maps").locator(".out").inner_text()


def test_light_and_dark(watched: Watch):
    with watched() as it:
        page = it.open("mask")
        colour = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(colour)
        page.get_by_role("button", name="light and dark").click()
        assert page.evaluate(colour) != light
        page.emulate_media(color_scheme="light")
        page.emulate_media(color_scheme="dark")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.parametrize(
    "direction, mask",
    [("forward", "causal()"), ("decode", ""), pytest.param("backward", "causal()", marks=pytest.mark.slow)],
)
def test_kernels_equal_the_reference(watched: Watch, direction: str, mask: str):
    pytest.importorskip("wgpu")
    with watched() as it:
        page = it.open(f"kernels?direction={direction}&t=72&heads=2&kv=1&d=32&mask={mask}")
        page.get_by_role("button", name="Run").click()
        page.get_by_role("button", name="Run again").wait_for(timeout=240000)
        cards = page.locator("[data-set]")
        assert cards.count() == 2, page.locator(".out").inner_text()
        outputs = {"forward": 2, "backward": 5, "decode": 1}[direction]
        for n in range(2):
            assert cards.nth(n).get_attribute("data-ok") == "true", cards.nth(n).inner_text()
            assert cards.nth(n).locator("table").first.locator("tbody tr").count() == outputs
            assert "fn " in cards.nth(n).locator("pre").first.evaluate("e => e.textContent")
        # results belong to the fields they were measured for
        page.locator("[name=seed]").fill("1")
        it.until("!document.querySelector('[data-set]')")


def test_a_wrong_result_is_found(watched: Watch):
    """The page's own judgement: one number off by little, a NaN, an infinity that is right."""
    with watched() as it:
        it.open("kernels")
        verdicts = it.page.evaluate("""async () => {
          const { compare } = await import('/oracle.js');
          const judge = (got, exact, allowed) => compare(Float32Array.from(got), Float64Array.from(exact), allowed).ok;
          return [judge([1, 2], [1, 2], 0), judge([1, 2.01], [1, 2], 1e-3), judge([1, NaN], [1, 2], 1),
            judge([-Infinity, 2], [-Infinity, 2], 0), judge([0, 2], [-Infinity, 2], 1e9),
            judge([1, 2.01], [1, 2], [1e-3, 1e-1])];
        }""")
        assert verdicts == [True, False, False, True, False, True]
