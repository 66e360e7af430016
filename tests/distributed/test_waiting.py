"""The thread that waits for messages between hosts: nothing of a wait outlives it, and no thread outlives Python."""

import subprocess
import sys
import weakref

import pytest

from saccade.distributed.watch import Waiter

PROGRAM = """
import atexit, threading, time
# the first handler to be registered runs last
atexit.register(lambda: print("threads at the end:", [t.name for t in threading.enumerate()]))
from saccade.distributed.watch import Waiter

class Slow:
    def __del__(self):
        time.sleep(0.3)

def until(slow):
    return lambda: (slow, 3)[1]

waiter = Waiter()
print("result:", waiter.wait(until(Slow()), lambda: None))
"""


def test_nothing_of_a_wait_outlives_it() -> None:
    class Messages:
        pass

    waiter, messages = Waiter(), Messages()
    freed = weakref.ref(messages)
    assert waiter.wait(lambda messages=messages: type(messages), lambda: None) is Messages
    del messages
    assert freed() is None


def test_an_error_of_a_wait_reaches_the_caller() -> None:
    waiter = Waiter()
    with pytest.raises(ZeroDivisionError):
        waiter.wait(lambda: 1 // 0, lambda: None)
    assert waiter.wait(lambda: 1, lambda: None) == 1


def test_the_thread_ends_before_python_does() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=110, check=True)
    assert done.stdout.splitlines() == ["result: 3", "threads at the end: ['MainThread']"]


def test_a_wait_that_never_ends_does_not_delay_the_end() -> None:
    program = PROGRAM.replace("until(Slow()), lambda: None", "lambda: time.sleep(100), lambda: 'refused'")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("result: refused\n")
