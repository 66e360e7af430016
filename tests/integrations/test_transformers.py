"""Models of transformers with Saccade, compared with sdpa or eager attention: outputs, gradients and greedy text."""

from __future__ import annotations

import copy

import numpy as np
import pytest

pytest.importorskip("transformers")
import torch
import transformers as hf
from transformers import masking_utils

from saccade import Unsupported, reference
from saccade.integrations.transformers import attend, mask_of

SMALL = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 96,
}  # fmt: skip
WIDE = SMALL | {"head_dim": 16}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# configuration, class, and the implementation to compare with
MODELS = {
    "llama": (lambda: hf.LlamaConfig(**SMALL), hf.LlamaForCausalLM, "sdpa"),
    "mistral": (lambda: hf.MistralConfig(**SMALL, sliding_window=7), hf.MistralForCausalLM, "sdpa"),
    "qwen2": (lambda: hf.Qwen2Config(**SMALL), hf.Qwen2ForCausalLM, "sdpa"),
    "qwen3": (lambda: hf.Qwen3Config(**WIDE), hf.Qwen3ForCausalLM, "sdpa"),
    "gemma2": (
        lambda: hf.Gemma2Config(**WIDE, sliding_window=6, attn_logit_softcapping=5.0, query_pre_attn_scalar=16),
        hf.Gemma2ForCausalLM, "eager",
    ),
    "gemma3": (
        lambda: hf.Gemma3TextConfig(**WIDE, sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
        hf.Gemma3ForCausalLM, "sdpa",
    ),
    "gpt-oss": (
        lambda: hf.GptOssConfig(
            **WIDE, sliding_window=5, num_local_experts=2, num_experts_per_tok=1, rope_parameters=ROPE,
            layer_types=["sliding_attention", "full_attention"],
        ),
        hf.GptOssForCausalLM, "eager",
    ),
    "gpt2": (
        lambda: hf.GPT2Config(
            vocab_size=97, n_positions=256, n_embd=48, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=96,
            pad_token_id=0, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        ),
        hf.GPT2LMHeadModel, "sdpa",
    ),
}  # fmt: skip


def both(name: str):
    """A random model on our attention, and the same on the library's."""
    config, kind, other = MODELS[name]
    torch.manual_seed(0)
    models = []
    for implementation in ("saccade", other):
        made = config()
        made._attn_implementation = implementation
        models.append(kind(made).eval())
    models[0].load_state_dict(models[1].state_dict())
    for model in models:
        for x in model.parameters():
            # sinks begin as zeros
            assert torch.isfinite(x).all()
    assert models[0].config._attn_implementation == "saccade"
    return models


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(2, 95, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients(name) -> None:
    ids = tokens(2, 23)
    found = []
    for model in both(name):
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        found.append((out.logits.detach(), {n: x.grad for n, x in model.named_parameters() if x.grad is not None}))
    (logits, grads), (want, want_grads) = found
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=2e-5)
    assert grads.keys() == want_grads.keys()
    for n, x in want_grads.items():
        torch.testing.assert_close(grads[n], x, rtol=1e-3, atol=2e-5, msg=lambda text, n=n: f"{n}: {text}")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(name, side) -> None:
    ids, real = tokens(3, 19), torch.ones(3, 19, dtype=torch.long)
    for row, n in enumerate((0, 6, 14)):
        real[row, :n] = 0
    real = real if side == "left" else real.flip(1)
    ids[real == 0] = 0
    logits, want = (model(input_ids=ids, attention_mask=real).logits.detach() for model in both(name))
    torch.testing.assert_close(logits[real == 1], want[real == 1], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_with_left_padding(name, cache) -> None:
    ids, real = tokens(3, 12), torch.ones(3, 12, dtype=torch.long)
    real[1, :5] = real[2, :9] = 0
    ids[real == 0] = 0
    given = {"max_new_tokens": 14, "do_sample": False, "cache_implementation": cache}
    if cache:
        given["disable_compile"] = True
    ours, theirs = (model.generate(input_ids=ids, attention_mask=real, **given) for model in both(name))
    assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "qwen3"])
def test_packed_positions(name) -> None:
    ids = tokens(1, 30)
    positions = torch.cat([torch.arange(n) for n in (9, 1, 20)])[None]
    models = both(name)
    logits, want = (model(input_ids=ids, position_ids=positions, use_cache=False).logits for model in models)
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=2e-5)
    alone = models[0](input_ids=ids[:, 10:], use_cache=False).logits
    torch.testing.assert_close(logits[:, 10:], alone, rtol=1e-4, atol=2e-5)


def bert():
    torch.manual_seed(0)
    made = []
    for name in ("saccade", "sdpa"):
        config = hf.BertConfig(
            vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        )  # fmt: skip
        config._attn_implementation = name
        made.append(hf.BertModel(config).eval())
    made[0].load_state_dict(made[1].state_dict())
    return made


