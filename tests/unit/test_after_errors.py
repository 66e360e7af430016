"""After an error, caches and states are as before the call: what follows has the numbers of a text without it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import saccade  # noqa: E402
from saccade import mask as masks  # noqa: E402
from saccade.models.gpt2 import Gpt2, Gpt2Config  # noqa: E402
from saccade.models.hybrid import Hybrid  # noqa: E402
from saccade.models.hybrid_config import HybridConfig  # noqa: E402
from saccade.models.native_sparse import NativeSparseAttention, SparseSizes  # noqa: E402
from saccade.models.sampling import prefill  # noqa: E402
from saccade.models.stores import PagedTokens  # noqa: E402

from .small_llama import VOCABULARY, small, some_tokens  # noqa: E402

# a mask that no text of these tests has the size of, and that decoding refuses after the keys were appended
WRONG = masks.dense(np.ones((77, 77), bool))


def gpt2() -> Gpt2:
    torch.manual_seed(0)
    return Gpt2(Gpt2Config(vocab_size=VOCABULARY, n_embd=48, n_layer=2, n_head=4, n_positions=9)).eval()


def hybrid() -> Hybrid:
    torch.manual_seed(0)
    mixers = "mamba", "attention", "delta", "attention"
    return Hybrid(
        HybridConfig(vocab_size=VOCABULARY, hidden_size=48, mixers=mixers, feed_forward=("swiglu",) * 4)
    ).eval()


@pytest.mark.parametrize("make", [small, gpt2, hybrid])
@torch.no_grad()
def test_caches_after_a_refused_mask(make: Any) -> None:
    model, tokens = make(), some_tokens(2, 9)
    whole, caches = model(tokens), model.make_caches(2, 9)
    model(tokens[:, :4], caches=caches)
    with pytest.raises(ValueError, match=r"allowed has shape \[77, 77\]"):
        model(tokens[:, 4:], mask=WRONG, caches=caches)
    torch.testing.assert_close(model(tokens[:, 4:], caches=caches), whole[:, 4:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [small, gpt2, hybrid])
@pytest.mark.parametrize(
    ("tokens", "error", "words"),
    [
        (
            torch.tensor([[1, VOCABULARY]]),
            ValueError,
            f"token {VOCABULARY}; expected numbers from 0 to {VOCABULARY - 1}",
        ),
        (torch.tensor([[-1, 1]]), ValueError, "token -1; expected"),
        (torch.tensor([1, 2]), ValueError, r"tokens has shape \[2\]; expected \[B, T\]"),
        ([[1, 2]], TypeError, "tokens is a list; expected a tensor"),
    ],
)
@torch.no_grad()
def test_caches_after_refused_tokens(make: Any, tokens: Any, error: type, words: str) -> None:
    model = make()
    caches = model.make_caches(1, 9)
    with pytest.raises(error, match=words):
        model(tokens, caches=caches)
    with pytest.raises(error, match=words):
        model(tokens)
    right = some_tokens(1, 3)
    torch.testing.assert_close(model(right, caches=caches), model(right), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [small, gpt2, hybrid])
@torch.no_grad()
def test_caches_after_a_refused_prompt(make: Any) -> None:
    model, prompt = make(), some_tokens(1, 6)[0].tolist()
    caches = model.make_caches(1, 9)
    with pytest.raises(ValueError, match=f"token {VOCABULARY}; expected"):
        prefill(model, [[*prompt[:5], VOCABULARY]], 9, chunk=4, into=caches)
    logits, _ = prefill(model, [prompt], 9, chunk=4, into=caches)
    torch.testing.assert_close(logits, model(torch.tensor([prompt]))[:, -1], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"into has caches of \[6\] tokens; expected empty ones"):
        prefill(model, [prompt], 9, into=caches)
    # a prompt of two that is refused leaves no end of the other one
    caches = model.make_caches(2, 9)
    with pytest.raises(ValueError, match=f"token {VOCABULARY}; expected"):
        prefill(model, [prompt[:2], [*prompt, VOCABULARY]], 9, into=caches)
    tokens = torch.tensor([prompt, prompt])
    torch.testing.assert_close(model(tokens, caches=caches), model(tokens), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="tokens has 1 sequences and the caches 2; expected the same number"):
        model(tokens[:1, :1], caches=caches)


@torch.no_grad()
def test_prompts_of_one_length_have_checkpoints() -> None:
    model, tokens = hybrid(), some_tokens(2, 9)
    caches = model.make_caches(2, 12, every=4)
    with pytest.raises(ValueError, match=r"sequences of \[9, 2\] tokens have checkpoints every 4"):
        prefill(model, [tokens[0].tolist(), [1, 2]], 12, into=caches)
    logits, _ = prefill(model, tokens.tolist(), 12, into=caches)
    torch.testing.assert_close(logits, model(tokens)[:, -1], rtol=1e-4, atol=1e-5)
    model.crop(caches, 6)
    torch.testing.assert_close(model(tokens[:, 6:], caches=caches), model(tokens)[:, 6:], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_states_after_a_full_cache() -> None:
    """The states of layers before the one whose cache is full would have read the tokens."""
    model, tokens = hybrid(), some_tokens(2, 9)
    whole, caches = model(tokens), model.make_caches(2, 8, every=3)
    model(tokens[:, :5], caches=caches)
    with pytest.raises(ValueError, match="expected at most 8, the capacity"):
        model(tokens[:, 5:], caches=caches)
    assert caches.lengths.tolist() == [5, 5]
    torch.testing.assert_close(model(tokens[:, 5:8], caches=caches), whole[:, 5:8], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="backend is 'none'"):
        model.crop(caches, 4, backend="none")
    assert caches.lengths.tolist() == [8, 8]
    model.crop(caches, 4)
    torch.testing.assert_close(model(tokens[:, 4:8], caches=caches), whole[:, 4:8], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_pages_after_a_refused_mask() -> None:
    model, tokens = small(), some_tokens(1, 9)
    layers = model.make_pages(4, 4)
    sequences = [[x.add()] for x in layers]

    def read(tokens: torch.Tensor, mask: masks.Mask | None = None) -> torch.Tensor:
        cu = np.array([0, tokens.shape[1]])
        caches = [PagedTokens(x, one, cu) for x, one in zip(layers, sequences, strict=True)]
        return model(tokens, mask=mask, caches=caches)

    read(tokens[:, :4])
    with pytest.raises(ValueError, match="expected one without arrays"):
        read(tokens[:, 4:], WRONG)
    torch.testing.assert_close(read(tokens[:, 4:]), model(tokens)[:, 4:], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_layers_after_a_refused_call() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 40, 32)
    layer = saccade.nn.Attention(32, heads=4)
    cache = layer.make_cache(1, 40)
    layer(x[:, :30], cache=cache)
    with pytest.raises(ValueError, match="allowed has shape"):
        layer(x[:, 30:], WRONG, cache=cache)
    torch.testing.assert_close(layer(x[:, 30:], cache=cache), layer(x)[:, 30:], rtol=1e-4, atol=1e-5)
    sparse = NativeSparseAttention(32, 4, 2, sizes=SparseSizes(8, 4, 8, 4, window=8))
    cache = sparse.make_cache(1, 40)
    sparse(x[:, :30], cache)
    with pytest.raises(ValueError, match="backend is 'none'"):
        sparse(x[:, 30:], cache, backend="none")
    torch.testing.assert_close(sparse(x[:, 30:], cache), sparse(x)[:, 30:], rtol=1e-4, atol=1e-5)


def test_as_many_caches_as_layers() -> None:
    model = small()
    for caches in (model.make_caches(1, 4)[:1], model.make_caches(1, 4) * 2):
        with pytest.raises(ValueError, match=f"caches has {len(caches)} caches and the model 2 layers"):
            model(some_tokens(1, 3), caches=caches)


@torch.no_grad()
def test_gpt2_has_no_position_twice() -> None:
    """Tokens in caches beyond the last position are refused, not read with the last position again."""
    model, tokens = gpt2(), some_tokens(1, 12)
    caches = model.make_caches(1, 16)
    whole = model(tokens[:, :9])
    model(tokens[:, :6], caches=caches)
    with pytest.raises(ValueError, match="positions are 6 to 11; expected 0 to 8"):
        model(tokens[:, 6:], caches=caches)
    torch.testing.assert_close(model(tokens[:, 6:9], caches=caches), whole[:, 6:], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="positions are -1 to 1; expected 0 to 8"):
        model(tokens[:, :3], torch.arange(3) - 1)


@torch.no_grad()
def test_documents_of_a_stack() -> None:
    """Positions of all rows at once separate documents as those of each row do; caches have one document."""
    model, tokens = hybrid(), some_tokens(2, 6)
    positions = torch.tensor([0, 1, 2, 0, 1, 2])
    mask = masks.causal() & masks.documents(torch.tensor([[0, 0, 0, 1, 1, 1]] * 2, dtype=torch.int32))
    apart = torch.cat([model(tokens[:, :3]), model(tokens[:, 3:])], 1)
    for given in (positions, positions[None], positions.expand(2, 6)):
        torch.testing.assert_close(model(tokens, given, mask), apart, rtol=1e-4, atol=1e-5)
    caches = model.make_caches(2, 6)
    with pytest.raises(ValueError, match="positions begin again at 0, and the states in caches would not"):
        model(tokens, positions, caches=caches)
    assert caches.lengths.tolist() == [0, 0]


def test_targets_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"targets has shape \[3, 2\]; expected \[2, 3\]"):
        small()(some_tokens(2, 3), targets=some_tokens(3, 2))
