"""Children forked from a process whose OpenMP threads stay behind: calls in them end, and torch's own do."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

FORKED = """
import os, signal, time
import torch
torch.set_num_threads(2)
x = torch.randn(2, {T}, 4, 32)
{before}
pid = os.fork()
if pid == 0:
    {child}
    os._exit(0)
end = time.monotonic() + 30
while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
    time.sleep(0.01)
if done == (0, 0):
    os.kill(pid, signal.SIGKILL)
    raise SystemExit("the child hangs")
assert os.waitstatus_to_exitcode(done[1]) == 0
torch.ones(4000, 1000).sum()
import saccade
assert torch.equal(saccade.attention(x, x, x), saccade.attention(x, x, x))
"""
TEAM = "torch.ones(4000, 1000).sum()\n"
CASES = {
    "the operator is imported before": (
        300,
        "from saccade.integrations.flash_attn import flash_attn_func\n" + TEAM,
        "flash_attn_func(x, x, x)",
    ),
    "the package is imported before": (300, "import saccade\n" + TEAM, "saccade.attention(x, x, x)"),
    "the package is imported in the child": (300, TEAM, "import saccade; saccade.attention(x, x, x)"),
    "the core is loaded before": (300, "import saccade.backends.cpu\n" + TEAM, "saccade.attention(x, x, x)"),
    "torch after a call": (70, "import saccade\nsaccade.attention(x, x, x)", "torch.ones(4000, 1000).sum()"),
    "both after calls": (
        300,
        "import saccade\nsaccade.attention(x, x, x)\n" + TEAM,
        "torch.ones(4000, 1000).sum(); saccade.attention(x, x, x); torch.ones(4000, 1000).sum()",
    ),
}


@pytest.mark.skipif(sys.platform != "linux", reason="torch's threads are used on Linux alone")
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_calls_in_a_child_end(name: str) -> None:
    T, before, child = CASES[name]
    code = FORKED.format(T=T, before=before, child=child)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
