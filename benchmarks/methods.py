"""The methods of docs/methods.md compared with torch or with transformers' own code, on the CPU, in float32.

    python benchmarks/methods.py rows.csv        # a few minutes

Shapes are those of one layer of the model that uses a method, with fewer heads: B = 1, T = 4096. torch computes
selected keys as attention with a boolean mask, which is what it offers for them. The columns are those of recurrent.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from arguments import chosen, parser
from recurrent import Case, Form, Tensors, run, transformers_delta
from torch import Tensor
from torch.nn import functional as F

import saccade
from saccade import mask, recurrent
from saccade.cli.bench.machine import environment
from saccade.cli.bench.rows import write

T = 4096


def heads_first(x: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as torch takes them."""
    return x["q"].transpose(1, 2), x["k"].transpose(1, 2), x["v"].transpose(1, 2)


def torch_causal(x: Tensors) -> Tensor:
    """torch's causal attention."""
    q, k, v = heads_first(x)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def latent_prefill() -> Case:
    """DeepSeek-V3's heads, keys and values not absorbed."""
    x = {name: torch.randn(1, T, 16, n) for name, n in (("q", 192), ("k", 192), ("v", 128))}
    ours = lambda x: saccade.attention(x["q"], x["k"], x["v"], mask.causal())  # noqa: E731
    return Case("latent attention, prefill", x, ours, {"torch sdpa": torch_causal}, {})


def latent_decode() -> Case:
    """Four sequences of 8192 tokens, absorbed: one key head, whose values are the first 512 numbers of its keys."""
    x = {"q": torch.randn(4, 1, 16, 576), "k": torch.randn(4, 8192, 1, 576)}

    @cache
    def stored(dtype: torch.dtype) -> saccade.LatentKVCache:
        rows = saccade.LatentKVCache(4, 8192, dtype=dtype)
        rows.append(*x["k"][:, :, 0].to(dtype).split([512, 64], -1))
        return rows

    def ours(x: Tensors) -> Tensor:
        return saccade.decode(x["q"], stored(x["q"].dtype), scale=192**-0.5)

    def peer(x: Tensors) -> Tensor:
        q, k, v = heads_first(x | {"v": x["k"][..., :512]})
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=192**-0.5).transpose(1, 2)

    return Case("latent attention, decode", x, ours, {"torch sdpa": peer}, {}, backward=False)


def selected(
    name: str, heads: tuple[int, int], sizes: tuple[int, int], block: int, entries: int, rows: int = 1
) -> Case:
    """Random blocks for each key head and each group of rows; sizes: of the rows of q and k, and of v."""
    (Hq, Hk), (D, Dv) = heads, sizes
    x = {"q": torch.randn(1, T, Hq, D), "k": torch.randn(1, T, Hk, D), "v": torch.randn(1, T, Hk, Dv)}
    lists = torch.rand(1, Hk, T // rows, T // block).topk(entries).indices
    of = mask.causal() & mask.select(lists, block, rows)
    dense = torch.zeros(1, Hk, T // rows, T // block, dtype=torch.bool).scatter_(3, lists, True)
    dense = dense.repeat_interleave(rows, 2).repeat_interleave(block, 3).tril()
    seen = dense.repeat_interleave(Hq // Hk, 1)
    ours = lambda x: saccade.attention(x["q"], x["k"], x["v"], of)  # noqa: E731

    def peer(x: Tensors) -> Tensor:
        q, k, v = heads_first(x)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        # torch gives NaN to rows that see no key
        return o.nan_to_num(0.0).transpose(1, 2)

    return Case(name, x, ours, {"torch sdpa, boolean mask": peer}, {})


def delta(name: str, channels: bool) -> Case:
    """The gated delta rule with a decay per head, or per key channel: 8 heads of 128."""
    x = {name: torch.randn(1, T, 8, 128) for name in "qv"} | {"k": F.normalize(torch.randn(1, T, 8, 128), dim=-1)}
    x |= {"g": -0.1 * torch.rand(1, T, 8, *((128,) if channels else ())), "beta": torch.rand(1, T, 8)}
    ours = lambda x: recurrent.gated_delta_rule(**x)  # noqa: E731
    peer: Form = kimi if channels else transformers_delta
    return Case(name, x, ours, {"transformers": peer}, {})


def kimi(x: Tensors) -> Tensor:
    """transformers' chunked delta rule with a decay per channel, as Kimi Linear uses it without kernels."""
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    o: Any = chunk_kimi_delta_attention(x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"])
    return o[0]


def cases() -> Iterator[Case]:
    """The cases to measure."""
    torch.manual_seed(0)
    yield latent_prefill()
    yield latent_decode()
    yield selected("native sparse attention, selected blocks", (16, 1), (128, 128), 64, 16)
    yield selected("block attention, 64 queries per choice", (8, 8), (128, 128), 64, 8, 64)
    yield selected("DeepSeek sparse attention", (16, 1), (576, 512), 1, 512)
    yield delta("gated DeltaNet", channels=False)
    yield delta("Kimi delta attention", channels=True)


def main() -> None:
    """Measure and write the rows."""
    args = parser(__doc__).parse_args()
    about = environment(args.commit)
    picked = chosen((case for case in cases() if args.only in case.name), args.part)
    write(args.out, (row for case in picked for row in run(case, about)))


if __name__ == "__main__":
    main()
