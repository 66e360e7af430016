"""Settings of models of 30 to 350 million parameters, by name."""

from __future__ import annotations

from typing import Any

# bfloat16 products, blocks compiled; learning rates of published models of these sizes, which take more tokens a step
LARGE = {"dtype": "bfloat16", "compile": True, "warmup": 100, "checkpoint_every": 200, "validation_rows": 32}

PRESETS: dict[str, dict[str, Any]] = {
    "llama-30m": {
        **LARGE,
        **{"vocab": 16384, "layers": 8, "width": 512, "heads": 8, "kv_heads": 4, "tie": True},
        **{"context": 1024, "batch": 8, "lr": 1e-3},
    },
    "gpt2-124m": {
        **LARGE,
        **{"model": "gpt2", "vocab": 50257, "layers": 12, "width": 768, "heads": 12, "kv_heads": 12, "tie": True},
        **{"context": 1024, "batch": 16, "lr": 6e-4},
    },
    "llama-350m": {
        **LARGE,
        **{"vocab": 32768, "layers": 24, "width": 1024, "heads": 16, "kv_heads": 8, "recompute": True},
        **{"context": 2048, "batch": 16, "lr": 4e-4},
    },
}


def preset_settings(name: str) -> dict[str, Any]:
    """The settings of a preset, as fields of `Settings`. Raises ValueError for an unknown name."""
    if name not in PRESETS:
        raise ValueError(f"--preset is {name!r}; expected one of {', '.join(PRESETS)}")
    return dict(PRESETS[name])
