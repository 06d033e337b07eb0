"""Which device each trainer rank and each engine gets, whether the two sides take turns, and where chunks of
weights lie. Imports no torch.

How `placement` is read, where a machine has N CUDA devices:

    numbers, lists, ranges   these, all of which must exist and have work
    all                      every CUDA device
    cuda, auto               as many as there are ranks (trainer) or engines (rollout), from those that the
                             other side leaves; none left: the other side's, in turns. auto without CUDA: cpu
    trainer                  (rollout) the trainer's, in turns

Turns need buffer.max_staleness=0; above it both sides use the same devices at once where placement.share is a
number. A rank has a CUDA device of its own; engines are dealt over theirs in turn, so two may share one. Both
sides on cpu run side by side, unless rollout is `trainer`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from asyncrl.config import RunConfig
from asyncrl.config.operation import Devices, device_numbers
from asyncrl.config.weight_sync import refuse_transport
from asyncrl.errors import ConfigError
from asyncrl.placement.machine import CudaDevice

Mode = Literal["apart", "colocated"]
Numbers = Sequence[int] | None
"""Numbers of CUDA devices, None for the CPU."""
SIZES = ("gpu_memory_utilization", "num_gpu_blocks_override")
"""Arguments of vLLM that say how much of a device it takes, whatever the plan counts."""
NO_DEVICE = "none"
"""Where a simulated engine runs, and one that the run did not start."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices by name (cpu, cuda:0, ...): of each trainer rank, all of each engine, and those of the eval
    engine and the teacher (None: there is none).
    """

    trainer: tuple[str, ...]
    engines: tuple[tuple[str, ...], ...]
    evaluation: str | None
    mode: Mode
    teacher: str | None = None
    share: float | None = None
    """Fraction of each device that both sides use for the engines there; None: nothing limits them."""
    stays: bool = False
    """In turns: both sides stay in memory, and only whose turn it is changes."""

    @property
    def moves(self) -> bool:
        """Whether each side gives its memory away for the other's turn."""
        return self.mode == "colocated" and not self.stays

    def share_of(self, engine: Sequence[str]) -> float | None:
        """The part of `share` of an engine on these devices, of which other engines may use the first too."""
        num = sum(engine[0] in devices for devices in self.engines)
        return None if self.share is None else self.share / num

    @property
    def rollout(self) -> tuple[str, ...]:
        """The first device of each engine."""
        return tuple(devices[0] for devices in self.engines)

    @property
    def engine_devices(self) -> list[str]:
        """Devices of all engines, each named once."""
        return [*dict.fromkeys(device for devices in self.engines for device in devices)]

    @property
    def is_on_cuda(self) -> bool:
        """Whether the trainer is on CUDA devices; when colocated, the engines too."""
        return self.trainer[0] != "cpu"


def place(config: RunConfig, num_cuda: int) -> Placement:
    """The placement on a machine with so many CUDA devices. Raises ConfigError."""
    trainer, rollout = _numbers(config, num_cuda)
    shared = sorted(set(trainer or ()) & set(rollout or ()))
    is_same = bool(shared) or config.placement.rollout == "trainer"
    share = config.placement.share if isinstance(config.placement.share, float) else None
    is_turns = is_same and not (shared and share is not None and config.buffer.max_staleness > 0)
    written = f"placement.trainer={config.placement.trainer}, placement.rollout={config.placement.rollout}"
    if shared and set(trainer or ()) != set(rollout or ()):
        raise ConfigError(
            f"{written} share {shared} and not the others, which would wait with them in turns",
            way_out="give both the same (placement.rollout=trainer, buffer.max_staleness=0), or other ones.",
        )
    if is_turns and config.buffer.max_staleness > 0:
        raise ConfigError(
            f"{written} are the same devices ({num_cuda} CUDA devices here), in turns: every batch is "
            f"on-policy, and buffer.max_staleness={config.buffer.max_staleness} could never be used",
            way_out="set buffer.max_staleness=0, or give placement.rollout devices of its own: cpu, or CUDA "
            "devices that a smaller trainer.world_size leaves"
            + ("; placement.share=0.4 has both work there at once." if shared else "."),
        )
    if share is not None:
        _check_share(config, shared)
    if is_turns and config.rollout.is_scaled:
        raise ConfigError(
            f"rollout.num_engines is a range, and {written} take turns",
            rule="a handover moves the same engines each time, and one that does not work would free nothing",
            way_out=f"set rollout.num_engines={config.rollout.max_engines}, or give each side devices of its "
            "own.",
        )
    _check_numbers(config, trainer, rollout)
    num, split = config.rollout.max_engines, config.rollout.tensor_parallel
    ranks, dealt = _deal(trainer, config.trainer.world_size), _deal(rollout, num * split)
    refuse_transport(config, ranks, dealt, is_turns=is_turns)
    _check_engines(config, dealt, is_turns=is_turns)
    engines = tuple(dealt[start : start + split] for start in range(0, len(dealt), split))
    if _takes_no_device(config):
        engines, dealt = ((NO_DEVICE,),) * num, ()
    evaluation = None
    if config.eval is not None:
        has_device = config.rollout.facts.has_model
        setting = ("placement.eval", config.placement.eval)
        evaluation = _beside_device(setting, ranks, dealt, num_cuda) if has_device else NO_DEVICE
    teacher = None
    if config.teacher is not None:
        used = [*dealt, evaluation] if evaluation is not None else dealt
        teacher = _beside_device(("placement.teacher", config.placement.teacher), ranks, used, num_cuda)
    mode: Mode = "colocated" if is_turns else "apart"
    return Placement(ranks, engines, evaluation, mode, teacher, share, is_turns and share is not None)


