"""Generation: prompts of any lengths, many that come and go, texts without end, and how tokens are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from saccade.models.batching import serve  # noqa: E402
from saccade.models.deepseek import DeepSeek  # noqa: E402
from saccade.models.deepseek_config import DeepSeekConfig  # noqa: E402
from saccade.models.gpt2 import Gpt2, Gpt2Config  # noqa: E402
from saccade.models.sampling import Sampler, generate, prefill  # noqa: E402

from .small_llama import VOCABULARY, small, some_tokens  # noqa: E402


def test_ragged_prefill_and_decode() -> None:
    model, tokens, lengths = small(), some_tokens(3, 20), [3, 14, 9]
    prompts = [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]
    logits, caches = prefill(model, prompts, 20, chunk=4)
    with torch.no_grad():
        for ahead in range(3):
            whole = [model(row[None, : n + ahead])[0, -1] for row, n in zip(tokens, lengths, strict=True)]
            torch.testing.assert_close(logits, torch.stack(whole), rtol=1e-4, atol=1e-5)
            coming = torch.stack([row[n + ahead] for row, n in zip(tokens, lengths, strict=True)])
            logits = model(coming[:, None], caches=caches)[:, -1]


@pytest.mark.parametrize("batch, page_size, chunk", [(1, 4, 64), (2, 1, 3), (3, 16, 1), (9, 5, 7)])
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_prompts_that_come_and_go_end_as_alone(
    batch: int, page_size: int, chunk: int, window: int, draft: str | None
) -> None:
    model, tokens = small(sliding_window=window), some_tokens(5, 30)
    # the second starts with the same tokens as the first, and the last equals all of it
    tokens[1, :12] = tokens[0, :12]
    lengths = [14, 17, 3, 9, 12]
    tokens[4] = tokens[0]
    prompts = [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]
    greedy = Sampler(0.0)
    served = dict(serve(model, prompts, 11, greedy, batch=batch, page_size=page_size, chunk=chunk, draft=draft))
    for number, prompt in enumerate(prompts):
        alone = [token for (token,) in generate(model, [prompt], 11, greedy)]
        assert served[number] == alone[: len(served[number])]
        assert len(served[number]) == 11 or served[number][-1] in model.config.ends
    assert sorted(served) == list(range(5))


def test_a_begin_is_read_once_even_after_its_end(monkeypatch) -> None:
    model, tokens = small(), some_tokens(4, 30)
    tokens[1:, :21] = tokens[0, :21]
    tokens[2, 2] += 1
    read, hidden = [], model.hidden
    monkeypatch.setattr(model, "hidden", lambda x, **rest: (read.append(x.shape[1]), hidden(x, **rest))[1])
    prompts = tokens.tolist()
    served = dict(serve(model, prompts, 3, Sampler(0.0), batch=1, page_size=4))
    # 21 in common with the first, then 2, then 21 again, because its pages were not needed since
    assert [n for n in read if n > 1] == [30, 9, 28, 9]
    monkeypatch.undo()
    for number, prompt in enumerate(prompts):
        assert served[number] == [token for (token,) in generate(model, [prompt], 3, Sampler(0.0))]


@pytest.mark.parametrize("kind, apart", [("int8", 0.02), ("fp8", 0.1), ("int4", 0.4)])
def test_caches_of_codes(kind: str, apart: float) -> None:
    """Logits near those of numbers, and the same tokens alone as among others."""
    model, tokens = small(), some_tokens(3, 20)
    prompts = tokens.tolist()
    exact, near = (prefill(model, prompts, 24, 7, quantised=how)[0] for how in (None, kind))
    assert 0 < float((near - exact).abs().max() / exact.std()) < apart
    served = dict(serve(model, prompts, 6, Sampler(0.0), batch=2, page_size=5, chunk=7, quantised=kind))
    for number, prompt in enumerate(prompts):
        alone = [token for (token,) in generate(model, [prompt], 6, Sampler(0.0), chunk=7, quantised=kind)]
        assert served[number] == alone[: len(served[number])]
    with pytest.raises(ValueError, match=r"keep is .* and quantised"):
        next(generate(model, prompts, 6, Sampler(0.0), keep=(1, 4), quantised=kind))


def test_draws_do_not_depend_on_the_batch() -> None:
    model, tokens = small(), some_tokens(4, 9).tolist()
    found = [dict(serve(model, tokens, 8, Sampler(1.0), batch=batch, seed=3)) for batch in (1, 2, 4)]
    assert found[0] == found[1] == found[2]
    assert found[0] != dict(serve(model, tokens, 8, Sampler(1.0), seed=4))
    with pytest.raises(ValueError, match="batch is 0"):
        next(serve(model, tokens, 8, Sampler(), batch=0))
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        next(serve(model, [tokens[0], []], 8, Sampler()))
    assert dict(serve(model, tokens[:2], 0, Sampler())) == {0: [], 1: []}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_passes_of_fixed_rows_give_texts_that_do_not_depend_on_the_batch(temperature: float, dtype: str) -> None:
    model, tokens = small().to(getattr(torch, dtype)), some_tokens(6, 40)
    tokens[1, :12] = tokens[0, :12]
    prompts = [row[:n].tolist() for row, n in zip(tokens, (14, 17, 3, 33, 12, 40), strict=True)]
    logits: list[dict[int, list[bytes]]] = []

    class Recorder(Sampler):
        def draw(self, rows, generators=None, numbers=None):
            for row, one in zip(rows, generators, strict=True):
                logits[-1].setdefault(one.initial_seed(), []).append(row.float().numpy().tobytes())
            return super().draw(rows, generators, numbers)

    texts = []
    for batch, chunk, page_size in ((1, 64, 4), (2, 3, 16), (6, 7, 1), (4, 64, 5)):
        logits.append({})
        sampler = Recorder(temperature)
        served = serve(model, prompts, 8, sampler, batch=batch, rows=16, chunk=chunk, page_size=page_size, seed=5)
        texts.append(dict(served))
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert logits[0] == logits[1] == logits[2] == logits[3]
    with pytest.raises(ValueError, match="rows is 3; expected at least 4"):
        next(serve(model, prompts, 8, Sampler(), batch=4, rows=3))
    with pytest.raises(ValueError, match="rows is 16 with a draft"):
        next(serve(model, prompts, 8, Sampler(), rows=16, draft="ngram"))


def test_a_text_goes_on_beyond_the_positions() -> None:
    model, greedy = small(max_position_embeddings=24), Sampler(0.0)
    # nothing is forgotten before the cache is full: the same start
    whole = [token for (token,) in generate(model, [[5, 6, 7]], 12, greedy)]
    found = [token for (token,) in generate(model, [[5, 6, 7]], 60, greedy, keep=(2, 12))]
    assert found[: len(whole)] == whole
    assert len(found) == 60 or found[-1] in model.config.ends
    # of two sequences each goes on as alone
    both = list(zip(*generate(model, [[5, 6, 7], [9] * 9], 40, greedy, keep=(2, 12)), strict=True))
    assert list(both[1]) == [t for (t,) in generate(model, [[9] * 9], 40, greedy, keep=(2, 12))][:40]
    with pytest.raises(
        ValueError,
        match=r"keep is \(2, 30\).*its cache has 40 positions, and the model has 24: give a window of at most 17",
    ):
        next(generate(model, [[5, 6, 7]], 60, greedy, keep=(2, 30)))
    with pytest.raises(ValueError, match="window of at least 1"):
        next(generate(model, [[5, 6, 7]], 60, greedy, keep=(2, 0)))
    with pytest.raises(ValueError, match=r"keep is \(2, 12, 3\); expected sinks"):
        next(generate(model, [[5, 6, 7]], 60, greedy, keep=(2, 12, 3)))


def test_sampler() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, -torch.inf]]).log_softmax(-1)
    many = logits.expand(4000, -1)
    random = torch.Generator().manual_seed(0)
    assert Sampler(0.0).draw(logits).tolist() == [1]
    share = Sampler(1.0).draw(many, random).bincount(minlength=4) / 4000
    torch.testing.assert_close(share, logits.exp()[0], rtol=0, atol=0.03)
    assert set(Sampler(1.0, top_k=2).draw(many, random).tolist()) == {1, 2}
    assert set(Sampler(1.0, top_p=0.8).draw(many, random).tolist()) == {1, 2}
    assert set(Sampler(1.0, top_p=0.5).draw(many, random).tolist()) == {1}
    # smaller than any float32
    assert set(Sampler(1.0, top_p=1e-46).draw(many, random).tolist()) == {1}
    for option, value in (("top_p", 0.0), ("temperature", None), ("top_k", None)):
        with pytest.raises(ValueError, match=f"{option} is {value}; expected"):
            Sampler(**{option: value})


def test_generation_repeats_and_stops() -> None:
    model, prompts = small(), [[5, 6, 7], [8]]
    draw = [list(generate(model, prompts, 12, Sampler(1.0), seed=s, chunk=c)) for s, c in [(1, 8), (1, 2), (2, 8)]]
    assert draw[0] == draw[1] != draw[2]
    assert len(draw[0]) <= 12
    greedy = list(generate(model, [[5, 6, 7]], 6, Sampler(0.0)))
    ids = [5, 6, 7]
    for (token,) in greedy:
        assert token == int(model(torch.tensor([ids]))[0, -1].argmax())
        ids.append(token)
    only = np.zeros((1, VOCABULARY), bool)
    only[0, 0] = True
    assert list(generate(model, [[5]], 12, Sampler(), first=only)) == [[0]]
    with pytest.raises(ValueError, match="at most 509"):
        next(generate(model, prompts, 600, Sampler()))
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        next(generate(model, [[1], []], 3, Sampler()))


def test_prompts_whose_logits_are_not_finite_are_named(monkeypatch) -> None:
    model, prompts = small(eos_token_id=-1), [[1, 2, 3], [4, 5], [6]]
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = torch.nan
    with pytest.raises(FloatingPointError, match=r"prompts \[1\] are not finite"):
        dict(serve(model, prompts, 4, Sampler(0.0), batch=3))
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"prompts \[0, 1\] are not finite"):
        dict(serve(model, prompts, 4, Sampler(0.0), batch=2))


@pytest.mark.parametrize("options", [{}, {"keep": (1, 4)}, {"draft": "ngram"}], ids=str)
def test_no_prompts_have_no_tokens(options: dict[str, Any]) -> None:
    """Without prompts nothing is drawn, whatever the options."""
    assert list(generate(small(), [], 5, Sampler(0.0), **options)) == []
    assert list(generate(small(), np.zeros((0, 3), np.int64), 5, Sampler(0.0), **options)) == []


def test_prompts_may_be_arrays() -> None:
    """Rows of an array, arrays of several lengths and tensors give the tokens of the same lists."""
    model, tokens = small(eos_token_id=-1), some_tokens(2, 9)
    for given in (tokens, tokens.numpy(), [tokens[0].numpy(), tokens[1, :4]]):
        prompts = [row.tolist() for row in given]
        want = list(generate(model, prompts, 5, Sampler(0.0)))
        assert list(generate(model, given, 5, Sampler(0.0))) == want
        assert list(generate(model, given, 5, Sampler(0.0), draft="ngram")) == want
        served = dict(serve(model, given, 5, Sampler(0.0)))
        assert [served[0], served[1]] == [list(one) for one in zip(*want, strict=True)]
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        next(generate(model, [np.array([1]), np.zeros(0, np.int64)], 3, Sampler(0.0)))


@pytest.mark.parametrize(
    "prompt, words",
    [
        ([1, VOCABULARY], f"prompt 1 has token {VOCABULARY}; expected numbers from 0 to {VOCABULARY - 1}"),
        ([-3, 1], "prompt 1 has token -3"),
        ([1.7, 2.9], r"prompt 1 is \[1.7, 2.9\]; expected a list of tokens' numbers"),
        ("ab", "prompt 1 is 'ab'; expected a list"),
        (7, "prompt 1 is 7; expected a list"),
        ([[1, 2]], r"prompt 1 is \[\[1, 2\]\]; expected a list"),
    ],
)
def test_prompts_are_tokens_of_the_model(prompt: Any, words: str) -> None:
    for call in (generate, serve):
        with pytest.raises(ValueError, match=words):
            next(call(small(), [[1, 2], prompt], 3, Sampler(0.0)))


def test_first_tokens_of_every_prompt() -> None:
    every = np.ones((2, VOCABULARY), bool)
    for first, words in (
        (every[:1], r"first is bool \[1, 61\]; expected bool \[2, n\]"),
        (every[0], r"first is bool \[61\]"),
        (every.astype(int), "first is int64"),
        (every & np.array([[True], [False]]), "first allows no token for prompt 1"),
    ):
        for call in (generate, serve):
            with pytest.raises(ValueError, match=words):
                next(call(small(), [[1], [2]], 3, Sampler(0.0), first=first))


@pytest.mark.parametrize("draft", [None, "ngram"])
@pytest.mark.parametrize("missing", [-1, VOCABULARY + 9])
def test_an_end_that_the_model_lacks_is_not_repeated(missing: int, draft: str | None) -> None:
    first = np.zeros((2, VOCABULARY), bool)
    first[[0, 1], [3, 5]] = True
    model = small(eos_token_id=(missing, 3))
    rows = list(generate(model, [[1], [2]], 4, Sampler(0.0), first=first, draft=draft))
    assert [row[0] for row in rows] == [3] * 4


def test_gpt2_ends_at_each_of_several_tokens() -> None:
    """A greedy text ends at the first of its end tokens, in any order of their list, and never without end tokens."""
    shape = {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}

    def text(ends: int | list[int] | None) -> list[int]:
        torch.manual_seed(0)
        model = Gpt2(Gpt2Config.from_dict({**shape, "eos_token_id": ends}))
        return [token for (token,) in generate(model, [[5, 6, 7]], 12, Sampler(0.0))]

    whole = text(None)
    assert len(whole) == 12
    end = whole.index(whole[5])
    missing = next(token for token in range(VOCABULARY) if token not in whole)
    assert text([missing, whole[5]]) == text([whole[5], missing]) == whole[: end + 1]


def deepseek(**changes: Any) -> DeepSeek:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "q_lora_rank": 12}
    latent = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
    return DeepSeek(DeepSeekConfig(vocab_size=VOCABULARY, **sizes, **latent, **changes)).eval()


INDEX = {"model_type": "deepseek_v32", "index_topk": 4, "index_n_heads": 8, "index_head_dim": 6}


def test_keys_of_an_indexer_are_not_evicted() -> None:
    """Keys that move to other positions would be rotated again, but not those by which the indexer chooses."""
    with pytest.raises(ValueError, match="keep is given, and the keys of the model's indexer would not be rotated"):
        next(generate(deepseek(**INDEX), [[1, 2, 3]], 20, Sampler(0.0), keep=(1, 6)))
    assert list(generate(deepseek(), [[1, 2, 3]], 2, Sampler(0.0), keep=(1, 6)))


@pytest.mark.parametrize("absorbed", [None, True, False])
@pytest.mark.parametrize("changes", [{}, INDEX], ids=["plain", "indexer"])
@torch.no_grad()
def test_latent_caches_of_no_sequences(changes: dict[str, Any], absorbed: bool | None) -> None:
    """Latent attention reads and decodes an empty batch."""
    model = deepseek(**changes)
    model.absorb(absorbed)
    caches, empty = model.make_caches(0, 16), torch.zeros(0, 9, dtype=torch.int64)
    assert model(empty, caches=caches).shape == (0, 9, VOCABULARY)
    assert model(empty[:, :1], caches=caches).shape == (0, 1, VOCABULARY)
