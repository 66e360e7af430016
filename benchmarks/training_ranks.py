"""Training over ranks compared with one device: `python benchmarks/training_ranks.py rows.csv --data tokens --ranks 2`.

The model of a preset takes the same steps on one GPU, with FSDP2 over all ranks, where each has rows of its own, and
with context parallelism, where all share every row. Every run has processes of its own. A row has the median seconds of
a step and the tokens per second of all ranks. Its note has the memory of the first rank, the last loss, and the largest
difference of a loss from the run on one GPU.
With --kill, the last rank of another run is killed after a checkpoint and one rank resumes. The row has the seconds
until all ranks have ended. Without GPUs, ranks are processes on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from arguments import parser

from saccade.cli.bench.clocks import timing
from saccade.cli.bench.machine import environment, gpu_environment
from saccade.cli.bench.rows import Row, kept, note, write

# steps that are not timed, because they compile and allocate; steps between checkpoints of the run that is killed
FIRST, SAVED = 3, 3
MASK = "causal() & documents(...)"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def child(job: dict[str, Any]) -> None:
    """One rank of a run, or its only process: a JSON line with its number, and of rank 0 one for every step."""
    from saccade.cli.train import share_cores

    share_cores()
    from saccade.models.parallel import ParallelTrainer
    from saccade.models.speed import memory
    from saccade.models.training import Trainer

    options = {"context_parallel": job["share"]} if job["ranks"] else {"device": DEVICE}

    class Timed(ParallelTrainer if job["ranks"] else Trainer):
        def _step(self) -> tuple[float, float, float]:
            start = time.perf_counter()
            # the loss is read back, so the device has computed the step
            done = super()._step()
            self.took = time.perf_counter() - start
            return done

        def _write(self) -> None:
            # the files of a large model take longer than its steps
            if job["settings"]["checkpoint_every"] == SAVED:
                super()._write()

    trainer = Timed(job["out"], job["settings"], resume=job["resume"], **options)
    print(json.dumps({"rank": int(os.environ.get("RANK", 0)), "pid": os.getpid()}), flush=True)
    for step in trainer.run():
        if trainer.main:
            figures = {"step": step.step, "loss": step.loss, "seconds": trainer.took, "memory": memory(trainer.device)}
            print(json.dumps(figures), flush=True)


def lines_of(job: dict[str, Any], kill_after: int = 0) -> list[dict[str, Any]]:
    """The lines that a run prints. kill_after: the step after which its last rank is killed.

    Raises RuntimeError if the run fails although no rank is killed, or ends well although one is.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(job["ranks"])]
    command = [sys.executable, *(torchrun if job["ranks"] else []), __file__, "--child", json.dumps(job)]
    printed, killed = list[dict[str, Any]](), 0.0
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            printed.append(json.loads(line))
            if kill_after and not killed and printed[-1].get("step") == kill_after:
                pids = {each["rank"]: each["pid"] for each in printed if "rank" in each}
                os.kill(pids[max(pids)], signal.SIGKILL)
                killed = time.perf_counter()
        status = process.wait()
        errors.seek(0)
        if (status != 0) != bool(killed):
            print(errors.read(), file=sys.stderr)
            raise RuntimeError(f"the run ended with status {status}")
    return [*printed, {"ended": time.perf_counter() - killed}] if killed else printed


def settings_of(args: argparse.Namespace, context: int) -> dict[str, Any]:
    """The preset's settings, with a row of `context` tokens for each rank."""
    from saccade.models.presets import preset_settings

    changed = {"context": context, "batch": args.ranks, "steps": args.steps, "validation_rows": args.ranks}
    return {**preset_settings(args.preset), **changed, **args.changes, "data": str(args.data)}


def compared(args: argparse.Namespace, base: Row, context: int, folder: Path) -> Iterator[Row]:
    """The rows of a context."""
    settings = {**settings_of(args, context), "checkpoint_every": 1 << 30}
    ways = {"one": (0, 1), f"FSDP2, {args.ranks}": (args.ranks, 1)}
    ways[f"context parallel, {args.ranks}"] = args.ranks, args.ranks
    alone: list[float] = []
    for number, (name, (ranks, share)) in enumerate(ways.items()):
        out = str(folder / f"{context}-{number}")
        job = {"ranks": ranks, "share": share, "settings": settings, "out": out, "resume": False}
        steps = [line for line in lines_of(job) if "step" in line]
        losses = [step["loss"] for step in steps]
        alone = alone or losses
        time = timing([step["seconds"] for step in steps[FIRST:]])
        notes = {"memory": max(step["memory"] for step in steps), "loss": losses[-1], "tokens": args.ranks * context}
        notes["difference"] = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
        row = replace(base, case=f"{args.preset}-{context}", provider=name, note=note(notes))
        yield replace(row, rate=args.ranks * context / time.median, rate_unit="token/s", **time._asdict())


def killed(args: argparse.Namespace, base: Row, context: int, folder: Path) -> Iterator[Row]:
    """A row of a run that loses a rank after its first checkpoint, and of its end on one rank."""
    settings = {**settings_of(args, context), "checkpoint_every": SAVED}
    whole = {"ranks": args.ranks, "share": 1, "settings": settings, "out": str(folder / "whole"), "resume": False}
    broken = {**whole, "out": str(folder / "broken")}
    expected = [line["loss"] for line in lines_of(whole) if "step" in line]
    ended = lines_of(broken, SAVED + 1)[-1]["ended"]
    steps = [line for line in lines_of({**broken, "ranks": 1, "resume": True}) if "step" in line]
    assert [step["step"] for step in steps] == list(range(SAVED + 1, args.steps + 1))
    differences = [abs(step["loss"] - expected[step["step"] - 1]) for step in steps]
    name = f"FSDP2, {args.ranks}, one killed after step {SAVED + 1}, resumed on one"
    notes = {"resumed after step": SAVED, "difference": max(differences)}
    row = replace(base, case=f"{args.preset}-{context}", provider=name, note=note(notes))
    yield replace(row, rate=ended, rate_unit="s until all ranks ended")


def main() -> None:
    """Measure and write the rows."""
    words = parser(__doc__, resumes=True)
    words.add_argument("--data", type=Path, required=True, help="a folder of tokens with the preset's vocabulary")
    words.add_argument("--preset", default="llama-350m")
    words.add_argument("--ranks", type=int, default=2)
    words.add_argument("--context", type=int, nargs="*", default=[32768, 131072])
    words.add_argument("--steps", type=int, default=8)
    words.add_argument("--changes", type=json.loads, default={}, help="JSON of settings other than the preset's")
    words.add_argument("--kill", action="store_true", help="kill a rank instead")
    args = words.parse_args()
    env = (gpu_environment if DEVICE == "cuda" else environment)(args.commit)
    earlier = kept(args.out, env) if args.resume else []
    done = {row.case for row in earlier}
    contexts = [context for context in args.context if f"{args.preset}-{context}" not in done]
    dtype = settings_of(args, contexts[0])["dtype"] if contexts else ""
    base = Row(*env, "", "", "train", dtype, mask=MASK)

    def rows() -> Iterator[Row]:
        for context in contexts:
            with tempfile.TemporaryDirectory() as folder:
                yield from (killed if args.kill else compared)(args, base, context, Path(folder))

    write(args.out, rows(), earlier)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
    else:
        main()
