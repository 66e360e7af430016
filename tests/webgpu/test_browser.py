"""The same launchers and texts with a headless browser as the device; values compared with the oracle."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("wgpu")


import saccade
from saccade import reference
from saccade.backends.webgpu import device, documented
from saccade.backends.webgpu.recorded import RecordedBuffer, Recorder
from saccade.backends.webgpu.step import Step
from saccade.testing.cases import Case
from saccade.testing.compare import require
from saccade.testing.inputs import make
from saccade.testing.run import verify

PAGE = Path(__file__).parent / "page"
# SwiftShader compiles a long kernel in a second
LIMIT = 150


class BrowserGpu(Recorder):
    """A device whose steps a page computes; its buffers are here, and every call copies them to the page and back."""

    def __init__(self, modules: Path, browser: str, profile: Path):
        words = ["node", PAGE / "browse.mjs", modules, browser]
        self._node = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "HOME": str(profile)}
        )
        said = self._answer()["limits"]
        limits = {re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower(): value for name, value in said.items()}
        super().__init__(limits, software=True)

    def close(self) -> None:
        assert self._node.stdin is not None
        self._node.stdin.close()
        try:
            self._node.wait(20)
        except subprocess.TimeoutExpired:
            self._node.kill()

    def _answer(self) -> Any:
        assert self._node.stdout is not None
        # a browser that hangs is ended, and its line is empty
        timer = threading.Timer(LIMIT, self._node.kill)
        timer.start()
        line = self._node.stdout.readline()
        timer.cancel()
        answer = json.loads(line or '{"error": "the browser ended without an answer"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def release(self, buffer: RecordedBuffer) -> None:
        # a buffer that is used after its release must fail: its bytes are deleted
        buffer.data = b"\xff" * buffer.size

    def call(self, steps: Sequence[Step], reads: Sequence[Any] = (), *, timed: bool = False) -> Any:
        if steps:
            self._compute(steps)
        return [
            np.frombuffer(held.data, dtype, int(np.prod(shape))).reshape(shape).copy() for held, dtype, shape in reads
        ], None

    def _compute(self, steps: Sequence[Step]) -> None:
        bound = [[b if isinstance(b, tuple) else (b, 0, b.size) for b in step.bindings] for step in steps]
        held = list({id(buffer): buffer for ranges in bound for buffer, _, _ in ranges}.values())
        numbers = {id(buffer): n for n, buffer in enumerate(held)}
        written = sorted(
            {
                numbers[id(buffer)]
                for step, ranges in zip(steps, bound, strict=True)
                for (buffer, _, _), kind in zip(ranges, step.kernel.bindings, strict=True)
                if kind == "storage"
            }
        )
        job = {
            "buffers": [base64.b64encode(buffer.data).decode() for buffer in held],
            "steps": [
                {
                    "text": step.kernel.text, "entry": step.kernel.entry, "kinds": step.kernel.bindings,
                    "bindings": [(numbers[id(buffer)], offset, size) for buffer, offset, size in ranges],
                    "grid": step.grid,
                }
                for step, ranges in zip(steps, bound, strict=True)
            ],
            "reads": written,
        }  # fmt: skip
        assert self._node.stdin is not None
        self._node.stdin.write(json.dumps(job) + "\n")
        self._node.stdin.flush()
        for n, text in zip(written, self._answer()["read"], strict=True):
            held[n].data = base64.b64decode(text)


@pytest.fixture(scope="module")
def browser(modules: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserGpu]:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no browser: make system")
    gpu = BrowserGpu(modules, program, tmp_path_factory.mktemp("home"))
    yield gpu
    gpu.close()


@pytest.fixture
def opened(browser: BrowserGpu, monkeypatch: pytest.MonkeyPatch) -> BrowserGpu:
    """Makes the browser the device that a call without a name opens."""
    monkeypatch.delenv("SACCADE_WEBGPU_ADAPTER", raising=False)
    monkeypatch.setattr(device, "_opened", {"": browser})
    return browser


def near(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * max(1.0, float(np.abs(expected).max())))


@pytest.mark.parametrize("Hq, Hk, D", [(4, 2, 16), (3, 1, 48)])
def test_documented_kernels(browser: BrowserGpu, rng: np.random.Generator, Hq: int, Hk: int, D: int):
    T = 70
    q, do = rng.standard_normal((2, T, Hq, D), dtype=np.float32)
    k, v = rng.standard_normal((2, T, Hk, D), dtype=np.float32)
    # documents of 37 and 33 tokens
    seg = np.repeat(np.array([0, 37], np.uint32), (37, 33))
    mask = saccade.mask.causal() & saccade.mask.documents(seg)
    o, lse = (x[0] for x in reference.forward(q[None], k[None], v[None], mask))
    dq, dk, dv = (x[0] for x in reference.backward(do[None], q[None], k[None], v[None], mask)[:3])

    got_o, got_lse = documented.run("attention_forward", Q=q, K=k, V=v, seg=seg, gpu=browser)
    near(got_o, o)
    near(got_lse, lse)
    given = {"Q": q, "K": k, "V": v, "dO": do, "LSE": got_lse, "seg": seg, "gpu": browser}
    for got, expected in zip(documented.run("attention_backward", **given), (dq, dk, dv), strict=True):
        near(got, expected)
    short_dq, p, ds = documented.run("attention_backward_short", **given)
    near(short_dq, dq)
    scratch = {"Q": q, "dO": do, "P_scratch": p, "dS_scratch": ds, "n_kv_heads": Hk, "gpu": browser}
    for got, expected in zip(documented.run("attention_backward_short_dKdV", **scratch), (dk, dv), strict=True):
        near(got, expected)


def test_documented_decode_and_rope(browser: BrowserGpu, rng: np.random.Generator):
    q, cache = rng.standard_normal((4, 32), dtype=np.float32), rng.standard_normal((2, 90, 2, 32), dtype=np.float32)
    got = documented.run("attention_decode", Q_one=q, K_cache=cache[0], V_cache=cache[1], gpu=browser)
    near(got, reference.forward(q[None, None], cache[0][None], cache[1][None])[0][0, 0])
    x = rng.standard_normal((20, 4, 32), dtype=np.float32)
    there = documented.run("rope_q", Q=x, gpu=browser)
    assert np.abs(there - x)[1:].max() > 0.1
    near(documented.run("rope_q_backward", dQ=there, gpu=browser), x)


TILED = [
    Case("browser-causal", 75, 75, 1, 4, 2, 32, 32, "causal()"),
    Case("browser-window", 40, 100, 2, 3, 1, 24, 40, "window(30, 0) | prefix(5)", softcap=20.0, sinks=True),
    Case("browser-bias", 33, 65, 1, 2, 2, 16, 16, "causal()", bias="1h1k"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", TILED, ids=lambda case: case.name)
def test_tiled_kernels(opened: BrowserGpu, case: Case):
    require(verify(make(case, "float32"), "webgpu"), case)


def test_tiled_decode(opened: BrowserGpu, rng: np.random.Generator):
    q = rng.standard_normal((2, 1, 4, 32), dtype=np.float32)
    k, v = rng.standard_normal((2, 2, 700, 2, 32), dtype=np.float32)
    cache = saccade.KVCache(2, 700, 2, 32)
    cache.append(k, v)
    near(saccade.decode(q, cache, backend="webgpu"), reference.forward(q, k, v)[0])
