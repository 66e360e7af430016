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
from saccade.backends.triton import diagonal, launch, recurrent, replay, versions
from saccade.frameworks.torch_run import spec
from saccade.mask import causal
from saccade.plan import make_plan
from saccade.problem import Problem, Scores
from saccade.recurrent.diagonal import CAUSAL_CONV1D, RG_LRU, SELECTIVE_SCAN
from saccade.recurrent.problem import MATRIX

# the number of a launcher's arguments before the kernel's own
BEFORE = 13 if versions.FLAT_LAUNCHER else 15


@pytest.fixture
def launches(monkeypatch) -> list[tuple[tuple[int, ...], list[Any]]]:
    """(grid, arguments) of every launch as Triton's launcher would get them; nothing runs on a GPU."""
    found: list[tuple[tuple[int, ...], list[Any]]] = []
    short_way, alive = replay._short_way, []

    def kept(kind: str) -> Any:
        def empty(*args: Any) -> torch.Tensor:
            alive.append(short_way(kind)(*args))
            return alive[-1]

        return empty

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
    # a replay's launches have pointers alone: freed scratch could become a gradient, which would name it
    monkeypatch.setattr(replay, "_short_way", kept)
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
    same(seen)


def same(seen: list[Any]) -> None:
    """Three calls had the same launches."""
    assert seen[0]
    assert seen[1] == seen[0]
    assert seen[2] == seen[0]


# recurrences by name: the family, options, and shapes of arrays
B, T, H, K, V = 2, 70, 4, 16, 32
ROWS = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, H, V)}
GATED = ROWS | {"beta": (B, T, H), "g": (B, T, H)}
STEPS = {"u": (B, 300, 8), "delta": (B, 300, 8), "A": (8, 4), "B": (B, 300, 4), "C": (B, 300, 4), "D": (8,)}
RECURRENT = {
    "linear": (MATRIX, {"feature_map": "relu", "normalize": True}, ROWS),
    "all keys": (MATRIX, {"feature_map": "relu", "causal": False}, ROWS),
    "decay": (MATRIX, {}, ROWS | {"g": (B, T, H)}),
    "channels": (MATRIX, {}, ROWS | {"g": (B, T, H, K), "initial_state": (B, H, K, V)}),
    "delta": (MATRIX, {"rule": "delta"}, GATED),
    "shared keys": (MATRIX, {"rule": "delta"}, GATED | {"q": (B, T, 2, K), "k": (B, T, 2, K)}),
    "one token": (MATRIX, {"rule": "delta"}, {n: (B, 1, *x[2:]) for n, x in GATED.items()}),
    "scan": (SELECTIVE_SCAN, {"delta_softplus": True}, STEPS | {"z": (B, 300, 8)}),
    "scan of one token": (SELECTIVE_SCAN, {}, {n: x if len(x) < 3 else (B, 1, x[2]) for n, x in STEPS.items()}),
    "gated unit": (RG_LRU, {}, {"x": (B, T, 8), "r": (B, T, 8), "i": (B, T, 8), "a_param": (8,)}),
    "convolution": (CAUSAL_CONV1D, {"activation": "silu"}, {"x": (B, T, 8), "weight": (8, 4), "bias": (8,)}),
}
WIDE = "initial_state", "A", "D", "a_param"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrences(launches, monkeypatch, name, dtype) -> None:
    family, options, shapes = RECURRENT[name]
    backend = recurrent if family is MATRIX else diagonal
    # in other calls, torch adds up gradients between launches
    differentiated = family is MATRIX and not options.get("normalize")
    seen: list[Any] = []
    for n in range(3):
        launches.clear()
        present = {n: torch.randn(x, dtype=torch.float32 if n in WIDE else dtype) for n, x in shapes.items()}
        arrays = {n: present.get(n) for n in family.names}
        specs = {n: None if x is None else spec(x) for n, x in arrays.items()}
        problem = family.describe(specs, family.Options(**options))
        do = torch.randn(problem.outputs[0].shape, dtype=dtype)
        made = {f"made {n}": x for n, x in enumerate(backend.forward(problem, arrays))}
        found = [with_names(launches, present | made)]
        if differentiated:
            # memory of the forward's scratch may be a gradient's now
            launches.clear()
            grads = backend.backward(problem, arrays, (do, None), set())
            found.append(with_names(launches, present | {"do": do} | {f"d{n}": x for n, x in grads.items()}))
        seen.append(found)
        monkeypatch.setattr(JITFunction, "run", first_only)
    same(seen)


def with_names(launches: list[Any], arrays: dict[str, torch.Tensor]) -> list[Any]:
    """Launches whose pointers are replaced by the names of arrays."""
    names = {x.data_ptr(): name for name, x in arrays.items()}
    return [(grid, [named(a, names) for a in args]) for grid, args in launches]


def first_only(*args: Any, **more: Any) -> None:
    """What must not be called a second time."""
    raise AssertionError("a later call goes through Triton's own launch")


def test_calls_with_one_array_twice_have_their_own_recording(launches) -> None:
    p = Problem(1, 300, 300, 2, 2, 72, 72, dtype="bfloat16", scores=Scores(scale=0.1), device="cpu")
    again = backend.direct(p, make_plan(p, backend.limits(p)), torch.Tensor, False)
    q, k, v = (torch.randn(1, 300, 2, 72).bfloat16() for _ in range(3))
    again(1, q, q, q, True)
    for _ in range(2):
        launches.clear()
        again(1, q, k, v, True)
        names = {x.data_ptr(): name for name, x in {"q": q, "k": k, "v": v}.items()}
        assert [x[0] for x in named(launches[0][1][0], names)[:3]] == ["q", "k", "v"]


def test_lengths_of_another_dtype_are_not_replayed(launches, monkeypatch) -> None:
    """A kernel that was compiled for lengths of 32 bits would read the halves of numbers of 64 bits."""
    p = Problem(2, 1, 300, 4, 2, 72, 64, dtype="bfloat16", mask=causal(), scores=Scores(scale=0.1), device="cpu")
    plan = make_plan(p, backend.limits(p))
    q, k, v = (torch.randn(2, *x).bfloat16() for x in ((1, 4, 72), (300, 2, 72), (300, 2, 64)))

    def decode(dtype: torch.dtype) -> None:
        lengths = torch.tensor([3, 300], dtype=dtype)
        backend.decode(p, plan, Inputs(q, k, v, Extras(lengths=lengths)))

    decode(torch.int32)
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", first_only)
        decode(torch.int32)
        with pytest.raises(AssertionError, match="a later call"):
            decode(torch.int64)


def test_devices_share_a_plan_and_no_replay(monkeypatch) -> None:
    class Noted:
        def __init__(self, device: str) -> None:
            self.device = device

        def __call__(self, *_: Any) -> list[Any]:
            return [self.device]

    monkeypatch.setattr(backend, "Replay", Noted)
    problems = [Problem(1, 300, 300, 2, 2, 72, 72, dtype="bfloat16", device=f"cuda:{n}") for n in range(2)]
    one, other = (make_plan(p, backend.limits(p)) for p in problems)
    assert one is other
    for p in problems:
        assert backend._again("forward", p, one, [torch.zeros(1)], lambda: pytest.fail("not a first call")) == [
            p.device
        ]
