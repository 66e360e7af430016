"""Compares an architecture of transformers on Saccade with the library's own attention: `examine` returns its row."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers_tiny as tiny
from torch.utils._device import _device_constructors

import saccade.integrations.transformers as ours
from saccade import Unsupported
from saccade.integrations.transformers.described import INSTEAD, MOVED

# most parameters of a model that is run
MOST = 12_000_000
# relative error of float64 after some layers
ROUNDING = 1e-9


class Outcome(NamedTuple):
    """A row of the table. outcome: one of `transformers_page.KINDS`, or "error"; reason: why it is not "equal"."""

    model: str
    outcome: str
    reason: str = ""


class NotBuilt(Exception):
    """A tiny model cannot be built, or does not run with any implementation."""


@contextlib.contextmanager
def doubles() -> Iterator[None]:
    """A context in which the parts that models always compute in float32 (softmax, norms, routers) stay in float64."""
    # torch.device as a context stores the functions that it patches: call it before they are replaced here
    _device_constructors()
    to, as_type, softmax = torch.Tensor.to, torch.Tensor.type, torch.nn.functional.softmax

    @functools.wraps(to)
    def wide_to(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.dtype is torch.float64:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {n: torch.float64 if a is torch.float32 else a for n, a in kwargs.items()}
        return to(x, *args, **kwargs)

    def wide_type(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return x if args[:1] == (torch.float32,) and x.dtype is torch.float64 else as_type(x, *args, **kwargs)

    def wide_softmax(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return softmax(x, *args, **{n: a for n, a in kwargs.items() if n != "dtype" or x.dtype is not torch.float64})

    def wide(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, dtype=None, **kwargs: make(
            *args, dtype=torch.float64 if dtype is torch.float32 else dtype, **kwargs
        )

    patched: dict[tuple[Any, str], Any] = {
        **{(torch, name): wide(getattr(torch, name)) for name in ("zeros", "zeros_like")},
        (torch.Tensor, "to"): wide_to,
        (torch.Tensor, "float"): lambda x: wide_to(x, torch.float32),
        (torch.Tensor, "type"): wide_type,
        (torch.nn.functional, "softmax"): wide_softmax,
    }
    MOVED.add(wide_to)
    before = {(where, name): getattr(where, name) for where, name in patched}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    for (where, name), function in patched.items():
        setattr(where, name, function)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
        for (where, name), function in before.items():
            setattr(where, name, function)


def build(name: str, implementation: str, weights: Any = None) -> Any:
    """The tiny model in float64, with new weights or the given ones."""
    kind = tiny.class_of(name)
    torch.manual_seed(0)
    config = tiny.config_of(name)
    if weights is None:
        with torch.device("meta"):
            shape = kind._from_config(tiny.config_of(name), dtype=torch.float64)
        count = sum(x.numel() for x in shape.parameters())
        if count > MOST:
            big = max(shape.named_parameters(), key=lambda item: item[1].numel())
            raise NotBuilt(f"{count:,} parameters, {big[0]} {list(big[1].shape)}")
    more = {"attn_implementation": implementation, "experts_implementation": "eager", "dtype": torch.float64}
    model = kind._from_config(config, **more).double().eval()
    if weights is None:
        tiny.redraw(model)
    else:
        model.load_state_dict(weights)
    return model


def floats(out: Any) -> list[torch.Tensor]:
    """Every floating-point tensor in a result, in order, except caches and losses."""
    if isinstance(out, torch.Tensor):
        return [out] if out.is_floating_point() else []
    if hasattr(out, "items"):
        out = [x for n, x in out.items() if "past_key_values" not in n and "cache" not in n and "loss" not in n]
    return [x for part in out for x in floats(part)] if isinstance(out, (list, tuple)) else []


def forward(model: Any, inputs: dict[str, Any], real: torch.Tensor | None) -> list[torch.Tensor]:
    """The results at the positions of real tokens."""
    arguments = dict(inputs)
    if real is not None:
        arguments["attention_mask"] = real.long()
    torch.manual_seed(0)
    out = floats(model(**arguments))
    if not out:
        raise NotBuilt("the result holds no tensor of numbers")
    if real is None:
        return out
    # arrays of other lengths may contain padding
    return [x[real] if x.shape[:2] == real.shape else x for x in out if x.shape[:2] == real.shape or x.dim() <= 2]


def gradients(model: Any, inputs: dict[str, Any], real: torch.Tensor | None) -> list[torch.Tensor]:
    """Gradients of a random sum of the results by each parameter; 0 for parameters that it does not depend on."""
    model.zero_grad()
    r = torch.Generator().manual_seed(5)
    total = sum(
        (x * torch.randn(x.shape, generator=r, dtype=x.dtype)).sum()
        for x in forward(model, inputs, real)
        if x.requires_grad
    )
    total.backward()  # type: ignore[union-attr]
    return [torch.zeros_like(x) if x.grad is None else x.grad.clone() for x in model.parameters()]


def text(model: Any, inputs: dict[str, Any], real: torch.Tensor | None) -> list[torch.Tensor]:
    """Eight greedy tokens after a prompt that is padded on the left."""
    arguments = {n: x for n, x in inputs.items() if n == "input_ids"}
    if real is not None:
        arguments["attention_mask"] = real.long()
    return [model.generate(**arguments, max_new_tokens=8, min_new_tokens=8, do_sample=False).double()]


def sides() -> dict[str, torch.Tensor]:
    """Booleans [2, T], True for real tokens, with padding on the left and on the right."""
    left = torch.ones(2, tiny.T, dtype=torch.bool)
    left[1, :9] = False
    return {"left padding": left, "right padding": left.flip(1)}


def checks(model: Any, inputs: dict[str, Any]) -> dict[str, Callable[[Any], list[torch.Tensor]]]:
    """The comparisons, by name: functions that take a model."""
    calls: dict[str, Callable[[Any], list[torch.Tensor]]] = {
        "logits": lambda m: forward(m, inputs, None),
        "gradients": lambda m: gradients(m, inputs, None),
    }
    if "input_ids" in inputs and "attention_mask" in inspect.signature(model.forward).parameters:
        for side, real in sides().items():
            calls[side] = lambda m, real=real: forward(m, inputs, real)
        if model.can_generate():
            padded = None if model.config.is_encoder_decoder else sides()["left padding"]
            calls["greedy text"] = lambda m: text(m, inputs, padded)
    return calls


def distance(results: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest number of each array, or to 0.001 of that of all arrays."""
    if [x.shape for x in results] != [x.shape for x in want]:
        return float("inf")
    largest = max((float(x.nan_to_num().abs().max()) for x in want if x.numel()), default=0.0)
    worst = 0.0
    for a, b in zip(results, want, strict=True):
        if not bool((a.isfinite() == b.isfinite()).all()):
            return float("inf")
        if a.numel():
            worst = max(
                worst,
                float((a - b).nan_to_num().abs().max()) / max(float(b.nan_to_num().abs().max()), 1e-3 * largest, 1e-30),
            )
    return worst