def chunk_devices(config: RunConfig, placement: Placement) -> tuple[str, ...]:
    """The devices whose memory holds the chunks that trainer and engines both open, all of them on each;
    none: chunks are files.
    """
    opens_memory = config.rollout.facts.opens_chunks or config.weight_sync.facts.shares_device
    devices = tuple(dict.fromkeys(placement.trainer))
    # an engine sees its own devices alone
    has_all = placement.mode == "colocated" and {*placement.engine_devices} <= {*devices}
    return devices if opens_memory and has_all else ()


def _takes_no_device(config: RunConfig) -> bool:
    """A latency model, and servers that the run did not start."""
    return not config.rollout.facts.has_model or config.rollout.urls is not None


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
        trainer = [number for number in range(num_cuda) if number not in taken][:size] or rollout
    if is_rollout_open:
        split = config.rollout.tensor_parallel
        left = [number for number in range(num_cuda) if number not in (trainer or ())]
        whole = left[: len(left) // split * split] or left
        rollout = whole[: config.rollout.max_engines * split] or trainer
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
    numbers = device_numbers(devices)
    if numbers is None:
        return range(num_cuda), devices != "all"
    if max(numbers) >= num_cuda:
        raise ConfigError(
            f"{key}={devices} names cuda:{max(numbers)}",
            rule=f"this machine shows {num_cuda} CUDA devices, counted from 0 among CUDA_VISIBLE_DEVICES",
            way_out=f"name devices of 0..{num_cuda - 1}.",
        )
    return numbers, False


def _check_numbers(config: RunConfig, trainer: Numbers, rollout: Numbers) -> None:
    """Each rank has a device of its own, each engine as many as it is split over, and none named is idle."""
    size, num, split = config.trainer.world_size, config.rollout.max_engines, config.rollout.tensor_parallel
    if trainer is not None and len(trainer) != size:
        raise ConfigError(
            f"placement.trainer={config.placement.trainer} is {len(trainer)} CUDA devices for "
            f"trainer.world_size={size} processes with one each",
            way_out=f"set trainer.world_size={len(trainer)}, or name {size} devices in placement.trainer.",
        )
    if rollout is None or _takes_no_device(config):
        return
    if len(rollout) % split or len(rollout) > num * split:
        is_whole = len(rollout) % split == 0
        fitting = f"num_engines={len(rollout) // split}" if is_whole else "tensor_parallel=1"
        raise ConfigError(
            f"placement.rollout={config.placement.rollout} is {len(rollout)} CUDA devices for "
            f"rollout.num_engines={num} with rollout.tensor_parallel={split} each",
            way_out=f"set rollout.{fitting}, or name {num * split} devices in placement.rollout.",
        )


def _check_share(config: RunConfig, shared: Sequence[int]) -> None:
    """placement.share divides a CUDA device, and nothing else says what engines take there."""
    share, written = f"placement.share={config.placement.share}", config.placement
    if not shared or _takes_no_device(config):
        raise ConfigError(
            f"{share}, and placement.trainer={written.trainer}, placement.rollout={written.rollout} share no "
            "CUDA device",
            rule="it is a fraction of a CUDA device that trainer and engines use; a CPU is not divided",
            way_out="set placement.share=auto.",
        )
    if again := [name for name in config.rollout.vllm if name.lstrip("-").replace("-", "_") in SIZES]:
        what = f"{share}, and rollout.vllm has {again[0]}, which says the same"
        raise ConfigError(what, way_out=f"remove rollout.vllm.{again[0]}.")


def _check_engines(config: RunConfig, devices: Sequence[str], *, is_turns: bool) -> None:
    """What engines cannot do that are not ours, or on the CPU."""
    rollout = config.rollout
    if rollout.urls is not None and config.placement.rollout == "trainer":
        what = "placement.rollout=trainer lets engines sleep in turns, which those of rollout.urls cannot"
        raise ConfigError(what, way_out="remove rollout.urls, or set placement.rollout=auto.")
    if is_turns and "cpu" in devices and not rollout.facts.sleeps_on_cpu:
        what = f"in turns an engine frees its memory, which rollout.engine={rollout.engine} on the CPU cannot"
        raise ConfigError(
            what, way_out="set placement.rollout=cpu (side by side), or rollout.engine=embedded."
        )
    kind = "cpu" if "cpu" in devices else "cuda"
    if rollout.deterministic is True and (rollout.urls is not None or kind != rollout.facts.exact_on):
        where = "of rollout.urls" if rollout.urls is not None else f"on {', '.join(dict.fromkeys(devices))}"
        raise ConfigError(
            f"rollout.deterministic=true, and rollout.engine={rollout.engine} {where} cannot be asked for it",
            rule="the embedded engine keeps it on a CPU, a vLLM that the run starts has it on CUDA",
            way_out="set rollout.deterministic=auto.",
        )
    if rollout.tensor_parallel > 1 and "cpu" in devices and rollout.urls is None:
        what = (
            f"rollout.tensor_parallel={rollout.tensor_parallel} splits engines over CUDA devices, not the CPU"
        )
        raise ConfigError(
            what, way_out="set rollout.tensor_parallel=1, or name devices in placement.rollout."
        )


def _deal(numbers: Numbers, num: int) -> tuple[str, ...]:
    """A device for each of `num` processes, dealt in turn."""
    if numbers is None:
        return ("cpu",) * num
    return tuple(f"cuda:{numbers[index % len(numbers)]}" for index in range(num))


def _beside_device(
    setting: tuple[str, Devices], ranks: Sequence[str], engines: Sequence[str], num_cuda: int
) -> str:
    """Where the eval engine or the teacher goes (`setting`: the key and what it says): it works beside
    training at any time, so never with the trainer on CUDA.
    """
    key, written = setting
    whose, section = ("the eval engine", "eval") if key == "placement.eval" else ("the teacher", "teacher")
    if written == "cpu" or (written == "auto" and (not num_cuda or "cpu" in engines)):
        return "cpu"
    if written == "auto":
        everything = _deal(range(num_cuda), num_cuda)
        free = [device for device in everything if device not in (*ranks, *engines)]
        used = sorted(engines, key=lambda name: (engines.count(name), -engines.index(name)))
        device = [*free, *used, "cpu"][0]
    else:
        numbers, _ = _named(key, written, num_cuda)
        device = _deal(numbers, 1)[0]
    if device in ranks and device != "cpu":
        raise ConfigError(
            f"{key}={written} puts {whose} on {device}, where the trainer works",
            rule="it works beside training, with weights and KV cache of its own",
            way_out=f"set {key}=cpu or the number of another CUDA device, or set {section}=none.",
        )
    return device


def child_environ(devices: Sequence[str], cuda: Sequence[CudaDevice]) -> dict[str, str]:
    """Variables that show a child process these devices (`cuda:1`, ...) and no others, in this order."""
    if not devices[0].startswith("cuda:"):
        return {}
    names = [cuda[int(device.removeprefix("cuda:"))].name for device in devices]
    order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names), "CUDA_DEVICE_ORDER": order}
