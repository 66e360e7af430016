"""An option that a backend does not know is refused by every verb, and disables every fast path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

pytest.importorskip("wgpu")

import saccade
from saccade import Unsupported, backends
from saccade.backends.cpu import diagonal as core
from saccade.plan import Limits, make_plan
from saccade.problem import OPTIONS, Problem, Scores
from saccade.recurrent.diagonal import Diagonal, Scan
from saccade.recurrent.problem import Matrix

PLAIN = Problem(1, 256, 256, 4, 4, 64, 64, dtype="bfloat16", scores=Scores(scale=0.1))
DEVICES = {"cpu": "cpu", "triton": "cuda", "webgpu": "webgpu", "metal": "mlx"}


@dataclass(frozen=True)
class Tilted(Scores):
    """Scores with an option that no backend knows."""

    tilt: float = 0.0


@dataclass(frozen=True)
class Twisted(Problem):
    """A problem with an option besides those of its scores."""

    twist: int = 0


INVENTED = {
    "tilt": replace(PLAIN, scores=Tilted(scale=0.1, tilt=1.0)),
    "twist": Twisted(1, 256, 256, 4, 4, 64, 64, dtype="bfloat16", scores=Scores(scale=0.1), twist=1),
}
EVERY_OPTION = replace(
    PLAIN, source="paged", deterministic="batch", return_max=True, return_entropy=True,
    mask=saccade.mask.select([[[[0]]]]),
    quantised=saccade.KVCache(1, 1, 1, 8, quantised="int8").quantised,
    scores=Scores(softcap=1.0, sinks=True, bias=(1, 1, 1, 1), alibi=(1, 4), relative=(1, 4), gates=True, dropout=0.5),
)  # fmt: skip


@dataclass(frozen=True)
class TwistedMatrix(Matrix):
    """A recurrence with an option that no backend knows."""

    twist: int = 0


@dataclass(frozen=True)
class TwistedScan(Scan):
    """A scan with an option that no backend knows."""

    twist: int = 0


OF_MATRIX = (2, 64, 2, 4, 4, 64, 64, "float32", 1.0, 32, "float32")
OF_SCAN = (2, 64, 2, 64, "float32")
RECURRENCES: dict[str, Callable[[str], Any]] = {
    "a matrix, twist": lambda device: TwistedMatrix(*OF_MATRIX, device, twist=1),
    "a matrix, tilt": lambda device: Matrix(*OF_MATRIX, device, frozenset({"tilt"})),
    "a scan, twist": lambda device: TwistedScan(*OF_SCAN, device, frozenset(), 16, 1, 64, twist=1),
    "a scan, tilt": lambda device: Scan(*OF_SCAN, device, frozenset({"tilt"}), 16, 1, 64),
}


@pytest.mark.parametrize(
    "name, what",
    [(name, what) for name in backends.ORDER for what in RECURRENCES if (name, what[:6]) != ("metal", "a scan")],
)
def test_an_unknown_option_or_array_of_a_recurrence_is_refused(name: str, what: str) -> None:
    problem, option = RECURRENCES[what](DEVICES[name]), what.split()[-1]
    assert problem.uses == {option}
    assert backends.recurrent_refusals(backends.load(name, problem.backend_module), problem)[-1] == (
        f"{option} is not computed here: leave backend out, or move the arrays to the CPU"
    )


def test_options_have_names() -> None:
    """Every option is in the table from which refusals and lists of supported options are written."""
    assert EVERY_OPTION.uses == set(OPTIONS)
    assert PLAIN.uses == set()


@pytest.mark.parametrize("name", backends.ORDER)
def test_what_a_backend_takes_is_an_option(name: str) -> None:
    takes = backends.load(name).TAKES
    assert takes.keys() - {"tangent"} == {"forward", "backward", "decode"}
    assert all(options <= set(OPTIONS) for options in takes.values())


@pytest.mark.parametrize(
    "name, kind",
    [
        (name, kind)
        for name in backends.ORDER
        for kind in ("", "recurrent", "diagonal")
        if (name, kind) != ("metal", "diagonal")
    ],
)
def test_optional_parts_are_what_the_protocol_says(name: str, kind: str) -> None:
    """A constant of a module with the name of an optional function is not that function."""
    module = backends.load(name, kind)
    assert isinstance(module.TAKES_TENSORS, bool)
    assert module.THREADS is None or callable(module.THREADS.set_num_threads)
    assert kind or module.append is None or callable(module.append)


@pytest.mark.parametrize("option", INVENTED)
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", backends.ORDER)
def test_an_unknown_option_is_refused(name: str, needs_grad: bool, option: str) -> None:
    problem = replace(INVENTED[option], device=DEVICES[name], needs_grad=needs_grad)
    assert problem.uses == {option}
    verbs = "forward and backward" if needs_grad else "forward and decode"
    assert backends.lacking(backends.load(name), problem) == [
        f"{verbs} with {option} is not computed here: leave it out"
    ]


def test_a_call_with_an_unknown_option_raises() -> None:
    problem = replace(INVENTED["tilt"], dtype="float32")
    with pytest.raises(saccade.Unsupported, match="with tilt is not computed"):
        backends.choose(problem, "cpu")


@pytest.mark.parametrize("option", INVENTED)
def test_an_unknown_option_leaves_fast_paths(option: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from saccade.backends import cpu, triton
    from saccade.backends.triton import hopper
    from saccade.backends.webgpu import tiled

    limits = Limits("any", 64, 64)
    for problem, plain in ((PLAIN, True), (INVENTED[option], False)):
        plan = make_plan(problem, limits)
        assert (cpu.direct(problem, plan, torch.Tensor, False) is not None) == plain
        assert triton.replayable(problem, plan) == plain
        assert triton.gathers(problem) == plain
        declined = [] if plain else [f"they compute no call with {option}"]
        assert [reason for reason in hopper.why_not(problem, plan, "sm_90") if "call with" in reason] == declined
        if option == "tilt":
            assert tiled.options(problem, (), "f32")["plain"] == plain


def test_an_unknown_option_has_no_second_derivative() -> None:
    torch = pytest.importorskip("torch")
    from saccade.frameworks.torch_second import second_derivative

    x = torch.zeros(1, 256, 4, 64)
    for problem in INVENTED.values():
        with pytest.raises(saccade.Unsupported, match=r"second derivatives with t[iw][a-z]+ are not computed"):
            second_derivative(problem, [x] * 6, [x] * 5 + [None] * 3, 0)


def test_an_unknown_option_has_no_tangent() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from saccade.frameworks.torch_run import refuse_tangent

    for name in ("cpu", "triton"):
        refuse_tangent(backends.load(name), PLAIN)
        for problem in INVENTED.values():
            with pytest.raises(Unsupported, match=r"forward-mode derivatives with t[iw][a-z]+ are not computed here"):
                refuse_tangent(backends.load(name), problem)
    for name in ("webgpu", "metal"):
        with pytest.raises(Unsupported, match="forward-mode derivatives are not computed here"):
            refuse_tangent(backends.load(name), PLAIN)


def test_a_new_kind_of_scan_is_refused_by_the_core() -> None:
    problem = RECURRENCES["a scan, twist"]("cpu")
    with pytest.raises(Unsupported, match="no kernels of Diagonal"):
        core._run(Diagonal(*(getattr(problem, field.name) for field in fields(Diagonal))), {}, False)
