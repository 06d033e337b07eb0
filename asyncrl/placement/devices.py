"""Which device each trainer rank and each engine gets, and whether the two sides take turns. Pure: is told
the devices there are.

How `placement` is read, where a machine has N CUDA devices:

    numbers, lists, ranges   these, all of which must exist and have work
    all                      every CUDA device
    cuda, auto               as many as there are ranks (trainer) or engines (rollout), from those that the
    other side leaves;
                             none left: the other side's, in turns, at buffer.max_staleness=0, else refused.
                             auto without CUDA: cpu
    trainer                  (rollout) the trainer's, in turns

A rank has a CUDA device of its own; engines are dealt over theirs in turn, so two may share one. The CPU is
not anybody's own: trainer and engines on cpu run apart, side by side, unless rollout is `trainer`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
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
NO_DEVICE = "none"
"""Where a simulated engine runs, and one that somebody else has placed."""
TURNS_RULE = "a CUDA device belongs to one side, or to both in turns, and turns need buffer.max_staleness=0"


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices by name (cpu, cuda:0, ...): of each trainer rank, of each engine, of the eval engine (None:
    there is none).

    `parallel`: all devices of each engine, where one is split over several; `rollout` has the first of them.
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
    def is_on_cuda(self) -> bool:
        """Whether the trainer is on CUDA devices; when colocated, the engines too."""
        return self.trainer[0] != "cpu"

    @property
    def shared(self) -> str:
        """The devices of both sides in words, for colocated ones."""
        return ", ".join(dict.fromkeys(self.trainer))


def place(config: RunConfig, num_cuda: int) -> Placement:
    """The placement on a machine with so many CUDA devices. Raises ConfigError with the values, the rule and
    what to write instead.
    """
    trainer, rollout, is_turns = _settle(config, num_cuda)
    _check_ranks(config, trainer)
    if trainer is not None and rollout is not None and set(trainer) & set(rollout):
        if set(trainer) != set(rollout):
            raise ConfigError(partly_shared(trainer, rollout), way_out=f"{PARTLY_WAY_OUT}.")
        is_turns = True
    if is_turns and config.buffer.max_staleness > 0:
        raise ConfigError(
            turns_need_no_staleness(_written(config), config.buffer.max_staleness),
            way_out=f"{TURNS_WAY_OUT}.",
        )
    _check_engines(config, rollout, is_turns)
    ranks = _deal(trainer, config.trainer.world_size)
    parallel = _deal_groups(rollout, config.rollout.num_engines, config.rollout.tensor_parallel)
    engines = tuple(group[0] for group in parallel)
    is_simulated = config.rollout.engine == "simulated"
    mode: Mode = "colocated" if is_turns else "apart"
    refuse_for_vllm(config, ranks, engines, is_turns=is_turns)
    refusal = config.weight_sync.way.refuse(config, DevicesInUse(ranks, engines, is_turns))
    if refusal is not None:
        what, rule, way_out = refusal
        raise ConfigError(what, rule=rule, way_out=f"{way_out}.")
    if is_simulated or config.rollout.urls is not None:
        engines, parallel = (NO_DEVICE,) * len(engines), ()
    evaluation = None
    if config.eval is not None:
        evaluation = NO_DEVICE if is_simulated else _eval_device(config, ranks, parallel, num_cuda, mode)
    return Placement(ranks, engines, evaluation, mode, parallel if config.rollout.tensor_parallel > 1 else ())


Numbers = tuple[int, ...] | None
"""Numbers of CUDA devices, None for the CPU."""


def _settle(config: RunConfig, num_cuda: int) -> tuple[Numbers, Numbers, bool]:
    """Devices of both sides, and whether they were told, or have, to take turns."""
    placement, is_turns = config.placement, config.placement.rollout == "trainer"
    trainer, is_trainer_open = _written_numbers("placement.trainer", placement.trainer, num_cuda)
    if is_turns:
        first = _first(config.trainer.world_size, range(num_cuda)) if is_trainer_open else trainer
        return first, first, True
    rollout, is_rollout_open = _written_numbers("placement.rollout", placement.rollout, num_cuda)
    has_none = config.rollout.engine == "simulated" or config.rollout.urls is not None
    if (
        has_none and is_rollout_open
    ):  # a latency model, and a server somewhere else, take no device from anybody
        rollout, is_rollout_open = None, False
    if is_trainer_open:
        taken = () if is_rollout_open else rollout or ()
        trainer = _first(config.trainer.world_size, [n for n in range(num_cuda) if n not in taken])
        if not trainer and rollout is not None:
            return rollout, rollout, _take_turns(config, rollout, "placement.trainer")
    if is_rollout_open:
        split = config.rollout.tensor_parallel
        left = [n for n in range(num_cuda) if n not in (trainer or ())]
        rollout = _first(config.rollout.num_engines * split, left[: len(left) // split * split] or left)
        if not rollout and trainer is not None:
            return trainer, trainer, _take_turns(config, trainer, "placement.rollout")
    return trainer, rollout, is_turns


def _written_numbers(key: str, devices: object, num_cuda: int) -> tuple[Numbers, bool]:
    """What is written, and whether it leaves the choice open (auto and cuda, where there are devices)."""
    if devices == "cpu" or (devices == "auto" and not num_cuda):
        return None, False
    if devices in ("auto", "cuda", "all"):
        if not num_cuda:
            raise _no_cuda(key, devices)
        return tuple(range(num_cuda)), devices != "all"
    numbers = numbers_of(devices)
    assert numbers is not None, "the config lets nothing else through"
    if not num_cuda:
        raise _no_cuda(key, devices)
    if missing := [number for number in numbers if number >= num_cuda]:
        raise ConfigError(
            f"{key}={devices} names {', '.join(f'cuda:{number}' for number in missing)}",
            rule=f"this machine shows {num_cuda} CUDA device{'s' if num_cuda > 1 else ''}, counted from 0 "
            f"among those of "
            "CUDA_VISIBLE_DEVICES, where that is set",
            way_out=f"name devices of 0..{num_cuda - 1}.",
        )
    return numbers, False


def _no_cuda(key: str, devices: object) -> ConfigError:
    return ConfigError(
        f"{key}={devices}, and there is no CUDA device that torch could use",
        rule="a device needs the NVIDIA driver, a torch built with CUDA, and a CUDA_VISIBLE_DEVICES that "
        "does not hide it",
        way_out=f"set {key}=cpu (or auto: CUDA where there is a device, else cpu), or correct what hides the "
        f"device.",
    )


def _first(num: int, numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple(numbers[:num])


def _take_turns(config: RunConfig, numbers: tuple[int, ...], key: str) -> bool:
    """True; refused where the bound says that both sides are to work at once."""
    if config.buffer.max_staleness == 0:
        return True
    other = "placement.trainer" if key == "placement.rollout" else "placement.rollout"
    fewer = ""
    if len(numbers) > 1:
        is_by_size = other == "placement.trainer" and config.placement.trainer in ("auto", "cuda")
        fewer = (
            f", or trainer.world_size={len(numbers) - 1}"
            if is_by_size
            else f", or name fewer devices in {other}"
        )
    raise ConfigError(
        f"{_written(config)}: there is no CUDA device left for {key}, the other side has "
        f"{', '.join(f'cuda:{n}' for n in numbers)}, and "
        f"buffer.max_staleness={config.buffer.max_staleness} wants both sides to work at once",
        rule=TURNS_RULE,
        way_out=f"set buffer.max_staleness=0 (they take turns), or {key}=cpu, or {other}=cpu{fewer}.",
    )


def _check_ranks(config: RunConfig, trainer: Numbers) -> None:
    """Each rank has a device of its own, and no device that was named stands idle."""
    size = config.trainer.world_size
    if trainer is None or len(trainer) == size:
        return
    names = ", ".join(f"cuda:{number}" for number in trainer)
    what = (
        f"placement.trainer={config.placement.trainer} is {len(trainer)} CUDA "
        f"device{'s' if len(trainer) > 1 else ''} ({names})"
    )
    if len(trainer) < size:
        what, named = (
            f"{what}, and trainer.world_size={size}",
            f"{size} devices, or cpu, in placement.trainer",
        )
    else:
        what += f", and trainer.world_size={size} would leave {len(trainer) - size} of them idle"
        named = f"fewer: placement.trainer={list(trainer[:size])}"
    raise ConfigError(
        what,
        rule="each trainer process has a device of its own",
        way_out=f"set trainer.world_size={len(trainer)}, or name {named}.",
    )


def _check_engines(config: RunConfig, rollout: Numbers, is_turns: bool) -> None:
    """No device that was named stands idle; more engines than devices share them."""
    engines, split = config.rollout.num_engines, config.rollout.tensor_parallel
    if rollout is None or config.rollout.engine == "simulated" or config.rollout.urls is not None:
        return
    if len(rollout) % split:
        raise ConfigError(
            f"placement.rollout={config.placement.rollout} is {len(rollout)} CUDA devices, and "
            f"rollout.tensor_parallel={split}",
            rule="each engine is split over so many devices of its own",
            way_out=f"give placement.rollout {split} devices, or a multiple, or set "
            f"rollout.tensor_parallel=1.",
        )
    if len(rollout) <= engines * split:
        return
    fewer = "" if is_turns else f", or name fewer: placement.rollout={list(rollout[: engines * split])}"
    raise ConfigError(
        f"placement.rollout={config.placement.rollout} is {len(rollout)} CUDA devices, and "
        f"rollout.num_engines={engines} would leave "
        f"{len(rollout) - engines * split} of them idle",
        rule="an engine works on one device"
        if split == 1
        else f"an engine works on rollout.tensor_parallel={split} devices",
        way_out=f"set rollout.num_engines={len(rollout) // split}{fewer}.",
    )


def _deal(numbers: Numbers, num: int) -> tuple[str, ...]:
    """A device for each of `num` processes, dealt in turn."""
    return tuple(
        "cpu" if numbers is None else f"cuda:{numbers[index % len(numbers)]}" for index in range(num)
    )


def _deal_groups(numbers: Numbers, num: int, size: int) -> tuple[tuple[str, ...], ...]:
    """`size` devices for each of `num` engines, dealt in turn."""
    dealt = _deal(numbers, num * size)
    return tuple(dealt[index * size : (index + 1) * size] for index in range(num))


def _eval_device(
    config: RunConfig, ranks: Sequence[str], parallel: Sequence[Sequence[str]], num_cuda: int, mode: Mode
) -> str:
    """Where the eval engine goes, which is split over no devices. It works beside training at any time: on
    CUDA it has no part in turns and no place with the trainer.
    """
    key, written = "placement.eval", config.placement.eval
    engines = [device for group in parallel for device in group] or ["cpu"]
    if written == "cpu" or (written == "auto" and parallel and "cpu" in engines):
        return "cpu"
    if written == "auto":
        free = [f"cuda:{number}" for number in range(num_cuda) if f"cuda:{number}" not in (*ranks, *engines)]
        least = min(engines, key=lambda device: (engines.count(device), -engines.index(device)))
        device = free[0] if free else least
        if device == "cpu":
            return device
    else:
        numbers, _ = _written_numbers(key, written, num_cuda)
        assert numbers is not None, "cpu was returned above"
        device = f"cuda:{numbers[0]}"
    if device in ranks:
        turns = "trainer and engines take turns" if mode == "colocated" else "the trainer works"
        raise ConfigError(
            f"{key}={written} puts the eval engine on {device}, where {turns}",
            rule="it evaluates beside training, with weights and KV cache of its own, so it needs a device "
            "that the trainer does not use",
            way_out=f"set {key}=cpu or the number of another CUDA device, or set eval=none and evaluate the "
            f"checkpoints later.",
        )
    return device


def _written(config: RunConfig) -> str:
    return f"placement.trainer={config.placement.trainer}, placement.rollout={config.placement.rollout}"


# Which CUDA devices a run may use, and how much of their memory is free. Looks at the driver's files and
# programs; knows no torch.
#
# Devices are numbered among those that CUDA_VISIBLE_DEVICES leaves, in the order of the bus, which is that of
# nvidia-smi.


DRIVER_DIR = Path("/proc/driver/nvidia/gpus")
QUERY = ("--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 20.0
HUGETLB = "glibc.malloc.hugetlb"
"""Of GLIBC_TUNABLES since glibc 2.35: 1 = madvise(MADV_HUGEPAGE) for what malloc takes. Others ignore the
variable.
"""


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One device. `name`: how CUDA_VISIBLE_DEVICES of a child process calls it. `free_bytes`: None where
    nvidia-smi does not say.
    """

    name: str
    free_bytes: int | None = None


