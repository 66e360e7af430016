"""Runs a benchmark for GPUs on the CPU, with small sizes and stand-ins: `python benchmarks/dry.py NAME rows.csv ...`.

It shows that every line runs; its figures mean nothing. Arrays of "cuda" are on the CPU, where Saccade has its own
kernels. FlashAttention-4 and flash-linear-attention are stand-ins, and other peers are missing. The scripts of the
Hopper kernels alone have no stand-in: they are imported.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # before its parts are replaced
from torch.overrides import TorchFunctionMode

from saccade.cli.bench import clocks

MOST = 256
Make = Callable[..., Any]


class OnCPU(TorchFunctionMode):
    """Arrays of "cuda" on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        args = [("cpu" if isinstance(a, str) and a.startswith("cuda") else a) for a in args]
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


class CpuGenerator(torch.Generator):
    """A generator of the CPU, for every device."""

    def __new__(cls, *_: Any, **__: Any) -> CpuGenerator:
        return super().__new__(cls, "cpu")


def by_events(call: Make, **_: Any) -> list[float]:
    """Seconds of one call, for every clock."""
    begin = time.perf_counter()
    call()
    return [time.perf_counter() - begin]


def attend(q: Any, k: Any, v: Any, *, causal: bool = False, **options: Any) -> Any:
    """A stand-in for FlashAttention-4: [.., T, H, D]."""
    rows = (x if x.dim() == 4 else x[None] for x in (q, k, v))
    how = {"is_causal": causal, "enable_gqa": True}
    o = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in rows), **how).transpose(1, 2)
    return (o if q.dim() == 4 else o[0]), None


def stand_ins() -> None:
    """Replaces what needs a GPU or minutes of compiling."""
    replaced = {"synchronize": lambda: None, "get_device_name": lambda: "stand-in", "empty_cache": lambda: None}
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    vars(torch).update(Generator=CpuGenerator)
    vars(torch).update(compile=lambda f=None, **_: f or (lambda f: f))
    clocks.by_events = clocks.by_replays = clocks.by_clock = by_events
    peers = {"flash_attn.cute": {"flash_attn_func": attend, "flash_attn_varlen_func": attend}}
    rule = lambda q, k, v, *_: (torch.zeros_like(v) + q.sum() + k.sum(), None)  # noqa: E731
    peers |= {
        "fla.ops.simple_gla": {"chunk_simple_gla": rule},
        "fla.ops.gla": {"chunk_gla": rule},
        "fla.ops.kda": {"chunk_kda": rule},
    }
    for name in peers:
        while name:
            sys.modules.setdefault(name, ModuleType(name)).__spec__ = ModuleSpec(name, None)
            name = name.rpartition(".")[0]
    for name, functions in peers.items():
        vars(sys.modules[name]).update(functions)


def shrink(module: Any) -> None:
    """Small sizes in a script."""
    name = module.__name__
    if name == "nvidia":
        module.FIRST = module.FIRST.replace('"cuda"', '"cpu"').replace("torch.cuda.synchronize()", "")
        module.SUITES = {suite: (lambda make=make: smaller(make())) for suite, make in module.SUITES.items()}
    elif name == "nvidia_recurrent":
        # as many as there are, for each part to have one
        module.MATRICES = ((1, 256, 2, 16, 16), (1, 128, 2, 16, 16))
        module.SCANS = 2 * ((1, 256, 8, 4),)
        module.SQUARE, module.COPIED = 64, 1 << 10
    elif name == "nvidia_models":
        shrink(importlib.import_module("nvidia_recurrent"))
        module.LATENTS = tuple(case._replace(B=2, T=128, heads=4) for case in module.LATENTS)
        module.SELECTED = tuple(case._replace(Hq=4, Hk=2) for case in module.SELECTED)
        module.TOKENS, module.ENTRIES, module.DENSE = 512, 4, 256
    elif name == "training":
        module.settings_of, module.environment = tiny_settings, module.gpu_environment
        module.MINUTE = 1e-3
    elif name == "generation":
        sizes = dict(zip(module.SIZES, (300, 32, 1, 2, 2), strict=True))
        small = {"sizes": sizes, "dtype": torch.float32, "prompt": 70, "tokens": 5, "device": "cpu"}
        module.CASES = [case._replace(**small) for case in module.CASES if case.device == "cuda"]
        module.environment = module.gpu_environment
    elif name == "eight_bits":
        module.SIZES, module.ROWS, module.KEYS = (64,), 4, 1024
        module.in_eight_bits = lambda *arrays: module.saccade.attention(*(x.bfloat16() for x in arrays))


def tiny_settings(_: Any, context: int, dtype: str, steps: int, seed: int = 0) -> dict[str, Any]:
    """The settings of a small model on this file."""
    sizes = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 2, "context": min(context, 64), "batch": 1, "vocab": 300}
    return {**sizes, "dtype": dtype, "steps": min(steps, 5), "seed": seed, "tokenizer": "bytes", "text": (__file__,)}


def smaller(cases: Iterator[Any]) -> Iterator[Any]:
    """The cases with few tokens, each once."""
    seen: set[Any] = set()
    for case in cases:
        Tq, Tk = (min(MOST, n) for n in (case.Tq, case.Tk))
        case = case._replace(B=1, Tq=Tq, Tk=Tk, documents=case.documents and 64)
        if case not in seen:
            seen.add(case)
            yield case


def main() -> None:
    """Run a script with stand-ins."""
    name = Path(sys.argv[1]).stem
    # plans for a GPU do not need one then
    os.environ["TRITON_INTERPRET"] = "1"
    stand_ins()
    with OnCPU():
        module = importlib.import_module(name)
        shrink(module)
        # models are moved by torch's own code, which OnCPU does not see
        sys.argv = [word.replace("cuda", "cpu") for word in sys.argv[1:]]
        if name.startswith("hopper"):
            print(f"{name} {' '.join(sys.argv[1:])}: imported, because its kernels need a GPU")
        else:
            module.main()


if __name__ == "__main__":
    main()
