"""Models on a GPU: training steps and generation, compared with the CPU, and what the host does in a step.

Run by `make test-gpu`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("safetensors")

from saccade.models import replay
from saccade.models.attended import attended
from saccade.models.batching import serve
from saccade.models.gpt2 import Gpt2, Gpt2Config
from saccade.models.llama import Llama, LlamaConfig
from saccade.models.sampling import Sampler, generate
from saccade.models.training import Trainer

VOCABULARY = 61
SMALL = {"layers": 4, "width": 64, "heads": 4, "kv_heads": 2, "context": 64, "batch": 2, "tokenizer": "bytes"}
SMALL |= {"steps": 6, "checkpoint_every": 3, "validation_rows": 2, "text": (argparse.__file__,)}


def model_of(kind: str) -> Llama | Gpt2:
    torch.manual_seed(0)
    if kind == "gpt2":
        return Gpt2(Gpt2Config(VOCABULARY, 64, 2, 4, n_positions=400, eos_token_id=-1))
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Llama(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=400, eos_token_id=-1, **sizes))


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("quantised", [None, "int8", "fp8"])
def test_replayed_steps_draw_what_the_cpu_draws(kind: str, quantised: str | None) -> None:
    model, texts = model_of(kind), prompts(40, 3, 17)
    options = {"chunk": 16, "quantised": quantised}
    expected = list(generate(model, texts, 60, Sampler(0.0), **options))
    found = list(generate(model.to("cuda"), texts, 60, Sampler(0.0), **options))
    # rounding may decide between almost equal logits, and the texts differ from there on
    same = sum(a == b for a, b in zip(zip(*expected, strict=True), zip(*found, strict=True), strict=True))
    assert same >= 2


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_weights_of_heads(kind: str) -> None:
    model, (text,) = model_of(kind), prompts(30)
    expected = attended(model, text)
    np.testing.assert_allclose(attended(model.to("cuda"), text), expected, atol=1e-5)


def test_the_command_trains_and_draws(tmp_path: Path) -> None:
    sizes = "--layers 1 --width 64 --heads 2 --kv-heads 1 --context 64 --batch 2 --steps 3 --tokenizer bytes"
    command = [sys.executable, "-m", "saccade", "train", "--device", "cuda", "--out", str(tmp_path / "run")]
    subprocess.run([*command, *sizes.split(), "--text", argparse.__file__], check=True)
    assert (tmp_path / "run" / "attention.png").exists()


def test_compiled_steps_draw_what_others_draw() -> None:
    model, texts = model_of("llama").to("cuda"), prompts(40, 3)
    expected = list(generate(model, texts, 60, Sampler(0.0)))
    model.compile_steps()
    found = list(generate(model, texts, 60, Sampler(0.0)))
    # rounding may decide between almost equal logits later
    assert found[:20] == expected[:20]


@pytest.mark.parametrize("compiled", [False, True])
def test_one_prompt_draws_what_the_cpu_draws(compiled: bool) -> None:
    """Its steps have kernels of their own, also in the graph that later calls use again."""
    model, texts = model_of("llama"), [prompts(40), prompts(33)]
    expected = [list(generate(model, text, 60, Sampler(0.0))) for text in texts]
    model.to("cuda")
    if compiled:
        model.compile_steps()
    for text, want in zip(texts, expected, strict=True):
        # rounding may decide between almost equal logits later
        assert list(generate(model, text, 60, Sampler(0.0)))[:20] == want[:20]
    assert (model.kept_steps is not None) is compiled


def test_kept_steps_survive_other_graphs() -> None:
    model, texts = model_of("llama").to("cuda", torch.bfloat16), prompts(40, 3)
    model.compile_steps()
    expected = list(generate(model, texts, 60, Sampler(0.0)))
    kept = model.kept_steps
    # what torch does when it captures a graph of its own
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    filler = [torch.full((1 << 24,), torch.nan, device="cuda") for _ in range(20)]
    for _ in range(2 + len(model.blocks)):
        assert list(generate(model, texts, 60, Sampler(0.0))) == expected
        # small arrays that are freed between calls
        filler += [torch.full((2,), 1 << 20, dtype=torch.int32, device="cuda") for _ in range(50)]
    assert model.kept_steps is kept
    alive = weakref.ref(model)
    del filler, model, kept
    assert alive() is None


def test_draws_of_replayed_steps_differ_and_repeat() -> None:
    model = model_of("llama").to("cuda")
    texts = [list(generate(model, prompts(9), 40, Sampler(0.9), seed=seed)) for seed in (1, 2, 1)]
    assert texts[0] == texts[2]
    assert texts[0] != texts[1]
    assert len({token for (token,) in texts[0]}) > 5


def launches(run: Callable[[], object]) -> tuple[int, int]:
    """How many graphs and how many kernels the host launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    names = [e.name for e in profile.events() if "Launch" in e.name]
    graphs = sum("Graph" in name for name in names)
    return graphs, len(names) - graphs


