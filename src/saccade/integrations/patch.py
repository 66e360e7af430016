"""`saccade.patch_sdpa`, which imports torch when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .sdpa_mode import SdpaMode


def patch_sdpa(*, backend: str | None = None) -> SdpaMode:
    """A context in which torch's `scaled_dot_product_attention` is computed by Saccade. It also decorates functions.

        with saccade.patch_sdpa():
            loss = model(x).sum()
            loss.backward()

    It is a `torch.overrides.TorchFunctionMode`: no module is changed, and it does not matter how the model imported
    the function. `saccade.integrations.sdpa.scaled_dot_product_attention` computes each call, and what that function
    refuses raises there. Nothing falls back to torch's kernels. Contexts nest, and the innermost one decides.

    - `torch.nn.MultiheadAttention` and `torch.nn.TransformerEncoder` do not use their fused operators of eval mode in
      the context, so Saccade computes their attention too. The output at padded positions, where a fused operator
      writes zeros, then contains other numbers.
    - A module compiled by `torch.compile` is traced again at its first call in the context, and then contains Saccade's
      operator. Contexts with the same backend share what was compiled.
    - Activation checkpoints run the forward again during the backward, so call `backward` inside the context. Outside,
      checkpoints with `use_reentrant=False` raise. Those with `use_reentrant=True` compute the gradient with torch's
      kernels, and with dropout that gradient is wrong.

    torch still computes these calls:

    - from other threads, because a context belongs to the thread that entered it (`torch.nn.DataParallel` uses others);
    - of `torch.nn.MultiheadAttention` with need_weights=True, its default, because it does not call the function then;
    - of a `torch.nn.TransformerEncoderLayer` that `torch.compile` traces in eval mode without gradients, because its
      fused operator is compiled; `torch.backends.mha.set_fastpath_enabled(False)` turns that off;
    - from C++: scripted modules, and operators of `torch.ops.aten` that are called by name.

    Every call of a torch function takes a few microseconds more in the context.

    Args:
        backend: as in `saccade.attention`.

    Raises:
        Unsupported: for nested tensors, and under `torch.jit.trace`, when attention is called.

    Examples:
        >>> query = key = value = torch.randn(2, 8, 1024, 64)
        >>> with saccade.patch_sdpa():
        ...     o = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    """
    from .sdpa_mode import mode

    return mode(backend)
