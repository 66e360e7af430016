"""Builds the sdist, from it a manylinux wheel per CPython (abi3 from 3.12), and tries each wheel without a compiler.

A wheel for arm64 is cross-compiled and tried under qemu, for the Python that scripts/arm64.py has. abi3audit must find
nothing but the stable ABI of CPython in an abi3 wheel.

Interpreters are `python3.X` on PATH, or those of pyenv if its command exists. A missing one is named and skipped.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
arm64 = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "arm64.py")))
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
ABI3_FROM = "3.12"
WORK, DIST = ROOT / "build" / "wheel", ROOT / "dist"
TOOLS = Path(sys.executable).parent
BUILD_NEEDS = ("scikit-build-core", "nanobind", "cmake", "ninja")
COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "clang++", "cl", "cmake", "ninja", "make")


def run(*words: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> None:
    print("+", " ".join(str(w) for w in words), flush=True)
    subprocess.run([str(w) for w in words], check=True, env=env, cwd=cwd)


def answers(python: Path | str, version: str) -> bool:
    code = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    return subprocess.run([str(python), "-c", code], capture_output=True, check=False).returncode == 0


def interpreter(version: str) -> Path | None:
    """The command `python3.X` if it runs, else the newest of that version in pyenv, else None."""
    name = f"python{version}"
    paths = [Path(folder) / name for folder in os.environ["PATH"].split(os.pathsep)]
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=True).stdout.strip()
        paths += sorted((Path(root) / "versions").glob(f"{version}.*/bin/{name}"), reverse=True)
    return next((path for path in paths if path.exists() and answers(path, version)), None)


def venv(python: Path, folder: Path, *needs: str) -> Path:
    """Make a fresh environment with these packages. Returns its folder of programs."""
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", folder)
    if needs:
        run(folder / "bin" / "pip", "install", "--quiet", *needs)
    return folder / "bin"


def sources() -> set[str]:
    """The files that a wheel must contain: all of the package except the sources of the core, which is compiled."""
    words = ("git", "ls-files", "-z", "saccade", ":!saccade/backends/cpu/core")
    return set(subprocess.check_output(words, cwd=ROOT / "src", text=True).split("\0")) - {""}


def build(version: str, python: Path, sdist: Path, chip: str = "", **more: str) -> Path:
    """Build one repaired wheel. It is compiled from the sdist, which proves that the sdist is complete.

    more: environment variables of the build.
    """
    programs = venv(python, WORK / f"build-{version}{chip}", *BUILD_NEEDS)
    raw, repaired = WORK / f"raw-{version}{chip}", WORK / f"repaired-{version}{chip}"
    for folder in (raw, repaired):
        shutil.rmtree(folder, ignore_errors=True)
    env = {**os.environ, "PATH": os.pathsep.join([str(programs), str(TOOLS), os.environ["PATH"]]), **more}
    run(programs / "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", "-w", raw, sdist, env=env)
    run(TOOLS / "auditwheel", "repair", "-w", repaired, next(raw.glob("*.whl")), env=env)
    wheel = next(repaired.glob("*.whl"))
    if missing := sources() - set(zipfile.ZipFile(wheel).namelist()):
        raise SystemExit(f"{wheel.name} lacks {', '.join(sorted(missing))}")
    if "-abi3-" in wheel.name:
        run(TOOLS / "abi3audit", "--strict", "--report", wheel)
    return Path(shutil.copy(wheel, DIST / wheel.name))


def try_without_compiler(version: str, python: Path, wheel: Path) -> None:
    programs = venv(python, WORK / f"try-{version}")
    env = {k: v for k, v in os.environ.items() if k not in {"CC", "CXX", "PYTHONPATH"}} | {"PATH": str(programs)}
    visible = [name for name in COMPILERS if shutil.which(name, path=env["PATH"])]
    if visible:
        raise SystemExit(f"the environment for Python {version} has {visible}; expected no compiler")
    run(programs / "pip", "install", "--quiet", "--only-binary", ":all:", wheel, env=env)
    run(programs / "python", ROOT / "scripts" / "smoke.py", env=env, cwd=WORK)


def build_arm64(python: Path, sdist: Path) -> Path:
    """The wheel for arm64, unpacked and run under qemu."""
    suffix = arm64.CORE.name.removeprefix("_core")
    names = {"_PYTHON_HOST_PLATFORM": "linux-aarch64", "SETUPTOOLS_EXT_SUFFIX": suffix}
    wheel = build(arm64.VERSION, python, sdist, "-arm64", CMAKE_ARGS=" ".join(arm64.cross()), **names)
    folder = WORK / "try-arm64"
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    run(*arm64.python(saccade=folder), ROOT / "scripts" / "smoke.py", cwd=WORK)
    return wheel


def main() -> int:
    DIST.mkdir(exist_ok=True)
    for old in DIST.glob("saccade-*"):
        old.unlink()
    pythons = {version: interpreter(version) for version in VERSIONS}
    run(sys.executable, "-m", "build", "--sdist", "--outdir", DIST)
    sdist = next(DIST.glob("*.tar.gz"))
    wheels: dict[str, Path] = {}
    for version, python in pythons.items():
        if python is None:
            print(f"no Python {version} on this machine: its wheel is neither built nor tried")
        elif tuple(map(int, version.split("."))) <= tuple(map(int, ABI3_FROM.split("."))) or not wheels:
            wheels[version] = build(version, python, sdist)
        else:
            wheels[version] = wheels.get(ABI3_FROM) or build(version, python, sdist)
    for version, wheel in wheels.items():
        python = pythons[version]
        assert python is not None
        try_without_compiler(version, python, wheel)
    print("\n".join(f"Python {version}: {wheel.name} installed and run" for version, wheel in wheels.items()))
    python = pythons[arm64.VERSION]
    if python is None or not arm64.there():
        print("no arm64 machine in software here: its wheel is neither built nor tried; run make arm64")
    else:
        print(f"Python {arm64.VERSION} on arm64: {build_arm64(python, sdist).name} unpacked and run under qemu")
    return int(not wheels)


if __name__ == "__main__":
    sys.exit(main())
