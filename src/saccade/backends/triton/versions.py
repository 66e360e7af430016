"""The versions of Triton with which its less stable parts are used: Gluon, for Hopper, and the launcher, for replay."""

from __future__ import annotations

import triton

# All Hopper kernels compile with these versions, and their launchers are known.
COMPILED = ("3.6", "3.7", "3.8", "3.9")
# The test suite has passed on a GPU with these versions: only with them are the kernels and the launchers used.
RUN = ("3.6",)
CURRENT = ".".join(triton.__version__.split(".")[:2])
# the launcher takes the arguments one by one; later versions take one list
FLAT_LAUNCHER = CURRENT == "3.6"


def why_not() -> str:
    """The reason not to use these parts with this version; "" if they are used."""
    if CURRENT in RUN:
        return ""
    known = "they compile, but have not run on a GPU" if CURRENT in COMPILED else "they are not known to compile"
    return f"Triton is {triton.__version__}, with which {known}; they have run with {', '.join(RUN)}"
