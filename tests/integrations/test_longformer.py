"""Longformer's attention with transformers' weights equals its layer, including global projections."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
import torch
import transformers as hf

from saccade.models.sparse_blocks import LongformerAttention


@pytest.mark.parametrize("chosen", [[], [0], [0, 7, 50]])
def test_layer_of_transformers(chosen) -> None:
    torch.manual_seed(0)
    config = hf.LongformerConfig(
        vocab_size=60, hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        attention_window=[16], max_position_embeddings=80, pad_token_id=1,
    )  # fmt: skip
    model = hf.LongformerModel(config, add_pooling_layer=False).eval()
    theirs, seen = model.encoder.layer[0].attention.self, []

    def keep(_, args, kwargs, out) -> None:
        seen[:] = [args[0] if args else kwargs["hidden_states"], out[0]]

    theirs.register_forward_hook(keep, with_kwargs=True)
    named = torch.zeros(2, 64, dtype=torch.int64)
    named[:, chosen] = 1
    ours = LongformerAttention(48, 4, 16)
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        model(torch.randint(2, 60, (2, 64)), global_attention_mask=named)
        x, want = seen
        found = ours(x, torch.tensor(chosen, dtype=torch.int64))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=2e-5)
