"""The device on one driver: upload and download, order of steps, limits, and errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import wgpu

from saccade import Unsupported
from saccade.backends.webgpu import adapters, device
from saccade.backends.webgpu.arrays import CARRIED, GpuArray, array, empty, write_slots
from saccade.backends.webgpu.device import Gpu
from saccade.backends.webgpu.step import Step

AXPY = """
struct Given { n: u32, a: f32 }
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
@group(0) @binding(2) var<uniform> given: Given;
@compute @workgroup_size(64)
fn axpy(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x < given.n) { y[id.x] = y[id.x] + given.a * x[id.x]; }
}
"""
LONG_LOOP = """
@group(0) @binding(0) var<storage, read_write> turns: array<u32>;
@compute @workgroup_size(1)
fn main() {
  var done = 0u;
  for (var i = 0u; i < turns[0]; i++) { for (var j = 0u; j < turns[1]; j++) { done += turns[2]; } }
  turns[3] = done;
}
"""


def given(gpu: Gpu, n: int, a: float) -> object:
    return gpu.uniform(np.uint32(n).tobytes() + np.float32(a).tobytes())


@pytest.fixture
def second(gpu: Gpu) -> Iterator[Gpu]:
    """Another device of the same adapter, which the test loses."""
    found = [a for a in wgpu.gpu.enumerate_adapters_sync() if adapters.describe(a) == gpu.described]
    return Gpu(found[0])


def test_is_the_adapter_that_was_asked_for(gpu: Gpu, pytestconfig: pytest.Config):
    assert pytestconfig.getoption("--webgpu") in gpu.described.lower()
    assert gpu.backend in ("Vulkan", "Metal", "D3D12")
    assert device.open_gpu() is gpu
    assert device.open_gpu(gpu.name) is gpu


def test_limits_are_portable(gpu: Gpu):
    assert 8 <= gpu.limits["max-storage-buffers-per-shader-stage"] <= 10
    assert gpu.limits["min-storage-buffer-offset-alignment"] == 256
    assert gpu.limits["max-bind-groups"] == 4
    assert gpu.features <= set(adapters.FEATURES)


@pytest.mark.parametrize("turns", [(200_000, 1), (1000, 1000), (1, 200_000)])
def test_loops_run_to_their_end(gpu: Gpu, turns: tuple[int, int]):
    buffer = gpu.upload(np.array([*turns, 1, 0], np.uint32))
    gpu.run([Step(gpu.kernel(LONG_LOOP, "main"), [buffer], (1, 1, 1))])
    assert gpu.download(buffer, np.uint32, (4,))[3] == turns[0] * turns[1]
    assert adapters.loops_are_whole(gpu)


@pytest.mark.parametrize("dtype", CARRIED)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (5, 7), (2, 3, 4, 5), (4099,)])
def test_arrays_come_back(gpu: Gpu, rng: np.random.Generator, dtype: str, shape: tuple[int, ...]):
    x = np.asarray(rng.integers(0, 1000, shape)).astype(dtype)
    x.flags.writeable = False
    there = array(x, gpu)
    assert (there.shape, there.dtype, there.size, there.nbytes, there.ndim) == (
        x.shape, x.dtype, x.size, x.nbytes, x.ndim,
    )  # fmt: skip
    np.testing.assert_array_equal(there.numpy(), x)
    np.testing.assert_array_equal(array(x.T, gpu).numpy(), x.T)
    assert array(there) is there


def test_long_arrays_come_back_in_pieces(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator):
    monkeypatch.setattr("saccade.backends.webgpu.memory.CHUNK", 4096)
    x, y = rng.random(5001, dtype=np.float32), rng.random(700, dtype=np.float32)
    reads = [(gpu.upload(a), a.dtype, a.shape) for a in (x, y)]
    for back, a in zip(gpu.call([], reads)[0], (x, y), strict=True):
        np.testing.assert_array_equal(back, a)


def test_arrays_of_the_device(gpu: Gpu):
    x = array(np.arange(12, dtype=np.float32), gpu)
    assert x.reshape(3, -1).shape == (3, 4)
    assert x.reshape(3, 4).buffer is x.buffer
    np.testing.assert_array_equal(x.reshape(3, 4).numpy(), np.arange(12).reshape(3, 4))
    with pytest.raises(ValueError, match="expected one of 12 elements"):
        x.reshape(5, 2)
    assert x.reshape((4, -1)).shape == (4, 3)
    with pytest.raises(TypeError, match="float64; expected one of float32"):
        array(np.zeros(3), gpu)
    with pytest.raises(TypeError, match="foreign byte order >f4; expected native"):
        array(np.zeros(3, ">f4"), gpu)
    assert not empty((2, 3), gpu=gpu).numpy().any()


def test_impossible_shapes_are_refused(gpu: Gpu):
    x, none = array(np.arange(12, dtype=np.float32), gpu), empty((0, 3), gpu=gpu)
    below = "expected sizes of at least 0"
    for refused in (
        lambda: x.reshape(-2, -6), lambda: x.reshape(-3, -1), lambda: x.reshape(-1, -1, 12),
        lambda: none.reshape(0, -1), lambda: x.first((-2, -3)), lambda: empty((-2, -3), gpu=gpu),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=below):
            refused()
    with pytest.raises(TypeError, match="float"):
        x.reshape(3.0, 4.0)
    for many in (none.reshape, lambda *shape: x.first(shape)):
        with pytest.raises(ValueError, match="shape is"):
            many(1 << 32, 1 << 32)
    with pytest.raises(Unsupported, match="an array has"):
        empty((1 << 32, 1 << 32), gpu=gpu)


def test_numpy_converts_arrays_of_the_device(gpu: Gpu):
    x = np.arange(12, dtype=np.float32)
    np.testing.assert_array_equal(np.asarray(array(x, gpu)), x)
    assert np.asarray(array(x, gpu), np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="copied from the device"):
        array(x, gpu).__array__(copy=False)


def test_bfloat16_is_widened(gpu: Gpu):
    values = [1.0, -2.5, 3e38]
    ml_dtypes, torch = pytest.importorskip("ml_dtypes"), pytest.importorskip("torch")
    for x in (np.array(values, ml_dtypes.bfloat16), torch.tensor(values, dtype=torch.bfloat16)):
        there = array(x, gpu)
        assert there.dtype == np.float32
        np.testing.assert_allclose(there.numpy(), values, rtol=0.01)


def test_storage_returns_to_the_pool_and_is_zero_again(gpu: Gpu):
    x = array(np.ones(12345, np.float32), gpu)
    view, buffer = x.reshape(-1, 1), x.buffer
    del x
    assert view.numpy().all()
    del view
    again = gpu.buffer(4 * 12345)
    assert again is buffer
    assert not gpu.download(again, np.float32, (12345,)).any()
    gpu.release(again)
    np.testing.assert_array_equal(array(np.full(12345, 2, np.float32), gpu).numpy(), 2)


def test_storage_released_unused_is_not_zeroed_under_its_next_owner(gpu: Gpu):
    gpu.release(gpu.upload(np.ones(777, np.float32)))
    gpu.release(gpu.buffer(4 * 777))
    np.testing.assert_array_equal(array(np.ones(777, np.float32), gpu).numpy(), 1)


def test_a_failed_copy_leaves_the_zeroing_to_the_next(gpu: Gpu):
    gpu.release(gpu.upload(np.ones(999, np.float32)))
    again, one = empty((999,), gpu=gpu), array(np.ones((2, 4), np.float32), gpu)
    with pytest.raises(wgpu.GPUError):
        gpu.copy([(one.buffer, 0, one.buffer, 16, 16)])
    assert not again.numpy().any()
    with pytest.raises(ValueError, match="copied into itself; expected two buffers"):
        write_slots(one.reshape(2, 1, 4), one, np.array([1, 0]))


def test_steps_see_those_before_them(gpu: Gpu, rng: np.random.Generator):
    x = rng.random(1000, dtype=np.float32)
    kernel = gpu.kernel(AXPY, "axpy")
    a, b = gpu.upload(x), gpu.buffer(x.nbytes)
    steps = [Step(kernel, pair, (16, 1, 1)) for pair in [(a, b, given(gpu, 1000, 2)), (b, a, given(gpu, 1000, 1))] * 2]
    (there, back), seconds = gpu.call(steps, [(a, x.dtype, x.shape), (b, x.dtype, x.shape)])
    assert seconds is None
    np.testing.assert_allclose(there, 11 * x, rtol=1e-6)
    np.testing.assert_allclose(back, 8 * x, rtol=1e-6)


def test_steps_are_timed(gpu: Gpu):
    x = gpu.buffer(4000)
    steps = [Step(gpu.kernel(AXPY, "axpy"), (gpu.buffer(4000), x, given(gpu, 1000, 1)), (16, 1, 1))] * 3
    if gpu.timed:
        seconds = gpu.run(steps, timed=True)
        assert seconds is not None
        assert len(seconds) == 3
        assert all(0 <= s < 10 for s in seconds)
        assert gpu.run([], timed=True) == []
    else:
        with pytest.raises(Unsupported, match="timestamp-query"):
            gpu.run(steps, timed=True)


def test_a_part_of_a_buffer_can_be_bound(gpu: Gpu):
    x, y = gpu.upload(np.arange(200, dtype=np.float32)), gpu.buffer(400)
    gpu.run([Step(gpu.kernel(AXPY, "axpy"), [(x, 256, 400), y, given(gpu, 100, 1)], (2, 1, 1))])
    np.testing.assert_array_equal(gpu.download(y, np.float32, (100,)), np.arange(64, 164))


def test_pipelines_groups_and_uniforms_are_kept(gpu: Gpu):
    x, y = gpu.buffer(400), gpu.buffer(400)
    assert given(gpu, 100, 1) is given(gpu, 100, 1)
    step = Step(gpu.kernel(AXPY, "axpy"), [x, y, given(gpu, 100, 1)], (2, 1, 1))
    gpu.run([step])
    before = len(gpu._pipelines), len(gpu._groups)
    gpu.run([step, Step(gpu.kernel(AXPY, "axpy"), [x, y, given(gpu, 100, 1)], (1, 1, 1))])
    assert (len(gpu._pipelines), len(gpu._groups)) == before


def test_too_much_is_refused_by_name(gpu: Gpu, monkeypatch: pytest.MonkeyPatch):
    kernel, x, y = gpu.kernel(AXPY, "axpy", "axpy"), gpu.buffer(4096), gpu.buffer(4096)
    with pytest.raises(Unsupported, match=r"axpy needs \(65536, 1, 1\) workgroups; at most 65535"):
        gpu.run([Step(kernel, [x, y, given(gpu, 1, 1)], (65536, 1, 1))])
    with pytest.raises(Unsupported, match=r"a buffer of .* holds at most"):
        gpu.buffer(gpu.limits["max-buffer-size"] + 1)
    with pytest.raises(ValueError, match="axpy got 2 bindings; expected 3"):
        gpu.run([Step(kernel, [x, y], (1, 1, 1))])
    monkeypatch.setitem(gpu.limits, "max-storage-buffer-binding-size", 1024)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match=r"binding 0 of axpy has 4096 bytes; .* binds at most 1024"):
        gpu.run([Step(kernel, [x, gpu.buffer(512), given(gpu, 1, 1)], (1, 1, 1))])


def test_a_wrong_text_names_its_kernel(gpu: Gpu):
    wrong = AXPY.replace("y[id.x] +", "y[id.y.x] +")
    with pytest.raises(RuntimeError, match="refuses the kernel wrong"):
        gpu.run([Step(gpu.kernel(wrong, "axpy", "wrong"), [gpu.buffer(4), gpu.buffer(4), given(gpu, 1, 1)], (1, 1, 1))])


def test_a_lost_device_says_so_and_is_opened_anew(second: Gpu, monkeypatch: pytest.MonkeyPatch):
    wanted = second.described.lower()
    monkeypatch.setattr(device, "_opened", {wanted: second})
    x = array(np.ones(3, np.float32), second)
    second._device.destroy()
    with pytest.raises(RuntimeError, match=r"is lost.*call again"):
        x.numpy()
    anew = device.open_gpu(wanted)
    assert anew is not second
    np.testing.assert_array_equal(array(np.ones(3, np.float32), anew).numpy(), 1)


def test_arrays_of_another_device_are_refused(gpu: Gpu, second: Gpu):
    with pytest.raises(ValueError, match="lives on"):
        array(array(np.ones(3, np.float32), second), gpu)


def test_four_threads_on_one_device(gpu: Gpu):
    wrong: list[object] = []

    def work(a: float) -> None:
        x = np.full(3000, a, np.float32)
        for _ in range(10):
            there, out = array(x, gpu), empty((3000,), gpu=gpu)
            step = Step(gpu.kernel(AXPY, "axpy"), [there.buffer, out.buffer, given(gpu, 3000, a)], (47, 1, 1))
            (back,), _ = gpu.call([step], [(out.buffer, np.float32, (3000,))])
            if not np.array_equal(back, x * x):
                wrong.append(back)

    threads = [threading.Thread(target=work, args=(a,)) for a in (1.0, 2.0, 3.0, 4.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_kept_arrays_print(gpu: Gpu):
    text = repr(array(np.ones((2, 3), np.float16), gpu))
    assert text.startswith("GpuArray(shape=(2, 3), dtype=float16")
    assert isinstance(array(np.ones(2, np.float32), gpu), GpuArray)
