"""Steps of generation with static shapes, which a GPU replays: here the step itself is called in place of a graph."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from saccade.models import batching, graphs, replay  # noqa: E402
from saccade.models.batching import serve  # noqa: E402
from saccade.models.gpt2 import Gpt2, Gpt2Config  # noqa: E402
from saccade.models.graphs import WARM  # noqa: E402
from saccade.models.replay import PagedSteps, Steps  # noqa: E402
from saccade.models.sampling import Sampler, generate, prefill  # noqa: E402

from .small_llama import VOCABULARY, small, some_tokens  # noqa: E402


def tried_first(step, device, undo):
    """In place of a capture: steps that are undone, as they compile the kernels of a graph."""
    for _ in range(WARM):
        step()
    undo()
    return step


@pytest.mark.parametrize("batch, page_size, chunk", [(1, 4, 64), (2, 1, 3), (3, 16, 1), (9, 5, 7)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("window, quantised", [(0, None), (6, None), (0, "int8")])
def test_prompts_that_come_and_go_through_replayed_steps(
    batch: int, page_size: int, chunk: int, temperature: float, window: int, quantised: str | None, monkeypatch
) -> None:
    model, tokens = small(sliding_window=window), some_tokens(5, 30)
    # the second starts with the same tokens as the first, and the last equals all of it
    tokens[1, :12] = tokens[0, :12]
    tokens[4] = tokens[0]
    prompts = [row[:n].tolist() for row, n in zip(tokens, (14, 17, 3, 9, 12), strict=True)]
    options = {"batch": batch, "page_size": page_size, "chunk": chunk, "quantised": quantised, "seed": 4}
    # the first text ends in the middle of the replays
    end = dict(serve(model, prompts, 9, Sampler(temperature), **options))[0][-1]
    model.config = dataclasses.replace(model.config, eos_token_id=end)
    expected = dict(serve(model, prompts, 39, Sampler(temperature), **options))
    made: list[PagedSteps] = []

    def steps(*args):
        made.append(PagedSteps(*args, capture=tried_first))
        return made[0]

    monkeypatch.setattr(type(model), "replayable", lambda *_: True)
    monkeypatch.setattr(batching, "PagedSteps", steps)
    assert dict(serve(model, prompts, 39, Sampler(temperature), **options)) == expected
    assert int(made[0].draws.count) > 0
    assert any(len(text) < 39 for text in expected.values())


def test_places_without_a_prompt_read_a_token_of_the_vocabulary(monkeypatch) -> None:
    model, prompts = small(eos_token_id=-1), [[1, 2, 3], [4, 5], [6]]
    expected = dict(serve(model, prompts, 40, Sampler(0.0), batch=2))
    monkeypatch.setattr(type(model), "replayable", lambda *_: True)
    monkeypatch.setattr(batching, "PagedSteps", lambda *args: PagedSteps(*args, capture=tried_first))
    assert dict(serve(model, prompts, 40, Sampler(0.0), batch=2)) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_steps_of_static_shapes_draw_the_same_tokens(temperature: float, tokens: int) -> None:
    model, sampler = small(), Sampler(temperature, top_k=20, top_p=0.95)
    prompts = [row[:n].tolist() for row, n in zip(some_tokens(3, 20), (3, 14, 9), strict=True)]
    expected = list(generate(model, prompts, tokens, sampler, seed=3))
    addresses: list[int] = []

    def noted(*args):
        step = tried_first(*args)
        return lambda: (step(), addresses.append(caches[0].lengths.data_ptr()))

    logits, caches = prefill(model, prompts, 20 + tokens + WARM + 1, 256)
    generator = torch.Generator().manual_seed(3)
    assert list(Steps(model, caches, sampler, capture=noted).run(logits, tokens, generator)) == expected
    assert len(set(addresses)) <= 1
    assert len(addresses) >= len(expected) - 1


def test_steps_of_static_shapes_end_and_refuse_what_is_not_finite() -> None:
    model, prompts = small(), [[1, 2, 3]]
    (token,) = next(generate(model, prompts, 1, Sampler(0.0)))
    model.config = dataclasses.replace(model.config, eos_token_id=token)
    logits, caches = prefill(model, prompts, 60, 256)
    steps = Steps(model, caches, Sampler(0.0), capture=lambda step, *_: step)
    assert list(steps.run(logits, 50, torch.Generator())) == [[token]]
    model.config = dataclasses.replace(model.config, eos_token_id=-1)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    logits, caches = prefill(model, prompts, 60, 256)
    steps = Steps(model, caches, Sampler(0.9), capture=lambda step, *_: step)
    with pytest.raises(FloatingPointError, match=r"sequences \[0\] of the batch are not finite"):
        list(steps.run(logits, 50, torch.Generator()))


class Reads(TorchDispatchMode):
    """Refers weakly to the arrays that operations read and did not make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []
        self.read: list[StorageWeakRef] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        mine = {x.untyped_storage().data_ptr() for x in self.made}
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in mine:
                self.read.append(StorageWeakRef(x.untyped_storage()))
        out = function(*args, **kwargs or {})
        self.made += [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        return out


def test_kept_steps_read_only_what_is_kept(monkeypatch) -> None:
    """A graph reads arrays where they were, so they must not be freed between calls."""
    model, prompts = small(eos_token_id=-1), [[1, 2, 3], [4, 5]]
    read: list[StorageWeakRef] = []

    def noted(step, device, undo):
        step = tried_first(step, device, undo)
        with Reads() as reads:
            step()
        undo()
        read.extend(reads.read)
        return step

    monkeypatch.setattr(type(model), "replayable", lambda *_: True)
    monkeypatch.setattr(replay, "captured", noted)
    model.steps_compiled = True
    expected = list(generate(model, prompts, 5, Sampler(0.0)))
    for _ in range(2 + len(model.blocks)):
        assert list(generate(model, prompts, 5, Sampler(0.0))) == expected
    assert len(read) > 20
    assert not any(x.expired() for x in read)


def test_kept_steps_are_freed_where_they_are_not_used(monkeypatch) -> None:
    model, prompts = small(eos_token_id=-1), [[1, 2, 3]]
    monkeypatch.setattr(type(model), "replayable", lambda *_: True)
    monkeypatch.setattr(replay, "captured", tried_first)
    monkeypatch.setattr(batching, "PagedSteps", lambda *args: PagedSteps(*args, capture=tried_first))
    for use in (
        lambda: list(generate(model, prompts, 5, Sampler(0.0), keep=(1, 4))),
        lambda: list(generate(model, prompts, 5, Sampler(0.0), draft="ngram")),
        lambda: list(serve(model, prompts, 5, Sampler(0.0))),
        model.forget_steps,
    ):
        model.steps_compiled = True
        list(generate(model, prompts, 5, Sampler(0.0)))
        assert model.kept_steps is not None
        # without compiled methods, which are tested below
        model.steps_compiled = False
        use()
        assert model.kept_steps is None


def test_threads_compile_methods_in_turn_and_restore_them() -> None:
    model = small()
    own = model.blocks[0].finish = partial(model.blocks[0].finish)
    draws = graphs.Draws(model, Sampler(0.0), 1, 1)

    def hold(_: int) -> None:
        with graphs.fused(model, draws, False):
            time.sleep(0.05)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(hold, range(4)))
    assert model.blocks[0].finish is own
    assert "finish" not in vars(model.blocks[1])


