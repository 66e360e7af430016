"""`generate` beside transformers with sdpa, on the CPU: `python benchmarks/generation.py rows.csv`.

One random Llama a size, its weights saved once and loaded by both; greedy tokens after one prompt, ours and theirs in
turn, tokens a second between the first new token and the last. Where the tokens differ the row says from which on: a
random model's largest two logits are close, and bfloat16 rounds them alike.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rows import write_rows

from saccade.cli.bench.machine import environment
from saccade.models.llama import Llama, LlamaConfig
from saccade.models.loading import load_model
from saccade.models.sampling import Sampler, generate
from saccade.models.weights import save_weights

ROUNDS = 5
TINY = {
    "vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip
LARGE = {
    "vocab_size": 32000, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 4,
}  # fmt: skip


class Case(NamedTuple):
    """A model's sizes and name, its dtype, the prompt's tokens and the new ones."""

    model: str
    sizes: dict[str, int]
    dtype: torch.dtype
    prompt: int
    tokens: int


CASES = [
    Case("tiny", TINY, torch.float32, 64, 256),
    Case("100M", LARGE, torch.float32, 64, 64),
    Case("100M", LARGE, torch.bfloat16, 64, 64),
    Case("100M", LARGE, torch.float32, 8192, 32),
    Case("100M", LARGE, torch.bfloat16, 8192, 32),
]


def ours(model: Any, prompt: list[int], tokens: int) -> list[tuple[float, int]]:
    """(time, token) as they are drawn."""
    return [(time.perf_counter(), token) for (token,) in generate(model, [prompt], tokens, Sampler(0.0))]


def theirs(model: Any, prompt: list[int], tokens: int) -> list[tuple[float, int]]:
    """The same by transformers' own generate: a streamer is told of the prompt, then of every token."""
    found: list[tuple[float, int]] = []

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            if value.numel() == 1:
                found.append((time.perf_counter(), int(value)))

        def end(self) -> None:
            pass

    ids = torch.tensor([prompt])
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, streamer=Streamer(),
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return found


def timed(draw: Any, model: Any, case: Case, prompt: list[int]) -> tuple[float, list[int]]:
    """(tokens a second after the first, the tokens)."""
    times, drawn = zip(*draw(model, prompt, case.tokens), strict=True)
    return (len(times) - 1) / (times[-1] - times[0]), list(drawn)


def run(case: Case) -> Iterator[dict[str, Any]]:
    """A row of ours and one of theirs."""
    with tempfile.TemporaryDirectory() as folder:
        yield from compare(case, Path(folder))


def compare(case: Case, folder: Path) -> Iterator[dict[str, Any]]:
    """The same, of one model saved in the folder."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    # no token ends the text
    config = LlamaConfig(**case.sizes, max_position_embeddings=16384, eos_token_id=-1)
    net = Llama(config)
    save_weights(folder / "model.safetensors", net)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    providers = {
        "saccade": (ours, load_model(folder, case.dtype)),
        "transformers sdpa": (
            theirs, AutoModelForCausalLM.from_pretrained(folder, dtype=case.dtype, attn_implementation="sdpa").eval()
        ),
    }  # fmt: skip
    prompt = torch.randint(1, case.sizes["vocab_size"], (case.prompt,)).tolist()
    rates: dict[str, list[float]] = {name: [] for name in providers}
    drawn: dict[str, list[int]] = {}
    # the first round warms up
    for n in range(ROUNDS + 1 if case.prompt < 1000 else 3):
        for name, (draw, model) in providers.items():
            rate, drawn[name] = timed(draw, model, case, prompt)
            if n:
                rates[name].append(rate)
    first, second = drawn.values()
    same = next((n for n, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))
    parameters = sum(x.numel() for x in net.parameters())
    for name, found in rates.items():
        yield {
            **environment(), "case": f"{case.model}-{case.prompt}", "provider": name,
            "dtype": str(case.dtype).removeprefix("torch."), "parameters": parameters, "prompt": case.prompt,
            "new": case.tokens, "rate": f"{statistics.median(found):.2f}", "rate_unit": "token/s",
            "samples": len(found),
            "ratio": f"{statistics.median(found) / statistics.median(rates['transformers sdpa']):.2f}",
            "note": "" if same == len(first) else f"tokens differ from the {same}th on",
        }  # fmt: skip


def main() -> None:
    """Measures every case whose name holds the second argument, and writes the rows to the first."""
    word = sys.argv[2] if len(sys.argv) > 2 else ""
    rows = (row for case in CASES if word in f"{case.model}-{case.prompt}" for row in run(case))
    write_rows(sys.argv[1], rows, ("case", "provider", "dtype", "rate", "ratio", "note"))


if __name__ == "__main__":
    main()
