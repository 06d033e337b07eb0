"""Shared by all benchmarks: options, the kept report, random models, engine servers,
memory copies.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import platform
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.base.errors import ConfigError
from asyncrl.base.http import Caller
from asyncrl.config import RolloutConfig
from asyncrl.engines.engine import EngineClient, EngineServer
from asyncrl.extensions.vllm.vllm_process import VllmRequirements
from asyncrl.extensions.vllm.vllm_server import VllmServer
from asyncrl.launch.machine import find_python
from asyncrl.launch.processes import ChildProcess, ProcessSpec
from asyncrl.messages.engine_api import EngineHealth
from asyncrl.trainer.model.random_init import make_character_tokenizer
from asyncrl.trainer.trainer_client import TrainerSpec

HERE = Path(__file__).parent
RESULTS = HERE / "results"
CONFIGS = HERE.parent / "configs"
SMOLLM2 = HERE.parent / "models" / "smollm2-135m-instruct"
ASYNCRL = [sys.executable, "-m", "asyncrl.cli", "run"]
START_S = 600.0
SAMPLE_S = 0.25
RUN_TIMEOUT_S = 900.0


def plain_options(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help keeps the lines of `doc`."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def options(doc: str | None, *, seconds: float) -> argparse.ArgumentParser:
    """Return a parser with --seconds and --write."""
    parser = plain_options(doc)
    parser.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        help="time to measure, start-up excluded (%(default)s)",
    )
    parser.add_argument(
        "--write", action="store_true", help="keep the output in benchmarks/results/"
    )
    return parser


@contextlib.contextmanager
def reported(name: str, *, is_kept: bool) -> Iterator[None]:
    """Print the machine and the block's output; with `is_kept`, also write both to
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
    """Return the processor, device and versions that the figures depend on."""
    device = card() or "no CUDA device"
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [
        line.partition(":")[2].strip()
        for line in lines
        if line.startswith("model name")
    ]
    return (
        f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, {device}; "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {version('transformers')}"
    )


def card() -> str:
    """Return the name of the CUDA device, or an empty text."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def label_of(name: str) -> str:
    """Return a device's name as a part of file names."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def child_environ() -> dict[str, str]:
    """Return this environment for children that import modules of this folder."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    }


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a run's metrics.jsonl. A run makes the file before its
    first step, and may be writing its end.
    """
    path = run_dir / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole, _, _ = text.rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


@dataclass
class RunProcesses:
    """Samples of a run's processes, by name: CPU seconds so far, and memory if it is
    sampled.
    """

    root: psutil.Process
    run_dir: Path
    memory_of: str | None = None
    """None, cpu (proportional set sizes) or cuda (used memory of all devices, as
    "device").
    """
    samples: list[tuple[int, float, dict[str, float]]] = field(default_factory=list)
    """(steps done, time, CPU seconds)."""
    memory: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    """(steps done, bytes)."""

    def sample(self) -> None:
        """Take one sample."""
        cpu_s = dict[str, float]()
        held = (
            {"device": _device_bytes()}
            if self.memory_of == "cuda"
            else dict[str, int]()
        )
        try:
            for process in (self.root, *self.root.children(recursive=True)):
                name = "controller" if process == self.root else _name_of(process)
                cpu_s[name] = cpu_s.get(name, 0.0) + sum(process.cpu_times()[:2])
                if self.memory_of == "cpu" and name.startswith(("trainer", "engine")):
                    held[name] = held.get(name, 0) + process.memory_full_info().pss
        except psutil.NoSuchProcess:  # the run is ending
            return
        # Read last: a sample that a busy machine delayed must not count for an earlier
        # step.
        metrics = self.run_dir / "metrics.jsonl"
        num_steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        self.samples.append((num_steps, time.monotonic(), cpu_s))
        self.memory.append((num_steps, held))

    def peak_bytes(self, num_steps: int) -> dict[str, int]:
        """Return the peak of each process, and of all as "all", until the last of
        `num_steps` ends.
        """
        held = [
            {**each, "all": sum(each.values())}
            for done, each in self.memory
            if done < num_steps
        ]
        return {name: max(each.get(name, 0) for each in held) for name in held[-1]}

    def cpu(self, first: int, last: int) -> dict[str, float]:
        """Return each process's CPU seconds per wall second between two steps. Raises
        SystemExit if the steps took less than two samples.
        """
        inside = [sample for sample in self.samples if first <= sample[0] <= last]
        if len(inside) < 2:
            raise SystemExit(
                f"steps {first} to {last} took less than {2 * SAMPLE_S} s, too short to measure.\n"
                "  Way out: raise --seconds."
            )
        (_, begin_s, before), (_, end_s, after) = inside[0], inside[-1]
        return {
            name: (after[name] - before[name]) / (end_s - begin_s)
            for name in after
            if name in before
        }


def _name_of(process: psutil.Process) -> str:
    return next(
        (Path(part).stem for part in process.cmdline() if part.endswith(".json")),
        "fork server",
    )


def _device_bytes() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    lines = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.split()
    return 2**20 * sum(map(int, lines))


