"""Blocks, the whole model and checkpoints."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from saccade import mask as masks  # noqa: E402
from saccade.models import blocks  # noqa: E402
from saccade.models.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from saccade.models.data import IGNORED  # noqa: E402
from saccade.models.deepseek_config import DeepSeekConfig  # noqa: E402
from saccade.models.files import write_atomic  # noqa: E402
from saccade.models.gpt2 import Gpt2, Gpt2Config  # noqa: E402
from saccade.models.llama import Llama, LlamaConfig  # noqa: E402
from saccade.models.loading import load_model  # noqa: E402
from saccade.models.sampling import prefill  # noqa: E402
from saccade.models.settings import Settings  # noqa: E402
from saccade.models.training import make_optimizer  # noqa: E402
from saccade.models.weights import save_weights  # noqa: E402
from saccade.plot.training import text_chart  # noqa: E402

SMALL = {
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


def small(**changes: object) -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaConfig(**{**SMALL, **changes})).eval()


def some_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, SMALL["vocab_size"], shape, generator=torch.Generator().manual_seed(1))


def plain_llama(model: Llama, tokens: torch.Tensor) -> torch.Tensor:
    """Llama's formulas written out once more, with the T×T matrix, complex rotations and repeated heads."""
    config, state = model.config, {name: value.double() for name, value in model.state_dict().items()}
    heads, kv_heads, size, count = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        tokens.shape[1],
    )

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * state[name]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(count)[:, None] * config.rope_theta ** (-torch.arange(0, size, 2).double() / size)
        turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    x = state["model.embed_tokens.weight"][tokens]
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}."
        h = norm(x, at + "input_layernorm.weight")
        q, k, v = (h @ state[f"{at}self_attn.{c}_proj.weight"].T for c in "qkv")
        q = rotate(q.unflatten(-1, (heads, size)))
        k = rotate(k.unflatten(-1, (kv_heads, size))).repeat_interleave(heads // kv_heads, 2)
        v = v.unflatten(-1, (kv_heads, size)).repeat_interleave(heads // kv_heads, 2)
        s = torch.einsum("bihd,bjhd->bhij", q, k) / size**0.5
        s = s.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -torch.inf)
        o = torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v).flatten(2)
        x = x + o @ state[at + "self_attn.o_proj.weight"].T
        h = norm(x, at + "post_attention_layernorm.weight")
        gate, up = (h @ state[f"{at}mlp.{c}_proj.weight"].T for c in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ state[at + "mlp.down_proj.weight"].T
    x = norm(x, "model.norm.weight")
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return x @ state[head].T


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 6}, {"head_dim": 10}])
def test_forward_is_llama(changes: dict[str, object]) -> None:
    model, tokens = small(**changes), some_tokens(2, 37)
    with torch.no_grad():
        logits = model(tokens)
    assert logits.shape == (2, 37, SMALL["vocab_size"])
    torch.testing.assert_close(logits.double(), plain_llama(model, tokens), rtol=1e-4, atol=1e-5)


