"""`generate` and `serve` compared with transformers and sdpa: `python benchmarks/generation.py rows.csv`.

Each size has one random Llama, whose weights are saved once and loaded by both libraries. Both draw greedy tokens after
the same prompts, in turn. The rate is new tokens per second of all prompts, between the first and the last of a prompt;
`first` is the seconds until the first. If the tokens differ, the row says from which token on. The two largest logits
of a random model are close, and bfloat16 may round them to the same number.

The cases "served" are many prompts of different lengths, half of which begin with the same tokens. Saccade draws for 16
of them at a time, and transformers for 16 after 16, with padding. Their rates include the time that prompts take.
`--device cuda` runs cases for GPUs. There both are also measured with torch.compile: Saccade's steps, and the model of
transformers with a static cache. The ceiling of a case is the rate at which a copy of the GPU reads the matrices and
the cached keys and values once for each step.

`--model demo` compares `generate` without and with drafts instead, on the model of `make demo` or another run.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from arguments import chosen, parser
from nvidia_recurrent import reached

from saccade.cli.bench.clocks import timing
from saccade.cli.bench.machine import Environment, environment, gpu_environment
from saccade.cli.bench.rows import Row, kept, note, write
from saccade.models.batching import serve
from saccade.models.llama import Llama, LlamaConfig
from saccade.models.loading import load_model
from saccade.models.sampling import Sampler, generate
from saccade.models.speed import matrix_parameters
from saccade.models.tokens import load_tokenizer
from saccade.models.weights import save_weights

ROUNDS = 5
Prompts = list[list[int]]
# (time, a token of each prompt) of each step
Drawn = list[tuple[float, list[int]]]
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
TINY = dict(zip(SIZES, (4096, 256, 4, 8, 2), strict=True))
PRESET = dict(zip(SIZES, (16384, 512, 8, 8, 4), strict=True)) | {"tie_word_embeddings": True}
PRESET_350 = dict(zip(SIZES, (32768, 1024, 24, 16, 8), strict=True))
LARGE = dict(zip(SIZES, (32000, 768, 12, 12, 4), strict=True))


class Case(NamedTuple):
    """A model's name and sizes, its dtype, how many tokens a prompt has and are drawn, and the number of prompts."""

    model: str
    sizes: dict[str, int]
    dtype: torch.dtype
    prompt: int
    tokens: int
    prompts: int = 1
    device: str = "cpu"
    served: bool = False

    @property
    def name(self) -> str:
        if self.served:
            return f"{self.model}-served"
        return f"{self.model}-{self.prompt}{f'-{self.prompts}-prompts' if self.prompts > 1 else ''}"

    @property
    def typed(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def rounds(self) -> int:
        """The timed rounds."""
        long = self.prompt * self.prompts
        return ROUNDS if long < 1000 else 3 if long < 20_000 else 2 if long < LONG or self.device != "cpu" else 1


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
    *(Case("llama-30m", PRESET, dtype, 1024, 64, 48, served=True) for dtype in (torch.float32, torch.bfloat16)),
    *(
        Case("llama-350m", PRESET_350, torch.bfloat16, prompt, 128, prompts, "cuda")
        # 64 prompts of 32k tokens would take 103 GB
        for prompt, prompts in ((1024, 64), (1024, 1), (1024, 16), (32768, 1), (32768, 16))
    ),
    Case("llama-350m", PRESET_350, torch.bfloat16, 1024, 128, 64, "cuda", served=True),
]
# prompts of so many tokens take minutes on a CPU, and the first round is timed, too
LONG = 100_000
# how many prompts are drawn for at a time
BATCH = 16
# how transformers draws
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

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


