"""Writes docs/support.md: what each backend says of one problem a row. `python scripts/support.py` after a change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from saccade import backends
from saccade.errors import Unsupported
from saccade.problem import Problem, Scores
from saccade.quantised import quantised
from saccade.recurrent.diagonal import Convolution, GatedUnit, Scan
from saccade.recurrent.problem import Matrix

PAGE = Path(__file__).resolve().parent.parent / "docs" / "support.md"
DEVICES = {"cpu": "cpu", "triton": "cuda", "webgpu": "webgpu", "metal": "mlx"}
NAMES = {"cpu": "CPU", "triton": "NVIDIA", "webgpu": "WebGPU", "metal": "Metal"}
HEAD = """# What each backend computes

What `unsupported(problem)` of each backend says, of one problem a row; `python scripts/support.py` writes this page.
✓ is forward and backward, "forward" has no gradient. A number is the reason below with which the call raises
`saccade.Unsupported`. Nothing falls back.

Arrays lie on the backend's device: NumPy or torch on the CPU, torch CUDA tensors on NVIDIA (an H100 or H200 for 8-bit
floats), MLX's on Metal. Every mask of `saccade.mask` is computed by all four, forward and backward. No gradient runs
through a cache, so rows of pages and codes are forward alone. Metal is emulated, not yet run on a Mac.
"""


class Row(NamedTuple):
    """What is asked, and the problem of a call on a device."""

    what: str
    problem: Callable[[str], Any]


def attention(**changes: Any) -> Callable[[str], Problem]:
    plain = Problem(B=2, Tq=64, Tk=64, Hq=8, Hk=8, D=64, Dv=64)
    return lambda device: replace(plain, device=device, **changes)


def matrix(**changes: Any) -> Callable[[str], Matrix]:
    plain = Matrix(
        B=2, T=64, N=2, H=4, Hk=4, K=64, V=64, dtype="float32", scale=1.0, chunk=32, out_dtype="float32", device=""
    )
    return lambda device: replace(plain, device=device, **changes)


def diagonal(kind: Any, **more: Any) -> Callable[[str], Any]:
    return lambda device: kind(B=2, T=64, S=2, D=64, dtype="float32", device=device, present=frozenset(), **more)


def sections() -> dict[str, list[Row]]:
    """The rows of the page."""
    kinds = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn")
    sizes = ((80, 80), (192, 128), (256, 256), (512, 512), (1024, 1024), (2048, 2048))
    codes = {kind: quantised(kind, None, 64) for kind in ("int8", "fp8", "int4")}
    return {
        "Numbers": [Row(dtype, attention(dtype=dtype)) for dtype in kinds],
        "Head sizes": [Row(f"D = {D}, Dv = {Dv}", attention(D=D, Dv=Dv)) for D, Dv in sizes],
        "Heads and lengths": [
            Row("grouped, 8 query heads on 2", attention(Hk=2)),
            Row("multi-query, 8 on 1", attention(Hk=1)),
            Row("decode, 1 query and 4096 keys", attention(Tq=1, Tk=4096, Hk=2)),
            Row("no query, no key", attention(Tq=0, Tk=0)),
        ],
        "Scores": [
            Row(what, attention(scores=Scores(**changes)))
            for what, changes in {
                "softcap": {"softcap": 30.0},
                "sinks": {"sinks": True},
                "bias [B, Hq, Tq, Tk]": {"bias": (2, 8, 64, 64)},
                "ALiBi": {"alibi": (1, 8)},
                "bias by distance": {"relative": (1, 8)},
                "forget gates": {"gates": True},
                "dropout": {"dropout": 0.1},
            }.items()
        ],
        "Keys": [
            Row("in pages", attention(source="paged")),
            *(Row(f"codes, {kind}", attention(quantised=how)) for kind, how in codes.items()),
            Row("codes, int8, in pages", attention(quantised=codes["int8"], source="paged")),
        ],
        "Recurrences": [
            Row("linear attention", matrix(feature_map="elu+1", normalize=True)),
            Row("linear attention, Taylor map, K = 16", matrix(feature_map="taylor", K=16, normalize=True)),
            Row("a decay a head (RetNet, Mamba-2)", matrix(decay="head", present=frozenset({"g"}))),
            Row("a decay a channel (GLA)", matrix(decay="channel", chunk=16, present=frozenset({"g"}))),
            Row("gated delta rule", matrix(decay="head", rule="delta", chunk=16, present=frozenset({"g", "beta"}))),
            Row("float64", matrix(decay="head", dtype="float64", out_dtype="float64", present=frozenset({"g"}))),
            Row(
                "selective scan (Mamba)",
                diagonal(Scan, N=16, G=1, fixed_B=False, fixed_C=False, delta_softplus=True, chunk=64),
            ),
            Row("RG-LRU (Griffin)", diagonal(GatedUnit, chunk=64)),
            Row("causal convolution", diagonal(Convolution, K=4, activation="silu")),
        ],
    }


def reasons(name: str, problem: Any) -> list[str]:
    """Why a backend does not compute a problem, whatever machine this is; raises Unsupported without its package."""
    room = getattr(problem, "room", "")
    try:
        module = backends.load(name, room)
    except Unsupported as error:
        if not room or name not in ("webgpu", "metal"):
            raise
        return list(error.reasons)
    if room:
        refusals = backends.room_refusals(module, problem)
    else:
        # what holds on every adapter: this machine may have none
        refusals = (module.support if name == "webgpu" else module).unsupported(problem) + backends.lacking(
            module, problem
        )
    return [reason for reason in refusals if reason not in backends.load(name).missing()]


def differentiable(name: str, problem: Any) -> bool:
    """Whether a backend computes gradients of a problem that it computes."""
    return not (isinstance(problem, Problem) and reasons(name, replace(problem, needs_grad=True)))


def page() -> str:
    """The text of docs/support.md."""
    lines, known = [HEAD], dict[str, int]()
    for title, rows in sections().items():
        lines += [f"## {title}\n", f"| | {' | '.join(NAMES.values())} |", "|---|" + ":-:|" * len(NAMES)]
        for what, problem in rows:
            cells: list[str] = []
            for name, device in DEVICES.items():
                example = problem(device)
                forward = reasons(name, example)
                both = forward
                if isinstance(example, Problem) and title != "Keys":
                    both = reasons(name, replace(example, needs_grad=True))
                notes = [str(known.setdefault(text, len(known) + 1)) for text in both]
                cells.append(", ".join(["forward"] * (forward != both) + notes) or "✓")
            lines.append(f"| {what} | {' | '.join(cells)} |")
        lines.append("")
    lines += ["## Reasons\n", *(f"{number}. {text}" for text, number in known.items()), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
