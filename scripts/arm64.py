"""An arm64 machine in software: Debian's Python under qemu, the tests' packages for it, and the cross-compiled core.

`python scripts/arm64.py` downloads what is missing into build/arm64 and compiles the core into src/.
`python scripts/arm64.py -m pytest tests/contract` then runs Python with these words, on a chip of qemu's. It needs
qemu-aarch64-static and aarch64-linux-gnu-g++ (`make system`), but no root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "arm64"
TREE, SITE, BUILD = FOLDER / "tree", FOLDER / "site", FOLDER / "core"
QEMU, COMPILER = "qemu-aarch64-static", "aarch64-linux-gnu-g++"
# of the release whose packages apt knows
VERSION = "3.11"
DEBIAN = (f"python{VERSION}", f"libpython{VERSION}-dev", "libstdc++6", "zlib1g")
PACKAGES = ("numpy", "ml_dtypes", "pytest", "pytest-timeout", "hypothesis")
PLATFORMS = ("manylinux2014_aarch64", "manylinux_2_28_aarch64")
CORE = ROOT / "src" / "saccade" / "backends" / "cpu" / f"_core.cpython-{VERSION.replace('.', '')}-aarch64-linux-gnu.so"
# cortex-a72 has neither products of pairs of bfloat16 nor any other extension
CHIPS = {"neonbf16": "max", "neon": "cortex-a72"}


def run(*words: str | Path, **more: object) -> None:
    subprocess.run([str(word) for word in words], check=True, **more)


def there() -> bool:
    """Whether Python runs here, with a compiled core."""
    return all(map(shutil.which, (QEMU, COMPILER))) and (FOLDER / "complete").exists() and CORE.exists()


def apt_get(folder: Path, **options: object) -> list[str]:
    """The command apt-get with a database of its own in a folder, in which nothing is installed."""
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    places = {"Dir::State": folder, "Dir::State::status": folder / "status", "Dir::State::Lists": folder / "lists"}
    others = {"Dir::Cache": folder / "cache", "Debug::NoLocking": "true", "APT::Sandbox::User": "root", **options}
    return ["apt-get", "-qq", *(word for n, value in (places | others).items() for word in ("-o", f"{n}={value}"))]


def download() -> None:
    """Unpack Debian's packages for arm64, and install the tests' packages from the index that pip uses."""
    if (FOLDER / "complete").exists():
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    apt = FOLDER / "apt"
    words = apt_get(apt, **{"APT::Architecture": "arm64", "APT::Architectures": "arm64"})
    run(*words, "update")
    run(*words, "install", "-y", "--no-install-recommends", "--download-only", *DEBIAN)
    for package in (apt / "cache" / "archives").glob("*.deb"):
        run("dpkg-deb", "-x", package, TREE)
    shutil.rmtree(apt)
    where = [word for name in PLATFORMS for word in ("--platform", name)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    what = ["--only-binary=:all:", "--python-version", VERSION, "-c", ROOT / "constraints.txt", *PACKAGES]
    run(*pip, "--target", SITE, *where, *what)
    (FOLDER / "complete").touch()


def cross() -> list[str]:
    """The words for CMake by which it compiles for arm64."""
    include = TREE / "usr" / "include"
    defined = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_CXX_COMPILER": COMPILER,
        "CMAKE_CXX_FLAGS": f"-isystem{include}",
        "Python_INCLUDE_DIR": include / f"python{VERSION}",
        "SACCADE_WERROR": "ON",
    }
    return [f"-D{name}={value}" for name, value in defined.items()]


def compile_core() -> None:
    """Compile what changed of the core, into src/."""
    if not (BUILD / "build.ninja").exists():
        words = (*cross(), f"-DPython_EXECUTABLE={sys.executable}")
        run("cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", *words, stdout=subprocess.DEVNULL)
    run("cmake", "--build", BUILD, stdout=subprocess.DEVNULL)
    # the build names it for the Python that runs here; replaced at once, because a process may have the old one open
    fresh = CORE.with_suffix(".part")
    shutil.copy(next(BUILD.glob("_core*.so")), fresh)
    fresh.replace(CORE)


def python(chip: str = "max", saccade: Path = ROOT / "src") -> list[str]:
    """The command that runs Python on a chip of qemu's, with the package of a folder."""
    paths = os.pathsep.join(map(str, (saccade, SITE)))
    settings = {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    words = [word for name, value in settings.items() for word in ("-E", f"{name}={value}")]
    return [QEMU, "-cpu", chip, "-L", str(TREE), *words, str(TREE / "usr" / "bin" / f"python{VERSION}")]


def main() -> int:
    if missing := [name for name in (QEMU, COMPILER, "apt-get") if not shutil.which(name)]:
        print(f"no {' and no '.join(missing)}: run make system on Debian", file=sys.stderr)
        return 1
    download()
    compile_core()
    return subprocess.run([*python(), *sys.argv[1:]], cwd=ROOT, check=False).returncode if sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
