"""`serve`: seeds and numbers of prompts choose the draws, and stacks of attention alone are served."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from saccade.models import batching  # noqa: E402
from saccade.models.batching import serve  # noqa: E402
from saccade.models.hybrid import Hybrid  # noqa: E402
from saccade.models.hybrid_config import HybridConfig  # noqa: E402
from saccade.models.replay import PagedSteps  # noqa: E402
from saccade.models.sampling import Sampler, generate  # noqa: E402

from .small_llama import VOCABULARY, small  # noqa: E402
from .test_replay import tried_first  # noqa: E402


def test_seeds_may_be_numbers_of_numpy() -> None:
    model = small()
    for call in (serve, generate):
        texts = [list(call(model, [[1, 2]], 4, Sampler(1.0), seed=seed)) for seed in (3, np.int64(3))]
        assert texts[0] == texts[1]


def test_seeds_share_no_texts() -> None:
    model = small(eos_token_id=-1)
    texts = [text for seed in (-1, 0, 1, 2) for _, text in serve(model, [[1, 2]] * 4, 8, Sampler(1.0), seed=seed)]
    assert len(set(map(tuple, texts))) == 16
    last = (1 << 63) - 1
    assert dict(serve(model, [[1]] * 3, 4, Sampler(1.0), seed=last)) == dict(
        serve(model, [[1]] * 3, 4, Sampler(1.0), batch=2, seed=last)
    )
    for call in (serve, generate):
        with pytest.raises(ValueError, match="seed is 9223372036854775808; expected an integer of 64 bits"):
            next(call(model, [[1]], 2, Sampler(1.0), seed=last + 1))
    with pytest.raises(TypeError, match="rows is '8'"):
        next(serve(model, [[1]], 2, Sampler(1.0), rows="8"))


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("mixers", [("attention", "local"), ("gated", "attention")])
def test_a_stack_of_attention_alone(mixers: tuple[str, ...], replayed: bool, monkeypatch) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 48, "sliding_window": 5, "eos_token_id": -1}
    model = Hybrid(HybridConfig(mixers=mixers, feed_forward=("swiglu",) * 2, **sizes)).eval()
    prompts = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 9], [8]]
    alone = [[token for (token,) in generate(model, [prompt], 20, Sampler(0.0))] for prompt in prompts]
    if replayed:
        monkeypatch.setattr(type(model), "replayable", lambda *_: True)
        monkeypatch.setattr(batching, "PagedSteps", lambda *args: PagedSteps(*args, capture=tried_first))
    assert dict(serve(model, prompts, 20, Sampler(0.0), batch=2, page_size=4)) == dict(enumerate(alone))