def find_cuda_devices(
    *,
    driver_dir: Path = DRIVER_DIR,
    environ: Mapping[str, str] | None = None,
    query: Callable[[], str] | None = None,
    is_built: Callable[[], bool] | None = None,
) -> tuple[CudaDevice, ...]:
    """The devices that torch can use here: none beside a torch that was built without CUDA, whatever the
    driver lists.
    """
    if not (is_built or torch_has_cuda)():
        return ()
    told = _read_query((query or ask_nvidia_smi)())
    num_devices = (
        sum(1 for _ in driver_dir.iterdir()) if driver_dir.is_dir() else len(told)
    )  # WSL has no such folder
    free = {name: row[2] for row in told for name in (row[0], row[1])}
    visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    return tuple(CudaDevice(name, free.get(name)) for name in visible_names(visible, num_devices))


def visible_names(visible: str | None, num_devices: int) -> tuple[str, ...]:
    """The names that CUDA_VISIBLE_DEVICES leaves (None: not set). As CUDA reads it, the first that is no
    device hides all after it.
    """
    if visible is None:
        return tuple(str(number) for number in range(num_devices))
    names: list[str] = []
    for name in (part.strip() for part in visible.split(",")):
        is_number = name.isdigit() and int(name) < num_devices
        if not (is_number or (num_devices and name.startswith(("GPU-", "MIG-")))):
            break
        names.append(name)
    return tuple(names)


