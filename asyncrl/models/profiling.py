"""Profiles of chosen steps: a trace of the operators, and on CUDA a snapshot of the
memory.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import torch

log = logging.getLogger(__name__)

TRACE_SUFFIX = ".trace.json.gz"
MEMORY_SUFFIX = ".memory.pickle"
MAX_ALLOCATIONS = 100_000
"""Of a snapshot, the latest ones."""


class StepProfiler:
    """Profiles the thread that calls it, and the threads that torch starts for it.

    Life: enter(step) -> work -> end() or enter(another step), which write the files.
        A step is profiled once. Without chosen steps all calls do nothing.

    Writes NAME-step-N.trace.json.gz, for https://ui.perfetto.dev, and
    NAME-step-N.memory.pickle, for https://pytorch.org/memory_viz. A file that cannot be
    written is logged: a profile ends no run.
    """

    def __init__(
        self, folder: Path, name: str, steps: Collection[int], device: torch.device
    ) -> None:
        self._folder = folder
        self._name = name
        self._steps = frozenset(steps)
        self._is_cuda = device.type == "cuda"
        self._step = 0
        self._open: torch.profiler.profile | None = None

    def enter(self, step: int) -> bool:
        """End the profile of another step, and begin the profile of `step` if it is chosen
        and not yet profiled. Return whether it has begun now.
        """
        if not self._steps or step == self._step:
            return False
        self.end()
        self._step = step
        if step not in self._steps:
            return False
        log.info("profiling step %d", step)
        try:
            # Without stacks and shapes: these would slow the step that they describe.
            opened = torch.profiler.profile()
            opened.start()
            self._record_memory("all")
        # Of many kinds, for example where another profiler is at work.
        except Exception as error:
            log.warning("no profile of step %d: %s", step, error)
            return False
        self._open = opened
        return True

    def end(self) -> None:
        """Write the profile of the present step, if it is open."""
        if self._open is None:
            return
        profile = self._open
        self._open = None
        stem = f"{self._name}-step-{self._step}"
        try:
            profile.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            # It gets its name once it is whole: the report lists files by their names.
            trace = self._folder / f"{stem}{TRACE_SUFFIX}"
            part = trace.with_name(f".{trace.name}")
            profile.export_chrome_trace(str(part))
            part.replace(trace)
            if self._is_cuda:
                memory = self._folder / f"{stem}{MEMORY_SUFFIX}"
                # Documented, in spite of their names:
                # https://pytorch.org/docs/stable/torch_cuda_memory.html
                dump: Any = torch.cuda.memory._dump_snapshot  # noqa: SLF001
                dump(str(memory))
        except Exception as error:
            log.warning("no profile of step %d: %s", self._step, error)
        finally:
            with contextlib.suppress(Exception):
                self._record_memory(None)

    def drop(self) -> None:
        """Forget the open profile, of a step that has failed."""
        if self._open is not None:
            opened = self._open
            self._open = None
            with contextlib.suppress(Exception):
                opened.stop()
                self._record_memory(None)
        self._step = 0

    def _record_memory(self, what: Literal["all"] | None) -> None:
        if self._is_cuda:
            torch.cuda.memory._record_memory_history(  # noqa: SLF001
                what, max_entries=MAX_ALLOCATIONS
            )
