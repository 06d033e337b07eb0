"""On PYTHONPATH of a run: each commit of its journal takes a fifth of a second longer, as on a disk that is
slow to sync.
"""

from __future__ import annotations

import sys
import time


class _SlowCommits:
    """Waits for asyncrl.journal.writer to be imported, and puts a pause before every commit of its thread."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if (
            name == "asyncrl.journal.journal"
        ):  # imports the writer: when it is found, patch what it is about to import
            sys.meta_path.remove(self)
            from asyncrl.journal.writer import Writer

            write = Writer._write

            def slow(self: Writer, jobs: list) -> None:  # type: ignore[type-arg]
                time.sleep(0.2)
                write(self, jobs)

            Writer._write = slow  # type: ignore[method-assign]


sys.meta_path.insert(0, _SlowCommits())