def test_gradients_are_llamas() -> None:
    model, tokens = small(), some_tokens(2, 19)
    weight = model.model.layers[0].self_attn.k_proj.weight
    model(tokens).square().sum().backward()
    step = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    losses = []
    for sign in (1, -1):
        moved = small().double()
        with torch.no_grad():
            moved.model.layers[0].self_attn.k_proj.weight += sign * 1e-5 * step
        losses.append(plain_llama(moved, tokens).square().sum())
    expected = (losses[0] - losses[1]) / 2e-5
    torch.testing.assert_close((weight.grad.double() * step).sum(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("logits", [2**31, 61 * 7, 1])
def test_cross_entropy_in_parts(logits: int, monkeypatch) -> None:
    monkeypatch.setattr(blocks, "LOGITS", logits)
    model, tokens = small().double(), some_tokens(2, 20)
    targets = tokens.roll(-1, 1)
    targets[0, 5:8] = IGNORED
    expected = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    total = model(tokens, targets=targets)
    torch.testing.assert_close(total, expected)
    parameters = list(model.parameters())
    gradients = (torch.autograd.grad(x, parameters) for x in (total, expected))
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted)


def test_names_are_hugging_faces() -> None:
    untied, tied = small().state_dict(), small(tie_word_embeddings=True).state_dict()
    assert set(untied) - set(tied) == {"lm_head.weight"}
    assert {name for name in tied if ".layers.1." in name} == {
        f"model.layers.1.{part}.weight"
        for part in (
            *(f"self_attn.{c}_proj" for c in "qkvo"),
            *(f"mlp.{c}_proj" for c in ("gate", "up", "down")),
            "input_layernorm",
            "post_attention_layernorm",
        )
    }
    assert {name for name in tied if ".layers." not in name} == {"model.embed_tokens.weight", "model.norm.weight"}


def test_config_round_trips_and_refuses() -> None:
    config = LlamaConfig(**SMALL)
    assert LlamaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert (config.head_dim, config.intermediate_size) == (8, 128)
    with pytest.raises(ValueError, match="rope_scaling"):
        LlamaConfig.from_dict({**config.to_dict(), "rope_scaling": {"factor": 8.0}})
    with pytest.raises(ValueError, match="num_key_value_heads=4"):
        LlamaConfig(**{**SMALL, "num_key_value_heads": 4})
    with pytest.raises(ValueError, match="head_dim=5"):
        LlamaConfig(**SMALL, head_dim=5)


GPT2 = {"vocab_size": 61, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 16}


@pytest.mark.parametrize(
    "kind, shape, missing",
    [
        (LlamaConfig, SMALL, 2),
        (DeepSeekConfig, {**SMALL, "model_type": "deepseek_v3"}, 1),
        (DeepSeekConfig, {**SMALL, "model_type": "deepseek_v2", "num_experts_per_tok": 1}, 2),
        (Gpt2Config, GPT2, 50256),
    ],
)
def test_the_end_tokens_of_a_config(kind: type, shape: dict[str, int], missing: int) -> None:
    """A missing end token is the default of transformers, null is no token, and a list is several."""
    assert kind.from_dict(shape).ends == (missing,)
    for given, ends in ((None, (-1,)), (0, (0,)), ([3, 5], (3, 5))):
        config = kind.from_dict({**shape, "eos_token_id": given})
        assert config.ends == ends
        again = json.loads(json.dumps(config.to_dict()))
        assert kind.from_dict(again).ends == ends


def test_gpt2_refuses_a_text_beyond_its_positions() -> None:
    """A text as long as the table of positions is read, a longer one is not read with the last position repeated."""
    torch.manual_seed(0)
    model = Gpt2(Gpt2Config(**GPT2))
    assert model(some_tokens(2, 16)).shape == (2, 16, 61)
    with pytest.raises(ValueError, match="the text has 17 tokens; expected at most 16, the positions"):
        model(some_tokens(2, 17))


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_cache_gives_the_logits_of_the_whole(chunk: int) -> None:
    model, tokens = small(), some_tokens(2, 23)
    caches = model.make_caches(2, 32)
    with torch.no_grad():
        whole = model(tokens)
        parts = [model(part, caches=caches) for part in tokens[:, :17].split(chunk, 1)]
        parts += [model(tokens[:, t : t + 1], caches=caches) for t in range(17, 23)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [0, -1])
def test_prefill_takes_at_least_a_prompt_and_a_token_at_a_time(chunk) -> None:
    with pytest.raises(ValueError, match=f"chunk is {chunk}; expected at least 1 token"):
        prefill(small(), [[1, 2]], 20, chunk=chunk)
    with pytest.raises(ValueError, match="prompts is empty; expected at least one"):
        prefill(small(), [], 20)


def test_packed_documents_do_not_see_each_other() -> None:
    model, tokens = small(), some_tokens(1, 30)
    ids, positions = torch.tensor([[0] * 11 + [1] * 19]), torch.cat([torch.arange(11), torch.arange(19)])
    mask = masks.causal() & masks.documents(ids.to(torch.int32))
    with torch.no_grad():
        packed = model(tokens, positions, mask)
        alone = torch.cat([model(tokens[:, :11]), model(tokens[:, 11:])], 1)
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
        changed = tokens.clone()
        changed[:, :11] = some_tokens(1, 22)[:, 11:]
        assert torch.equal(model(changed, positions, mask)[:, 11:], packed[:, 11:])


def test_positions_are_relative() -> None:
    model, tokens = small(), some_tokens(1, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, torch.arange(16) + 100), model(tokens), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", [(1,), (2, 1), (), (3,), (3, 2)])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_positions_have_the_shape_of_the_tokens(kind: str, shape: tuple[int, ...]) -> None:
    model, tokens = small() if kind == "llama" else Gpt2(Gpt2Config(**GPT2)), some_tokens(2, 2)
    with pytest.raises(ValueError, match=r"positions has shape .*; expected \[T\] = \[2\] or \[B, T\] = \[2, 2\]"):
        model(tokens, torch.zeros(shape, dtype=torch.int64))


def test_checkpoint_holds_everything(tmp_path) -> None:
    model, settings = small(), Settings()
    optimizer = make_optimizer(model, settings)

    def advance(a_model: Llama, an_optimizer: torch.optim.Optimizer) -> float:
        loss = a_model(some_tokens(2, 8)).square().mean() * (1 + torch.rand(()))
        loss.backward()
        an_optimizer.step()
        an_optimizer.zero_grad()
        return loss.item()

    advance(model, optimizer)
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, model, optimizer, {"step": 1})
    expected = [advance(model, optimizer) for _ in range(3)]
    fresh = small(initializer_range=0.5)
    other = make_optimizer(fresh, settings)
    torch.manual_seed(99)
    assert load_checkpoint(path, fresh, other) == {"step": 1}
    assert [advance(fresh, other) for _ in range(3)] == expected
    wrong = small(num_hidden_layers=1)
    wrong_optimizer = make_optimizer(wrong, settings)
    with pytest.raises(ValueError, match="another model"):
        load_checkpoint(path, wrong, wrong_optimizer)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="is damaged"):
        load_checkpoint(path, fresh, other)


