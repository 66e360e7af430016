"""Every generated kernel with a second compiler, Tint, which analyses uniformity and counts workgroup memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("wgpu")

from saccade import Unsupported
from saccade.backends.webgpu import texts
from saccade.backends.webgpu.catalogue import catalogue
from saccade.backends.webgpu.wgsl import parse

# limits that WebGPU guarantees on every adapter, and lavapipe's
LEAST = {texts.STORAGE: 8, texts.MEMORY: 16384, texts.THREADS: 256}
MOST = {texts.STORAGE: 16, texts.MEMORY: 32768, texts.THREADS: 1024}

BARRIER = """
var<workgroup> kept: array<u32, {words}>;
@group(0) @binding(0) var<storage, read_write> x: array<u32>;
@compute @workgroup_size({threads})
fn main(@builtin(local_invocation_index) l: u32) {
  {early} kept[l] = x[l]; workgroupBarrier(); x[l] = kept[l ^ 1u];
}
"""


def fits(text: str, entry: str, limits: dict[str, int]) -> bool:
    try:
        texts.check(text, entry, limits)
    except Unsupported:
        return False
    return True


@pytest.fixture
def tint(node: Callable[..., Any], driver: Callable[[str], str]) -> Callable[..., Any]:
    """Tint's verdicts on texts by name, on lavapipe, which has f16 and subgroups."""

    def run(kernels: dict[str, str]) -> list[tuple[str, str, dict[str, str]]]:
        given = [
            {"name": name, "text": text, "entry": entry}
            for name, text in kernels.items()
            for entry in parse(text).entries()
        ]
        # short vectors compile three times as fast, and verdicts do not depend on their length
        verdicts = node("tint.mjs", given, VK_DRIVER_FILES=driver("llvmpipe"), LP_NATIVE_VECTOR_WIDTH="128")
        return [(g["text"], g["entry"], verdict) for g, verdict in zip(given, verdicts, strict=True)]

    return run


def test_every_kernel_compiles(tint: Callable[..., Any], pytestconfig: pytest.Config):
    kernels = catalogue()
    assert kernels
    if not pytestconfig.getoption("--all"):
        names = random.Random(pytestconfig.getoption("--seed")).sample(sorted(kernels), len(kernels) // 2)
        kernels = {name: kernels[name] for name in names}
    wrong = []
    for text, entry, verdict in tint(kernels):
        # lavapipe cannot check more than 32 KiB
        if fits(text, entry, MOST) and verdict["most"]:
            wrong.append(f"{verdict['name']}: {verdict['most']}")
        if fits(text, entry, LEAST) != (not verdict["least"]):
            wrong.append(f"{verdict['name']}: under WebGPU's least limits Tint says {verdict['least'] or 'it fits'!r}")
    assert not wrong, "\n".join(wrong)


def test_what_must_not_pass_does_not(tint: Callable[..., Any]):
    def variant(words: int = 256, threads: int = 64, early: str = "") -> str:
        text = BARRIER.replace("{words}", str(words)).replace("{threads}", str(threads))
        return text.replace("{early}", early)

    kernels = {
        "right": variant(),
        "just fits": variant(words=4096),
        "too long": variant(words=4097),
        "too wide": variant(threads=512),
        "divergent": variant(early="if (x[l] == 7u) { return; }"),
    }
    verdicts = {verdict["name"]: verdict for _, _, verdict in tint(kernels)}
    assert [name for name, v in verdicts.items() if not v["least"]] == ["right", "just fits"]
    assert [name for name, v in verdicts.items() if not v["most"]] == ["right", "just fits", "too long", "too wide"]
    assert "uniform" in verdicts["divergent"]["most"]
