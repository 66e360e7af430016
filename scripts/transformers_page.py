"""The page docs/transformers.md, from the rows of scripts/transformers_matrix.py."""

from __future__ import annotations

from collections.abc import Mapping

import transformers as hf
from transformers_compare import Outcome

KINDS = ("equal", "refused", "not routed", "no attention", "not built")
HEAD = """# Saccade in transformers

```python transformers
import saccade.integrations.transformers
from transformers import AutoModelForCausalLM, LlamaConfig

config = LlamaConfig(vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = AutoModelForCausalLM.from_config(config, attn_implementation="saccade")
print(saccade.integrations.transformers.routed(model))
```

The import registers the name "saccade". Every way to choose an implementation takes it: `from_pretrained(...,
attn_implementation="saccade")`, `model.set_attn_implementation("saccade")`, and a dictionary for the parts of a model.

**What is computed.** Causal masks, sliding windows, chunks, padding and packed sequences become expressions of
`saccade.mask`, and no T×T mask is made. Softcaps, sinks, position biases and dropout pass through. Your own 4-D masks,
booleans or numbers, are used as given.

**What is refused.** `saccade.Unsupported` is raised, with the reason, for an argument that Saccade does not know, for a
mask that cannot be read, for a model that computes with its mask, and for attention weights (`output_attentions`).
Use `attn_implementation="sdpa"` for those models, or "eager" for attention weights.

**Padding** may stand on the left or on the right of the tokens, not between them. The outputs at padding are zeros in
attention, and those of eager attention are not: ignore both.

**Packed sequences** need `position_ids` that start at 0 in each, `use_cache=False` and no `attention_mask`.
`cu_seq_lens_q` alone is refused.

**torch.compile** compiles the Llama family whole (`fullgraph=True`), once for all lengths. In a compiled graph padding
between tokens raises RuntimeError when the graph runs.

**What goes through Saccade.** `routed(model)` lists those layers. Some models accept every name and compute attention
by code of their own; they are "not routed", and a warning says so when they are made.

## Models of transformers {version}

`python scripts/transformers_matrix.py --write` makes this table. Every model is tiny and in float64, with weights of
1.3/sqrt(fan-in). Equal: logits, gradients, logits with left and right padding, and greedy text are those of eager
attention or sdpa. Models that take text beside images or sound are run on text; their vision and audio
parts have rows of their own where the library has a class for them.

{equal} equal, {refused} refused, {not_routed} not routed, none wrong. {no_attention} have no attention, and
{not_built} were not tried.
"""
NOT_TRIED = "The script does not make these tiny, or does not know their inputs. The reason is the first error."


def page(known: Mapping[str, Outcome]) -> str:
    """The text of docs/transformers.md."""
    of = {kind: [row for row in known.values() if row.outcome == kind] for kind in KINDS}
    head = HEAD.format(version=hf.__version__, **{kind.replace(" ", "_"): len(rows) for kind, rows in of.items()})
    table = [row for row in known.values() if row.outcome in ("equal", "refused", "not routed")]
    lines = [head, "| model | outcome | reason |", "|---|---|---|"]
    lines += [f"| {row.model} | {row.outcome} | {row.reason.replace('|', '/').replace('<', '&lt;')} |" for row in table]
    lines += ["", "## Models without attention", "", ", ".join(row.model for row in of["no attention"]) + "."]
    lines += ["", "## Models that were not tried", "", NOT_TRIED, ""]
    lines += [f"- {row.model}: {row.reason.replace('<', '&lt;')}" for row in of["not built"]]
    return "\n".join(lines) + "\n"
