"""The views by name, and the answers to their queries. Worker processes import this module; see server.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from .. import __version__, cost
from ..backends.places import PLACES
from ..errors import Unsupported
from . import costs, kernels, masks, online
from .query import FieldError, Fields, Query, plain

View = Callable[[Query], Any]
VIEWS: dict[str, View] = {
    "mask": masks.picture,
    "visits": masks.visits,
    "softmax": online.trace,
    "roofline": costs.roofline,
    "caches": costs.caches,
    "kernel": kernels.job,
}
# an HTTP status, and JSON
Answer = tuple[int, bytes]


def about(model: Path | None) -> dict[str, Any]:
    """The choices that the page's controls offer. model: the folder of the model whose attention maps are shown."""
    return {
        "version": __version__,
        "model": None if model is None else model.resolve().name,
        "places": {device: backend for device, (backend, _) in PLACES.items()},
        "dtypes": masks.DTYPES,
        "devices": {d.name: d.source for d in cost.DEVICES.values()},
        "models": list(cost.MODELS),
        "masks": masks.EXAMPLES,
    }


def answer(view: View, query: Query) -> tuple[int, Any]:
    """(status, content): the view's numbers, or 400, what is wrong with the query, and in which field if known."""
    try:
        fields = Fields(query)
        content = plain(view(fields))
        fields.check_read()
        return 200, content
    except Unsupported as error:
        return 400, {"error": "; ".join(error.reasons)}
    except FieldError as error:
        return 400, {"error": str(error), "field": error.field}
    except (ValueError, TypeError, OverflowError) as error:
        return 400, {"error": str(error)}


def refused_fields(query: tuple[tuple[str, str], ...]) -> Answer | None:
    """The answer to a sorted query that gives a field more than once, of which a view would see one; else None."""
    names = [name for name, _ in query]
    for one, other in pairwise(names):
        if one == other:
            return encoded(400, {"error": f"{one[:40]!r} is given more than once; give it once", "field": one[:40]})
    return None


def encoded(status: int, data: Any) -> Answer:
    """An answer as the server sends it."""
    # a lone surrogate, as in the name of a folder whose bytes are not UTF-8, becomes the escape that JSON has for it
    return status, json.dumps(data, allow_nan=False, ensure_ascii=False).encode(errors="backslashreplace")


def answered(name: str, query: tuple[tuple[str, str], ...]) -> Answer:
    """The answer of one of `VIEWS`."""
    return encoded(*answer(VIEWS[name], dict(query)))
