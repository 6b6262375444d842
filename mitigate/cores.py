"""How many threads work may take that has this machine to itself."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that this process may use: those of its affinity where the system has one, else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def wanted_threads() -> int:
    """OMP_NUM_THREADS where it holds a number above 0 (of a list, the first), else every usable core."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else usable_cores()