def test_a_copy_computes_with_its_own_weights() -> None:
    model, tokens = small(), some_tokens(1, 5)
    model.compile(backend="eager")
    model.summed = torch.compile(model.summed, backend="eager")
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    with torch.no_grad():
        for x in twin.parameters():
            x.zero_()
        assert not twin(tokens).any()
        assert model(tokens).any()


def gpt2() -> Gpt2:
    torch.manual_seed(0)
    return Gpt2(Gpt2Config(VOCABULARY, 48, 2, 4)).eval()


@pytest.mark.parametrize(("make", "norm"), [(small, "RMSNorm"), (gpt2, "LayerNorm")])
def test_compiled_steps_draw_the_same_tokens(make, norm: str, monkeypatch) -> None:
    model, prompts = make(), [[1, 2, 3], [4, 5]]
    with pytest.raises(ValueError, match=f"this model is a {type(model).__name__} on cpu; steps are replayed"):
        model.compile_steps()
    expected = list(generate(model, prompts, 20, Sampler(0.0)))
    compiled: list[str] = []

    def compile_(function, **options):
        compiled.append(function.__qualname__)
        assert options.pop("options") == {"coordinate_descent_tuning": False}
        return torch_compile(function, backend="aot_eager", **options)

    torch_compile = torch.compile
    monkeypatch.setattr(torch, "compile", compile_)
    model.steps_compiled = True
    logits, caches = prefill(model, prompts, 40, 256)
    steps = Steps(model, caches, Sampler(0.0), capture=tried_first)
    assert list(steps.run(logits, 20, torch.Generator())) == expected
    assert set(compiled) == {f"{norm}.forward", "Attention.project", "Linear.forward", "Block.finish", "Draws.draw"}
    assert not any({"forward", "project", "finish"} & set(vars(part)) for part in model.modules())
    assert "draw" not in vars(steps.draws)


