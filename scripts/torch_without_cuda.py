"""Makes a wheel of torch that was built for CUDA installable without CUDA, for tests on a CPU.

The wheels of most versions are built for CUDA, and need gigabytes of its libraries even where no GPU is used. Each such
library is replaced by one whose functions return 100, CUDA's "no device is detected", or a text where CUDA's returns
one. torch then finds no GPU, and computes on the CPU with its own code, unchanged.

`python scripts/torch_without_cuda.py VERSION` writes the wheel for this Python into build/versions/wheels.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from pathlib import Path

OF_CUDA = re.compile(r"(cu|nv|nccl|pnccl|_nv|__cu)")
OF_TEXT = re.compile(".*Get(Error|Status)(String|Name)|ncclGetLastError")


def wheel(version: str, python: Path, folder: Path) -> Path:
    """The wheel of this version for this interpreter, in a folder, made unless it is there."""
    code = "import sys; print('cp%d%d' % sys.version_info[:2])"
    tag = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    if ready := sorted(folder.glob(f"torch-{version}*-{tag}-*.whl")):
        return ready[0]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        words = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", work]
        subprocess.run([str(python), *words, f"torch=={version}"], check=True)
        (source,) = Path(work).glob("*.whl")
        tree = Path(work, "tree")
        shutil.unpack_archive(source, tree, "zip")
        # which does not keep this bit
        (tree / "torch" / "bin" / "torch_shm_manager").chmod(0o755)
        (metadata,) = tree.glob("*.dist-info/METADATA")
        lines = metadata.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if not needs_cuda(line)]
        if kept != lines:
            metadata.write_text("".join(kept), encoding="utf-8")
            replace(tree / "torch" / "lib")
            with zipfile.ZipFile(source, "w") as file:
                for path in sorted(tree.rglob("*")):
                    file.write(path, path.relative_to(tree))
        return source.rename(folder / source.name)


def needs_cuda(line: str) -> bool:
    return bool(re.match(r"Requires-Dist: (nvidia|cuda|triton)", line))


def replace(libraries: Path) -> None:
    """Put a library next to torch's own for each of CUDA's that they need."""
    functions: dict[str, set[str]] = defaultdict(set)
    needed: set[str] = set()
    for file in libraries.glob("*.so*"):
        words = ["readelf", "--wide", "--dyn-syms", "--dynamic", str(file)]
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        needed |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", text))
        for name in re.findall(r" UND (\S+)", text):
            function, _, version = name.partition("@")
            if OF_CUDA.match(function):
                functions[version.lstrip("@")].add(function)
    everything = set().union(*functions.values())
    for library in sorted(needed):
        if not re.match(r"lib(cu|nv|nccl)", library) or (libraries / library).exists():
            continue
        # functions are asked for from a version that is named like their library, or from none
        mine = functions.get(library, everything)
        with tempfile.TemporaryDirectory() as folder:
            source, script = Path(folder, "none.c"), Path(folder, "versions")
            source.write_text("".join(body(name) + "\n" for name in sorted(mine)))
            script.write_text(f"{library} {{ global: *; }};\n" if library in functions else "{ global: *; };\n")
            words = ["cc", "-shared", "-fPIC", "-w", "-fno-builtin", str(source), f"-Wl,-soname,{library}"]
            subprocess.run([*words, f"-Wl,--version-script={script}", "-o", str(libraries / library)], check=True)


def body(name: str) -> str:
    """The function of this name in C."""
    kind, value = ("const char *", '"no CUDA"') if OF_TEXT.fullmatch(name) else ("int ", "100")
    return f"{kind}{name}(void) {{ return {value}; }}"


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    print(wheel(sys.argv[1], Path(sys.executable), root / "build" / "versions" / "wheels"))
