"""Recurrent layers as modules: against their formulas written out, split anywhere, and with packed documents."""

from __future__ import annotations

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402

from saccade.models.blocks import turned  # noqa: E402
from saccade.models.gated_blocks import (  # noqa: E402
    GatedDeltaNet,
    GatedLinearAttention,
    KimiDeltaAttention,
    Retention,
)
from saccade.models.recurrent_blocks import GriffinRecurrent, Mamba, Mamba2  # noqa: E402
from saccade.models.states import Carry  # noqa: E402
from saccade.rope import angles  # noqa: E402

WIDTH, HEADS, K, V = 24, 3, 8, 16
LAYERS = {
    "mamba": lambda: Mamba(WIDTH, state=8),
    "mamba with norms": lambda: Mamba(WIDTH, state=8, kernel=3, expand=1, rank=5, bias=True, conv_bias=False, eps=1e-6),
    "mamba2": lambda: Mamba2(WIDTH, 4, 12, state=8, groups=2, limit=(0.01, 0.1)),
    "griffin": lambda: GriffinRecurrent(WIDTH, 32, 4),
    "retention": lambda: Retention(WIDTH, HEADS, K, V),
    "gla": lambda: GatedLinearAttention(WIDTH, HEADS, K, V),
    "delta": lambda: GatedDeltaNet(WIDTH, HEADS, K, V),
    "delta, one key head": lambda: GatedDeltaNet(WIDTH, HEADS, K, V, kernel=3, key_heads=1),
    "kimi": lambda: KimiDeltaAttention(WIDTH, HEADS, K, V),
}
EXACT = {"rtol": 1e-9, "atol": 1e-11}


