"""CUDA MPS for a shared device: when it is used, and that its daemon ends with the run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from job_runs import all_gone, environment
from launch_cases import load, machine, nodes

from asyncrl.base.signals import STOPS
from asyncrl.job.servers import start_mps
from asyncrl.launch import mps
from asyncrl.launch.machine import CudaDevice, single_node
from asyncrl.launch.mps import Mps
from asyncrl.launch.placement import place
from asyncrl.launch.plan import plan_run

SHARED = ["placement={trainer: 0, rollout: 0, share: 0.4}", "buffer.max_staleness=1"]
DEVICE = CudaDevice("0", 2**34, 2**34, "GPU-aaaa", "Default")
CONTROL = """#!/bin/sh
# Writes down its calls. With -d it leaves a process in another session that reads a pipe, like the daemon.
echo "$* on $CUDA_VISIBLE_DEVICES" >> "$0.calls"
cd "$CUDA_MPS_PIPE_DIRECTORY" || exit 1
if [ "$1" = -d ]; then
    if [ -e "$0.fails" ]; then echo "no permission"; exit 1; fi
    mkfifo control
    setsid sh -c 'read line < control' &
    echo $! > "$0.pid"
else
    read command
    echo "$command" >> "$0.calls"
    if [ "$command" = quit ]; then kill -9 "$(cat "$0.pid")"; fi
fi
"""
CONTROLLER = """
import asyncio, sys
from pathlib import Path
from asyncrl.launch import mps
from asyncrl.launch.machine import CudaDevice
async def live():
    mps.PROBE = "pass"
    daemon = mps.Mps([CudaDevice("0", uuid="GPU-aaaa")], Path(sys.argv[1]))
    print(await daemon.start() or daemon.environ([])["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
    await asyncio.Event().wait()
asyncio.run(live())
"""


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The control program, on PATH."""
    path = tmp_path / "bin" / mps.CONTROL
    path.parent.mkdir()
    path.write_text(CONTROL)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent), prepend=":")
    monkeypatch.setattr(mps, "PROBE", "pass")
    return path


def make_mps(folder: Path) -> tuple[Mps, Path]:
    """Return MPS, and its folder of pipes."""
    made = Mps([DEVICE], folder / "logs")
    return made, Path(made.environ([DEVICE])["CUDA_MPS_PIPE_DIRECTORY"])


def daemon_of(control: Path) -> psutil.Process:
    return psutil.Process(int(Path(f"{control}.pid").read_text()))


def test_daemon_of_the_shared_device_ends_with_the_run(
    control: Path, tmp_path: Path
) -> None:
    made, pipes = make_mps(tmp_path)
    assert len(str(pipes / "control")) < 108, "a socket's path"
    assert pipes.stat().st_mode & 0o777 == 0o700

    async def story() -> psutil.Process:
        assert await made.start() == ""
        daemon = daemon_of(control)
        (shell,) = psutil.Process().children()
        for process, number in product([daemon, shell], STOPS):
            process.send_signal(number)
        assert daemon.is_running()
        for _ in range(2):
            await made.aclose()
        return daemon

    assert all_gone([asyncio.run(story())])
    assert not pipes.exists()
    assert (
        Path(f"{control}.calls").read_text() == "-d on GPU-aaaa\n on GPU-aaaa\nquit\n"
    )


def test_daemon_ends_with_a_killed_controller(control: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CONTROLLER, str(tmp_path / "logs")]
    controller = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert controller.stdout is not None
    pipes = Path(controller.stdout.readline().strip())
    daemon = daemon_of(control)
    (shell,) = psutil.Process(controller.pid).children()
    controller.kill()
    controller.communicate()
    assert all_gone([daemon, shell])
    assert not pipes.exists()


HANGS = "import sys, time; print('hung', file=sys.stderr, flush=True); time.sleep(600)"


@pytest.mark.parametrize(
    ("probe", "says"),
    [("raise SystemExit('no client')", "no client"), ("", "no perm"), (HANGS, "hung")],
)
def test_unusable_mps_is_named_and_leaves_nothing(
    probe: str,
    says: str,
    control: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if probe:
        monkeypatch.setattr(mps, "PROBE", probe)
        monkeypatch.setattr(mps, "START_TIMEOUT_S", 2.0)
    else:
        Path(f"{control}.fails").touch()

    made, pipes = make_mps(tmp_path)

    async def story() -> str:
        why = await made.start()
        await made.aclose()
        return why

    assert f"does not start; read {tmp_path}/logs/start.log" in asyncio.run(story())
    assert not pipes.exists()
    assert says in (tmp_path / "logs" / "start.log").read_text()
    if probe:
        assert all_gone([daemon_of(control)])


@pytest.mark.parametrize("fails", [False, True])
def test_run_without_mps_warns_and_goes_on(
    fails: bool, control: Path, tmp_path: Path
) -> None:
    if fails:
        Path(f"{control}.fails").touch()
    config = load(*SHARED)
    placement = place(config, single_node(replace(machine(1), cuda=(DEVICE,))))
    closing, warnings = list[Any](), list[str]()

    def closes(_: str, close: Any) -> None:
        closing.append(close)

    log = SimpleNamespace(warn=warnings.append)
    life: Any = SimpleNamespace(config=config, run_dir=tmp_path, log=log, closes=closes)

    async def story() -> bool:
        is_used = await start_mps(life, placement) is not None
        await closing[0]()
        return is_used

    assert asyncio.run(story()) == (not fails)
    assert ["start.log" in text for text in warnings] == [True] * fails
    assert fails or all_gone([daemon_of(control)])


@pytest.mark.parametrize(
    ("overrides", "device", "says"),
    [
        ([], DEVICE, "compute at the same time, by CUDA MPS"),
        (["placement.mps=never"], DEVICE, "take time slices: placement.mps=never"),
        (["launcher=ray"], DEVICE, "take time slices: launcher=ray starts no MPS"),
        (
            [],
            replace(DEVICE, mode="Exclusive_Process"),
            "device 0 is Exclusive_Process, not Default",
        ),
        (
            [],
            replace(DEVICE, mode="MIG"),
            "the compute mode of CUDA device 0 is MIG, not Default",
        ),
        (
            [],
            replace(DEVICE, mode=""),
            "the compute mode of CUDA device 0 is unknown, not Default",
        ),
        (["buffer.max_staleness=0"], DEVICE, "both sides stay"),
    ],
)
@pytest.mark.usefixtures("control")
def test_plan_says_how_a_device_is_shared(
    overrides: list[str], device: CudaDevice, says: str
) -> None:
    there = single_node(replace(machine(1), cuda=(device,)))
    _, messages = plan_run(load(*SHARED, *overrides), there)
    assert messages[0].startswith("placement.share=0.4: both sides stay")
    assert messages[0].endswith(says)


def test_missing_program_means_time_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    there = single_node(replace(machine(1), cuda=(DEVICE,)))
    _, messages = plan_run(load(*SHARED), there)
    assert f"take time slices: {mps.CONTROL} is not installed" in messages[0]


def test_described_machine_has_no_known_mode() -> None:
    _, messages = plan_run(load(*SHARED), nodes(1))
    assert (
        "take time slices: the compute mode of CUDA device 0 is unknown" in messages[0]
    )
