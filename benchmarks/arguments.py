"""Arguments of the scripts that write rows: `python benchmarks/NAME.py rows.csv [--only WORD] [--part 1/3]`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from importlib import metadata, util
from pathlib import Path
from typing import TypeVar

from saccade.cli.bench.machine import Environment, gpu_environment
from saccade.cli.bench.rows import Row, kept

T = TypeVar("T")
# by peer: the module that it needs, and the package that contains it
PACKAGES = {
    "FlashAttention-4": ("flash_attn", "flash-attn-4"),
    "FlashInfer": ("flashinfer", "flashinfer-python"),
    "fla": ("fla", "fla-core"),
    "mamba-ssm": ("mamba_ssm", "mamba_ssm"),
}


def parser(description: str | None, resumes: bool = False) -> argparse.ArgumentParser:
    """A parser of `out`, --only, --part, --commit, and --resume if it resumes; a script adds its own arguments."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the CSV to write")
    parser.add_argument("--only", default="", help="cases whose name contains this word")
    parser.add_argument("--part", default="1/1", help="a slice of the cases: 2/3 is the second of three")
    parser.add_argument("--commit", default="", help="the commit to write if git reports none")
    if resumes:
        parser.add_argument("--resume", action="store_true", help="keep the cases of this commit in `out`")
    return parser


def gpu_parser(description: str | None, resumes: bool = True) -> argparse.ArgumentParser:
    """`parser`, and --using."""
    words = parser(description, resumes)
    words.add_argument("--using", nargs="*", default=[], help="forms of the kernels that all calls use")
    return words


def started(words: argparse.ArgumentParser) -> tuple[argparse.Namespace, Environment, list[Row]]:
    """The arguments, the environment with the GPU, and the rows that --resume keeps; prints the versions of peers."""
    # other scripts choose the number of threads before torch is imported
    import torch

    args = words.parse_args()
    torch.manual_seed(0)
    env = gpu_environment(args.commit)
    earlier = kept(args.out, env) if vars(args).get("resume") else []
    print(env.driver, *(f"{peer} {version_of(peer)}" for peer in PACKAGES), f"{len(earlier)} rows kept", sep="; ")
    return args, env, earlier


def chosen(items: Iterable[T], part: str) -> list[T]:
    """The items of a slice: 2/3 gives every third item, starting with the second."""
    n, of = map(int, part.split("/"))
    if not 1 <= n <= of:
        raise ValueError(f"--part is {part!r}; expected one of 1/{of} to {of}/{of}")
    return list(items)[n - 1 :: of]


def version_of(provider: str) -> str:
    """The version of a peer's package, "not installed", or "" for providers that are part of torch or Saccade."""
    for peer, (module, package) in PACKAGES.items():
        if provider.startswith(peer):
            try:
                return metadata.version(package) if util.find_spec(module) else "not installed"
            except metadata.PackageNotFoundError:
                return "unknown"
    return ""
