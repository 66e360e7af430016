"""The providers of measured rows: every library has one colour, and every form of it has a mark of its own."""

from __future__ import annotations

from typing import NamedTuple

from .cells import ALL


class Colours(NamedTuple):
    """The colour of a library on light and on dark pages."""

    light: str
    dark: str


class Provider(NamedTuple):
    """How the rows of a provider are shown.

    name: the words of a legend; library: a name of LIBRARIES; mark: a marker of matplotlib, of which charts.py has a
    path for the site; filled: whether the mark is filled, as that of each library's usual form is.
    """

    name: str
    library: str
    mark: str
    filled: bool = True

    @property
    def colours(self) -> Colours:
        """The colours of its library."""
        return LIBRARIES[self.library]


# every colour has a contrast of 3 or more with its page, and of two libraries no two forms share a mark in one chart
LIBRARIES = {
    "Saccade": Colours(ALL, "#8fbbe0"),
    "torch": Colours("#bf7400", "#f0ad3e"),
    "FlexAttention": Colours("#0b8463", "#45c9a0"),
    "FlashAttention": Colours("#8a5fa8", "#c79fe3"),
    "FlashInfer": Colours("#b4462c", "#f0876b"),
    "flash-linear-attention": Colours("#b0568f", "#e79acb"),
    "mamba-ssm": Colours("#5b6770", "#a9b6c0"),
    "transformers": Colours("#7a6c00", "#cdbd4a"),
    "ONNX Runtime": Colours("#007f93", "#5cc4d6"),
    "naive": Colours("#85766a", "#b8aa9d"),
}

