"""The values that each field of a model's config or a run's settings may have, and the function that checks them."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Field(NamedTuple):
    """The test that a value must pass, and the words by which an error says what was expected."""

    fits: Callable[[Any], bool]
    expected: str


def whole(low: int, high: int) -> Field:
    """Integers from low to high."""
    return Field(lambda x: is_whole(x) and low <= x <= high, f"an integer from {low} to {high}")


def real(low: float = 0.0, high: float = math.inf, *, above: bool = False) -> Field:
    """Finite numbers from low to high; with `above`, low itself is not allowed."""
    start = f"a finite number {'above' if above else 'of at least'} {low:g}"
    return Field(
        lambda x: is_real(x) and low <= x <= high and x < math.inf and not (above and x == low),
        start if high == math.inf else f"{start} and at most {high:g}",
    )


def is_whole(x: Any) -> bool:
    """Whether x is an integer; True is not."""
    return isinstance(x, int) and not isinstance(x, bool)


def is_real(x: Any) -> bool:
    """Whether x is a number; True is not."""
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def is_token(x: Any) -> bool:
    """Whether x is the number of a token, or -1 for none."""
    return is_whole(x) and -1 <= x < 1 << 31


def is_ends(x: Any) -> bool:
    """Whether x is the number of a token that ends a text, or a list of them."""
    return is_token(x) or (isinstance(x, (list, tuple)) and len(x) > 0 and all(map(is_token, x)))


def ends_of(values: Mapping[str, Any], missing: int | tuple[int, ...]) -> int | tuple[int, ...]:
    """The `eos_token_id` of a config.json, `missing` if the key is; -1 for null, because no token has that number."""
    ends = values.get("eos_token_id", missing)
    return tuple(ends) if isinstance(ends, list) else -1 if ends is None else ends


def is_names(x: Any) -> bool:
    """Whether x is a list of strings."""
    return isinstance(x, (list, tuple)) and all(isinstance(one, str) for one in x)


def is_layers(x: Any) -> bool:
    """Whether x is a list of the numbers of layers."""
    return isinstance(x, (list, tuple)) and all(is_whole(one) and 0 <= one <= 1 << 14 for one in x)


def is_limit(x: Any) -> bool:
    """Whether x is a list of two bounds, each a number, null, or {"__float__": "Infinity"}."""
    return isinstance(x, (list, tuple)) and len(x) == 2 and all(map(is_bound, x))


def is_bound(x: Any) -> bool:
    """Whether x is one of the bounds of `is_limit`."""
    if isinstance(x, dict):
        return x.get("__float__") in ("Infinity", "-Infinity")
    return x is None or (is_real(x) and not math.isnan(x))


FLAG = Field(lambda x: isinstance(x, bool), "true or false")
# a size, and one where 0 means the default; heads and other counts; positions
SIZE, SIZE_OR_0, COUNT, COUNT_OR_0 = whole(1, 1 << 24), whole(0, 1 << 24), whole(1, 1 << 16), whole(0, 1 << 16)
LONG, LONG_OR_0 = whole(1, 1 << 31), whole(0, 1 << 31)
NAME = Field(lambda x: isinstance(x, str), "a name")


def table(*rows: tuple[str, Field]) -> dict[str, Field]:
    """Fields by name; a row is the names that share a field, and the field."""
    return {name: field for names, field in rows for name in names.split()}


# fields of every family's config.json, under the names of Hugging Face transformers, and of the configs read from it
CONFIG = table(
    ("vocab_size hidden_size n_embd state_size mamba_d_state", SIZE),
    ("intermediate_size n_inner lru_width key_dim value_dim dt_rank", SIZE_OR_0),
    ("num_hidden_layers n_layer", whole(1, 1 << 14)),
    ("num_attention_heads num_key_value_heads n_head num_heads groups n_groups", COUNT),
    ("linear_num_heads linear_num_value_heads linear_num_key_heads", COUNT),
    ("head_dim ssm_heads value_heads key_heads", COUNT_OR_0),
    ("max_position_embeddings model_max_length", LONG),
    # rows of a table
    ("n_positions", SIZE),
    ("sliding_window attention_window_size", LONG_OR_0),
    ("rms_norm_eps layer_norm_epsilon inner_eps initializer_range rotary partial_rotary_factor", real(0, 1)),
    ("rope_theta", real(1)),
    ("softcap logits_soft_cap embedding_scale", real()),
    ("kernel conv_kernel conv1d_width mamba_d_conv linear_conv_kernel_dim", whole(1, 256)),
    ("expand mamba_expand", whole(1, 64)),
    ("time_step_rank mamba_dt_rank", Field(lambda x: x == "auto" or SIZE_OR_0.fits(x), "'auto', or an integer")),
    ("num_experts num_experts_per_tok n_routed_experts n_shared_experts n_group topk_group", whole(1, 1 << 12)),
    ("num_experts_per_token num_shared_experts num_expert_group", whole(1, 1 << 12)),
    ("kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim moe_intermediate_size", SIZE),
    ("linear_head_dim linear_key_head_dim linear_value_head_dim shared_expert_intermediate_size", SIZE),
    ("q_lora_rank shared_intermediate_size index_topk", SIZE_OR_0),
    ("index_n_heads index_head_dim", SIZE),
    ("first_k_dense_replace", whole(0, 1 << 14)),
    ("routed_scaling_factor", real()),
    ("norm_topk_prob moe_renormalize rope_interleave", FLAG),
    ("topk_method", NAME),
    ("attn_layer_period expert_layer_period decoder_sparse_step full_attention_interval", whole(1, 1 << 14)),
    ("attn_layer_offset expert_layer_offset", whole(0, 1 << 14)),
    ("tie_word_embeddings attention_bias mlp_bias output_bias projection_bias conv_bias use_bias", FLAG),
    ("use_conv_bias mamba_proj_bias mamba_conv_bias", FLAG),
    ("model_type hidden_act hidden_activation activation_function", NAME),
    ("mixers feed_forward block_types layer_types mlp_layer_types", Field(is_names, "a list of names")),
    ("mlp_only_layers", Field(is_layers, "a list of layers' numbers")),
    ("bos_token_id", Field(is_token, "a token's number")),
    ("eos_token_id", Field(is_ends, "a token's number, or a list of them")),
    ("rope_scaling rope_parameters linear_attn_config", Field(lambda x: isinstance(x, dict), "an object")),
    ("step_limit time_step_limit", Field(is_limit, "a list of two numbers")),
)

# fields of rope_scaling and rope_parameters
ROPE = table(
    ("rope_type type", NAME),
    ("rope_theta", CONFIG["rope_theta"]),
    ("partial_rotary_factor", CONFIG["partial_rotary_factor"]),
    ("factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor", real(0, above=True)),
    ("original_max_position_embeddings", LONG),
    ("mscale mscale_all_dim", real()),
    ("truncate", FLAG),
)

# fields of Kimi Linear's linear_attn_config; its layers are counted from 1
LINEAR = table(
    ("num_heads", COUNT),
    ("head_dim", SIZE),
    ("short_conv_kernel_size", CONFIG["kernel"]),
    ("full_attn_layers kda_layers", CONFIG["mlp_only_layers"]),
)

# settings of a training run
SETTINGS = table(
    ("text", Field(is_names, "a list of files")),
    ("model tokenizer dtype", NAME),
    ("data", Field(lambda x: isinstance(x, str), "a folder")),
    ("steps warmup checkpoint_every validation_rows context", LONG),
    ("minutes lr clip", real(0, above=True)),
    ("weight_decay", real()),
    # 256 bytes and the end
    ("vocab", whole(257, 1 << 24)),
    ("width", SIZE),
    ("layers", CONFIG["num_hidden_layers"]),
    ("heads kv_heads", COUNT),
    ("batch", whole(1, 1 << 20)),
    ("tie compile recompute", FLAG),
    ("seed", whole(0, (1 << 63) - 1)),
)


# numeric options of `saccade generate`
OPTIONS = table(
    ("tokens batch chunk", LONG),
    ("window sinks top_k rows", LONG_OR_0),
    ("shortest longest depth branches", COUNT),
    ("temperature", real()),
    ("top_p", real(0, 1, above=True)),
    ("seed", whole(-(1 << 63), (1 << 63) - 1)),
)


def check_fields(
    values: Mapping[str, Any],
    fields: Mapping[str, Field],
    where: str = "",
    spelled: Callable[[str], str] = str,
    optional: bool = True,
) -> None:
    """Raises ValueError for the first value that its field does not allow; names not in the table pass.

    where: the file or object of the values, for the error; spelled: how the caller writes a name; optional: whether
    None passes.
    """
    for name, value in values.items():
        if (optional and value is None) or name not in fields or fields[name].fits(value):
            continue
        place = f"{where}: " if where else ""
        raise ValueError(f"{place}{spelled(name)} is {reprlib.repr(value)}; expected {fields[name].expected}")
