"""The models that `saccade train` makes: GPT-2, and of equal size attention, recurrent layers, and a mix of both."""

from __future__ import annotations

from dataclasses import replace

from .gpt2 import Gpt2, Gpt2Config
from .hybrid import Hybrid, parameters
from .hybrid_config import UNBOUNDED, HybridConfig
from .llama import Llama, LlamaConfig

EQUAL = ("attention", "hybrid", "linear", "delta")
MODELS = (*EQUAL, "gpt2")
# the last of every so many layers is attention, as in Qwen3-Next and Kimi Linear
PERIOD = 4
STATE = 32


def make_model(kind: str, config: LlamaConfig) -> Llama | Gpt2 | Hybrid:
    """A Llama of this config for "attention", a GPT-2 of its sizes for "gpt2", or a stack as large as the Llama.

    The stack has as many layers and parameters. "linear" is Mamba-2, "delta" is gated DeltaNet, and "hybrid" is Mamba-2
    with attention in every fourth layer. Raises ValueError for another kind, for a GPT-2 with fewer key heads than
    query heads, and if the recurrent layers alone have more parameters than the Llama.
    """
    if kind not in MODELS:
        raise ValueError(f"model={kind!r} given; expected one of {', '.join(MODELS)}")
    if kind == "gpt2":
        return Gpt2(as_gpt2(config))
    return Llama(config) if kind == "attention" else Hybrid(equal(kind, config))


def as_gpt2(config: LlamaConfig) -> Gpt2Config:
    """A GPT-2 with the sizes of a Llama; its head is its embedding."""
    if config.num_key_value_heads != config.num_attention_heads:
        raise ValueError(
            f"{config.num_key_value_heads} key heads for {config.num_attention_heads} query heads; a GPT-2 has as many"
        )
    return Gpt2Config(
        vocab_size=config.vocab_size,
        n_embd=config.hidden_size,
        n_layer=config.num_hidden_layers,
        n_head=config.num_attention_heads,
        n_positions=config.max_position_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.ends[0],
    )


def equal(kind: str, config: LlamaConfig) -> HybridConfig:
    """A stack whose feed-forward width is chosen so that it has as many parameters as the Llama, up to one column."""
    layers, hybrid = config.num_hidden_layers, kind == "hybrid"
    recurrent = "delta" if kind == "delta" else "mamba2"
    mixers = tuple("attention" if hybrid and (i + 1) % PERIOD == 0 else recurrent for i in range(layers))
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
        max_position_embeddings=config.max_position_embeddings if hybrid else UNBOUNDED,
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
