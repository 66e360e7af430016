"""What the process occupies in memory."""

from __future__ import annotations

import sys
from pathlib import Path


def resident() -> tuple[int, int]:
    """(now, peak) bytes of this process's resident set; (0, 0) on Windows."""
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage would give the peak of the process that started this one, if that was higher
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmRSS"].split()[0]) * 1024, int(fields["VmHWM"].split()[0]) * 1024
    try:
        import resource
    except ModuleNotFoundError:
        return 0, 0
    # macOS counts the peak in bytes, other systems in KiB; present use is not reported
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak, peak
