"""Which device each trainer rank and each engine gets, and whether the two sides take turns; and which CUDA
devices this machine has. Imports no torch.

How `placement` is read, where a machine has N CUDA devices:

    numbers, lists, ranges   these, all of which must exist and have work
    all                      every CUDA device
    cuda, auto               as many as there are ranks (trainer) or engines (rollout), from those that the
                             other side leaves; none left: the other side's, in turns. auto without CUDA: cpu
    trainer                  (rollout) the trainer's, in turns

Turns need buffer.max_staleness=0. A rank has a CUDA device of its own; engines are dealt over theirs in
turn, so two may share one. Both sides on cpu run side by side, unless rollout is `trainer`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from asyncrl.config import RunConfig
from asyncrl.config.placement import (
    PARTLY_WAY_OUT,
    TURNS_WAY_OUT,
    numbers_of,
    partly_shared,
    turns_need_no_staleness,
)
from asyncrl.config.transports import DevicesInUse
from asyncrl.errors import ConfigError

Mode = Literal["apart", "colocated"]
Numbers = tuple[int, ...] | None
"""Numbers of CUDA devices, None for the CPU."""
NO_DEVICE = "none"
"""Where a simulated engine runs, and one that the run did not start."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices by name (cpu, cuda:0, ...): of each trainer rank, of each engine, of the eval engine (None:
    there is none). `parallel`: all devices of each engine, where one is split over several; `rollout` has the
    first.
    """

    trainer: tuple[str, ...]
    rollout: tuple[str, ...]
    evaluation: str | None
    mode: Mode
    parallel: tuple[tuple[str, ...], ...] = ()

    def devices_of(self, index: int) -> tuple[str, ...]:
        """All devices of one engine."""
        return self.parallel[index] if self.parallel else (self.rollout[index],)

    @property
    def engine_devices(self) -> list[str]:
        """Devices of all engines, each named once."""
        return [*dict.fromkeys(device for n in range(len(self.rollout)) for device in self.devices_of(n))]

    @property
    def is_on_cuda(self) -> bool:
        """Whether the trainer is on CUDA devices; when colocated, the engines too."""
        return self.trainer[0] != "cpu"


def place(config: RunConfig, num_cuda: int) -> Placement:
    """The placement on a machine with so many CUDA devices. Raises ConfigError."""
    trainer, rollout = _numbers(config, num_cuda)
    both = set(trainer or ()) & set(rollout or ())
    is_turns = bool(both) or config.placement.rollout == "trainer"
    if trainer is not None and rollout is not None and both and set(trainer) != set(rollout):
        raise ConfigError(partly_shared(trainer, rollout), way_out=f"{PARTLY_WAY_OUT}.")
    if is_turns and config.buffer.max_staleness > 0:
        written = (
            f"placement.trainer={config.placement.trainer}, placement.rollout={config.placement.rollout}"
        )
        raise ConfigError(
            f"{turns_need_no_staleness(written, config.buffer.max_staleness)} ({num_cuda} CUDA devices)",
            way_out=f"{TURNS_WAY_OUT}: cpu, or CUDA devices that a smaller trainer.world_size leaves.",
        )
    _check_numbers(config, trainer, rollout)
    engines, split = config.rollout.num_engines, config.rollout.tensor_parallel
    ranks, dealt = _deal(trainer, config.trainer.world_size), _deal(rollout, engines * split)
    firsts = dealt[::split]
    _check_vllm(config, firsts, is_turns=is_turns)
    refusal = config.weight_sync.way.refuse(config, DevicesInUse(ranks, firsts, is_turns))
    if refusal is not None:
        what, rule, way_out = refusal
        raise ConfigError(what, rule=rule, way_out=f"{way_out}.")
    is_simulated = config.rollout.engine == "simulated"
    if _takes_no_device(config):
        firsts, dealt = (NO_DEVICE,) * engines, ()
    evaluation = None
    if config.eval is not None:
        evaluation = NO_DEVICE if is_simulated else _eval_device(config, ranks, dealt, num_cuda)
    parallel = tuple(dealt[start : start + split] for start in range(0, len(dealt), split))
    mode: Mode = "colocated" if is_turns else "apart"
    return Placement(ranks, firsts, evaluation, mode, parallel if split > 1 else ())


def _takes_no_device(config: RunConfig) -> bool:
    """A latency model, and servers that the run did not start."""
    return config.rollout.engine == "simulated" or config.rollout.urls is not None


def _numbers(config: RunConfig, num_cuda: int) -> tuple[Numbers, Numbers]:
    """Devices of trainer and engines."""
    written, size = config.placement, config.trainer.world_size
    trainer, is_trainer_open = _named("placement.trainer", written.trainer, num_cuda)
    if written.rollout == "trainer":
        trainer = trainer[:size] if trainer is not None and is_trainer_open else trainer
        return trainer, trainer
    rollout, is_rollout_open = _named("placement.rollout", written.rollout, num_cuda)
    if is_rollout_open and _takes_no_device(config):
        rollout, is_rollout_open = None, False
    if is_trainer_open:
        taken = () if is_rollout_open else rollout or ()
        trainer = tuple(number for number in range(num_cuda) if number not in taken)[:size] or rollout
    if is_rollout_open:
        split = config.rollout.tensor_parallel
        left = tuple(number for number in range(num_cuda) if number not in (trainer or ()))
        whole = left[: len(left) // split * split] or left
        rollout = whole[: config.rollout.num_engines * split] or trainer
    return trainer, rollout


def _named(key: str, devices: object, num_cuda: int) -> tuple[Numbers, bool]:
    """What is written, and whether it leaves the choice open (auto and cuda, where there are devices)."""
    if devices == "cpu" or (devices == "auto" and not num_cuda):
        return None, False
    if not num_cuda:
        raise ConfigError(
            f"{key}={devices}, and there is no CUDA device that torch could use",
            rule="it needs the NVIDIA driver, a torch built with CUDA, and CUDA_VISIBLE_DEVICES to show it",
            way_out=f"set {key}=cpu (or auto: CUDA where there is a device, else cpu).",
        )
    numbers = numbers_of(devices)
    if numbers is None:
        return tuple(range(num_cuda)), devices != "all"
    if max(numbers) >= num_cuda:
        raise ConfigError(
            f"{key}={devices} names cuda:{max(numbers)}",
            rule=f"this machine shows {num_cuda} CUDA devices, counted from 0 among CUDA_VISIBLE_DEVICES",
            way_out=f"name devices of 0..{num_cuda - 1}.",
        )
    return numbers, False


def _check_numbers(config: RunConfig, trainer: Numbers, rollout: Numbers) -> None:
    """Each rank has a device of its own, each engine as many as it is split over, and none named is idle."""
    size, engines, split = (
        config.trainer.world_size,
        config.rollout.num_engines,
        config.rollout.tensor_parallel,
    )
    if trainer is not None and len(trainer) != size:
        raise ConfigError(
            f"placement.trainer={config.placement.trainer} is {len(trainer)} CUDA devices, and "
            f"trainer.world_size={size}",
            rule="each trainer process has a device of its own, and none may be idle",
            way_out=f"set trainer.world_size={len(trainer)}, or name {size} devices in placement.trainer.",
        )
    if rollout is None or _takes_no_device(config):
        return
    if len(rollout) % split or len(rollout) > engines * split:
        fewer = f", or name {engines * split} devices in placement.rollout"
        raise ConfigError(
            f"placement.rollout={config.placement.rollout} is {len(rollout)} CUDA devices, and "
            f"rollout.num_engines={engines}, rollout.tensor_parallel={split}",
            rule="an engine works on rollout.tensor_parallel devices of its own, and none may be idle",
            way_out=f"set rollout.num_engines={len(rollout) // split}{fewer}."
            if len(rollout) % split == 0
            else f"set rollout.tensor_parallel=1{fewer}.",
        )


def _check_vllm(config: RunConfig, engines: Sequence[str], *, is_turns: bool) -> None:
    """What vLLM cannot do on the CPU."""
    if config.rollout.engine != "vllm" or "cpu" not in engines:
        return
    if is_turns:
        raise ConfigError(
            f"placement.rollout={config.placement.rollout} has a vLLM on the CPU take turns with the trainer",
            rule="in turns an engine frees its memory while it sleeps, and vLLM on the CPU cannot",
            way_out="set placement.rollout=cpu (side by side), or rollout.engine=embedded.",
        )
    if config.rollout.tensor_parallel > 1 and config.rollout.urls is None:
        raise ConfigError(
            f"rollout.tensor_parallel={config.rollout.tensor_parallel}, and the engines are on the CPU",
            rule="an engine is split over CUDA devices; on the CPU it works with rollout.threads",
            way_out="set rollout.tensor_parallel=1, or name CUDA devices in placement.rollout.",
        )


def _deal(numbers: Numbers, num: int) -> tuple[str, ...]:
    """A device for each of `num` processes, dealt in turn."""
    if numbers is None:
        return ("cpu",) * num
    return tuple(f"cuda:{numbers[index % len(numbers)]}" for index in range(num))


def _eval_device(config: RunConfig, ranks: Sequence[str], engines: Sequence[str], num_cuda: int) -> str:
    """Where the eval engine goes: it works beside training at any time, so never with the trainer on CUDA."""
    written = config.placement.eval
    if written == "cpu" or (written == "auto" and (not num_cuda or "cpu" in engines)):
        return "cpu"
    if written == "auto":
        free = [
            device for device in _deal(tuple(range(num_cuda)), num_cuda) if device not in (*ranks, *engines)
        ]
        used = sorted(engines, key=lambda name: (engines.count(name), -engines.index(name)))
        device = [*free, *used, "cpu"][0]
    else:
        numbers, _ = _named("placement.eval", written, num_cuda)
        device = _deal(numbers, 1)[0]
    if device in ranks and device != "cpu":
        raise ConfigError(
            f"placement.eval={written} puts the eval engine on {device}, where the trainer works",
            rule="it evaluates beside training, with weights and KV cache of its own",
            way_out="set placement.eval=cpu or the number of another CUDA device, or set eval=none.",
        )
    return device


# Which CUDA devices a run may use. They are numbered among those that CUDA_VISIBLE_DEVICES leaves, in the
# order of the bus, which is that of nvidia-smi.

DRIVER_DIR = Path("/proc/driver/nvidia/gpus")
QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One device. `name`: how CUDA_VISIBLE_DEVICES of a child process calls it. `free_bytes`: None where
    nvidia-smi does not say.
    """

    name: str
    free_bytes: int | None = None


