"""Writes the page docs/transformers.md from the rows of scripts/transformers_matrix.py."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

import transformers as hf
from transformers_compare import Outcome

KINDS = ("equal", "refused", "not routed", "no attention", "not built")
HEAD = """# Saccade in transformers

```python transformers
import saccade.integrations.transformers
from transformers import AutoModelForCausalLM, LlamaConfig

config = LlamaConfig(
    vocab_size=99,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
)
model = AutoModelForCausalLM.from_config(config, attn_implementation="saccade")
print(saccade.integrations.transformers.routed(model))
```

In a clone, install it with `pip install '.[transformers]'`. The import registers the name "saccade" as an attention
implementation. You can choose it in every way that transformers offers: `from_pretrained(...,
attn_implementation="saccade")`, `model.set_attn_implementation("saccade")`, or a dictionary for the parts of a model.

**Computed.** Causal masks, sliding windows, chunks, padding and packed sequences become expressions of `saccade.mask`,
and no T×T mask is built. Softcaps, sinks, position biases and dropout pass through. Your own 4-D masks, of booleans or
numbers, are used unchanged.

**Refused.** `saccade.Unsupported` is raised, with the reason, for an argument that Saccade does not know, for a mask
that it cannot convert, for a model that computes with its mask, and for attention weights (`output_attentions`). Use
`attn_implementation="sdpa"` for such models, or "eager" for attention weights. GPT-2 and OPT do not pass
`output_attentions` on, and return none, as with "sdpa".

**Padding** may be on the left or on the right of the tokens, not between them. Ignore the outputs at padding. A
padded query that sees no token gives 0; the others give numbers without a meaning, not those of eager attention.

**Packed sequences** need `position_ids` that start at 0 in each sequence, `use_cache=False` and no `attention_mask`.
`cu_seq_lens_q` alone is refused.

**torch.compile** compiles models of the Llama family without graph breaks (`fullgraph=True`), once for all lengths. In
a compiled graph, padding between tokens raises RuntimeError when the graph runs.

**Routed layers.** `routed(model)` lists the layers that use Saccade. Some models accept any name and compute attention
by code of their own. They are "not routed", and a warning reports this when they are built.

**Trainer** needs no change ([Cookbook](cookbook.md#train-with-hugging-faces-trainer)).

**Serving and other libraries.** `saccade generate` samples from checkpoints without transformers ([command
line](command-line.md#generate)). [From other libraries](porting.md) describes flash-attn, SDPA, FlexAttention, MLX and
vLLM.

## Models of transformers {version}

`python scripts/transformers_matrix.py --write` runs every architecture, tiny and in float64, with weights of
1.3/sqrt(fan-in), and writes this section and [all rows](assets/transformers.csv). Models that take images or sound with
text are run on text. Their vision and audio parts have names of their own if transformers has a class for them.
{equal} models are equal, {refused} are refused, {not_routed} are not routed, and none is wrong.

"""
SECTIONS = {
    "equal": (
        "Equal",
        "Logits, gradients, logits with left or right padding, and greedy text equal those of eager attention or sdpa.",
    ),
    "refused": ("Refused", "`saccade.Unsupported` is raised, with one of these reasons."),
    "not routed": (
        "Not routed",
        "These accept the name, but compute attention by code of their own, without Saccade.",
    ),
    "no attention": ("Without attention", ""),
    "not built": (
        "Not tried",
        "The script cannot build tiny versions of these or does not know their inputs. The rows have the first error.",
    ),
}


def page(known: Mapping[str, Outcome]) -> str:
    """The text of docs/transformers.md."""
    of = {kind: [row for row in known.values() if row.outcome == kind] for kind in KINDS}
    head = HEAD.format(version=hf.__version__, **{kind.replace(" ", "_"): len(rows) for kind, rows in of.items()})
    parts = [head.rstrip("\n")]
    for kind, (title, text) in SECTIONS.items():
        parts += [f"### {title}: {len(of[kind])}", *[filled(text)] * bool(text)]
        if kind == "refused":
            parts.append(reasons(of[kind]))
        else:
            parts.append(filled(", ".join(row.model for row in of[kind]) + "."))
    return "\n\n".join(parts) + "\n"


def filled(text: str, indent: str = "") -> str:
    """The text in lines of at most 120 characters, without breaks inside of words."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False, subsequent_indent=indent)


def reasons(refused: list[Outcome]) -> str:
    """A list of the reasons for which models are refused, the most frequent first."""
    models: dict[str, list[str]] = {}
    for row in refused:
        models.setdefault(row.reason, []).append(row.model)
    order = sorted(models.items(), key=lambda item: -len(item[1]))
    return "\n".join(filled(f"- {shown(reason)}: {', '.join(names)}", "  ") for reason, names in order)


def shown(reason: str) -> str:
    """A reason in Markdown, whose `__` would otherwise be bold text."""
    return reason.replace("<", "&lt;").replace("__", r"\_\_")
