"""What `asyncrl check` plans of host memory, /dev/shm and disk is an upper bound, held
by a measured run.
"""

from __future__ import annotations

from pathlib import Path

import held_task
import psutil
import pytest
from job_runs import ended, start, wait_for_steps, write_config
from launch_cases import single_node
from tiny_model import SHAPE

from asyncrl.base.files import shared_memory_root
from asyncrl.config import load_config
from asyncrl.launch.plan import DISK, SHARED, make_plan

LARGE = {**SHAPE, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
MORE = 1.05
"""Headers, small files, and norms, which the plan leaves out."""


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_a_run_holds_at_most_what_check_counts(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        model={"scratch": {"characters": "abcdef0123456789 ", "architecture": LARGE}},
        task={"python": "held_task:HeldLetters"},
        buffer={"max_staleness": 1},
        checkpoint={"every": 1},
        trainer={
            "num_groups": 2,
            "num_steps": 4,
            "threads": 1,
            "micro_batch_tokens": 64,
        },
    )
    plan = make_plan(load_config(config, ["weight_sync.transport=shm"]), single_node())
    sizes = {(one.device, one.name): one.memory.total for one in plan.processes}
    before = {*shared_memory_root().glob("asyncrl-*")}
    run_dir = tmp_path / "run"
    held_task.hold(run_dir, 3)
    process = start(config, run_dir, "weight_sync.transport=shm")
    wait_for_steps(run_dir, 3, process)
    exports = sum(map(size_of, {*shared_memory_root().glob("asyncrl-*")} - before))
    family = [
        psutil.Process(process.pid),
        *psutil.Process(process.pid).children(recursive=True),
    ]
    resident = sum(one.memory_full_info().pss for one in family)
    held_task.release(run_dir)
    assert ended(process).returncode == 0
    assert exports <= MORE * sizes[SHARED, "weights"] <= 3 * MORE * exports
    assert (
        0.3 * plan.needed_bytes("cpu") <= resident + exports <= plan.needed_bytes("cpu")
    )
    (name,) = (name for device, name in sizes if name.endswith("checkpoints"))
    checkpoint = size_of(run_dir / "checkpoints/step_4")
    assert (
        checkpoint
        <= MORE * sizes[DISK, name] / int(name.split()[0])
        <= MORE**2 * checkpoint
    )
    folders = size_of(run_dir / "final") + size_of(run_dir / "model")
    assert folders <= MORE * sizes[DISK, "weights"] <= MORE**2 * folders
    assert size_of(run_dir) <= MORE * plan.needed_bytes(DISK)
