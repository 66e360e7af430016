"""What the files of a model say and a checkpoint keeps, and what generation refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from saccade.models.batching import serve  # noqa: E402
from saccade.models.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from saccade.models.loading import load_model  # noqa: E402
from saccade.models.sampling import Sampler, generate  # noqa: E402
from saccade.models.weights import save_weights  # noqa: E402

from .small_llama import VOCABULARY, small  # noqa: E402


@pytest.mark.parametrize(
    ("text", "ends"), [("{}", (2,)), ('{"eos_token_id": null}', (2,)), ('{"eos_token_id": [2, 5]}', (2, 5))]
)
def test_end_tokens_of_generation_take_precedence(text: str, ends: tuple[int, ...], tmp_path: Path) -> None:
    model = small(eos_token_id=2)
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    save_weights(tmp_path / "model.safetensors", model)
    (tmp_path / "generation_config.json").write_text(text)
    assert load_model(tmp_path).config.ends == ends
    for wrong in ('{"eos_token_id": "</s>"}', "[]"):
        (tmp_path / "generation_config.json").write_text(wrong)
        with pytest.raises(ValueError, match=r"generation_config\.json"):
            load_model(tmp_path)


def test_a_checkpoint_of_parameters_without_gradients(tmp_path: Path) -> None:
    """Such as experts that no token has chosen; an optimizer that was used forgets what the file does not have."""
    parts = torch.nn.ModuleDict({"used": torch.nn.Linear(3, 2), "unused": torch.nn.Linear(3, 2)})
    optimizer = torch.optim.AdamW(parts.parameters())
    save_checkpoint(tmp_path / "fresh", parts, optimizer, {})
    parts["used"](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "stepped", parts, optimizer, {})
    sum(part(torch.ones(1, 3)).sum() for part in parts.values()).backward()
    optimizer.step()
    assert load_checkpoint(tmp_path / "stepped", parts, optimizer) == {}
    assert {len(optimizer.state[x]) for x in parts["used"].parameters()} == {3}
    assert not any(optimizer.state.get(x) for x in parts["unused"].parameters())
    load_checkpoint(tmp_path / "fresh", parts, optimizer)
    assert not any(optimizer.state.get(x) for x in parts.parameters())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": None}, "seed is None; expected an integer"),
        ({"tokens": "3"}, "tokens is '3'; expected an integer"),
        ({"sampler": None}, "sampler is None; expected a Sampler"),
        ({"chunk": 1.5}, "chunk is 1.5; expected an integer"),
        ({"first": [[True] * VOCABULARY]}, "first is a list; expected a NumPy array"),
    ],
)
@pytest.mark.parametrize("call", [generate, serve])
def test_arguments_of_other_types_are_refused(call: Any, options: dict[str, Any], words: str) -> None:
    given = {"tokens": 3, "sampler": Sampler(0.0), "first": np.ones((1, VOCABULARY), bool)} | options
    with pytest.raises(TypeError, match=words):
        list(call(small(), [[1, 2]], given.pop("tokens"), given.pop("sampler"), **given))


def test_keep_is_two_numbers() -> None:
    with pytest.raises(ValueError, match="keep is 5; expected sinks of at least 0 and a window"):
        list(generate(small(), [[1, 2]], 3, Sampler(0.0), keep=5))
