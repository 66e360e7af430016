"""`attention` and `attention_backward` on JAX's CPU arrays, under `jax.jit`, `jax.grad` and `jax.vmap`.

They are the functions of the same names in `saccade`, with two rules of JAX. The arrays of a mask are part of the
compiled function: they must be concrete while JAX traces, and a traced array is refused. Dropout needs a seed, which may
be a traced uint32 or uint64, because a seed that was drawn during tracing would be the same in every call. There are
first derivatives in reverse mode, and no others.

    from saccade.integrations.jax import attention

    @jax.jit
    def loss(q, k, v):  # [B, T, H, D]
        return attention(q, k, v, saccade.mask.causal()).sum()
"""

from __future__ import annotations

try:
    import jax as _jax  # pyright: ignore[reportUnusedImport] # noqa: F401
except ImportError as error:
    raise ImportError(f"saccade.integrations.jax needs JAX ({error}): pip install 'saccade[jax]'") from error

from ..api import attention, attention_backward

__all__ = ["attention", "attention_backward"]
