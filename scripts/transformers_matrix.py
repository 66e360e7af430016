"""What attn_implementation="saccade" gives for every architecture of transformers: writes docs/transformers.md.

    python scripts/transformers_matrix.py [--write] [--again] [MODEL ...]

A row is one of: equal (logits, gradients, padding on both sides and greedy text are those of sdpa or eager attention),
refused (with the reason that is raised), not routed (the model never calls the attention interface). Anything else is
an error, and is never written. Models are tiny and in float64; weights are redrawn at 1.3/sqrt(fan-in), because the
default of 0.02 makes attention nearly uniform and hides what a mask does.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import multiprocessing as mp
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import transformers_tiny as tiny

import saccade.integrations.transformers as ours
from saccade import Unsupported

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "assets" / "transformers.csv"
PAGE = ROOT / "docs" / "transformers.md"
# what a model that is not larger has at most, of parameters
MOST = 6_000_000
ROUNDING = 1e-9


class Outcome(NamedTuple):
    """A row: equal, refused, not routed; "not built" with the reason; or "error"."""

    model: str
    outcome: str
    reason: str = ""


class NotBuilt(Exception):
    """A tiny model cannot be made or run at all."""


def redraw(model: torch.nn.Module) -> None:
    """Weights of 1.3/sqrt(fan-in), scales near 1, gates open."""
    r = torch.Generator().manual_seed(3)
    for name, x in model.named_parameters():
        noise = torch.randn(x.shape, generator=r, dtype=x.dtype)
        with torch.no_grad():
            if x.dim() > 1 and min(x.shape[-2:]) > 1:
                fan_in = x[0].numel() if x.dim() != 3 or "expert" not in name else x.shape[-1]
                x.copy_(noise * 1.3 / max(fan_in, 1) ** 0.5)
            elif name.endswith(("A_log", "dt_bias", ".D")) and bool(torch.isfinite(x).all()):
                continue
            elif "bias" in name or "sink" in name:
                x.copy_(noise * 0.2)
            elif not bool(torch.isfinite(x).all()) or float(x.abs().max()) < 0.1:
                # norms of 1 + weight begin at 0; layer scales at 1e-5, gates at 0, which hide what lies behind them
                x.copy_((0.2 if name.endswith("norm.weight") else 0.7) + 0.1 * noise)
            else:
                x.add_(noise * 0.1)
    for x in model.buffers():
        if x.is_floating_point() and not bool(torch.isfinite(x).all()):
            x.zero_()


@contextlib.contextmanager
def doubles() -> Iterator[None]:
    """Parts that models compute in float32 whatever they are given (softmax, norms, routers) stay in float64."""
    to, softmax = torch.Tensor.to, torch.nn.functional.softmax

    def wide_to(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.dtype is torch.float64:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {n: torch.float64 if a is torch.float32 else a for n, a in kwargs.items()}
        return to(x, *args, **kwargs)

    def wide_softmax(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return softmax(x, *args, **{n: a for n, a in kwargs.items() if n != "dtype" or x.dtype is not torch.float64})

    patched = {
        (torch.Tensor, "to"): wide_to, (torch.Tensor, "float"): lambda x: wide_to(x, torch.float32),
        (torch.nn.functional, "softmax"): wide_softmax,
    }  # fmt: skip
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
    """The tiny model in float64."""
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
        redraw(model)
    else:
        model.load_state_dict(weights)
    return model


def floats(out: Any) -> list[torch.Tensor]:
    """Every tensor of numbers in a result, in order."""
    if isinstance(out, torch.Tensor):
        return [out] if out.is_floating_point() else []
    if hasattr(out, "items"):
        out = [x for n, x in out.items() if "past_key_values" not in n and "cache" not in n and "loss" not in n]
    return [x for part in out for x in floats(part)] if isinstance(out, (list, tuple)) else []


def forward(model: Any, inputs: dict[str, Any], real: torch.Tensor | None) -> list[torch.Tensor]:
    """The result at the positions that are no padding."""
    given = dict(inputs)
    if real is not None:
        given["attention_mask"] = real.long()
    out = floats(model(**given))
    if not out:
        raise NotBuilt("the result holds no tensor of numbers")
    if real is None:
        return out
    # what is of other lengths may hold padding
    return [x[real] if x.shape[:2] == real.shape else x for x in out if x.shape[:2] == real.shape or x.dim() <= 2]


def gradients(model: Any, inputs: dict[str, Any], real: torch.Tensor | None) -> list[torch.Tensor]:
    """Of a random sum of the result, by each parameter; 0 for those not reached."""
    model.zero_grad()
    r = torch.Generator().manual_seed(5)
    total = sum((x * torch.randn(x.shape, generator=r, dtype=x.dtype)).sum() for x in forward(model, inputs, real) if x.requires_grad)
    total.backward()  # type: ignore[union-attr]
    return [torch.zeros_like(x) if x.grad is None else x.grad.clone() for x in model.parameters()]


def text(model: Any, inputs: dict[str, Any], real: torch.Tensor | None) -> list[torch.Tensor]:
    """Eight greedy tokens after a prompt padded on the left."""
    given = {n: x for n, x in inputs.items() if n == "input_ids"}
    if real is not None:
        given["attention_mask"] = real.long()
    return [model.generate(**given, max_new_tokens=8, min_new_tokens=8, do_sample=False).double()]


def sides() -> dict[str, torch.Tensor]:
    """Which tokens are real, padded on the left and on the right."""
    left = torch.ones(2, tiny.T, dtype=torch.bool)
    left[1, :9] = False
    return {"left padding": left, "right padding": left.flip(1)}


def checks(model: Any, inputs: dict[str, Any]) -> dict[str, Callable[[Any], list[torch.Tensor]]]:
    """What is compared: a name, and a function of the model."""
    found: dict[str, Callable[[Any], list[torch.Tensor]]] = {
        "logits": lambda m: forward(m, inputs, None), "gradients": lambda m: gradients(m, inputs, None),
    }  # fmt: skip
    if "input_ids" in inputs and "attention_mask" in tiny.inspect.signature(model.forward).parameters:
        for side, real in sides().items():
            found[side] = lambda m, real=real: forward(m, inputs, real)
        if model.can_generate():
            padded = None if model.config.is_encoder_decoder else sides()["left padding"]
            found["greedy text"] = lambda m: text(m, inputs, padded)
    return found


def distance(found: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """The largest difference, of the largest number there is; gradients count by parameter."""
    if [x.shape for x in found] != [x.shape for x in want]:
        return float("inf")
    largest = max((float(x.nan_to_num().abs().max()) for x in want if x.numel()), default=0.0)
    worst = 0.0
    for a, b in zip(found, want, strict=True):
        if not bool((a.isfinite() == b.isfinite()).all()):
            return float("inf")
        if a.numel():
            worst = max(worst, float((a - b).nan_to_num().abs().max()) / max(float(b.nan_to_num().abs().max()), 1e-3 * largest, 1e-30))
    return worst


def references(name: str) -> tuple[list[Any], dict[str, Any]]:
    """The model with eager attention and with sdpa, whichever of them there is, and inputs that it takes."""
    found: list[Any] = []
    inputs: dict[str, Any] = {}
    failed = ""
    for implementation in ("eager", "sdpa"):
        try:
            model = build(name, implementation, found[0].state_dict() if found else None)
            inputs = inputs or takes(model)
            forward(model, inputs, None)
            found.append(model)
        except NotBuilt:
            raise
        except Exception as error:
            failed = failed or f"{type(error).__name__}: {error}"
    if not found:
        raise NotBuilt(failed)
    return found, inputs


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
        return Outcome(name, "not built", f"{type(error).__name__}: {error}".replace("NotBuilt: ", ""))
    called: list[int] = []
    attend = ours.attend
    ours.AttentionInterface.register(ours.NAME, lambda *a, **k: called.append(1) or attend(*a, **k))
    try:
        model = build(name, ours.NAME, others[0].state_dict())
        return compare(name, model, others, inputs, called)
    except Unsupported as error:
        return Outcome(name, "refused", error.reasons[0])
    except Exception as error:
        return Outcome(name, "error", f"{type(error).__name__}: {error}")


def compare(name: str, model: Any, others: list[Any], inputs: dict[str, Any], called: list[int]) -> Outcome:
    """Every check of a model that the others pass."""
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
            found = check(model)
        except Unsupported as error:
            return Outcome(name, "refused", (f"{what}: " if what not in ("logits", "gradients") else "") + error.reasons[0])
        except Exception as error:
            return Outcome(name, "error", f"{what}: {type(error).__name__}: {error}")
        noise = distance(want[0], want[-1])
        near = min(distance(found, x) for x in want)
        if near > max(ROUNDING, min(8 * noise, 1e-4)):
            return Outcome(name, "error", f"{what}: {near:.1e} away, the others {noise:.1e}")
    return Outcome(name, "equal" if called else "not routed")


def attempt(name: str, limit: float) -> Outcome:
    """`examine` in a forked process, which may take `limit` seconds."""
    here, there = mp.Pipe(False)

    def work() -> None:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        torch.set_num_threads(1)
        there.send(tuple(examine(name)))

    process = mp.get_context("fork").Process(target=work)
    process.start()
    there.close()
    try:
        return Outcome(*here.recv()) if here.poll(limit) else Outcome(name, "not built", f"no result in {limit:.0f} s")
    except EOFError:
        return Outcome(name, "error", "the process died")
    finally:
        process.kill()
        process.join()


def rows() -> dict[str, Outcome]:
    """The committed table."""
    if not TABLE.exists():
        return {}
    with TABLE.open(newline="", encoding="utf-8") as file:
        return {row["model"]: Outcome(**row) for row in csv.DictReader(file)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--write", action="store_true", help="keep the rows, and write the page")
    parser.add_argument("--again", action="store_true", help="models that have a row already, too")
    parser.add_argument("--limit", type=float, default=180, help="seconds for one model")
    given = parser.parse_args()
    known = rows()
    for name in given.models or tiny.model_types():
        if name in known and not (given.again or given.models):
            continue
        row = attempt(name, given.limit)
        print(*row, sep=" | ", flush=True)
        known[name] = row


if __name__ == "__main__":
    main()
