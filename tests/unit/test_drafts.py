"""Generation by drafts: the same text as token by token, in fewer calls of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

import saccade  # noqa: E402
from saccade.models.batching import serve  # noqa: E402
from saccade.models.deepseek import DeepSeek  # noqa: E402
from saccade.models.deepseek_config import DeepSeekConfig  # noqa: E402
from saccade.models.drafts import Draft, Text, Tree  # noqa: E402
from saccade.models.gpt2 import Gpt2, Gpt2Config  # noqa: E402
from saccade.models.hybrid import Hybrid, HybridConfig  # noqa: E402
from saccade.models.llama import Llama, LlamaConfig  # noqa: E402
from saccade.models.sampling import Sampler, generate  # noqa: E402

VOCABULARY = 61
# an id that no token has, so that nothing ends the text
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "eos_token_id": -1}
LATENT = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}


def llama(**changes: Any) -> Llama:
    return Llama(LlamaConfig(**SIZES, num_attention_heads=6, num_key_value_heads=2, initializer_range=0.05, **changes))


def hybrid(*mixers: str, **changes: Any) -> Hybrid:
    sizes = SIZES | {"initializer_range": 0.05, "mixers": mixers, "feed_forward": ("swiglu",) * len(mixers)}
    del sizes["num_hidden_layers"]
    return Hybrid(HybridConfig(**sizes | {"intermediate_size": 64} | changes))


def deepseek(**changes: Any) -> DeepSeek:
    return DeepSeek(DeepSeekConfig(**SIZES, **LATENT, num_attention_heads=4, initializer_range=0.05, **changes))


def gpt2() -> Gpt2:
    return Gpt2(Gpt2Config(VOCABULARY, 48, 2, 4, n_positions=110, eos_token_id=-1))


INDEX = {"model_type": "deepseek_v32", "q_lora_rank": 12, "index_topk": 9, "index_n_heads": 16, "index_head_dim": 6}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "window": lambda: llama(sliding_window=11),
    "gpt2": gpt2,
    "deepseek": deepseek,
    "indexer": lambda: deepseek(**INDEX),
    "attention": lambda: hybrid("attention", "gated"),
    "local": lambda: hybrid("attention", "local", sliding_window=9),
}
DRAFTS = {
    "ngram": lambda: "ngram",
    "one": lambda: Draft(branches=1, shortest=1),
    "wide": lambda: Draft(shortest=1, longest=3, depth=4, branches=4),
    "deep": lambda: Draft(shortest=1, depth=50, branches=3),
}
ONE = ("window", "indexer", "local")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    # such small models are slower on several
    before = torch.get_num_threads(), saccade.get_num_threads()
    torch.set_num_threads(1)
    saccade.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    saccade.set_num_threads(before[1])


def made(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return MODELS[name]().eval()


def prompts_of(seed: int, *lengths: int) -> list[list[int]]:
    """Prompts of few different tokens, which often repeat."""
    r = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 6, (n,), generator=r).tolist() for n in lengths]


def texts(model: Any, prompts: list[list[int]], tokens: int, sampler: Sampler | None = None, **options: Any) -> list:
    return list(generate(model, prompts, tokens, sampler or Sampler(0.0), **options))


@pytest.mark.sample(30)
@pytest.mark.parametrize("codes", [None, "int8", "fp8", "int4"])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_the_same(name, draft, codes, seed) -> None:
    """In float32; rounding could change a token only where two logits are almost equal."""
    if name in ONE and draft in ("wide", "deep"):
        with pytest.raises(ValueError, match="expected 1 or None"):
            texts(made(name), [[1]], 3, draft=DRAFTS[draft]())
        return
    if name in ("deepseek", "indexer") and codes == "int4":
        return
    model = made(name, seed)
    for lengths in ((20,), (9, 30, 1)):
        prompts = prompts_of(seed, *lengths)
        # where codes are read, and no longer numbers, depends on the chunks
        alone = texts(model, prompts, 40, quantised=codes, chunk=7)
        assert texts(model, prompts, 40, quantised=codes, chunk=7, draft=DRAFTS[draft]()) == alone


def test_fewer_calls_on_text_that_repeats() -> None:
    model, prompt = made("llama"), [[*range(1, 20)] * 3]
    calls = []
    model.register_forward_pre_hook(lambda module, inputs: calls.append(inputs[0].shape[1]))
    draft = Draft()
    assert len(texts(model, prompt, 80, draft=draft)) == 80
    assert draft.calls == len(calls)
    # the prompt is read before, and draws a token
    assert draft.tokens == 79
    assert draft.calls < 40
    assert draft.tokens_per_call == 79 / draft.calls


@pytest.mark.parametrize("end", range(1, 12))
def test_texts_end_at_different_times(end) -> None:
    model = made("llama")
    free = list(zip(*texts(model, prompts_of(3, 9, 14, 4), 60), strict=True))
    model.config = LlamaConfig(**{**vars(model.config), "eos_token_id": free[end % 3][end]})
    prompts = prompts_of(3, 9, 14, 4)
    assert texts(model, prompts, 60, draft=Draft(shortest=1)) == texts(model, prompts, 60)


@pytest.mark.parametrize("sampler", [Sampler(1.0), Sampler(0.7, 5), Sampler(1.5, 0, 0.8)], ids=str)
def test_draws_of_one_prompt_are_the_same(sampler) -> None:
    model = made("llama")
    for seed in range(4):
        alone = texts(model, prompts_of(seed, 25), 60, sampler, seed=seed)
        assert texts(model, prompts_of(seed, 25), 60, sampler, seed=seed, draft=Draft(shortest=1, branches=3)) == alone


def test_draws_of_many_prompts_have_the_same_probabilities() -> None:
    torch.manual_seed(1)
    model = Llama(LlamaConfig(**SIZES | {"vocab_size": 4}, head_dim=8, initializer_range=0.4)).eval()
    prompts = [[1, 2, 3, 1, 2]] * 3000
    # texts of 3 tokens, of which the drafts know "3 1 2"
    one, other = (
        Counter(zip(*texts(model, prompts, 3, Sampler(1.0), seed=seed, draft=draft), strict=True))
        for seed, draft in ((0, None), (1, Draft(shortest=1, branches=2)))
    )
    every = {*one, *other}
    assert len(every) > 20
    # twice the distance that two samples of one distribution have on average
    expected = sum((2 * (one[x] + other[x]) / 6000 / 3000 / torch.pi) ** 0.5 * 2 for x in every) / 2
    assert sum(abs(one[x] - other[x]) for x in every) / 3000 / 2 < expected


@pytest.mark.parametrize("sampler", [Sampler(0.0), Sampler(1.0)], ids=str)
@pytest.mark.parametrize("name", ["llama", "window", "gpt2", "deepseek"])
def test_prompts_that_share_pages(name, sampler) -> None:
    """Each prompt draws from a generator of its own, so its text does not depend on drafts at any temperature."""
    model, prompts = made(name), [*prompts_of(5, 9, 30, 14), [*range(1, 20)] * 2, [*range(1, 20)] * 2 + [1, 2]]
    draft = Draft(shortest=1, depth=6)
    options: dict[str, Any] = {"batch": 3, "page_size": 4, "chunk": 8}
    served = dict(serve(model, prompts, 40, sampler, draft=draft, **options))
    assert served == dict(serve(model, prompts, 40, sampler, **options))
    # all but the first token of each prompt
    assert draft.tokens == 39 * 5 > draft.calls
    with pytest.raises(ValueError, match="expected 1 or None"):
        next(serve(model, prompts, 40, sampler, draft=Draft(branches=2)))


def test_trees_share_beginnings() -> None:
    tree = Tree(9, [[1, 2, 3], [4], [1, 2, 5], [1, 6]])
    assert tree.tokens == [9, 1, 2, 3, 5, 6, 4]
    assert tree.parents == [-1, 0, 1, 2, 2, 1, 0]
    assert Tree(9).parents == [-1]
    draft = Draft(shortest=1, longest=2, depth=3)
    text = Text([1, 2, 3, 4, 1, 2, 5, 6, 2, 1, 2], 9, (), draft)
    # of the pair (1, 2), the last occurrence first; then of 2
    assert text.tree(1).tokens == [2, 5, 6, 2]
    assert text.tree(2).tokens == [2, 3, 4, 1, 5, 6, 2]
    assert text.tree(3).tokens == [2, 1, 2, 1, 3, 4, 1, 5, 6, 2]
    # a period is continued, and nothing is drafted for the token after the last
    assert Text([5, 7, 8, 7, 8], 9, (), draft).tree(1).tokens == [8, 7, 8, 7]
    text = Text([5, 7, 8, 7, 8], 2, (), draft)
    text.draw(7)
    assert text.tree(1).tokens == [7]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="draft is 'tree'; expected 'ngram'"):
        texts(made("llama"), [[1]], 3, draft="tree")
    with pytest.raises(ValueError, match="depth is 0"):
        Draft(depth=0)
    with pytest.raises(ValueError, match="longest last"):
        Draft(shortest=3, longest=2)
    with pytest.raises(ValueError, match=r"keep is .* and draft"):
        texts(made("llama"), [[1]], 3, draft="ngram", keep=(1, 8))
    model = hybrid("attention", "mamba2")
    with pytest.raises(ValueError, match="layers of mamba2: their states"):
        texts(model, [[1]], 3, draft="ngram")
    with pytest.raises(ValueError, match="accept on a stack with states"):
        model.make_caches(1, 8).accept(0, [[]])
    # the model's positions are those of the text, not of the tree
    assert len(texts(made("gpt2"), [[1, 2] * 4], 102, draft=Draft(shortest=1, depth=30, branches=4))) == 102
    with pytest.raises(ValueError, match="at most 102"):
        texts(made("gpt2"), [[1, 2] * 4], 103, draft="ngram")
