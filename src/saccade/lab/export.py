"""The lab as a folder that needs no server: its page, and tables of answers for chosen states.

A page opened from a folder cannot load modules or data by address. Its modules are therefore part of index.html, and
its tables are scripts.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from gzip import compress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from .. import cost
from . import masks
from .kernels import DIRECTIONS, LIMITS, SETS
from .pages import files
from .query import LABELS, Query
from .views import VIEWS, about, answer

Values = Sequence[str]
# an exported folder is known by this file, and may be written again
MARK = "tables/about.js"


class Grid(NamedTuple):
    """States of a view: every combination of the values of its fields, and what further fields must be at least."""

    view: str
    values: Mapping[str, Values]
    least: Mapping[str, int] = {}


# the masks of the exported page: the examples of one head, and families of common sizes
FAMILIES: tuple[str, ...] = (
    *(text for text in masks.EXAMPLES.values() if "per_head" not in text),
    "causal() & (window(127, 0) | prefix(64))",
    *(f"causal() & window({n - 1}, 0)" for n in (32, 64, 128, 512, 1024)),
    *(f"window({n}, {n})" for n in (16, 32, 64, 128, 256, 512)),
    *(f"causal() & (window({n - 1}, 0) | prefix({m}))" for n in (64, 128, 256) for m in (4, 32, 128)),
    *(f"prefix({n}) | causal()" for n in (64, 128, 512)),
    *(f"causal() & chunked({n})" for n in (32, 64, 256, 512)),
    *(f"chunked({n})" for n in (64, 128, 256)),
    *(f"causal() & strided({n})" for n in (8, 32)),
    *(f"dilated({n}, {step})" for n in (8, 32) for step in (4, 16)),
    *(f"causal() & (window({n - 1}, 0) | global_tokens({m}))" for n in (64, 256) for m in (1, 16)),
    *(f"causal() & keys({n})" for n in (300, 800)),
    "causal() & documents(cu_seqlens=[0, 512, 1024])",
    "documents(cu_seqlens=[0, 100, 200, 600, 1024])",
    "causal() & ~chunked(128)",
    "causal() & ~window(63, 0)",
)
# planned for the devices of the cards, and for three more GPUs
CARDS = ("cpu", "h100", "m3", "webgpu")
SHOWN = (*CARDS, "a100", "rtx-4090", "b200")
# WebGPU's default limits, and the storage buffers that the documented backward binds
NEEDED = {name: least for name, (least, _) in LIMITS.items()} | {"max-storage-buffers-per-shader-stage": 10}


def grids(
    texts: Values = FAMILIES,
    tokens: Values = ("1024",),
    devices: Values = SHOWN,
    dtypes: Values = ("bfloat16", "float32"),
) -> list[Grid]:
    """The states of an exported lab.

    texts: masks. tokens: numbers of queries and of keys. devices, dtypes: those of plans.
    """
    sizes = {"mask": texts, "tq": tokens, "tk": tokens, "head": ("0",)}
    shapes = {"dtype": dtypes, "d": ("64", "128")}
    tiles = ("1", "2", "4", "8")
    machines = tuple(cost.DEVICES)
    kernel = {"set": SETS, "t": ("128",), "heads": ("2",), "kv": ("1",), "d": ("64",), "seed": ("0",)}
    kernel |= {"software": ("0", "1")}
    amounts = {"tokens": ("4096", "32768", "131072"), "batch": ("1", "16", "64")}
    products = {
        "dtype": ("bfloat16", "float32"),
        "batch": ("1", "32"),
        "t": ("1024", "4096", "16384"),
        "heads": ("32",),
        "kv": ("8", "32"),
        "d": ("128",),
        "mask": ("full()", "causal()", "causal() & window(1023, 0)"),
    }
    return [
        Grid("mask", sizes),
        Grid("visits", {**sizes, **shapes, "device": devices}),
        Grid("softmax", {"example": ("grid", "weights"), "bq": tiles, "bk": tiles}),
        Grid("caches", {"model": tuple(cost.MODELS), "device": machines, **amounts}),
        Grid("roofline", {"device": machines, **products}),
        Grid("kernel", {**kernel, "direction": DIRECTIONS[:2], "mask": ("causal()",)}, NEEDED),
        Grid("kernel", {**kernel, "direction": DIRECTIONS[2:]}, NEEDED),
    ]


def export(directory: Path, docs: str = "", states: Iterable[Grid] | None = None) -> dict[str, int]:
    """Write the lab into a folder, and return the number of states of each view.

    docs: the address of the documentation, relative to the folder, if it is nearby.
    Raises FileExistsError for a folder with other files.
    """
    if directory.exists() and any(directory.iterdir()) and not (directory / MARK).exists():
        raise FileExistsError(f"{directory} has other files; give a new folder, an empty one, or an exported lab")
    (directory / "tables").mkdir(parents=True, exist_ok=True)
    chosen = list(grids() if states is None else states)
    page = files()
    for name in ("style.css", "icon.svg"):
        (directory / name).write_bytes(page[f"/{name}"])
    (directory / "index.html").write_text(document(page), encoding="utf-8")
    counted: dict[str, int] = {}
    for view in dict.fromkeys(one.view for one in chosen):
        content, counted[view] = table([one for one in chosen if one.view == view])
        _write(directory, view, content)
    own = about(None) | {"docs": docs, "labels": LABELS, "offered": offered(chosen)}
    _write(directory, "about", {"grids": [{"names": [], "values": [], "least": {}, "index": [0]}], "answers": [own]})
    return counted


def offered(states: Iterable[Grid]) -> dict[str, dict[str, Values]]:
    """The values that the controls of each view of the page offer."""
    views = {"visits": "mask", "kernel": "kernels"}
    choices: dict[str, dict[str, Values]] = {}
    for one in states:
        fields = choices.setdefault(views.get(one.view, one.view), {})
        for name, values in one.values.items():
            fields[name] = tuple(dict.fromkeys((*fields.get(name, ()), *values)))
    if "mask" in choices:
        # the page has one card for each other kind of device
        gpus = [name for name in choices["mask"].pop("device", ()) if masks.PLACES[name][0] == "triton"]
        choices["mask"]["gpu"] = tuple(gpus)
    return choices


def table(states: Sequence[Grid]) -> tuple[dict[str, Any], int]:
    """The answers of the grids of one view, equal ones once, and the number of states."""
    known: dict[str, int] = {}
    encoded: list[dict[str, Any]] = []
    total = 0
    for one in states:
        index: list[int] = []
        for state in product(*one.values.values()):
            query: Query = dict(zip(one.values, state, strict=True)) | {k: str(v) for k, v in one.least.items()}
            text = json.dumps(shorter(answer(VIEWS[one.view], query)[1]), allow_nan=False, ensure_ascii=False)
            index.append(known.setdefault(text, len(known)))
        total += len(index)
        values = [list(v) for v in one.values.values()]
        encoded.append({"names": list(one.values), "values": values, "least": one.least, "index": index})
    return {"grids": encoded, "answers": [json.loads(text) for text in known]}, total


def shorter(x: Any) -> Any:
    """x with nine digits of each number, of which the page shows at most four."""
    if isinstance(x, float):
        return float(f"{x:.9g}")
    if isinstance(x, dict):
        return {name: shorter(value) for name, value in x.items()}
    return [shorter(value) for value in x] if isinstance(x, list) else x


def _write(directory: Path, view: str, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    packed = b64encode(compress(text.encode(), mtime=0)).decode()
    script = f'(globalThis.saccadeTables ??= {{}}).{view} = "{packed}";\n'
    (directory / "tables" / f"{view}.js").write_text(script, encoding="utf-8")


def document(page: Mapping[str, bytes]) -> str:
    """index.html with the page's modules in it, and tables.js in the place of server.js."""
    sources = {path[1:]: content.decode() for path, content in page.items() if path.endswith(".js")}
    sources["server.js"] = sources.pop("tables.js")
    # modules in data: addresses have no folder: they import each other by bare names, which the map resolves
    modules = {
        f"lab/{name}": "data:text/javascript;base64,"
        + b64encode(re.sub(r"from '\./", "from 'lab/", text).encode()).decode()
        for name, text in sources.items()
    }
    scripts = f'<script type="importmap">{json.dumps({"imports": modules})}</script>\n'
    scripts += '  <script type="module">import "lab/app.js";</script>'
    text = page["/"].decode().replace('<script type="module" src="app.js"></script>', scripts)
    # a link within the page would need a place of that name
    return text.replace('href="#mask"', 'href="index.html"').replace(" Enable it for 127.0.0.1.", "")