SACCADE, TORCH = "Saccade", "torch"
PROVIDERS = {
    "saccade": Provider(SACCADE, SACCADE, "o"),
    "saccade tiled": Provider(SACCADE, SACCADE, "o"),
    "saccade chunks": Provider(SACCADE, SACCADE, "o"),
    "saccade, causal": Provider(SACCADE, SACCADE, "o"),
    "saccade, causal, any order": Provider("Saccade, any order", SACCADE, ">", False),
    "saccade, compiled steps": Provider("Saccade, compiled steps", SACCADE, "P", False),
    "saccade, any order": Provider("Saccade, any order", SACCADE, ">", False),
    "saccade, dense": Provider("Saccade, without a mask", SACCADE, "s", False),
    "dense": Provider("Saccade, without a mask", SACCADE, "s", False),
    "saccade softmax": Provider("Saccade, softmax attention", SACCADE, "s", False),
    "softmax": Provider("Saccade, softmax attention", SACCADE, "s", False),
    "documented": Provider("Saccade, documented kernels", SACCADE, "s", False),
    "documented, short": Provider("Saccade, documented kernels, short", SACCADE, "D", False),
    "documented, streaming": Provider("Saccade, documented kernels, streaming", SACCADE, "^", False),
    "saccade, pages of 64": Provider("Saccade, pages of 64", SACCADE, "s", False),
    "saccade, pages of 16": Provider("Saccade, pages of 16", SACCADE, "^", False),
    "saccade, pages of 1": Provider("Saccade, pages of 1", SACCADE, "v", False),
    "paged64": Provider("Saccade, pages of 64", SACCADE, "s", False),
    "paged16": Provider("Saccade, pages of 16", SACCADE, "^", False),
    "paged1": Provider("Saccade, pages of 1", SACCADE, "v", False),
    "saccade, int8": Provider("Saccade, int8", SACCADE, "D", False),
    "saccade, fp8": Provider("Saccade, fp8", SACCADE, "P", False),
    "saccade, int4": Provider("Saccade, int4", SACCADE, "X", False),
    "saccade, int8 in pages of 64": Provider("Saccade, int8 in pages of 64", SACCADE, "h", False),
    "int8": Provider("Saccade, int8", SACCADE, "D", False),
    "fp8": Provider("Saccade, fp8", SACCADE, "P", False),
    "int4": Provider("Saccade, int4", SACCADE, "X", False),
    "saccade, one GPU": Provider("Saccade, one GPU", SACCADE, "o", False),
    "saccade, zigzag": Provider("Saccade, zigzag ring", SACCADE, "o"),
    "saccade, striped": Provider("Saccade, striped ring", SACCADE, "s", False),
    "saccade, contiguous": Provider("Saccade, contiguous ring", SACCADE, "v", False),
    "saccade, heads for positions": Provider("Saccade, heads for positions", SACCADE, "D", False),
    "saccade, heads for positions, gates": Provider("Saccade, forget gates over heads", SACCADE, "<", False),
    "saccade, heads for positions, relative": Provider("Saccade, bias by distance over heads", SACCADE, "X", False),
    "saccade, heads for positions, selected keys": Provider("Saccade, selected keys over heads", SACCADE, "h", False),
    "saccade, heads for positions, latent": Provider("Saccade, latent over heads", SACCADE, "d", False),
    "saccade, zigzag, latent": Provider("Saccade, latent, ring, zigzag", SACCADE, "p", False),
    "saccade, gathered keys": Provider("Saccade, gathered keys", SACCADE, "P", False),
    "simulated, 8k tokens per GPU": Provider("8k tokens per GPU", SACCADE, "v", False),
    "simulated, 32k tokens per GPU": Provider("32k tokens per GPU", SACCADE, "o"),
    "simulated, 10 M tokens in all": Provider("10 M tokens in all", SACCADE, "s", False),
    "attention": Provider("attention alone", SACCADE, "o"),
    "hybrid": Provider("Mamba-2 and attention", SACCADE, "s", False),
    "linear": Provider("Mamba-2 alone", SACCADE, "D", False),
    "sdpa": Provider("torch SDPA", TORCH, "s"),
    "torch sdpa": Provider("torch SDPA", TORCH, "s"),
    "sdpa, causal": Provider("torch SDPA", TORCH, "s"),
    "sdpa by document": Provider("torch SDPA by document", TORCH, "h"),
    "sdpa, bool mask": Provider("torch SDPA, boolean mask", TORCH, "s", False),
    "torch sdpa, boolean mask": Provider("torch SDPA, boolean mask", TORCH, "s", False),
    "torch, math": Provider("torch SDPA, math", TORCH, "<"),
    "torch flash": Provider("torch SDPA, flash", TORCH, "v"),
    "torch cuDNN": Provider("torch SDPA, cuDNN", TORCH, "^"),
    "torch, one GPU, cudnn": Provider("torch SDPA, one GPU", TORCH, "^", False),
    "torch context_parallel, cudnn": Provider("torch context_parallel, cuDNN", TORCH, "^"),
    "torch": Provider("torch", TORCH, "s"),
    "torch chunks": Provider("torch, chunks", TORCH, ">"),
    "torch chunks compiled": Provider("torch, compiled chunks", TORCH, "<"),
    "torch loop": Provider("torch, loop", TORCH, "v"),
    "loop": Provider("torch, loop", TORCH, "v"),
    "associative_scan": Provider("torch, associative_scan", TORCH, "^"),
    "torch conv1d": Provider("torch conv1d", TORCH, "s"),
    "flex": Provider("FlexAttention", "FlexAttention", "D"),
    "FlexAttention": Provider("FlexAttention", "FlexAttention", "D"),
    "FlashAttention-2": Provider("FlashAttention-2", "FlashAttention", "*"),
    "FlashAttention-3": Provider("FlashAttention-3", "FlashAttention", "*"),
    "FlashAttention-4": Provider("FlashAttention-4", "FlashAttention", "*"),
    "FlashAttention-4, causal": Provider("FlashAttention-4", "FlashAttention", "*"),
    "flash-attention 4": Provider("FlashAttention-4", "FlashAttention", "*"),
    "FlashAttention-4, deterministic": Provider("FlashAttention-4, deterministic", "FlashAttention", "*", False),
    "FlashInfer, pages of 64": Provider("FlashInfer, pages of 64", "FlashInfer", "P"),
    "FlashInfer, pages of 16": Provider("FlashInfer, pages of 16", "FlashInfer", "P", False),
    "fla": Provider("flash-linear-attention", "flash-linear-attention", "h"),
    "mamba-ssm": Provider("mamba-ssm", "mamba-ssm", "p"),
    "transformers": Provider("transformers", "transformers", "X"),
    "transformers sdpa": Provider("transformers, SDPA", "transformers", "X"),
    "transformers sdpa, static cache": Provider("transformers, compiled, static cache", "transformers", "X", False),
    "onnxruntime": Provider("ONNX Runtime", "ONNX Runtime", "d"),
    "naive": Provider("naive attention", "naive", "."),
}


def provider(name: str) -> Provider:
    """How the rows of a provider are shown, whatever its name adds in brackets; raises ValueError if it is unknown."""
    name = name.partition(" (")[0]
    if name not in PROVIDERS:
        raise ValueError(
            f"the provider {name!r} has no colour and no mark; expected a name of PROVIDERS in "
            f"src/saccade/plot/providers.py: add {name!r} there"
        )
    return PROVIDERS[name]
