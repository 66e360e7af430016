"""Installs software devices for the WebGPU tests. `make system` runs this as root; nothing installed is replaced.

There are two independent Vulkan drivers: Mesa's lavapipe, version 25 or later (under build/ if the system's is older),
and SwiftShader, which comes with the browser. Two node packages go under build/: Tint, and the browser's driver.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
# adapter's name -> the value of VK_DRIVER_FILES
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
    """Whether the system's own Mesa is 25 or later: older ones stop long loops too early."""
    version = output("dpkg-query", "-W", "-f", "${Version}", "mesa-vulkan-drivers")
    return not subprocess.run(["dpkg", "--compare-versions", version, "ge", "25"], check=False).returncode


def backported(folder: Path) -> Path:
    """Unpack Mesa's drivers from this release's backports into folder. Returns the root of their files."""
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
    """Write the Vulkan loader's description of a lavapipe of version 25 or later."""
    if described.exists() and Path(json.loads(described.read_text())["ICD"]["library_path"]).exists():
        return
    described.parent.mkdir(parents=True, exist_ok=True)
    root = Path("/") if mesa_is_new() else backported(described.parent)
    content = json.loads(next((root / SYSTEM_MESA.relative_to("/")).glob("lvp_icd*.json")).read_text())
    content["ICD"]["library_path"] = str(next(root.glob("usr/lib/*/libvulkan_lvp.so")))
    described.write_text(json.dumps(content))


def node_packages(folder: Path) -> None:
    """Install the pinned packages of the test page."""
    there = folder / "package.json"
    if there.exists() and there.read_text() == PACKAGES.read_text() and (folder / "node_modules").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    quiet = ("--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error")
    there.unlink(missing_ok=True)
    # package.json is written last: without it the next run starts again
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
            # optional: the tests that need it report what is missing
            print(f"make system: no {name}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
