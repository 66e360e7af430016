"""The error of a backend that cannot compute a problem, and how to get missing packages."""

from __future__ import annotations

from collections.abc import Iterable


def how_to_install(extra: str) -> str:
    """What to run for the packages of an extra. Indexes of packages may have another project of the name."""
    return f"run pip install '.[{extra}]' in a clone of Saccade"


class Unsupported(Exception):
    """A backend cannot compute a call.

    Saccade never falls back to another backend: the caller named this one, or no other one can read the arrays.

    Attributes:
        backend: name of the backend that refuses, or of an interface, such as torch.
        reasons: every reason, each with what to do instead.

    Examples:
        >>> q = k = v = torch.randn(1, 8, 1, 64)
        >>> try:
        ...     o = saccade.attention(q, k, v, backend="metal")
        ... except saccade.Unsupported as error:
        ...     print(error.backend, len(error.reasons))
        metal 1
    """

    backend: str
    reasons: list[str]

    def __init__(self, backend: str, reasons: Iterable[str]):
        self.backend = backend
        self.reasons = list(reasons)
        # not `super().__init__`, which Dynamo of torch 2.9 does not trace
        self.args = ("\n".join([f"{self.what}:"] + [f"  - {reason}" for reason in self.reasons]),)

    @property
    def what(self) -> str:
        """What happened, without the reasons."""
        if self.backend in ("cpu", "triton", "webgpu", "metal"):
            return f"the {self.backend} backend cannot compute this"
        return f"{self.backend}: this call is refused"

    def __reduce__(self) -> tuple[type[Unsupported], tuple[str, list[str]]]:
        return Unsupported, (self.backend, self.reasons)
