"""The files of the lab's page, by the path at which each is served."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

# media types by suffix; no other files are read
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def files() -> dict[str, bytes]:
    """The content of each file, by its path; index.html is "/"."""
    folder = resources.files("saccade.lab") / "static"
    pages = {f"/{one.name}": one.read_bytes() for one in folder.iterdir() if Path(one.name).suffix in KINDS}
    return {"/": pages.pop("/index.html"), **pages}
