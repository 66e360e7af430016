"""Replayed calls: their launches get the arguments that a first call would give them, with the new arrays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import offline
import torch
from triton.backends.nvidia.driver import wrap_handle_tensordesc
from triton.runtime.jit import JITFunction

import triton
from saccade.backends import Extras, Inputs, Outputs
from saccade.backends import triton as backend
from saccade.backends.triton import launch, replay, versions
from saccade.mask import causal
from saccade.plan import make_plan
from saccade.problem import Problem, Scores

# the number of a launcher's arguments before the kernel's own
BEFORE = 13 if versions.FLAT_LAUNCHER else 15


@pytest.fixture
def launches(monkeypatch) -> list[tuple[tuple[int, ...], list[Any]]]:
    """(grid, arguments) of every launch as Triton's launcher would get them; nothing runs on a GPU."""
    found: list[tuple[tuple[int, ...], list[Any]]] = []

    def launch(*args: Any) -> None:
        own = list(args[BEFORE:] if versions.FLAT_LAUNCHER else args[BEFORE])
        found.append((args[:3], own))

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> Any:
        given = dict(zip(self.arg_names, args, strict=False)) | more
        last = launch
        if self.is_gluon():
            # the wrapper that makes tensor maps from descriptors
            kernel = offline.compiled(self, args, more, offline.CHIPS["sm_90"].target)
            signature = dict(enumerate(kernel.src.signature.values()))
            last = wrap_handle_tensordesc(launch, signature, getattr(kernel.metadata, "tensordesc_meta", None))
        own = [given[name] for name in self.arg_names]
        head = [*grid, *(1,) * (3 - len(grid)), *(0,) * (BEFORE - 3)]
        last(*head, *(own if versions.FLAT_LAUNCHER else [own]))
        launcher = SimpleNamespace(
            launch=last, launch_cooperative_grid=False, launch_pdl=False, arg_annotations=[], kernel_signature=b""
        )
        return SimpleNamespace(run=launcher, function=0, packed_metadata=())

    def tensor_map(*args: Any) -> Any:
        return Map(args)

    monkeypatch.setattr(JITFunction, "run", run)
    utils = SimpleNamespace(fill_tma_descriptor=tensor_map, fill_tma_descriptor_tiled=tensor_map)
    active = SimpleNamespace(get_current_stream=lambda index: 0, utils=utils)
    monkeypatch.setattr(replay, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return found


class Map(tuple):
    """The arguments that a tensor map was made from."""


def named(x: Any, names: dict[int, str]) -> Any:
    """An argument with pointers replaced by the names of their arrays; scratch has no name."""
    if isinstance(x, (tuple, list)):
        return tuple(named(one, names) for one in x)
    if isinstance(x, torch.Tensor):
        x = x.data_ptr()
    return names.get(x, "scratch" if isinstance(x, int) and x > 1 << 40 else x)


@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
@pytest.mark.parametrize("verb", ["forward", "decode", "lengths", "backward"])
def test_arguments(launches, monkeypatch, verb, chip) -> None:
    monkeypatch.setattr(launch, "chip_of", lambda device: chip)
    # on sm_90, with head sizes that the kernels for Hopper take
    monkeypatch.setattr(backend, "chip_of", lambda device: chip)
    monkeypatch.setattr("saccade.backends.triton.hopper.forward.multiprocessors", lambda device: 132)
    D = 80 if chip == "sm_80" else 64
    Tq = 2 if verb in ("decode", "lengths") else 300
    # decode has its keys in several ranges
    Tk = 300
    p = Problem(2, Tq, Tk, 4, 2, D, 64, dtype="bfloat16", mask=causal(), scores=Scores(scale=0.1), device="cpu")
    plan = make_plan(p, backend.limits(p))
    assert bool(backend.hopper.why_not(p, plan, chip)) == (chip == "sm_80")
    again = backend.direct(p, plan, torch.Tensor, verb == "decode")
    seen = []
    for _ in range(3):
        launches.clear()
        q, do, o = (torch.randn(2, Tq, 4, n).bfloat16() for n in (D, 64, 64))
        k, v = (torch.randn(2, Tk, 2, n).bfloat16() for n in (D, 64))
        lse, lengths = torch.randn(2, Tq, 4), torch.tensor([3, 300], dtype=torch.int32)
        if verb == "backward":
            made = backend.backward(p, plan, Inputs(q, k, v), Outputs(o, lse, do))[:3]
        elif verb == "lengths":
            made = backend.decode(p, plan, Inputs(q, k, v, Extras(lengths=lengths)))
        else:
            made = again(1, q, k, v, True)
        arrays = {"q": q, "k": k, "v": v, "do": do, "o": o, "lse": lse, "lengths": lengths}
        arrays |= {f"made {n}": x for n, x in enumerate(made)}
        names = {x.data_ptr(): name for name, x in arrays.items()}
        seen.append([(grid, [named(a, names) for a in args]) for grid, args in launches])
    assert seen[0]
    assert seen[1] == seen[0]
    assert seen[2] == seen[0]


def test_calls_with_one_array_twice_have_their_own_recording(launches) -> None:
    p = Problem(1, 300, 300, 2, 2, 80, 80, dtype="bfloat16", scores=Scores(scale=0.1), device="cpu")
    again = backend.direct(p, make_plan(p, backend.limits(p)), torch.Tensor, False)
    q, k, v = (torch.randn(1, 300, 2, 80).bfloat16() for _ in range(3))
    again(1, q, q, q, True)
    for _ in range(2):
        launches.clear()
        again(1, q, k, v, True)
        names = {x.data_ptr(): name for name, x in {"q": q, "k": k, "v": v}.items()}
        assert [x[0] for x in named(launches[0][1][0], names)[:3]] == ["q", "k", "v"]
