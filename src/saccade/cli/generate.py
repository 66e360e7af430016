"""``saccade generate``: text from a trained model, through the KV cache."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from saccade.cli.train import DEFAULT_OUT, plain_errors, share_cores

if TYPE_CHECKING:
    from saccade.models.tokens import Tokenizer


def generate(
    model: Annotated[Path, typer.Option(help="Folder of a run: config, weights and tokenizer.")] = DEFAULT_OUT,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; repeat it for a batch. ('def ')")] = None,
    tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.7,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest; 0 from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the fewest whose probabilities reach this.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    chunk: Annotated[int, typer.Option(help="Tokens of the prompt taken at a time.")] = 256,
    backend: Annotated[str | None, typer.Option(help="Attention backend; by default chosen by device.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print texts and figures as JSON.")] = False,
) -> None:
    """Continue prompts with a trained model; several prompts go as one ragged batch."""
    share_cores()
    with plain_errors("generate"):
        from saccade.models.loading import load_model
        from saccade.models.sampling import Sampler
        from saccade.models.sampling import generate as draw_tokens
        from saccade.models.tokens import load_tokenizer

        net, tokenizer = load_model(model), load_tokenizer(model / "tokenizer.json")
        prompts = prompt or ["def "]
        begun, first = open_ended(tokenizer, prompts)
        done = [list(ids) for ids in begun]
        sampler = Sampler(temperature, top_k, top_p)
        streamed = not as_json and len(prompts) == 1
        shown, started, count = "", time.perf_counter(), 0
        for drawn in draw_tokens(net, begun, tokens, sampler, seed=seed, first=first, chunk=chunk, backend=backend):
            count += 1
            for ids, token in zip(done, drawn, strict=True):
                ids.append(token)
            if streamed:
                shown = stream(tokenizer.decode(done[0]), shown)
        seconds = time.perf_counter() - started
    texts = [tokenizer.decode(ids) for ids in done]
    rate = count * len(prompts) / max(seconds, 1e-9)
    if as_json:
        result: dict[str, Any] = {"model": str(model), "prompts": prompts, "texts": texts, "seconds": seconds}
        print(json.dumps({**result, "new_tokens": count, "tokens_per_second": rate, "seed": seed}))
        return
    if streamed:
        print(texts[0][len(shown) :])
    else:
        print("\n\n".join(texts))
    print(f"\n{count} tokens a prompt in {seconds:.2f} s, {rate:.0f} token/s", file=sys.stderr)


def open_ended(tokenizer: Tokenizer, prompts: list[str]) -> tuple[list[list[int]], np.ndarray]:
    """Token ids of the prompts without their last token, and bool [B, vocab]: what may stand in its place.

    A prompt that stops inside a token, as ``"def "`` does, would else be followed by what never follows in text: the
    first draw is held to tokens that begin with the dropped one.
    """
    kept: list[list[int]] = []
    first: list[np.ndarray] = []
    for ids in tokenizer.encode(prompts):
        kept.append([*ids[:-1].tolist()] or [0])
        first.append(tokenizer.continuations(int(ids[-1])) if len(ids) else np.ones(tokenizer.vocab_size, bool))
    return kept, np.stack(first)


def stream(text: str, shown: str) -> str:
    """Prints what text adds to shown, but for a character not yet whole; returns what is shown now."""
    whole = text.rstrip("\ufffd")
    print(whole[len(shown) :], end="", flush=True)
    return whole