def find_cuda_devices() -> tuple[CudaDevice, ...]:
    """The devices that torch can use here: none beside a torch that was built without CUDA."""
    if not torch_has_cuda():
        return ()
    rows = [[cell.strip() for cell in line.split(",")] for line in ask_nvidia_smi().splitlines()]
    free = {name: int(mib) * 2**20 for *names, mib in rows if mib.isdigit() for name in names}
    # WSL has no such folder
    num_devices = len(list(DRIVER_DIR.iterdir())) if DRIVER_DIR.is_dir() else len(rows)
    names: list[str] = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = map(str, range(num_devices)) if visible is None else map(str.strip, visible.split(","))
    for name in shown:
        is_uuid = num_devices > 0 and name.startswith(("GPU-", "MIG-"))
        if not is_uuid and not (name.isdigit() and int(name) < num_devices):
            break  # as CUDA reads it: the first that is no device hides all after it
        names.append(name)
    return tuple(CudaDevice(name, free.get(name)) for name in names)


@functools.cache
def ask_nvidia_smi() -> str:
    """What nvidia-smi says, '' where there is none or it fails. Asked once a process."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


@functools.cache
def torch_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA; reads its version file and does not import it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, flags=re.MULTILINE) is not None


def child_environ(devices: Sequence[str], cuda: Sequence[CudaDevice]) -> dict[str, str]:
    """Variables that show a child process these devices (`cuda:1`, ...) and no others, in this order."""
    if not devices[0].startswith("cuda:"):
        return {}
    names = [cuda[int(device.removeprefix("cuda:"))].name for device in devices]
    order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names), "CUDA_DEVICE_ORDER": order}
