"""Compiles and links the core for Windows and macOS with the clang of Zig, whose package contains their C headers.

`python scripts/other_systems.py [SYSTEM ...]` takes files and flags from CMake and prints a line per object file. It
works in build/systems and runs nothing that it compiles. The headers of Python are those of CPython 3.12 or newer on
this machine, for Windows with pyconfig.h from the source of Python that apt knows. The linker finds Python's functions
for Windows in an import library made from the list of the stable ABI (the package abi3info).
"""

from __future__ import annotations

import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "systems"
PACKAGES = FOLDER / "packages"
NEEDS = ("ziglang==0.17.1", "abi3info==2026.9.25")
ZIG = PACKAGES / "ziglang" / "zig"
BESIDE = Path(sys.executable).parent
ARM64, WHEELS = (runpy.run_path(str(ROOT / "scripts" / name)) for name in ("arm64.py", "wheels.py"))
ABI3_FROM: str = WHEELS["ABI3_FROM"]


class System(NamedTuple):
    target: str
    cmake: str
    processor: str


SYSTEMS = {
    "windows-x86_64": System("x86_64-windows-gnu", "Windows", "AMD64"),
    "windows-arm64": System("aarch64-windows-gnu", "Windows", "ARM64"),
    # the oldest macOS of the wheels
    "macos-x86_64": System("x86_64-macos.11.0", "Darwin", "x86_64"),
    "macos-arm64": System("aarch64-macos.11.0", "Darwin", "arm64"),
}


def run(*words: str | Path, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in words], text=True, check=more.pop("check", True), **more)


def download() -> None:
    """Install the compiler, and the list of the stable ABI, from the index that pip uses."""
    if not PACKAGES.exists():
        part = PACKAGES.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(*pip, "--no-deps", "--target", part, *NEEDS)
        part.replace(PACKAGES)


def environment() -> dict[str, str]:
    cache = str(FOLDER / "cache")
    return {**os.environ, "ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}


def clang_words(system: System) -> list[str]:
    """What Zig passes to clang for a system: the target, its headers, and definitions for its C++ library.

    Zig itself would translate -march, and knows only names of its own.
    """
    empty = FOLDER / "empty.cpp"
    empty.touch()
    words = (ZIG, "c++", "-target", system.target, "-c", empty, "-o", empty.with_suffix(".o"))
    done = run(*words, env=environment() | {"ZIG_VERBOSE_CC": "1"}, stderr=subprocess.PIPE)
    said = shlex.split(done.stderr.splitlines()[-1])
    kept = ["-nostdinc", "-nostdinc++"]
    for word, after in itertools.pairwise(said):
        if word == "-target":
            kept += [word, after]
        elif word == "-isystem":
            # relative to this folder, if it contains the compiler
            kept += [word, os.path.abspath(after)]
        elif word.startswith("-D"):
            kept.append(word)
    # what the C++ library of that macOS lacks is an error
    here = "_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS="
    return [word.replace(here + "0", here + "1") if system.cmake == "Darwin" else word for word in kept]


def compiler(system: System, folder: Path) -> Path:
    """A program that compiles like clang and links like Zig."""
    path = folder / "clang++"
    compile_words = shlex.join([str(ZIG), "clang", *clang_words(system)])
    link_words = shlex.join([str(ZIG), "c++", "-target", system.target])
    # left out: libraries of this machine's Python, and a list of Python's symbols, which Zig's linker does not read;
    # on macOS it crashes where it should make a bundle, so it makes a library of the same files
    if system.cmake == "Darwin":
        link_words += " -Wl,-undefined,dynamic_lookup"
    lines = (
        "#!/bin/sh",
        'case " $* " in *" -shared "*|*" -bundle "*)',
        'for word; do shift; case "$word" in',
        '-ldl|-Wl,@*) ;; -bundle) set -- "$@" -shared ;; *) set -- "$@" "$word" ;;',
        "esac; done",
        f'exec {link_words} "$@" ;; esac',
        f'exec {compile_words} "$@"',
    )
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return path


def tool(folder: Path, name: str) -> Path:
    """A program that runs another one of Zig's tools."""
    path = folder / name
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(str(ZIG))} {name} "$@"\n')
    path.chmod(0o755)
    return path


def interpreter() -> Path:
    for version in WHEELS["VERSIONS"]:
        if version >= ABI3_FROM and (python := WHEELS["interpreter"](version)):
            return python
    raise SystemExit(f"no Python {ABI3_FROM} or newer on this machine, whose headers have the stable ABI")


