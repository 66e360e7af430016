"""The text of the installed Python packages as tokens in a folder, made once and mapped into memory by every run.

`tokens.bin` has the ids of all documents, each after and before END. `tokenizer.json` has the tokenizer. `tokens.json`
has the places of the documents, the packages they come from, and a digest of `tokens.bin`. They are written in this
order.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .data import TABLES, TESTS, Documents, PackedText, standard_library
from .files import PIECE, naming, read_object, sync_folder, temporary, write_atomic
from .tokens import END, TOKENIZER, Bytes, Tokenizer, load_tokenizer, make_tokenizer

TOKENS, INDEX = "tokens.bin", "tokens.json"
# what a preparation that was killed leaves: the tokens, or their beginning, and perhaps more
STARTED = {TOKENS, temporary(Path(TOKENS)).name}
LEFT = STARTED | {TOKENIZER, temporary(Path(TOKENIZER)).name, temporary(Path(INDEX)).name}
# source code and documentation; METADATA has a package's description
SUFFIXES, NAMES = {".py", ".md", ".rst"}, {"METADATA"}
# a longer file or line is data, not text that a person wrote
LONGEST_FILE, LONGEST_LINE = 400_000, 2_000
# of the files, one in so many is held out
HELD_OUT = 64
BATCH = 256
FORMAT = 1


class Source(NamedTuple):
    """A file of a package: "NAME VERSION", its path within the installation, and where it is."""

    package: str
    name: str
    path: Path


@dataclass(frozen=True)
class Corpus:
    """Documents of a folder, and what they were made of.

    packages: bytes of text by "NAME VERSION". fingerprint: of tokens and their division into documents. wanted: the
    vocabulary that was asked for; of few texts, the tokenizer has fewer.
    """

    documents: Documents
    held_out: np.ndarray
    tokenizer: Tokenizer
    packages: dict[str, int]
    fingerprint: str
    wanted: int

    @property
    def bytes(self) -> int:
        """The bytes of all documents, as text."""
        return sum(self.packages.values())

    def packed(self, context: int, seed: int) -> PackedText:
        """Rows of `context` tokens; whole files are held out. Raises ValueError for too little text."""
        training, held_out = (self.documents.of(np.flatnonzero(which)) for which in (~self.held_out, self.held_out))
        return PackedText(training, held_out, self.fingerprint, context, seed)


def installed() -> list[Source]:
    """The sources and documentation of the standard library and of every installed package, in a fixed order."""
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [Source(python, path.relative_to(root).as_posix(), path) for path in standard_library()]
    for package in metadata.distributions():
        for file in package.files or ():
            if file.suffix not in SUFFIXES and file.name not in NAMES:
                continue
            if not (TESTS | TABLES | {"__pycache__"}) & set(file.parts) and ".." not in file.parts:
                path = Path(str(package.locate_file(file)))
                files.append(Source(f"{package.name} {package.version}", file.as_posix(), path))
    return sorted(set(files))


def read_text(path: Path) -> str | None:
    """The text of a file; None if it is missing, empty, not UTF-8, or data: longer than a person writes."""
    try:
        if path.stat().st_size > LONGEST_FILE:
            return None
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text if text.strip() and max(map(len, text.split("\n"))) <= LONGEST_LINE else None


def texts_of(files: Sequence[Source]) -> Iterator[tuple[Source, str]]:
    """The files with text, each content once."""
    seen = set[bytes]()
    for file in files:
        text = read_text(file.path)
        if text is None:
            continue
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if digest not in seen:
            seen.add(digest)
            yield file, text


def is_held_out(name: str) -> bool:
    """Whether a file is held out, which its name alone decides."""
    return hashlib.blake2b(name.encode(), digest_size=4).digest()[0] % HELD_OUT == 0


def prepare(
    folder: str | Path,
    tokenizer: str = "bpe",
    vocab: int = 16384,
    files: Sequence[Source] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Corpus:
    """Make the tokens of `files`, by default `installed()`, in a folder, or open those that are there.

    say: called with a few words before each part that takes seconds.
    Raises ValueError if the folder has tokens of another tokenizer or vocabulary, or other files, or the files have no
    text; and as `open_corpus`.
    """
    folder, wanted = Path(folder), vocab if tokenizer == "bpe" else 257
    if (folder / INDEX).exists():
        corpus = open_corpus(folder)
        if wanted not in (corpus.wanted, corpus.tokenizer.vocab_size):
            raise ValueError(
                f"{folder} has tokens of a vocabulary of {corpus.tokenizer.vocab_size}, and this run needs one of "
                f"{wanted}; choose another folder with --data, or remove this one"
            )
        kind = "bytes" if isinstance(corpus.tokenizer, Bytes) else "bpe"
        if tokenizer != kind:
            raise ValueError(
                f"{folder} has tokens of the tokenizer {kind!r}, and this run needs those of {tokenizer!r}; choose "
                "another folder with --data, or remove this one"
            )
        return corpus
    check_free(folder)
    say("reading the files of the installed packages")
    texts = list(texts_of(installed() if files is None else files))
    if not texts:
        raise ValueError("the installed packages have no text; name text files with --text")
    say("training the tokenizer")
    order = np.random.default_rng(0).permutation(len(texts))
    chosen = make_tokenizer(tokenizer, (texts[i][1] for i in order), vocab)
    folder.mkdir(parents=True, exist_ok=True)
    say(f"turning {sum(len(text) for _, text in texts) / 1e6:.0f} MB of text into tokens, once")
    write(folder, chosen, texts, wanted)
    return open_corpus(folder)


def check_free(folder: Path) -> None:
    """Raises ValueError for a file, and for a folder with more than an interrupted preparation leaves behind."""
    if folder.is_dir():
        names = {path.name for path in folder.iterdir()}
        if not names or (names <= LEFT and names & STARTED):
            return
        fault = f"has no {INDEX} but other files, such as {min(names - LEFT or names)}"
    elif folder.exists():
        fault = "is a file"
    else:
        return
    raise ValueError(f"{folder} {fault}; name a new folder for the tokens, or name text files with --text")


def write(folder: Path, tokenizer: Tokenizer, texts: Sequence[tuple[Source, str]], wanted: int) -> None:
    """Write `tokens.bin`, the tokenizer, then `tokens.json`; what a kill leaves behind is not opened.

    wanted: as in `Corpus`.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32).newbyteorder("<")
    lengths, packages, digest = list[int](), dict[str, int](), hashlib.blake2b(digest_size=32)
    path = folder / TOKENS
    with naming(path), open(temporary(path), "wb") as out:
        for start in range(0, len(texts), BATCH):
            some = texts[start : start + BATCH]
            for (file, text), ids in zip(some, tokenizer.encode([text for _, text in some]), strict=True):
                document = np.full(len(ids) + 2, END, dtype)
                document[1:-1] = ids
                out.write(data := document.tobytes())
                digest.update(data)
                lengths.append(len(document))
                packages[file.package] = packages.get(file.package, 0) + len(text.encode())
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary(path), path)
    sync_folder(folder)
    tokenizer.save(folder / TOKENIZER)
    held_out = [i for i, (file, _) in enumerate(texts) if is_held_out(f"{file.package} {file.name}")]
    index = {
        "format": FORMAT,
        "dtype": dtype.name,
        "digest": digest.hexdigest(),
        "vocab": tokenizer.vocab_size,
        "wanted": wanted,
        "packages": packages,
        "files": [f"{file.package}/{file.name}" for file, _ in texts],
        "lengths": lengths,
        "held_out": held_out or [len(texts) - 1],
    }
    write_atomic(folder / INDEX, json.dumps(index).encode())


