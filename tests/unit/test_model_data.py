"""Packed rows, tokenizers, and files that are whole or absent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from saccade.models.data import IGNORED, PackedText, read_documents
from saccade.models.files import write_atomic
from saccade.models.tokens import Bpe, Bytes, load_tokenizer, make_tokenizer


def documents() -> list[np.ndarray]:
    return [np.arange(n, dtype=np.int32) % 50 + 1 + 50 * i for i, n in enumerate([40, 7, 0, 113, 64, 5, 300])]


def test_rows_hold_every_token_once_an_epoch() -> None:
    data = PackedText.of_texts(documents(), context=16, seed=3)
    rows = data.batch(0, data.rows)
    later = data.batch(1, data.rows)
    assert rows.tokens.shape == rows.targets.shape == (data.rows, 16)
    assert not np.array_equal(rows.tokens, later.tokens)
    laid = data._training.stream[: data._training.tokens - 1]
    assert abs(np.bincount(rows.tokens.ravel(), minlength=400) - np.bincount(laid, minlength=400)).sum() <= 16
    one_by_one = [data.batch(step, 1).tokens for step in range(data.rows + 2)]
    assert np.array_equal(np.concatenate(one_by_one), np.concatenate([rows.tokens, later.tokens[:2]]))
    again = PackedText.of_texts(documents(), context=16, seed=3).batch(1, data.rows)
    assert np.array_equal(again.tokens, later.tokens)


def test_rows_know_their_documents() -> None:
    batch = PackedText.of_texts(documents(), context=64, seed=0).batch(0, 7)
    same = batch.documents[:, 1:] == batch.documents[:, :-1]
    assert (np.diff(batch.documents, axis=1) >= 0).all()
    assert (batch.documents[:, 0] == 0).all()
    # a document's text is its own hundred's worth of ids, so a target never leaves it
    assert np.array_equal(batch.targets[:, :-1][same], batch.tokens[:, 1:][same])
    assert (batch.targets[:, :-1][~same] == IGNORED).all()
    assert (batch.tokens[:, 1:][~same] == 0).all()
    assert (np.diff(batch.positions, axis=1)[same] == 1).all()
    assert (batch.positions[:, 1:][~same] == 0).all()


def test_held_out_text_is_not_trained_on() -> None:
    ids = [np.arange(1 + 100 * i, 101 + 100 * i, dtype=np.int32) for i in range(50)]
    data = PackedText.of_texts(ids, context=32, seed=0, held_out=0.1)
    trained = {int(t) for step in range(data.rows) for t in data.batch(step, 1).tokens.ravel()} - {0}
    held = {int(t) for t in data.validation(100).tokens.ravel()} - {0}
    assert held
    assert not trained & held


def test_too_little_text() -> None:
    with pytest.raises(ValueError, match="too few"):
        PackedText.of_texts([np.ones(30, np.int32)], context=64, seed=0)
    with pytest.raises(FileNotFoundError):
        read_documents(["no/such/file"])


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_tokenizers(kind: str, tmp_path) -> None:
    if kind == "bpe":
        pytest.importorskip("tokenizers")
    texts = ["def f(x):\n    return x + 1\n" * 20, "über\tα β 🙂\r\n", ""]
    tokenizer = make_tokenizer(kind, texts, 300)
    ids = tokenizer.encode(texts)
    assert [tokenizer.decode(one.tolist()) for one in ids] == texts
    assert all(0 not in one for one in ids)
    assert max(one.max(initial=0) for one in ids) < tokenizer.vocab_size <= 300
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert isinstance(again, Bytes if kind == "bytes" else Bpe)
    assert all(np.array_equal(a, b) for a, b in zip(again.encode(texts), ids, strict=True))
    first = int(ids[0][0])
    allowed = np.flatnonzero(tokenizer.continuations(first))
    assert first in allowed
    assert all(tokenizer.decode([int(i)]).startswith(tokenizer.decode([first])) for i in allowed)


def test_unknown_tokenizer() -> None:
    with pytest.raises(ValueError, match="'bpe' or 'bytes'"):
        make_tokenizer("words", [], 300)


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    for moment in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(f"os.{moment}", crash)
            with pytest.raises(KeyboardInterrupt):
                write_atomic(path, b"new")
        assert path.read_bytes() == b"old"
    write_atomic(path, b"newer")
    assert path.read_bytes() == b"newer"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def foreign(template: str | None) -> Bpe:
    """A tokenizer of another model: token 0 is text, and a template says which special tokens surround a text."""
    inner = pytest.importorskip("tokenizers")
    made = inner.Tokenizer(inner.models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "<": 3}, merges=[("a", "b")]))
    made.add_special_tokens(["<s>", "</s>"])
    if template is not None:
        special = [("<s>", 4), ("</s>", 5)]
        made.post_processor = inner.processors.TemplateProcessing(single=template, special_tokens=special)
    return Bpe(made)


@pytest.mark.parametrize("token, ids", [(0, [0, 2]), (1, [1]), (3, [3]), (4, [4])])
def test_continuations_are_text(token: int, ids: list[int]) -> None:
    """Token 0 may be text, and special tokens continue no text, even if they are spelled like the start of one."""
    tokenizer = foreign(None)
    assert np.flatnonzero(tokenizer.continuations(token)).tolist() == ids
    assert (tokenizer.begin, tokenizer.special) == (None, [4, 5])


def test_bytes_of_a_vocabulary_are_no_text() -> None:
    """The name of the token of a byte, such as <0x0A>, begins with <, and its text does not."""
    inner = pytest.importorskip("tokenizers")
    raw = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary = {"<unk>": 0, "<": 1, "<a": 2} | raw | {"a": 259}
    made = inner.Tokenizer(
        inner.models.BPE(vocab=vocabulary, merges=[("<", "a")], byte_fallback=True, unk_token="<unk>")
    )
    made.add_special_tokens(["<unk>"])
    assert np.flatnonzero(Bpe(made).continuations(1)).tolist() == [1, 2]
    assert np.flatnonzero(Bpe(made).continuations(raw["<0x0A>"])).tolist() == [raw["<0x0A>"]]


def test_a_file_for_training_in_batches_cuts_and_fills_no_text(tmp_path: Path) -> None:
    made = Bpe.train(["alpha beta gamma"], 300)
    whole = made.encode(["alpha beta gamma"])[0].tolist()
    made.inner.enable_truncation(2)
    made.inner.enable_padding(length=60, pad_id=0, pad_token="<|end|>")
    made.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.encode(["alpha beta gamma", "a"])[0].tolist() == whole
    assert loaded.opening("alpha beta gamma") == ([], whole)


def test_a_text_begins_with_the_special_tokens_of_its_tokenizer() -> None:
    """Only those before the text count; our own tokenizers have none, and a token that begins an empty text."""
    assert foreign(None).opening("abab") == ([], [2, 2])
    assert foreign("<s> $A").opening("abab") == ([4], [2, 2])
    assert foreign("<s> $A </s>").opening("aab") == ([4], [0, 2])
    for tokenizer in (Bytes(), Bpe.train(["a b"], 257)):
        assert tokenizer.begin == 0
        before, ids = tokenizer.opening("b a")
        assert (before, ids) == ([], tokenizer.encode(["b a"])[0].tolist())
        assert tokenizer.opening("") == ([], [])
    assert foreign("<s> $A </s>").opening("") == ([4], [])


@pytest.mark.parametrize(
    "template, starts, second",
    [(None, [[2], [2, 0]], [0, 2]), ("<s> $A", [[4], [4, 2, 0]], [0, 2])],
)
def test_open_ended_prompts_keep_their_text(template: str | None, starts: list[list[int]], second: list[int]) -> None:
    """A prompt of one token is dropped only after a special token; otherwise nothing would be before its text."""
    pytest.importorskip("typer")
    from saccade.cli.generate import open_ended

    found, first = open_ended(foreign(template), ["ab", "abaa"])
    assert found == starts
    assert np.flatnonzero(first[0]).tolist() == (list(range(6)) if template is None else [2])
    assert np.flatnonzero(first[1]).tolist() == second
    found, first = open_ended(Bytes(), ["", "ab"])
    assert found == [[0], [98]]
    assert first[0].all()
    assert np.flatnonzero(first[1]).tolist() == [99]
