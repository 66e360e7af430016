"""`generate` compared with transformers and sdpa, on the CPU: `python benchmarks/generation.py rows.csv`.

Each size has one random Llama, whose weights are saved once and loaded by both libraries. Both draw greedy tokens after
the same prompts, in turn. The rate is new tokens per second of all prompts, between the first and the last of a prompt;
`first` is the seconds until the first. If the tokens differ, the row says from which token on. The two largest logits
of a random model are close, and bfloat16 may round them to the same number.

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
Prompts = list[list[int]]
# (time, a token of each prompt) of each step
Drawn = list[tuple[float, list[int]]]
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
TINY = dict(zip(SIZES, (4096, 256, 4, 8, 2), strict=True))
PRESET = dict(zip(SIZES, (16384, 512, 8, 8, 4), strict=True)) | {"tie_word_embeddings": True}
LARGE = dict(zip(SIZES, (32000, 768, 12, 12, 4), strict=True))


class Case(NamedTuple):
    """A model's name and sizes, its dtype, how many tokens a prompt has and are drawn, and the number of prompts."""

    model: str
    sizes: dict[str, int]
    dtype: torch.dtype
    prompt: int
    tokens: int
    prompts: int = 1

    @property
    def name(self) -> str:
        return f"{self.model}-{self.prompt}{f'-{self.prompts}-prompts' if self.prompts > 1 else ''}"

    @property
    def rounds(self) -> int:
        """The timed rounds."""
        long = self.prompt * self.prompts
        return ROUNDS if long < 1000 else 3 if long < 20_000 else 2


CASES = [
    Case("tiny", TINY, torch.float32, 64, 256),
    Case("100M", LARGE, torch.float32, 64, 64),
    Case("100M", LARGE, torch.bfloat16, 64, 64),
    Case("100M", LARGE, torch.float32, 8192, 32),
    Case("100M", LARGE, torch.bfloat16, 8192, 32),
    *(
        Case("llama-30m", PRESET, dtype, prompt, 32, prompts)
        for dtype in (torch.float32, torch.bfloat16)
        for prompt in (1024, 8192)
        for prompts in (1, 4, 16)
    ),
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


def ours(model: Any, prompts: Prompts, tokens: int) -> Drawn:
    """(time, a token of each prompt) for each step, drawn by Saccade."""
    return [(time.perf_counter(), drawn) for drawn in generate(model, prompts, tokens, Sampler(0.0))]


def theirs(model: Any, prompts: Prompts, tokens: int) -> Drawn:
    """The same by `generate` of transformers, which asks after each step whether to stop."""
    drawn: Drawn = []

    def go_on(ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        drawn.append((time.perf_counter(), ids[:, -1].tolist()))
        return torch.zeros(len(ids), dtype=torch.bool)

    ids = torch.tensor(prompts)
    greedy = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model.generate(ids, attention_mask=torch.ones_like(ids), stopping_criteria=[go_on], **greedy)
    return drawn


def by_drafts(model: Any, prompts: Prompts, tokens: int) -> Drawn:
    """The same by Saccade with drafts of n-grams."""
    drawn = generate(model, prompts, tokens, Sampler(0.0), draft="ngram")
    return [(time.perf_counter(), token) for token in drawn]


def timed(draw: Any, model: Any, case: Case, prompts: Prompts) -> tuple[float, float, list[list[int]]]:
    """(seconds until the first token, seconds per step after it, the tokens)."""
    start = time.perf_counter()
    times, drawn = zip(*draw(model, prompts, case.tokens), strict=True)
    return times[0] - start, (times[-1] - times[0]) / (len(times) - 1), list(drawn)


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
    prompts = torch.randint(1, case.sizes["vocab_size"], (case.prompts, case.prompt)).tolist()
    yield from compare(case, env, providers, prompts)


def with_drafts(folder: Path, env: Environment) -> Iterator[Row]:
    """Rows without and with drafts for a run of `saccade train`: after a prompt, and after code that repeats."""
    net = load_model(folder, torch.float32)
    net.config = replace(net.config, eos_token_id=-1)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    providers = {"saccade": (ours, net), "saccade drafts": (by_drafts, net)}
    for name, text in TEXTS.items():
        prompt = tokenizer.encode([text])[0].tolist()
        yield from compare(Case(f"demo-{name}", {}, torch.float32, len(prompt), 200), env, providers, [prompt])


def compare(case: Case, env: Environment, providers: dict[str, tuple[Any, Any]], prompts: Prompts) -> Iterator[Row]:
    """A row for each provider, draw and model. Ratios are to transformers, or to no drafts."""
    samples: dict[str, list[float]] = {name: [] for name in providers}
    firsts: dict[str, list[float]] = {name: [] for name in providers}
    drawn: dict[str, list[list[int]]] = {}
    # the first round warms up
    for n in range(case.rounds + 1):
        for name, (draw, model) in providers.items():
            first_token, seconds, drawn[name] = timed(draw, model, case, prompts)
            if n:
                samples[name].append(seconds)
                firsts[name].append(first_token)
    first, second = drawn.values()
    same = next((n for n, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))
    parameters = sum(x.numel() for x in next(iter(providers.values()))[1].parameters())
    dtype, differ = str(case.dtype).removeprefix("torch."), f"tokens differ from number {same} on"
    base = "transformers sdpa" if "transformers sdpa" in samples else "saccade"
    for name, seconds in samples.items():
        token = timing(seconds)
        # of neighbouring samples, because the machine may become slower or faster
        ratio = float(np.median(np.array(samples[base]) / seconds))
        sooner = float(np.median(np.array(firsts[base]) / firsts[name]))
        values = {"parameters": parameters, "prompt": case.prompt, "prompts": case.prompts, "new": case.tokens}
        values |= {"ratio": ratio, "first": float(np.median(firsts[name])), "ratio_first": sooner}
        text = note(values, "" if same == len(first) else differ)
        row = Row(*env, case.name, name, "generate", dtype, note=text, **token._asdict())
        yield replace(row, rate=case.prompts / token.median, rate_unit="token/s")


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
