"""Models on a GPU: training steps and generation, compared with the CPU, and what the host does in a step.

Run by `make test-gpu`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors")

from saccade.models import replay
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


def test_draws_of_replayed_steps_differ_and_repeat() -> None:
    model = model_of("llama").to("cuda")
    texts = [list(generate(model, prompts(9), 40, Sampler(0.9), seed=seed)) for seed in (1, 2, 1)]
    assert texts[0] == texts[2]
    assert texts[0] != texts[1]
    assert len({token for (token,) in texts[0]}) > 5


def test_no_python_runs_between_the_kernels_of_a_step() -> None:
    model, tokens = model_of("llama").to("cuda"), 40
    list(generate(model, prompts(9, 12), tokens, Sampler(0.9)))
    events: list[str] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        steps = generate(model, prompts(9, 12), tokens, Sampler(0.9))
        next(steps)
        profile.step()
        with torch.profiler.record_function("replays"):
            list(steps)
    spans = [e for e in profile.events() if e.name == "replays"]
    events = [e.name for e in profile.events() if spans[0].time_range.start <= e.time_range.start]
    launches = [name for name in events if "Launch" in name]
    graphs = [name for name in launches if "Graph" in name]
    # the first token is drawn before; one launch starts all kernels of each further step
    assert len(graphs) == tokens - 1
    few = len(launches) - len(graphs)
    assert few <= 4 * (tokens // replay.AHEAD + 1), sorted(set(launches))


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
    here = [step.loss for step in Trainer(tmp_path / "cpu", {**given, "compile": False}).run()]
    there = [step.loss for step in Trainer(tmp_path / "gpu", given, device="cuda").run()]
    assert there == pytest.approx(here, rel=2e-2 if "dtype" in way else 2e-3)
    cut = Trainer(tmp_path / "cut", given, device="cuda").run()
    begun = [next(cut).loss for _ in range(4)][:3]
    cut.close()
    rest = [step.loss for step in Trainer(tmp_path / "cut", {}, resume=True, device="cuda").run()]
    assert begun + rest == pytest.approx(there, rel=1e-4)
