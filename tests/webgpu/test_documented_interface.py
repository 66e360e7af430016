"""The documented kernels' interface: bindings, memory, helpers, and an error for all arguments that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from saccade import Unsupported
from saccade.backends.webgpu import texts
from saccade.backends.webgpu.arrays import array
from saccade.backends.webgpu.device import Gpu
from saccade.backends.webgpu.documented import LAYOUTS, catalogue, run
from saccade.backends.webgpu.step import Step
from saccade.backends.webgpu.wgsl import parse

F32 = np.float32

BYTES = {
    "attention_forward": 4104,
    "attention_decode": 4096,
    "attention_backward_short": 11264,
    "attention_backward_short_dKdV": 2048,
    "attention_backward": 6148,
}

# every invocation writes the results that it gets
HELPERS = """
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
@compute @workgroup_size(256)
fn helpers(@builtin(local_invocation_index) tid: u32) {
    y[tid] = wg_reduce_max(tid, x[tid]);
    workgroupBarrier();
    y[256u + tid] = wg_reduce_sum(tid, x[tid]);
    y[512u + tid] = nan_guard(x[256u + tid]);
}
"""


@pytest.mark.parametrize("subgroups", [False, True])
def test_helpers(gpu: Gpu, rng: np.random.Generator, subgroups: bool):
    if subgroups and "subgroup" not in gpu.features:
        pytest.skip("the device has no subgroups")
    kernel = gpu.kernel(texts.prelude(subgroups) + HELPERS, "helpers")
    for at in (0, 37, 255):
        x = rng.standard_normal(512).astype(F32)
        x[at] = 50
        x[256:264] = np.nan, -np.nan, np.inf, -np.inf, 3.4e38, -0.0, 1e-30, -1
        given, out = array(x, gpu), array(np.full(768, np.nan, F32), gpu)
        seen: list[np.ndarray[Any, Any]] = []
        for _ in range(2):
            gpu.run([Step(kernel, [given.buffer, out.buffer], (1, 1, 1))])
            seen.append(out.numpy())
        np.testing.assert_array_equal(*seen)
        top, total, guarded = seen[0].reshape(3, 256)
        assert (top == 50).all()
        assert (total == total[0]).all()
        exact = x[:256].astype(np.float64).sum()
        # at most 24 additions one after the other
        assert abs(total[0] - exact) <= 24 * 2**-24 * abs(x[:256]).sum()
        np.testing.assert_array_equal(guarded, np.where(np.isfinite(x[256:]), x[256:], 0))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_interface_and_the_memory(name: str):
    module = parse(texts.kernel_source(name))
    by_number = sorted(module.resources, key=lambda r: r.number)
    assert [r.name for r in by_number] == [key.lstrip(">+~") for key in LAYOUTS[name].split()]
    limits = {texts.STORAGE: 9, texts.MEMORY: 16384, texts.THREADS: 256}
    for subgroups in (False, True):
        text = texts.kernel_source(name, subgroups)
        kernel = texts.check(text, name, limits)
        assert kernel.threads == (256, 1, 1)
        assert kernel.workgroup_bytes == BYTES.get(name, 0)
        assert "enable" not in text
        browser = texts.kernel_source(name, subgroups, "browser")
        assert browser == ("enable subgroups;\n\n" if "subgroupAdd" in text else "") + text
    assert "subgroupAdd" not in texts.kernel_source(name)


def test_the_catalogue_is_for_a_browser():
    found = catalogue()
    assert set(LAYOUTS) < set(found)
    assert {name for name, text in found.items() if text.startswith("enable subgroups;")} == set(found) - set(LAYOUTS)


def test_sources_that_there_are_not():
    with pytest.raises(ValueError, match="kernel is 'attention'; expected one of attention_forward, "):
        texts.kernel_source("attention")
    with pytest.raises(ValueError, match="target is 'metal'; expected 'wgpu' or 'browser'"):
        texts.kernel_source("rope_q", target="metal")


FORWARD: dict[str, Any] = {
    "Q": np.ones((8, 4, 6), F32),
    "K": np.ones((8, 2, 6), F32),
    "V": np.ones((8, 2, 6), F32),
    "seg": np.zeros(8, np.uint32),
}
WIDE = np.zeros((4, 1, 257), F32)
LONG = np.broadcast_to(F32(0), (65536, 1, 1))
MIDDLE = np.zeros((1025, 1, 1), F32)
LATE = np.array([0, 0, 3, 0, 0, 0, 0, 0], np.uint32)
ERRORS: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "name": ("attention", {}, ValueError, "kernel is 'attention'; expected one of attention_forward, "),
    "head": ("attention_forward", {"Q": WIDE, "K": WIDE, "V": WIDE}, Unsupported, "head size is 257; .* at most 256"),
    "no head": ("rope_q", {"Q": WIDE[..., :0]}, ValueError, "the head size is 0"),
    "tokens": ("attention_forward", {"Q": LONG, "K": LONG, "V": LONG}, Unsupported, "65536 tokens; .* at most 65535"),
    "short": (
        "attention_backward_short",
        {"Q": MIDDLE, "K": MIDDLE, "V": MIDDLE, "dO": MIDDLE, "LSE": MIDDLE[..., 0]},
        Unsupported,
        "1025 tokens; attention_backward_short takes at most 1024: run attention_backward",
    ),
    "scale unread": ("rope_q", {"Q": WIDE[..., :4], "scale": 1.0}, TypeError, "got scale; .* it takes only pos"),
    "length unread": (
        "attention_forward",
        {**FORWARD, "cache_len": 3},
        TypeError,
        "got cache_len; .* scale, subgroups",
    ),
    "heads twice": (
        "attention_backward_short_dKdV",
        {
            "Q": FORWARD["Q"],
            "dO": FORWARD["Q"],
            "P_scratch": np.zeros((8, 4, 8), F32),
            "dS_scratch": np.zeros((8, 4, 8), F32),
            "dK": FORWARD["K"],
            "dV": FORWARD["K"],
            "n_kv_heads": 4,
        },
        ValueError,
        "n_kv_heads is 4; expected 2, as dK or dV have it",
    ),
    "seg late": ("attention_forward", {**FORWARD, "seg": LATE}, ValueError, r"seg\[2\] is 3; expected at most 2"),
    "seg dtype": ("attention_forward", {**FORWARD, "seg": LATE.astype(np.int64)}, TypeError, "seg is int64; .* uint32"),
    "seg shape": (
        "attention_forward",
        {**FORWARD, "seg": LATE[:7]},
        ValueError,
        r"seg has shape \[7\]; expected \[T = 8\]",
    ),
    "heads": (
        "attention_forward",
        {**FORWARD, "K": np.zeros((8, 3, 6), F32), "V": np.zeros((8, 3, 6), F32)},
        ValueError,
        "3 kv heads for 4 query heads",
    ),
    "dtype": ("attention_forward", {**FORWARD, "Q": np.zeros((8, 4, 6))}, Unsupported, "Q is float64; .* float32"),
    "rank": ("attention_forward", {**FORWARD, "V": WIDE[0]}, ValueError, r"V has shape \[1, 257\]; expected \[T = 8, "),
    "list": ("rope_q", {"Q": [[1.0]]}, TypeError, "Q is list; expected a NumPy array or a GpuArray"),
    "missing": ("attention_forward", {"Q": WIDE}, TypeError, "lacks K, V; expected Q, K, V, seg"),
    "unknown": ("rope_q", {"Q": WIDE, "bias": WIDE}, TypeError, "rope_q got bias; expected Q"),
    "odd": ("rope_k", {"K": WIDE}, ValueError, "head size is 257; .* even"),
    "offset": ("rope_k", {"K": MIDDLE.repeat(2, 2), "pos_offset": -1}, ValueError, "pos_offset is -1; expected"),
    "base": ("rope_k", {"K": MIDDLE.repeat(2, 2), "rope_base": 0}, ValueError, "rope_base is 0.0; expected"),
    "scale": ("attention_forward", {**FORWARD, "scale": np.inf}, ValueError, "scale is inf; expected a finite"),
    "cache": (
        "attention_decode",
        {"Q_one": WIDE[0, :, :4], "K_cache": WIDE[..., :4], "V_cache": WIDE[..., :4], "cache_len": 5},
        ValueError,
        "cache_len is 5; expected an integer from 0 to 4",
    ),
    "kv heads": (
        "attention_backward_short_dKdV",
        {
            "Q": WIDE[..., :4],
            "dO": WIDE[..., :4],
            "P_scratch": np.zeros((4, 1, 4), F32),
            "dS_scratch": np.zeros((4, 1, 4), F32),
        },
        TypeError,
        "neither dK, dV nor n_kv_heads",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str):
    name, arguments, error, match = ERRORS[case]
    with pytest.raises(error, match=match):
        run(name, **arguments)


def test_seg_on_the_device_is_looked_at(gpu: Gpu):
    with pytest.raises(ValueError, match=r"seg\[2\] is 3"):
        run("attention_forward", **{**FORWARD, "seg": array(LATE, gpu)})


def test_one_array_cannot_be_written_twice(gpu: Gpu):
    x, grad = np.zeros((4, 1, 4), F32), array(np.zeros((4, 1, 4), F32), gpu)
    lse = np.zeros((4, 1), F32)
    with pytest.raises(ValueError, match="got one array as dK and dV"):
        run("attention_backward", Q=x, K=x, V=x, dO=x, LSE=lse, dK=grad, dV=grad)


def test_eight_storage_buffers_are_too_few(gpu: Gpu, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(gpu.limits, texts.STORAGE, 8)  # type: ignore[arg-type]
    monkeypatch.setattr(gpu, "_kernels", {})
    lse = np.zeros((8, 4), F32)
    for name in ("attention_backward", "attention_backward_short"):
        with pytest.raises(Unsupported, match=f"{name} needs 9 storage buffers; this adapter has 8"):
            run(name, **FORWARD, dO=FORWARD["Q"], LSE=lse)
    assert len(run("attention_forward", **FORWARD)) == 2


def test_too_many_keys_for_a_binding(gpu: Gpu, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(gpu.limits, "max-storage-buffer-binding-size", 300)  # type: ignore[arg-type]
    q, cache = FORWARD["Q"][0], FORWARD["K"]
    match = r"K_cache \[8, 2, 6\] has 384 bytes; a binding of .* holds 300: at most 6 of its 8 rows fit"
    with pytest.raises(Unsupported, match=match):
        run("attention_decode", Q_one=q, K_cache=cache, V_cache=cache)
