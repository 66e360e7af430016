"""Lazy imports: names of a package that are imported when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def names(package: dict[str, Any], homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package; package: its globals().

    homes maps each name to the submodule that defines it, or to "" if the name is itself a submodule. A name that was
    looked up once is stored in the package.
    """

    def find(name: str) -> Any:
        path, public = package["__name__"], package["__all__"]
        if name not in homes:
            raise AttributeError(f"module {path!r} has no attribute {name!r}; its public names are {', '.join(public)}")
        module = import_module(f"{path}.{homes[name] or name}")
        package[name] = value = getattr(module, name) if homes[name] else module
        return value

    return find
