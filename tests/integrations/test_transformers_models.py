"""Models of transformers that once ran with wrong numbers, or failed without saying why."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("transformers")
import torch
import transformers as hf

from saccade import Unsupported
from saccade.integrations.transformers import routed

SMALL = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3,
}  # fmt: skip
FEW = {n: x for n, x in SMALL.items() if n != "num_key_value_heads"}
TOKENS = torch.arange(2, 42)[None]


def both(kind, config, other: str = "eager"):
    """The same weights on the library's attention and on ours."""
    torch.manual_seed(0)
    made = [kind._from_config(config(), attn_implementation=name).eval() for name in (other, "saccade")]
    made[1].load_state_dict(made[0].state_dict())
    return made


def alone(kind, config):
    return kind._from_config(config, attn_implementation="saccade").eval()


def test_doge_is_refused_and_not_made_to_see_the_future() -> None:
    # it leaves its causal mask out for every BlockMask
    model = alone(hf.DogeForCausalLM, hf.DogeConfig(**SMALL))
    with pytest.raises(Unsupported, match=r"computes with its mask .*sdpa"):
        model(TOKENS)


def test_minimax_m3_keeps_its_block_indices() -> None:
    config = hf.MiniMaxM3VLTextConfig(
        **SMALL, head_dim=16, num_local_experts=4, num_experts_per_tok=2, dense_intermediate_size=64,
        shared_intermediate_size=32, rotary_dim=8, index_n_heads=2, index_head_dim=16, index_block_size=4,
        index_topk_blocks=2, layer_types=["full_attention", "minimax_m3_sparse"], bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with pytest.raises(Unsupported, match=r"`block_indices`.*sdpa"):
        alone(hf.MiniMaxM3VLForCausalLM, config)(TOKENS)


def test_deepseek_v4_keeps_its_compressed_keys() -> None:
    config = hf.DeepseekV4Config(
        vocab_size=99, hidden_size=48, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        head_dim=16, q_lora_rank=24, num_experts_per_tok=2, n_routed_experts=4, sliding_window=8, o_groups=2,
        layer_types=["sliding_attention", "compressed_sparse_attention"], o_lora_rank=8, index_n_heads=2,
        index_head_dim=16, index_topk=4, hc_mult=2, mlp_layer_types=["moe"] * 2, num_nextn_predict_layers=0,
    )  # fmt: skip
    with pytest.raises(Unsupported, match="computes with its mask"):
        alone(hf.DeepseekV4ForCausalLM, config)(TOKENS)


def test_a_mask_of_other_lengths_is_refused() -> None:
    """Keys that a model appends after its mask was made are not in the mask."""
    from saccade.integrations.transformers import attend, mask_of

    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8)
    for mask in (mask_of(2, 5, 5), mask_of(2, 7, 7), mask_of(3, 5, 7)):
        with pytest.raises(Unsupported, match=r"made for .* = \[\d, 1, \d, \d\], q and k are of \[2, 1, 5, 7\]"):
            attend(torch.nn.Module(), q, k, k, mask)
    assert attend(torch.nn.Module(), q, k, k, mask_of(1, 5, 7))[0].shape == (2, 5, 4, 8)


def test_arguments_that_are_not_known_are_refused() -> None:
    from saccade.integrations.transformers import attend

    q = torch.randn(1, 2, 3, 8)
    for name in ("sinks", "indices", "block_indices", "whatever_comes_next"):
        with pytest.raises(Unsupported, match=f"`{name}`.*sdpa"):
            attend(torch.nn.Module(), q, q, q, None, **{name: torch.ones(1)})
    passengers = {"sinks": None, "position_ids": torch.arange(3)[None], "use_cache": True}
    attend(torch.nn.Module(), q, q, q, None, is_causal=True, **passengers)


def test_a_layer_without_a_mask_says_whether_it_is_causal() -> None:
    """Where neither does, sdpa takes it for causal and eager attention does not."""
    from saccade.integrations.transformers import attend

    layer, q = torch.nn.Module(), torch.randn(1, 2, 3, 8)
    with pytest.raises(Unsupported, match="does not say whether it is causal"):
        attend(layer, q, q, q, None)
    layer.is_causal = False  # type: ignore[assignment]
    open_, closed = (attend(layer, q, q, q, None, is_causal=x)[0] for x in (None, True))
    torch.testing.assert_close(open_[:, -1], closed[:, -1])
    assert not torch.allclose(open_[:, 0], closed[:, 0])


def test_qwen2_moe_by_default_has_a_window_of_0_that_no_layer_uses() -> None:
    def config():
        return hf.Qwen2MoeConfig(
            **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
        )

    want, found = (model(TOKENS).logits for model in both(hf.Qwen2MoeForCausalLM, config))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=2e-5)


def shared_keys():
    return hf.Gemma4TextConfig(
        **SMALL | {"num_hidden_layers": 4}, head_dim=16, global_head_dim=32, vocab_size_per_layer_input=99,
        hidden_size_per_layer_input=8, num_kv_shared_layers=2, sliding_window=9,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip


@pytest.mark.parametrize("padded", [False, True])
def test_gemma4_with_shared_keys_takes_a_part_of_its_mask(padded) -> None:
    """Its last layers compute the rows of `logits_to_keep` alone."""
    real = torch.ones(1, 40, dtype=torch.long)
    real[:, : 9 * padded] = 0
    models = both(hf.Gemma4ForCausalLM, shared_keys)
    for kept in (0, 1, 5):
        want, found = (model(TOKENS, attention_mask=real, logits_to_keep=kept).logits for model in models)
        torch.testing.assert_close(found[:, -5:], want[:, -5:], rtol=1e-3, atol=1e-4)


def beit(**given: bool):
    return hf.BeitConfig(
        **{n: x for n, x in FEW.items() if n != "vocab_size"}, image_size=32, patch_size=8, **given
    )  # fmt: skip


def siglip2():
    return hf.Siglip2VisionConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_patches=16, patch_size=8
    )


