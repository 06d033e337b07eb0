"""Compare a CUDA device with a CPU, and measure it. `make gpu` runs all parts.

    python scripts/gpu_acceptance.py --part K [--row NAME ...] [--tiny] [--out DIR]
    [--need]

    1  the most valuable rows: attention kernels, optimizer steps of 0.6B and 4B (tokens/s, MFU, peak memory
       against the plan), a push by ipc, handovers of a colocated run, the quickstart
    2  tests marked gpu; losses, head, packed forward and backward, and LoRA against float32 on the CPU
    3  longer sequences; deterministic steps; TRL on the same batch
    4  handovers by files, the agent, more weight pushes
    5  one device: async runs against colocated ones; fused decode steps; vLLM: decode,
       pushes in all interrupt modes, sleep, a kill, runs, the agent, batch invariance. Two devices: nccl,
       tensor parallel

A part ends within 9 minutes and uses no network. The first lines name card, driver,
versions, whether layers are compiled, and the attention kernel. BELOW marks a figure
below its estimate for an H100; such a row does not fail. Models are random. Each row
runs in its own process for at most --budget-s seconds, so a broken row breaks no other
row. No row starts after 8 minutes; name the rows of part 5. Results are printed and
appended to DIR/DEVICE.txt, with plots (default: benchmarks/results).

Exit code: 1 if a row failed, is NOT ok, or lacks a package (parts 1 to 4). --tiny uses
tiny sizes, also on a CPU. ASYNCRL_GPU_VLLM_ARGS: more arguments of `vllm serve` as
JSON, such as {"enforce_eager": true, "compilation_config": null}. Without a network:
scripts/gpu/bundles.sh, unpack.sh and calls.sh.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
IMPORTED = [
    str(path)
    for path in (REPO, REPO / "servers", REPO / "benchmarks", REPO / "scripts")
]
sys.path[:0] = IMPORTED

from gpu.rows import MARK, ROWS, Bench, NotRunError, Row, say  # noqa: E402

STARTED_S = time.monotonic()
PART_S = 530.0
"""Limit of a part."""
LAST_START_S = 480.0
IMPORTS_OF_VLLM = """
from importlib.metadata import version
from asyncrl_servers.vllm.arguments import is_cpu_build
if not is_cpu_build():
    import vllm.entrypoints.openai.api_server, vllm.v1.worker.gpu_worker
    import asyncrl_servers.vllm.worker_extension
    print(version("vllm"))
