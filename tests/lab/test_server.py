"""The server of the lab: what it answers, what it refuses, and a crowd."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from saccade.lab import pages, server, views
from saccade.testing.cases import MASKS

ROOT = Path(__file__).resolve().parent.parent.parent
CROWD, SECONDS = 1000, 60


def ask(lab: str, path: str, method: str = "GET", body: Any = None, **headers: str) -> HTTPResponse:
    connection = HTTPConnection(urlsplit(lab).netloc, timeout=30)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(method, path, body, given)
        answer = connection.getresponse()
        answer.content = answer.read()  # type: ignore[attr-defined]
        return answer
    finally:
        connection.close()


def body(answer: HTTPResponse) -> bytes:
    return answer.content  # type: ignore[attr-defined]


def test_files_and_their_headers(lab: str):
    for path, content in pages.files().items():
        answer = ask(lab, path)
        assert (answer.status, body(answer)) == (200, content)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers
        assert b"http://" not in content.replace(b"http://www.w3.org/", b"")
        assert b"https://" not in content
    assert ask(lab, "/app.js").headers["content-type"].startswith("text/javascript")


def test_views_answer_json(lab: str):
    about = json.loads(body(ask(lab, "/api/about")))
    assert set(about["places"].values()) == {"cpu", "triton", "metal", "webgpu"}
    for name, text in about["masks"].items():
        answer = ask(lab, "/api/mask?" + "mask=" + text.replace(" ", "%20").replace("&", "%26").replace("|", "%7C"))
        assert answer.status == 200, name
    answer = ask(lab, "/api/mask?mask=causal((")
    assert (answer.status, answer.headers["cache-control"]) == (400, "no-store")
    assert "cannot read the mask" in json.loads(body(answer))["error"]
    assert ask(lab, "/api/nothing").status == 404
    answer = ask(lab, "/api/mask?mask=causal()&mask=full()")
    assert (answer.status, json.loads(body(answer))["field"]) == (400, "mask")


@pytest.mark.parametrize(
    "path",
    [
        "/../guard.py", "/../../../../../../etc/passwd", "/%2e%2e/guard.py", "/..%2f..%2fguard.py", "/....//guard.py",
        "/static/../guard.py", "//etc/passwd", "/%2fetc%2fpasswd", "/..\\guard.py", "/app.js%00.css", "/app.js/",
        "/api/../app.py", "/api/mask/../../guard.py", "/index.html", "/server.py", "/%c0%ae%c0%ae/guard.py",
    ],
)  # fmt: skip
def test_paths_lead_nowhere_else(lab: str, path: str):
    answer = ask(lab, path)
    assert answer.status in (400, 404)
    assert b"import" not in body(answer)
    assert b"root:" not in body(answer)


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1"}, 421),
        ({"Host": "127.0.0.1.evil.example:80"}, 421),
        ({"Host": "localhost:1"}, 421),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
@pytest.mark.parametrize("path", ["/", "/api/about", "/app.js"])
def test_only_this_page_asks(lab: str, path: str, headers: dict[str, str], status: int):
    answer = ask(lab, path, **headers)
    assert answer.status == status
    assert (status == 200) == (len(body(answer)) > 100)


def test_a_link_to_the_page_may_be_followed(lab: str):
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert ask(lab, "/", **followed).status == 200
    assert ask(lab, "/api/about", **followed).status == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW"])
def test_it_is_only_read_from(lab: str, method: str):
    assert ask(lab, "/api/about", method).status in (400, 405)


def test_two_hosts_are_none(lab: str):
    place = urlsplit(lab)
    assert raw(lab, f"GET / HTTP/1.1\r\nHost: {place.netloc}\r\nHost: evil.example\r\n\r\n").split()[1] in (
        "400",
        "421",
    )
    assert raw(lab, "GET / HTTP/1.1\r\n\r\n").split()[1] in ("400", "421")
    assert raw(lab, "GET / HTTP/1.0\r\n\r\n").split()[1] == "421"


def raw(lab: str, text: str | bytes, more: Iterable[bytes] = ()) -> str:
    """What the server says to these bytes, until it closes or falls silent."""
    place = urlsplit(lab)
    with socket.create_connection((place.hostname, place.port), timeout=10) as found:
        found.sendall(text if isinstance(text, bytes) else text.encode("latin-1"))
        try:
            for piece in more:
                found.sendall(piece)
            found.shutdown(socket.SHUT_WR)
            return found.recv(65536).decode("latin-1")
        except OSError:
            return ""


def test_bodies_are_not_taken(lab: str):
    host = urlsplit(lab).netloc
    assert ask(lab, "/api/about", body=b"x" * 1000).status == 413
    # announced to be huge, or endless: refused before it comes, and nothing of it is kept
    told = f"GET /api/about HTTP/1.1\r\nHost: {host}\r\nContent-Length: {1 << 40}\r\n\r\n"
    assert " 413 " in raw(lab, told).splitlines()[0]
    chunked = f"GET /api/about HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n"
    piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    answer = raw(lab, chunked, (piece for _ in range(1000)))
    assert not answer or " 413 " in answer.splitlines()[0]
    assert ask(lab, "/").status == 200


def test_heads_and_addresses_have_an_end(lab: str):
    host = urlsplit(lab).netloc
    assert ask(lab, "/api/mask?mask=" + "x" * 10000).status == 414
    endless = f"GET / HTTP/1.1\r\nHost: {host}\r\nX: "
    answer = raw(lab, endless, (b"x" * 65536 for _ in range(200)))
    assert not answer or answer.split()[1] in ("400", "431")
    assert raw(lab, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20).split()[1:2] in (["400"], [])
    assert ask(lab, "/").status == 200


def test_a_crowd_is_served(lab: str):
    """A thousand connections at once, all with an answer, while a thousand more say nothing."""
    server.files_allowed()
    place = urlsplit(lab)
    paths = ["/", "/app.js", "/api/about", "/api/mask?mask=causal()", "/api/caches", "/api/softmax"]

    async def one(number: int) -> int:
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        path = paths[number % len(paths)]
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        assert answer.endswith((b"}", b"\n"))
        return int(answer.split()[1])

    async def crowd() -> list[int]:
        silent = [await asyncio.open_connection(place.hostname, place.port) for _ in range(CROWD)]
        found = await asyncio.gather(*(one(number) for number in range(CROWD)))
        for _, writer in silent:
            writer.close()
        return list(found)

    # in a thread of its own: a browser that another test drives has a loop in this one
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(asyncio.run, asyncio.wait_for(crowd(), SECONDS)).result() == [200] * CROWD
    assert ask(lab, "/").status == 200


def test_hard_questions_leave_the_page_alone(lab: str):
    """Views that count for long are worked off a few at a time; files come meanwhile."""
    hard = [f"/api/roofline?t={65536 - n}&mask=causal()" for n in range(3)]
    waiting = [threading.Thread(target=ask, args=(lab, path)) for path in hard]
    for thread in waiting:
        thread.start()
    begin = time.perf_counter()
    assert ask(lab, "/app.js").status == 200
    assert time.perf_counter() - begin < 5
    for thread in waiting:
        thread.join()


def test_two_origins_are_none(lab: str):
    host = urlsplit(lab).netloc
    for origins in ((f"http://{host}", "https://evil.example"), ("https://evil.example", f"http://{host}")):
        lines = "".join(f"Origin: {origin}\r\n" for origin in origins)
        assert " 403 " in raw(lab, f"GET /api/about HTTP/1.1\r\nHost: {host}\r\n{lines}\r\n").splitlines()[0]


def test_any_question_is_answered(rng: np.random.Generator):
    """Whatever the fields hold, a view has numbers that JSON has words for, or says what is wrong."""
    numbers = ["", "-1", "0", "1e9", "9" * 30, "\ud800", "None", "٣", "1", "7", "33"]
    texts = [*MASKS.values(), "per_head([])", "causal(", "documents()", "tiles([[1]], 0)", "keys(-1)", "(" * 200]
    texts.append(" | ".join(["strided(3)"] * 40))
    small = {"mask": {}, "visits": {"device": "m3"}, "softmax": {"example": "own"}, "roofline": {"t": "99"}}
    small |= {"caches": {}, "kernel": {"t": "20", "set": "tiled"}}
    names = [
        "tq",
        "tk",
        "head",
        "t",
        "d",
        "bq",
        "bk",
        "heads",
        "kv",
        "batch",
        "tokens",
        "device",
        "direction",
        "example",
    ]
    statuses: set[int] = set()
    for _ in range(80):
        view = str(rng.choice(list(small)))
        query = {**small[view], "mask": str(rng.choice(texts)), str(rng.choice(names)): str(rng.choice(numbers))}
        status, data = views.answer(views.VIEWS[view], query)
        json.dumps(data, allow_nan=False)
        assert status == 200 or data["error"]
        statuses.add(status)
    assert statuses == {200, 400}


def test_it_listens_on_this_machine_alone(lab: str):
    port = urlsplit(lab).port
    assert port is not None
    with server.listen(0) as found:
        assert found.getsockname()[0] == "127.0.0.1"
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    for address in others - {"127.0.1.1"}:
        with pytest.raises(OSError):
            socket.create_connection((address, port), timeout=2)


@pytest.mark.parametrize(
    "words, message",
    [
        (("--port", "TAKEN"), "is taken"),
        (("--port", "99999"), "port"),
        (("--model", "/nowhere"), "no config.json in /nowhere"),
    ],
)
def test_it_says_why_it_cannot_start(lab: str, words: tuple[str, ...], message: str):
    given = [str(urlsplit(lab).port) if word == "TAKEN" else word for word in words]
    command = [sys.executable, "-m", "saccade.cli.main", "lab", "--no-browser", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_without_its_packages_it_says_how_to_get_them():
    code = "import sys; sys.modules['starlette'] = None; sys.argv = ['saccade', 'lab']; "
    code += "from saccade.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'.[lab]'" in done.stderr


def test_the_page_is_in_the_package():
    """An installed lab needs no build step: every file that the page asks for is in the folder of the server."""
    page = pages.files()
    assert {"/", "/app.js", "/style.css", "/icon.svg"} <= set(page)
    tracked = subprocess.run(["git", "ls-files", "src/saccade/lab/static"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode == 0 and tracked.stdout:
        assert len(tracked.stdout.split()) == len(page)