def made(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return LAYERS[name]().double()


def some(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def turn_of(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return angles(some(1), positions, K)


def gated(layer, o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The norm of every head's output, its gate, and the way back."""
    o = o / (o.square().mean(-1, keepdim=True) + layer.o_norm.eps).sqrt()
    o = o.flatten(-2) * layer.o_norm.weight * functional.silu(x @ layer.g_proj.weight.T)
    return o @ layer.o_proj.weight.T


def heads_of(layer, x: torch.Tensor) -> list[torch.Tensor]:
    return [(x @ layer.get_parameter(f"{c}_proj.weight").T).unflatten(-1, (HEADS, -1)) for c in "qkv"]


def matrix_states(q, k, v, decay, beta=None) -> torch.Tensor:
    """o_t = S_tᵀ q_t / √K a token at a time; decay [B, T, H, K or 1], beta [B, T, H] for the delta rule."""
    S, out = q.new_zeros(len(q), HEADS, K, V), []
    for t in range(q.shape[1]):
        S = decay[:, t, :, :, None] * S
        fresh = v[:, t]
        if beta is not None:
            fresh = beta[:, t, :, None] * (fresh - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + k[:, t, :, :, None] * fresh[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * K**-0.5)
    return torch.stack(out, 1)


def test_retention_is_its_formula() -> None:
    layer, x = made("retention"), some(2, 20, WIDTH)
    turn = turn_of(torch.arange(20))
    q, k, v = heads_of(layer, x)
    decay = (1 - 2.0 ** (-5 - torch.arange(HEADS).double()))[:, None].expand(2, 20, HEADS, 1)
    want = gated(layer, matrix_states(turned(q, turn), turned(k, turn), v, decay), x)
    # its decays are constants in float32
    torch.testing.assert_close(layer(x, Carry(turn=turn)), want, rtol=1e-5, atol=1e-6)


def test_gated_linear_attention_is_its_formula() -> None:
    layer, x = made("gla"), some(2, 20, WIDTH)
    q, k, v = heads_of(layer, x)
    first, second = layer.decay_proj
    decay = ((x @ first.weight.T) @ second.weight.T + second.bias).sigmoid() ** (1 / 16)
    want = gated(layer, matrix_states(q, k, v, decay.unflatten(-1, (HEADS, K))), x)
    torch.testing.assert_close(layer(x), want, **EXACT)


@pytest.mark.parametrize("name", ["delta", "delta, one key head", "kimi"])
def test_delta_rules_are_their_formulas(name) -> None:
    layer, x = made(name), some(2, 20, WIDTH)
    parts = []
    for letter, size in zip("qkv", (K, K, V), strict=True):
        weight, flat = layer.convs[letter].weight[:, 0], x @ layer.get_parameter(f"{letter}_proj.weight").T
        kernel = weight.shape[1]
        padded = functional.pad(flat, (0, 0, kernel - 1, 0))
        mixed = functional.silu(sum(padded[:, j : j + 20] * weight[:, j] for j in range(kernel)))
        parts.append(mixed.unflatten(-1, (-1, size)))
    q, k, v = parts
    q, k = (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (q, k))
    q, k = (one.repeat_interleave(HEADS // one.shape[2], 2) for one in (q, k))
    rates, gate, beta = (layer.get_submodule(f"{letter}_proj") for letter in "agb")
    g = -(1 + (rates(x) + layer.dt_bias).exp()).log().unflatten(-1, (HEADS, -1)) * layer.A_log.exp()[:, None]
    o = matrix_states(q, k, v, g.exp(), beta(x).sigmoid())
    o = o / (o.square().mean(-1, keepdim=True) + layer.o_norm.eps).sqrt()
    opened = gate(x).sigmoid() if name == "kimi" else functional.silu(gate(x))
    want = (o.flatten(-2) * layer.o_norm.weight * opened) @ layer.o_proj.weight.T
    torch.testing.assert_close(layer(x), want, **EXACT)


@pytest.mark.parametrize("name", LAYERS)
def test_split_anywhere(name) -> None:
    layer, x = made(name), some(2, 40, WIDTH)
    whole = layer(x, Carry(turn=turn_of(torch.arange(40))))
    state, parts = {}, []
    with torch.no_grad():
        for start, stop in ((0, 1), (1, 2), (2, 19), (19, 20), (20, 40)):
            turn = turn_of(torch.arange(start, stop))
            parts.append(layer(x[:, start:stop], Carry(state, turn=turn)))
    torch.testing.assert_close(torch.cat(parts, 1), whole.detach(), **EXACT)
    assert all(len(part) == 2 for part in state.values())


@pytest.mark.parametrize("name", LAYERS)
def test_packed_documents_are_separate_ones(name) -> None:
    layer, x = made(name), some(1, 40, WIDTH).requires_grad_()
    borders = [0, 7, 8, 29, 40]
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(borders)])
    packed = layer(x, Carry(None, torch.tensor(borders), turn_of(positions)))
    each = [layer(x[:, a:b], Carry(turn=turn_of(torch.arange(b - a)))) for a, b in pairwise(borders)]
    separate = torch.cat(each, 1)
    torch.testing.assert_close(packed, separate, **EXACT)
    weight = some(1, 40, WIDTH)
    (dx,) = torch.autograd.grad((packed * weight).sum(), x)
    (want,) = torch.autograd.grad((separate * weight).sum(), x)
    torch.testing.assert_close(dx, want, **EXACT)


@pytest.mark.parametrize("name", LAYERS)
def test_every_parameter_has_a_gradient(name) -> None:
    layer = made(name)
    layer(some(2, 12, WIDTH), Carry(turn=turn_of(torch.arange(12)))).square().sum().backward()
    lacking = [which for which, one in layer.named_parameters() if one.grad is None or not one.grad.abs().sum() > 0]
    assert lacking == []


@pytest.mark.parametrize("name", LAYERS)
def test_bfloat16_keeps_states_in_float32(name) -> None:
    layer, state = made(name).to(torch.bfloat16), {}
    turn = tuple(part.float() for part in turn_of(torch.arange(9)))
    y = layer(some(1, 9, WIDTH).to(torch.bfloat16), Carry(state, turn=turn))
    assert y.dtype == torch.bfloat16
    assert {part.dtype for part in state.values()} == {torch.float32}


def test_sizes_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="expected the groups to divide the heads"):
        Mamba2(WIDTH, 4, 12, groups=3)
    with pytest.raises(ValueError, match="expected the heads to divide the channels"):
        GriffinRecurrent(WIDTH, 32, 5)
