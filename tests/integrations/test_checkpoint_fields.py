"""Fields of a config.json that weights do not show: missing ones are as in transformers, contradictions are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from saccade.models.loading import load_model

from .checkpoint_models import YARN, saved, tokens


def edit(folder: Path, without: tuple[str, ...] = (), **changes: Any) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: x for name, x in values.items() if name not in without}))


def stored(folder: Path, **changes: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | changes, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("llama", ("rms_norm_eps", "max_position_embeddings")),
        ("mistral", ("rms_norm_eps", "sliding_window")),
        ("deepseek v2", ("rms_norm_eps",)),
        ("deepseek v3", ("rms_norm_eps", "routed_scaling_factor", "norm_topk_prob", "topk_group")),
        ("deepseek v3.2", ("rms_norm_eps", "routed_scaling_factor", "norm_topk_prob")),
    ],
)
def test_missing_fields_are_those_of_transformers(name: str, without: tuple[str, ...], tmp_path) -> None:
    saved(name, tmp_path)
    edit(tmp_path, without)
    ours, theirs = load_model(tmp_path), hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    limits = "max_position_embeddings", "sliding_window"
    expected = [getattr(theirs.config, limit, None) or 0 for limit in limits]
    assert [getattr(ours.config, limit) for limit in limits] == expected
    ids = tokens(2, 60)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
def test_layers_of_one_kind(kind: str, tmp_path) -> None:
    """transformers reads a Mistral with kinds of layers as a Ministral."""
    saved("mistral", tmp_path)
    layers = json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"]
    edit(tmp_path, layer_types=[kind] * layers)
    theirs, ids = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval(), tokens(2, 60)
    assert theirs.config.model_type == "ministral"
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path)(ids), theirs(ids).logits, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba", "jamba"])
def test_null_is_no_end_token(name: str, tmp_path) -> None:
    """A null that says that no token ends a text is not read as a missing end token."""
    saved(name, tmp_path)
    edit(tmp_path, eos_token_id=None)
    # in which transformers has stored the end token, too
    assert load_model(tmp_path).config.ends != (-1,)
    (tmp_path / "generation_config.json").unlink()
    assert load_model(tmp_path).config.ends == (-1,)


@pytest.mark.parametrize("name", ["tied", "gpt2", "qwen3 next, other layers", "mamba"])
def test_a_tied_head_is_the_embedding(name: str, tmp_path) -> None:
    """A stored head that equals the embedding is left out; transformers would use another one, which is refused."""
    theirs = saved(name, tmp_path)
    table = theirs.get_input_embeddings().weight.detach()
    stored(tmp_path, **{"lm_head.weight": table.clone()})
    ids = tokens(1, 12)
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path)(ids), theirs(ids).logits, rtol=1e-4, atol=2e-5)
    stored(tmp_path, **{"lm_head.weight": table + 1})
    with pytest.raises(ValueError, match=r"tied by its config\.json, and .* differs from .*expected equal tensors"):
        load_model(tmp_path)


def test_only_layers_that_predict_further_tokens_are_left_out(tmp_path) -> None:
    saved("deepseek v3", tmp_path)
    ids, whole = tokens(1, 12), load_model(tmp_path)
    layer = {f"model.layers.3.{name}": torch.ones(48) for name in ("enorm.weight", "input_layernorm.weight")}
    stored(tmp_path, **layer, **{"model.layers.3.eh_proj.weight": torch.ones(48, 96)})
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path)(ids), whole(ids))
    edit(tmp_path, num_hidden_layers=2)
    with pytest.raises(ValueError, match="has 2 layers, and the weights there have 3"):
        load_model(tmp_path)


@pytest.mark.parametrize("rope", [{"rope_type": "default", "factor": 40.0}, {**YARN, "rope_type": "linear"}])
def test_the_factor_of_scores_follows_the_kind_of_rotation(rope: dict[str, Any], tmp_path) -> None:
    saved("deepseek v3", tmp_path)
    edit(tmp_path, rope_parameters={**rope, "rope_theta": 1e4, "mscale_all_dim": 1.3})
    theirs, ids = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval(), tokens(1, 40)
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path)(ids), theirs(ids).logits, rtol=1e-4, atol=2e-5)


def test_a_factor_from_positions_is_also_that_of_scores(tmp_path) -> None:
    """Without a factor, YaRN's is the quotient of the lengths, for angles and scores."""
    saved("deepseek v3, yarn", tmp_path)
    edit(tmp_path, rope_parameters={**YARN, "factor": 4.0})
    want, ids = load_model(tmp_path), tokens(1, 40)
    edit(tmp_path, rope_parameters={**YARN, "factor": None})
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path)(ids), want(ids))


LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("deepseek v3", {"scoring_func": "softmax"}, "scoring_func='softmax'; expected 'sigmoid' in a deepseek_v3"),
        ("deepseek v2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'; expected 'softmax' in a deepseek_v2"),
        ("deepseek v2", {"num_experts_per_tok": None}, "lacks num_experts_per_tok"),
        ("deepseek v3", {"sliding_window": 5}, "sliding_window=5; expected None, 0"),
        ("llama", {"rope_scaling": LINEAR}, "has rope_parameters .*, rope_scaling .*; expected one of them"),
        ("llama", {"rope_scaling": {"rope_theta": 7.0}}, r"bases \[7\.0, 10000\.0\]; expected one of them"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*; expected 'sliding_att"),
        ("llama", {"rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5; expected"),
    ],
)
def test_refused(name: str, changes: dict[str, Any], words: str, tmp_path) -> None:
    saved(name, tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=words):
        load_model(tmp_path)


def test_both_names_of_equal_rotations(tmp_path) -> None:
    saved("linear", tmp_path)
    want = load_model(tmp_path).config
    edit(tmp_path, rope_scaling=LINEAR)
    assert load_model(tmp_path).config == want


def test_numbers_beyond_float32(tmp_path) -> None:
    saved("llama", tmp_path)
    head = load_file(tmp_path / "model.safetensors")["lm_head.weight"].double()
    head[0, 0] = 1e300
    stored(tmp_path, **{"lm_head.weight": head})
    with pytest.raises(ValueError, match=r"lm_head\.weight in .* holds NaN or an infinity in float32"):
        load_model(tmp_path)