def test_compiled_steps_are_kept_for_calls_that_they_fit(monkeypatch) -> None:
    captures: list[torch.device] = []

    def capture(step, device, undo):
        captures.append(device)
        return tried_first(step, device, undo)

    def drawn(prompts, tokens=20, temperature=0.0):
        return list(generate(model, prompts, tokens, Sampler(temperature), seed=3))

    model, texts = small(eos_token_id=-1), [row.tolist() for row in some_tokens(4, 40)]
    calls = [
        (texts[:2],), (texts[2:],), (texts[:2], 8), (texts[:3],), (texts[:2],), ([texts[0][:3], texts[1][:9]],),
        (texts[:2], 20, 0.9), (texts[1:3], 20, 0.9),
    ]  # fmt: skip
    expected = [drawn(*call) for call in calls]
    monkeypatch.setattr(type(model), "replayable", lambda *_: True)
    monkeypatch.setattr(replay, "captured", capture)
    monkeypatch.setattr(graphs, "fused", lambda *_: nullcontext())
    monkeypatch.setattr(replay, "GRAIN", 1)
    assert [drawn(*call) for call in calls] == expected
    assert len(captures) == len(calls)
    captures.clear()
    model.steps_compiled = True
    counts = []
    for call, want in zip(calls, expected, strict=True):
        assert drawn(*call) == want
        counts.append(len(captures))
    # another number of prompts, shorter texts, and another temperature each need a graph of their own
    assert counts == [1, 1, 1, 2, 3, 4, 5, 5]
    # a call during another has caches of its own, and a copy of the model has no graph
    one, other = (generate(model, texts[:2], 20, Sampler(0.0)) for _ in range(2))
    assert [next(one), next(other), *zip(one, other, strict=True)][2:] == [(x, x) for x in expected[0][1:]]
    assert copy.deepcopy(model).kept_steps is None
    # a graph would read the old weights
    drawn(texts[:2])
    captures.clear()
    with torch.no_grad():
        model.model.norm.weight = torch.nn.Parameter(torch.flip(model.model.norm.weight, [0]) * torch.rand(48))
    found = drawn(texts[:2])
    assert len(captures) == 1
    # shorter texts than a cache has room for at least
    monkeypatch.setattr(replay, "GRAIN", 256)
    captures.clear()
    assert drawn([texts[0][:3]], 5) == drawn([texts[0][:3]], 5)
    assert len(captures) == 1
    model.steps_compiled = False
    assert found == drawn(texts[:2])
