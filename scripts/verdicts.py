"""The chart of verdicts: how many times as fast Saccade is as the best other library, for each device and task."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from charts import Chart, Line
from row_charts import rows, span_text

from saccade.cli.bench.rows import Row


def by_time(ours: Row, peer: Row) -> float:
    """The peer's median time divided by Saccade's."""
    return peer.median / ours.median


def by_note(name: str) -> Callable[[Row, Row], float]:
    """A ratio that the run itself computed, step by step, and wrote into the note of Saccade's row."""
    return lambda ours, peer: float(ours.notes[name])


class Task(NamedTuple):
    """Cases of files that are one row of the chart.

    what: the task, and what it is compared with; files: names in benchmarks/results; chosen: selects rows; ours: the
    providers that are Saccade's; without: providers that compute something else; ratio: times as fast as a peer.
    """

    what: str
    files: Sequence[str]
    chosen: Callable[[Row], bool] = lambda row: True
    ours: Sequence[str] = ("saccade",)
    without: Sequence[str] = ()
    ratio: Callable[[Row, Row], float] = by_time


def kind(*names: str) -> Callable[[Row], bool]:
    return lambda row: row.kind in names


def dense(name: str) -> Callable[[Row], bool]:
    """Calls of one kind on an H100 with a causal mask or none, without documents."""
    return lambda row: row.kind == name and row.mask in ("", "causal()") and "-documents" not in row.case


def cut(name: str) -> Callable[[Row], bool]:
    """Calls of one kind on an H100 with windows or documents."""
    return lambda row: row.kind == name and ("window" in row.mask or "-documents" in row.case)


def pattern(row: Row) -> bool:
    return row.mask.replace("-", "").isalpha()


def longest(row: Row) -> bool:
    return "T=8192" in row.shape


def linear(row: Row) -> bool:
    return row.case.startswith("linear-")


def prompted(row: Row) -> bool:
    """Whether the time to the first token was measured."""
    return "ratio_first" in row.notes


def sparse(row: Row) -> bool:
    return "sparse" in row.case or "block" in row.case


def delta(row: Row) -> bool:
    return row.case in ("gated DeltaNet", "Kimi delta attention")


