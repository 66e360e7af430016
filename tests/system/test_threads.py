"""The worker threads of the CPU core: asleep when idle, alive after a fork, shared by callers, obedient to limits."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import saccade
from saccade.backends import cpu
from saccade.backends.cpu import _core


def arrays(T: int = 512, H: int = 4, D: int = 64, seed: int = 0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((1, T, H, D), dtype=np.float32) for _ in range(3)]


@pytest.fixture(autouse=True)
def two_threads():
    before = saccade.get_num_threads()
    saccade.set_num_threads(2)
    yield
    saccade.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_the_same():
    q, k, v = arrays()
    expected = saccade.attention(q, k, v)
    pid = os.fork()
    if pid == 0:
        same = np.array_equal(saccade.attention(q, k, v), expected) and _core.live_workers() == 1
        os._exit(0 if same else 1)
    deadline = time.monotonic() + 30
    while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if done == (0, 0):
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert done[0] == pid
    assert os.waitstatus_to_exitcode(done[1]) == 0
    assert np.array_equal(saccade.attention(q, k, v), expected)


def test_many_python_threads_share_the_workers():
    before = _core.live_workers()
    inputs = [arrays(T=200, seed=n) for n in range(6)]
    expected = [saccade.attention(*x) for x in inputs]
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(20):
            if not np.array_equal(saccade.attention(*inputs[n]), expected[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads)
    assert not wrong
    assert _core.live_workers() <= max(before, saccade.get_num_threads() - 1)


def test_a_call_lets_other_python_threads_run():
    q, k, v = arrays(T=4096)
    running = threading.Event()
    span: list[float] = []

    def call() -> None:
        running.set()
        begin = time.perf_counter()
        saccade.attention(q, k, v)
        span.extend((begin, time.perf_counter()))

    saccade.set_num_threads(1)
    thread = threading.Thread(target=call)
    thread.start()
    running.wait()
    ticks = []
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.001)
    inside = [t for t in ticks if span[0] < t < span[1]]
    assert len(inside) >= 5, f"{len(inside)} ticks in a call of {span[1] - span[0]:.3f} s"


COUNT = """
import numpy as np, saccade
from saccade.backends.cpu import _core
x = np.ones((1, 1024, 4, 64), np.float32)
{setup}
print(_core.live_workers())
"""


def workers_after(setup: str) -> int:
    return int(
        subprocess.run(
            [sys.executable, "-c", COUNT.format(setup=setup)], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    )


IDLE = """
import time
saccade.set_num_threads(2)
saccade.attention(x, x, x)
time.sleep(0.2)
spent = time.process_time()
time.sleep(0.5)
assert time.process_time() - spent < 0.05
"""


# alone in its process: where torch's tensors came before, torch's threads compute
def test_workers_sleep_when_idle():
    assert workers_after(IDLE) == 1


def test_set_num_threads_bounds_the_workers():
    assert workers_after("saccade.set_num_threads(1); saccade.attention(x, x, x)") == 0
    assert workers_after("saccade.set_num_threads(3); saccade.attention(x, x, x)") == 2


def test_torch_set_num_threads_is_obeyed():
    pytest.importorskip("torch")
    call = "import torch; torch.set_num_threads({n}); t = torch.from_numpy(x); saccade.attention(t, t, t)"
    assert workers_after(call.format(n=1)) == 0
    # if torch's threads are not available, one of Saccade's
    assert workers_after(call.format(n=2)) == (0 if sys.platform == "linux" else 1)


TEAM = """
import os, threading, time
import torch
torch.set_num_threads(2)
t = torch.from_numpy(x)
def alive(): return len(os.listdir("/proc/self/task"))
def settles(n):  # a joined thread stays listed for a moment
    end = time.monotonic() + 10
    while alive() != n and time.monotonic() < end: time.sleep(0.01)
    assert alive() == n, (alive(), n)
def attend(): return saccade.attention(t, t, t)
def same(): return np.array_equal(attend().numpy(), expected)
torch.ones(4000, 4000).mul(2)  # torch's threads are there
before = alive()
expected = attend().numpy()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="torch's runtime is found by /proc")
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("then", "workers"),
    [
        ("settles(before)", 0),
        ("for _ in range(200): assert same()\nsettles(before)", 0),
        # a thread that torch did not ask from, and a number that torch does not use
        ("a = threading.Thread(target=attend); a.start(); a.join(); settles(before + 1)", 1),
        ("saccade.set_num_threads(3); assert same()", 2),
        ("saccade.set_num_threads(3); attend(); torch.set_num_threads(2); attend(); attend()", 2),
        # a child may use neither torch's threads nor its parent's
        (
            "pid = os.fork()\n"
            "if pid == 0:\n"
            "    equal = same()\n"
            "    torch.set_num_threads(3)\n"
            "    os._exit(0 if equal and same() and _core.live_workers() == 2 else 1)\n"
            "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0",
            0,
        ),
    ],
)
def test_one_thread_computes_on_torchs_team(then, workers):
    pytest.importorskip("torch")
    assert workers_after(TEAM + then) == workers


def test_callers_in_a_crowd_never_oversubscribe():
    crowd = """
import threading
saccade.set_num_threads(2)
crowd = [threading.Thread(target=lambda: [saccade.attention(x, x, x) for _ in range(3)]) for _ in range(8)]
[t.start() for t in crowd]; [t.join() for t in crowd]
"""
    assert workers_after(crowd) == 1


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "2"])
def test_a_wrong_number_of_threads_is_refused(n):
    with pytest.raises(ValueError, match="number of threads"):
        saccade.set_num_threads(n)
    assert saccade.get_num_threads() == 2
    assert cpu.get_num_threads() == 2


def test_numbers_below_the_normal_ones_are_kept_on_every_thread():
    """A worker inherits the mode of the thread that starts it, also that of a library which flushes them to zero."""
    code = """
import torch, saccade
saccade.set_num_threads(3)
q = torch.zeros(2, 64, 8, 16)
v = torch.full_like(q, 1e-40)
torch.set_flush_denormal(True)
flushing = saccade.attention(q, q, v).numpy()
torch.set_flush_denormal(False)
assert (flushing == v.numpy()).all() and all((saccade.attention(q, q, v) == v).all() for _ in range(20))
"""
    pytest.importorskip("torch")
    subprocess.run([sys.executable, "-c", code], check=True)
