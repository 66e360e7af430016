"""Stacks of attention and recurrent layers: one cache, decoding, ragged prompts, documents, crops, their files."""

from __future__ import annotations

import json
from itertools import pairwise
from math import inf

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from saccade import mask as masks  # noqa: E402
from saccade.models.batching import serve  # noqa: E402
from saccade.models.hybrid import Hybrid  # noqa: E402
from saccade.models.hybrid_config import HybridConfig, griffin, jamba, samba  # noqa: E402
from saccade.models.hybrid_loading import read_hybrid  # noqa: E402
from saccade.models.loading import load_model  # noqa: E402
from saccade.models.sampling import Sampler, generate  # noqa: E402
from saccade.models.weights import save_weights  # noqa: E402

SMALL = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 64, "state_size": 8, "initializer_range": 0.2}


def plain(kind: str, layers: int = 2) -> dict:
    return {"mixers": (kind,) * layers, "feed_forward": ("swiglu",) * layers}


STACKS = {
    "jamba": jamba(8, experts=3) | {"num_experts_per_tok": 2},
    "griffin": griffin(4, window=7),
    "samba": samba(4, window=7),
    "retention": plain("retention"),
    "gla": plain("gla"),
    "delta, delta, delta, attention": {
        "mixers": ("delta", "delta", "delta", "attention"), "feed_forward": ("swiglu",) * 4,
    },
    "mamba2": {"mixers": ("mamba2",) * 2, "feed_forward": ("none",) * 2, "tie_word_embeddings": True},
    "attention": plain("attention"),
    "qwen3 next": {
        "mixers": ("delta", "gated"), "feed_forward": ("gated",) * 2, "num_experts": 4, "num_experts_per_tok": 2,
        "value_heads": 4, "key_heads": 2, "rotary": 0.5,
    },
    "kimi linear": {
        "mixers": ("kimi", "latent"), "feed_forward": ("swiglu", "shared"), "num_experts": 4, "num_experts_per_tok": 2,
        "kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "rotary": 0.0,
    },
}  # fmt: skip
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def made(name: str) -> Hybrid:
    torch.manual_seed(0)
    return Hybrid(HybridConfig(**SMALL | STACKS[name])).double().eval()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, 61, shape, generator=torch.Generator().manual_seed(1))


def test_named_stacks() -> None:
    config = HybridConfig(vocab_size=61, **jamba(16, experts=4))
    assert [i for i, kind in enumerate(config.mixers) if kind == "attention"] == [4, 12]
    assert [i for i, kind in enumerate(config.feed_forward) if kind == "experts"] == list(range(1, 16, 2))
    assert config.turned_dim == 0
    assert griffin(5)["mixers"] == ("griffin", "griffin", "local", "griffin", "griffin")
    assert samba(3)["mixers"] == ("mamba", "local", "mamba")


@pytest.mark.parametrize("name", STACKS)
@torch.no_grad()
def test_decoding_is_one_forward(name) -> None:
    model, ids, r = made(name), tokens(2, 40), torch.Generator().manual_seed(3)
    whole = model(ids)
    for every in (None, 5):
        cuts = [0, *sorted(torch.randint(1, 40, (5,), generator=r).unique().tolist()), 40]
        caches = model.make_caches(2, 40, every=every)
        parts = [model(ids[:, a:b], caches=caches) for a, b in pairwise(cuts)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, **CLOSE)


@pytest.mark.parametrize("name", STACKS)
def test_documents_of_a_row_are_separate_texts(name) -> None:
    model, ids = made(name), tokens(2, 30)
    borders = [[0, 9, 10, 30], [0, 4, 22, 30]]
    positions = torch.stack([torch.cat([torch.arange(b - a) for a, b in pairwise(row)]) for row in borders])
    documents = torch.stack([torch.repeat_interleave(torch.tensor(row).diff()) for row in borders])
    found = model(ids, positions, masks.causal() & masks.documents(documents.numpy()))
    for row, cuts in enumerate(borders):
        for a, b in pairwise(cuts):
            torch.testing.assert_close(found[row : row + 1, a:b], model(ids[row : row + 1, a:b]), **CLOSE)


