"""How often Python looks for cycles in the process that the gateway runs in. Knows no gateway; called once, by whoever owns the process.

A collection of everything stands still for all calls at once: some 80 ms with what the imports of a run leave (110,000 objects),
again and again as sessions come and go. Almost nothing here is in a cycle: what a call leaves is freed when it is answered.
"""

from __future__ import annotations

import gc

YOUNG = 10_000
"""Objects made and not freed yet until the young ones are looked through; Python's own is 700, less than a few calls in flight have."""


def collect_less() -> None:
    """Never look again through what is there by now, and less often through what comes. Call it when all is imported and built."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)
