"""New forms of kernels, which are off until they have run on a GPU; only tests and benchmarks switch them on."""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

TRITON = "saccade.backends.triton"
LATE, STAGES = (f"{TRITON}.launch_decode:{name}" for name in ("LATE_FROM", "MORE_STAGES"))


class Form(NamedTuple):
    """Values of constants other than their defaults, by "module:name", and the kinds of calls that they change.

    A value that is a dict replaces entries of a table. kinds: as in the rows of benchmarks, or the name of a
    recurrence; empty for a form that is not compared with the default.
    """

    values: dict[str, Any]
    kinds: tuple[str, ...] = ()


# no name contains a comma
FORMS = {
    "every Triton": Form({f"{TRITON}.versions:RUN": ("3.6", "3.7", "3.8", "3.9")}),
    "late": Form({LATE: 0}, ("decode",)),
    "late if full": Form({LATE: 1}, ("decode",)),
    "deeper": Form({STAGES: 1}, ("decode",)),
    "late and deeper": Form({LATE: 0, STAGES: 1}, ("decode",)),
}


def of_kind(kind: str) -> list[str]:
    """The names of forms that change calls of a kind."""
    return [name for name, form in FORMS.items() if kind in form.kinds]


@contextmanager
def using(names: Iterable[str]) -> Generator[None]:
    """Switches forms on, and off at the end; recorded calls and their plans are dropped both times."""
    with ExitStack() as stack:
        stack.callback(_forget)
        for place, value in (item for name in names for item in FORMS[name].values.items()):
            module, name = place.split(":")
            owner = importlib.import_module(module)
            before = getattr(owner, name)
            stack.callback(setattr, owner, name, before)
            setattr(owner, name, before | value if isinstance(value, dict) else value)
        _forget()
        yield


def _forget() -> None:
    from ..backends import triton
    from ..frameworks import call

    triton.replay._replay_of.cache_clear()  # pyright: ignore[reportPrivateUsage]
    for cache in (call._calls, triton._replays, triton.hopper._derived):  # pyright: ignore[reportPrivateUsage]
        cache.clear()
