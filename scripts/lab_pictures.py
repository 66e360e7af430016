"""Takes the pictures of the lab for docs/lab/ in a headless browser: `python scripts/lab_pictures.py MODEL_FOLDER`."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

OUT = Path(__file__).resolve().parent.parent / "docs" / "lab"
# name of the file, view, width, height, theme
SHOTS = (
    ("masks", "mask?mask=causal()%20%26%20(window(127,%200)%20%7C%20prefix(64))", 1280, 1260, "light"),
    ("stride", "mask?mask=causal()%20%26%20(window(127,%200)%20%7C%20strided(64))", 1280, 1260, "dark"),
    ("softmax", "softmax?step=10", 1280, 1010, "light"),
    ("weights", "softmax?example=weights&step=3", 1280, 1150, "dark"),
    ("maps", "maps?layer=3&head=3", 1280, 1130, "light"),
    ("roofline", "roofline", 1280, 1140, "dark"),
    ("caches", "caches?model=llama-2-70b", 768, 1290, "light"),
    ("kernels", "kernels?t=128", 1280, 960, "light"),
    ("phone", "softmax?step=2", 375, 812, "dark"),
)


def shoot(page: Page, address: str, where: str) -> bytes:
    page.goto(f"{address}#{where}")
    page.wait_for_selector(".out:not([aria-busy]) > *")
    if where.startswith("kernels"):
        page.get_by_role("button", name="Run").click()
        page.get_by_role("button", name="Run again").wait_for(timeout=300_000)
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement?.blur()")
    return page.screenshot()


def main(model: str) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-u", "-m", "saccade.cli.main", "lab", "--port", "0", "--no-browser", "--model", model]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as lab, sync_playwright() as driver:
        assert lab.stdout is not None
        address = re.search(r"http\S+", lab.stdout.readline())
        assert address, "the lab did not start"
        program = shutil.which("chromium") or shutil.which("google-chrome")
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--enable-unsafe-webgpu"])
        for name, where, width, height, theme in SHOTS:
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
            taken = Image.open(io.BytesIO(shoot(context.new_page(), address[0], where))).convert("RGB")
            # 256 colours are enough for flat pictures, and make small files
            taken.quantize(256, kmeans=3, dither=Image.Dither.NONE).save(OUT / f"{name}.png", optimize=True)
            context.close()
        browser.close()
        lab.terminate()


if __name__ == "__main__":
    main(sys.argv[1])
