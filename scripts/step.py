"""Runs one long command under a heading, so that a visitor always sees that something happens.

`python scripts/step.py HEADING LOG COMMAND ...`: what the command prints goes to LOG. The terminal shows the heading,
then the seconds since the start and the last line of the log; a pipe gets a new line every four seconds. A command that
fails prints its whole log, and its exit status is this program's. Needs only the standard library of any Python 3.
"""

import os
import shutil
import subprocess
import sys
import time


def last_line(log):
    """The last line of a file that is not empty; a progress bar counts as one line."""
    with open(log, errors="replace") as file:
        lines = [part.strip() for part in file.read().replace("\r", "\n").split("\n")]
    return next((line for line in reversed(lines) if line), "")


def main():
    heading, log, command = sys.argv[1], sys.argv[2], sys.argv[3:]
    live, start, shown = sys.stdout.isatty(), time.monotonic(), 0.0
    width = shutil.get_terminal_size().columns - 1
    os.makedirs(os.path.dirname(log), exist_ok=True)
    print(heading, flush=True)
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    while process.poll() is None:
        time.sleep(0.1)
        seconds = time.monotonic() - start
        if seconds - shown >= (0.25 if live else 4):
            shown = seconds
            line = f"  {seconds:4.0f} s  {last_line(log)}"[:width]
            print(f"\r{line:{width}}" if live else line, end="" if live else "\n", flush=True)
    if live:
        print(f"\r{'':{width}}\r", end="")
    if process.returncode:
        with open(log, errors="replace") as file:
            print(file.read())
        print(f"failed after {time.monotonic() - start:.0f} s: {' '.join(command)}")
    else:
        print(f"  done in {time.monotonic() - start:.0f} s", flush=True)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
