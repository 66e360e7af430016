"""Training with the attention of Saccade and of peers: `python benchmarks/training.py rows.csv --data tokens`.

The model of a preset is trained on the same rows of a folder of tokens (`saccade train --preset llama-30m` makes one)
with the same optimiser and seed; only the attention differs. Each run has a process of its own, and their steps take
turns. A row has the median seconds of a step, tokens per second, and the most memory of the process.
`--losses 300` trains so many steps with each of two seeds instead, and writes every tenth loss. `--curve 10` trains one
model for so many minutes and keeps it next to the rows. `--device cuda` adds the peers of GPUs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from arguments import parser
from training_peers import NOT_COMPILED, PEERS

from saccade.cli.bench.clocks import timing
from saccade.cli.bench.machine import Environment, environment, gpu_environment
from saccade.cli.bench.rows import Row, kept, note, write

# steps of a process that are not timed: they compile and allocate
FIRST = 3
SEEDS, LAST, EVERY, LOGGED = 2, 20, 10, 50
# of `--curve`; shorter in a dry run
MINUTE = 1.0
MASKS = {"documents": "causal() & documents(...)", "causal": "causal()"}


def child(job: dict[str, Any]) -> None:
    """One run, in a process of its own: a JSON line per step."""
    from saccade.cli.train import share_cores

    share_cores()
    import torch

    from saccade.models import objective, stores
    from saccade.models.speed import memory, wait
    from saccade.models.training import Trainer

    peer, last = PEERS[job["peer"]], {}
    attention = peer.attention

    def mask_of(_: Any, batch: Any, device: Any) -> Any:
        last["mask"] = peer.mask_of(batch, device)
        return None if job["peer"] in NOT_COMPILED else last["mask"]

    @torch.compiler.disable
    def not_compiled(q: Any, k: Any, v: Any, *_: object, **more: object) -> Any:
        # a mask of Python numbers as an argument would compile the blocks again in each step
        return peer.attention(q, k, v, last["mask"])

    if attention is not None:
        attention = not_compiled if job["peer"] in NOT_COMPILED else attention
        stores.api = SimpleNamespace(attention=attention)  # type: ignore[assignment]
    if peer.mask_of is not None:
        objective.Objective.mask_of = mask_of  # type: ignore[method-assign]

    class Timed(Trainer):
        def _step(self) -> tuple[float, float, float]:
            sys.stdin.readline()
            wait(self.device)
            start = time.perf_counter()
            done = super()._step()
            wait(self.device)
            figures = {"loss": done[0], "seconds": time.perf_counter() - start, "memory": memory(self.device)}
            # without documents, every earlier token of a row is seen
            shown = self._batch
            if not peer.documents:
                shown = shown._replace(positions=np.indices(shown.tokens.shape)[1])
            figures["flops"] = self.meter.flops_of(shown)
            print(json.dumps(figures), flush=True)
            return done

        def _write(self) -> None:
            # the files of a large model take longer than its steps
            pass

    with tempfile.TemporaryDirectory() as folder:
        trainer = Timed(Path(folder) / "run", job["settings"], device=job["device"])
        sys.stdin.readline()
        print(json.dumps({"parameters": trainer.parameters, "peak": trainer.meter.peak}), flush=True)
        for _ in trainer.run():
            pass
        sys.stdin.readline()
        print(json.dumps({"validation": trainer.progress.validation[-1][1]}), flush=True)


class Run:
    """A run in a process of its own, which waits before each step: its figures and its steps. `begin` reads the first.

    The process makes the model, and waits before it measures the machine's peak.
    """

    def __init__(self, peer: str, settings: dict[str, Any], device: str) -> None:
        job = json.dumps({"peer": peer, "settings": settings, "device": device})
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors, "text": True}
        self.process = subprocess.Popen([sys.executable, __file__, "--child", job], **pipes)
        self.figures, self.steps = dict[str, Any](), list[dict[str, Any]]()

    def begin(self) -> None:
        """Read the figures before the first step."""
        self.figures = self._read()

    def first(self) -> None:
        """The steps that are not timed."""
        for _ in range(FIRST):
            self.step()

    def step(self) -> None:
        """One step; a run that has failed takes none."""
        if "error" not in self.figures:
            answer = self._read()
            (self.steps.append if "loss" in answer else self.figures.update)(answer)

    def end(self) -> None:
        """Read the last figures."""
        if "error" not in self.figures:
            self.figures |= self._read()
        self.process.communicate()

    @property
    def error(self) -> str:
        """Why it has not taken all its steps; empty if it has."""
        return self.figures.get("error", "")

    def _read(self) -> dict[str, Any]:
        if self.process.poll() is None:
            print(file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        return {"error": lines[-1][:200] if lines else f"ended with status {self.process.wait()}"}


def trained(peers: list[str], settings: dict[str, Any], args: argparse.Namespace) -> dict[str, Run]:
    """Runs of all peers: those that are on the machine together compile at the same time, then their steps take turns.

    The others begin after the end of these.
    """
    some, rest = peers[: args.together], peers[args.together :]
    runs = {peer: Run(peer, settings, args.device) for peer in some}
    for run in runs.values():
        run.begin()
    with ThreadPoolExecutor() as pool:
        list(pool.map(Run.first, runs.values()))
    for _ in range(FIRST, settings["steps"]):
        for run in runs.values():
            run.step()
    for run in runs.values():
        run.end()
    return runs | (trained(rest, settings, args) if rest else {})


def settings_of(args: argparse.Namespace, context: int, dtype: str, steps: int, seed: int = 0) -> dict[str, Any]:
    """The preset's settings for rows of `context` tokens, with as many tokens per step as the longest context."""
    from saccade.models.presets import preset_settings

    batch = max(1, args.tokens // context)
    changed = {"context": context, "batch": batch, "dtype": dtype, "steps": steps, "seed": seed, "validation_rows": 4}
    changed["checkpoint_every"] = 1 << 30
    return {**preset_settings(args.preset), **changed, **args.changes, "data": str(args.data)}


def chosen_peers(args: argparse.Namespace, documents: bool) -> list[str]:
    """The peers that compute this mask on this device."""
    every = [name for name, peer in PEERS.items() if peer.documents == documents]
    return [name for name in every if PEERS[name].device in ("", args.device) and args.only in name]


def speeds(args: argparse.Namespace, env: Environment, earlier: list[Row]) -> Iterator[Row]:
    """A row for each context, dtype, mask and attention that the earlier rows lack."""
    done = {(row.case, row.dtype, row.mask) for row in earlier}
    for context, dtype, mask in product(args.context, args.dtype, args.masks):
        if (f"{args.preset}-{context}", dtype, MASKS[mask]) not in done:
            yield from compared(args, env, context, dtype, mask)


def compared(args: argparse.Namespace, env: Environment, context: int, dtype: str, mask: str) -> Iterator[Row]:
    """The rows of one mask; Saccade's have their ratios to the best peer, step by step."""
    runs = trained(chosen_peers(args, mask == "documents"), settings_of(args, context, dtype, args.steps), args)
    whole = {peer: run for peer, run in runs.items() if not run.error}
    times = {peer: np.array([step["seconds"] for step in run.steps[FIRST:]]) for peer, run in whole.items()}
    others = [times[peer] for peer in times if not peer.startswith("saccade")]
    # of the machine: some processes measured it while others started
    peak = max((run.figures["peak"] for run in whole.values()), default=1)
    for peer, run in runs.items():
        row = Row(*env, f"{args.preset}-{context}", peer, "train", dtype, mask=MASKS[mask])
        if run.error:
            yield replace(row, note=run.error)
            continue
        token, count = timing(times[peer].tolist()), max(1, args.tokens // context) * context
        ratios = [np.median(other / times[peer]) for other in others if peer.startswith("saccade")]
        values = {
            "parameters": run.figures["parameters"],
            "tokens": count,
            "memory": max(step["memory"] for step in run.steps),
            "ratio": min(ratios, default=0),
            "share": sum(step["flops"] for step in run.steps[FIRST:]) / times[peer].sum() / peak,
        }
        yield replace(row, rate=count / token.median, rate_unit="token/s", note=note(values), **token._asdict())


def curves(args: argparse.Namespace, env: Environment) -> Iterator[Row]:
    """A row for every tenth step of each attention and seed, and one for the mean of the last losses."""
    for context, seed in product(args.context, range(SEEDS)):
        dtype = args.dtype[0]
        settings = settings_of(args, context, dtype, args.losses, seed)
        for peer, run in trained(chosen_peers(args, True), settings, args).items():
            base = Row(*env, f"{args.preset}-{context}", peer, "train", dtype, note=f"seed={seed}")
            if run.error:
                yield base.with_text(run.error)
                continue
            base = replace(base, rate_unit="nats a token")
            for number, step in enumerate(run.steps, 1):
                if number % EVERY == 0:
                    yield replace(base, case=f"step-{number}", rate=step["loss"])
            mean = statistics.fmean(step["loss"] for step in run.steps[-LAST:])
            yield replace(base, rate=mean, note=note({"seed": seed, "validation": run.figures["validation"]}))


def curve(args: argparse.Namespace, env: Environment) -> Iterator[Row]:
    """One run of the preset, kept next to `out`: the mean of every 50 losses, and the loss of the held-out text."""
    from saccade.cli.train import summarise
    from saccade.models.training import Trainer

    context, dtype = args.context[0], args.dtype[0]
    settings = settings_of(args, context, dtype, 0) | {"minutes": args.curve * MINUTE, "validation_rows": 32}
    del settings["steps"]
    trainer = Trainer(args.out.with_suffix(".run"), settings, device=args.device, overwrite=True)
    base = Row(*env, "", "saccade", "train", dtype, rate_unit="nats a token")
    losses = list[float]()
    for step in trainer.run():
        losses.append(step.loss)
        if step.step % LOGGED == 0:
            mean = statistics.fmean(losses[-LOGGED:])
            yield replace(base, case=f"step-{step.step}", median=step.seconds, rate=mean)
    summary = summarise(trainer)
    values = {name: summary[name] for name in ("parameters", "steps", "seconds", "tokens_per_second", "bits_per_byte")}
    yield replace(base, case=f"{args.preset}-{context}-held-out", rate=summary["validation"], note=note(values))


def check_curve(words: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a message if there are options that a curve does not use."""
    if len(args.context) != 1 or len(args.dtype) != 1:
        words.error("--curve is one run: give one --context and one --dtype")
    if args.losses or args.resume or args.only or args.masks != list(MASKS):
        words.error("--curve is one new run of all tokens: leave out --losses, --resume, --only and --masks")


def main() -> None:
    """Measure and write the rows."""
    words = parser(__doc__, resumes=True)
    words.add_argument("--data", type=Path, required=True, help="a folder of tokens with the preset's vocabulary")
    words.add_argument("--preset", default="llama-30m")
    words.add_argument("--context", type=int, nargs="*", default=[1024, 4096])
    words.add_argument("--masks", nargs="*", default=list(MASKS), choices=list(MASKS))
    words.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    words.add_argument("--tokens", type=int, default=4096, help="of a step")
    words.add_argument("--steps", type=int, default=12)
    words.add_argument("--changes", type=json.loads, default={}, help="JSON of settings other than the preset's")
    words.add_argument("--losses", type=int, default=0, help="steps of a run whose losses are compared")
    words.add_argument("--curve", type=float, default=0, help="minutes of one run whose losses are written")
    words.add_argument("--device", default="cpu")
    words.add_argument("--together", type=int, default=len(PEERS), help="runs that have room in the memory")
    args = words.parse_args()
    if args.curve:
        from saccade.cli.train import share_cores

        check_curve(words, args)
        # before torch is imported
        share_cores()
    env = (environment if args.device == "cpu" else gpu_environment)(args.commit)
    earlier = kept(args.out, env) if args.resume and not args.losses and not args.curve else []
    rows = curve(args, env) if args.curve else curves(args, env) if args.losses else speeds(args, env, earlier)
    write(args.out, rows, earlier)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
    else:
        main()