def references(name: str) -> tuple[list[Any], dict[str, Any]]:
    """The model with eager attention and with sdpa, as far as it has them, and inputs that it takes."""
    models: list[Any] = []
    inputs: dict[str, Any] = {}
    failed = ""
    for implementation in ("eager", "sdpa"):
        try:
            model = build(name, implementation, models[0].state_dict() if models else None)
            inputs = inputs or takes(model)
            forward(model, inputs, None)
            models.append(model)
        except NotBuilt:
            raise
        except Exception as error:
            failed = failed or f"{type(error).__name__}: {error}"
    if not models:
        raise NotBuilt(failed)
    return models, inputs


def takes(model: Any) -> dict[str, Any]:
    """The first inputs with which a forward pass runs."""
    failed: Exception | None = None
    for inputs in tiny.inputs_of(model):
        try:
            forward(model, inputs, None)
            return inputs
        except Exception as error:
            failed = failed or error
    raise failed or NotBuilt("no inputs known")


def examine(name: str) -> Outcome:
    """The row of a model."""
    with doubles(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _examine(name)


def _examine(name: str) -> Outcome:
    try:
        others, inputs = references(name)
    except Exception as error:
        return Outcome(name, "not built", line(f"{type(error).__name__}: {error}".replace("NotBuilt: ", "")))
    called: list[torch.nn.Module] = []
    attend = ours.attend

    def seen(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        called.append(module)
        return attend(module, *args, **kwargs)

    ours.AttentionInterface.register(ours.NAME, seen)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            model = build(name, ours.NAME, others[0].state_dict())
        row = compare(name, model, others, inputs)
    except Unsupported as error:
        row = Outcome(name, "refused", line(error.reasons[0]))
    except Exception as error:
        row = Outcome(name, "error", line(f"{type(error).__name__}: {error}"))
    finally:
        ours.AttentionInterface.register(ours.NAME, attend)
    return row if row.outcome != "equal" else routing(row, model, called, warned)


def routing(row: Outcome, model: torch.nn.Module, called: list[torch.nn.Module], warned: list[Any]) -> Outcome:
    """The row of a model with equal results, by whether it called Saccade. `routed` and the warning must agree."""
    if called:
        listed = {id(model.get_submodule(n)) for n in ours.routed(model)}
        missed = [type(m).__name__ for m in called if id(m) not in listed]
        return row if not missed else Outcome(row.model, "error", f"{missed[0]} is not in routed(model)")
    if not any("attention" in type(m).__name__.lower() for m in model.modules()):
        return Outcome(row.model, "no attention")
    if not any("attention interface" in str(w.message) for w in warned):
        return Outcome(row.model, "error", "not routed, and no warning")
    return Outcome(row.model, "not routed")


def line(text: str) -> str:
    """A reason on one line, without the advice that all reasons share."""
    text = " ".join(text.split())
    for advice in (INSTEAD, f"pass a 4-D mask, or {INSTEAD}"):
        text = text.removesuffix(f": {advice}")
    return text[:200]


def compare(name: str, model: Any, others: list[Any], inputs: dict[str, Any]) -> Outcome:
    """Run every check that one of the reference models passes."""
    for what, check in checks(model, inputs).items():
        want: list[list[torch.Tensor]] = []
        for other in others:
            try:
                want.append(check(other))
            except Exception:
                continue
        if not want:
            continue
        try:
            results = check(model)
        except Unsupported as error:
            return Outcome(
                name, "refused", ("" if what in ("logits", "gradients") else f"{what}: ") + line(error.reasons[0])
            )
        except Exception as error:
            return Outcome(name, "error", line(f"{what}: {type(error).__name__}: {error}"))
        noise = distance(want[0], want[-1])
        near = min(distance(results, x) for x in want)
        if near > max(ROUNDING, min(8 * noise, 1e-4)):
            return Outcome(name, "error", f"{what}: {near:.1e} away, the others {noise:.1e}")
    return Outcome(name, "equal")
