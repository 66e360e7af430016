"""Signals during long calls on the CPU: Ctrl-C ends them within moments, other handlers run meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# seconds; well under 0.1 on an idle machine
SOON = 0.5

INTERRUPTED = """
import os, signal, sys, threading, time
import numpy as np, saccade
signal.signal(signal.SIGINT, signal.default_int_handler)
saccade.set_num_threads(2)
def numbers(*shape): return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
{setup}
few = [numbers(1, 300, 4, 64) for _ in range(3)]
expected = saccade.attention(*few)
sent = []
def interrupt():
    time.sleep(0.3)
    sent.append(time.perf_counter())
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    call()
except KeyboardInterrupt:
    print(time.perf_counter() - sent[0])
else:
    sys.exit("the call was not interrupted")
for _ in range(3):
    assert np.array_equal(saccade.attention(*few), expected)
"""

ARRAYS = "x = [numbers(1, 20000, {heads}, 64) for _ in range(3)]\n"
TENSORS = """
import torch, saccade.recurrent as R
torch.set_num_threads(2)
torch.ones(4000, 1000).mul(2)
def tensors(*shapes): return [torch.from_numpy(numbers(*s)) for s in shapes]
"""
CALLS = {
    "forward": ARRAYS.format(heads=8) + "def call(): saccade.attention(*x)",
    "one thread": ARRAYS.format(heads=8) + "saccade.set_num_threads(1)\ndef call(): saccade.attention(*x)",
    # one task owns the only head
    "backward": ARRAYS.format(heads=1) + "o, lse = x[0], x[0][..., 0]\n"
    "def call(): saccade.attention_backward(o, *x, o, lse, saccade.mask.causal())",
    "decode": "k = np.broadcast_to(numbers(1, 20000, 8, 64), (64, 20000, 8, 64))\n"
    "def call():\n    for _ in range(100): saccade.attention(k[:, -8:], k, k)",
    "on torch's threads": TENSORS + "x = tensors(*[(1, 20000, 8, 64)] * 3)\ndef call(): saccade.attention(*x)",
    "in a backward of torch": TENSORS + "x = [y.requires_grad_() for y in tensors(*[(1, 8000, 4, 64)] * 3)]\n"
    "o = saccade.attention(*x).sum()\ndef call(): o.backward()",
    # what torch computes cannot be interrupted, and is done before
    "a recurrence": TENSORS + "q, k, v, g = tensors(*[(1, 60000, 8, 128)] * 4)\ng = -g.abs()\n"
    "def call(): R.gated_linear(q, k, v, g)",
    "a delta rule, backward": TENSORS + "q, k, v = (y.requires_grad_() for y in tensors(*[(1, 60000, 1, 128)] * 3))\n"
    "def call(): R.gated_delta_rule(q, k / 11, v, torch.rand(1, 60000, 1)).sum().backward()",
    "a scan": TENSORS + "u, B, C = tensors((1, 400000, 64), (1, 400000, 64), (1, 400000, 64))\n"
    "A, delta = -torch.ones(64, 64), u.abs()\n"
    "def call():\n    for _ in range(100): R.selective_scan(u, delta, A, B, C)",
}


def ran(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(os.name != "posix", reason="signals are sent by os.kill")
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_ends_a_long_call_and_the_next_one_is_right(name: str) -> None:
    if "torch" in CALLS[name]:
        pytest.importorskip("torch")
    # other programs only delay the end, and a call that Ctrl-C does not end is late each time
    for _ in range(3):
        seconds = float(ran(INTERRUPTED.format(setup=CALLS[name])))
        print(f"{name}: {seconds:.3f} s")
        if seconds < SOON:
            return
    pytest.fail(f"{name} ended {seconds:.3f} s after Ctrl-C")


HANDLED = """
import signal
import numpy as np, saccade
saccade.set_num_threads(2)
x = np.random.default_rng(0).standard_normal((1, 3000, 4, 64), dtype=np.float32)
few = x[:, :300]
whole, part = saccade.attention(x, x, x), saccade.attention(few, few, few)
equal = []
def handler(*_): equal.append(np.array_equal(saccade.attention(few, few, few), part))
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.06)
before = 0
for _ in range(10):
    assert np.array_equal(saccade.attention(x, x, x), whole)
signal.setitimer(signal.ITIMER_REAL, 0)
assert equal and all(equal), equal
"""


@pytest.mark.skipif(os.name != "posix", reason="there is no SIGALRM")
def test_a_handler_may_call_during_a_call() -> None:
    ran(HANDLED)


ELSEWHERE = """
import os, signal, threading, time
import numpy as np, saccade
signal.signal(signal.SIGINT, signal.default_int_handler)
x = np.ones((1, 6000, 4, 64), np.float32)
done, finished = [], threading.Event()
def call():
    done.append(saccade.attention(x, x, x))
    finished.set()
try:
    threading.Thread(target=call).start()
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    finished.wait()
    raise SystemExit("too short")
except KeyboardInterrupt:
    # an interrupted Thread.join takes the thread for ended
    assert finished.wait(100)
assert np.allclose(done[0], x)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals are sent by os.kill")
def test_a_call_of_another_thread_goes_on() -> None:
    ran(ELSEWHERE)
