"""The requirements of a kernel, read from its text without a device: sizes by WGSL's rules, bindings, calls, limits."""

from __future__ import annotations

import jinja2
import pytest

pytest.importorskip("wgpu")

from saccade import Unsupported
from saccade.backends.webgpu import texts
from saccade.backends.webgpu.catalogue import catalogue, recurrent_kernels
from saccade.backends.webgpu.wgsl import parse

# limits that WebGPU guarantees on every adapter
LEAST = {texts.STORAGE: 8, texts.MEMORY: 16384, texts.THREADS: 256}
MOST = {texts.STORAGE: 10, texts.MEMORY: 49152, texts.THREADS: 1024}
EVERYTHING = frozenset({"shader-f16", "subgroup"})
# bytes of workgroup memory of the documented kernels
DOCUMENTED = {
    "attention_forward": 4104,
    "attention_backward_short": 11264,
    "attention_backward_short_dKdV": 2048,
    "attention_backward": 6148,
}

TYPES = """
const A = 3u;
const B: u32 = A * (2u + 0x10u) / 4u - 1u; // 12
const_assert B == 12u;
alias V = vec4<f16>;
struct Inner { x: f32, v: vec3<f32>, }
struct Outer { a: Inner, @align(32) b: array<vec3<u32>, 2>, @size(16) c: f16, d: array<array<V, A>, B> }
"""
REACH = """
enable f16;
@group(0) @binding(1) var<storage, read_write> y: array<atomic<u32>>;
@group(0) @binding(0) var<storage> x: array<f16>;
@group(0) @binding(2) var<uniform> given: vec4<u32>;
var<workgroup> far: array<f32, 100>;
var<workgroup> near: u32; // far is reached through two calls, and so is
/* var<workgroup> never: array<f32, 9999>; */
var<workgroup> other: array<f32, 5000>;
fn deep(a: u32) -> f32 { if (a > 0u) { return far[a]; } return 0.0; }
fn helper() { near = u32(deep(1u)); }
fn unused() { other[0] = subgroupAdd(1.0); }
@compute @workgroup_size(8, B)
fn main(@builtin(local_invocation_index) l: u32) { helper(); atomicAdd(&y[0], near + u32(x[0]) + given.x); }
@compute @workgroup_size(64) fn second() { unused(); }
const B = min(4u, 7u);
"""


@pytest.mark.parametrize(
    "declared, size",
    [
        ("u32", 4), ("bool", 4), ("f16", 2), ("atomic<i32>", 4), ("V", 8), ("vec2f", 8), ("vec3<f32>", 12),
        ("vec4h", 8), ("array<f32, 5>", 20), ("array<vec3<f32>, 2>", 32), ("array<f16, B>", 24),
        ("mat2x3<f32>", 32), ("mat4x4f", 64), ("mat3x2<f16>", 12), ("Inner", 32), ("array<V, 1 << 4>", 128),
        ("Outer", 32 + 32 + 16 + 8 * 36 + 16), ("array<u32, select(2u, 3u, A > 2u)>", 12),
    ],
)  # fmt: skip
def test_sizes(declared: str, size: int):
    assert parse(TYPES).size(declared) == size


def test_what_cannot_be_read_is_named():
    with pytest.raises(ValueError, match="the type 'texture_2d<f32>'"):
        parse(TYPES).size("texture_2d<f32>")
    with pytest.raises(ValueError, match=r"not a constant.*: countOneBits\(7\)"):
        parse(TYPES).value("countOneBits(7u)")
    with pytest.raises(ValueError, match="override"):
        parse("override n: u32;")
    with pytest.raises(ValueError, match="no entry point 'main'"):
        texts.check(TYPES, "main", LEAST)
    with pytest.raises(ValueError, match="no @workgroup_size"):
        texts.check(REACH, "deep", LEAST)
    with pytest.raises(ValueError, match="numbered from 0 without gaps"):
        texts.check(REACH.replace("@binding(2)", "@binding(3)"), "main", LEAST)


def test_only_what_the_entry_reaches_counts():
    kernel = texts.check(REACH, "main", LEAST, EVERYTHING, "reach")
    assert (kernel.workgroup_bytes, kernel.storage, kernel.threads) == (404, 2, (8, 4, 1))
    assert kernel.bindings == ("read-only-storage", "storage", "uniform")
    assert kernel.label == "reach"


def test_what_is_missing_is_named_with_what_is_there():
    texts.check(REACH, "main", LEAST, {"shader-f16"})
    with pytest.raises(Unsupported) as refused:
        texts.check(REACH, "second", LEAST, frozenset())
    assert [reason.partition(";")[0] for reason in refused.value.reasons] == [
        "second needs 20000 bytes of workgroup memory",
        "second needs the feature shader-f16, which this adapter lacks",
        "second needs the feature subgroup, which this adapter lacks",
    ]
    with pytest.raises(Unsupported, match="main needs 2 storage buffers; this adapter has 1"):
        texts.check(REACH, "main", {**LEAST, texts.STORAGE: 1})
    # a limit counts each variable in 16-byte units
    with pytest.raises(Unsupported, match="main needs 416 bytes of workgroup memory; this adapter has 404"):
        texts.check(REACH, "main", {**LEAST, texts.MEMORY: 404})
    with pytest.raises(Unsupported, match="main needs 32 invocations per workgroup; this adapter has 16"):
        texts.check(REACH, "main", {**LEAST, texts.THREADS: 16})


def test_a_template_without_a_constant_raises(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "tiled").mkdir()
    (tmp_path / "tiled" / "one.wgsl").write_text("const N = {{ n }}u;\n{% if f16 %}\nenable f16;\n{% endif %}\n")
    monkeypatch.setattr(texts, "KERNELS", tmp_path)
    texts._environment.cache_clear()
    try:
        assert texts.render("one", n=3, f16=True) == "const N = 3u;\nenable f16;\n"
        with pytest.raises(jinja2.UndefinedError, match="'f16' is undefined"):
            texts.render("one", n=3)
    finally:
        texts._environment.cache_clear()


@pytest.mark.parametrize("subgroups", [False, True])
@pytest.mark.parametrize("name", DOCUMENTED)
def test_workgroup_memory_of_the_documented_set(name: str, subgroups: bool):
    if not subgroups:
        assert texts.check(texts.kernel_source(name), name, MOST).workgroup_bytes == DOCUMENTED[name]
    assert texts.check(texts.kernel_source(name, subgroups=subgroups), name, MOST, EVERYTHING).threads[0] <= 256


def test_every_kernel_fits_what_it_may_use():
    for name, text in catalogue().items():
        for entry in parse(text).entries():
            assert texts.check(text, entry, MOST, EVERYTHING, name).storage <= 10


def test_kernels_of_recurrences_fit_every_adapter():
    for name, text in recurrent_kernels().items():
        for entry in parse(text).entries():
            texts.check(text, entry, LEAST, frozenset(), name)
