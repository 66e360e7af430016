"""Mixtures of experts: feed-forwards of which each token uses the few that a router chooses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from .blocks import Routed, SwiGLU
from .recurrent_blocks import wide

if TYPE_CHECKING:
    from .deepseek_config import DeepSeekConfig
    from .hybrid_config import HybridConfig


def mixed(x: Tensor, weights: Tensor, which: Tensor, experts: Iterable[nn.Module]) -> Tensor:
    """Each token's sum of its experts' outputs times their weights.

    x [n, width]; weights and which [n, k]: the weights and the numbers of each token's experts.
    """
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        row, place = (which == number).nonzero(as_tuple=True)
        if len(row):
            out = out.index_add(0, row, expert(x[row]) * weights[row, place, None].to(x.dtype))
    return out


class Experts(Routed):
    """The SwiGLUs that are most probable for each token, weighted by their probabilities; x [..., width] -> same.

    The probabilities are a softmax over all experts and are not normalised again, as in Jamba.
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.chosen = config.num_experts_per_tok
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(config) for _ in range(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, which = self.router(tokens).float().softmax(-1).topk(self.chosen, -1)
        return mixed(tokens, weights, which, self.experts).view_as(x)


class Router(nn.Module):
    """DeepSeek's choice of experts: x [n, width] -> weights [n, k] and numbers [n, k].

    V2 scores experts by a softmax, V3 by sigmoids. V3 adds `e_score_correction_bias` to the scores that choose, not to
    the weights. If experts are divided into groups, only experts of each token's best groups are chosen. A group is
    rated by its best score in V2, and by the sum of its two best ones in V3.
    """

    def __init__(self, config: DeepSeekConfig | HybridConfig, sigmoid: bool) -> None:
        super().__init__()
        self.config, self.sigmoid = config, sigmoid
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.e_score_correction_bias = (
            nn.Parameter(torch.zeros(config.n_routed_experts), requires_grad=False) if sigmoid else None
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        config, logits = self.config, functional.linear(wide(x), wide(self.weight))
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        rated = scores if self.e_score_correction_bias is None else scores + self.e_score_correction_bias
        if config.grouped:
            groups = rated.unflatten(-1, (config.n_group, -1))
            best = groups.topk(2, -1).values.sum(-1) if self.sigmoid else groups.amax(-1)
            kept = torch.zeros_like(best).scatter(1, best.topk(config.topk_group, -1).indices, 1.0).bool()
            rated = groups.masked_fill(~kept[..., None], -torch.inf if self.sigmoid else 0.0).flatten(1)
            scores = scores if self.sigmoid else rated
        which = rated.topk(config.num_experts_per_tok, -1).indices
        weights = scores.gather(1, which)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * config.routed_scaling_factor, which


class SharedExperts(Routed):
    """The experts that a `Router` chooses, and an expert that every token uses (DeepSeekMoE, 2024).

    gated: experts are scored by a softmax, and a sigmoid of the token multiplies the shared one, as in Qwen3-Next.
    """

    def __init__(self, config: DeepSeekConfig | HybridConfig, gated: bool = False) -> None:
        super().__init__()
        one = replace(config, intermediate_size=config.moe_intermediate_size)
        shared = replace(config, intermediate_size=config.shared_intermediate_size)
        self.gate = Router(config, config.sigmoid and not gated)
        self.shared_gate = nn.Linear(config.hidden_size, 1, bias=False) if gated else None
        self.experts = nn.ModuleList(SwiGLU(one) for _ in range(config.n_routed_experts))
        self.shared_experts = SwiGLU(shared)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, which = self.gate(tokens)
        shared = self.shared_experts(x)
        if self.shared_gate is not None:
            shared = self.shared_gate(x).sigmoid() * shared
        return mixed(tokens, weights, which, self.experts).view_as(x) + shared
