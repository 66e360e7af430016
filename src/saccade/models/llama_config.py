"""The shape of a Llama or Mistral model, and its `config.json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from .fields import CONFIG, check_fields, ends_of
from .positions import rotary

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a model, named as in a Hugging Face Llama `config.json`.

    `head_dim` 0 means `hidden_size / num_attention_heads`; `intermediate_size` 0 means 8/3 · width, rounded up
    to a multiple of 64; `sliding_window` 0 means none. Raises ValueError for a value that `fields.CONFIG` does not
    allow, for sizes that do not divide, or for a `rope_scaling` that is not supported.

    Examples:
        >>> from saccade.models.llama import LlamaConfig
        >>> config = LlamaConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> config.head_dim
        16
    """

    # keys of a Hugging Face config.json that change what is computed, with the supported values
    UNDERSTOOD: ClassVar[dict[str, tuple[Any, ...]]] = {
        "model_type": ("llama", "mistral"),
        "hidden_act": ("silu",),
        "partial_rotary_factor": (1.0, None),
    }
    # transformers' end token where a file names none, by type; else 2
    END: ClassVar[dict[str, int]] = {}
    # fields that the shapes of weights do not show, as transformers takes them where a file has none, by type
    MISSING: ClassVar[dict[str, dict[str, Any]]] = {
        "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
        "mistral": {"rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "sliding_window": 4096},
    }
    NEEDED: ClassVar[tuple[str, ...]] = ("vocab_size", "num_attention_heads")

    vocab_size: int
    hidden_size: int = 192
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 0
    intermediate_size: int = 0
    max_position_embeddings: int = 512
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    sliding_window: int = 0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    initializer_range: float = 0.02
    bos_token_id: int = 0
    eos_token_id: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        check_fields(vars(self), CONFIG)
        width, heads, kv_heads = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
        if not self.head_dim:
            if width % heads:
                raise ValueError(f"hidden_size={width} is not a multiple of num_attention_heads={heads}; give head_dim")
            object.__setattr__(self, "head_dim", width // heads)
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary positions rotate pairs")
        if not self.intermediate_size:
            object.__setattr__(self, "intermediate_size", -(-8 * width // 3 // 64) * 64)
        self.rotary()

    def rotary(self) -> tuple[Any, float]:
        """Angle per position of every pair [head_dim / 2], and the factor of the rotation."""
        return rotary(self.rope_scaling, self.rope_theta, self.head_dim, self.max_position_embeddings)

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The config of the contents of a `config.json`. Raises ValueError if it asks for an unsupported option."""
        values = dict(values)
        # transformers 5 stores the base with the other rotary parameters
        given = [dict(values.pop(name, None) or {}) for name in ("rope_parameters", "rope_scaling")]
        bases = {base for one in given if (base := one.pop("rope_theta", None)) is not None}
        rope = given[0] or given[1]
        if len(bases) > 1 or (given[1] and rope != given[1]):
            raise ValueError(
                f"config.json has rope_parameters {given[0]}, rope_scaling {given[1]} and bases {sorted(bases)}; "
                "expected one of them, or both equal"
            )
        values["rope_theta"] = bases.pop() if bases else values.get("rope_theta")
        # no part of a head is left unrotated
        values["partial_rotary_factor"] = rope.pop("partial_rotary_factor", values.get("partial_rotary_factor"))
        plain = set(rope) <= {"rope_type", "type"} and set(rope.values()) <= {"default"}
        values["rope_scaling"] = None if plain else rope
        values.setdefault("model_type", cls.UNDERSTOOD["model_type"][0])
        for key, understood in cls.UNDERSTOOD.items():
            if values.get(key, understood[0]) not in understood:
                options = ", ".join(map(repr, understood))
                raise ValueError(f"config.json says {key}={values[key]!r}; expected {options}")
        if values["model_type"] == "llama":
            values.pop("sliding_window", None)
        kinds = set(values.get("layer_types") or ())
        if values["model_type"] == "mistral" and kinds == {"full_attention"}:
            values["sliding_window"] = None
        elif values["model_type"] == "mistral" and kinds - {"sliding_attention"}:
            raise ValueError(
                f"config.json says layer_types={values['layer_types']}; expected 'sliding_attention' or "
                "'full_attention' for all layers, because one mask serves all layers of this model"
            )
        values["eos_token_id"] = ends_of(values, cls.END.get(values["model_type"], 2))
        values = {**cls.MISSING.get(values["model_type"], {}), **values}
        known = {field.name for field in fields(cls)}
        chosen = {key: value for key, value in values.items() if key in known and value is not None}
        lacking = [name for name in cls.NEEDED if name not in chosen]
        if lacking:
            kinds = " or ".join(cls.UNDERSTOOD["model_type"])
            raise ValueError(f"config.json lacks {' and '.join(lacking)}; expected that of a model of type {kinds}")
        chosen.setdefault("num_key_value_heads", chosen["num_attention_heads"])
        return cls(**chosen)

    def to_dict(self) -> dict[str, Any]:
        """The contents of a `config.json` that Hugging Face transformers reads as a Llama."""
        kind = "Mistral" if self.sliding_window else "Llama"
        own = {"architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(), "hidden_act": "silu"}
        return {**own, **asdict(self), "sliding_window": self.sliding_window or None, "torch_dtype": "float32"}
