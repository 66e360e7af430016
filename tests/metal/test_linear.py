"""Linear attention: every schedule and dtype, sanitizers, sizes of tiles, MLX's arrays and composed texts."""

from __future__ import annotations

import numpy as np
import pytest

from saccade import Unsupported, recurrent
from saccade.backends.metal import recurrent as linear
from saccade.backends.metal.shapes import MEMORY
from saccade.testing import recurrent as run
from saccade.testing.compare import require
from saccade.testing.metal import SCHEDULES
from saccade.testing.recurrent import Sizes

from .mutants import LINEAR_PROBLEMS


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("problem", LINEAR_PROBLEMS)
def test_every_schedule(emulator, problem, dtype) -> None:
    """The same bits, however matrix elements are distributed over lanes."""
    name, sizes = LINEAR_PROBLEMS[problem]
    op = run.by_name(name)
    arrays = run.make(op, sizes, dtype, 2)
    given = run.cotangents(run.expected(op, arrays), dtype)
    first: dict[str, np.ndarray] = {}
    for n, schedule in enumerate(SCHEDULES):
        emulator(schedule=schedule, seed=n)
        got = run.computed(op, arrays, "metal", given)
        first = first or got
        for key, x in got.items():
            np.testing.assert_array_equal(x, first[key], err_msg=f"{key} {schedule}")
    require(run.compare(op, arrays, first, dtype, given), f"{problem} {dtype}")


@pytest.mark.sample(1)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize("problem", LINEAR_PROBLEMS)
def test_sanitized(emulator, problem, sanitizer) -> None:
    name, sizes = LINEAR_PROBLEMS[problem]
    emulator(sanitizer=sanitizer)
    require(run.verify(run.by_name(name), sizes, "float32", "metal", 2), f"{problem} {sanitizer}")


@pytest.mark.parametrize("mutated", [False, True])
def test_what_is_no_number_stays_after_its_token(emulator, mutated) -> None:
    """Without the careful path, an infinite value is multiplied by weights of 0 in its whole chunk."""
    change = ("if (any_spoiled(spoiled))", "if (false)")
    emulator(change=(lambda text: text.replace(*change)) if mutated else None)
    op = run.by_name("linear-sums")
    arrays = run.make(op, Sizes(2, 41, 2, 1, 8, 12), "float32")
    arrays["v"][:, 21] = np.inf
    o = run.computed(op, arrays, "metal")["o"]
    assert np.isfinite(o[:, :21]).all() != mutated
    assert not np.isfinite(o[:, 21:]).any()


def test_every_tile_fits() -> None:
    for T in (1, 7, 8, 9, 31, 33, 4096):
        for rows in range(1, 1025, 3):
            for columns in (1, 8, 31, 64, 1024, rows):
                for states in (False, True):
                    made = linear.shape(T, rows, columns, states)
                    assert made.bytes <= MEMORY // 2
                    assert made.registers <= 32


@pytest.mark.parametrize("sizes", [Sizes(1, 9, 1, 1, 40, 5), Sizes(1, 40, 1, 1, 8, 40)])
def test_bytes_are_counted_right(emulator, sizes) -> None:
    made = emulator()
    run.computed(run.by_name("linear-plain"), run.make(run.by_name("linear-plain"), sizes, "float32"), "metal")
    both = [linear.shape(sizes.T, sizes.K, sizes.V, states).bytes for states in (False, True)]
    assert max(both) - 128 <= made.bytes <= max(both)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scalar_decay", "a decay g is not computed here"),
        ("delta_rule", "the delta rule is not computed here"),
        ("linear-taylor", "the Taylor map is computed only on the CPU"),
    ],
)
def test_what_has_no_kernel(emulator, name, message) -> None:
    emulator()
    op = run.by_name(name)
    with pytest.raises(Unsupported, match=message):
        run.computed(op, run.make(op, Sizes(T=3), "float32"), "metal")


def plain(mx, q, k, v):
    """[B, T, H, V] computed from the T x T weights."""
    q, k, v = (x.astype(mx.float32).swapaxes(1, 2) for x in (q, k, v))
    q, k = (mx.where(x > 0, x + 1, mx.exp(mx.minimum(x, 0))) for x in (q, k))
    q, k = (mx.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q, k))
    weights = mx.tril(q @ k.swapaxes(2, 3))
    return (weights @ v / weights.sum(-1, keepdims=True)).swapaxes(1, 2)


@pytest.mark.parametrize("backend", [None, "metal"])
def test_arrays_of_mlx(emulator, backend) -> None:
    """Values and gradients, by the CPU core on MLX's CPU device and by the Metal kernels in the emulator."""
    mx = pytest.importorskip("mlx.core")
    emulator()
    rng = np.random.default_rng(0)
    # sizes whose kernels other tests compile too
    shapes = ((2, 41, 1, 40), (2, 41, 1, 40), (2, 41, 2, 13))
    arrays = [mx.array(rng.standard_normal(s).astype(np.float32)) for s in shapes]

    def ours(q, k, v):
        return (recurrent.linear_attention(q, k, v, backend=backend) ** 2).sum()

    o, (S, z) = recurrent.linear_attention(*arrays, return_state=True, backend=backend)
    assert (S.shape, z.shape) == ((2, 2, 40, 13), (2, 2, 40))
    np.testing.assert_allclose(np.array(o), np.array(plain(mx, *arrays)), atol=2e-6)
    expected = mx.grad(lambda *x: (plain(mx, *x) ** 2).sum(), argnums=(0, 1, 2))(*arrays)
    for a, b in zip(mx.grad(ours, argnums=(0, 1, 2))(*arrays), expected, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), atol=2e-5)
    head, rest = ([x[:, part] for x in arrays] for part in (slice(0, 13), slice(13, None)))
    _, state = recurrent.linear_attention(*head, return_state=True, backend=backend)
    later = recurrent.linear_attention(*rest, initial_state=state, backend=backend)
    np.testing.assert_allclose(np.array(later), np.array(o[:, 13:]), atol=2e-6)


def test_errors_with_arrays_of_mlx() -> None:
    mx = pytest.importorskip("mlx.core")
    q, v = mx.zeros((1, 4, 1, 8)), mx.zeros((1, 4, 1, 8))
    with pytest.raises(TypeError, match="k is ndarray; expected an array of MLX"):
        recurrent.linear_attention(q, np.zeros((1, 4, 1, 8), np.float32), v)
    with pytest.raises(TypeError, match="expected float32, float16 or bfloat16"):
        recurrent.linear_attention(q.astype(mx.int32), q, v)
    with pytest.raises(ValueError, match=r"outside mx\.compile"):
        mx.compile(recurrent.linear_attention)(q, q, v)
