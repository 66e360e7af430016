"""The lab in a process of its own, with a tiny model; a browser, and its pages watched."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
NODE: Path = runpy.run_path(str(ROOT / "scripts" / "drivers.py"))["NODE"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of two layers and four heads, untrained, that reads bytes."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    import json

    from saccade.models.files import write_atomic
    from saccade.models.llama import Llama, LlamaConfig
    from saccade.models.tokens import Bytes
    from saccade.models.weights import save_weights

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    net = Llama(LlamaConfig(257, **sizes, max_position_embeddings=128, initializer_range=0.3))
    save_weights(folder / "model.safetensors", net)
    write_atomic(folder / "config.json", json.dumps(net.config.to_dict()).encode())
    Bytes().save(folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="session")
def lab(model: Path) -> Iterator[str]:
    """The address of a lab that shows the model."""
    for package in ("typer", "starlette", "uvicorn"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "saccade.cli.main", "lab", "--port", "0", "--no-browser", "--model", str(model)]
    # its output is a pipe, which Python would fill before it writes
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://127\.0\.0\.1:\d+/", line)
    assert found, line + process.stdout.read()
    yield found[0]
    process.terminate()
    process.wait(20)
    # whatever was asked of it, it has complained of nothing
    assert "Traceback" not in process.stdout.read()


class Watched:
    """A page of the lab, with everything it complains of and every address it asks."""

    def __init__(self, browser: Any, lab: str, width: int = 1280, theme: str = "light", script: str = ""):
        self.lab, self.complaints, self.requests = lab, list[str](), list[str]()
        # the server, or the folder of an exported page, whose modules are data
        self.own = (f"{lab.rpartition('/')[0]}/", "about:blank", "data:text/javascript")
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        self.page = self.context.new_page()
        if script:
            self.page.add_init_script(script)
        self.page.set_default_timeout(60000)
        self.page.on("console", lambda m: m.type in ("error", "warning") and self.complaints.append(m.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(self, where: str) -> Any:
        """The page at '#where', drawn."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.lab}#{where}")
        return self.drawn()

    def drawn(self) -> Any:
        self.page.wait_for_selector(".out:not([aria-busy]) > *, main:not(:has([aria-busy])) .error")
        return self.page

    def until(self, expression: str) -> None:
        """Returns once an expression of the page holds; Playwright's own wait uses eval, which the page forbids."""
        end = time.monotonic() + 60
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, expression
            self.page.wait_for_timeout(30)

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.context.close()
        if kind is None:
            assert self.complaints == []
            assert all(url.startswith(self.own) for url in self.requests), self.requests


@pytest.fixture
def watched(browser: Any, lab: str) -> Callable[..., Watched]:
    """Opens a page: watched(width, theme, script)."""
    return lambda *given, **named: Watched(browser, lab, *given, **named)


@pytest.fixture
def watched_at(browser: Any) -> Callable[..., Watched]:
    """Opens a page at another address: watched_at(address, width, theme, script)."""
    return lambda address, *given, **named: Watched(browser, address, *given, **named)


@pytest.fixture(scope="session")
def explained() -> Callable[..., dict[str, Any]]:
    """What `saccade explain --json` prints: explained(device, heads, {tq, tk, d, dtype, mask})."""
    import json

    runner = pytest.importorskip("typer.testing").CliRunner()
    from saccade.cli.main import app

    def explain(device: str, heads: int, sizes: dict[str, str]) -> dict[str, Any]:
        q = "x".join(("1", sizes["tq"], str(heads), sizes["d"]))
        words = [
            "--keys",
            sizes["tk"],
            "--dtype",
            sizes["dtype"],
            "--mask",
            sizes["mask"],
            "--device",
            device,
            "--json",
        ]
        result = runner.invoke(app, ["explain", "--q", q, *words])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return explain


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core."""
    file = NODE / "node_modules" / "axe-core" / "axe.min.js"
    if not file.exists():
        pytest.skip("axe-core is missing: make system")
    return file.read_text(encoding="utf-8")
