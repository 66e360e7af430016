"""What `saccade.integrations.jax` refuses, and its messages."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import saccade
from saccade import Unsupported
from saccade import mask as masks
from saccade.mask import Mask

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy
from saccade.integrations.jax import attention  # noqa: E402

B, T, HQ, HK, D = 2, 70, 4, 2, 16
Q, K, V = (jnp.asarray(np.random.default_rng(h).standard_normal((B, T, h, D), dtype=np.float32)) for h in (HQ, HK, HK))


def traced(make_mask, leaf):
    return jax.jit(lambda x: attention(Q, K, V, make_mask(x)))(leaf)


REFUSED = {
    "documents": (lambda: traced(masks.documents, jnp.zeros(T, int)), TypeError, "unknown while it is traced"),
    "keys": (lambda: traced(masks.keys, jnp.array([T, 20])), TypeError, "unknown while it is traced"),
    "padding": (lambda: traced(masks.padding, jnp.ones((B, T), bool)), TypeError, "unknown while it is traced"),
    "dense": (lambda: traced(masks.from_dense, jnp.ones((T, T), bool)), TypeError, "unknown while it is traced"),
    "array": (lambda: attention(Q, K, V, jnp.ones((T, T), bool)), TypeError, "mask is an array"),
    "keyword": (lambda: attention(Q, K, V, is_causal=True), TypeError, r"mask=saccade.mask.causal\(\)"),
    "numpy": (lambda: attention(Q, np.asarray(K), V), TypeError, "k is ndarray; expected an array of JAX"),
    "integers": (lambda: attention(Q.astype(int), K, V), TypeError, "one dtype"),
    "no seed": (lambda: attention(Q, K, V, dropout=0.1), ValueError, "dropout has no seed"),
    "key": (lambda: attention(Q, K, V, dropout=0.1, seed=jax.random.key(0)), TypeError, "seed is key"),
    "signed": (lambda: jax.jit(lambda s: attention(Q, K, V, dropout=0.1, seed=s))(3), TypeError, "seed is int32"),
    "backend": (lambda: attention(Q, K, V, backend="webgpu"), Unsupported, "computes no arrays of JAX"),
    "descale": (lambda: attention(Q, K, V, descale=(1, 1, 1)), Unsupported, "8-bit floats"),
    "decode": (lambda: saccade.decode(Q, saccade.KVCache(B, T, HK, D)), Unsupported, "decode reads caches"),
    "prune": (
        lambda: attention(Q, K, V, masks.causal(), bias=saccade.gates(-jnp.ones((B, T, HQ)), prune=0.1)),
        TypeError, "prune is given for",
    ),
    "gates": (
        lambda: attention(Q, K, V, masks.causal(), bias=saccade.gates(jnp.ones((B, T, HQ)))),
        ValueError, "none above 0",
    ),
    "bias": (
        lambda: jax.grad(lambda b: attention(Q, K, V, bias=b).sum())(jnp.zeros((1, HQ, T, 1))), ValueError, "detach it",
    ),
    "forward mode": (lambda: jax.jvp(lambda q: attention(q, K, V), (Q,), (Q,)), TypeError, "forward-mode"),
    "hessian": (
        lambda: jax.grad(lambda q: jax.grad(lambda q: attention(q, K, V).sum())(q).sum())(Q),
        Unsupported, "second derivatives are not supported",
    ),
    "symbolic": (
        lambda: jax.export.export(jax.jit(lambda q: attention(q, q, q)))(
            jax.ShapeDtypeStruct((2, *jax.export.symbolic_shape("t"), 4, 16), jnp.float32)
        ),
        Unsupported, "a plan needs integers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    call, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        call()


def test_an_unknown_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from saccade.frameworks import jax as framework

    monkeypatch.setattr(framework, "TAKES", framework.TAKES - {"softcap"})
    for _ in range(2):
        with pytest.raises(Unsupported, match="softcap is not computed for JAX arrays"):
            attention(Q, K, V, softcap=7.25)


def test_concrete_arrays_of_jax_in_masks() -> None:
    ids = jnp.asarray([0] * 30 + [1] * (T - 30))
    assert masks.documents(ids) == masks.documents(np.asarray(ids))
    assert isinstance(masks.keys(jnp.array([3, 4])), Mask)


def test_without_jax() -> None:
    code = "import sys; sys.modules['jax'] = None; import saccade.integrations.jax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: saccade.integrations.jax needs JAX" in done.stderr
    assert "run pip install '.[jax]' in a clone of Saccade" in done.stderr
