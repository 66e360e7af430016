"""The attention weights of every head of a stack on one text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from .. import api
from ..mask import Mask
from . import blocks, deepseek, gpt2


@torch.no_grad()
def attended(model: blocks.Decoder, tokens: Sequence[int], backend: str | None = None) -> np.ndarray:
    """The weights [layers, Hq, T, T] of a stack's attention layers on one sequence of T tokens, T at most 256.

    Layers without attention are omitted, and a stack of these alone raises ValueError. With the identity as v, the
    outputs are the weights: o[i] = Σ_j p[i, j] e_j.
    """
    heads: list[np.ndarray] = []

    def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        mask = next(x for x in inputs if isinstance(x, Mask))
        project = cast("gpt2.Attention | blocks.Attention | deepseek.LatentAttention", module).project
        q, k, _ = project(*inputs[: 1 if isinstance(module, gpt2.Attention) else 2])
        if isinstance(module, deepseek.LatentAttention):
            mask = module.narrowed(inputs[0], inputs[1], mask)
        identity = torch.eye(len(tokens), dtype=q.dtype, device=q.device)[None, :, None].expand(-1, -1, k.shape[2], -1)
        o = api.attention(q, k, identity, mask, backend=backend)
        heads.append(o[0].transpose(0, 1).float().cpu().numpy())

    kinds = (blocks.Attention, gpt2.Attention, deepseek.LatentAttention)
    layers = [module for module in model.modules() if isinstance(module, kinds)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layer of attention; expected at least one, whose weights are shown"
        )
    hooks = [module.register_forward_pre_hook(look) for module in layers]
    try:
        device = next(model.parameters()).device
        model.hidden(torch.as_tensor(tokens, device=device)[None], backend=backend)
    finally:
        for hook in hooks:
            hook.remove()
    return np.stack(heads)