def test_beit_runs_without_position_biases_and_refuses_them_clearly() -> None:
    image = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    want, found = (model(image).last_hidden_state for model in both(hf.BeitModel, beit))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    model = alone(hf.BeitModel, beit(use_relative_position_bias=True))
    with pytest.raises(Unsupported, match=r"computes with its mask .add.*sdpa"):
        model(image)


def test_siglip2_with_a_pixel_mask_is_equal_and_its_pooling_refuses_it_clearly() -> None:
    patches = torch.randn(2, 12, 3 * 8 * 8, generator=torch.Generator().manual_seed(1))
    real = torch.ones(2, 12, dtype=torch.long)
    real[1, 8:] = 0
    given = {"pixel_values": patches, "pixel_attention_mask": real, "spatial_shapes": torch.tensor([[3, 4], [2, 4]])}
    models = both(hf.Siglip2VisionModel, siglip2)
    with pytest.raises(Unsupported, match=r"computes with its mask .repeat.*sdpa"):
        models[1](**given)
    for model in models:
        model.use_head = False
    want, found = (model(**given).last_hidden_state for model in models)
    torch.testing.assert_close(found[real == 1], want[real == 1], rtol=1e-4, atol=1e-4)


TABLES = {
    "Falcon": {"num_hidden_layers": 1}, "GPTJ": {"n_layer": 1, "n_embd": 64, "n_head": 4, "rotary_dim": 8},
    "GPTNeo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}, "Bloom": {"n_layer": 1},
    "RoFormer": {"num_hidden_layers": 1}, "Mpt": {"n_layers": 1},
}  # fmt: skip


@pytest.mark.parametrize("kind", TABLES)
def test_models_with_attention_of_their_own_say_so(kind) -> None:
    """KeyError 'saccade', TypeError and AttributeError before."""
    config = getattr(hf, kind + "Config")(**TABLES[kind])

    def run() -> None:
        alone(getattr(hf, kind + "Model"), config)(TOKENS)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Unsupported, match="sdpa"):
            run()


OWN = {
    "DebertaV2": {"num_hidden_layers": 1}, "XLNet": {"n_layer": 1}, "Flaubert": {"n_layers": 1},
    "Funnel": {"block_sizes": [1]},
    "WavLM": {"num_hidden_layers": 1}, "OpenAIGPT": {"n_layer": 1}, "ProphetNet": {"num_encoder_layers": 1},
    "Swinv2": {"depths": [1]}, "PvtV2": {"depths": [1, 1, 1, 1]}, "VitDet": {"num_hidden_layers": 1},
    "Timesformer": {"num_hidden_layers": 1},
}  # fmt: skip


@pytest.mark.parametrize("kind", OWN)
def test_a_model_that_never_calls_the_interface_warns(kind) -> None:
    config = getattr(hf, kind + "Config")(**OWN[kind])
    with pytest.warns(UserWarning, match="does not call transformers' attention interface"), torch.device("meta"):
        model = alone(getattr(hf, kind + "Model"), config)
    assert routed(model) == []


def test_a_warning_comes_with_from_pretrained_too(tmp_path) -> None:
    config = hf.DebertaV2Config(**FEW)
    hf.DebertaV2Model(config).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="DebertaV2Model does not call"):
        hf.AutoModel.from_pretrained(tmp_path, attn_implementation="saccade")


def test_routed_lists_the_layers_of_the_parts_that_were_asked_for() -> None:
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**SMALL), vision_config=hf.CLIPVisionConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=32,
            patch_size=8,
        ), image_token_index=98,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = alone(hf.LlavaForConditionalGeneration, config)
    text = [f"model.language_model.layers.{n}.self_attn" for n in range(2)]
    found = routed(model)
    assert [n for n in found if "language_model" in n] == text
    assert len(found) == 4
    model.set_attn_implementation({"text_config": "saccade", "vision_config": "sdpa"})
    assert routed(model) == text
    model.set_attn_implementation("eager")
    assert routed(model) == []


def test_lengths_for_flash_attention_need_packed_positions() -> None:
    """What DataCollatorWithFlattening gives with `return_flash_attn_kwargs`."""
    batch = hf.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")(
        [{"input_ids": list(range(2, 2 + n)), "labels": list(range(2, 2 + n))} for n in (9, 1, 20)]
    )
    want, found = (
        m(**batch, use_cache=False).logits for m in both(hf.LlamaForCausalLM, lambda: hf.LlamaConfig(**SMALL))
    )
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    model = alone(hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL))
    for changed in ({"position_ids": None}, {"use_cache": True}):
        with pytest.raises(Unsupported, match="cu_seq_lens_q is given and the mask has no packed sequences"):
            model(**{**batch, "use_cache": False, **changed})


def test_chunks_are_no_packed_sequences() -> None:
    config = hf.Llama4TextConfig(
        vocab_size=99, hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, attention_chunk_size=6, num_local_experts=2,
        num_experts_per_tok=1, pad_token_id=0, layer_types=["chunked_attention"] * 2, no_rope_layers=[1, 1],
    )  # fmt: skip
    model, cu = alone(hf.Llama4ForCausalLM, config), torch.tensor([0, 4, 12], dtype=torch.int32)
    with pytest.raises(Unsupported, match="cu_seq_lens_q is given and the mask has no packed sequences"):
        model(torch.arange(3, 15)[None], cu_seq_lens_q=cu, cu_seq_lens_k=cu, use_cache=False)
