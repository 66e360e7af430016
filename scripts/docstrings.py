"""Runs the examples in the docstrings of all functions and classes that the pages docs/api/*.md list.

    python scripts/docstrings.py [--on webgpu] [NAME...]

Each has an `Examples:` section, which runs as a doctest with the names np, torch, saccade and mask. Its imports say
what else it needs. DEVICES lists devices, which --on must name, and PACKAGES what must be installed. Examples of
`saccade.distributed` run in a group of one rank.
"""

from __future__ import annotations

import argparse
import doctest
import importlib
import inspect
import os
import pkgutil
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTED = re.compile(r"^::: (\S+)$", re.MULTILINE)
# by the start of a name, as the words after ```python in a page; examples of other names need torch
DEVICES = {"saccade.backends.webgpu.arrays.": "webgpu", "saccade.backends.webgpu.documented.": "webgpu"}
PACKAGES = {
    "saccade.backends.webgpu.": "wgpu",
    "saccade.integrations.mlx.": "mlx",
    "saccade.integrations.onnx.": "onnxscript",
    "saccade.integrations.splash.": "jax",
}


def names() -> list[str]:
    """What the pages list; for a package also its public names."""
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    listed = [name for page in pages for name in LISTED.findall(page.read_text(encoding="utf-8"))]
    for name in list(listed):
        if (ROOT / "src" / name.replace(".", "/")).is_dir():
            package = importlib.import_module(name)
            listed += [f"{name}.{one}" for one in package.__all__ if not inspect.ismodule(getattr(package, one))]
    return listed


def need(name: str, of: dict[str, str]) -> str:
    """The device or package that the examples of a name need, or ""."""
    return next((one for start, one in of.items() if name.startswith(start)), "")


def sections(name: str) -> list[str]:
    """The examples of a function or module, or of a class and its methods."""
    documented = pkgutil.resolve_name(name)
    members = vars(documented).values() if inspect.isclass(documented) else ()
    docs = [inspect.cleandoc(one.__doc__ or "") for one in (documented, *filter(inspect.isfunction, members))]
    return [doc.partition("\nExamples:\n")[2] for doc in docs if "\nExamples:\n" in doc]


def run(name: str) -> int:
    """Run the examples of a name and return their number. Raises AssertionError for a failure or if there are none."""
    import numpy as np
    import torch

    import saccade

    number = 0
    for section in sections(name):
        names = {"np": np, "torch": torch, "saccade": saccade, "mask": saccade.mask}
        test = doctest.DocTestParser().get_doctest(section, names, name, None, 0)
        failures: list[str] = []
        with surroundings(name):
            doctest.DocTestRunner(verbose=False).run(test, out=failures.append)
        if failures:
            raise AssertionError("".join(failures))
        number += len(test.examples)
    if not number:
        raise AssertionError(f"{name} has no example: add a section Examples to its docstring")
    return number


@contextmanager
def surroundings(name: str) -> Iterator[None]:
    """Restores the random state, the number of threads and the folder; with a group if the name is distributed."""
    import torch
    import torch.distributed as dist

    import saccade

    threads, folder, grouped = saccade.get_num_threads(), Path.cwd(), name.startswith("saccade.distributed.")
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as empty:
        torch.manual_seed(0)
        os.chdir(empty)
        try:
            if grouped:
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            yield
        finally:
            if grouped and dist.is_initialized():
                dist.destroy_process_group()
            saccade.set_num_threads(threads)
            os.chdir(folder)


def main() -> None:
    """Run the examples of the command line, or those of the devices that it names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--on", default="", help="devices of this machine, separated by commas")
    args = parser.parse_args()
    on = args.on.split(",")
    for name in args.names or [name for name in names() if need(name, DEVICES) in on]:
        print(f"{name}: {run(name)} examples ran", flush=True)


if __name__ == "__main__":
    main()