@pytest.mark.parametrize("name", STACKS)
def test_ragged_prompts_each_as_alone(name) -> None:
    model = made(name)
    prompts = [tokens(1, 50)[0].tolist(), [5], list(range(3, 30))]
    together = list(generate(model, prompts, 12, Sampler(0.0), chunk=16))
    for row, prompt in enumerate(prompts):
        alone = [x[0] for x in generate(model, [prompt], 12, Sampler(0.0), chunk=64)]
        assert [x[row] for x in together][: len(alone)] == alone


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("length", [0, 3, 8, 16, 21, 30])
@torch.no_grad()
def test_crop_goes_back(name, length) -> None:
    model, ids, other = made(name), tokens(2, 30), tokens(2, 41)[:, 30:]
    caches = model.make_caches(2, 48, every=8)
    model(ids[:, :19], caches=caches)
    model(ids[:, 19:], caches=caches)
    model.crop(caches, length)
    assert caches.lengths.tolist() == [length] * 2
    found = model(other, caches=caches)
    want = model(torch.cat([ids[:, :length], other], 1))[:, length:]
    torch.testing.assert_close(found, want, **CLOSE)
    # and once more, over what was read since
    model.crop(caches, length + 2)
    torch.testing.assert_close(model(other[:, 2:], caches=caches), want[:, 2:], **CLOSE)


@torch.no_grad()
def test_crop_that_no_checkpoint_allows() -> None:
    model = made("griffin")
    caches = model.make_caches(2, 20)
    model(tokens(2, 12), caches=caches)
    with pytest.raises(ValueError, match="a state cannot be shortened, and it has no checkpoint; make"):
        model.crop(caches, 11)
    with pytest.raises(ValueError, match="expected a length from 0 to theirs"):
        model.crop(caches, 13)
    model.crop(caches, 0)
    torch.testing.assert_close(model(tokens(2, 12), caches=caches), model(tokens(2, 12)), **CLOSE)
    with pytest.raises(ValueError, match="expected at least 1 token between checkpoints"):
        model.make_caches(1, 20, every=0)


@pytest.mark.parametrize("length", [3.5, 4.0, True, None])
@torch.no_grad()
def test_a_refused_crop_changes_nothing(length) -> None:
    model, ids = made("griffin"), tokens(2, 12)
    caches = model.make_caches(2, 20, every=4)
    model(ids[:, :11], caches=caches)
    with pytest.raises(TypeError, match=r"length is .*; expected an integer"):
        model.crop(caches, length)
    torch.testing.assert_close(model(ids[:, 11:], caches=caches), model(ids)[:, 11:], **CLOSE)
    with pytest.raises(TypeError, match=r"every is 2\.5; expected an integer"):
        model.make_caches(1, 20, every=2.5)


@torch.no_grad()
def test_crop_of_keys_alone_reads_nothing_again() -> None:
    model = made("attention")
    caches = model.make_caches(1, 20)
    model(tokens(1, 12), caches=caches)
    assert caches.rewind(7).shape == (1, 0)
    assert caches.lengths.tolist() == [7]


@torch.no_grad()
def test_states_of_several_lengths_keep_no_checkpoint() -> None:
    model = made("mamba2")
    caches = model.make_caches(2, 20, every=4)
    caches.ends = torch.tensor([3, 5])
    with pytest.raises(ValueError, match="expected one length for all"):
        model(tokens(2, 5), caches=caches)


def test_pages_and_eviction_are_refused() -> None:
    model = made("griffin")
    with pytest.raises(ValueError, match="pages cannot hold the states of recurrent layers"):
        next(serve(model, [[1, 2]], 3, Sampler(0.0)))
    with pytest.raises(ValueError, match="keep is given"):
        next(generate(model, [[1, 2]], 3, Sampler(0.0), keep=(1, 4)))


@pytest.mark.parametrize("name", ["jamba", "mamba2", "delta, delta, delta, attention"])
@torch.no_grad()
def test_files_of_our_own(name, tmp_path) -> None:
    model = made(name).float()
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict(), allow_nan=False))
    save_weights(tmp_path / "model.safetensors", model)
    again = load_model(tmp_path)
    assert isinstance(again, Hybrid)
    assert again.config == model.config
    torch.testing.assert_close(again(tokens(1, 9)), model(tokens(1, 9)))


@torch.no_grad()
def test_decays_of_retention_stay_whole(tmp_path) -> None:
    """A model of half precision has the decays of float32, because their errors accumulate over a text."""
    model = made("retention").float()
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict(), allow_nan=False))
    save_weights(tmp_path / "model.safetensors", model)
    half = load_model(tmp_path, torch.bfloat16)
    assert {x.dtype for x in half.parameters()} == {torch.bfloat16}
    for layer, one in zip(model.layers, half.layers, strict=True):
        assert one.mixer.decays.dtype == torch.float32
        assert torch.equal(one.mixer.decays, layer.mixer.decays)
    assert half(tokens(1, 9)).dtype == torch.bfloat16


