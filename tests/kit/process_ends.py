"""Waits for the ends of processes. It imports no torch: controllers of a test import it."""

from __future__ import annotations

import psutil


def all_gone(children: list[psutil.Process], timeout_s: float = 60) -> bool:
    """Return whether all of these processes end in time."""
    _, alive = psutil.wait_procs(children, timeout=timeout_s)
    return not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
