"""What a CUDA device must show: that the device computes what a CPU computes, and how fast. `make gpu` runs
all parts.

    python scripts/gpu_acceptance.py --part K [--row NAME ...] [--tiny] [--out DIR] [--wheels DIR] [--need]

    1  tests marked gpu; losses, head, packed forward and backward, LoRA against float32 on the CPU; distances
       between packed and plain in bfloat16
    2  optimizer steps: tokens/s, MFU, peak memory against the plan; TRL on the same batch
    3  trainer and embedded engine in turns: handovers against a memory copy; two shipped configs, which learn
    4  pushes of weights to the embedded engine: total seconds, and those without a token
    5  nccl to the embedded engine (two devices); vLLM: nccl, sleep, tensor parallel, batch invariance, async
       against sync (vLLM and two devices)

Each part is ended within 9 minutes, reaches no network, and needs no installation: a checkout
will do. Models are random, and made when they are needed. Each row is a process of its own: what breaks one
loses no other. A row is ended after --budget-s seconds; what would start after 8 minutes is not run (part 5
is more than one call holds: name its rows). Results are printed and appended to DIR/DEVICE.txt as they come,
plots go beside it (DIR: benchmarks/results); where nothing can be run there is no file.

Exit code: 1 if a row failed or is NOT ok, or a package is missing for a row of parts 1 to 4; else 0. What
needs a device that is not there is `not run`. --tiny takes tiny sizes, on the CPU where there is no device:
so tests run the same code.

Packages: --need prints what each row lacks in this Python. Where there is no pip, carry wheels, for that
machine's Python, in a folder: --wheels DIR unpacks them for this call alone. Beside torch and transformers
pydantic, pydantic-core, annotated-types and typing-inspection may be missing (typing-extensions too old), and
for the agent openai (below 3, which needs httpx2), distro, jiter and sniffio; TRL is optional. With pip:
    pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d DIR
    pydantic==X pydantic-core==Y annotated-types typing-inspection typing-extensions
    "openai<3" distro jiter sniffio
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

REPO = Path(__file__).resolve().parents[1]
IMPORTED = (REPO, REPO / "servers")
sys.path[:0] = [str(path) for path in (*IMPORTED, REPO / "benchmarks", REPO / "scripts")]

from gpu.rows import MARK, ROWS, Bench, NotRunError, Row, say  # noqa: E402

PART_S, LAST_START_S = 530.0, 480.0
"""Of a part: when its last row is ended, and when none starts any more."""
TAIL = 15
"""Lines of a broken row's output that are shown."""