BOOLEAN = "torch with a boolean mask"
ONE_GPU = ("torch, one GPU, cudnn", "torch, one GPU, flash")
GENERATION = Task("generation, with transformers", ["cpu-generation"], ratio=by_note("ratio"))
TASKS = {
    "Two cores, AMD Zen 5, with torch SDPA": (
        Task("forward", ["cpu-headline"], kind("forward")),
        Task("backward", ["cpu-headline"], kind("backward")),
        Task("decode", ["cpu-decode"]),
        Task(f"windows, strides, {BOOLEAN}", ["cpu-sparse"]),
        Task("1 to 4096 tokens", ["cpu-sweep"]),
    ),
    "Two cores, AMD Zen 4, with torch SDPA": (
        Task("forward", ["zen4-headline"], kind("forward")),
        Task("backward", ["zen4-headline"], kind("backward")),
        Task("decode", ["zen4-decode"], without=("naive",)),
        Task(f"windows, strides, {BOOLEAN}", ["zen4-sparse"]),
        Task("1 to 4096 tokens", ["zen4-sweep"]),
        GENERATION._replace(files=["zen4-generation"]),
        Task("linear attention, torch", ["zen4-recurrent"], linear, without=("torch sdpa",)),
        Task("selective scan, torch, transformers", ["zen4-recurrent-diagonal"]),
    ),
    "Two cores, Intel Xeon, with torch SDPA": (
        Task("forward", ["xeon-headline"], kind("forward")),
        Task("backward", ["xeon-headline"], kind("backward")),
        Task("decode", ["xeon-decode"], without=("naive",)),
        Task("training on documents", ["cpu-training"], ratio=by_note("ratio")),
        Task("training, causal", ["cpu-training"], ours=("saccade, causal",), ratio=by_note("ratio")),
        GENERATION,
        Task("first token, transformers", ["cpu-generation"], prompted, ratio=by_note("ratio_first")),
        Task(f"sparse methods, {BOOLEAN}", ["cpu-methods"], sparse),
        Task("recurrences, transformers", ["cpu-methods"], delta),
    ),
    "One NVIDIA H100, with the best of FlashAttention-4, cuDNN, torch flash and FlexAttention": (
        Task("forward", ["nvidia-h100"], dense("forward")),
        Task("backward, fixed order", ["nvidia-h100"], dense("backward")),
        Task("backward, any order", ["nvidia-h100"], dense("backward"), ours=("saccade, any order",)),
        Task("windows, documents, forward", ["nvidia-h100"], cut("forward")),
        Task("windows, documents, backward", ["nvidia-h100"], cut("backward")),
        Task("sparse patterns, FlexAttention", ["nvidia-h100"], pattern),
        Task("decode", ["nvidia-h100"], kind("decode")),
        Task(
            "recurrences on H100 and H200, flash-linear-attention and mamba-ssm",
            ["nvidia-h100-recurrent", "nvidia-h200-recurrent"],
            longest,
            ours=("saccade", "saccade, narrow states"),
            without=("softmax", "torch conv1d"),
        ),
    ),
    "One NVIDIA H200, models of 124 M and 350 M": (
        Task(
            "training on documents, FlashAttention-4, FlexAttention", ["nvidia-h200-training"], ratio=by_note("ratio")
        ),
        Task("training, causal", ["nvidia-h200-training"], ours=("saccade, causal",), ratio=by_note("ratio")),
        Task("generation, compiled, transformers", ["nvidia-h200-generation"], ours=("saccade, compiled steps",)),
    ),
    "Four NVIDIA H200s, with torch context_parallel": (
        Task("ring, zigzag", ["nvidia-h200x4-distributed"], ours=("saccade, zigzag",), without=ONE_GPU),
        Task(
            "exchange of heads", ["nvidia-h200x4-distributed"], ours=("saccade, heads for positions",), without=ONE_GPU
        ),
    ),
}


def ratios(task: Task) -> list[float]:
    """For each case of a task, how many times as fast Saccade is as the fastest peer in the same file.

    Raises ValueError if no case has both.
    """
    ours: list[tuple[tuple[str, ...], Row]] = []
    peers: dict[tuple[str, ...], list[Row]] = {}
    for file, row in ((name, row) for name in task.files for row in rows(name) if task.chosen(row)):
        # a file is one device
        key = file, row.case, row.kind, row.dtype, row.shape, row.mask
        if not (row.measured or row.rate == row.rate):
            continue
        if row.provider in task.ours:
            ours.append((key, row))
        elif not row.provider.startswith("saccade") and row.provider not in task.without:
            peers.setdefault(key, []).append(row)
    results = [min(task.ratio(row, peer) for peer in peers[key]) for key, row in ours if key in peers]
    if not results:
        raise ValueError(f"{task.what!r}: no case of {task.files} has rows of {task.ours} and of a peer")
    return results


def line(task: Task, group: str) -> Line:
    """The row of a task: the lowest and the highest ratio of its cases, their median, and how many are slower."""
    figures = ratios(task)
    less = sum(x < 1 for x in figures)
    label = f"{task.what} ({less} of {len(figures)} slower)" if less else task.what
    span = min(figures), max(figures)
    return Line(label, span_text(figures), {"saccade": statistics.median(figures)}, span=span, group=group)


def chart() -> Chart:
    """The verdicts of all devices."""
    lines = [line(task, "" if n else group) for group, tasks in TASKS.items() for n, task in enumerate(tasks)]
    note = "A bar goes from the lowest to the highest ratio of the cases, and the dot is their median."
    return Chart("times as fast as the other library; less than 1 is slower", lines, [note], log=True, origin=1)
