"""Packed training rows from text files: each file is one document, and a token sees only its own document.

The rows of a batch depend only on (text, context, seed, step), so a run needs only its step number to resume its data.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .tokens import END

IGNORED = -100
TESTS, TABLES = {"test", "tests", "idle_test"}, {"encodings", "pydoc_data"}
SKIPPED_FOLDERS = TESTS | TABLES | {"site-packages", "dist-packages", "__pycache__"}

# a triple-quoted string, which is a docstring if nothing precedes it on its line; and a line that is a comment
LONG_STRING = re.compile(r"""(?ms)(^[ \t]*)?(?:\b[rRuUbBfF]{1,2})?("{3}|'{3})(?:\\.|.)*?\2(?:[ \t]*\n)?""")
COMMENT, EMPTY_LINES = re.compile(r"(?m)^[ \t]*#.*\n"), re.compile(r"\n{4,}")


@dataclass(frozen=True)
class Batch:
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


class PackedText:
    """Documents joined end to end and cut into rows of `context` tokens.

    documents: int32 ids of each text, without end tokens; END is added before and after each. Every epoch has its
    own order of documents and of rows. The share `held_out` of the tokens is reserved for `validation`.
    Raises ValueError if training and validation do not get at least one row each.
    """

    def __init__(self, documents: Sequence[np.ndarray], context: int, seed: int, held_out: float = 0.02) -> None:
        self.context, self.seed = context, seed
        order = np.random.default_rng([seed]).permutation(len(documents))
        lengths = np.array([len(documents[i]) + 2 for i in order])
        stream = np.full(lengths.sum(), END, np.int32)
        starts = np.cumsum(lengths) - lengths
        for i, start in zip(order, starts, strict=True):
            stream[start + 1 : start + 1 + len(documents[i])] = documents[i]
        self.fingerprint = hashlib.sha256(stream.tobytes() + lengths.tobytes()).hexdigest()

        cut = len(stream) - max(int(len(stream) * held_out), context + 1)
        self.rows = (cut - 1) // context
        if self.rows < 1:
            raise ValueError(
                f"{len(stream)} tokens of text are too few for rows of {context}; give more text or a smaller context"
            )
        training = starts < cut
        self._stream, self._starts = stream[:cut], starts[training]
        self._lengths = np.diff(np.append(self._starts, cut))
        self._held_out = stream[cut:], np.searchsorted(starts, np.arange(cut, len(stream)), "right")
        self._epoch = -1

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
            self._lay_out(epoch)
            parts.append(cut_rows(*self._laid, self._deal[first : first + count], self.context))
            position += count
        if len(parts) == 1:
            return parts[0]
        fields = ("tokens", "targets", "documents", "positions")
        return Batch(*(np.concatenate([getattr(part, field) for part in parts]) for field in fields))

    def validation(self, rows: int) -> Batch:
        """Up to `rows` rows of the held-out text, always the same ones, spread evenly over it."""
        available = (len(self._held_out[0]) - 1) // self.context
        chosen = np.unique(np.linspace(0, available - 1, min(rows, available)).astype(np.int64))
        return cut_rows(*self._held_out, chosen, self.context)

    def _lay_out(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(len(self._starts))
        lengths = self._lengths[order]
        # source index of every token of the joined text: its document's start plus its place in the document
        shift = np.repeat(self._starts[order] - (np.cumsum(lengths) - lengths), lengths)
        tokens = self._stream[shift + np.arange(len(shift))]
        self._laid = tokens, np.repeat(np.arange(len(order), dtype=np.int32), lengths)
        self._deal = random.permutation(self.rows)
        self._epoch = epoch


def cut_rows(tokens: np.ndarray, documents: np.ndarray, rows: np.ndarray, context: int) -> Batch:
    """Rows `rows` of a stream (tokens [n], documents [n]) cut every `context` tokens."""
    places = np.arange(context)
    at = rows[:, None] * context + places
    tokens_at, documents_at = tokens[at], documents[at]
    targets = np.where(documents[at + 1] == documents_at, tokens[at + 1], IGNORED)
    first = np.zeros(at.shape, bool)
    first[:, 1:] = documents_at[:, 1:] != documents_at[:, :-1]
    begun = np.maximum.accumulate(np.where(first, places, 0), axis=1)
    return Batch(
        tokens=tokens_at.astype(np.int64),
        targets=targets.astype(np.int64),
        documents=np.cumsum(first, axis=1, dtype=np.int32),
        positions=places - begun,
    )
