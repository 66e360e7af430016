"""Timeouts: connections must send their request in time, and computations end when their client hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any, TypeVar

import anyio
import anyio.to_process
import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# seconds for the head of a request; for the start of a worker process; for a computation; and for a computation whose
# client has hung up, because a worker process that is stopped must be started again
HEAD, START, COMPUTATION, GRACE = 10.0, 60.0, 20.0, 2.0

Result = TypeVar("Result")


class Punctual(H11Protocol):
    """uvicorn's HTTP/1.1, which closes a connection that has not sent a complete head within `HEAD` seconds."""

    late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self.late is None:
            self.late = self.loop.call_later(HEAD, self.transport.close)

    def _stop_waiting(self) -> None:
        if self.late is not None:
            self.late.cancel()
            self.late = None


class HungUp(Exception):
    """The client has hung up."""


def _load(module: str) -> None:
    import_module(module)


async def in_worker(limiter: anyio.CapacityLimiter, function: Callable[..., Result], *arguments: Any) -> Result:
    """The result of a function in a worker process, which is killed when this coroutine is cancelled.

    limiter: limits the computations at a time. Raises TimeoutError after `START` seconds in which the process has not
    started, or after `COMPUTATION` seconds of computing.
    """
    async with limiter:
        own = anyio.CapacityLimiter(1)
        with anyio.fail_after(START):
            await anyio.to_process.run_sync(_load, function.__module__, cancellable=True, limiter=own)
        with anyio.fail_after(COMPUTATION):
            return await anyio.to_process.run_sync(function, *arguments, cancellable=True, limiter=own)


async def until_hung_up(compute: Callable[[], Awaitable[Result]], receive: Callable[[], Awaitable[Any]]) -> Result:
    """The result of compute, which is cancelled when the client hangs up, but not before `GRACE` seconds.

    receive: the ASGI events of the request. Raises HungUp.
    """
    results: list[Result] = []
    started = anyio.current_time()
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            await anyio.sleep(max(0.0, started + GRACE - anyio.current_time()))
            group.cancel_scope.cancel()

        group.start_soon(watch)
        results.append(await compute())
        group.cancel_scope.cancel()
    if not results:
        raise HungUp
    return results[0]
