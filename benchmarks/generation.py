"""`generate` compared with transformers and sdpa, on the CPU: `python benchmarks/generation.py rows.csv`.

Each size has one random Llama, whose weights are saved once and loaded by both libraries. Both draw greedy tokens after
the same prompt, in turn. The rate is tokens per second between the first new token and the last. If the tokens differ,
the row says from which token on. The two largest logits of a random model are close, and bfloat16 may round them to the
same number.

`--model demo` compares `generate` without and with drafts instead, on the model of `make demo` or another run.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from arguments import chosen, parser

from saccade.cli.bench.clocks import timing
from saccade.cli.bench.machine import Environment, environment
from saccade.cli.bench.rows import Row, note, write
from saccade.models.llama import Llama, LlamaConfig
from saccade.models.loading import load_model
from saccade.models.sampling import Sampler, generate
from saccade.models.tokens import load_tokenizer
from saccade.models.weights import save_weights

ROUNDS = 5
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
TINY = dict(zip(SIZES, (4096, 256, 4, 8, 2), strict=True))
LARGE = dict(zip(SIZES, (32000, 768, 12, 12, 4), strict=True))


class Case(NamedTuple):
    """A model's name and sizes, its dtype, and how many tokens the prompt has and are drawn."""

    model: str
    sizes: dict[str, int]
    dtype: torch.dtype
    prompt: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.prompt}"


CASES = [
    Case("tiny", TINY, torch.float32, 64, 256),
    Case("100M", LARGE, torch.float32, 64, 64),
    Case("100M", LARGE, torch.bfloat16, 64, 64),
    Case("100M", LARGE, torch.float32, 8192, 32),
    Case("100M", LARGE, torch.bfloat16, 8192, 32),
]

# a function that is repeated, as when a text is edited; the model continues its third copy
METHOD = """    def seek(self, offset, whence=0):
        if self.closed:
            raise ValueError("I/O operation on closed file")
        if whence == 0:
            self.position = offset
        elif whence == 1:
            self.position += offset
        return self.position

"""
TEXTS = {"prompt": "class Reader:\n    def __init__(self, ", "repeats": METHOD * 2 + METHOD[:40]}


def ours(model: Any, prompt: list[int], tokens: int) -> list[tuple[float, int]]:
    """(time, token) of each new token, drawn by Saccade."""
    return [(time.perf_counter(), token) for (token,) in generate(model, [prompt], tokens, Sampler(0.0))]


def theirs(model: Any, prompt: list[int], tokens: int) -> list[tuple[float, int]]:
    """The same by `generate` of transformers, whose streamer receives the prompt, then every token."""
    drawn: list[tuple[float, int]] = []

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            if value.numel() == 1:
                drawn.append((time.perf_counter(), int(value)))

        def end(self) -> None:
            pass

    ids = torch.tensor([prompt])
    greedy = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model.generate(ids, attention_mask=torch.ones_like(ids), streamer=Streamer(), **greedy)
    return drawn


def by_drafts(model: Any, prompt: list[int], tokens: int) -> list[tuple[float, int]]:
    """The same by Saccade with drafts of n-grams."""
    drawn = generate(model, [prompt], tokens, Sampler(0.0), draft="ngram")
    return [(time.perf_counter(), token) for (token,) in drawn]


def timed(draw: Any, model: Any, case: Case, prompt: list[int]) -> tuple[float, list[int]]:
    """(seconds per token after the first, the tokens)."""
    times, drawn = zip(*draw(model, prompt, case.tokens), strict=True)
    return (times[-1] - times[0]) / (len(times) - 1), list(drawn)


def run(case: Case, env: Environment) -> Iterator[Row]:
    """A row for Saccade and one for transformers."""
    with tempfile.TemporaryDirectory() as folder:
        yield from with_transformers(case, env, Path(folder))


def with_transformers(case: Case, env: Environment, folder: Path) -> Iterator[Row]:
    """The same for a model that is saved in the folder."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    # an id that no token has, so that nothing ends the text
    config = LlamaConfig(**case.sizes, max_position_embeddings=16384, eos_token_id=-1)
    net = Llama(config)
    save_weights(folder / "model.safetensors", net)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=case.dtype, attn_implementation="sdpa").eval()
    providers = {"saccade": (ours, load_model(folder, case.dtype)), "transformers sdpa": (theirs, peer)}
    prompt = torch.randint(1, case.sizes["vocab_size"], (case.prompt,)).tolist()
    yield from compare(case, env, providers, prompt)


def with_drafts(folder: Path, env: Environment) -> Iterator[Row]:
    """Rows without and with drafts for a run of `saccade train`: after a prompt, and after code that repeats."""
    net = load_model(folder, torch.float32)
    net.config = replace(net.config, eos_token_id=-1)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    providers = {"saccade": (ours, net), "saccade drafts": (by_drafts, net)}
    for name, text in TEXTS.items():
        prompt = tokenizer.encode([text])[0].tolist()
        yield from compare(Case(f"demo-{name}", {}, torch.float32, len(prompt), 200), env, providers, prompt)


def compare(case: Case, env: Environment, providers: dict[str, tuple[Any, Any]], prompt: list[int]) -> Iterator[Row]:
    """A row for each provider, draw and model. Ratios are to transformers, or to no drafts."""
    samples: dict[str, list[float]] = {name: [] for name in providers}
    drawn: dict[str, list[int]] = {}
    # the first round warms up
    for n in range(ROUNDS + 1 if case.prompt < 1000 else 3):
        for name, (draw, model) in providers.items():
            seconds, drawn[name] = timed(draw, model, case, prompt)
            if n:
                samples[name].append(seconds)
    first, second = drawn.values()
    same = next((n for n, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))
    parameters = sum(x.numel() for x in next(iter(providers.values()))[1].parameters())
    dtype, differ = str(case.dtype).removeprefix("torch."), f"tokens differ from number {same} on"
    base = "transformers sdpa" if "transformers sdpa" in samples else "saccade"
    for name, seconds in samples.items():
        token = timing(seconds)
        # of neighbouring samples, because the machine may become slower or faster
        ratio = float(np.median(np.array(samples[base]) / seconds))
        values = {"parameters": parameters, "prompt": case.prompt, "new": case.tokens, "ratio": ratio}
        text = note(values, "" if same == len(first) else differ)
        row = Row(*env, case.name, name, "generate", dtype, note=text, **token._asdict())
        yield replace(row, rate=1 / token.median, rate_unit="token/s")


def main() -> None:
    """Measure and write the rows."""
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, help="a run of `saccade train`, with and without drafts")
    args = arguments.parse_args()
    env = environment(args.commit)
    if args.model:
        write(args.out, with_drafts(args.model, env))
        return
    picked = chosen((case for case in CASES if args.only in case.name), args.part)
    write(args.out, (row for case in picked for row in run(case, env)))


if __name__ == "__main__":
    main()