@pytest.mark.parametrize("draw", [generate, serve])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_no_python_runs_between_the_kernels_of_a_step(draw: Callable[..., Any], temperature: float) -> None:
    model, texts = model_of("llama").to("cuda"), prompts(9, 12)
    counts = [1 + replay.AHEAD, 1 + 3 * replay.AHEAD]
    list(draw(model, texts, counts[0], Sampler(temperature)))
    few, many = (launches(lambda n=n: list(draw(model, texts, n, Sampler(temperature)))) for n in counts)
    # one launch starts all kernels of a step; the others are of prompts, of the capture, and of each read of tokens
    assert few[0] == replay.AHEAD
    assert many[0] == 3 * replay.AHEAD
    assert many[1] - few[1] <= 2 * 12


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("quantised", [None, "int8", "fp8"])
def test_served_texts_do_not_depend_on_the_batch(temperature: float, quantised: str | None) -> None:
    model, texts = model_of("llama").to("cuda"), prompts(30, 4, 11, 23)
    options = {"page_size": 4, "chunk": 16, "quantised": quantised, "seed": 7}
    alone, together = (dict(serve(model, texts, 40, Sampler(temperature), batch=batch, **options)) for batch in (1, 3))
    # rounding may decide between almost equal logits, as above
    assert sum(alone[n] == together[n] for n in alone) >= 3


def test_serving_on_a_gpu_equals_the_cpu() -> None:
    model, texts = model_of("llama"), prompts(30, 4, 11, 23)
    texts[1] = texts[0][:20]
    options = {"batch": 2, "page_size": 4, "chunk": 16}
    expected = dict(serve(model, texts, 20, Sampler(0.0), **options))
    found = dict(serve(model.to("cuda"), texts, 20, Sampler(0.0), **options))
    assert sum(expected[n] == found[n] for n in expected) >= 3


@pytest.mark.parametrize(
    "way", [{}, {"dtype": "bfloat16"}, {"compile": True}, {"recompute": True, "dtype": "bfloat16"}]
)
@pytest.mark.parametrize("model", ["attention", "gpt2", "hybrid", "delta"])
def test_training_on_a_gpu_equals_the_cpu(model: str, way: dict, tmp_path: Path) -> None:
    given = {**SMALL, "model": model, "tie": True, "kv_heads": 4, **way}

    def losses(device: str, **changes: object) -> np.ndarray:
        folder = tmp_path / f"{device}{len(changes)}"
        return np.array([step.loss for step in Trainer(folder, {**given, **changes}, device=device).run()])

    here, there = losses("cpu", compile=False), losses("cuda")
    if "dtype" in way:
        # steps increase the rounding of recurrences, on the CPU as well
        exact = losses("cpu", compile=False, dtype="float32")
        assert np.linalg.norm(there - exact) <= 3 * np.linalg.norm(here - exact)
    else:
        assert there == pytest.approx(here, rel=2e-3)
    cut = Trainer(tmp_path / "cut", given, device="cuda").run()
    begun = [next(cut).loss for _ in range(4)][:3]
    cut.close()
    rest = [step.loss for step in Trainer(tmp_path / "cut", {}, resume=True, device="cuda").run()]
    assert begun + rest == pytest.approx(there, rel=1e-4)


def test_losses_of_a_vocabulary_that_is_padded() -> None:
    """On a GPU, rows of logits are products with a padded weight; losses and gradients are those of the CPU."""
    from saccade.models import blocks

    torch.manual_seed(0)
    config = Gpt2Config(8 * blocks.ALIGNED + 17, 64, 2, 4, n_positions=400, eos_token_id=-1)
    tokens = torch.randint(0, config.vocab_size, (2, blocks.MANY_ROWS))
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(1)
        model = Gpt2(config).to(device)
        loss = model(tokens.to(device), targets=tokens.roll(-1, 1).to(device)) / tokens.numel()
        loss.backward()
        found.append((loss.item(), model.wte.weight.grad.cpu(), model(tokens.to(device)).detach().cpu()))
    assert found[0][2].shape == found[1][2].shape == (*tokens.shape, config.vocab_size)
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    for a, b in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
