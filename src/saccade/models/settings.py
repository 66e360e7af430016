"""The settings of a training run, and whether other settings agree with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .fields import SETTINGS, check_fields
from .llama_config import LlamaConfig

# the learning rate falls to this share of its peak
FLOOR = 0.1
# settings that runs of earlier versions lack; their defaults are what those runs did
LATER = {"data", "dtype", "compile", "recompute"}
DTYPES = ("float32", "bfloat16")
# minutes and least steps of a run with neither option; after fewer steps, sampled text does not read like code
MINUTES, LEAST_STEPS = 2.0, 600


# steps after which a run that is limited by minutes fixes its number of steps
MEASURED = 24


@dataclass(frozen=True)
class Settings:
    """The settings of a run: the same settings, text and machine give the same losses.

    text: files; data: a folder of tokens, which is made of the installed packages if it is missing. Without both, the
    text is Python's standard library. dtype: of the matrix products; weights and their updates are in float32. compile:
    torch.compile the blocks. recompute: compute the inside of a block again in the backward, which takes less memory.
    `steps` or `minutes` bounds the run. If neither is given, it takes `MINUTES`, and at least `LEAST_STEPS`. Minutes
    become a number of steps once `MEASURED` steps have been timed; the checkpoint stores that number.
    Raises ValueError as `check_settings`.
    """

    text: tuple[str, ...] = ()
    data: str = ""
    model: str = "attention"
    steps: int | None = None
    minutes: float | None = None
    tokenizer: str = "bpe"
    vocab: int = 1024
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    context: int = 512
    batch: int = 2
    lr: float = 4e-3
    warmup: int = 50
    weight_decay: float = 0.1
    clip: float = 1.0
    tie: bool = False
    seed: int = 0
    checkpoint_every: int = 50
    validation_rows: int = 8
    dtype: str = "float32"
    compile: bool = False
    recompute: bool = False

    def __post_init__(self) -> None:
        check_settings(vars(self))

    @property
    def seconds(self) -> float:
        """The time to train, if no number of steps is given."""
        return 60.0 * (MINUTES if self.minutes is None else self.minutes)

    @property
    def least_steps(self) -> int:
        """The number of steps that a run takes even on a slow machine."""
        return LEAST_STEPS if self.steps is None and self.minutes is None else 0

    def lr_at(self, step: int, total: int | None) -> float:
        """The learning rate of a step: it rises linearly to `lr`, then falls by half a cosine to `FLOOR` · `lr`."""
        warmup = self.warmup if total is None else min(self.warmup, max(1, total // 5))
        # the first steps of a run by minutes do not know how many follow: the rate goes on from theirs
        known = 0 if self.steps is not None else MEASURED
        warmup = min(self.warmup, max(warmup, 2 * known))
        if total is None or step < known:
            return self.lr * min(1.0, (step + 1) / self.warmup)
        if step < warmup:
            reached = known / self.warmup
            return self.lr * (reached + (1 - reached) * (step + 1 - known) / (warmup - known))
        done = (step - warmup) / max(1, total - warmup)
        return self.lr * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))

    def config(self, vocab_size: int) -> LlamaConfig:
        """The config of the attention model; the other models have the same number of parameters."""
        return LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.context,
            tie_word_embeddings=self.tie,
            initializer_range=self.width**-0.5,
        )


def located(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings with absolute paths."""
    paths: dict[str, Any] = {}
    if isinstance(settings.get("text"), str | Path):
        raise ValueError(f"text is {str(settings['text'])!r}; expected a tuple of paths")
    if "text" in settings:
        paths["text"] = tuple(str(Path(path).resolve()) for path in settings["text"])
    if settings.get("data"):
        paths["data"] = str(Path(settings["data"]).resolve())
    return {**settings, **paths}


def check_settings(values: Mapping[str, Any], spelled: Callable[[str], str] = str) -> None:
    """Raises ValueError for settings that `fields.SETTINGS` does not allow, or that contradict each other.

    values: settings by their names in `Settings`, whose defaults complete them; spelled: how the caller writes a name.
    """
    check_fields(values, SETTINGS, spelled=spelled)
    known: dict[str, Any] = {one.name: one.default for one in fields(Settings)} | dict(values)

    def spelled_out(*names: str) -> list[str]:
        return [f"{spelled(name)} {known[name]}" for name in names]

    if known["text"] and known["data"]:
        raise ValueError(f"{' and '.join(spelled_out('text', 'data'))} are given; give one of them")
    if known["steps"] is not None and known["minutes"] is not None:
        raise ValueError(f"{' and '.join(spelled_out('steps', 'minutes'))} are given; give one of them")
    if known["dtype"] not in DTYPES:
        raise ValueError(f"{spelled('dtype')} is {known['dtype']!r}; expected one of {', '.join(DTYPES)}")
    if known["model"] == "gpt2" and not (known["tie"] and known["kv_heads"] == known["heads"]):
        raise ValueError(
            f"{', '.join(spelled_out('model', 'heads', 'kv_heads', 'tie'))}; expected as many kv_heads as heads in "
            "GPT-2, and tie, because its head is its embedding"
        )
    for above, below in (("width", "heads"), ("heads", "kv_heads")):
        if known[above] % known[below]:
            larger, smaller = spelled_out(above, below)
            raise ValueError(f"{larger} is not a multiple of {smaller}; change one of them")
    if known["width"] // known["heads"] % 2:
        larger, smaller = spelled_out("width", "heads")
        raise ValueError(f"{larger} for {smaller} makes heads of odd size; rotary positions rotate pairs of numbers")


def agreed(saved: dict[str, Any], options: dict[str, Any]) -> Settings:
    """The saved settings of a run to resume. Raises a ValueError that names all of `options` that differ."""
    if unknown := sorted((saved.keys() ^ {one.name for one in fields(Settings)}) - LATER):
        raise ValueError(f"the settings of the run to resume differ from this version's in {', '.join(unknown)}")
    values: dict[str, Any] = {**saved, "text": tuple(saved["text"])}
    settings = Settings(**values)
    wrong = [name for name, value in options.items() if getattr(settings, name) != value]
    if wrong:
        pairs = ", ".join(f"{name}={options[name]!r} (its own: {getattr(settings, name)!r})" for name in wrong)
        raise ValueError(f"the run to resume has other settings: {pairs}; leave them out")
    return settings
