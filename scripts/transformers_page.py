"""Writes the page docs/transformers.md from the rows of scripts/transformers_matrix.py."""

from __future__ import annotations

from collections.abc import Mapping

import transformers as hf
from transformers_compare import Outcome

WIDEST_REASON = 80
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
`attn_implementation="sdpa"` for such models, or "eager" for attention weights.

**Padding** may be on the left or on the right of the tokens, not between them. Ignore the outputs at padding: attention
gives zeros there, and eager attention other numbers.

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
1.3/sqrt(fan-in), and writes this table. "Equal" means that logits, gradients, logits with left and right padding, and
greedy text equal those of eager attention or sdpa. Models that take images or sound with text are run on text. Their
vision and audio parts have rows of their own if transformers has a class for them.

{equal} are equal, {refused} are refused, {not_routed} are not routed, and none is wrong. {no_attention} have no
attention, and {not_built} were not tried.
"""
NOT_TRIED = (
    "The script cannot build tiny versions of these or does not know their inputs. The reason is the first error."
)


def page(known: Mapping[str, Outcome]) -> str:
    """The text of docs/transformers.md."""
    of = {kind: [row for row in known.values() if row.outcome == kind] for kind in KINDS}
    head = HEAD.format(version=hf.__version__, **{kind.replace(" ", "_"): len(rows) for kind, rows in of.items()})
    table = [row for row in known.values() if row.outcome in ("equal", "refused", "not routed")]
    lines, notes = [head, "| model | outcome | reason |", "|---|---|---|"], dict[str, int]()
    for row in table:
        reason = row.reason
        if len(reason) > WIDEST_REASON:
            reason = f"note {notes.setdefault(reason, len(notes) + 1)}"
        lines.append(f"| {row.model} | {row.outcome} | {reason.replace('|', '/').replace('<', '&lt;')} |")
    lines += ["", "Notes:", "", *(f"{number}. {reason.replace('<', '&lt;')}" for reason, number in notes.items())]
    lines += ["", "## Models without attention", "", ", ".join(row.model for row in of["no attention"]) + "."]
    lines += ["", "## Models that were not tried", "", NOT_TRIED, ""]
    lines += [f"- {row.model}: {row.reason.replace('<', '&lt;')}" for row in of["not built"]]
    return "\n".join(lines) + "\n"