def windows_configuration() -> Path:
    """The file pyconfig.h for Windows, from the source of Python that apt knows."""
    path = FOLDER / "pyconfig.h"
    if path.exists():
        return path
    apt, name = FOLDER / "apt", f"python{ARM64['VERSION']}"
    parts = apt / "sources"
    parts.mkdir(parents=True, exist_ok=True)
    for file in (f for f in Path("/etc/apt").rglob("*") if f.suffix in (".list", ".sources")):
        text = re.sub(r"^(Types: |)deb(?= |$)", r"\1deb-src", file.read_text(), flags=re.M)
        (parts / file.name).write_text(text)
    words = ARM64["apt_get"](apt, **{"Dir::Etc::sourcelist": "/dev/null", "Dir::Etc::sourceparts": parts})
    run(*words, "update")
    run(*words, "source", "--download-only", "--tar-only", name, cwd=apt)
    with tarfile.open(next(apt.glob("*.orig.tar.*"))) as tar:
        member = next(m for m in tar.getmembers() if m.name.endswith("/PC/pyconfig.h"))
        path.write_bytes(tar.extractfile(member).read())
    shutil.rmtree(apt)
    return path


def import_library(system: System, folder: Path) -> Path:
    """What the linker needs instead of python3.dll: the names of the stable ABI of 3.12."""
    sys.path.insert(0, str(PACKAGES))
    from abi3info import DATAS, FUNCTIONS

    oldest = tuple(map(int, ABI3_FROM.split(".")))
    names = [
        item.symbol.name + data
        for items, data in ((FUNCTIONS, ""), (DATAS, " DATA"))
        for item in items.values()
        if (item.added.major, item.added.minor) <= oldest
    ]
    listing = folder / "python3.def"
    listing.write_text("LIBRARY python3.dll\nEXPORTS\n" + "\n".join(names) + "\n")
    machine = "arm64" if system.processor == "ARM64" else "i386:x86-64"
    run(ZIG, "dlltool", "-m", machine, "-d", listing, "-l", folder / "libpython3.a", env=environment())
    return folder / "libpython3.a"


def definitions(system: System, folder: Path) -> dict[str, object]:
    import nanobind

    python = interpreter()
    code = "import sysconfig; print(sysconfig.get_paths()['include'])"
    include = folder / "include"
    shutil.rmtree(include, ignore_errors=True)
    shutil.copytree(run(python, "-c", code, stdout=subprocess.PIPE).stdout.strip(), include)
    defined: dict[str, object] = {
        "CMAKE_SYSTEM_NAME": system.cmake,
        "CMAKE_SYSTEM_PROCESSOR": system.processor,
        "CMAKE_CXX_COMPILER": compiler(system, folder),
        "CMAKE_AR": tool(folder, "ar"),
        "CMAKE_RANLIB": tool(folder, "ranlib"),
        "CMAKE_EXPORT_COMPILE_COMMANDS": "ON",
        # the checks of CMake link nothing
        "CMAKE_TRY_COMPILE_TARGET_TYPE": "STATIC_LIBRARY",
        "Python_EXECUTABLE": python,
        "Python_INCLUDE_DIR": include,
        "nanobind_ROOT": nanobind.cmake_dir(),
        "SACCADE_WERROR": "ON",
    }
    if system.cmake == "Windows":
        shutil.copy(windows_configuration(), include / "pyconfig.h")
        stable = import_library(system, folder)
        # CMake demands a library of this version, too, and reads its version in its name
        own = shutil.copy(stable, folder / f"lib{python.name.replace('.', '')}.a")
        defined |= {"Python_LIBRARY": own, "Python_SABI_LIBRARY": stable, "CMAKE_RC_COMPILER": tool(folder, "rc")}
    else:
        defined |= {"CMAKE_INSTALL_NAME_TOOL": "true"}
    return defined


def check(name: str) -> bool:
    """Compile and link the core for a system, and print what became of each file. Returns whether all succeeded."""
    system, folder = SYSTEMS[name], FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    build, cmake = folder / "core", str(BESIDE / "cmake")
    words = (f"-D{key}={value}" for key, value in definitions(system, folder).items())
    run(cmake, "-S", ROOT, "-B", build, "-G", "Ninja", *words, env=environment(), stdout=subprocess.DEVNULL)
    commands = json.loads((build / "compile_commands.json").read_text())
    words = (cmake, "--build", build, "--target", "_core", "--", "-k", "0")
    done = run(*words, env=environment(), check=False, stdout=subprocess.PIPE)
    failed = "\n".join(line for line in done.stdout.splitlines() if line.startswith("FAILED:"))
    counts: Counter[bool] = Counter()
    for command in commands:
        path = os.path.relpath(build / command["output"], build)
        counts[compiled := (build / path).exists() and path not in failed] += 1
        kind, source = Path(path).parts[1].removesuffix(".dir"), Path(command["file"]).name
        print(f"{name}  {kind}  {source}  {'compiled' if compiled else 'FAILED'}")
    if done.returncode:
        print(done.stdout)
    linked = done.returncode == 0
    files, link = f"{counts[True]} of {counts.total()} files compiled", "linked" if linked else "not linked"
    print(f"{name}: {files}, {link}", flush=True)
    return linked


def main() -> int:
    names = sys.argv[1:] or list(SYSTEMS)
    if unknown := set(names) - set(SYSTEMS):
        raise SystemExit(f"given {', '.join(sorted(unknown))}; expected some of {', '.join(SYSTEMS)}")
    download()
    linked = [check(name) for name in names]
    return int(not all(linked))


if __name__ == "__main__":
    sys.exit(main())
