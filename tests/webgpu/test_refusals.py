"""Machines without a usable device, and forks of a process with one: each message says what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("wgpu")

SYSTEM_MESA = sorted(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json"))
OPEN = """
from saccade import Unsupported
from saccade.backends.webgpu.device import open_gpu
try:
    print(open_gpu())
except Unsupported as error:
    print(error)
"""
FORK = """
import os
from saccade.backends.webgpu.device import open_gpu
gpu = open_gpu()
child = os.fork()
if not child:
    for use in (lambda: gpu.buffer(16), open_gpu, lambda: open_gpu("other")):
        try:
            use()
        except RuntimeError as error:
            print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


def test_no_driver(python: Callable[..., str]):
    printed = python(OPEN, VK_DRIVER_FILES="/nowhere.json")
    assert "the webgpu backend cannot compute this" in printed
    assert "install a Vulkan driver" in printed


def test_no_adapter_of_that_name(python: Callable[..., str], driver: Callable[[str], str]):
    printed = python(OPEN, VK_DRIVER_FILES=driver("swiftshader"), SACCADE_WEBGPU_ADAPTER="Voodoo")
    assert "no adapter has 'voodoo' in its name, those here:" in printed
    assert "SwiftShader" in printed


def test_no_package(python: Callable[..., str]):
    load = """
import sys
sys.modules["wgpu"] = None
from saccade import Unsupported, backends
try:
    backends.load("webgpu")
except Unsupported as error:
    print(error)
"""
    assert "it needs the package wgpu: run pip install" in python(load)


def test_a_driver_that_cuts_loops_short(python: Callable[..., str]):
    if not SYSTEM_MESA:
        pytest.skip("no Mesa of the system")
    printed = python(OPEN, VK_DRIVER_FILES=str(SYSTEM_MESA[0]))
    assert "silently ends loops after 65535 iterations" in printed or printed.startswith("Gpu('llvmpipe")


def test_a_fork(python: Callable[..., str], driver: Callable[[str], str]):
    assert python(FORK, VK_DRIVER_FILES=driver("swiftshader")).count("start processes by spawn") == 3
