"""Names of a package that are imported when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def names(package: dict[str, Any], homes: Mapping[str, str]) -> Callable[[str], Any]:
    """`__getattr__` of the package with these globals(): name -> the module under it that holds the name.

    A home of "" is the module of that name. A name stays in the package once it was looked up.
    """

    def find(name: str) -> Any:
        path, public = package["__name__"], package["__all__"]
        if name not in homes:
            raise AttributeError(f"module {path!r} has no attribute {name!r}; its public names are {', '.join(public)}")
        module = import_module(f"{path}.{homes[name] or name}")
        package[name] = value = getattr(module, name) if homes[name] else module
        return value

    return find
