"""The server of `saccade lab`: the page's files, and the numbers of its views as JSON, served only to this machine."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .connections import COMPUTATION, HungUp, Punctual, in_worker, until_hung_up
from .guard import Guard
from .pages import KINDS, files
from .views import VIEWS, Answer, View, about, answer, answered, encoded, refused_fields

ADDRESS = "127.0.0.1"
# connections that wait to be accepted; views computed at a time; answers stored
BACKLOG, AT_A_TIME, MOST_ANSWERS = 2048, 4, 16
OPEN_FILES = 8192
# the header by which the page asks for status 200 even for wrong queries
ERRORS = "x-errors"

# the fields of a query, by name
Question = tuple[tuple[str, str], ...]


def application(hosts: tuple[str, ...], model: Path | None = None) -> Any:
    """The ASGI application. hosts: as in `Guard`; model: the folder of the model whose attention maps are shown.

    Raises as `Model` for a folder without a model.
    """
    own: dict[str, View] = {"about": lambda query: about(model)}
    if model is not None:
        from .maps import Model

        own["maps"] = Model(model).maps
    at_a_time, maps_at_a_time = anyio.CapacityLimiter(AT_A_TIME), anyio.CapacityLimiter(AT_A_TIME)
    answers: dict[tuple[str, Question], Answer] = {}

    async def compute(name: str, query: Question) -> Answer:
        if name in own:
            # in this process, which has the model; a text of at most `MOST_TOKENS` takes little time
            result = encoded(*await anyio.to_thread.run_sync(answer, own[name], dict(query), limiter=maps_at_a_time))
            return keep(name, query, result)
        try:
            return keep(name, query, await in_worker(at_a_time, answered, name, query))
        except TimeoutError:
            why = (
                f"it took more than {COMPUTATION:g} s and was stopped: use fewer tokens or a simpler mask, or try "
                "again when other programs use less of this machine"
            )
            return encoded(400, {"error": why})

    def keep(name: str, query: Question, result: Answer) -> Answer:
        answers[name, query] = result
        while len(answers) > MOST_ANSWERS:
            del answers[next(iter(answers))]
        return result

    async def view(request: Request) -> Response:
        name, query = request.path_params["view"], tuple(sorted(request.query_params.multi_items()))
        if name not in own and name not in VIEWS:
            why = "no model is shown: start saccade lab --model DIR" if name == "maps" else "there is no such view"
            return JSONResponse({"error": why}, 404, {"Cache-Control": "no-store"})
        try:
            result = (
                refused_fields(query)
                or answers.get((name, query))
                or await until_hung_up(partial(compute, name, query), request.receive)
            )
        except HungUp:
            return Response(status_code=499)
        status, body = result
        # a browser logs every status 400, but a half-typed expression is not the page's fault
        if status == 400 and request.headers.get(ERRORS) == "200":
            status = 200
        return Response(body, status, {"Cache-Control": "no-store"}, "application/json")

    page = files()

    async def file(request: Request) -> Response:
        content = page.get(request.url.path)
        if content is None:
            return Response("there is no such file\n", 404, media_type="text/plain")
        kind = KINDS[Path(request.url.path).suffix or ".html"]
        return Response(content, headers={"Cache-Control": "no-cache"}, media_type=kind)

    routes = [Route("/api/{view}", view, methods=["GET"]), Route("/{path:path}", file, methods=["GET"])]
    return Guard(Starlette(routes=routes), hosts)


def listen(port: int) -> socket.socket:
    """A socket that only this machine can reach; port 0 for any free one. Raises OSError if the port is taken."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((ADDRESS, port))
        # requests may come as soon as the address is known
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"port {port} is taken; choose another with --port, or any free one with --port 0") from None
        raise
    return listener


def serve(port: int = 0, model: Path | None = None, ready: Callable[[str], None] = print) -> None:
    """Serve the page until interrupted; `ready` is called with its address. Raises OSError, or as `application`."""
    listener = listen(port)
    number = listener.getsockname()[1]
    hosts = (f"{ADDRESS}:{number}", f"localhost:{number}")
    config = uvicorn.Config(
        application(hosts, model),
        http=Punctual,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        limit_concurrency=files_allowed() - 64,
        timeout_keep_alive=5,
        h11_max_incomplete_event_size=16384,
    )
    ready(f"http://{hosts[0]}/")
    with listener:
        uvicorn.Server(config).run([listener])


def files_allowed() -> int:
    """How many files, including connections, this process may open; raises that limit if the system allows."""
    try:
        import resource
    except ImportError:
        return 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)
