"""`attention` and `attention_backward` on JAX's CPU arrays, under `jax.jit`, `jax.grad` and `jax.vmap`.

They are the functions of the same names in `saccade`, with two rules of JAX. The arrays of a mask become a part of the
compiled function, so they must have numbers while JAX traces; a traced array is refused. Dropout needs a seed, because
a seed that was drawn while JAX traces would be the same in every call; it may be a traced uint32 or uint64. There are
first derivatives in reverse mode, and no others.

    from saccade.integrations.jax import attention

    @jax.jit
    def loss(q, k, v):  # [B, T, H, D]
        return attention(q, k, v, saccade.mask.causal()).sum()
"""

from __future__ import annotations

from ..errors import how_to_install

try:
    # registers the handlers, for programs that are loaded
    from ..frameworks import jax as _jax  # pyright: ignore[reportUnusedImport] # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(f"saccade.integrations.jax needs JAX ({error}): {how_to_install('jax')}") from error

from ..api import attention, attention_backward

__all__ = ["attention", "attention_backward"]
