"""`saccade generate`: text from a trained model, through the KV cache."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console

from . import show
from .devices import checked_backend
from .train import share_cores
from .watch import DEFAULT_OUT

if TYPE_CHECKING:
    from saccade.models.drafts import Draft
    from saccade.models.tokens import Tokenizer

TOKENS = 200
PROMPT = "class Reader:\n    def __init__(self, "


def generate(
    model: Annotated[Path, typer.Option(help="Folder of a run: config, weights and tokenizer.")] = DEFAULT_OUT,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue; repeat the option for a batch. (the start of a class)")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="File of prompts, one per line, or of JSON strings.")] = None,
    batch: Annotated[int | None, typer.Option(help="Prompts of --prompts that run at the same time. (8)")] = None,
    tokens: Annotated[int | None, typer.Option(help="Most new tokens. (200, or fewer if the positions end)")] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.7,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0 from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the fewest tokens whose probabilities reach this sum.")] = 0.9,
    sinks: Annotated[int | None, typer.Option(help="With --window: first tokens whose keys are kept. (4)")] = None,
    window: Annotated[int, typer.Option(help="Keep only the keys of this many last tokens; 0 keeps all.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    chunk: Annotated[int | None, typer.Option(help="Tokens of a prompt read at a time. (256 or more)")] = None,
    rows: Annotated[int, typer.Option(help="Tokens of each pass of --prompts, so that texts ignore the batch.")] = 0,
    dtype: Annotated[str, typer.Option(help="Dtype of weights and keys: float32 or bfloat16.")] = "float32",
    quantised: Annotated[str | None, typer.Option(help="Store keys and values as int8, fp8 or int4 codes.")] = None,
    draft: Annotated[
        str | None, typer.Option(help="ngram: draft tokens by what the text repeats, and check several in one call.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the model: cpu, cuda, cuda:1.")] = "cpu",
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the steps of an NVIDIA GPU first.")] = False,
    backend: Annotated[str | None, typer.Option(help="Attention backend; by default chosen by device.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print texts and figures as JSON.")] = False,
) -> None:
    """Continue prompts with a trained model.

    Several prompts are one ragged batch. Prompts of a file share a running batch, and each is printed when it ends.
    """
    share_cores()
    numbers = {"tokens": tokens, "batch": batch, "chunk": chunk, "window": window, "sinks": sinks, "seed": seed}
    numbers |= {"rows": rows, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    with show.plain_errors("generate", "train"):
        check_options(prompt, prompts, dtype, numbers, backend)
        check_compiled(compiled, {"--window": window, "--rows": rows, "--draft": draft})
        net, tokenizer = loaded(model, dtype, device, compiled, quantised, served=prompts is not None)
        from saccade.models.batching import serve
        from saccade.models.drafts import Draft
        from saccade.models.sampling import Sampler
        from saccade.models.sampling import generate as draw_tokens

        texts = prompt or [PROMPT] if prompts is None else read_prompts(prompts)
        prompt_tokens, first = open_ended(tokenizer, texts)
        tokens = tokens or (TOKENS if window else that_fit(net, prompt_tokens))
        sampler = Sampler(temperature, top_k, top_p)
        options = dict[str, Any](seed=seed, first=first, chunk=chunk, backend=backend, quantised=quantised)
        options["draft"] = drafts = Draft.of(draft)
        if prompts is not None:
            served = serve(net, prompt_tokens, tokens, sampler, batch=batch or 8, rows=rows or None, **options)
            print_served(served, tokenizer, texts, prompt_tokens, drafts, as_json=as_json)
            return
        done, streamed = [list(ids) for ids in prompt_tokens], not as_json and len(texts) == 1
        shown, started = "", time.perf_counter()
        keep = (4 if sinks is None else sinks, window) if window else None
        for drawn in draw_tokens(net, prompt_tokens, tokens, sampler, keep=keep, **options):
            for ids, token in zip(done, drawn, strict=True):
                ids.append(token)
            if streamed:
                shown = stream(tokenizer.decode(done[0]), shown)
        seconds = time.perf_counter() - started
    result = dict[str, Any](model=str(model), seed=seed, prompts=texts, texts=[tokenizer.decode(ids) for ids in done])
    result |= {"seconds": seconds, **figures_of(done, prompt_tokens, net.config.ends, seconds)}
    print_texts(result, shown, drafts, as_json=as_json)


def print_texts(result: dict[str, Any], shown: str, drafts: Draft | None, *, as_json: bool) -> None:
    """Prints the result of `generate` as a line of JSON, or its texts without what is shown already."""
    if as_json:
        print(json.dumps(result if drafts is None else result | {"tokens_per_call": drafts.tokens_per_call}))
        return
    print("\n\n".join(result["texts"])[len(shown) :])
    rate = f"{result['tokens_per_second']:.0f} token/s{per_call(drafts)}"
    prompts = f" of {len(result['texts'])} prompts" if len(result["texts"]) > 1 else ""
    print(f"\n{result['new_tokens']} tokens{prompts} in {result['seconds']:.2f} s, {rate}", file=sys.stderr)


def that_fit(net: Any, prompts: Sequence[Sequence[int]]) -> int:
    """The default number of new tokens: `TOKENS`, or as many as there are positions after the longest prompt."""
    # a prompt that leaves no room is refused with its own error
    return max(1, min(TOKENS, net.config.max_position_embeddings - max(map(len, prompts))))


def figures_of(
    texts: Sequence[list[int]], prompts: Sequence[list[int]], ends: Sequence[int], seconds: float
) -> dict[str, Any]:
    """The number of new tokens of all texts, and the speed.

    A text that has ended repeats the end token while others go on; the repetitions are not counted.
    """
    drawn = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
    count = sum(next((n for n, token in enumerate(new, 1) if token in ends), len(new)) for new in drawn)
    return {"new_tokens": count, "tokens_per_second": count / max(seconds, 1e-9)}


def per_call(drafts: Draft | None) -> str:
    """The end of a sentence with figures: how many tokens a call drew on average."""
    return "" if drafts is None else f", {drafts.tokens_per_call:.2f} tokens per call"


def loaded(
    folder: Path, dtype: str, device: str, compiled: bool, quantised: str | None, *, served: bool
) -> tuple[Any, Tokenizer]:
    """A folder's model on a device, and its tokenizer. compiled, served: whether its steps are compiled, in pages.

    Raises as `load_model`, `load_tokenizer`, `device_of` and `Decoder.compile_steps` do, and ValueError for both if no
    steps with its pages are replayed, and for quantised keys of a model that has none.
    """
    with show.working(Console(stderr=True), "loading the model"):
        import torch

        from saccade.models.loading import device_of, load_model
        from saccade.models.tokens import load_tokenizer

        net = load_model(folder, getattr(torch, dtype), device_of(device))
        if quantised and not net.cached[0]:
            raise ValueError(f"--quantised is {quantised!r}, and no layer of this model stores keys; leave it out")
        if compiled:
            net.compile_steps()
            if served and not net.replayable(net.make_pages(1, 1)):
                raise ValueError(
                    f"--compile is given with --prompts for a {type(net).__name__}, whose pages hold latent rows: "
                    "no steps are replayed with them; give one of the two"
                )
        return net, load_tokenizer(folder / "tokenizer.json")


def check_compiled(compiled: bool, others: dict[str, Any]) -> None:
    """Raises ValueError if compiled steps are asked for with another option, with which no steps are replayed."""
    for name, value in others.items():
        if compiled and value:
            raise ValueError(f"--compile is given with {name}, which replays no steps; give one of them")


def check_options(
    prompt: list[str] | None, prompts: Path | None, dtype: str, numbers: dict[str, Any], backend: str | None
) -> None:
    """Raises ValueError for numbers out of range and for options that exclude each other."""
    from saccade.models.fields import OPTIONS, check_fields
    from saccade.models.settings import DTYPES

    numbers = {name: value for name, value in numbers.items() if value is not None}
    check_fields(numbers, OPTIONS, spelled=show.flag)
    if prompts is not None and prompt:
        raise ValueError("both --prompt and --prompts are given; expected one of them")
    if prompts is not None and numbers["window"]:
        raise ValueError("--window is for --prompt; prompts of a file share pages, which are not shortened")
    for name in ("rows", "batch"):
        if prompts is None and numbers.get(name):
            raise ValueError(f"{show.flag(name)} is for --prompts, which share a running batch")
    if "sinks" in numbers and not numbers["window"]:
        raise ValueError("--sinks is for --window; without it, the keys of all tokens are kept")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype is {dtype!r}; expected 'float32' or 'bfloat16'")
    checked_backend(backend)


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file, one per line; a line that starts with a quote is a JSON string, which may have newlines.

    Raises ValueError for a file that cannot be read or has no prompts, and for a quoted line that is not JSON.
    """
    try:
        # a prompt may contain what Unicode calls the end of a line, such as U+2028
        lines = path.read_text(encoding="utf-8-sig").split("\n")
        prompts = [json.loads(line) if line.startswith('"') else line for line in lines if line.strip()]
    except OSError as error:
        raise ValueError(f"--prompts names {show.sentence(error)}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: {error}; expected UTF-8 text, a prompt or a JSON string on each line") from None
    if not prompts:
        raise ValueError(f"{path} holds no prompt; expected one on each line")
    return prompts


