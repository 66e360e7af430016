"""The text of a training run, read into memory from files, or mapped into it from a folder of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .corpus import prepare
from .data import PackedText, read_documents
from .settings import Settings
from .tokens import Tokenizer, make_tokenizer


class Text(NamedTuple):
    """Packed rows, their tokenizer, the number of documents, bytes per token, and bytes by package, if it is mapped."""

    rows: PackedText
    tokenizer: Tokenizer
    documents: int
    bytes_per_token: float
    packages: dict[str, int]


def load_text(settings: Settings, tokenizer: Tokenizer | None, say: Callable[[str], None]) -> Text:
    """The text that the settings name; tokenizer: that of the run to resume, None to train one on the text.

    Raises ValueError and FileNotFoundError as `corpus.prepare`, `data.read_documents` and `PackedText`.
    """
    if settings.data:
        corpus = prepare(settings.data, settings.tokenizer, settings.vocab, say=say)
        rows = corpus.packed(settings.context, settings.seed)
        documents = corpus.documents
        return Text(rows, corpus.tokenizer, len(documents.lengths), corpus.bytes / documents.tokens, corpus.packages)
    say("reading the text")
    texts = read_documents(settings.text)
    if tokenizer is None:
        say("training the tokenizer")
        tokenizer = make_tokenizer(settings.tokenizer, texts, settings.vocab)
    say("turning the text into tokens")
    ids = tokenizer.encode(texts)
    rows = PackedText.of_texts(ids, settings.context, settings.seed)
    return Text(rows, tokenizer, len(texts), sum(len(text.encode()) for text in texts) / sum(map(len, ids)), {})