def child_environ(
    devices: Sequence[str], cuda: Sequence[CudaDevice], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Variables that show a child process these devices (`cuda:1`, ...) and no others, in this order; on the
    CPU those of its memory.
    """
    if not devices or not all(device.startswith("cuda:") for device in devices):
        return _large_pages(os.environ if environ is None else environ) if "cpu" in devices else {}
    names = [cuda[int(device.removeprefix("cuda:"))].name for device in devices]
    order = (os.environ if environ is None else environ).get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names), "CUDA_DEVICE_ORDER": order}


def _large_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """Have glibc ask for large pages: new memory then costs a fifth (gradients, each step, where turns give
    it back in between).
    """
    given = environ.get("GLIBC_TUNABLES", "")
    return {} if HUGETLB in given else {"GLIBC_TUNABLES": ":".join(filter(None, [given, f"{HUGETLB}=1"]))}


@functools.cache
def ask_nvidia_smi() -> str:
    """What nvidia-smi says, '' where there is none or it fails. Asked once a process, before it starts
    anything.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *QUERY], capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _read_query(text: str) -> list[tuple[str, str, int | None]]:
    """(index, uuid, free bytes) of each line; MiB are told."""
    rows = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3 and parts[0].isdigit():
            rows.append((parts[0], parts[1], int(parts[2]) * 2**20 if parts[2].isdigit() else None))
    return rows


