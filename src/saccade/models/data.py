"""Packed training rows from text files: each file is one document, and a token sees only its own document.

The rows of a batch depend only on (text, context, seed, step), so a run needs only its step number to resume its data.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .tokens import END

IGNORED = -100
TESTS, TABLES = {"test", "tests", "idle_test"}, {"encodings", "pydoc_data"}
SKIPPED_FOLDERS = TESTS | TABLES | {"site-packages", "dist-packages", "__pycache__"}

# a triple-quoted string, which is a docstring if nothing precedes it on its line; and a line that is a comment
LONG_STRING = re.compile(r"""(?ms)(^[ \t]*)?(?:\b[rRuUbBfF]{1,2})?("{3}|'{3})(?:\\.|.)*?\2(?:[ \t]*\n)?""")
COMMENT, EMPTY_LINES = re.compile(r"(?m)^[ \t]*#.*\n"), re.compile(r"\n{4,}")


class Batch(NamedTuple):
    """Rows of one step, each array [rows, T].

    tokens, targets: int64; a target is `IGNORED` if the next token belongs to another document. documents: int32, ids
    that never decrease, from 0 in each row. positions: int64, from 0 at the start of each document's part of a row.
    """

    tokens: np.ndarray
    targets: np.ndarray
    documents: np.ndarray
    positions: np.ndarray


def standard_library() -> list[Path]:
    """The sources of Python's standard library without its tests, in a fixed order.

    Raises FileNotFoundError if Python was installed without them.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = (path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts))
    files = sorted(paths, key=lambda path: path.relative_to(root).as_posix())
    if len(files) < 50:
        raise FileNotFoundError(f"{root} holds no sources of the standard library; name text files with --text")
    return files


def code_of(source: str) -> str:
    """Python source without its docstrings and comment lines: a small model learns code much sooner than English."""
    code = LONG_STRING.sub(lambda match: match[0] if match[1] is None else "", COMMENT.sub("", source))
    return EMPTY_LINES.sub("\n\n\n", code)


def read_documents(files: Sequence[str | Path]) -> list[str]:
    """The text of each file, or the code of the standard library if no file is named; empty texts are omitted.

    Bytes that are not UTF-8 become U+FFFD. Raises FileNotFoundError for a missing file, ValueError if all are empty.
    """
    paths = [Path(file) for file in files] or standard_library()
    texts = [path.read_bytes().decode("utf-8", "replace") for path in paths]
    texts = texts if files else [code_of(text) for text in texts]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ValueError(f"no text in {', '.join(map(str, paths))}")
    return texts


class Documents(NamedTuple):
    """Documents in a stream of token ids: document i is stream[starts[i] : starts[i] + lengths[i]], END included.

    stream: integers [n], an array in memory or a memory map. starts, lengths: int64 [documents].
    """

    stream: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    @property
    def tokens(self) -> int:
        """The number of tokens of all documents."""
        return int(self.lengths.sum())

    def of(self, chosen: np.ndarray) -> Documents:
        """The documents with these numbers, in this order."""
        return self._replace(starts=self.starts[chosen], lengths=self.lengths[chosen])

    def rows(self, rows: np.ndarray, context: int) -> Batch:
        """Rows of these documents joined end to end and cut every `context` tokens; reads only those tokens."""
        ends = np.cumsum(self.lengths)
        at = rows[:, None] * context + np.arange(context + 1)
        numbers = np.searchsorted(ends, at, "right")
        within = at - (ends - self.lengths)[numbers]
        return cut_rows(self.stream[self.starts[numbers] + within].astype(np.int64), numbers)


class PackedText:
    """Rows of `context` tokens of documents joined end to end; every epoch has its own order of documents and of rows.

    training: the documents of the epochs; held_out: those of `validation`; fingerprint: a digest of both.
    Raises ValueError if training and validation do not get at least one row each.
    """

    def __init__(self, training: Documents, held_out: Documents, fingerprint: str, context: int, seed: int) -> None:
        self.context, self.seed, self.fingerprint = context, seed, fingerprint
        self.rows = (training.tokens - 1) // context
        if self.rows < 1 or held_out.tokens <= context:
            raise ValueError(
                f"{training.tokens + held_out.tokens} tokens of text are too few for rows of {context}; give more text "
                "or a smaller context"
            )
        self._training, self._held_out, self._epoch = training, held_out, -1

    @classmethod
    def of_texts(cls, texts: Sequence[np.ndarray], context: int, seed: int, held_out: float = 0.02) -> PackedText:
        """Texts as int32 ids without end tokens; END is added before and after each.

        After a random order of the texts, the last share `held_out` of the tokens is held out, also if this cuts a
        text in two.
        """
        order = np.random.default_rng([seed]).permutation(len(texts))
        lengths = np.array([len(texts[i]) + 2 for i in order])
        stream = np.full(lengths.sum(), END, np.int32)
        starts = np.cumsum(lengths) - lengths
        for i, start in zip(order, starts, strict=True):
            stream[start + 1 : start + 1 + len(texts[i])] = texts[i]
        fingerprint = hashlib.sha256(stream.tobytes() + lengths.tobytes()).hexdigest()

        cut = max(0, len(stream) - max(int(len(stream) * held_out), context + 1))
        first, last = starts[starts < cut], np.append(cut, starts[starts > cut])
        training = Documents(stream, first, np.diff(np.append(first, cut)))
        return cls(training, Documents(stream, last, np.diff(np.append(last, len(stream)))), fingerprint, context, seed)

    @property
    def tokens(self) -> int:
        """Tokens of one epoch."""
        return self.rows * self.context

    def batch(self, step: int, size: int) -> Batch:
        """The `size` rows of a step, counted from 0."""
        parts: list[Batch] = []
        position, end = step * size, (step + 1) * size
        while position < end:
            epoch, first = divmod(position, self.rows)
            count = min(end - position, self.rows - first)
            self._shuffle(epoch)
            parts.append(self._shuffled.rows(self._deal[first : first + count], self.context))
            position += count
        return parts[0] if len(parts) == 1 else Batch(*map(np.concatenate, zip(*parts, strict=True)))

    def validation(self, rows: int) -> Batch:
        """Up to `rows` rows of the held-out text, always the same ones, spread evenly over it."""
        available = (self._held_out.tokens - 1) // self.context
        chosen = np.unique(np.linspace(0, available - 1, min(rows, available)).astype(np.int64))
        return self._held_out.rows(chosen, self.context)

    def _shuffle(self, epoch: int) -> None:
        if epoch != self._epoch:
            random = np.random.default_rng([self.seed, epoch])
            self._shuffled = self._training.of(random.permutation(len(self._training.starts)))
            self._deal, self._epoch = random.permutation(self.rows), epoch


def cut_rows(tokens: np.ndarray, documents: np.ndarray) -> Batch:
    """A batch of rows [rows, T + 1] of tokens and of their documents' numbers; the last column is only a target."""
    here = documents[:, :-1]
    targets = np.where(documents[:, 1:] == here, tokens[:, 1:], IGNORED)
    first = np.zeros(here.shape, bool)
    first[:, 1:] = here[:, 1:] != here[:, :-1]
    places = np.arange(here.shape[1])
    begun = np.maximum.accumulate(np.where(first, places, 0), axis=1)
    return Batch(
        tokens=tokens[:, :-1],
        targets=targets,
        documents=np.cumsum(first, axis=1, dtype=np.int32),
        positions=places - begun,
    )
