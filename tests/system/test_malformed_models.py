"""`saccade generate` on malformed or absurd files: one sentence and status 2, before anything large is built."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

for module in ("torch", "safetensors", "typer", "rich", "tokenizers"):
    pytest.importorskip(module)

import torch  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from saccade.cli.main import app  # noqa: E402
from saccade.models.gpt2 import Gpt2, Gpt2Config  # noqa: E402
from saccade.models.hybrid import Hybrid  # noqa: E402
from saccade.models.hybrid_config import HybridConfig, jamba  # noqa: E402
from saccade.models.llama import Llama, LlamaConfig  # noqa: E402
from saccade.models.loading import load_model  # noqa: E402
from saccade.models.tokens import Bytes  # noqa: E402
from saccade.models.weights import save_weights  # noqa: E402

WIDTH = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
GPT2 = {"vocab_size": 257, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
DEEP = "[" * 100_000 + "]" * 100_000


def build(kind: str, folder: Path) -> Path:
    """A folder of an untrained model of this kind."""
    torch.manual_seed(0)
    folder.mkdir()
    if kind == "gpt2":
        net: Any = Gpt2(Gpt2Config(**GPT2, eos_token_id=0))
        config: dict[str, Any] = {"model_type": "gpt2", **GPT2, "eos_token_id": 0}
    elif kind == "hybrid":
        shape = jamba(3, period=2, offset=1, experts=2) | {"num_experts_per_tok": 1, "state_size": 4}
        net = Hybrid(HybridConfig(257, intermediate_size=32, **WIDTH, **shape))
        config = net.config.to_dict()
    else:
        net = Llama(LlamaConfig(257, num_hidden_layers=2, **WIDTH))
        config = net.config.to_dict()
    save_weights(folder / "model.safetensors", net)
    (folder / "config.json").write_text(json.dumps(config))
    Bytes().save(folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: build(kind, root / kind) for kind in ("llama", "gpt2", "hybrid")}


def copied(model: Path, out: Path) -> Path:
    return Path(shutil.copytree(model, out / "model"))


def read(model: Path) -> dict[str, torch.Tensor]:
    """The weights of a folder, not mapped to its file."""
    from safetensors.torch import load

    return load((model / "model.safetensors").read_bytes())


def refused(model: Path, words: str) -> None:
    began = time.monotonic()
    done = CliRunner().invoke(app, ["generate", "--model", str(model), "--tokens", "3", "--temperature", "0"])
    assert done.exit_code == 2, (done.stderr, done.exception)
    assert done.stderr.startswith("saccade generate: ")
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert len(done.stderr) < 1000
    # nothing large was built
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("kind", ["llama", "gpt2", "hybrid"])
def test_the_models_themselves_generate(kind: str, models: dict[str, Path]) -> None:
    done = CliRunner().invoke(app, ["generate", "--model", str(models[kind]), "--tokens", "3", "--json"])
    assert done.exit_code == 0, done.stderr


SIZES = ("8", [8], 16.0, -1, 0, 10**9, 10**30, True, {"a": 1}, float("nan"))
NUMBERS = {
    "llama": ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"),
    "gpt2": ("n_embd", "n_layer", "n_head", "vocab_size", "n_positions"),
    "hybrid": ("hidden_size", "num_attention_heads", "num_experts", "state_size", "kernel", "expand"),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("value", SIZES, ids=repr)
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in NUMBERS for name in NUMBERS[kind]])
def test_sizes_that_no_model_has(kind: str, name: str, value: Any, models: dict[str, Path], tmp_path: Path) -> None:
    model = copied(models[kind], tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, name: value}))
    refused(model, f"{name} is ")


FIELDS: dict[str, tuple[str, Any, str]] = {
    "many layers": ("num_hidden_layers", 16000, "has 16000 layers, and the weights there have 2"),
    "one layer less": ("num_hidden_layers", 1, "has 1 layers, and the weights there have 2"),
    "a wide vocabulary": ("vocab_size", 10**7, "has shape [257, 16] and needs [10000000, 16]"),
    "a wide feed-forward": ("intermediate_size", 1 << 24, "do not fit its config.json"),
    "negative feed-forward": ("intermediate_size", -5, "intermediate_size is -5"),
    "negative head_dim": ("head_dim", -2, "head_dim is -2"),
    "eps NaN": ("rms_norm_eps", float("nan"), "rms_norm_eps is nan"),
    "eps below 0": ("rms_norm_eps", -1e-5, "rms_norm_eps is -1e-05"),
    "eps text": ("rms_norm_eps", "1e-5", "rms_norm_eps is '1e-5'"),
    "theta 0": ("rope_theta", 0, "rope_theta is 0"),
    "theta below 0": ("rope_theta", -1, "rope_theta is -1"),
    "theta NaN": ("rope_theta", float("nan"), "rope_theta is nan"),
    "theta infinite": ("rope_theta", float("inf"), "rope_theta is inf"),
    "factor 0": ("rope_scaling", {"rope_type": "linear", "factor": 0}, "factor is 0"),
    "factor NaN": ("rope_scaling", {"rope_type": "linear", "factor": float("nan")}, "factor is nan"),
    "factor null": ("rope_scaling", {"rope_type": "linear", "factor": None}, "expected 'factor' in it"),
    "scaling a list": ("rope_scaling", [1], "rope_scaling is [1]"),
    "rope_type a list": ("rope_scaling", {"rope_type": []}, "rope_type is []"),
    "no band": (
        "rope_scaling", {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
                         "original_max_position_embeddings": 8192}, "gives no angles",
    ),
    "theta 1": ("rope_parameters", {"rope_type": "yarn", "factor": 2, "rope_theta": 1}, "gives no angles"),
    "ends": ("eos_token_id", [], "eos_token_id is []"),
    "ends text": ("eos_token_id", "</s>", "eos_token_id is '</s>'"),
    "window": ("sliding_window", -4, "sliding_window is -4"),
    "model_type": ("model_type", 7, "model_type is 7"),
    "tied": ("tie_word_embeddings", "yes", "tie_word_embeddings is 'yes'"),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_fields_that_no_model_has(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    model = copied(models["llama"], tmp_path)
    field, value, words = FIELDS[name]
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, field: value}))
    refused(model, words)


def test_experts_are_counted_before_they_are_built(models: dict[str, Path], tmp_path: Path) -> None:
    model = copied(models["hybrid"], tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_experts": 4000}))
    refused(model, "has 4000 experts in a layer, and the weights there have 2")


TEXTS = {
    "a deep config": ("config.json", DEEP, "nests its lists and objects too deeply"),
    "a config that is a list": ("config.json", "[]", "holds list; expected an object"),
    "a config that is no JSON": ("config.json", "{", "is not JSON"),
    "a config of bytes": ("config.json", b"\xff\xfe\x00", "is not JSON"),
    "an index without a map": ("model.safetensors.index.json", "{}", "has no weight_map"),
    "an index of null": ("model.safetensors.index.json", "null", "holds NoneType; expected an object"),
    "a map that is a list": ("model.safetensors.index.json", '{"weight_map": ["a"]}', "has no weight_map"),
    "a map of numbers": ("model.safetensors.index.json", '{"weight_map": {"a": 5}}', "names '5'"),
    "a map of lists": ("model.safetensors.index.json", '{"weight_map": {"a": ["b"]}}', "expected names of files"),
    "a map elsewhere": ("model.safetensors.index.json", '{"weight_map": {"a": "../b"}}', "names '../b'"),
    "a map to a folder": ("model.safetensors.index.json", '{"weight_map": {"a": ".."}}', "names '..'"),
    "a map to nothing": ("model.safetensors.index.json", '{"weight_map": {"a": "b"}}', "no b in"),
    "a deep index": ("model.safetensors.index.json", DEEP, "nests its lists and objects too deeply"),
    "no weights": ("model.safetensors", b"", "is truncated or not a safetensors file"),
    "an empty tokenizer": ("tokenizer.json", "{}", "is no tokenizer"),
    "a tokenizer that is a list": ("tokenizer.json", "[]", "holds list; expected an object"),
    "a tokenizer that is a number": ("tokenizer.json", "5", "holds int; expected an object"),
    "a deep tokenizer": ("tokenizer.json", DEEP, "nests its lists and objects too deeply"),
    "a tokenizer deep below": ("tokenizer.json", '{"a": ' + "[" * 300 + "]" * 300 + "}", "is no tokenizer"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_files_that_are_malformed(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    model = copied(models["llama"], tmp_path)
    file, text, words = TEXTS[name]
    (model / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(model, words)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "hybrid"])
def test_weights_that_are_no_numbers_are_named(kind: str, models: dict[str, Path], tmp_path: Path) -> None:
    model = copied(models[kind], tmp_path)
    tensors = read(model)
    name = sorted(tensors)[3]
    tensors[name].view(-1)[0] = float("nan")
    save_weights(model / "model.safetensors", tensors)
    refused(model, f"{name} in {model / 'model.safetensors'} holds NaN or an infinity")
    tensors[name] = tensors[name].to(torch.int32)
    save_weights(model / "model.safetensors", tensors)
    refused(model, f"{name} does not hold numbers of F64, F32, F16, BF16")


def test_a_tensor_in_two_files_is_that_of_the_index(models: dict[str, Path], tmp_path: Path) -> None:
    model = copied(models["llama"], tmp_path)
    tensors = read(model)
    name = sorted(tensors)[3]
    (model / "model.safetensors").rename(model / "a.safetensors")
    save_weights(model / "b.safetensors", {name: tensors[name] + 1})
    listed = {**dict.fromkeys(tensors, "a.safetensors"), "other": "b.safetensors"}
    for file, moved in (("a.safetensors", 0), ("b.safetensors", 1)):
        index = {"weight_map": {**listed, name: file}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        found = load_model(model).state_dict()
        assert torch.equal(found[name], tensors[name] + moved)


@pytest.mark.parametrize("temperature", ["0", "0.7"])
def test_logits_that_overflow_end_the_text_with_a_sentence(
    temperature: str, models: dict[str, Path], tmp_path: Path
) -> None:
    model = copied(models["llama"], tmp_path)
    tensors = read(model)
    for name in ("lm_head.weight", "model.norm.weight"):
        tensors[name].fill_(3e38)
    save_weights(model / "model.safetensors", tensors)
    done = CliRunner().invoke(app, ["generate", "--model", str(model), "--temperature", temperature, "--tokens", "2"])
    assert done.exit_code == 2
    assert "saccade generate: the model's logits for sequences [0] of the batch are not finite" in done.stderr


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no tokens": (["--tokens", "0"], "--tokens is 0; expected an integer from 1"),
    "tokens below 0": (["--tokens", "-1"], "--tokens is -1; expected an integer from 1"),
    "a long prompt": (["--prompt", "x" * 700], "prompt 0 has 699 tokens, and the model has 512 positions; shorten"),
    "many tokens": (["--prompt", "abc", "--tokens", "600"], "ask for at most 510 new tokens"),
    "chunk": (["--chunk", "0"], "--chunk is 0"),
    "top_k": (["--top-k", "-2"], "--top-k is -2"),
    "top_p": (["--top-p", "0"], "--top-p is 0.0; expected a finite number above 0"),
    "temperature": (["--temperature", "nan"], "--temperature is nan"),
    "window": (["--window", "-3"], "--window is -3"),
    "backend": (["--backend", "foo"], "--backend is 'foo'; expected one of cpu, triton, metal, webgpu"),
    "prompts": (["--prompts", "/nope"], "--prompts names /nope: no such file or directory"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_options_that_are_wrong_are_named(name: str, models: dict[str, Path]) -> None:
    words, told = MISTAKES[name]
    done = CliRunner().invoke(app, ["generate", "--model", str(models["llama"]), *words])
    assert done.exit_code == 2, done.output
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_small_temperature_takes_the_likeliest(models: dict[str, Path]) -> None:
    texts: list[Callable[[], str] | str] = []
    for temperature in ("0", "1e-300"):
        given = ["generate", "--model", str(models["llama"]), "--temperature", temperature, "--tokens", "5", "--json"]
        done = CliRunner().invoke(app, given)
        assert done.exit_code == 0, done.stderr
        texts.append(json.loads(done.stdout)["texts"][0])
    assert texts[0] == texts[1]
