"""Programs as newcomers write them, without the documentation: each runs, or its message names the solution."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")

PRELUDE = """
import copy, math, pickle, torch, saccade
from saccade import mask
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
B, H, T, D = 2, 8, 32, 16
x = torch.randn(B, T, H * D)
q, k, v = (torch.randn(B, H, T, D) for _ in range(3))
q_, k_, v_ = (y.transpose(1, 2) for y in (q, k, v))
seen = torch.arange(T) < torch.tensor([[T], [20]])
expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
same = torch.testing.assert_close
"""

RUNS = {
    "torch's layout": "same(saccade.attention(q, k, v, mask.causal(), layout='bhtd'), expected)",
    "a padded batch": """
o = saccade.attention(q, k, v, mask.padding(seen), layout="bhtd")
same(o, F.scaled_dot_product_attention(q, k, v, seen[:, None, None]))
""",
    "a key_padding_mask": """
key_padding_mask = ~seen
o = saccade.attention(q, k, v, mask.padding(~key_padding_mask) & mask.causal(), layout="bhtd")
allowed = seen[:, None, None] & torch.ones(T, T, dtype=torch.bool).tril()
same(o, F.scaled_dot_product_attention(q, k, v, allowed))
""",
    "a boolean mask": """
allowed = torch.ones(T, T, dtype=torch.bool).tril() & ~torch.ones(T, T, dtype=torch.bool).tril(-5)
found = mask.from_dense(allowed)
assert "dense" not in str(found), found
same(saccade.attention(q, k, v, found, layout="bhtd"), F.scaled_dot_product_attention(q, k, v, allowed))
""",
    "packed sequences by their position ids": """
position_ids = torch.cat([torch.arange(12), torch.arange(20)])[None].expand(B, T)
packed = mask.causal() & mask.documents(position_ids=position_ids)
o = saccade.attention(q, k, v, packed, layout="bhtd")
same(o[:, :, 12:], F.scaled_dot_product_attention(q[:, :, 12:], k[:, :, 12:], v[:, :, 12:], is_causal=True))
""",
    "masks are values": """
one = mask.causal() & mask.documents(torch.tensor([0, 0, 1]))
assert pickle.loads(pickle.dumps(one)) == one == mask.parse(str(one)) == copy.deepcopy(one)
assert "svg" in one._repr_svg_()
""",
    "decode": """
cache = saccade.KVCache.like(k_)
parts = []
for step in range(0, T, 8):
    cache.append(k_[:, step : step + 8], v_[:, step : step + 8])
    parts.append(saccade.decode(q_[:, step : step + 8], cache))
same(torch.cat(parts, 1).transpose(1, 2), expected)
assert len(cache) == T
""",
    "the weights of some rows": """
weights = saccade.attention_weights(q, k, mask.causal(), rows=[3, -1], layout="bhtd")
same(weights @ v, expected[:, :, [3, -1]])
entropy = -torch.special.xlogy(weights, weights).sum(-1)
assert 0 < entropy.max() <= math.log(T)
""",
    "nanoGPT's block": """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(H * D, 3 * H * D), nn.Linear(H * D, H * D)
    def forward(self, x):
        q, k, v = (y.view(B, T, H, D).transpose(1, 2) for y in self.c_attn(x).split(H * D, 2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, H * D))
block = Block()
theirs = torch.autograd.grad(block(x).square().sum(), block.parameters())
with saccade.patch_sdpa():
    ours = torch.autograd.grad(block(x).square().sum(), block.parameters())
for a, b in zip(ours, theirs):
    same(a, b, rtol=1e-4, atol=1e-4)
""",
    "the function imported by name": """
from torch.nn.functional import scaled_dot_product_attention
with saccade.patch_sdpa():
    same(scaled_dot_product_attention(q, k, v, is_causal=True), expected)
""",
    "a module in place of torch's": """
theirs = nn.MultiheadAttention(H * D, H, batch_first=True)
ours = saccade.nn.MultiheadAttention(H * D, H, batch_first=True)
ours.load_state_dict(theirs.state_dict())
same(ours(x, x, x, key_padding_mask=~seen)[0], theirs(x, x, x, key_padding_mask=~seen, need_weights=False)[0])
same(ours(x, x, x, need_weights=True)[1], theirs(x, x, x)[1])
""",
    "FlashAttention by its names": """
from saccade.integrations.flash_attn import flash_attn_func
from saccade.integrations.flash_attn_3 import flash_attn_func as flash_3
from saccade.integrations.flash_attn_4 import flash_attn_func as flash_4
same(flash_attn_func(q_, k_, v_, causal=True).transpose(1, 2), expected)
same(flash_3(q_, k_, v_, causal=True).transpose(1, 2), expected)
same(flash_4(q_, k_, v_, causal=True)[0].transpose(1, 2), expected)
""",
}

# a program, and what its message must say
SAYS = {
    "saccade.attention(q_, k_, v_, is_causal=True)": "mask=saccade.mask.causal()",
    "saccade.attention(q_, k_, v_, causal=True)": "mask=saccade.mask.causal()",
    "saccade.attention(q_, k_, v_, attn_mask=seen)": "saccade.mask.from_dense(x)",
    "saccade.attention(q_, k_, v_, key_padding_mask=~seen)": "saccade.mask.padding(~x)",
    "saccade.attention(q_, k_, v_, dropout_p=0.1)": "dropout=",
    "saccade.attention(q_, k_, v_, need_weights=True)": "saccade.attention_weights",
    "saccade.attention(q_, k_, v_, seen)": "saccade.mask.padding(array)",
    "saccade.attention(q_, k_, v_, torch.ones(T, T).tril() > 0)": "saccade.mask.from_dense(array)",
    "saccade.attention(q_, k_, v_, 'causal')": "saccade.mask.parse(text)",
    "saccade.attention(q_, k_, v_, mask.causal() and mask.window(3, 0))": "&",
    "saccade.attention(q_, k_, v_, mask.window(-1, 0))": "None for unbounded",
    "saccade.attention(q_, k_.numpy(), v_.numpy())": "expected a torch tensor",
    "saccade.KVCache(B, T, H, D).append(k_, v_)": "dtype=torch.float32",
    "saccade.attention(q_, k_, v_, mask.documents(torch.tensor([1] * 20 + [0] * 12)))": "padding",
    "print(mask.documents(torch.zeros(2, 8, dtype=torch.long)).draw(8, 8))": "B=2",
    "cache = saccade.KVCache.like(k_); cache.append(k_.clone().requires_grad_(), v_)": "detach",
    "saccade.decode(q_, saccade.KVCache.like(k_), is_causal=True)": "causal=",
}


@pytest.mark.parametrize("name", RUNS)
def test_a_program_runs(name: str) -> None:
    exec(PRELUDE + RUNS[name], {})


@pytest.mark.parametrize("program", SAYS)
def test_a_message_names_the_solution(program: str) -> None:
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    with pytest.raises(Exception, match=re.escape(SAYS[program])):
        exec(f"{program}", names)