def watched(
    command: list[str], run_dir: Path, *, memory_of: str | None = None
) -> RunProcesses:
    """Execute a run in `run_dir` and sample its processes. Raises SystemExit if it
    fails.
    """
    is_over = threading.Event()
    command = [*command, "--run-dir", str(run_dir)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, env=child_environ()
    ) as child:
        processes = RunProcesses(psutil.Process(child.pid), run_dir, memory_of)

        def watch() -> None:
            while not is_over.wait(SAMPLE_S):
                processes.sample()

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            code = child.wait(RUN_TIMEOUT_S)
        finally:
            child.kill()
            is_over.set()
            watcher.join()
    if code != 0:
        raise SystemExit(
            f"{' '.join(command)} ended with {code}; see {run_dir / 'logs'}"
        )
    return processes


def random_qwen3(folder: Path, **sizes: int) -> Qwen3ForCausalLM:
    """Save and return a random Qwen3 with tied embeddings and without an end token.
    `sizes`: fields of Qwen3Config.
    """
    torch.manual_seed(0)
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **ends, tie_word_embeddings=True))
    model.save_pretrained(folder)
    return model


def qwen3_69m(folder: Path, max_length: int) -> Qwen3ForCausalLM:
    """Save and return a random model of 69 M parameters, 277 MB in float32."""
    return random_qwen3(
        folder,
        vocab_size=16_384,
        hidden_size=640,
        intermediate_size=1920,
        num_hidden_layers=12,
        num_attention_heads=10,
        num_key_value_heads=5,
        head_dim=64,
        max_position_embeddings=max_length,
    )


def printable_tokenizer(folder: Path) -> Path:
    """Save a tokenizer with one token per printable ASCII character; return its folder."""
    make_character_tokenizer("".join(map(chr, range(32, 127))) + "\n").save_pretrained(
        folder / "tokenizer"
    )
    (folder / "tokenizer" / "config.json").write_text("{}")
    return folder / "tokenizer"


Spent = tuple[float, float]
"""Wall seconds and CPU seconds. CPU seconds are steadier on a busy machine."""


def spent(work: Callable[[], object]) -> Spent:
    """Return what one call takes."""
    started = time.perf_counter()
    cpu = time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - cpu


def copy_costs(num_bytes: int, device: torch.device) -> tuple[Spent, Spent]:
    """Return the cost of a copy onto warm memory and onto new pages; on CUDA, to pinned
    memory for both.
    """
    is_cuda = device.type == "cuda"
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)

    def copy_to(target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        if is_cuda:
            torch.cuda.synchronize()

    warm = sorted(spent(lambda: copy_to(target)) for _ in range(3))[1]
    new = (
        warm
        if is_cuda
        else spent(lambda: copy_to(torch.empty(num_bytes, dtype=torch.uint8)))
    )
    return warm, new


def has_vllm() -> bool:
    """Return whether `make setup-vllm`, or the extra vllm, was installed."""
    try:
        find_python(RolloutConfig(engine="vllm"), "vllm")
    except ConfigError:
        return False
    return True


def trainer_spec(model: Path | str, folder: Path, **values: Any) -> TrainerSpec:
    """Return the spec of a trainer in this process, by default on the CPU in float32,
    whose files are in `folder`.
    """
    (folder / "staging").mkdir(exist_ok=True)
    spec = {"model_path": str(model), "dtype": "float32", "device": "cpu"}
    places = {
        "staging_dir": folder / "staging",
        "record_path": folder / "trained.jsonl",
    }
    return TrainerSpec(**spec | places | values)


@contextlib.asynccontextmanager
async def child_server(
    name: str, module: str, spec: dict[str, Any], folder: Path, **how: Any
) -> AsyncIterator[tuple[ChildProcess, Caller]]:
    """Run a module as a child process; yield it and its caller. `how`: more fields of
    its ProcessSpec.
    """
    how = {"secret": secrets.token_hex(16)} | how
    text = json.dumps({"name": name} | spec)
    child = ChildProcess(ProcessSpec(name, module, text, folder, **how))
    await child.start()
    caller = Caller(name, child.url, how["secret"])
    try:
        yield child, caller
    finally:
        await caller.aclose()
        await child.aclose()


@contextlib.asynccontextmanager
async def engine_server(
    kind: str, model: Path, folder: Path, *, slots: int, max_length: int, **fields: Any
) -> AsyncIterator[tuple[EngineClient, Caller]]:
    """Run a server of `kind` (embedded, vllm), by default on the CPU in float32,
    without an end token; yield its client and the client's caller. `fields`: more
    fields of the engine's spec.
    """
    spec: dict[str, Any] = {
        "model_path": str(model),
        "slots": slots,
        "max_length": max_length,
    }
    spec |= (
        {"device": "cpu"} | ({"dtype": "float32"} if kind == "vllm" else {}) | fields
    )
    python = (
        partial(find_python, RolloutConfig(engine="vllm"), "vllm")
        if kind == "vllm"
        else None
    )
    module = f"asyncrl_servers.{kind}"
    async with child_server("engine-0", module, spec, folder, python=python) as (
        child,
        caller,
    ):
        client: EngineClient
        if kind == "vllm":
            facts = VllmRequirements(
                model_path=str(model),
                dtype=spec["dtype"],
                slots=slots,
                max_length=max_length,
                end_ids=(),
            )
            client = vllm = VllmServer(caller, facts)
            ended = asyncio.create_task(child.wait())
            ended.add_done_callback(lambda _: vllm.disconnect_nowait())
            await vllm.ready(START_S)
        else:
            client = EngineServer(caller)
            await caller.get("/health", EngineHealth, timeout_s=START_S)
        yield client, caller
