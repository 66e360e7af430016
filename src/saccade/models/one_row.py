"""A step of a Llama for one prompt on an NVIDIA GPU: few kernels for each layer, which start before the last one ends.

Their order is that of `Llama.hidden`. What a step needs besides weights and caches is allocated once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from .. import api
from ..caches.contiguous import KVCache
from ..captures import keep_captured
from .blocks import Attention, Block, Linear, RMSNorm, SwiGLU
from .llama import Llama, LlamaStack

if TYPE_CHECKING:
    from ..backends.triton.kernels.one_row import Row, Weight


# the modules of a block, in their order, and those around the blocks
BLOCK = [Block, RMSNorm, Attention, *[Linear] * 4, *[nn.Identity] * 2, RMSNorm, SwiGLU, *[Linear] * 3]
AROUND = [Llama, LlamaStack, nn.Embedding, RMSNorm]


def step_of(model: Any, caches: Sequence[Any], backend: str | None) -> Callable[[Tensor], Tensor] | None:
    """A function from the last token, int64 [1], to the logits [1, vocab] of the next; None if it is not supported.

    It appends the token to the caches and adds 1 to their lengths, which must be one array.
    """
    if model.device.type != "cuda" or torch.version.hip or backend not in (None, "triton"):
        return None
    one = all(type(cache) is KVCache and not cache.quantised and len(cache.lengths) == 1 for cache in caches)
    if not (one and is_plain(model)):
        return None
    tensors = [*model.parameters(), *(cache.k for cache in caches)]
    alike = {(x.dtype, x.device, x.is_contiguous()) for x in tensors} == {(tensors[0].dtype, model.device, True)}
    return OneRow(model, caches).logits if alike and tensors[0].itemsize < 8 else None


def is_plain(model: Any) -> bool:
    """Whether a model is a Llama of its own modules, and none of them has a hook or a changed method."""
    if type(model) is not Llama or any(map(_changed, model.modules())):
        return False
    stack, head = model.model, model.lm_head
    around = [type(module) for module in (model, stack, stack.embed_tokens, stack.norm)] == AROUND
    blocks = all([type(module) for module in block.modules()] == BLOCK for block in model.blocks)
    return around and blocks and (head is None or type(head) is Linear)


def _changed(module: nn.Module) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]
    return bool(hooks) or any(callable(getattr(type(module), name, None)) for name in vars(module))


class OneRow:
    """The step and its arrays."""

    def __init__(self, model: Llama, caches: Sequence[KVCache]) -> None:
        from ..backends.triton import one_row

        self.kernels, self.model, self.caches = one_row, model, caches
        config, self.lengths = model.config, caches[0].lengths
        assert all(cache.lengths is self.lengths for cache in caches)
        cos, sin = model.turn(torch.arange(caches[0].capacity, device=model.device))
        self.turn = cos.flatten(1).float(), sin.flatten(1).float()
        new = caches[0].k.new_empty
        self.q = new(config.num_attention_heads, config.head_dim)
        self.x, self.y = new(config.hidden_size), new(config.hidden_size)
        self.hidden, self.out = new(config.intermediate_size), new(config.vocab_size)
        self.arrays = *self.turn, self.q, self.x, self.y, self.hidden, self.out

    @torch.no_grad()
    def logits(self, token: Tensor) -> Tensor:
        """int64 [1] -> [1, vocab]."""
        model, kernels = self.model, self.kernels
        # a graph outlives this object
        keep_captured(self.arrays, model.device)
        self.lengths += 1
        torch.index_select(model.model.embed_tokens.weight, 0, token, out=self.x[None])
        for block, cache in zip(model.blocks, self.caches, strict=True):
            attention, mlp = cast("Attention", block.self_attn), cast("SwiGLU", block.mlp)
            qkv = [self._weight(one) for one in (attention.q_proj, attention.k_proj, attention.v_proj)]
            cached = cache.k, cache.v, self.lengths
            kernels.project(self._normed(block.input_layernorm), qkv, self.turn, cached, self.q)
            attended = api.decode(self.q[None, None], cache, mask=model.mask, backend="triton")
            kernels.product(kernels.Row(attended.flatten()), self._weight(attention.o_proj), self.y, self.x)
            gate, up = self._weight(mlp.gate_proj), self._weight(mlp.up_proj)
            kernels.gated(self._normed(block.post_attention_layernorm, self.y), gate, up, self.hidden)
            kernels.product(kernels.Row(self.hidden), self._weight(mlp.down_proj), self.x, self.y)
        head = model.model.embed_tokens if model.lm_head is None else model.lm_head
        kernels.product(self._normed(model.model.norm), self._weight(head), self.out)
        return self.out[None]

    def _normed(self, norm: RMSNorm, x: Tensor | None = None) -> Row:
        return self.kernels.Row(self.x if x is None else x, norm.weight, norm.eps)

    def _weight(self, module: Any) -> Weight:
        return self.kernels.Weight(module.weight, getattr(module, "bias", None))