def main() -> None:
    """Parse, and run a part; or one row of it, as the child that measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=int, choices=range(1, 6), help="which part (needed, but for --need)")
    parser.add_argument("--row", nargs="+", default=[], help="these rows alone")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on the CPU too")
    parser.add_argument("--out", type=Path, help="for DEVICE.txt (default: benchmarks/results; tiny: runs)")
    parser.add_argument("--budget-s", type=float, help="limit of a row (default 240; 500 in part 5)")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that this Python lacks")
    parser.add_argument("--need", action="store_true", help="print what rows lack, and run nothing")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out or REPO / ("runs" if options.tiny else "benchmarks/results")
    if options.part is None and not options.need:
        parser.error("give --part")
    rows = [row for row in ROWS if options.part in (None, row.part)]
    if unknown := set(options.row) - {row.name for row in rows}:
        parser.error(
            f"part {options.part} has no row {', '.join(sorted(unknown))}: {[row.name for row in rows]}"
        )
    rows = [row for row in rows if not options.row or row.name in options.row]
    if options.child is not None:
        measure(rows[0], options)
        return
    with tempfile.TemporaryDirectory(prefix="asyncrl-gpu-") as name, packages(options.wheels, Path(name)):
        if options.need:
            for row in rows:
                print(f"{row.part} {row.name:<20} {', '.join(row.missing()) or 'nothing is missing'}")
            return
        raise SystemExit(Part(options, Path(name)).run(rows))


@contextlib.contextmanager
def packages(wheels: Path | None, folder: Path) -> Iterator[None]:
    """Have this process and its children import this checkout and what is in the wheels."""
    site = folder / "site"
    for wheel in sorted(wheels.glob("*.whl")) if wheels is not None else ():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    before = dict(os.environ)
    sys.path.insert(0, str(site))
    inherited = filter(None, [before.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, (site, *IMPORTED)), *inherited])
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        yield
    finally:
        sys.path.remove(str(site))
        os.environ.clear()
        os.environ.update(before)


class Part:
    """One part: its rows one after the other, each in a child process, and the table of what they tell."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.started_s, self.has_failed, self.is_ok = time.monotonic(), False, True
        self._waiting: list[str] = []
        self._file: Path | None = None

    def run(self, rows: list[Row]) -> int:
        """The exit code."""
        self.write(f"\npart {self.options.part}{', tiny' if self.options.tiny else ''}")
        for row in rows:
            elapsed_s = time.monotonic() - self.started_s
            if missing := row.missing():
                self.tell(row, {"what": "", "value": f"not run: missing {', '.join(missing)} (see --wheels)"})
                self.has_failed |= row.part != 5 and not {"trl", "datasets"}.issuperset(missing)
            elif elapsed_s > LAST_START_S:
                self.tell(row, {"what": "", "value": "not run: no time"})
            else:
                budget_s = self.options.budget_s or (500.0 if row.part == 5 else 240.0)
                self.run_row(row, min(budget_s, PART_S - elapsed_s))
        self.write(f"part {self.options.part}: {time.monotonic() - self.started_s:.0f} s")
        return int(self.has_failed)

    def run_row(self, row: Row, limit_s: float) -> None:
        """Measure in a child; what it tells is written as it comes."""
        self.is_ok = True
        own = self.folder / f"{row.part}-{row.name}"
        own.mkdir()
        options, started_s = self.options, time.monotonic()
        command = [sys.executable, __file__, "--part", str(row.part), "--row", row.name, "--child", str(own)]
        command += ["--out", str(options.out.resolve()), "--budget-s", str(limit_s)]
        child = subprocess.Popen(
            [*command, *(["--tiny"] if options.tiny else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            cwd=REPO,
        )
        assert child.stdout is not None
        is_late = threading.Event()
        late = threading.Timer(limit_s, lambda: (is_late.set(), end_session(child)))
        late.start()
        try:
            lines = self.read(row, child.stdout)
        finally:
            late.cancel()
            end_session(child)  # what the row has left running
        child.stdout.close()
        code = child.wait()
        if code != 0:
            why = f"was ended after {limit_s:.0f} s" if is_late.is_set() else f"ended with {code}"
            self.tell(
                row, {"what": "", "value": f"{why}: {lines[-1] if lines else 'no output'}", "ok": False}
            )
        else:
            self.tell(row, {"what": "seconds of the row", "value": f"{time.monotonic() - started_s:.1f}"})
        if code != 0 or not self.is_ok:
            print("\n".join(f"    {line}" for line in lines), flush=True)

    def read(self, row: Row, output: TextIO) -> deque[str]:
        """Write what it tells until its output ends; returns the last other lines."""
        others = deque[str](maxlen=TAIL)
        for line in output:
            if line.startswith(MARK):
                self.tell(row, json.loads(line.removeprefix(MARK)))
            elif line.strip():
                others.append(line.rstrip())
        return others

    def tell(self, row: Row, told: dict[str, Any]) -> None:
        """One line of the table; the first of a device says which file it is."""
        if "machine" in told:
            if self._file is None:
                self.options.out.mkdir(parents=True, exist_ok=True)
                self._file = self.options.out / f"{told['label']}.txt"
                self.write(told["machine"])
            return
        ok = {True: "ok", False: "NOT ok", None: ""}[told.get("ok")]
        self.is_ok &= told.get("ok") is not False
        self.has_failed |= not self.is_ok
        against = f"  ({told['against']})" if told.get("against") else ""
        self.write(
            f"{row.part} {row.name:<20} {told['what']:<46} {told['value']:>12}{against}  {ok}".rstrip()
        )

    def write(self, line: str) -> None:
        """Print, and append to the file once it is known."""
        print(line, flush=True)
        self._waiting.append(line)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.writelines(f"{waiting}\n" for waiting in self._waiting)
            self._waiting.clear()


def end_session(child: subprocess.Popen[str]) -> None:
    """End the child and all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def measure(row: Row, options: argparse.Namespace) -> None:
    """In the child: call the row's function."""
    import torch
    from common import machine_line

    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    models = options.child.parent / "models"
    bench = Bench(device, options.tiny, label, options.child, models, options.out, options.budget_s)
    if device == "cpu" and not options.tiny:
        bench.tell("", "not run: no CUDA device")
        return
    say(machine=machine_line(), label=label)
    module, _, function = row.function.partition(".")
    try:
        getattr(importlib.import_module(f"gpu.{module}"), function)(bench, **row.arguments)
    except NotRunError as why:
        bench.tell("", f"not run: {why}")


if __name__ == "__main__":
    main()