"""
TAIL = 60
"""Output lines that are shown of a broken row."""


def main() -> None:
    """Run a part, or in a child process one row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=int, choices=range(1, 6))
    parser.add_argument(
        "--need", action="store_true", help="print what each row lacks, and stop"
    )
    parser.add_argument("--row", nargs="+", default=[], help="only these rows")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, also on a CPU")
    parser.add_argument("--out", type=Path, help="folder of DEVICE.txt")
    parser.add_argument(
        "--budget-s", type=float, help="limit of a row (default 240; 500 in part 5)"
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out or REPO / (
        "runs" if options.tiny else "benchmarks/results"
    )
    if options.need:
        for row in ROWS:
            print(
                f"{row.part} {row.name:<20} {', '.join(row.missing()) or 'nothing is missing'}"
            )
        return
    if options.part is None:
        parser.error("give --part or --need")
    rows = [row for row in ROWS if options.part == row.part]
    if unknown := set(options.row) - {row.name for row in rows}:
        parser.error(
            f"no row {', '.join(sorted(unknown))}; there are {[row.name for row in rows]}"
        )
    rows = [row for row in rows if not options.row or row.name in options.row]
    if options.child is not None:
        measure(rows[0], options)
        return
    with tempfile.TemporaryDirectory(prefix="asyncrl-gpu-") as name:
        raise SystemExit(Part(options, Path(name)).run(rows))


class Part:
    """Runs the rows of a part, each in a child process, and prints a table of their
    results.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.has_failed = False
        self.label = ""
        """Of the device."""
        self.lines: list[str] = []

    def run(self, rows: list[Row]) -> int:
        """Return the exit code."""
        started_s = time.monotonic()
        self.write(f"\npart {self.options.part}{', tiny' if self.options.tiny else ''}")
        for row in rows:
            elapsed_s = time.monotonic() - started_s
            if missing := row.missing():
                self.tell(
                    row, {"what": "", "value": f"not run: missing {', '.join(missing)}"}
                )
                self.has_failed |= row.part != 5 and not {"trl", "datasets"}.issuperset(
                    missing
                )
            elif elapsed_s > LAST_START_S:
                self.tell(row, {"what": "", "value": "not run: no time"})
            else:
                budget_s = self.options.budget_s or (500.0 if row.part == 5 else 240.0)
                self.run_row(row, min(budget_s, PART_S - elapsed_s))
        self.write(f"part {self.options.part}: {time.monotonic() - started_s:.0f} s")
        return int(self.has_failed)

    def run_row(self, row: Row, limit_s: float) -> None:
        """Measure in a child process, and report its results as they come."""
        own = self.folder / f"{row.part}-{row.name}"
        own.mkdir()
        started_s = time.monotonic()
        command = [
            sys.executable,
            __file__,
            "--part",
            str(row.part),
            "--row",
            row.name,
            "--child",
            str(own),
        ]
        command += [
            "--out",
            str(self.options.out.resolve()),
            "--budget-s",
            str(limit_s),
        ]
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        path = os.pathsep.join(
            [*IMPORTED[:2], *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        child = subprocess.Popen(
            [*command, *(["--tiny"] if self.options.tiny else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            cwd=REPO,
            env={**os.environ, **offline, "PYTHONPATH": path},
        )
        assert child.stdout is not None
        late = threading.Timer(limit_s, end_session, [child])
        late.start()
        is_ok = True
        others = deque[str](["no output"], maxlen=TAIL)
        try:
            for line in child.stdout:
                if line.startswith(MARK):
                    is_ok &= self.tell(row, json.loads(line.removeprefix(MARK)))
                elif line.strip():
                    others.append(line.rstrip())
        finally:  # also after an interrupt, which the child's own session does not get
            late.cancel()
            end_session(child)
        child.stdout.close()
        code = child.wait()
        seconds = time.monotonic() - started_s
        if code != 0:
            why = (
                f"was ended after {limit_s:.0f} s"
                if seconds >= limit_s
                else f"ended with {code}"
            )
            is_ok = self.tell(
                row, {"what": "", "value": f"{why}: {others[-1]}", "ok": False}
            )
        else:
            self.tell(row, {"what": "seconds of the row", "value": f"{seconds:.1f}"})
        if not is_ok:
            print("\n".join(f"    {line}" for line in others), flush=True)

    def tell(self, row: Row, told: dict[str, Any]) -> bool:
        """Write one line of the table. Return False if a limit is broken."""
        if "machine" in told:
            lines = [] if self.label else told["machine"]
            self.label = told["label"]
            for line in lines:
                self.write(line)
            return True
        is_ok = told.get("ok") is not False
        self.has_failed |= not is_ok
        ok = (
            "BELOW"
            if told.get("below")
            else {True: "ok", False: "NOT ok", None: ""}[told.get("ok")]
        )
        against = f"  ({told['against']})" if told.get("against") else ""
        line = f"{row.part} {row.name:<20} {told['what']:<46} {told['value']:>12}{against}  {ok}"
        self.write(line.rstrip())
        return is_ok

    def write(self, line: str) -> None:
        """Print a line, and append it to the file once the device is known."""
        print(line, flush=True)
        self.lines.append(line)
        if self.label:
            self.options.out.mkdir(parents=True, exist_ok=True)
            with (self.options.out / f"{self.label}.txt").open(
                "a", encoding="utf-8"
            ) as file:
                file.writelines(f"{waiting}\n" for waiting in self.lines)
            self.lines.clear()


def end_session(child: subprocess.Popen[str]) -> None:
    """Kill the child and its descendants."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def measure(row: Row, options: argparse.Namespace) -> None:
    """Call the row's function, in the child process."""
    import torch
    from common import card, label_of, machine_line

    device = "cuda" if torch.cuda.is_available() else "cpu"
    label = label_of(card() or "cpu")
    models = options.child.parent / "models"
    bench = Bench(
        device,
        options.tiny,
        label,
        options.child,
        models,
        options.out,
        options.budget_s - (time.monotonic() - STARTED_S),  # imports take seconds
    )
    if device == "cpu" and not options.tiny:
        bench.tell("", "not run: no CUDA device")
        return
    say(
        machine=[
            machine_line(),
            *(cuda_lines(torch.device("cuda")) if device == "cuda" else []),
        ],
        label=label,
    )
    module, _, function = row.function.partition(".")
    try:
        if device == "cpu" and "vllm" in row.needs:
            refuse_cuda_build()
        getattr(importlib.import_module(f"gpu.{module}"), function)(
            bench, **row.arguments
        )
    except NotRunError as why:
        bench.tell("", f"not run: {why}")


def refuse_cuda_build() -> None:
    """Raise NotRunError if vLLM is built for CUDA, after importing what its server and
    workers import up to their first call of CUDA. Raises CalledProcessError.
    """
    from asyncrl.config.rollout_config import RolloutConfig
    from asyncrl.launch.machine import find_python

    python = find_python(RolloutConfig(engine="vllm"), "vllm")
    done = subprocess.run(
        [python, "-c", IMPORTS_OF_VLLM],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(IMPORTED[:2])},
    )
    if version := done.stdout.strip():
        raise NotRunError(f"vLLM {version} is for CUDA; its modules were imported here")


def cuda_lines(device: Any) -> list[str]:
    """Return the driver, CUDA, and the kernels that decide the speed."""
    import torch

    from asyncrl.trainer.attention.packed_attention import choose_flash
    from asyncrl.trainer.model.compiled import missing_for_compiling

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.split()
    missing = missing_for_compiling(device)
    flash = choose_flash(torch.cuda.get_device_capability())
    return [
        f"driver {driver[0] if driver else 'unknown'}, CUDA {torch.version.cuda}, FlashAttention {flash}",
        f"layers run uncompiled, BELOW all estimates: {missing}"
        if missing
        else "layers are compiled",
    ]


if __name__ == "__main__":
    main()