def test_an_encoder_with_padding() -> None:
    ids, real = tokens(2, 17), torch.ones(2, 17, dtype=torch.long)
    real[1, 11:] = 0
    found, want = (model(input_ids=ids, attention_mask=real).last_hidden_state for model in bert())
    torch.testing.assert_close(found[real == 1], want[real == 1], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_four_dimensions(kind) -> None:
    allowed = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(2)) < 0.6
    allowed = allowed | torch.eye(9, dtype=torch.bool)
    mask = allowed if kind == "bool" else torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo().min)
    found, want = (model(input_ids=tokens(2, 9), attention_mask=mask).logits for model in both("llama"))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=2e-5)


def test_a_boolean_mask_of_keys() -> None:
    """[B, 1, 1, Tk] holds for every query."""
    r = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, h, t, 8, generator=r) for h, t in ((4, 5), (2, 7), (2, 7)))
    seen = torch.tensor([[1, 0, 1, 1, 0, 0, 1], [0, 1, 1, 0, 1, 1, 0]]).bool()
    o, _ = attend(torch.nn.Module(), q, k, v, seen[:, None, None])
    bias = np.where(seen[:, None, None].numpy(), 0.0, -np.inf)
    want, _ = reference.forward(*(x.transpose(1, 2).double().numpy() for x in (q, k, v)), bias=bias)
    torch.testing.assert_close(o.double(), torch.from_numpy(want), rtol=1e-5, atol=1e-6)


def test_every_mask_the_library_makes() -> None:
    """The expression read off a function against the function itself, at every pair."""
    m, left = masking_utils, torch.tensor([0, 3])
    ids = torch.tensor([[0] * 4 + [1] * 5 + [2] * 3, [0] * 12])
    functions = {
        "causal": m.causal_mask_function,
        "both ways": m.bidirectional_mask_function,
        "window": m.sliding_window_causal_mask_function(4),
        "window both ways": m.sliding_window_bidirectional_mask_function(3),
        "chunks": m.chunked_causal_mask_function(5, left),
        "packed": m.and_masks(m.packed_sequence_mask_function(ids), m.causal_mask_function),
        "either": m.or_masks(m.sliding_window_bidirectional_mask_function(1), m.causal_mask_function),
        "window of nothing": m.sliding_window_causal_mask_function(0),
        "of a caller": lambda b, h, i, j: (j <= i) & (i - j < 3) | (i - j >= 5) & (-(i - j) <= -5),
    }
    for name, function in functions.items():
        for Tq, Tk, q_offset, kv_offset in ((12, 12, 0, 0), (5, 12, 7, 0), (1, 12, 11, 0), (3, 6, 9, 6), (4, 12, 2, 0)):
            mask = mask_of(2, Tq, Tk, q_offset, kv_offset, function).mask
            b, i, j = torch.meshgrid(*map(torch.arange, (2, Tq, Tk)), indexing="ij")
            want = function(b, torch.zeros_like(b), i + q_offset, j + kv_offset)
            np.testing.assert_array_equal(
                np.broadcast_to(mask.evaluate(2, 1, Tq, Tk)[:, 0], (2, Tq, Tk)), want.expand(2, Tq, Tk), err_msg=name
            )


def test_what_cannot_be_said_raises() -> None:
    model = both("llama")[0]
    ids = tokens(1, 8)
    with pytest.raises(Unsupported, match="attention weights are never stored"):
        model(input_ids=ids, output_attentions=True)
    with pytest.raises(Unsupported, match="padding between tokens"):
        model(input_ids=ids, attention_mask=torch.tensor([[1, 1, 0, 0, 1, 1, 1, 1]]))
    unreadable = {
        "cannot be read": lambda b, h, i, j: (i * j) % 2 == 0,
        "truth value": lambda b, h, i, j: j <= i if j <= i else i <= j,
        "gives bool": lambda b, h, i, j: True,
        "cannot be read .where": lambda b, h, i, j: torch.where(j <= i, 1, 0),
        "ids decrease": masking_utils.packed_sequence_mask_function(torch.tensor([[0, 1, 0, 1]])),
        "blockwise_overlay": masking_utils.blockwise_overlay(torch.zeros(1, 4, dtype=torch.long)),
        "outside packed sequences": masking_utils.remap_positions_for_packed_sequence(
            masking_utils.causal_mask_function, torch.arange(4)[None]
        ),
    }
    for reason, function in unreadable.items():
        with pytest.raises(Unsupported, match=reason):
            mask_of(1, 4, 4, mask_function=function)
    jumping = masking_utils.packed_sequence_compatibility_function(
        masking_utils.causal_mask_function, torch.tensor([[0, 2, 4, 6]]), torch.zeros(1, 4, dtype=torch.long)
    )
    with pytest.raises(Unsupported, match="position_ids jump"):
        mask_of(1, 4, 4, mask_function=jumping)


def test_a_saved_model_is_loaded_by_the_same_word(tmp_path) -> None:
    config, kind, _ = MODELS["llama"]
    torch.manual_seed(3)
    kind(config()).save_pretrained(tmp_path)
    ours = hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="saccade")
    other = hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    switched = copy.deepcopy(other)
    switched.set_attn_implementation("saccade")
    want = other(tokens(1, 6)).logits
    for model in (ours, switched):
        torch.testing.assert_close(model(tokens(1, 6)).logits, want, rtol=1e-4, atol=2e-5)