@functools.cache
def torch_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA; reads its version file and does not import it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, flags=re.MULTILINE) is not None


# What vLLM cannot do on these devices. Pure: is told the devices.


def refuse_for_vllm(
    config: RunConfig, ranks: Sequence[str], engines: Sequence[str], *, is_turns: bool
) -> None:
    """Raise ConfigError for devices of trainer ranks and engines on which vLLM would fail later."""
    if config.rollout.engine != "vllm":
        return
    on_cpu = [side for side, devices in (("trainer", ranks), ("rollout", engines)) if "cpu" in devices]
    if is_turns and "rollout" in on_cpu:
        raise ConfigError(
            f"placement.rollout={config.placement.rollout} has a vLLM on the CPU take turns with the trainer",
            rule="turns need an engine that gives its memory away, and vLLM frees nothing on the CPU when it "
            "is told to sleep",
            way_out="set placement.rollout=cpu (side by side, at buffer.max_staleness=0 too), or "
            "rollout.engine=embedded.",
        )
    if config.rollout.tensor_parallel > 1 and "rollout" in on_cpu and config.rollout.urls is None:
        raise ConfigError(
            f"rollout.tensor_parallel={config.rollout.tensor_parallel}, and the engines are on the CPU",
            rule="an engine is split over CUDA devices; on the CPU it works with rollout.threads",
            way_out="set rollout.tensor_parallel=1, or name CUDA devices in placement.rollout.",
        )
