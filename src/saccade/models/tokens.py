"""Tokenizers: raw bytes, or a byte-level BPE that `tokenizers` trains on the text.

Id 0 is the end-of-document token in both. It starts and ends every document and has no text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .files import read_object, write_atomic

if TYPE_CHECKING:
    import tokenizers

END = 0
END_TEXT = "<|end|>"
BPE_SAMPLE = 4_000_000
# at least so many for each token of the vocabulary: fewer do not have enough different pieces
BPE_SAMPLE_PER_TOKEN = 244
KINDS = ("bpe", "bytes")
TOKENIZER, FORMAT = "tokenizer.json", "tokenizer_config.json"
# the name of a byte
RAW = re.compile("<0x[0-9A-F]{2}>")


class Tokenizer(Protocol):
    """The interface of a tokenizer; `vocab_size` includes the end token."""

    vocab_size: int
    # the token that begins a text without others; None if there is none
    begin: int | None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids int32 [n] of every text, without end tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD."""
        ...

    def opening(self, text: str) -> tuple[list[int], list[int]]:
        """The special tokens that come before a text, such as a BOS, and the ids of the text."""
        ...

    def continuations(self, token: int) -> np.ndarray:
        """bool [vocab_size]: the tokens whose bytes start with this token's bytes, itself included."""
        ...

    def save(self, path: Path) -> None:
        """Writes the tokenizer, atomically."""
        ...


class Bytes:
    """One token per byte: id = byte + 1."""

    vocab_size = 257
    begin: int | None = END

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32) + 1 for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i - 1 for i in ids if i != END).decode("utf-8", "replace")

    def opening(self, text: str) -> tuple[list[int], list[int]]:
        return [], self.encode([text])[0].tolist()

    def continuations(self, token: int) -> np.ndarray:
        return np.arange(self.vocab_size) == token

    def save(self, path: Path) -> None:
        write_atomic(path, json.dumps({"saccade": "bytes"}).encode())


class Bpe:
    """A byte-level BPE, stored in the `tokenizer.json` format of `tokenizers`."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self.inner = inner
        # they are for training in batches, and would cut or fill a prompt
        inner.no_truncation()
        inner.no_padding()
        # the numbers of tokens may have gaps
        self.vocab_size: int = 1 + max(inner.get_vocab().values(), default=-1)
        self.begin: int | None = inner.token_to_id(END_TEXT)
        if self.begin == END:
            # one of `train`, whose end token has no text: "<|end|>" in a text is ordinary characters
            inner.encode_special_tokens = True
        self.special = [i for i, token in inner.get_added_tokens_decoder().items() if token.special]

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Bpe:
        """Trains on the first `BPE_SAMPLE` characters, or on more for a large vocabulary; of few texts it is smaller.

        Raises ValueError for a vocabulary below 257.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        if vocab_size < 257:
            raise ValueError(f"a byte-level BPE needs a vocabulary of at least 257, given {vocab_size}")
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        characters = max(BPE_SAMPLE, BPE_SAMPLE_PER_TOKEN * vocab_size)
        inner.train_from_iterator(first_characters(texts, characters), trainer)
        return cls(inner)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.asarray(one.ids, np.int32) for one in self.inner.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def opening(self, text: str) -> tuple[list[int], list[int]]:
        # of a text with tokens, because those of an empty one have no place among the special ones
        whole = self.inner.encode(text or "a")
        before = whole.special_tokens_mask.index(0) if 0 in whole.special_tokens_mask else len(whole.ids)
        return whole.ids[:before], self.encode([text])[0].tolist()

    def continuations(self, token: int) -> np.ndarray:
        start, vocabulary = self.inner.id_to_token(token) or "", self.inner.get_vocab()
        allowed = np.zeros(self.vocab_size, bool)
        allowed[[i for text, i in vocabulary.items() if text.startswith(start)]] = True
        # of a vocabulary that writes unknown characters as bytes: a name is not the text of its token
        raw = [i for text, i in vocabulary.items() if RAW.fullmatch(text)]
        allowed[self.special + (raw if len(raw) == 256 else [])] = False
        allowed[token] = True
        return allowed

    def save(self, path: Path) -> None:
        write_atomic(path, self.inner.to_str(pretty=True).encode("utf-8"))


def first_characters(texts: Iterable[str], limit: int) -> Iterable[str]:
    """The texts up to `limit` characters in all; the text that crosses the limit is cut."""
    for text in texts:
        yield text[:limit]
        limit -= len(text)
        if limit <= 0:
            return


def make_tokenizer(kind: str, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """`bytes`, or `bpe` trained on texts. Raises ValueError for another kind."""
    if kind == "bytes":
        return Bytes()
    if kind == "bpe":
        return Bpe.train(texts, vocab_size)
    raise ValueError(f"tokenizer {kind!r} is not known; choose 'bpe' or 'bytes'")


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write a tokenizer in a model's folder; a BPE with what Hugging Face transformers reads next to it."""
    tokenizer.save(folder / TOKENIZER)
    if isinstance(tokenizer, Bpe):
        ends = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_TEXT)
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        write_atomic(folder / FORMAT, json.dumps({**kind, **ends, "model_max_length": context}, indent=2).encode())


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer that `save` (or Hugging Face `tokenizers`) wrote at path.

    Raises FileNotFoundError, or ValueError for a file of another kind.
    """
    path = Path(path)
    if read_object(path).get("saccade") == "bytes":
        return Bytes()
    from tokenizers import Tokenizer as Inner

    try:
        return Bpe(Inner.from_str(path.read_text("utf-8")))
    # the library raises nothing more specific
    except Exception as error:
        raise ValueError(f"{path} is no tokenizer in the format of Hugging Face's tokenizers: {error}") from None
