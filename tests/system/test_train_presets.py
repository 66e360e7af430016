"""`saccade train --preset`: sizes, dtype, compiled and recomputed blocks, and what transformers reads of a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
for module in ("safetensors", "tokenizers", "typer", "rich"):
    pytest.importorskip(module)

from saccade.models import speed  # noqa: E402
from saccade.models.corpus import Source, prepare  # noqa: E402
from saccade.models.hybrid import parameters  # noqa: E402
from saccade.models.presets import PRESETS, preset_settings  # noqa: E402
from saccade.models.settings import Settings  # noqa: E402
from saccade.models.training import Trainer  # noqa: E402
from saccade.models.variants import EQUAL, MODELS, make_model  # noqa: E402

MILLIONS = {"llama-30m": 32, "gpt2-124m": 124, "llama-350m": 346}
SMALL = {"layers": 4, "width": 32, "heads": 2, "kv_heads": 2, "context": 32, "batch": 2, "vocab": 300, "steps": 6}
SMALL |= {"checkpoint_every": 3, "validation_rows": 3, "warmup": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tokens of a few files."""
    folder = tmp_path_factory.mktemp("data")
    path, files = Path(argparse.__file__), []
    lines = path.read_text().split("\n")
    for n in range(0, len(lines), 20):
        (folder / f"{n}.py").write_text("\n".join(lines[n : n + 20]))
        files.append(Source("argparse 1.0", f"{n}.py", folder / f"{n}.py"))
    prepare(folder / "tokens", "bpe", 300, files)
    return folder / "tokens"


def losses(trainer: Trainer) -> list[float]:
    return [step.loss for step in trainer.run()]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_parameters_of_their_names(name: str) -> None:
    settings = Settings(**preset_settings(name))
    with torch.device("meta"):
        model = make_model(settings.model, settings.config(settings.vocab))
    count = sum(x.numel() for x in model.parameters())
    assert round(count / 1e6) == MILLIONS[name]
    assert settings.dtype == "bfloat16"
    assert settings.compile


@pytest.mark.parametrize("kind", EQUAL[1:])
def test_recurrent_models_of_a_preset_are_as_large(kind: str) -> None:
    settings = Settings(**preset_settings("llama-30m"))
    config = settings.config(settings.vocab)
    with torch.device("meta"):
        model = make_model(kind, config)
        attention = parameters(config, lambda config: make_model("attention", config))
    lacking = attention - sum(x.numel() for x in model.parameters())
    assert 0 <= lacking < 3 * settings.width * settings.layers


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", MODELS)
def test_recomputed_blocks_have_the_same_bits(model: str, data: Path, tmp_path: Path) -> None:
    given = {**SMALL, "data": str(data), "model": model, "tie": True, "dtype": "bfloat16"}
    kept = losses(Trainer(tmp_path / "kept", given))
    assert losses(Trainer(tmp_path / "again", {**given, "recompute": True})) == kept
    single = losses(Trainer(tmp_path / "single", {**given, "dtype": "float32"}))
    assert single != kept
    assert single == pytest.approx(kept, rel=0.02)


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", MODELS)
def test_compiled_blocks_learn_the_same_and_resume(model: str, data: Path, tmp_path: Path) -> None:
    given = {**SMALL, "data": str(data), "model": model, "tie": True, "compile": True, "recompute": True}
    whole = Trainer(tmp_path / "whole", given)
    compiled = losses(whole)
    assert compiled == pytest.approx(losses(Trainer(tmp_path / "eager", {**given, "compile": False})), rel=1e-4)
    cut = Trainer(tmp_path / "cut", given).run()
    begun = [next(cut).loss for _ in range(4)]
    cut.close()
    resumed = Trainer(tmp_path / "cut", {}, resume=True)
    # from the checkpoint after step 3
    assert begun[:3] + losses(resumed) == compiled
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("model", ["attention", "gpt2"])
def test_transformers_loads_a_run(model: str, data: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    trainer = Trainer(tmp_path, {**SMALL, "data": str(data), "model": model, "tie": True})
    losses(trainer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "def parse(self):\n    return 1"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == trainer.tokenizer.encode([text])[0].tolist()
    assert tokenizer.decode(ids[0]) == text
    assert tokenizer.eos_token_id == 0
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, trainer.model.eval()(ids), rtol=2e-5, atol=2e-5)


def run(*args: object, status: int = 0) -> Any:
    from typer.testing import CliRunner

    from saccade.cli.main import app

    done = CliRunner().invoke(app, ["train", *map(str, args)])
    assert done.exit_code == status, (done.stderr, done.exception)
    return done


def test_options_change_single_settings_of_a_preset(data: Path, tmp_path: Path) -> None:
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items() if name not in UNNAMED]
    words = ["--preset", "gpt2-124m", "--no-compile", "--data", data, *sizes, "--out", tmp_path / "run"]
    done = run(*words, "--json")
    told = json.loads(done.stdout)
    assert told["model"] == "gpt2"
    assert told["steps"] == 6
    assert "% of peak" in done.stderr
    assert " GB" in done.stderr
    assert "1 packages (argparse 1.0, ...)" in done.stderr
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model_type"] == "gpt2"
    # the same words keep the finished run; the preset alone has other settings
    run(*words, "--again", "keep")
    assert "data=" in run(*words, "--again", "keep", "--data", tmp_path / "other", status=2).stderr
    assert "vocab" in run("--preset", "gpt2-124m", "--out", tmp_path / "run", "--resume", status=2).stderr


# settings without an option
UNNAMED = ("validation_rows", "warmup")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--preset", "llama-7b"], "--preset is 'llama-7b'; expected one of llama-30m, gpt2-124m, llama-350m"),
        (["--dtype", "float16"], "--dtype is 'float16'; expected one of float32, bfloat16"),
        (["--data", "x", "--text", argparse.__file__], "--text and --data are both given"),
        (["--model", "gpt2"], "as many kv_heads as heads"),
        (["--device", "cuda"], "finds no accelerator"),
        (["--device", "gpu"], "device is 'gpu'; expected cpu, cuda"),
    ],
)
def test_refusals(words: list[str], said: str, tmp_path: Path) -> None:
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert said in run(*words, "--out", tmp_path / "run", status=2).stderr
    assert not (tmp_path / "run").exists()


def test_the_peak_is_known_soon_where_products_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    measure = speed.product_seconds
    monkeypatch.setattr(speed, "product_seconds", lambda n, *rest: tried.append(n) or measure(n, *rest))
    monkeypatch.setattr(speed, "SLOW", 0.0)
    assert speed.peak(torch.float32, torch.device("cpu")) > 0
    assert tried == [384]
