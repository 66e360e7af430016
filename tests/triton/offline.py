"""Compiles the kernels of a call to machine code without a GPU, and reads the resources that they use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from compiled import Taken, taken
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

import triton
from saccade import LatentKVCache, PagedKVCache
from saccade.backends import Extras, Inputs, Outputs, tested
from saccade.backends.triton import (
    bias_gradient,
    hopper,
    launch,
    launch_decode,
    limits,
    on_device,
    one_row,
    recurrent_delta,
    tokens,
    versions,
)
from saccade.backends.triton import chip as chips
from saccade.backends.triton.hopper import latent
from saccade.backends.triton.hopper.schedule import schedule_of_intervals
from saccade.mask import causal, documents, parse, select
from saccade.plan import make_plan
from saccade.problem import Problem, Scores
from saccade.quantised import quantised
from saccade.testing import diagonal
from saccade.testing import recurrent as recurrences
from saccade.testing.patterns import named
from saccade.testing.tensors import put

# compiling needs no GPU
versions.RUN = tested.TRITON_COMPILED


class Chip(NamedTuple):
    """What Triton compiles for, and the bytes of shared memory that a program may use there."""

    target: GPUTarget
    shared: int


CHIPS = {
    f"sm_{n}": Chip(GPUTarget("cuda", n, 32), kib << 10)
    for n, kib in ((80, 163), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99))
} | {"gfx942": Chip(GPUTarget("hip", "gfx942", 64), 64 << 10)}


@contextmanager
def recorded(chip: str) -> Iterator[dict[str, Taken]]:
    """The resources of kernels launched inside, by name: they are compiled but not run."""
    found: dict[str, Taken] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        # the default of Triton will change
        assert given["enable_fp_fusion"]
        found[self.__name__.strip("_")] = taken(compiled(self, args, given, CHIPS[chip].target))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        patch.setattr(launch, "chip_of", lambda device: chip)
        patch.setattr(recurrent_delta, "chip_of", lambda device: chip)
        patch.setattr(one_row, "chip_of", lambda device: chip)
        yield found


def compiled(kernel: Any, args: Any, given: dict[str, Any], target: GPUTarget) -> Any:
    """The kernel as a launch with these arguments would compile it."""
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, kinds, options = bind(*args, **given)
    parsed, signature, values, attributes = kernel._pack_args(backend, options, bound, kinds, options)
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return triton.compile(source(kernel, signature, values, attributes), target=target, options=parsed.__dict__)


def of_problem(chip: str, dtype: str, D: int) -> dict[str, Taken]:
    """The resources of every portable kernel, by name, for causal attention with head size D."""
    kind = getattr(torch, dtype)
    with recorded(chip) as found:
        for Tq, bias in ((300, False), (300, True), (2, False)):
            shape = (1, 4, Tq, 300) if bias else None
            p = Problem(
                1, Tq, 300, 4, 2, D, D, dtype=dtype, device=f"cuda:{chip}", mask=causal(),
                scores=Scores(scale=0.1, bias=shape),
            )  # fmt: skip
            plan = make_plan(p, limits(p))
            q, o, do, dq = (torch.empty(1, Tq, 4, D, dtype=kind) for _ in range(4))
            k, v, dk, dv = (torch.empty(1, 300, 2, D, dtype=kind) for _ in range(4))
            lse, dbias = torch.empty(1, Tq, 4), torch.empty(1, 4, Tq, 300)
            call = launch.AttentionLaunch(p, plan, Inputs(q, k, v, Extras(bias=dbias if bias else None)))
            arrays = call.arrays._replace(do=launch.array(do), lse=lse, delta=lse)
            if Tq == 2:
                launch_decode.decode(call, o, lse)
            elif bias:
                bias_gradient.launch(call, 0, arrays, dbias)
            else:
                launch.forward(call, o, lse)
                launch.delta(call, Outputs(o, lse, do))
                share = launch.refine(call, Outputs(o, lse, do), lse)
                launch.backward(call, arrays._replace(share=share), launch.Gradients(dq, dk, dv, None), False)
    return found


def of_hopper(mask: str, D: int, dtype: str = "bfloat16", wide: bool = False, Dv: int = 0) -> dict[str, Taken]:
    """The resources of Hopper kernels with a mask; of 8-bit floats only the forward; wide: results in float32."""
    Dv = Dv or min(values for keys, values in hopper.sizes.SIZES if keys == D)
    p = Problem(1, 1000, 1000, 4, 2, D, Dv, dtype=dtype, mask=named(mask, 1000), scores=Scores(scale=0.1))
    plan = make_plan(p, limits(p))
    assert not hopper.why_not(p, plan, "sm_90")
    kind, small = getattr(torch, dtype), dtype == hopper.EIGHT_BITS
    q, do = (torch.empty(1, 1000, 4, n, dtype=kind) for n in (D, Dv))
    k, v = (torch.empty(1, 1000, 2, n, dtype=kind) for n in (D, Dv))
    results = torch.float32 if wide else torch.bfloat16
    o = torch.empty_like(do, dtype=results)
    descale = (torch.ones(4), torch.ones(2), torch.ones(2)) if small else None
    lse, delta = torch.empty(1, 1000, 4), torch.empty(1, 1000, 4)
    with recorded("sm_90") as found:
        call = launch.AttentionLaunch(p, plan, Inputs(q, k, v, Extras(descale=descale)))
        for _ in range(2):
            hopper.run_forward(call, o, lse)
            if not small:
                hopper.run_backward(call, do, lse, delta, results)
    return {f"hopper {name}": taken for name, taken in found.items()}


def of_branch(
    mask: str, Tq: int = 300, D: int = 64, dtype: str = "float32", chip: str = "sm_90", **options: Any
) -> dict[str, Taken]:
    """The resources of forward and backward, or of decode for few queries; more: with maximum and entropy of rows."""
    more = options.pop("more", False)
    p = Problem(
        2, Tq, 300, 4, 2, D, D, dtype=dtype, device=f"cuda:{chip}", mask=parse(mask), needs_grad=True,
        return_max=more, return_entropy=more, scores=Scores(0.1, **options),
    )  # fmt: skip
    plan, kind = make_plan(p, limits(p)), getattr(torch, dtype)
    q, o, do, dq = (torch.empty(2, Tq, 4, D, dtype=kind) for _ in range(4))
    k, v, dk, dv = (torch.empty(2, 300, 2, D, dtype=kind) for _ in range(4))
    lse, dbias = torch.empty(2, Tq, 4), torch.empty(p.scores.bias) if p.scores.bias else None
    extras = Extras(
        bias=dbias, seed=3 << 33, slopes=torch.empty(p.scores.alibi) if p.scores.alibi else None,
        sinks=torch.empty(4) if p.scores.sinks else None, lengths=torch.zeros(2, dtype=torch.int32) if Tq < 8 else None,
    )  # fmt: skip
    with recorded(chip) as found:
        call = launch.AttentionLaunch(p, plan, Inputs(q, k, v, extras), launch.more_results(p, lse))
        if Tq < 8:
            launch_decode.decode(call, o, lse)
        else:
            launch.forward(call, o, lse)
            outputs = Outputs(o, lse, do, lse, None, *[lse if more else None] * 2)
            share, dentropy = launch.refine(call, outputs, launch.delta(call, outputs)), outputs.dentropy
            arrays = call.arrays._replace(do=launch.array(do), lse=lse, share=share, delta=lse, dentropy=dentropy)
            launch.backward(call, arrays, launch.Gradients(dq, dk, dv, dbias), bool(p.scores.alibi))
    return found


def of_pages(
    Tq: int, page: int = 16, kind: str | None = None, dtype: Any = torch.bfloat16, chip: str = "sm_90"
) -> dict[str, Taken]:
    """The resources of decode, or of the forward for more queries, with keys in pages, which may be codes."""
    Tk, how = 40 * page, None if kind is None else quantised(kind, None, 128)
    p = Problem(
        2, Tq, Tk, 4, 2, 128, 128, dtype=str(dtype)[6:], device=f"cuda:{chip}", mask=causal(),
        scores=Scores(scale=0.1), source="paged", quantised=how,
    )  # fmt: skip
    plan = make_plan(p, limits(p))
    q, o = (torch.empty(2, Tq, 4, 128, dtype=dtype) for _ in range(2))
    pool = PagedKVCache(80, page, 2, 128, dtype=dtype, quantised=kind)
    k, v = pool.k, pool.v
    extras = Extras(
        block_table=torch.zeros(2, 40, dtype=torch.int32), page_size=page, k_scale=pool.k_scale, v_scale=pool.v_scale
    )
    with recorded(chip) as found:
        call = launch.AttentionLaunch(p, plan, Inputs(q, k, v, extras))
        (launch_decode.decode if Tq < 8 else launch.forward)(call, o, torch.empty(2, Tq, 4))
    return found


def of_latent(
    Tq: int, kind: str | None = None, heads: int = 128, dtype: Any = torch.bfloat16, chip: str = "sm_90", **more: bool
) -> dict[str, Taken]:
    """The resources of decode, or of the forward for more queries, with latent rows of DeepSeek-V3's sizes.

    apart: with values in an array of their own. hopper: by the kernel for Hopper.
    """
    cache = LatentKVCache(2, 1100, dtype=dtype, quantised=kind)
    p = Problem(
        2, Tq, 1100, heads, 1, 576, 512, dtype=str(dtype)[6:], device=f"cuda:{chip}", mask=causal(),
        scores=Scores(scale=0.1), quantised=cache.quantised,
    )  # fmt: skip
    plan = make_plan(p, limits(p))
    q, o = (torch.empty(2, Tq, heads, n, dtype=dtype) for n in (576, 512))
    extras = Extras(lengths=torch.zeros(2, dtype=torch.int32), k_scale=cache.k_scale, v_scale=cache.v_scale)
    with recorded(chip) as found:
        v = cache.v.contiguous() if more.get("apart") else cache.v
        call = launch.AttentionLaunch(p, plan, Inputs(q, cache.k, v, extras))
        assert call.columns == (512, not more.get("apart"))
        compute = launch_decode.decode if Tq < 8 else launch.forward
        if more.get("hopper") and latent.takes(call):
            compute = latent.decode
        compute(call, o, torch.empty(2, Tq, heads))
    return found


def of_selected(
    Tq: int, block: int, rows: int, D: int = 128, dtype: Any = torch.bfloat16, chip: str = "sm_90"
) -> dict[str, Taken]:
    """The resources of forward and backward of selected keys, of 16 query heads per key head."""
    indices = torch.zeros(1, 2, -(-Tq // rows), 2048 // block, dtype=torch.int32)
    p = Problem(
        1, Tq, 4096, 32, 2, D, D, dtype=str(dtype)[6:], device=f"cuda:{chip}", needs_grad=Tq > 1,
        mask=causal() & select(indices, block, rows),
    )  # fmt: skip
    q, o, do, dq = (torch.empty(1, Tq, 32, D, dtype=dtype) for _ in range(4))
    k, v, dk, dv = (torch.empty(1, 4096, 2, D, dtype=dtype) for _ in range(4))
    lse = torch.empty(1, Tq, 32)
    with recorded(chip) as found:
        call = launch.AttentionLaunch(p, make_plan(p, limits(p)), Inputs(q, k, v))
        launch_decode.selected(call, o, lse)
        if Tq > 1:
            share = launch.refine(call, Outputs(o, lse, do, lse), lse)
            arrays = call.arrays._replace(do=launch.array(do), lse=lse, share=share, delta=lse)
            launch.backward(call, arrays, launch.Gradients(dq, dk, dv), False)
    return found


def of_append(kind: str, chip: str = "sm_90") -> dict[str, Taken]:
    """The resources of writing rotated tokens into a cache of codes, and others into rows."""
    cache = PagedKVCache(4, 16, 2, 128, dtype=torch.bfloat16, quantised=kind)
    x, at, turn = torch.empty(4, 2, 128, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64), torch.zeros(4, 64)
    with recorded(chip) as found:
        assert tokens.append(x, cache.k, cache.k_scale, at, at, turn, turn, False, cache.quantised)
        assert tokens.append_rows(x[None], x[None, ..., :96], [x[None], x[None, ..., :96]], at[:1].int())
    return found


def of_one_row(width: int, wide: int, dtype: Any = torch.bfloat16, chip: str = "sm_90") -> dict[str, Taken]:
    """The resources of the products of a step for one token."""
    new = partial(torch.empty, dtype=dtype)
    x, k = one_row.Row(new(width), new(width), 1e-5), new(1, 9, 2, 64)
    square, tall = one_row.Weight(new(width, width), new(width)), one_row.Weight(new(wide, width))
    qkv = [one_row.Weight(new(heads * 64, width)) for heads in (4, 2, 2)]
    with recorded(chip) as found:
        one_row.project(x, qkv, torch.empty(2, 9, 32), (k, k, torch.zeros(1, dtype=torch.int32)), new(4, 64))
        one_row.gated(x, tall, tall, new(wide))
        one_row.product(one_row.Row(new(wide)), one_row.Weight(new(width, wide)), x.p, x.p)
        one_row.product(x, square, x.p)
    return found


def of_lists(chip: str = "sm_90") -> dict[str, Taken]:
    """The resources of the kernels that make lists of masks on the device."""
    mask = documents(torch.zeros(300, dtype=torch.int32)) & causal()
    p = Problem(1, 300, 300, 4, 2, 64, 64, mask=mask, scores=Scores(scale=0.1))
    with recorded(chip) as found:
        part = on_device.Intervals(*on_device._by_ids(p, mask.children), 300, True, 3)
        on_device.segments(part, 128, 64)
        schedule_of_intervals(part, 128, 64)
    assert set(found) == {"rows_of_ids", "rows_of_keys", "segments", "pack", "turns"}
    return found


def of_recurrent(
    dtype: str, name: str, packed: bool = False, T: int = 300, chip: str = "sm_90", state: bool = True, **sizes: int
) -> dict[str, Taken]:
    """The resources of the kernels of a recurrence, forward and backward. state: whether it is returned."""
    op = next(op for op in (*recurrences.OPS, *diagonal.OPS) if op.name == name)
    borders = (0, 70, T) if packed else None
    arrays = recurrences.make(op, recurrences.Sizes(B=1 if packed else 2, T=T, borders=borders, **sizes), dtype)
    given = {n: put(x) for n, x in arrays.items()}
    leaves = [x.requires_grad_() for x in given.values() if x.is_floating_point()]
    interpreted, chips.interpreted = chips.interpreted, lambda: True
    try:
        with recorded(chip) as found:
            results = op.call(**given, **op.options, return_state=state, backend="triton")
            results = results if state else (results,)
            torch.autograd.grad(results, leaves, [torch.empty_like(x) for x in results])
    finally:
        chips.interpreted = interpreted
    return {f"{name} {kernel}": taken for kernel, taken in found.items()}