def test_weights_load(tmp_path) -> None:
    model, tokens = small(tie_word_embeddings=True), some_tokens(1, 9)
    save_weights(tmp_path / "model.safetensors", model)
    write_atomic(tmp_path / "config.json", json.dumps(model.config.to_dict()).encode())
    assert torch.equal(Llama.load(tmp_path)(tokens), model(tokens))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_float16_weights_are_not_infinite(tmp_path) -> None:
    model = small()
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = 70000.0
    save_weights(tmp_path / "model.safetensors", model)
    write_atomic(tmp_path / "config.json", json.dumps(model.config.to_dict()).encode())
    with pytest.raises(ValueError, match=r"up_proj.weight has numbers above 65504.*; load the model as bfloat16"):
        load_model(tmp_path, torch.float16)
    assert all(x.isfinite().all() for x in load_model(tmp_path, torch.bfloat16).parameters())


def test_settings() -> None:
    settings = Settings(steps=100)
    rates = [settings.lr_at(step, 100) for step in range(100)]
    assert rates.index(max(rates)) in (19, 20)
    assert max(rates) == settings.lr
    assert rates[-1] == pytest.approx(0.1 * settings.lr, rel=0.02)
    # of a run whose minutes allow few steps, too
    few = [Settings(minutes=1.0).lr_at(step, 60) for step in range(60)]
    assert few[47] == max(few) == Settings().lr
    # without jumps at the step from which on their number is known, and with the rates of the steps before it
    preset = Settings(minutes=1.0, warmup=100)
    rates = [preset.lr_at(step, None if step < 24 else 92) for step in range(92)]
    assert max(b - a for a, b in pairwise(rates)) < 0.04 * preset.lr
    assert rates[:24] == [preset.lr_at(step, 92) for step in range(24)]
    assert Settings().seconds == 120
    for wrong in ({"steps": 3, "minutes": 1.0}, {"steps": 0}, {"lr": float("nan")}):
        with pytest.raises(ValueError):
            Settings(**wrong)


def test_text_chart() -> None:
    lines = text_chart([3.0, 2.0, 1.0], 10, 4).split("\n")
    assert len(lines) == 4
    assert lines[0].startswith("  3.00 █")
    assert lines[-1].startswith("  1.00 ")
    assert text_chart([2.0] * 5, 10, 3)
