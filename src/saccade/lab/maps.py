"""Attention maps of a checkpoint: what every layer and head attends to in a text."""

from __future__ import annotations

import threading
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np

from .query import FieldError, Query

LONGEST_TEXT, MOST_TOKENS, MOST_WEIGHTS = 4000, 160, 6_000_000


class Model:
    """A checkpoint's model and tokenizer. Raises as `load_model` does; FileNotFoundError without a tokenizer.json."""

    def __init__(self, directory: Path):
        from ..models.loading import load_model
        from ..models.tokens import load_tokenizer

        self.name = directory.resolve().name
        self._net = load_model(directory)
        self._tokenizer = load_tokenizer(directory / "tokenizer.json")
        self._lock = threading.Lock()
        if not self._net.cached[0]:
            raise ValueError(f"the model in {directory} has no attention layer; expected one with maps to show")

    def maps(self, query: Query) -> dict[str, Any]:
        """tokens: the texts of the tokens. weights: uint16 [layers, heads, T, T] in base64, in units of 1 / 65535.

        Raises ValueError for a text that is empty or too long.
        """
        from ..models.attended import attended

        text = query.get("text", "")
        if not text or len(text) > LONGEST_TEXT:
            raise FieldError("text", f"Text has {len(text)} characters; expected 1 to {LONGEST_TEXT}")
        ids = self._tokenizer.encode([text])[0].tolist()
        longest = min(MOST_TOKENS, self._net.config.max_position_embeddings)
        if not 1 <= len(ids) <= longest:
            raise FieldError("text", f"Text has {len(ids)} tokens; expected 1 to {longest}: shorten it")
        with self._lock:
            weights = attended(self._net, ids)
        if weights.size > MOST_WEIGHTS:
            raise FieldError(
                "text", f"{len(ids)} tokens make {weights.size} weights, more than {MOST_WEIGHTS}: shorten the text"
            )
        units = np.round(weights.astype(np.float64) * 65535).clip(0, 65535).astype("<u2")
        return {
            "model": self.name,
            "tokens": [self._tokenizer.decode([token]) or "<|end|>" for token in ids],
            "layers": weights.shape[0],
            "heads": weights.shape[1],
            "weights": b64encode(units.tobytes()).decode(),
        }