def print_served(
    served: Iterable[tuple[int, list[int]]],
    tokenizer: Tokenizer,
    prompts: list[str],
    prompt_tokens: list[list[int]],
    drafts: Draft | None = None,
    *,
    as_json: bool,
) -> None:
    """Prints the text of each prompt when it ends: as a line of JSON with its number, or under a heading.

    served: numbers and new tokens, as `models.batching.serve` yields them; prompt_tokens: the tokens of the prompts.
    """
    started, count = time.perf_counter(), 0
    for number, drawn in served:
        count += len(drawn)
        text = tokenizer.decode([*prompt_tokens[number], *drawn])
        if as_json:
            line = {"number": number, "prompt": prompts[number], "text": text, "new_tokens": len(drawn)}
            print(json.dumps(line), flush=True)
        else:
            print(f"--- {number + 1} of {len(prompts)} ---\n{text}\n", flush=True)
    seconds = time.perf_counter() - started
    rate = count / max(seconds, 1e-9)
    figures = f"{len(prompts)} prompts, {count} tokens in {seconds:.2f} s, {rate:.0f} token/s"
    print(f"{figures}{per_call(drafts)}", file=sys.stderr)


def open_ended(tokenizer: Tokenizer, prompts: list[str]) -> tuple[list[list[int]], np.ndarray]:
    """Token ids of the prompts without their last token, and bool [B, vocab]: the tokens that may replace it.

    A prompt may end inside a token, as `"def "` does, and a model has never seen text that continues from there. So its
    last token is dropped, and the first drawn token must start with the text of the dropped one. A prompt begins with
    the special tokens that its tokenizer puts before a text. Raises ValueError for a prompt that is not UTF-8 text.
    """
    for n, prompt in enumerate(prompts):
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise ValueError(f"prompt {n} is not UTF-8 text: {prompt!a}") from None
    starts: list[list[int]] = []
    first: list[np.ndarray] = []
    for before, ids in map(tokenizer.opening, prompts):
        start = [*before, *ids[:-1]] or ([] if tokenizer.begin is None else [tokenizer.begin])
        dropped = ids[-1:] if start else []
        starts.append(start or ids)
        first.append(tokenizer.continuations(dropped[0]) if dropped else np.ones(tokenizer.vocab_size, bool))
    return starts, np.stack(first)


def stream(text: str, shown: str) -> str:
    """Print the part of text after `shown`, without an incomplete character; return all that has been shown."""
    whole = text.rstrip("\ufffd")
    print(whole[len(shown) :], end="", flush=True)
    return whole
