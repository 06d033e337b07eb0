"""What every benchmark shares: --seconds and --write, a line about the machine, and what is printed kept in a
file.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def options(doc: str | None, *, seconds: float) -> argparse.ArgumentParser:
    """A parser with --seconds and --write."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        help="about so long to measure, start-up aside (default: %(default)s)",
    )
    parser.add_argument(
        "--write", action="store_true", help="also keep what is printed in benchmarks/results/"
    )
    return parser


@contextlib.contextmanager
def reported(name: str, *, is_kept: bool) -> Iterator[None]:
    """Print the machine and then whatever the block prints; with `is_kept` also write it to
    results/NAME.txt.
    """
    kept = io.StringIO()
    with contextlib.redirect_stdout(_Both(sys.stdout, kept)):
        print(machine_line())
        yield
    if is_kept:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.txt").write_text(kept.getvalue(), encoding="utf-8")


class _Both(io.TextIOBase):
    def __init__(self, *targets: io.TextIOBase | io.StringIO) -> None:
        self._targets = targets

    def write(self, text: str) -> int:
        for target in self._targets:
            target.write(text)
            target.flush()
        return len(text)


def machine_line() -> str:
    """Processor, cores, device and versions that the figures depend on."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    return (
        f"{_processor()}, {os.cpu_count()} cores, {device}; Python {platform.python_version()}, torch "
        f"{torch.__version__}, "
        f"transformers {version('transformers')}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
