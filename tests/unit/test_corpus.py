"""The text of installed packages as tokens that are mapped into memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from saccade.models import corpus
from saccade.models.corpus import INDEX, TOKENS, Source, installed, is_held_out, open_corpus, prepare, texts_of
from saccade.models.data import PackedText


@pytest.fixture
def files(tmp_path: Path) -> list[Source]:
    folder = tmp_path / "files"
    folder.mkdir()
    made = []
    for n in range(300):
        path = folder / f"m{n}.py"
        path.write_text(f"# module {n}\n" + "".join(f"x{n}_{i} = {i * n}\n" for i in range(5 + n % 17)))
        made.append(Source(f"package{n % 3} 1.{n % 3}", path.name, path))
    return made


def test_rows_are_those_of_the_texts_in_memory(files: list[Source], tmp_path: Path) -> None:
    made = prepare(tmp_path / "tokens", "bpe", 300, files)
    assert made.tokenizer.vocab_size == 300
    assert made.documents.stream.dtype == np.uint16
    texts = [file.path.read_text() for file in files]
    for i, (start, length) in enumerate(zip(made.documents.starts, made.documents.lengths, strict=True)):
        ids = made.documents.stream[start : start + length]
        assert ids[0] == ids[-1] == 0
        assert made.tokenizer.decode(ids[1:-1].tolist()) == texts[i]
    assert made.bytes == sum(map(len, texts))
    assert made.packages == {f"package{k} 1.{k}": sum(map(len, texts[k::3])) for k in range(3)}

    # the same rows as of arrays in memory, and after the folder was opened again
    rows = made.packed(64, seed=3)
    in_memory = made.documents._replace(stream=np.array(made.documents.stream, np.int64))
    held = np.flatnonzero(made.held_out)
    train = np.flatnonzero(~made.held_out)
    again = open_corpus(tmp_path / "tokens").packed(64, seed=3)
    copy = PackedText(in_memory.of(train), in_memory.of(held), made.fingerprint, 64, 3)
    for step in (0, 7, 3 * rows.rows):
        for other in (again, copy):
            for a, b in zip(rows.batch(step, 5), other.batch(step, 5), strict=True):
                assert a.dtype == b.dtype
                assert np.array_equal(a, b)


def test_whole_files_are_held_out_by_their_names(files: list[Source], tmp_path: Path) -> None:
    made = prepare(tmp_path / "tokens", "bytes", files=files)
    expected = [is_held_out(f"{file.package} {file.name}") for file in files]
    assert made.held_out.tolist() == expected
    assert 0 < sum(expected) < len(files) / 10


def test_a_folder_has_one_tokenizer(files: list[Source], tmp_path: Path) -> None:
    """Of equally many tokens, too: a BPE of 257 has those of bytes."""
    for made, other in (("bpe", "bytes"), ("bytes", "bpe"), ("bytes", "words")):
        prepare(tmp_path / made, made, 257, files)
        with pytest.raises(
            ValueError, match=f"tokens of the tokenizer '{made}', and this run needs those of '{other}'"
        ):
            prepare(tmp_path / made, other, 257, files)


def test_a_folder_is_made_once(files: list[Source], tmp_path: Path) -> None:
    said: list[str] = []
    first = prepare(tmp_path / "tokens", "bpe", 300, files, said.append)
    assert len(said) == 3
    files[0].path.write_text("changed = 1\n")
    assert prepare(tmp_path / "tokens", "bpe", 300, files, said.append).fingerprint == first.fingerprint
    assert len(said) == 3
    with pytest.raises(ValueError, match=r"vocabulary of 300, and this run needs one of 400; .*--data"):
        prepare(tmp_path / "tokens", "bpe", 400, files)
    with pytest.raises(ValueError, match="needs one of 257"):
        prepare(tmp_path / "tokens", "bytes", 300, files)
    prepare(tmp_path / "bytes", "bytes", 300, files)
    with pytest.raises(ValueError, match="vocabulary of 257, and this run needs one of 300"):
        prepare(tmp_path / "bytes", "bpe", 300, files)
    other = prepare(tmp_path / "other", "bpe", 300, files)
    assert other.fingerprint != first.fingerprint


def test_texts_may_be_too_few_for_a_vocabulary(files: list[Source], tmp_path: Path) -> None:
    first = prepare(tmp_path / "tokens", "bpe", 50_257, files)
    assert 257 < first.tokenizer.vocab_size < 50_257
    assert prepare(tmp_path / "tokens", "bpe", 50_257, files).fingerprint == first.fingerprint


def test_a_kill_leaves_nothing_that_is_opened(files: list[Source], tmp_path: Path, monkeypatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "tokens"
    for name in ("write_atomic", "sync_folder"):
        with monkeypatch.context() as patch:
            patch.setattr(corpus, name, killed)
            with pytest.raises(KeyboardInterrupt):
                prepare(folder, "bytes", files=files)
        assert not (folder / INDEX).exists()
    whole = prepare(folder, "bytes", files=files)
    assert whole.fingerprint == prepare(tmp_path / "unbroken", "bytes", files=files).fingerprint


@pytest.mark.parametrize("name", ["a.txt", "config.json", "tokenizer.json"])
def test_a_folder_with_other_files_stays_as_it_is(name: str, files: list[Source], tmp_path: Path) -> None:
    def unread(_: str) -> None:
        raise AssertionError("no file is read before the folder is refused")

    folder = tmp_path / "own"
    folder.mkdir()
    for other in {"tokenizer.json", name}:
        (folder / other).write_text("mine")
    with pytest.raises(ValueError, match=rf"has no tokens.json but other files, such as {name}; name a new folder"):
        prepare(folder, "bytes", files=files, say=unread)
    assert {path.read_text() for path in folder.iterdir()} == {"mine"}
    with pytest.raises(ValueError, match="is a file; name a new folder"):
        prepare(folder / name, "bytes", files=files, say=unread)


def test_damage_is_refused(files: list[Source], tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    prepare(folder, "bytes", files=files)
    index, tokens = (folder / INDEX).read_text(), (folder / TOKENS).read_bytes()
    (folder / TOKENS).write_bytes(tokens[:-1] + bytes([tokens[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"tokens.bin is damaged.*remove .*makes it again"):
        open_corpus(folder)
    (folder / TOKENS).write_bytes(tokens)
    for change in ({"format": 2}, {"held_out": [10**9]}, {"lengths": [1]}, {"vocab": 5}, {"packages": None}):
        (folder / INDEX).write_text(json.dumps({**json.loads(index), **change}))
        with pytest.raises(ValueError, match=r"tokens\.(json|bin)|tokenizer"):
            open_corpus(folder)
    (folder / TOKENS).unlink()
    (folder / INDEX).write_text(index)
    with pytest.raises(FileNotFoundError, match=r"tokens\.bin"):
        open_corpus(folder)


def test_data_and_copies_are_left_out(files: list[Source], tmp_path: Path) -> None:
    contents = {
        "copy.py": files[0].path.read_bytes(), "bytes.py": b"\xff\xfe", "empty.py": b" \n",
        "line.py": b"x = " + b"1" * 3000, "long.py": b"x = 1\n" * 100_000,
    }  # fmt: skip
    more = []
    for name, content in contents.items():
        path = tmp_path / name
        path.write_bytes(content)
        more.append(Source("package9 1.0", name, path))
    more.append(Source("package9 1.0", "missing.py", tmp_path / "missing.py"))
    assert [file.name for file, _ in texts_of([*files, *more])] == [file.name for file in files]


def test_installed_packages_are_found() -> None:
    found = installed()
    packages = {file.package.split()[0] for file in found}
    assert {"Python", "numpy", "torch"} <= packages
    assert found == sorted(set(found))
    assert not any("tests" in file.name.split("/") for file in found)
    assert {"numpy/__init__.py"} <= {file.name for file in found}
