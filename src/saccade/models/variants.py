"""The models that `saccade train` makes, of equal size: attention, recurrent layers, and a mix of both."""

from __future__ import annotations

from dataclasses import replace

from .hybrid import Hybrid, parameters
from .hybrid_config import UNBOUNDED, HybridConfig
from .llama import Llama, LlamaConfig

MODELS = ("attention", "hybrid", "linear")
# the last of every so many layers is attention, as in Qwen3-Next and Kimi Linear
PERIOD = 4
STATE = 32


def make_model(kind: str, config: LlamaConfig) -> Llama | Hybrid:
    """A Llama of this config for "attention", or a stack of Mamba-2 with as many layers and parameters.

    "linear" has no attention, and "hybrid" has it in every fourth layer. Raises ValueError for another kind, and if the
    recurrent layers alone have more parameters than the Llama.
    """
    if kind not in MODELS:
        raise ValueError(f"model={kind!r} given; expected one of {', '.join(MODELS)}")
    return Llama(config) if kind == "attention" else Hybrid(equal(kind, config))


def equal(kind: str, config: LlamaConfig) -> HybridConfig:
    """A stack whose feed-forward width is chosen so that it has as many parameters as the Llama, up to one column."""
    layers, linear = config.num_hidden_layers, kind == "linear"
    mixers = tuple("mamba2" if linear or (i + 1) % PERIOD else "attention" for i in range(layers))
    narrow = HybridConfig(
        vocab_size=config.vocab_size,
        mixers=mixers,
        feed_forward=("swiglu",) * layers,
        intermediate_size=1,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        state_size=STATE,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        max_position_embeddings=UNBOUNDED if linear else config.max_position_embeddings,
        initializer_range=config.initializer_range,
        eos_token_id=config.eos_token_id,
    )
    target, least = parameters(config, Llama), parameters(narrow, Hybrid)
    columns = (target - least) // (3 * config.hidden_size * layers)
    if columns < 0:
        raise ValueError(
            f"a {kind} model of width {config.hidden_size} has at least {least} parameters and the attention model has "
            f"{target}; give the attention model wider feed-forwards"
        )
    return replace(narrow, intermediate_size=1 + columns)
