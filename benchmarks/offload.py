"""What it costs to move a trainer off its device and back, against a plain memory copy of the same bytes.

A model of some 135 million parameters with random weights (the shape of SmolLM-135M), as a trainer has it
after a step: weights and two moments of AdamW, 12 bytes a parameter in float32. Each repetition, in the same
run: a plain copy of as many bytes (source and target warm), /offload's work for all parts, /onload's work for
all parts.

    python benchmarks/offload.py [--seconds 60] [--dtype float32]

On a CPU the parts go through a file in --folder, on the disk of a run directory, and what is measured is the
kernel's page cache: the disk itself writes later, and is not waited for. On a CUDA device they go through
pinned host memory, and the plain copy is one between pinned host memory and the device. The first repetition
also makes the file or the buffers: it is shown by itself.

`memory copy to new pages` has a target whose pages the kernel gives out during the copy, as onload must: it
took memory again.

Last line: `ratio: X` = the slower of offload and onload over the memory copy, medians of the same run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import torch
from report import options, reported
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils.logging import disable_progress_bar

from asyncrl.config import TrainerConfig
from asyncrl.messages.trainer_api import TrainerPart
from asyncrl.trainer.step import TrainStep
from asyncrl.trainer.trainer_client import TrainerSpec

ALL: tuple[TrainerPart, ...] = ("weights", "gradients", "optimizer")
MIN_REPETITIONS = 3


Spent = tuple[float, float]
"""Seconds, and seconds of CPU time, the kernel's for this process included: on a machine with other work the
steadier figure.
"""


@dataclass(frozen=True)
class Repetition:
    """What each has cost, and resident bytes of this process before and after offload and after onload."""

    copy: Spent
    new_pages: Spent
    offload: Spent
    onload: Spent
    resident: tuple[int, int, int]


def make_model(folder: Path) -> Path:
    """A random model of 134.5 M parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return folder / "model"


def make_trainer(model: Path, folder: Path, dtype: str) -> TrainStep:
    """With an optimizer state, which one step on a made-up gradient makes."""
    step = TrainStep(
        TrainerSpec(
            model_path=str(model),
            dtype=dtype,  # type: ignore[arg-type]
            trainer=TrainerConfig(),
            staging_dir=folder / "staging",
            record_path=folder / "trained.jsonl",
            failed_dir=folder / "failed_batches",
        )
    )
    for master in step._masters.named.values():
        master.grad = torch.full_like(master, 1e-3)
    step._optimizer.step()
    step._optimizer.zero_grad(set_to_none=True)
    return step


def spent(work: Callable[[], object]) -> Spent:
    """By one call."""
    started, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - cpu


def copy_costs(num_bytes: int, device: torch.device) -> tuple[Spent, Spent]:
    """Of a plain copy onto warm memory and onto new pages; on CUDA from the device into pinned memory, twice
    the same.
    """
    if device.type == "cuda":
        source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        target = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)
    else:
        source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)

    def copy_to(target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        if source.is_cuda:
            torch.cuda.synchronize()

    warm = sorted(spent(lambda: copy_to(target)) for _ in range(3))[1]
    return warm, warm if device.type == "cuda" else spent(
        lambda: copy_to(torch.empty(num_bytes, dtype=torch.uint8))
    )


def repeat(step: TrainStep) -> tuple[Repetition, int]:
    """One of each; also the bytes that moved."""
    process = psutil.Process()
    num_bytes = step.offload(ALL).num_bytes
    step.onload(ALL)
    copy, new_pages = copy_costs(num_bytes, step.device)
    resident, moved = [process.memory_info().rss], []
    costs = []
    for move in (step.offload, step.onload):
        costs.append(spent(lambda move=move: moved.append(move(ALL).num_bytes)))  # type: ignore[misc]
        resident.append(process.memory_info().rss)
    assert 0.99 * num_bytes <= moved[0] == moved[1]
    return Repetition(copy, new_pages, *costs, tuple(resident)), moved[0]  # type: ignore[arg-type]


def show(first: Repetition, repetitions: list[Repetition], num_bytes: int, step: TrainStep) -> None:
    """The table and the last line."""
    num_parameters = sum(parameter.numel() for parameter in step.policy.parameters())
    load = psutil.getloadavg()[0]
    print(f"{num_parameters / 1e6:.1f} M parameters, {step.dtype}, on {step.device.type}")
    print(
        f"{num_bytes / 1e6:.0f} MB each way, {len(repetitions)} repetitions, medians; load average of the "
        f"machine {load:.1f}"
    )
    print(f"{'':28}{'seconds':>10}{'GB/s':>8}{'of copy':>10}{'CPU s':>9}{'of copy':>10}{'first time':>12}")
    rows = {
        "memory copy": "copy",
        "memory copy to new pages": "new_pages",
        "offload": "offload",
        "onload": "onload",
    }
    wall, cpu = (
        {name: median(getattr(one, key)[kind] for one in repetitions) for name, key in rows.items()}
        for kind in (0, 1)
    )
    for name, key in rows.items():
        of_wall, of_cpu = wall[name] / wall["memory copy"], cpu[name] / cpu["memory copy"]
        first_s = getattr(first, key)[0]
        print(
            f"{name:28}{wall[name]:10.4f}{num_bytes / wall[name] / 1e9:8.1f}{of_wall:10.2f}{cpu[name]:9.3f}{of_cpu:10.2f}{first_s:12.3f}"  # noqa: E501
        )
    here, away, back = (median(one.resident[place] for one in repetitions) / 1e6 for place in range(3))
    print(f"resident memory of the process: {here:.0f} MB, offloaded {away:.0f} MB, back {back:.0f} MB")
    print(f"ratio: {max(wall['offload'], wall['onload']) / wall['memory copy']:.2f}")


def main() -> None:
    """Parse, measure, print."""
    parser = options(__doc__, seconds=60.0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--folder", default=None, help="where the file lies (default: the temporary directory)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="asyncrl-offload-", dir=arguments.folder) as name:
        folder = Path(name)
        step = make_trainer(make_model(folder), folder, arguments.dtype)
        first, num_bytes = repeat(step)
        repetitions: list[Repetition] = []
        end = time.perf_counter() + arguments.seconds
        while time.perf_counter() < end or len(repetitions) < MIN_REPETITIONS:
            repetitions.append(repeat(step)[0])
        with reported("offload", is_kept=arguments.write):
            show(first, repetitions, num_bytes, step)


if __name__ == "__main__":
    main()
