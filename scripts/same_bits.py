"""Compares the bits that two checkouts compute: `python scripts/same_bits.py OTHER --backend cpu --calls 500`.

Each checkout computes the same random calls (forward, decode and backward) in a process of its own. Metal's kernels run
in the emulator, and Triton's in the interpreter if there is no GPU. Prints the differences, and exits with 1 if there
are any.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="another checkout, with its CPU core")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--step", type=int, default=1, help="take only every n-th random call")
    args = parser.parse_args()
    mine, theirs = (computed(root, args) for root in (ROOT, args.other.resolve()))
    differ = [n for n in mine if mine[n] != theirs[n]]
    for n in differ:
        names = [name for name in mine[n] if mine[n].get(name) != theirs[n].get(name)]
        print(f"call {n}: {', '.join(names)}: {[mine[n][x] for x in names]} and {[theirs[n].get(x) for x in names]}")
    refused = sum("error" in call for call in mine.values())
    print(
        f"{args.backend}: {len(mine) - len(differ)} of {len(mine)} calls have the same bits, {refused} refused by both"
    )
    sys.exit(bool(differ))


def computed(root: Path, args: argparse.Namespace) -> dict[str, dict[str, str]]:
    """For each call, a digest of every result, or the error."""
    words = [sys.executable, __file__, str(root), "--child", args.backend, str(args.calls), str(args.step)]
    interpreted = args.backend == "triton" and not torch.cuda.is_available()
    more = {"TRITON_INTERPRET": "1"} if interpreted else {}
    run = subprocess.run(words, env={**os.environ, **more}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout)


def child(root: str, backend: str, calls: int, step: int) -> None:
    # otherwise an editable install of another checkout is imported
    sys.meta_path[:] = [finder for finder in sys.meta_path if "Scikit" not in type(finder).__name__]
    sys.path.insert(0, f"{root}/src")
    import saccade
    from saccade.testing.fuzz import random_case, random_dtype
    from saccade.testing.inputs import NEEDLES, make
    from saccade.testing.run import computed

    assert Path(saccade.__file__).is_relative_to(root), saccade.__file__
    if backend == "metal":
        from saccade.backends import metal
        from saccade.testing.metal.runtime import Emulator

        metal.install(Emulator())
    kinds = ("random", *NEEDLES)
    digests: dict[int, dict[str, str]] = {}
    for n in range(0, calls * step, step):
        try:
            x = make(random_case(n), random_dtype(n), kind=kinds[n % len(kinds)])
            digests[n] = {name: digest(array) for name, array in computed(x, backend).items()}
        except (saccade.Unsupported, ValueError) as error:
            digests[n] = {"error": str(error)}
    json.dump(digests, sys.stdout)


def digest(array: Any) -> str:
    """A hash of an array's shape and bits. All NaN count as equal."""
    import numpy as np

    words = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").copy()
    words[np.isnan(np.asarray(array, np.float64)).reshape(words.shape)] = 0
    return hashlib.sha256(words.tobytes() + str((array.shape, array.dtype)).encode()).hexdigest()[:12]


if __name__ == "__main__":
    if sys.argv[2:3] == ["--child"]:
        child(sys.argv[1], sys.argv[3], *map(int, sys.argv[4:]))
    else:
        main()