@torch.no_grad()
def test_caches_of_codes() -> None:
    model = made("griffin").float()
    caches = model.make_caches(1, 30, quantised="int8")
    coded = model(tokens(1, 30), caches=caches)
    assert caches.keys[0].quantised is not None
    torch.testing.assert_close(coded, model(tokens(1, 30)), rtol=0.2, atol=0.2)


WRONG = {
    "mixers has 'softmax'": {"mixers": ("softmax",), "feed_forward": ("none",)},
    "2 mixers and 1 feed-forwards": {"mixers": ("mamba",) * 2, "feed_forward": ("none",)},
    "expected at least 1 token": {"mixers": ("local",), "feed_forward": ("none",)},
    "expected num_attention_heads to be a multiple": plain("attention")
    | {"num_attention_heads": 6, "num_key_value_heads": 4},
    "expected an even number": plain("attention") | {"head_dim": 7},
    "8 dimensions are rotated; expected at most key_dim = 6, because a layer is retention": plain("retention")
    | {"key_dim": 6},
    "ssm_heads is 5; expected a divisor": plain("mamba2") | {"ssm_heads": 5},
    "num_experts_per_tok is 3; expected at most num_experts, 2": plain("mamba")
    | {"num_experts": 2, "num_experts_per_tok": 3},
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_shapes(words) -> None:
    with pytest.raises(ValueError, match=words):
        HybridConfig(**SMALL | WRONG[words])


MAMBA = {"model_type": "mamba", "vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 8}
MAMBA2 = MAMBA | {"model_type": "mamba2", "num_heads": 6, "head_dim": 16}
GEMMA = {
    "model_type": "recurrent_gemma", "vocab_size": 61, "hidden_size": 48, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 6,
}  # fmt: skip
REFUSED = {
    "hidden_act='gelu'; this model computes hidden_act='silu' only": MAMBA | {"hidden_act": "gelu"},
    "lacks 'state_size'; expected that of a mamba model": {k: x for k, x in MAMBA.items() if k != "state_size"},
    "num_heads=6 of head_dim=8; expected them to fill": MAMBA2 | {"head_dim": 8},
    "rope_type='yarn'; this model computes 'default' only": GEMMA | {"rope_parameters": {"rope_type": "yarn"}},
    "hidden_activation='relu'": GEMMA | {"hidden_activation": "relu"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_checkpoints_that_ask_for_more(words) -> None:
    with pytest.raises(ValueError, match=words):
        read_hybrid(REFUSED[words])


def test_configs_of_files() -> None:
    config, _ = read_hybrid(MAMBA2 | {"time_step_limit": [0.01, {"__float__": "Infinity"}], "n_groups": 1})
    assert config.step_limit == (0.01, float("inf"))
    # transformers' default
    assert config.ends == (2,)
    config, _ = read_hybrid(MAMBA2 | {"eos_token_id": None, "n_groups": 1})
    assert config.ends == (-1,)
    config, _ = read_hybrid(GEMMA | {"eos_token_id": [1, 2]})
    assert config.mixers == ("griffin", "griffin", "local")
    assert (config.sliding_window, config.turned_dim, config.ends) == (2048, 4, (1, 2))


def test_a_config_that_lacks_its_layers() -> None:
    with pytest.raises(ValueError, match="lacks mixers and feed_forward"):
        HybridConfig.from_dict({"vocab_size": 61})


@pytest.mark.parametrize(
    "limit, bounds",
    [(None, (0.0, inf)), ([None, 0.1], (0.0, 0.1)), ([0.01, None], (0.01, inf)), ([None, None], (0.0, inf))],
)
def test_steps_without_a_bound(limit: list[float | None] | None, bounds: tuple[float, float]) -> None:
    """Null in place of the limit of Mamba-2's steps, or of one of its bounds, is no bound."""
    config, _ = read_hybrid(MAMBA2 | {"time_step_limit": limit, "n_groups": 1})
    assert config.step_limit == bounds
    assert HybridConfig.from_dict(config.to_dict()) == config


def test_a_config_with_null_for_a_value() -> None:
    """Null is no end token and no limit of steps."""
    config = HybridConfig(**SMALL | plain("attention"))
    again = HybridConfig.from_dict(config.to_dict() | {"eos_token_id": None, "step_limit": None})
    assert (again.ends, again.step_limit) == ((-1,), (0.0, inf))
