"""The run on a machine with one NVIDIA GPU, in parts of less than nine minutes.

`python3 scripts/gpu_run.py` lists the parts; `python3 scripts/gpu_run.py FOLDER 3 12` runs two of them. Rows and logs
are written as they come, to FOLDER/VERSION with the version of Triton. A part that reaches its limit is interrupted.
Started again, it continues: tests that passed at this commit are left out, and so are cases that have rows of it. The
machine needs no git and no network; peers that are not installed are named in the output and in the notes of rows.
With `--gpus 0,1,0,1`, four parts run at a time, one for each number, on the GPU of that number: for tests, because
measurements need the machine alone.
Parts of training read folders of tokens, which `saccade train --preset NAME --data build/tokens/NAME` makes on any
machine.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# short ones, because those that an end of the machine interrupts have no log
SLICES = 40
# each random configuration compiles kernels of its own: all would take hours
TESTS = "--deselect tests/contract/test_fuzz.py::test_many_random_configurations --every 5"


class Part(NamedTuple):
    """Commands and the minutes that they are expected to take; {rows} is a CSV in the folder of the run."""

    name: str
    minutes: float
    commands: tuple[str, ...]


def tests() -> Iterator[Part]:
    for n in range(1, SLICES + 1):
        name = f"{n}-of-{SLICES}"
        passed = f"--passed {{folder}}/passed-{{commit}}-{name}.txt"
        words = f'make test-gpu PART={n}/{SLICES} COMMIT={{commit}} LOGS={{folder}} MORE="{TESTS} {passed} {{using}}"'
        yield Part(f"tests-{name}", 2, (f"{words} {{workers}}",))


def suite(name: str, words: str, minutes: float) -> Part:
    return Part(name, minutes, (f"nvidia.py {{rows}} --resume --forms --using {{forms}} --suite {words}",))


def recurrent(part: str) -> Part:
    return Part(f"recurrent-{part[0]}", 7, (f"nvidia_recurrent.py {{rows}} --resume --part {part} --using {{forms}}",))


def training(preset: str, together: int, minutes: float) -> Part:
    # a GPU of 80 GB has room for what the preset computes again, and for so many runs together
    words = f"{trained(preset)} --resume --together {together}"
    words += """ --context 8192 1024 32768 --changes '{{"recompute": false}}'"""
    return Part(f"training-{preset}", minutes, (words,))


def trained(preset: str) -> str:
    words = f"training.py {{rows}} --device cuda --preset {preset} --dtype bfloat16 --tokens 32768"
    return f"{words} --commit {{commit}} --data {{tokens}}/{preset}"


PARTS = (
    *tests(),
    Part("tests-log", 1, (f"make test-gpu-log SLICES={SLICES} LOGS={{folder}}",)),
    Part("hopper-check", 6, ("hopper_forward.py check", "hopper_backward.py check")),
    Part("hopper-backward", 6, ("hopper_backward.py bench {rows}",)),
    suite("dense-forward", "dense --only forward", 5),
    suite("dense-backward", "dense --only backward", 6),
    Part("eight-bits", 5, ("eight_bits.py {rows} --using {forms}",)),
    suite("eight-bits-rates", "'eight bits'", 2),
    suite("decode", "decode", 5),
    suite("sparse-1", "sparse --part 1/3", 6),
    suite("sparse-2", "sparse --part 2/3", 6),
    suite("sparse-3", "sparse --part 3/3", 6),
    suite("patterns-forward", "patterns --only forward", 6),
    suite("patterns-backward", "patterns --only backward", 7),
    suite("scores", "scores", 6),
    suite("host", "host first", 4),
    recurrent("1/4"),
    recurrent("2/4"),
    recurrent("3/4"),
    recurrent("4/4"),
    Part("models", 4, ("nvidia_models.py {rows} --resume --using {forms}",)),
    training("llama-30m", 4, 6),
    training("gpt2-124m", 4, 8),
    training("llama-350m", 2, 12),
    Part("curve", 12, (f"{trained('gpt2-124m')} --context 1024 --curve 10",)),
    Part("generation", 8, ("generation.py {rows} --device cuda --commit {commit} --resume",)),
)


def triton_version(folder: str) -> str:
    """The version of Triton in a folder, or of the installed one."""
    if not folder:
        return metadata.version("triton")
    text = (Path(folder) / "triton" / "__init__.py").read_text(encoding="utf-8")
    return re.findall(r"__version__ = ['\"](.*?)['\"]", text)[0]


def commit_of(name: str) -> str:
    """The commit, also written to build/commit, which names it in rows on a machine without git."""
    if not name:
        words = ["git", "rev-parse", "--short=12", "HEAD"]
        name = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "commit").write_text(name + "\n", encoding="utf-8")
    return name


def words_of(command: str, names: dict[str, str], dry: bool) -> list[str]:
    """The words of a command; the name of a benchmark becomes a call of Python."""
    words = shlex.split(command.format(**names))
    if words[0] == "make":
        less = " --collect-only -q" if dry else ""
        return [w + less * w.startswith("MORE=") for w in words] + [f"PYTHON={sys.executable}"] + ["WORKERS=0"] * dry
    return [sys.executable, *["benchmarks/dry.py"] * dry, f"benchmarks/{words[0]}", *words[1:]]


def run(words: list[str], log: Path, env: dict[str, str], seconds: float) -> int:
    """The status of a command, 124 if the limit was reached; its output goes to the screen and to the log."""
    with log.open("a", encoding="utf-8") as file:
        print("$", shlex.join(words), file=file, flush=True)
        tee = subprocess.Popen(["tee", "-a", str(log)], stdin=subprocess.PIPE)
        out = {"stdout": tee.stdin, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(words, cwd=ROOT, env=env, start_new_session=True, **out)
    status = None
    for number, patience in ((None, seconds), (signal.SIGINT, 15), (signal.SIGKILL, 5)):
        if number is not None:
            os.killpg(process.pid, number)
        try:
            status = process.wait(patience)
            break
        except subprocess.TimeoutExpired:
            continue
    tee.communicate()
    return status if number is None and status is not None else 124


def main() -> None:
    """List or run parts."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("folder", nargs="?", type=Path)
    words.add_argument("parts", nargs="*", type=int)
    words.add_argument("--commit", default="", help="its name, where git is missing")
    words.add_argument("--triton", default="", help="a folder with another Triton: an unpacked wheel")
    words.add_argument("--peers", default="", help="a folder with packages of peers")
    words.add_argument(
        "--tokens", type=Path, default=ROOT / "build" / "tokens", help="a folder of tokens for each preset, by its name"
    )
    words.add_argument("--gpus", default="", help="numbers of GPUs, 0,1,0,1 for two parts at a time on each of two")
    words.add_argument("--workers", type=int, default=14, help="processes of a part that tests")
    words.add_argument("--limit", type=float, default=525, help="seconds of a part")
    words.add_argument("--dry", action="store_true", help="on the CPU, with stand-ins; tests are only collected")
    args = words.parse_args()
    if args.folder is None:
        for n, part in enumerate(PARTS, 1):
            print(f"{n:3} {part.name:20} about {part.minutes} minutes")
        return
    commit, version = commit_of(args.commit), triton_version(args.triton)
    folder = args.folder.resolve() / version
    folder.mkdir(parents=True, exist_ok=True)
    # kernels and launchers of a Triton that has not passed the suite yet are switched on
    forms = "'every Triton'" if args.triton else ""
    names = {"folder": str(folder), "commit": commit, "forms": forms}
    names["tokens"] = str(args.tokens.resolve())
    names["using"] = f"--forms {forms}" if forms else ""
    names["workers"] = f"WORKERS={args.workers}"
    path = [args.triton, str(ROOT / "src"), args.peers, os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONUNBUFFERED": "1"}
    gpus: SimpleQueue[str] = SimpleQueue()
    for number in args.gpus.split(","):
        gpus.put(number)

    def status_of(part: Part) -> int:
        gpu, end, worst = gpus.get(), time.monotonic() + args.limit, 0
        here = {**env, "CUDA_VISIBLE_DEVICES": gpu} if gpu else env
        for command in part.commands:
            done = words_of(command, {**names, "rows": str(folder / f"{part.name}.csv")}, args.dry)
            status = run(done, folder / f"{part.name}.log", here, end - time.monotonic())
            print(f"{part.name}: {shlex.join(done)}: status {status}, Triton {version}, commit {commit}", flush=True)
            worst = worst or status
        gpus.put(gpu)
        return worst

    chosen = [PARTS[n - 1] for n in args.parts]
    with ThreadPoolExecutor(gpus.qsize()) as pool:
        statuses = list(pool.map(status_of, chosen))
    failed = [part.name for part, status in zip(chosen, statuses, strict=True) if status]
    sys.exit(f"failed or interrupted: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
