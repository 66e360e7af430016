"""The emulator itself: results of a launch, and the mistakes of a kernel that it must report."""

from __future__ import annotations

import numpy as np
import pytest

from saccade.testing.metal import SCHEDULES, Launch, emulate

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
SUM = (
    HEAD
    + """
kernel void total(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
                  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
  threadgroup float shared[64];
  const uint i = thread_index_in_threadgroup;
  shared[i] = x[threadgroup_position_in_grid.x * 64 + i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint n = 32; n > 0; n /= 2) {
    if (i < n) shared[i] += shared[i + n];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (i == 0) y[threadgroup_position_in_grid.x] = shared[0];
}
"""
)
LAUNCH = Launch((128, 1, 1), (64, 1, 1), {"y": ((2,), np.float32)})
X = np.arange(128, dtype=np.float32)
BARRIER = "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
MISTAKES = {
    "a barrier in a branch": (BARRIER, "    if (i < n) threadgroup_barrier(mem_flags::mem_threadgroup);\n", "barrier"),
    "a return before a barrier": (BARRIER, "    if (i > n) return;\n" + BARRIER, "returned"),
    "two barriers": (
        BARRIER,
        "    if (i < n) threadgroup_barrier(mem_flags::mem_threadgroup);\n    else\n  " + BARRIER,
        "different barriers",
    ),
    "a sum of some lanes": (BARRIER, BARRIER + "    if (i < n) shared[i] = simd_sum(0.0f) + shared[i];\n", "diverge"),
    "too much memory": ("shared[64]", "shared[64 * 129]", "too much threadgroup memory"),
    "past the end of a threadgroup array": ("shared[64];", "shared[64];\n  shared[64 + 1] = 0;", "past its end"),
    "past the end of an output": ("if (i == 0) y[", "if (i == 0) y[1 + ", "outside its output"),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_sum_in_every_schedule(schedule) -> None:
    found = emulate(SUM, {"x": X}, LAUNCH, schedule=schedule, seed=5)
    np.testing.assert_array_equal(found["y"], [X[:64].sum(), X[64:].sum()])
    assert found.counts["bytes"] == 256
    assert found.counts["barriers"] == 14


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake) -> None:
    old, new, message = MISTAKES[mistake]
    assert old in SUM
    with pytest.raises(RuntimeError, match=message):
        emulate(SUM.replace(old, new, 1), {"x": X}, LAUNCH)


def test_unwritten_memory_is_nan() -> None:
    found = emulate(SUM.replace("if (i == 0)", "if (i == 99)"), {"x": X}, LAUNCH)
    assert np.isnan(found["y"]).all()
    found = emulate(SUM.replace("shared[i] = x[", "shared[63 - i / 2] = x["), {"x": X}, LAUNCH)
    assert np.isnan(found["y"]).all()


def test_sanitizers() -> None:
    for sanitizer in ("address", "thread"):
        found = emulate(SUM, {"x": X}, LAUNCH, sanitizer=sanitizer)
        np.testing.assert_array_equal(found["y"], [X[:64].sum(), X[64:].sum()])
    with pytest.raises(RuntimeError, match="data race"):
        emulate(SUM.replace(BARRIER, "", 1), {"x": X}, LAUNCH, sanitizer="thread")
    with pytest.raises(RuntimeError, match="heap-buffer-overflow"):
        emulate(SUM.replace("* 64 + i]", "* 64 + i + 1]"), {"x": X}, LAUNCH, sanitizer="address")


@pytest.mark.parametrize("kind", ["half", "bfloat"])
def test_numbers_of_16_bits(kind) -> None:
    text = f"""{HEAD}
kernel void convert(device const float* x [[buffer(0)]], device {kind}* y [[buffer(1)]], device float* z [[buffer(2)]],
                    uint3 thread_position_in_grid [[thread_position_in_grid]]) {{
  const uint i = thread_position_in_grid.x;
  y[i] = {kind}(x[i]);
  z[i] = float(y[i]);
}}
"""
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [rng.standard_normal(500) * 10.0 ** rng.integers(-9, 9, 500), [0, -0.0, np.inf, -np.inf, np.nan]]
    )
    x = x.astype(np.float32)
    carrier, n = np.float16 if kind == "half" else np.uint16, len(x)
    found = emulate(text, {"x": x}, Launch((n, 1, 1), (32, 1, 1), {"y": ((n,), carrier), "z": ((n,), np.float32)}))
    if kind == "half":
        with np.errstate(over="ignore"):
            expected = x.astype(np.float16)
        np.testing.assert_array_equal(found["y"], expected)
    else:
        import ml_dtypes

        expected = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found["z"], expected.astype(np.float32))


@pytest.mark.parametrize("seed", range(4))
def test_matrices_wherever_their_elements_lie(seed) -> None:
    text = f"""{HEAD}
kernel void product(device const float* x [[buffer(0)]], device const half* w [[buffer(1)]],
                    device float* y [[buffer(2)]], device float* transposed [[buffer(3)]],
                    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {{
  simdgroup_float8x8 a;
  simdgroup_half8x8 b;
  simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
  simdgroup_load(a, x, 10);
  simdgroup_load(b, w, 8, ulong2(0, 0), true);
  simdgroup_multiply_accumulate(c, a, b, c);
  simdgroup_store(c, y, 8);
  simdgroup_store(c, transposed, 8, ulong2(0, 0), true);
}}
"""
    text = text.replace(
        "[[buffer(3)]])", "[[buffer(3)]], uint thread_index_in_simdgroup [[thread_index_in_simdgroup]])"
    )
    rng = np.random.default_rng(seed)
    x, w = rng.integers(-9, 9, (8, 10)).astype(np.float32), rng.integers(-9, 9, (8, 8)).astype(np.float16)
    out = dict.fromkeys(("y", "transposed"), ((8, 8), np.float32))
    found = emulate(text, {"x": x, "w": w}, Launch((32, 1, 1), (32, 1, 1), out), seed=seed)
    np.testing.assert_array_equal(found["y"], x[:, :8] @ w.astype(np.float32).T + 1)
    np.testing.assert_array_equal(found["transposed"], found["y"].T)


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="reads \\['x'\\] and writes \\['y'\\]"):
        emulate(SUM, {"z": X}, LAUNCH)
    with pytest.raises(ValueError, match="schedule is 'sideways'"):
        emulate(SUM, {"x": X}, LAUNCH, schedule="sideways")
    with pytest.raises(ValueError, match="has no kernel"):
        emulate("void f() {}", {}, LAUNCH)
    with pytest.raises(ValueError, match="no attribute"):
        emulate("kernel void f(device float* x) {}", {}, LAUNCH)
    with pytest.raises(RuntimeError, match="does not compile"):
        emulate(SUM.replace("shared[0]", "shard[0]"), {"x": X}, LAUNCH)


def test_several_python_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: emulate(SUM, {"x": X}, LAUNCH, schedule="interleaved"), range(40)):
            np.testing.assert_array_equal(found["y"], [X[:64].sum(), X[64:].sum()])
