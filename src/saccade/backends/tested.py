"""What the Triton kernels have run on, and what they only compile for. Needs neither torch nor Triton."""

from __future__ import annotations

# The tests compile every kernel with these versions of Triton.
TRITON_COMPILED = ("3.6", "3.7", "3.8", "3.9")
# The test suite has passed on a GPU with these versions. The Hopper kernels and replayed calls are used only with them.
TRITON_RUN = ("3.6", "3.9")
# The tests compile the portable kernels for these chips; each with a GPU that has it, and its multiprocessors.
CHIPS = {
    "sm_80": ("A100", 108),
    "sm_86": ("RTX 3090", 82),
    "sm_89": ("RTX 4090", 128),
    "sm_90": ("H100, H200", 132),
    "sm_100": ("B200", 148),
    "sm_120": ("RTX 5090", 170),
    "gfx942": ("MI300X", 304),
}
# the test suite has passed on these
CHIPS_RUN = ("sm_90",)
REPORT = "docs/support.md#report-a-run"


def triton_status(version: str) -> str:
    """What is known about a version of Triton, such as "3.6.0"."""
    minor = ".".join(version.split(".")[:2])
    if minor in TRITON_RUN:
        return version
    return f"{version}: {triton_known(minor)}; to report a run, see {REPORT}"


def triton_known(minor: str) -> str:
    """What is known about a version of Triton that is not in `TRITON_RUN`."""
    return "compiled, never run on a GPU" if minor in TRITON_COMPILED else "not known to compile the kernels"


def chip_status(chip: str) -> str:
    """What is known about the kernels on a chip, such as "sm_90"."""
    if chip in CHIPS_RUN:
        return chip
    known = "compiled, not run" if chip in CHIPS else "never compiled for it"
    return f"{chip}: {known}; to report a run, see {REPORT}"


def summary() -> dict[str, str]:
    """The versions of Triton and the chips that the kernels have run on, and those for which they only compile."""
    chips = {chip: f"{chip} ({names})" for chip, (names, _) in CHIPS.items()}
    compiled = [version for version in TRITON_COMPILED if version not in TRITON_RUN]
    return {
        "have run": f"with Triton {', '.join(TRITON_RUN)} on {', '.join(chips[chip] for chip in CHIPS_RUN)}",
        "only compile": f"with Triton {', '.join(compiled)}",
        "and for": ", ".join(text for chip, text in chips.items() if chip not in CHIPS_RUN),
        "report a run": REPORT,
    }
