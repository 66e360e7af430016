"""The server of `saccade lab`: the page's own files, and the numbers of its views as JSON, for this machine alone."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Callable
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import anyio.to_thread
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .. import __version__, backends, cost
from ..errors import Unsupported
from . import costs, kernels, masks, online
from .asked import Asked, plain
from .guard import Guard

ADDRESS = "127.0.0.1"
# of the page, by name: nothing outside this table is ever read from disk
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# connections that wait to be accepted; views computed at a time; answers kept
BACKLOG, AT_A_TIME, KEPT = 2048, 2, 16
OPEN_FILES = 8192

View = Callable[[Asked], Any]
VIEWS: dict[str, View] = {
    "mask": masks.picture, "visits": masks.visits, "softmax": online.trace, "roofline": costs.roofline,
    "caches": costs.caches, "kernel": kernels.job,
}  # fmt: skip


def files() -> dict[str, bytes]:
    """The page's files by the path that each is served at."""
    folder = resources.files("saccade.lab") / "static"
    found = {f"/{one.name}": one.read_bytes() for one in folder.iterdir() if Path(one.name).suffix in KINDS}
    return {"/": found.pop("/index.html"), **found}


def application(hosts: tuple[str, ...], model: Path | None = None) -> Any:
    """The ASGI application. hosts: as of `Guard`. model: the folder whose attention maps are shown.

    Raises as `Model` for a folder that holds none.
    """
    views = {"about": lambda asked: about(model), **VIEWS}
    if model is not None:
        from .maps import Model

        views["maps"] = Model(model).maps
    at_a_time = anyio.CapacityLimiter(AT_A_TIME)

    @lru_cache(maxsize=KEPT)
    def answered(name: str, asked: tuple[tuple[str, str], ...]) -> tuple[int, bytes]:
        status, data = answer(views[name], dict(asked))
        return status, json.dumps(data, allow_nan=False, ensure_ascii=False).encode()

    async def view(request: Request) -> Response:
        name, asked = request.path_params["view"], tuple(sorted(request.query_params.items()))
        if name not in views:
            why = "no model is shown: start saccade lab --model DIR" if name == "maps" else "there is no such view"
            return JSONResponse({"error": why}, 404, {"Cache-Control": "no-store"})
        status, body = await anyio.to_thread.run_sync(answered, name, asked, limiter=at_a_time)
        return Response(body, status, {"Cache-Control": "no-store"}, "application/json")

    page = files()

    async def file(request: Request) -> Response:
        found = page.get(request.url.path)
        if found is None:
            return Response("there is no such file\n", 404, media_type="text/plain")
        kind = KINDS[Path(request.url.path).suffix or ".html"]
        return Response(found, headers={"Cache-Control": "no-cache"}, media_type=kind)

    routes = [Route("/api/{view}", view, methods=["GET"]), Route("/{path:path}", file, methods=["GET"])]
    return Guard(Starlette(routes=routes), hosts)


def answer(view: View, asked: Asked) -> tuple[int, Any]:
    """(status, what JSON is to hold): the view's numbers, or 400 and what is wrong with what was asked."""
    try:
        return 200, plain(view(asked))
    except Unsupported as error:
        return 400, {"error": "; ".join(error.reasons)}
    except (ValueError, TypeError, OverflowError) as error:
        return 400, {"error": str(error)}


def about(model: Path | None) -> dict[str, Any]:
    """What the page's controls choose from."""
    return {
        "version": __version__, "model": None if model is None else model.resolve().name,
        "backends": list(backends.ORDER), "devices": {d.name: d.source for d in cost.DEVICES.values()},
        "models": list(cost.MODELS), "masks": masks.EXAMPLES,
    }  # fmt: skip


def listen(port: int) -> socket.socket:
    """A socket of this machine alone; port 0 for any. Raises OSError where the port is taken."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((ADDRESS, port))
        # whoever is told the address may ask before the first answer
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"port {port} is taken; give another by --port, or --port 0 for any that is free") from None
        raise
    return found


def serve(port: int = 0, model: Path | None = None, ready: Callable[[str], None] = print) -> None:
    """Serve the page until interrupted; `ready` is told its address. Raises OSError, and as `application`."""
    found = listen(port)
    number = found.getsockname()[1]
    hosts = (f"{ADDRESS}:{number}", f"localhost:{number}")
    config = uvicorn.Config(
        application(hosts, model), http="h11", ws="none", lifespan="off", log_level="warning", access_log=False,
        server_header=False, date_header=False, proxy_headers=False, backlog=BACKLOG,
        limit_concurrency=files_allowed() - 64, timeout_keep_alive=5, h11_max_incomplete_event_size=16384,
    )  # fmt: skip
    ready(f"http://{hosts[0]}/")
    with found:
        uvicorn.Server(config).run([found])


def files_allowed() -> int:
    """How many files, connections among them, this process may open, raised to what the system lets it."""
    try:
        import resource
    except ImportError:
        return 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)
