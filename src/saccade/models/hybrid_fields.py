"""What the readers of every kind of stack's `config.json` share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from .fields import ends_of
from .hybrid_config import UNBOUNDED, HybridConfig

Values = Mapping[str, Any]
Tensors = dict[str, Tensor]


class Layout(NamedTuple):
    """How to read one kind of checkpoint.

    fields: the fields of a `HybridConfig` from the values of a `config.json`. names: replacements of regular
    expressions in the names of tensors, applied in order. adapt: rewrites a tensor of that new name as tensors of
    `Hybrid`, for parameters that it stores in another form.
    """

    fields: Callable[[Values], dict[str, Any]]
    names: Mapping[str, str]
    adapt: Callable[[HybridConfig, str, Tensor], Tensors] = lambda stack, name, x: {name: x}


# the end token of transformers' configs that name none; no token has a number below 0
END = {"mamba": 0, "mamba2": 2, "jamba": 2, "recurrent_gemma": 1, "kimi_linear": 163586}


def understood(values: Values, **expected: Any) -> None:
    """Raises ValueError if a key has a value other than the expected one; missing keys pass."""
    for key, value in expected.items():
        if values.get(key, value) != value:
            raise ValueError(f"config.json says {key}={values[key]!r}; this model computes {key}={value!r} only")


def common(values: Values, mixers: tuple[str, ...], after: tuple[str, ...], eps: str, tied: bool) -> dict[str, Any]:
    """The fields of every kind of stack. eps: the key of the norms' eps; tied: whether the head is tied by default."""
    return {
        "vocab_size": values["vocab_size"],
        "hidden_size": values["hidden_size"],
        "mixers": mixers,
        "feed_forward": after,
        "rms_norm_eps": values.get(eps, 1e-5 if eps == "layer_norm_epsilon" else 1e-6),
        "tie_word_embeddings": values.get("tie_word_embeddings", tied),
        "max_position_embeddings": values.get("max_position_embeddings") or UNBOUNDED,
        "eos_token_id": ends_of(values, END.get(values["model_type"], -1)),
    }


def rotation(values: Values, share: float) -> dict[str, Any]:
    """The fields of unscaled rotary positions. share: the rotated part of a head, unless the values have another.

    Raises ValueError for scaled positions.
    """
    rope = values.get("rope_parameters", {})
    for given in (rope, values.get("rope_scaling", {})):
        kind = given.get("rope_type", given.get("type", "default"))
        if kind != "default":
            raise ValueError(f"config.json says rope_type={kind!r}; this model computes 'default' only")
    return {
        "rotary": rope.get("partial_rotary_factor", values.get("partial_rotary_factor", share)),
        "rope_theta": rope.get("rope_theta", values.get("rope_theta", 10000.0)),
    }
