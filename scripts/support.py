"""Writes docs/support.md: which problems each backend computes. Run `python scripts/support.py` after a change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from saccade import backends
from saccade.backends.tested import CHIPS, CHIPS_RUN, TRITON_COMPILED, TRITON_RUN
from saccade.errors import Unsupported
from saccade.mask import select
from saccade.problem import Problem, Scores
from saccade.quantised import quantised
from saccade.recurrent.diagonal import Convolution, GatedUnit, Scan
from saccade.recurrent.problem import Matrix

PAGE = Path(__file__).resolve().parent.parent / "docs" / "support.md"
DEVICES = {"cpu": "cpu", "triton": "cuda", "webgpu": "webgpu", "metal": "mlx"}
NAMES = {"cpu": "CPU", "triton": "NVIDIA", "webgpu": "WebGPU", "metal": "Metal"}
HEAD = """# What each backend computes

`cpu`, `triton` (NVIDIA), `webgpu` and `metal` (Apple GPUs). Metal is emulated, not yet run on a Mac. The Triton kernels
have run on Hopper alone; for [other chips](#gpus-and-versions-of-triton) they are compiled, not run.

Each row of the tables is one problem, and each cell is the answer of a backend's `unsupported(problem)`.
✓ means forward and backward, and "forward" means no gradient. A number is the [reason](#reasons) with which the call
raises `saccade.Unsupported`. A backend never falls back to another one.

- Arrays lie on the backend's device: NumPy or torch on the CPU, torch CUDA tensors on NVIDIA (an H100 or H200 for 8-bit
  floats), MLX's on Metal.
- All four compute every mask of `saccade.mask`, forward and backward, except `select` (CPU and NVIDIA).
- No gradient passes through a cache, so ✓ in the rows of pages and codes means forward.

[Details of each backend](#details) follow below the tables. `python scripts/support.py` writes this page.
"""
CHIPS_HEAD = """## GPUs and versions of Triton

The tests compile the portable kernels for each chip, with tiles that fit its shared memory, and Hopper's own kernels
for sm_90. They compare registers, shared memory and spills with a table (`tests/triton/resources.csv`): with Triton 3.6
for all chips, with later versions for sm_80 and sm_90.
"""
TRITON_HEAD = """With a version of Triton that has never run on a GPU, Hopper GPUs use the portable kernels as well.
"""
REPORT = """## Report a run

A run on a chip or with a version of Triton that the tables above do not list as run is welcome. In a clone, with a
Python that has torch, Triton, NumPy, ml_dtypes, hypothesis, pytest, pytest-xdist and pytest-timeout:

```sh
make test-gpu PYTHON=python3 WORKERS=4
```

This runs the contract suite on the GPU. If everything passes, the log is `docs/logs/test-gpu.log`; otherwise it is
`build/test-gpu.log`. Open an issue and attach the log, in both cases. It starts with the GPU, its driver, the versions
of torch and Triton, and the commit. `make test-gpu PART=1/4` runs a quarter of the cases.

To also test the Hopper kernels with a new version of Triton, first add the version to `TRITON_RUN` in
`src/saccade/backends/tested.py`. That line enables them.
"""
DETAILS = """## Details

Everywhere: multi-head, grouped and multi-query attention, D and Dv that may differ, Tq and Tk that may differ and
may be 0, strided keys, and masks of up to 8 bands after simplification. Scores have a scale, a softcap, additive
biases, ALiBi, sinks and dropout (Philox-4x32-10).

### CPU

- **Directions**: forward, backward (also for a bias, slopes and sinks), decode. torch also has second derivatives and
  forward mode (`torch.func.jvp`, `jacfwd`, `hessian`), also for tangents of a bias, slopes, tables, gates and sinks.
- **Numbers**: float32, float64, bfloat16 and float16. bfloat16 and float16 have float32 sums.
- **Head sizes**: D and Dv from 1 to 1024.
- **Keys**: in pages of any size (`PagedKVCache`, `PagedKeys`, `paged_attention`), and as codes of 8 or 4 bits
  (`quantised=`). Both have no gradients.
- **Instruction sets**: x86-64 base, v3 (AVX2), AVX-512, AVX-512 with bf16, AMX; arm64 NEON, with and without bf16, in
  an emulator. `SACCADE_ISA` forces one.
- **torch 2.13 with Python 3.11**: custom operators, autograd, `torch.compile`, `torch.func`, autocast, checkpoint,
  FSDP2, `torch.export` with AOTInductor, ONNX ([Export and JAX](export.md)).
- **JAX 0.10**: `jit`, `grad` and `vmap` on its CPU arrays, with the options of the table.
- **Threads**: Saccade has workers of its own, which sleep between calls. A thread that calls with torch tensors
  uses torch's OpenMP team instead, if both have the same number of threads (Linux).
- **Refused**: DTensor, nested and sparse tensors, forward mode of recurrences, with selected keys and inside
  `torch.compile`, gradients and tangents of tangents, third derivatives, 8-bit floats.

### NVIDIA GPUs, through Triton

- **Directions**: forward, backward (also for a bias, slopes and sinks), decode, and forward mode with D of at
  most 512, without selected keys. torch CUDA tensors go here by default.
- **Numbers**: float32 (each product is three products of tf32), bfloat16 and float16, all with float32 sums.
- **8-bit floats**: on Hopper, the forward of float8_e4m3fn, with `descale=(q, k, v)`, float32 [H] or [B, H]. o is
  bfloat16. There are no gradients.
- **Head sizes**: D and Dv from 1 to 512. Without gradients D is at most 576, as decode of latent attention needs. The
  kernels for D above 512 have passed their tests on an H100 with Triton 3.6 and 3.9, and compile for every chip.
- **Masks on the GPU**: documents, lengths, prefixes, windows and their `&` are lowered on the GPU if their arrays
  are CUDA tensors, and no call waits. The arrays of other masks are copied to the host.
- **Scattered columns**: if a mask's columns are scattered, keys and values are copied into an order in which these
  columns fill tiles. `saccade explain` prints this.
- **Hopper (H100, H200)**: kernels of their own, in Gluon, for bfloat16 and float16 with D = Dv of 64, 80, 96, 128,
  192 or 256, and with D = 192 and Dv = 128. They compute bands and ascending row intervals (causal, windows,
  documents, prefixes, global tokens), softcap, sinks, and blocks of multiples of 64 (of 128 queries at D of 192 and
  256). The portable kernels compute everything else; `saccade explain --device h200` prints which kernels are used and
  why.
- **Hopper, gradients**: dQ is summed in a fixed order unless `deterministic=False`.
- **Hopper, 8-bit floats**: the same masks and sizes, and blocks of multiples of 128. D of 192 and 256 is
  computed in bfloat16.
- **Decode**: the queries of a group are in one tile, and the keys are split over the GPU. A `KVCache` on the GPU
  stores its lengths there, and no step waits for them.
- **Keys**: in pages of any size and as codes, by the portable kernels, without gradients.
- **Recurrences**: all except the Taylor map and float64, forward and backward, in chunks. The delta rule takes K up
  to 256. `cu_seqlens` on the GPU is trusted.
- **NaN and infinities**: in a key that some rows see they may reach other rows of the same tile. In a key that no
  query sees they never affect a result. In a recurrence, a NaN in a value may reach earlier tokens of its chunk.
- **Tested on**: H100 and H200 with torch 2.11, Triton 3.6 and 3.9, by the contract suite (the logs in `docs/logs` name
  cases and commits); over ranks, two and four H200s.
- **Missing**: float64, gradients of 8-bit floats.

### WebGPU, through wgpu

- **Directions**: forward, backward (also for a bias, slopes and sinks), decode.
- **Numbers**: float32, float16 (by `shader-f16`, else in packed pairs) and bfloat16 (converted to float32 on
  upload), all with float32 sums.
- **Head sizes**: D and Dv from 1 to 512. Arrays on the device need D and Dv divisible by 4.
- **Limits**: a backward with a bias needs an adapter with 10 storage buffers. Everything else fits WebGPU's default
  limits.
- **Arrays**: NumPy, torch CPU tensors (autograd, `torch.compile`), and `webgpu.array`: float32 and float16 that
  stay on the device, with caches that grow there.
- **Keys**: in pages of any size, in memory or on the device, and as codes. Both have no gradients.
- **Long keys**: keys that exceed the largest binding are bound in ranges, except under strided masks.
- **Recurrences**: `linear_attention` (not the Taylor map), `scalar_decay`, `ssd` and `selective_scan`, forward and
  backward, for arrays in memory, computed in float32. A NaN in a value may reach earlier tokens of its chunk.
- **WGSL for other hosts**: `webgpu.kernel_source(name, subgroups=False, target="wgpu")`, or `target="browser"`,
  returns forward, decode, three backwards, rotary positions and their gradients.
- **Adapters**: through Vulkan, hardware first. Metal and Direct3D 12 have not been run yet. OpenGL is refused, and
  so is software Mesa before version 25, which stops loops too early.
- **Missing**: float64, D > 512, cooperative matrices, products in float16, CUDA tensors.

### Apple GPUs, through MLX

Emulated, not yet run on a Mac.

- **Directions**: forward, backward, decode split over keys. `mx.grad` gives the gradients of q, k and v, and
  `attention_backward` also those of bias, slopes and sinks.
- **Numbers**: float32, float16 and bfloat16, all with float32 sums.
- **Head sizes**: D and Dv from 1 to 256.
- **Arrays**: NumPy arrays, MLX arrays (lazy on a GPU) and tensors on torch's MPS device. On MLX's CPU device the
  CPU core computes, and evaluates its inputs at once.
- **With MLX's own attention**: `saccade.integrations.mlx.scaled_dot_product_attention` has MLX's signature and
  passes plain attention to MLX.
- **vmap**: `saccade.integrations.mlx.vmap` folds an axis into the batch, because `mx.vmap` does not support custom
  kernels.
- **Keys**: in pages of any size, and as codes of 8 or 4 bits from arrays in memory. Both have no gradients.
- **Recurrences**: linear attention, forward and backward, with every feature map except Taylor's. On MLX's CPU
  device all recurrences, by the CPU core.
- **Proof**: `make test-metal` runs an emulator of Metal's threads, sanitizers and mutants, checks address spaces
  with clang and compares what MLX composes for each launch ([Metal](metal.md)).
- **Missing**: float64, D > 256, and on the GPU recurrences with decays, the delta rule and diagonal states.
"""


class Row(NamedTuple):
    """A row of a table: its title, and the problem of a call on a device."""

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
    """The rows of each table, by its heading."""
    kinds = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn")
    sizes = ((80, 80), (192, 128), (256, 256), (512, 512), (576, 512), (1024, 1024), (2048, 2048))
    codes = {kind: quantised(kind, None, 64) for kind in ("int8", "fp8", "int4")}
    return {
        "Numbers": [Row(dtype, attention(dtype=dtype)) for dtype in kinds],
        "Head sizes": [Row(f"D = {D}, Dv = {Dv}", attention(D=D, Dv=Dv)) for D, Dv in sizes],
        "Heads and lengths": [
            Row("grouped, 8 query heads on 2", attention(Hk=2)),
            Row("multi-query, 8 on 1", attention(Hk=1)),
            Row("decode, 1 query and 4096 keys", attention(Tq=1, Tk=4096, Hk=2)),
            Row("no query, no key", attention(Tq=0, Tk=0)),
            Row("selected keys", attention(mask=select(np.zeros((2, 8, 64, 4), np.int32), 16))),
            Row('`deterministic="batch"`', attention(deterministic="batch")),
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
        "Results": [
            Row("the largest score", attention(return_max=True)),
            Row("the entropy", attention(return_entropy=True)),
        ],
        "Keys": [
            Row("in pages", attention(source="paged")),
            *(Row(f"codes, {kind}", attention(quantised=how)) for kind, how in codes.items()),
            Row("codes, int8, in pages", attention(quantised=codes["int8"], source="paged")),
        ],
        "Recurrences": [
            Row("linear attention", matrix(feature_map="elu+1", normalize=True)),
            Row("linear attention, Taylor map, K = 16", matrix(feature_map="taylor", K=16, normalize=True)),
            Row("a decay per head (RetNet, Mamba-2)", matrix(decay="head", present=frozenset({"g"}))),
            Row("a decay per channel (GLA)", matrix(decay="channel", chunk=16, present=frozenset({"g"}))),
            Row("gated delta rule", matrix(decay="head", rule="delta", chunk=16, present=frozenset({"g", "beta"}))),
            Row(
                "gated delta rule, a decay per channel (Kimi)",
                matrix(decay="channel", rule="delta", chunk=16, present=frozenset({"g", "beta"})),
            ),
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
    """Why a backend does not compute a problem, on any machine; raises Unsupported if its package is missing."""
    kind = getattr(problem, "backend_module", "")
    try:
        module = backends.load(name, kind)
    except Unsupported as error:
        if not kind or name not in ("webgpu", "metal"):
            raise
        return list(error.reasons)
    if kind:
        refusals = backends.recurrent_refusals(module, problem)
    else:
        # reasons that hold on every adapter, because this machine may have none
        refusals = (module.support if name == "webgpu" else module).unsupported(problem)
        refusals += backends.lacking(module, problem)
    return [reason for reason in refusals if reason not in backends.load(name).missing()]


def differentiable(name: str, problem: Any) -> bool:
    """Whether a backend computes gradients of a problem that it computes."""
    return not (isinstance(problem, Problem) and reasons(name, replace(problem, needs_grad=True)))


def chips() -> str:
    """What the Triton kernels have run on, and for what they are compiled."""
    state = {True: "run, on H100 and H200", False: "compiled, not run"}
    lines = [CHIPS_HEAD, "| chip | GPU | kernels |", "|---|---|---|"]
    lines += [f"| {chip} | {gpus} | {state[chip in CHIPS_RUN]} |" for chip, (gpus, _) in CHIPS.items()]
    lines += ["", "| Triton | kernels |", "|---|---|"]
    lines += [f"| {version} | {state[version in TRITON_RUN]} |" for version in TRITON_COMPILED]
    return "\n".join([*lines, "", TRITON_HEAD])


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
                notes = [str(known.setdefault(text, len(known) + 1)) for text in forward or both]
                cells.append(", ".join(["forward"] * (bool(both) and not forward) + notes) or "✓")
            lines.append(f"| {what} | {' | '.join(cells)} |")
        lines.append("")
    lines += ["## Reasons\n", *(f"{number}. {text}" for text, number in known.items()), "", chips(), REPORT, DETAILS]
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
