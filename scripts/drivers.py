"""Devices of software for the WebGPU tests: `make system` runs this as root; what is there already is left alone.

Two Vulkan drivers that share nothing: Mesa's lavapipe, of 25 or later and under build/ where the system's is older,
and SwiftShader, which the browser brings. Two node packages under build/: Tint, and what drives the browser.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
# adapter's name -> the file that VK_DRIVER_FILES is to hold
DRIVERS = {
    "llvmpipe": BUILD / "drivers" / "lavapipe.json",
    "swiftshader": Path("/usr/lib/chromium/vk_swiftshader_icd.json"),
}
NODE = BUILD / "node"
PACKAGES = ROOT / "tests" / "webgpu" / "page" / "package.json"
SYSTEM_MESA = Path("/usr/share/vulkan/icd.d")
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"


def output(*words: str) -> str:
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout


def mesa_is_new() -> bool:
    """Whether the system's own Mesa computes long loops to their end."""
    version = output("dpkg-query", "-W", "-f", "${Version}", "mesa-vulkan-drivers")
    return not subprocess.run(["dpkg", "--compare-versions", version, "ge", "25"], check=False).returncode


def backported(folder: Path) -> Path:
    """Mesa's drivers from this release's backports, unpacked into folder: where their files lie."""
    configured = output("apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)")
    codename = next(
        line.partition("=")[2].strip('"')
        for line in Path("/etc/os-release").read_text().splitlines()
        if line.startswith("VERSION_CODENAME=")
    )
    mirror = next(line.split()[0] for line in configured.splitlines() if line.endswith(f" {codename} main"))
    lists, packages = folder / "lists", folder / "packages"
    shutil.rmtree(packages, ignore_errors=True)
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    packages.mkdir()
    source = folder / "backports.list"
    source.write_text(f"deb [signed-by={KEYS}] {mirror} {codename}-backports main\n")
    options = {"Dir::Etc::sourcelist": source, "Dir::Etc::sourceparts": "-", "Dir::State::Lists": lists}
    options |= {"APT::Sandbox::User": "root"}
    apt = ["apt-get", "-qq", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    subprocess.run([*apt, "update"], check=True)
    wanted = f"mesa-vulkan-drivers/{codename}-backports"
    subprocess.run([*apt, "download", wanted], cwd=packages, check=True)
    for package in packages.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, folder / "mesa"], check=True)
    return folder / "mesa"


def lavapipe(described: Path) -> None:
    """Writes the loader's description of a lavapipe that will do."""
    if described.exists() and Path(json.loads(described.read_text())["ICD"]["library_path"]).exists():
        return
    described.parent.mkdir(parents=True, exist_ok=True)
    root = Path("/") if mesa_is_new() else backported(described.parent)
    content = json.loads(next((root / SYSTEM_MESA.relative_to("/")).glob("lvp_icd*.json")).read_text())
    content["ICD"]["library_path"] = str(next(root.glob("usr/lib/*/libvulkan_lvp.so")))
    described.write_text(json.dumps(content))


def node_packages(folder: Path) -> None:
    """Installs the pinned packages of the test page."""
    there = folder / "package.json"
    if there.exists() and there.read_text() == PACKAGES.read_text() and (folder / "node_modules").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    quiet = ("--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error")
    there.unlink(missing_ok=True)
    # the description arrives last: without it the next run starts again
    wanted = [f"{name}@{version}" for name, version in json.loads(PACKAGES.read_text())["dependencies"].items()]
    subprocess.run(
        ["npm", "install", "--no-save", "--prefix", folder, *quiet, *wanted], check=True, stdout=subprocess.DEVNULL
    )
    shutil.copy(PACKAGES, there)


def main() -> None:
    steps = {"lavapipe": (lavapipe, DRIVERS["llvmpipe"]), "node packages": (node_packages, NODE)}
    for name, (make, place) in steps.items():
        try:
            make(place)
        except (OSError, StopIteration, subprocess.CalledProcessError) as error:
            # optional: the tests that want it say what is missing
            print(f"make system: no {name}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
