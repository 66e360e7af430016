"""torch.compile of models of transformers with Saccade: one graph, the same numbers."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
import torch
import transformers as hf
from torch._dynamo.utils import counters

from saccade.integrations.transformers import Described, mask_of

SMALL = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "head_dim": 16,
}  # fmt: skip
MODELS = {
    "llama": lambda: hf.LlamaConfig(**SMALL),
    "mistral": lambda: hf.MistralConfig(**SMALL, sliding_window=7),
    "qwen2": lambda: hf.Qwen2Config(**{n: x for n, x in SMALL.items() if n != "head_dim"}),
    "qwen3": lambda: hf.Qwen3Config(**SMALL),
    "gemma2": lambda: hf.Gemma2Config(**SMALL, sliding_window=6, query_pre_attn_scalar=16),
}


def model_of(name: str):
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    return hf.AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation="saccade").eval()


def tokens(T: int) -> torch.Tensor:
    return torch.randint(3, 90, (2, T), generator=torch.Generator().manual_seed(T))


def inputs(kind: str, T: int) -> dict[str, torch.Tensor]:
    real = torch.ones(2, T, dtype=torch.long)
    real[1, :5] = 0
    packed = torch.cat([torch.arange(8), torch.arange(T - 8)]).expand(2, T)
    return {
        "cache": {}, "padding": {"attention_mask": real}, "packed": {"position_ids": packed, "use_cache": False},
    }[kind]  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["cache", "padding", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_one_graph_for_all_lengths(name, kind) -> None:
    model = model_of(name)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for T in (21, 22, 24):
        ids, more = tokens(T), inputs(kind, T)
        torch.testing.assert_close(compiled(ids, **more).logits, model(ids, **more).logits, rtol=1e-4, atol=1e-4)
    assert not counters["graph_break"]
    # one of the first length, one of every length
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_gradients_of_a_whole_graph(backend) -> None:
    model = model_of("mistral")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    found = []
    for run in (model, compiled):
        model.zero_grad()
        run(tokens(21), attention_mask=inputs("padding", 21)["attention_mask"], labels=tokens(21)).loss.backward()
        found.append([x.grad.clone() for x in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-5)


def test_greedy_text_with_a_static_cache_compiles() -> None:
    """`generate` makes the masks outside the graph, whose inputs they are."""
    model = model_of("mistral")
    ids, real = tokens(10), inputs("padding", 10)["attention_mask"]
    given = {
        "attention_mask": real,
        "max_new_tokens": 12,
        "do_sample": False,
        "cache_implementation": "static",
        "pad_token_id": 0,
    }
    want = model.generate(ids, **given, disable_compile=True)
    how = hf.CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    how._compile_all_devices = True
    assert model.generate(ids, **given, compile_config=how).tolist() == want.tolist()
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] in (1, 2)


def test_padding_between_tokens_is_refused_in_a_graph_too() -> None:
    model = model_of("llama")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    real = torch.ones(2, 21, dtype=torch.long)
    real[1, 5:9] = 0
    with pytest.raises(RuntimeError, match="padding between tokens"):
        compiled(tokens(21), attention_mask=real)


def test_a_graph_refuses_to_compute_with_a_mask() -> None:
    def careless(x):
        return x + mask_of(2, x.shape[1], x.shape[1])[:, 0].float()

    torch._dynamo.reset()
    x = torch.ones(2, 5, 5)
    with pytest.raises(Exception, match=r"the model takes mask\[:, 0, :, :\]"):
        torch.compile(careless, backend="aot_eager", fullgraph=True)(x)
    refused = r"the model takes mask\[:, 0, :, :\], but Saccade's mask is not an array: .*sdpa"
    with pytest.raises(Exception, match=refused):
        torch.compile(careless, backend="aot_eager")(x)


def test_a_mask_holds_one_element_and_is_no_block_mask() -> None:
    from torch.nn.attention.flex_attention import BlockMask

    mask = mask_of(2, 4000, 5000)
    assert type(mask) is Described
    assert isinstance(mask, torch.Tensor)
    assert not isinstance(mask, BlockMask)
    assert list(mask.shape) == [2, 1, 4000, 5000]
    assert mask.ndim == 4
    assert mask.contiguous() is mask
    assert mask.to("meta").device.type == "meta"
    assert mask.untyped_storage().nbytes() == 4


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict) -> None:
    model = model_of("mistral")
    given = {"attention_mask": inputs("padding", 21)["attention_mask"], "use_cache": False}
    exported = torch.export.export(model, (tokens(21),), given, strict=strict).module()
    torch.testing.assert_close(exported(tokens(21), **given).logits, model(tokens(21), **given).logits)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpoints_take_a_mask(reentrant) -> None:
    model = model_of("mistral").train()
    real, found = inputs("padding", 21)["attention_mask"], []
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        model(tokens(21), attention_mask=real, labels=tokens(21), use_cache=False).loss.backward()
        found.append([x.grad.clone() for x in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)
