"""`saccade generate`: prompts of all kinds, the figures it reports, and how many tokens it draws."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for module in ("torch", "safetensors", "tokenizers", "typer", "rich"):
    pytest.importorskip(module)

from typer.testing import CliRunner  # noqa: E402

from saccade.cli import show  # noqa: E402
from saccade.cli.generate import read_prompts  # noqa: E402
from saccade.cli.main import app  # noqa: E402
from saccade.models.llama import LlamaConfig  # noqa: E402
from saccade.models.tokens import END, Bpe, Bytes, load_tokenizer  # noqa: E402
from saccade.models.variants import make_model  # noqa: E402
from saccade.models.weights import save_weights  # noqa: E402

# errors are the only lines, however slow the machine is
show.HEARTBEAT = 1e6


def generate(*args: object, status: int = 0) -> Any:
    done = CliRunner().invoke(app, ["generate", *map(str, args)])
    assert done.exit_code == status, (done.stderr, done.exception)
    return done


def made(kind: str, folder: Path) -> Path:
    """A folder with an untrained model of bytes that has 32 positions."""
    sizes = dict[str, Any](hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    config = LlamaConfig(vocab_size=257, max_position_embeddings=32, bos_token_id=END, eos_token_id=END, **sizes)
    net = make_model(kind, config)
    save_weights(folder / "model.safetensors", net)
    (folder / "config.json").write_text(json.dumps(net.config.to_dict()))
    Bytes().save(folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("attention", tmp_path_factory.mktemp("model"))


def test_only_new_lines_end_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes('\ufeff"a\\nb"\r\nc\u2028d\u0085e\x0cf\r\n\r\ng'.encode())
    assert read_prompts(path) == ["a\nb", "c\u2028d\u0085e\x0cf", "g"]


@pytest.mark.parametrize("prompt", ["a\udcff", "\ud800"])
def test_a_prompt_that_is_not_text_is_named(prompt: str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(f'good\n"{prompt!a}"\n'.replace("'", ""))
    for words in (["--prompt", "good", "--prompt", prompt], ["--prompts", path]):
        assert "prompt 1 is not UTF-8 text" in generate("--model", model, *words, status=2).stderr


def test_the_text_of_the_end_token_is_ordinary_text(tmp_path: Path) -> None:
    made = Bpe.train(["one two three, one two three. " * 40], 280)
    made.save(tmp_path / "tokenizer.json")
    for tokenizer in (made, load_tokenizer(tmp_path / "tokenizer.json")):
        (ids,) = tokenizer.encode(["one <|end|> two"])
        assert END not in ids
        assert tokenizer.decode(ids.tolist()) == "one <|end|> two"
        assert tokenizer.opening("<|end|>") == ([], tokenizer.encode(["<|end|>"])[0].tolist())


def test_tokens_after_the_end_of_a_text_are_not_counted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(*_: object, **__: object) -> Iterator[list[int]]:
        yield from ([66, 66], [66, END], [END, END])

    monkeypatch.setattr("saccade.models.sampling.generate", drawn)
    words = ["--model", model, "--prompt", "a", "--prompt", "b"]
    found = json.loads(generate(*words, "--json").stdout)
    assert found["new_tokens"] == 5
    assert found["tokens_per_second"] == pytest.approx(5 / found["seconds"])
    assert "5 tokens of 2 prompts in" in generate(*words).stderr


def test_a_model_without_keys_has_none_to_quantise(tmp_path: Path) -> None:
    told = generate("--model", made("linear", tmp_path), "--prompt", "a", "--quantised", "int8", status=2).stderr
    assert "--quantised is 'int8', and no layer of this model stores keys" in told


def test_by_default_a_text_ends_at_the_last_position(model: Path) -> None:
    words = ["--model", model, "--json", "--temperature", 0]
    # 19 tokens are read before the first draw
    assert json.loads(generate(*words, "--prompt", "a" * 20).stdout)["new_tokens"] == 13
    assert "at most" in generate(*words, "--prompt", "a" * 20, "--tokens", 14, status=2).stderr
    assert "has 39 tokens" in generate(*words, "--prompt", "a" * 40, status=2).stderr
    told = generate(*words, "--prompt", "a" * 20, "--window", 200, status=2).stderr
    assert "keep is (4, 200), sinks and window" in told
    assert "give a window of at most 22" in told
    generate(*words, "--prompt", "a" * 20, "--window", 22, "--tokens", 40)
    assert "at most 21" in generate(*words, "--prompt", "a" * 20, "--window", 23, "--sinks", 5, status=2).stderr
    assert "fewer sinks" in generate(*words, "--prompt", "a", "--window", 23, "--sinks", 31, status=2).stderr