def open_corpus(folder: str | Path) -> Corpus:
    """The tokens of a folder, mapped into memory.

    Raises FileNotFoundError without them, and ValueError if they contradict their digest or index.
    """
    folder = Path(folder)
    index, remedy = read_object(folder / INDEX), f"remove {folder}, and the next run makes it again"
    tokens = folder / TOKENS
    try:
        if index["format"] != FORMAT:
            raise ValueError(f"format {index['format']!r}; this version reads {FORMAT}")
        dtype, lengths = np.dtype(index["dtype"]).newbyteorder("<"), np.asarray(index["lengths"], np.int64)
        held_out = np.zeros(len(lengths), bool)
        held_out[index["held_out"]] = True
        packages = {str(name): int(size) for name, size in index["packages"].items()}
        expected = str(index["digest"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"{folder / INDEX} is not an index of tokens ({error!r}); {remedy}") from None
    digest = hashlib.blake2b(digest_size=32)
    with naming(tokens), open(tokens, "rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    if digest.hexdigest() != expected or tokens.stat().st_size != int(lengths.sum()) * dtype.itemsize:
        raise ValueError(f"{tokens} is damaged: its bytes contradict {INDEX}; {remedy}")
    stream = np.memmap(tokens, dtype, "r")
    tokenizer = load_tokenizer(folder / TOKENIZER)
    if tokenizer.vocab_size != index.get("vocab"):
        raise ValueError(f"{folder / TOKENIZER} is not the tokenizer of {INDEX}; {remedy}")
    digest.update(lengths.tobytes() + held_out.tobytes())
    documents = Documents(stream, np.cumsum(lengths) - lengths, lengths)
    wanted = int(index.get("wanted", tokenizer.vocab_size))
    return Corpus(documents, held_out, tokenizer, packages, digest.hexdigest(), wanted)
