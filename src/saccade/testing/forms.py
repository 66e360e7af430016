"""New forms of kernels, off in every call until they have run on a GPU; tests and benchmarks alone switch them on."""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

TRITON = "saccade.backends.triton"


class Form(NamedTuple):
    """A value of a module's constant other than its default, and the kinds of calls that it changes.

    A dict replaces entries of a table. kinds: as in the rows of benchmarks; empty for a form that is not compared with
    the default.
    """

    module: str
    name: str
    value: Any
    kinds: tuple[str, ...] = ()


FORMS = {
    "every Triton": Form(f"{TRITON}.versions", "RUN", ("3.6", "3.7", "3.8", "3.9")),
}


def of_kind(kind: str) -> list[str]:
    """The names of forms that change calls of a kind."""
    return [name for name, form in FORMS.items() if kind in form.kinds]


@contextmanager
def using(names: Iterable[str]) -> Generator[None]:
    """Switches forms on, and off at the end; recorded calls and their plans are dropped both times."""
    with ExitStack() as stack:
        stack.callback(_forget)
        for name in names:
            form = FORMS[name]
            module = importlib.import_module(form.module)
            before = getattr(module, form.name)
            stack.callback(setattr, module, form.name, before)
            setattr(module, form.name, before | form.value if isinstance(form.value, dict) else form.value)
        _forget()
        yield


def _forget() -> None:
    from ..backends import triton
    from ..frameworks import call

    for cache in (call._calls, triton._replays, triton.hopper._derived):  # pyright: ignore[reportPrivateUsage]
        cache.clear()
