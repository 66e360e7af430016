"""The view of masks in a real browser: building, mistakes, copies, and the order of visits."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

from saccade import mask

Watch = Callable[..., Any]


def test_building_a_mask(watched: Watch):
    with watched() as it:
        page = it.open("mask?mask=causal()")
        page.locator("[name=sign]").select_option("& ~")
        page.locator("[name=part]").select_option("chunked(128)")
        page.get_by_role("button", name="Add").click()
        it.until("location.hash.includes('chunked')")
        it.drawn()
        assert page.locator("[name=mask]").input_value() == "(causal()) & ~chunked(128)"
        assert "causal() & ~chunked(128)" in page.locator("figcaption").inner_text()
        assert page.locator(".cards .card").count() == 4
        # half the pairs, except the chunks on the diagonal
        allowed = 1024 * 1025 // 2 - 8 * 128 * 129 // 2
        assert f"{allowed:,}".replace(",", "\u202f") in page.locator(".cards .card").first.inner_text()


def test_a_mask_that_cannot_be_read_marks_its_field_and_keeps_the_picture(watched: Watch):
    with watched() as it:
        page = it.open("mask?mask=causal(")
        assert "cannot read the mask" in page.get_by_role("alert").inner_text()
        text = page.locator("[name=mask]")
        text.fill("causal()")
        it.until("!document.querySelector('.error')")
        before = page.locator(".out").inner_html()
        text.fill("causal() &")
        it.until("document.querySelector('.error')")
        assert text.get_attribute("aria-invalid") == "true"
        assert page.locator(".out.stale").inner_html() == before
        page.locator("[name=tq]").fill("0")
        text.fill("causal()")
        it.until("document.querySelector('.error')?.textContent.startsWith('Queries is')")
        assert page.locator("[aria-invalid]").get_attribute("name") == "tq"
        page.locator("[name=tq]").fill("64")
        it.until("!document.querySelector('.error')")
        assert page.locator("[aria-invalid], .out.stale").count() == 0
        # a half-typed field leaves nothing in the browser's console
        assert it.complaints == []


def test_copies_of_a_mask(watched: Watch):
    with watched() as it:
        it.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page = it.open("mask?mask=causal()%20%26%20window(9,%200)&tq=40&tk=40")
        copied = "navigator.clipboard.readText()"
        page.get_by_role("button", name="Copy Python").click()
        page.get_by_text("Python copied").wait_for()
        made: dict[str, Any] = {}
        exec(page.evaluate(copied), made)
        assert str(made["mask"]) == "causal() & window(9, 0)"
        page.get_by_role("button", name="Copy SVG").click()
        page.get_by_text("SVG copied").wait_for()
        svg = ElementTree.fromstring(page.evaluate(copied))
        runs = [run for path in svg.iter("{http://www.w3.org/2000/svg}path") for run in path.attrib["d"].split("z")]
        lengths = [int(re.findall(r"h(-?\d+)", run)[0]) for run in runs if run]
        assert sum(lengths) == mask.parse("causal() & window(9, 0)").evaluate(1, 1, 40, 40).sum()
        page.get_by_role("button", name="Copy PNG").click()
        page.get_by_text(re.compile("PNG (copied|saved)")).wait_for()
        types = page.evaluate("navigator.clipboard.read().then((all) => all.flatMap((item) => item.types))")
        assert "image/png" in types


def test_playing_the_visits(watched: Watch):
    pictures = "[...document.querySelectorAll('.cards canvas')].map((c) => c.toDataURL()).join()"
    with watched() as it:
        page = it.open("mask?mask=causal()&tq=256&tk=256")
        whole = page.evaluate(pictures)
        play = page.locator("[data-key=play]")
        play.click()
        it.until("document.querySelector('[data-key=play]').dataset.share > 0.1")
        assert page.evaluate(pictures) != whole
        play.click()
        assert play.inner_text() == "Play the visits"
        play.click()
        it.until("document.querySelector('[data-key=play]').dataset.share === '1.000'")
        assert page.evaluate(pictures) == whole
    with watched() as it:
        it.page.emulate_media(reduced_motion="reduce")
        page = it.open("mask?mask=causal()&tq=256&tk=256")
        seen: list[str] = []
        for _ in range(8):
            page.locator("[data-key=play]").click()
            seen.append(page.evaluate(pictures))
            # nothing moves by itself
            page.wait_for_timeout(150)
            assert page.evaluate(pictures) == seen[-1]
        assert len(set(seen)) > 3
        assert seen[-1] == whole
