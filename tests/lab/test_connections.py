"""Connections of the lab that say nothing, and computations that nobody waits for."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from saccade.lab import connections


def status(lab: str, path: str) -> int:
    connection = HTTPConnection(urlsplit(lab).netloc, timeout=60)
    connection.request("GET", path)
    found = connection.getresponse().status
    connection.close()
    return found


# minutes of counting, here as on a quick machine
SLOW = "roofline?mask=strided(7)%20%7C%20strided(5)%20%7C%20window(9,9)&t=13107"


def computing(lab: str) -> list[int]:
    """Worker processes of the lab that are running something."""
    psutil = pytest.importorskip("psutil")
    port = urlsplit(lab).port
    servers = {c.pid for c in psutil.net_connections("tcp4") if c.status == "LISTEN" and c.laddr.port == port}
    (process,) = [psutil.Process(pid) for pid in servers]
    return [child.pid for child in process.children() if child.cpu_percent(0.3) > 10]


def test_a_question_that_nobody_waits_for_ends(lab: str):
    """Two askers of what takes long hang up; their computations stop, and other views are not held back."""
    place = urlsplit(lab)
    for n in range(2):
        with socket.create_connection((place.hostname, place.port)) as asker:
            asker.sendall(f"GET /api/{SLOW}{n} HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
            time.sleep(0.2)
    begin = time.perf_counter()
    assert status(lab, "/api/mask?mask=causal()&tq=77") == 200
    assert time.perf_counter() - begin < connections.GRACE + 20
    limit = time.monotonic() + 20
    while computing(lab):
        assert time.monotonic() < limit
        time.sleep(0.2)


def test_a_question_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch):
    import anyio
    import anyio.to_process

    monkeypatch.setattr(connections, "COMPUTATION", 0.5)

    async def main() -> None:
        async def silent() -> dict[str, str]:
            await anyio.sleep_forever()
            raise AssertionError

        async def compute() -> None:
            await anyio.to_process.run_sync(time.sleep, 60, cancellable=True)

        with pytest.raises(TimeoutError):
            await connections.while_asked(compute, silent)

    begin = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(anyio.run, main).result()
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("start", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_a_head_that_does_not_come_closes_the_connection(lab: str, start: bytes):
    place = urlsplit(lab)
    with socket.create_connection((place.hostname, place.port), timeout=connections.HEAD + 20) as found:
        begin = time.monotonic()
        found.sendall(start)
        # a byte now and then does not prolong it
        time.sleep(connections.HEAD / 2)
        if start:
            found.sendall(b"X")
        assert found.recv(100) == b""
        assert connections.HEAD - 1 < time.monotonic() - begin < connections.HEAD + 15
