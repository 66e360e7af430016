"""Saccade's models compute transformers' logits from checkpoints that transformers saves, in the real file format."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("transformers")
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from saccade.models.attended import attended
from saccade.models.batching import serve
from saccade.models.indexer import LightningIndexer
from saccade.models.loading import load_model
from saccade.models.sampling import Sampler, generate

from .checkpoint_models import JAMBA, LATENT, MODELS, RECURRENT, SMALL, STACKS, saved, tokens


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_text(name, tmp_path) -> None:
    theirs = saved(name, tmp_path)
    ours = load_model(tmp_path)
    ids = tokens(2, 90)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=2e-5)
    given = {"attention_mask": torch.ones(1, 20), "max_new_tokens": 25, "do_sample": False, "pad_token_id": 0}
    # their step of decoding bounds no steps of Mamba-2, their whole pass does
    given["use_cache"] = "bounded" not in name
    want = theirs.generate(ids[:1, :20], **given)
    found = [x[0] for x in generate(ours, [ids[0, :20].tolist()], 25, Sampler(0.0))]
    assert found == want[0, 20:].tolist()


@pytest.mark.parametrize("name", ["llama3", "mistral", "gpt2", *LATENT, *STACKS])
def test_prefill_and_decode_are_one_forward(name, tmp_path) -> None:
    saved(name, tmp_path)
    model, ids, r = load_model(tmp_path), tokens(2, 60), torch.Generator().manual_seed(3)
    with torch.no_grad():
        whole = model(ids)
        for _ in range(6):
            cuts = [0, *sorted(torch.randint(1, 60, (4,), generator=r).unique().tolist()), 60]
            caches = model.make_caches(2, 60)
            parts = [model(ids[:, a:b], caches=caches) for a, b in pairwise(cuts)]
            torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", STACKS)
def test_half_precision_keeps_decays_whole(name, tmp_path) -> None:
    saved(name, tmp_path)
    model, ids = load_model(tmp_path, torch.bfloat16), tokens(1, 40)
    kept = {x.dtype for which, x in model.named_parameters() if which.endswith(("A_log", ".D", "recurrent_param"))}
    assert kept == {torch.float32}
    with torch.no_grad():
        found, want = model(ids), load_model(tmp_path)(ids)
    assert found.dtype == torch.bfloat16
    assert (found.float() - want).norm() < 0.05 * want.norm()
    assert len(list(generate(model, [ids[0, :9].tolist()], 5, Sampler(0.0)))) == 5


@pytest.mark.parametrize("name", LATENT)
def test_absorbed_or_not(name, tmp_path) -> None:
    """Up-projections multiplied into q and o, or applied to every latent row, over caches, pages and 8-bit codes."""
    saved(name, tmp_path)
    model, ids = load_model(tmp_path), tokens(2, 60)
    # the routers of new models choose by their correction alone if it is not 0
    for which, x in model.named_parameters():
        if which.endswith("e_score_correction_bias"):
            x.data.uniform_(-0.05, 0.05, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        model.absorb(False)
        want = model(ids)
        text = list(generate(model, [ids[0, :20].tolist()], 25, Sampler(0.0)))
        for absorbed in (False, True, None):
            model.absorb(absorbed)
            torch.testing.assert_close(model(ids), want, rtol=1e-4, atol=2e-5)
            caches = model.make_caches(2, 60)
            parts = [model(ids[:, a:b], caches=caches) for a, b in pairwise([0, 33, 34, 41, 60])]
            torch.testing.assert_close(torch.cat(parts, 1), want, rtol=1e-4, atol=2e-5)
            assert list(generate(model, [ids[0, :20].tolist()], 25, Sampler(0.0))) == text
        if "3.2" in name:
            with pytest.raises(ValueError, match="index keys have no pages"):
                next(serve(model, [[1]], 2, Sampler(0.0)))
        else:
            served = dict(serve(model, [ids[0, :20].tolist(), ids[1, :7].tolist()], 25, Sampler(0.0), chunk=8))
            assert [[token] for token in served[0]] == text
        if "3.2" in name:
            # rounded rows change which keys the indexer chooses, unless it chooses all of them
            for layer in model.modules():
                if isinstance(layer, LightningIndexer):
                    layer.count = 60
            want = model(ids)
        coded = model.make_caches(2, 60, "int8")
        found = torch.cat([model(ids[:, :30], caches=coded), model(ids[:, 30:], caches=coded)], 1)
        assert (found - want).norm() < 0.02 * want.norm()
    weights = attended(model, ids[0].tolist())
    assert weights.shape == (3, 6, 60, 60)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)


def test_shards(tmp_path) -> None:
    theirs = saved("llama", tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ids = tokens(1, 12)
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path)(ids), theirs(ids).logits, rtol=1e-4, atol=2e-5)


def test_our_folder_is_theirs(tmp_path) -> None:
    saved("mistral", tmp_path)
    ours = load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(ours.config.to_dict()))
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "MistralForCausalLM"
    ids = tokens(1, 30)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=2e-5)


def test_gpt2_files_of_the_first_days(tmp_path) -> None:
    """Names without a prefix, masks among the tensors."""
    theirs = saved("gpt2", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(path).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 128, 128)
    save_file(tensors, path)
    ids = tokens(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path)(ids), theirs(ids).logits, rtol=1e-4, atol=2e-5)


def test_ragged_prompts_each_as_alone(tmp_path) -> None:
    for name in ("gpt2", "llama3", "deepseek v3", *STACKS):
        saved(name, tmp_path / name)
        model = load_model(tmp_path / name)
        prompts = [tokens(1, 100)[0].tolist(), [5], list(range(3, 60))]
        together = list(generate(model, prompts, 20, Sampler(0.0), chunk=32))
        for row, prompt in enumerate(prompts):
            alone = [x[0] for x in generate(model, [prompt], 20, Sampler(0.0))]
            assert [x[row] for x in together] == (alone + [82] * 20)[:20]


def edit(folder, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(folder) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickled(folder) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


REFUSED = {
    "cut": (cut, ValueError, "is truncated or not a safetensors file"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), FileNotFoundError, r"no model\.safetensors"),
    "pickles": (pickled, ValueError, "only pickled weights, which can run code"),
    "another shape": (lambda f: edit(f, intermediate_size=32), ValueError, "do not fit its config.json"),
    "another model": (
        lambda f: edit(f, model_type="gemma2"), ValueError, "'gemma2'; expected one of llama, mistral, gpt2, deepseek",
    ),
    "another activation": (lambda f: edit(f, hidden_act="gelu"), ValueError, "hidden_act='gelu'"),
    "another rotation": (
        lambda f: edit(f, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}), ValueError,
        "expected rope_type to be one of default, linear, llama3, yarn",
    ),
    "half a rotation": (
        lambda f: edit(f, rope_parameters={"rope_type": "linear", "rope_theta": 1e4}), ValueError,
        "expected 'factor' in it",
    ),
    "no sizes": (
        lambda f: (f / "config.json").write_text("{}"), ValueError, "lacks vocab_size and num_attention_heads",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path) -> None:
    spoil, kind, words = REFUSED[name]
    saved("llama", tmp_path)
    spoil(tmp_path)
    with pytest.raises(kind, match=words):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("deepseek v2", {"norm_topk_prob": True}, "norm_topk_prob is true; expected false"),
        ("deepseek v3", {"num_experts_per_tok": 99}, "expected at most as many chosen as there are"),
        ("deepseek v3", {"n_group": 3}, "expected groups of equal size"),
        ("deepseek v3", {"topk_method": "random"}, "topk_method='random'; expected 'greedy', 'group"),
        ("deepseek v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
    ],
)
def test_refused_deepseek(kind, changes, words, tmp_path) -> None:
    saved(kind, tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=words):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (
            "qwen3 next",
            {"layer_types": ["sliding_attention"] * 4},
            "layer_types has 'sliding_attention'; expected linear",
        ),
        ("qwen3 next", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'; this model computes"),
        ("qwen3 next", {"linear_num_key_heads": 3}, "expected value_heads to be a multiple of key_heads"),
        (
            "qwen3 next",
            {"linear_key_head_dim": 10},
            "do not fit its config.json: layers.0.mixer.conv1d.weight is unknown",
        ),
        ("kimi linear", {"num_expert_group": 2}, "num_expert_group=2; this model computes"),
        ("kimi linear", {"linear_attn_config": {"gate_lower_bound": -5}}, "has gate_lower_bound; expected num_heads"),
        ("kimi linear", {"mla_use_nope": False}, "mla_use_nope=False; this model computes"),
        ("kimi linear", {"mlp_layer_types": ["dense", "mixed"]}, "mlp_layer_types has 'mixed'; expected dense or"),
        ("kimi linear", {"layer_types": None, "linear_attn_config": {"num_heads": 0}}, "num_heads is 0; expected"),
    ],
)
def test_refused_stacks(kind, changes, words, tmp_path) -> None:
    saved(kind, tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=words):
        load_model(tmp_path)


def test_published_configs_of_stacks(tmp_path) -> None:
    """Published checkpoints have older keys than transformers writes, and layers that predict further tokens."""
    saved("qwen3 next", tmp_path / "qwen")
    older = {"full_attention_interval": 4, "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    saved("kimi linear", tmp_path / "kimi")
    linear = {"num_heads": 3, "head_dim": 8, "short_conv_kernel_size": 4, "kda_layers": [1, 2, 3, 4]}
    linear["full_attn_layers"] = [5]
    changes = {
        "qwen": dict.fromkeys(("layer_types", "mlp_only_layers", "rope_parameters")) | older,
        "kimi": {
            **dict.fromkeys(("layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim")),
            **{"linear_attn_config": linear, "first_k_dense_replace": 1, "rope_scaling": None},
        },
    }
    for name, values in changes.items():
        want = load_model(tmp_path / name)
        edit(tmp_path / name, **values)
        path = tmp_path / name / "model.safetensors"
        save_file(load_file(path) | {"mtp.norm.weight": torch.ones(48)} if name == "qwen" else load_file(path), path)
        ours = load_model(tmp_path / name)
        assert ours.config == want.config
        torch.testing.assert_close(ours.state_dict(), want.state_dict(), rtol=0, atol=0)


def test_overlong_prompts(tmp_path) -> None:
    saved("llama", tmp_path)
    with pytest.raises(ValueError, match="ask for at most 28"):
        next(generate(load_model(tmp_path), [list(range(2, 80)) + list(range(2, 24))], 29, Sampler(0.0)))


@pytest.mark.parametrize("kind", ["llama", "mamba", "jamba"])
def test_the_command_line_continues_a_prompt(kind, tmp_path) -> None:
    from typer.testing import CliRunner

    from saccade.cli.main import app
    from saccade.models.tokens import Bpe

    torch.manual_seed(0)
    given = {"vocab_size": 300, "eos_token_id": 0}
    configs = {
        "llama": lambda: hf.LlamaConfig(**SMALL | given), "mamba": lambda: hf.MambaConfig(**RECURRENT | given),
        "jamba": lambda: hf.JambaConfig(**JAMBA | given),
    }  # fmt: skip
    hf.AutoModelForCausalLM.from_config(configs[kind]()).save_pretrained(tmp_path)
    Bpe.train(["one two three, one two three. " * 40], 300).save(tmp_path / "tokenizer.json")
    words = ["generate", "--model", str(tmp_path), "--prompt", "one two", "--tokens", "6", "--temperature", "0"]
    words.append("--json")
    run = CliRunner().invoke(app, words)
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    assert found["texts"][0].startswith("one two")
    assert found["new_tokens"] == 6
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    run = CliRunner().invoke(app, words)
    assert run.exit_code == 2
    assert "only pickled weights" in run.output
