"""Measured rows in words: the case of a row as a reader says it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..cli.bench.rows import Row

RECURRENCES = {
    "linear": "linear attention",
    "linear_attention": "linear attention",
    "scalar_decay": "decay per head",
    "scalar-decay": "decay per head",
    "gated_linear": "decay per channel",
    "gated_delta_rule": "gated delta rule",
    "ssd": "SSD (Mamba-2)",
    "selective_scan": "selective scan (Mamba)",
    "scan": "selective scan (Mamba)",
    "rg_lru": "RG-LRU",
    "causal_conv1d": "causal convolution",
}
RECURRENT = re.compile(rf"^(?:forward-|backward-)?({'|'.join(sorted(RECURRENCES, key=len, reverse=True))})(?=-|$)")
KINDS = {"both": "forward and backward", "generate": "generation", "train": "training", "jvp": "forward mode"}
PATTERNS = {"longformer": "Longformer", "big-bird": "BigBird"}
LATTICE = "sparse-transformer-"
# sizes of a shape such as "B=1 T=8192 H=96 K=128 V=128"
NAMED = re.compile(r"(\w+)=(\d+)")


def words(row: Row) -> list[str]:
    """The case of a row, part by part: "forward", "float32", "causal", "4096 tokens", "8 heads of 64"."""
    if row.kind == "search":
        return _search(row)
    if match := RECURRENT.match(row.case):
        return _parts([RECURRENCES[match[1]], *_recurrent(row, match[1])])
    kind = KINDS.get(row.kind, row.kind)
    if row.case.startswith("ring-"):
        return [f"{number(row.case.rpartition('x')[2])} tokens per GPU", kind]
    if row.kind in ("generate", "train"):
        return _parts([kind, row.dtype, *_model(row)])
    sizes = row.shape.split("x")
    if len(sizes) != 6:
        # a case that is not attention is named in words
        return _parts([row.case, kind, row.dtype])
    return _parts([kind, row.dtype, *_attention(row, sizes)])


def shared(rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """The parts that all rows have in the same order, and the other parts of each row; one row keeps all its parts."""
    same = [part for part in rows[0] if all(part in row for row in rows)] if len(rows) > 1 else []
    return same, [[part for part in row if part not in same] for row in rows]


def number(size: int | str) -> str:
    """A size as readers write it: 4096, 16k, 10 M."""
    n = int(size)
    if n >= 10_000 and n % 1024 == 0:
        return f"{n // 1024}k"
    if n >= 1_000_000:
        return f"{n / 1e6:.3g} M"
    return str(n)


def tokens(size: int | str) -> str:
    """A number of tokens in words."""
    return f"{number(size)} token{'' if int(size) == 1 else 's'}"


def mask_words(mask: str, case: str = "") -> str:
    """A mask in words; terms that have none are written as expressions. Documents are in the name of the case."""
    if not mask:
        return "no mask"
    if re.fullmatch(r"[a-z-]+", mask):
        lattice = mask.startswith(LATTICE)
        return f"Sparse Transformer, {mask.removeprefix(LATTICE)}" if lattice else PATTERNS.get(mask, mask)
    text = mask.replace("causal()", "causal")
    text = re.sub(r"window\((\d+), 0\)", lambda m: f"window of {number(int(m[1]) + 1)}", text)
    text = re.sub(r"strided\((\d+)\)", r"stride of \1", text)
    text = re.sub(r"prefix\((\d+)\)", lambda m: f"prefix of {number(m[1])}", text)
    text = re.sub(r"documents\([^)]*\)", "documents", text)
    if match := re.search(r"-documents(\d+)-", case):
        text += f" documents of {number(match[1])}"
    return text.replace(" & ", " ").replace(" | ", " or ")


def _parts(parts: Sequence[str]) -> list[str]:
    return [part for part in parts if part]


def _attention(row: Row, sizes: Sequence[str]) -> list[str]:
    batch, queries, keys, heads, key_heads, size = sizes
    codes = re.search(r"-(int8|fp8|int4)$", row.case)
    decode = row.kind == "decode"
    return [
        f"{codes[1]} codes" if codes else "",
        "" if decode and not row.mask else mask_words(row.mask, row.case),
        f"batch of {batch}" if batch != "1" else "",
        f"{number(keys)} keys" if decode else tokens(queries),
        f"{heads} heads of {size}" if heads == key_heads else f"{heads}:{key_heads} heads of {size}",
    ]


def _recurrent(row: Row, name: str) -> list[str]:
    kind = KINDS.get(row.kind, row.kind)
    rest = row.case.partition(name)[2]
    if rest == "-step":
        return [kind, row.dtype, "1 token"]
    if named := dict(NAMED.findall(row.shape)):
        width = f"{named['H']} heads of {named['K']}" if "H" in named else f"{named['D']} channels"
        batch = f"batch of {named['B']}" if named["B"] != "1" else ""
        return [kind, row.dtype, batch, tokens(named["T"]), width]
    length = re.match(r"-(\d+)", rest)
    sizes = row.shape.split("x")
    width = "" if len(sizes) != 4 else f"{sizes[2]} channels" if name == "scan" else f"{sizes[2]} heads of {sizes[3]}"
    return [kind, row.dtype, tokens(length[1]) if length else "", width]


def _model(row: Row) -> list[str]:
    notes = row.notes
    prompts = int(notes.get("prompts", "1"))
    served = row.case.endswith("-served")
    prompt = number(notes["prompt"]) if "prompt" in notes else ""
    return [
        f"{int(notes['parameters']) / 1e6:.3g} M parameters",
        "" if row.kind == "train" else "1 prompt" if prompts == 1 else f"{prompts} prompts",
        f"up to {prompt} tokens, served" if served else f"after {prompt} tokens" if prompt else "",
        mask_words(row.mask) if row.mask else "",
        f"rows of {tokens(row.case.rpartition('-')[2])}" if row.kind == "train" else "",
    ]


def _search(row: Row) -> list[str]:
    if match := re.fullmatch(r"(\w+)-(\d)bytes-D(\d+)", row.case):
        return [match[1], f"{match[2]} bytes per number", f"heads of {match[3]}"]
    return _parts([row.dtype, f"{number(row.case.removeprefix('decode-'))} keys"])
