"""Connections of the lab that say nothing, and computations whose client left."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any
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
SLOW = "roofline?mask=strided(7)%20%7C%20strided(5)%20%7C%20window(9,9)&t=13106"


def computing(lab: str) -> list[int]:
    """Worker processes of the lab that are running something."""
    psutil = pytest.importorskip("psutil")
    port = urlsplit(lab).port
    servers = {c.pid for c in psutil.net_connections("tcp4") if c.status == "LISTEN" and c.laddr.port == port}
    (process,) = [psutil.Process(pid) for pid in servers]

    def busy(child: Any) -> bool:
        try:
            return child.cpu_percent(0.3) > 10
        except psutil.NoSuchProcess:
            # it ended while it was looked at
            return False

    return [child.pid for child in process.children() if busy(child)]


def test_a_question_that_nobody_waits_for_ends(lab: str):
    """Askers of what takes long hang up; their computations stop, and other views are not held back."""
    place = urlsplit(lab)
    for n in range(4):
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
    """Those that wait for their turn are not."""
    import anyio

    monkeypatch.setattr(connections, "COMPUTATION", 4.0)
    found: list[str] = []

    async def main() -> None:
        one = anyio.CapacityLimiter(1)

        async def ask(seconds: float) -> None:
            try:
                await connections.in_worker(one, time.sleep, seconds)
                found.append("done")
            except TimeoutError:
                found.append("stopped")

        async with anyio.create_task_group() as group:
            group.start_soon(ask, 60)
            await anyio.sleep(0.1)
            group.start_soon(ask, 0.01)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(anyio.run, main).result(30)
    assert found == ["stopped", "done"]


@pytest.mark.sample(1)
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
