"""Which requests are allowed: those that the lab's own page on this machine makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# most characters of a path with its query
LONGEST_TARGET = 8192
# the page loads only this server's files and answers, may not be shown in a frame, and sends no referrer
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Guard:
    """Refuses requests with another Host, from another site, with a body, or with a method other than GET and HEAD.

    hosts: the names of this server, such as "127.0.0.1:8642".
    """

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...]):
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refused = self.refusal(scope)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                # the rest of a refused request is not read
                closing = [(b"connection", b"close")] if refused else []
                message = {**message, "headers": [*message["headers"], *own, *closing]}
            await send(message)

        app: ASGIApp = PlainTextResponse(refused[1] + "\n", refused[0]) if refused else self.app
        await app(scope, receive, guarded)

    def refusal(self, scope: Mapping[str, Any]) -> tuple[int, str] | None:
        """(status, why), or None for a request that may pass."""
        fields = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        headers, path = dict(fields), str(scope["path"])
        origins = [value for name, value in fields if name == "origin"]
        named = [value for name, value in fields if name == "host"]
        if len(named) != 1 or named[0].lower() not in self.hosts:
            return 421, f"this server answers only as {self.hosts[0]}: open http://{self.hosts[0]}"
        # a browser sends one Origin or none
        if origins not in ([], [f"http://{named[0]}"]):
            return 403, "requests from other sites are refused: open the page of this server"
        # a link to the page may come from anywhere; all other requests must come from this page
        followed = (
            path == "/" and headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        )
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not followed:
            return 403, "requests from other sites are refused: open the page of this server"
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "this server accepts only GET and HEAD"
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return 413, "this server accepts no request body"
        if len(quote(path)) + len(scope["query_string"]) > LONGEST_TARGET:
            return 414, f"a path with its query may have at most {LONGEST_TARGET} characters"
        return None
