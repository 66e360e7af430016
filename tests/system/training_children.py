"""Runs of training in forked children that kill themselves: run as a script, a JSON job a line on its input.

Each child dies before its n-th file operation, or after some seconds. What it answers is a JSON object a line.
"""

from __future__ import annotations

import builtins
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any


class Operations:
    """Counts what a run does to files, and kills the process before the operation numbered ``last``."""

    def __init__(self, last: int | None) -> None:
        self.last, self.count = last, 0

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self) -> None:
        for name in ("open", "close", "fsync", "replace", "rename", "unlink", "mkdir"):
            setattr(os, name, self._counted(getattr(os, name)))
        real = builtins.open
        builtins.open = lambda file, mode="r", *rest, **more: (  # type: ignore[assignment]
            real(file, mode, *rest, **more)
            if set(mode) <= set("rbt")
            else Written(self._counted(real)(file, mode, *rest, **more), self)
        )

    def _counted(self, operation: Any) -> Any:
        def counted(*given: Any, **named: Any) -> Any:
            self()
            return operation(*given, **named)

        return counted


class Written:
    """A file being written, whose writes may end half-way."""

    def __init__(self, file: Any, operations: Operations) -> None:
        self.file, self.operations = file, operations

    def write(self, data: Any) -> None:
        self.operations()
        self.file.write(data[: len(data) // 2])
        self.file.flush()
        self.operations()
        self.file.write(data[len(data) // 2 :])

    def flush(self) -> None:
        self.operations()
        self.file.flush()

    def fileno(self) -> int:
        return self.file.fileno()

    def __enter__(self) -> Written:
        return self

    def __exit__(self, *_: object) -> None:
        self.operations()
        self.file.close()


def train(job: dict[str, Any], answer: Path) -> None:
    """One run; answers the number of operations done by each step's end, those of its beginning as step 0."""
    from saccade.models.training import Trainer

    operations = Operations(job.get("operation"))
    operations.watch()
    if "seconds" in job:
        timer = threading.Timer(job["seconds"], os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    started, done = time.monotonic(), list[int]()
    try:
        trainer = Trainer(job["out"], job["given"], **job["options"])
        done.append(operations.count)
        done += [operations.count for _ in trainer.run()]
        told: dict[str, Any] = {"operations": done, "took": time.monotonic() - started}
    except (ValueError, OSError) as error:
        told = {"error": str(error)}
    answer.write_text(json.dumps(told))


def serve() -> None:
    """Answers every job of the input, in order."""
    import torch

    # imported once for all children, before any thread is started
    import saccade.models.training  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        answer = Path(f"{job['out']}.answer")
        answer.unlink(missing_ok=True)
        child = os.fork()
        if not child:
            train(job, answer)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        told = json.loads(answer.read_text()) if answer.exists() else {}
        print(json.dumps({"status": status, **told}), flush=True)


if __name__ == "__main__":
    serve()