def theirs(model: Any, prompts: Prompts, tokens: int, **more: str) -> Drawn:
    """The same by `generate` of transformers, which asks after each step whether to stop; times are after the reads."""
    drawn: Drawn = []

    def go_on(ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        last = ids[:, -1].tolist()
        drawn.append((time.perf_counter(), last))
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    ids = torch.tensor(prompts, device=model.device)
    options = {"stopping_criteria": [go_on], "max_new_tokens": tokens, **GREEDY, **more}
    model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return drawn


def ours_served(model: Any, prompts: Prompts, tokens: int) -> Drawn:
    """The tokens of all prompts, when the last prompt has ended."""
    texts = dict(serve(model, prompts, tokens, Sampler(0.0), batch=BATCH))
    return [(time.perf_counter(), texts[n]) for n in range(len(prompts))]


def theirs_served(model: Any, prompts: Prompts, tokens: int) -> Drawn:
    """The same by transformers, for BATCH prompts after each other, with padding before shorter prompts."""
    texts: list[list[int]] = []
    for start in range(0, len(prompts), BATCH):
        some = prompts[start : start + BATCH]
        longest = max(map(len, some))
        ids = torch.tensor([[0] * (longest - len(one)) + one for one in some], device=model.device)
        texts += model.generate(ids, attention_mask=(ids > 0).long(), max_new_tokens=tokens, **GREEDY)[
            :, longest:
        ].tolist()
    return [(time.perf_counter(), text) for text in texts]


def by_drafts(model: Any, prompts: Prompts, tokens: int) -> Drawn:
    """The same by Saccade with drafts of n-grams."""
    drawn = generate(model, prompts, tokens, Sampler(0.0), draft="ngram")
    return [(time.perf_counter(), token) for token in drawn]


def timed(draw: Any, model: Any, case: Case, prompts: Prompts) -> tuple[float, float, list[list[int]]]:
    """(seconds until the first token, seconds per step after it, the tokens)."""
    start = time.perf_counter()
    times, drawn = zip(*draw(model, prompts, case.tokens), strict=True)
    if case.served:
        return times[-1] - start, (times[-1] - start) / case.tokens, list(drawn)
    return times[0] - start, (times[-1] - times[0]) / (len(times) - 1), list(drawn)


def run(case: Case, env: Environment) -> Iterator[Row]:
    """A row for Saccade and one for transformers."""
    with tempfile.TemporaryDirectory() as folder:
        yield from with_transformers(case, env, Path(folder))


def with_transformers(case: Case, env: Environment, folder: Path) -> Iterator[Row]:
    """The same for a model that is saved in the folder."""
    torch.manual_seed(0)
    # an id that no token has, so that nothing ends the text
    config = LlamaConfig(**case.sizes, max_position_embeddings=65536, eos_token_id=-1)
    net = Llama(config)
    save_weights(folder / "model.safetensors", net)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    draw, drawn_by_peer = (ours_served, theirs_served) if case.served else (ours, theirs)
    providers = {"saccade": (draw, load_model(folder, case.dtype, case.device))}
    if case.device != "cpu":
        providers["saccade, compiled steps"] = draw, load_model(folder, case.dtype, case.device)
        providers["saccade, compiled steps"][1].compile_steps()
    if find_spec("transformers"):
        from transformers import AutoModelForCausalLM

        peer = AutoModelForCausalLM.from_pretrained(folder, dtype=case.dtype, attn_implementation="sdpa").eval()
        providers["transformers sdpa"] = drawn_by_peer, peer.to(case.device)
        if case.device != "cpu" and not case.served:
            torch.compiler.reset()
            providers["transformers sdpa, static cache"] = partial(theirs, cache_implementation="static"), peer
    prompts = torch.randint(1, case.sizes["vocab_size"], (case.prompts, case.prompt)).tolist()
    if case.served:
        # of 64 tokens to the most, and half of them begin with the same 256
        lengths = torch.randint(64, case.prompt + 1, (case.prompts,)).tolist()
        starts = prompts[0][:256], []
        prompts = [(starts[n % 2] + one)[: lengths[n]] for n, one in enumerate(prompts)]
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
    """A row for each provider, draw and model. Ratios are to transformers, or to no drafts.

    A peer that raises, usually because it takes too much memory, has a row with the message and no figure.
    """
    samples: dict[str, list[float]] = {name: [] for name in providers}
    firsts: dict[str, list[float]] = {name: [] for name in providers}
    drawn, failed = dict[str, list[list[int]]](), dict[str, str]()
    # the first round warms up
    warm = int(case.prompt * case.prompts < LONG or case.device != "cpu")
    for n, (name, (draw, model)) in product(range(1 - warm, case.rounds + 1), providers.items()):
        if name not in failed:
            try:
                first_token, seconds, drawn[name] = timed(draw, model, case, prompts)
            except RuntimeError as error:
                if name.startswith("saccade"):
                    raise
                failed[name] = str(error).splitlines()[0][:200]
                continue
            if n:
                samples[name].append(seconds)
                firsts[name].append(first_token)
    first, *others = drawn.values()
    same = next((n for n, text in enumerate(first) if any(other[n] != text for other in others)), len(first))
    base = "transformers sdpa" if "transformers sdpa" in samples.keys() - failed.keys() else "saccade"
    model = next(iter(providers.values()))[1]
    values = {"parameters": sum(x.numel() for x in model.parameters())}
    values |= {"prompt": case.prompt, "prompts": case.prompts, "new": case.tokens}
    top = case.prompts / seconds_of_bytes(model, case) if case.device != "cpu" and not case.served else nan
    for name, seconds in samples.items():
        row = Row(*env, case.name, name, "generate", case.typed, rate_unit="token/s", ceiling=top)
        if name in failed:
            yield replace(row, note=note(values, failed[name]))
            continue
        token = timing(seconds)
        rate = case.prompts / token.median
        # of neighbouring samples, because the machine may become slower or faster
        compared = {"ratio": float(np.median(np.array(samples[base]) / seconds))}
        if not case.served:
            compared["first"] = float(np.median(firsts[name]))
            compared["ratio_first"] = float(np.median(np.array(firsts[base]) / firsts[name]))
        which = "" if same == len(first) else f"{'texts' if case.served else 'tokens'} differ from {same} on"
        yield replace(row, rate=rate, fraction=rate / top, note=note(values | compared, which), **token._asdict())


def seconds_of_bytes(model: Any, case: Case) -> float:
    """The seconds in which a copy of the GPU reads what a step must read: the matrices, and the cache in the middle."""
    layers, kv_heads, size = model.cached
    numbers = matrix_parameters(model, case.sizes.get("tie_word_embeddings", False))
    numbers += 2 * case.prompts * (case.prompt + case.tokens // 2) * layers * kv_heads * size
    return numbers * case.dtype.itemsize / 1e9 / reached()["GB/s"]


def main() -> None:
    """Measure and write the rows."""
    arguments = parser(__doc__, resumes=True)
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--model", type=Path, help="a run of `saccade train`, with and without drafts")
    args = arguments.parse_args()
    env = (environment if args.device == "cpu" else gpu_environment)(args.commit)
    if args.model:
        write(args.out, with_drafts(args.model, env))
        return
    here = (case for case in CASES if args.only in case.name and case.device == args.device)
    earlier = kept(args.out, env) if args.resume else []
    done = {(row.case, row.dtype) for row in earlier}
    picked = [case for case in chosen(here, args.part) if (case.name, case.typed) not in done]
    write(args.out, (row for case in picked for row in run(case, env)), earlier)


if __name__ == "__main__":
    main()
