"""Which device each trainer rank and each engine gets, and whether the two sides take turns. Pure: is told the devices there are.

How `placement` is read, where a machine has N CUDA devices:

    numbers, lists, ranges   these, all of which must exist and have work
    all                      every CUDA device
    cuda, auto               as many as there are ranks (trainer) or engines (rollout), from those that the other side leaves;
                             none left: the other side's, in turns, at buffer.max_staleness=0, else refused. auto without CUDA: cpu
    trainer                  (rollout) the trainer's, in turns

A rank has a CUDA device of its own; engines are dealt over theirs in turn, so two may share one. The CPU is not anybody's
own: trainer and engines on cpu run apart, side by side, unless rollout is `trainer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from asyncrl.config import RunConfig
from asyncrl.config.placement import PARTLY_WAY_OUT, TURNS_WAY_OUT, numbers_of, partly_shared, turns_need_no_staleness
from asyncrl.errors import ConfigError
from asyncrl.placement.vllm_rules import refuse_for_vllm

Mode = Literal["apart", "colocated"]
NO_DEVICE = "none"
"""Where a simulated engine runs, and one that somebody else has placed."""
TURNS_RULE = "a CUDA device belongs to one side, or to both in turns, and turns need buffer.max_staleness=0"


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices by name (cpu, cuda:0, ...): of each trainer rank, of each engine, of the eval engine (None: there is none).

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
    """The placement on a machine with so many CUDA devices. Raises ConfigError with the values, the rule and what to write instead."""
    trainer, rollout, is_turns = _settle(config, num_cuda)
    _check_ranks(config, trainer)
    if trainer is not None and rollout is not None and set(trainer) & set(rollout):
        if set(trainer) != set(rollout):
            raise ConfigError(partly_shared(trainer, rollout), way_out=f"{PARTLY_WAY_OUT}.")
        is_turns = True
    if is_turns and config.buffer.max_staleness > 0:
        raise ConfigError(turns_need_no_staleness(_written(config), config.buffer.max_staleness), way_out=f"{TURNS_WAY_OUT}.")
    _check_engines(config, rollout, is_turns)
    ranks = _deal(trainer, config.trainer.world_size)
    parallel = _deal_groups(rollout, config.rollout.num_engines, config.rollout.tensor_parallel)
    engines = tuple(group[0] for group in parallel)
    is_simulated = config.rollout.engine == "simulated"
    mode: Mode = "colocated" if is_turns else "apart"
    refuse_for_vllm(config, ranks, engines, is_turns=is_turns)
    if is_turns and config.publisher.transport == "lora":
        raise ConfigError(
            f"publisher.transport=lora with {_written(config)}, where trainer and engines take turns",
            rule="an engine that sleeps has given its weights away, so there is nothing that adapters alone could be added to",
            way_out="set publisher.transport=shm: the weights with the adapters merged into them, chunk by chunk.",
        )
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
    if has_none and is_rollout_open:  # a latency model, and a server somewhere else, take no device from anybody
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
            rule=f"this machine shows {num_cuda} CUDA device{'s' if num_cuda > 1 else ''}, counted from 0 among those of "
            "CUDA_VISIBLE_DEVICES, where that is set",
            way_out=f"name devices of 0..{num_cuda - 1}.",
        )
    return numbers, False


def _no_cuda(key: str, devices: object) -> ConfigError:
    return ConfigError(
        f"{key}={devices}, and there is no CUDA device that torch could use",
        rule="a device needs the NVIDIA driver, a torch built with CUDA, and a CUDA_VISIBLE_DEVICES that does not hide it",
        way_out=f"set {key}=cpu (or auto: CUDA where there is a device, else cpu), or correct what hides the device.",
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
        fewer = f", or trainer.world_size={len(numbers) - 1}" if is_by_size else f", or name fewer devices in {other}"
    raise ConfigError(
        f"{_written(config)}: there is no CUDA device left for {key}, the other side has {', '.join(f'cuda:{n}' for n in numbers)}, and "
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
    what = f"placement.trainer={config.placement.trainer} is {len(trainer)} CUDA device{'s' if len(trainer) > 1 else ''} ({names})"
    if len(trainer) < size:
        what, named = f"{what}, and trainer.world_size={size}", f"{size} devices, or cpu, in placement.trainer"
    else:
        what += f", and trainer.world_size={size} would leave {len(trainer) - size} of them idle"
        named = f"fewer: placement.trainer={list(trainer[:size])}"
    raise ConfigError(
        what, rule="each trainer process has a device of its own", way_out=f"set trainer.world_size={len(trainer)}, or name {named}."
    )


def _check_engines(config: RunConfig, rollout: Numbers, is_turns: bool) -> None:
    """No device that was named stands idle; more engines than devices share them."""
    engines, split = config.rollout.num_engines, config.rollout.tensor_parallel
    if rollout is None or config.rollout.engine == "simulated" or config.rollout.urls is not None:
        return
    if len(rollout) % split:
        raise ConfigError(
            f"placement.rollout={config.placement.rollout} is {len(rollout)} CUDA devices, and rollout.tensor_parallel={split}",
            rule="each engine is split over so many devices of its own",
            way_out=f"give placement.rollout {split} devices, or a multiple, or set rollout.tensor_parallel=1.",
        )
    if len(rollout) <= engines * split:
        return
    fewer = "" if is_turns else f", or name fewer: placement.rollout={list(rollout[: engines * split])}"
    raise ConfigError(
        f"placement.rollout={config.placement.rollout} is {len(rollout)} CUDA devices, and rollout.num_engines={engines} would leave "
        f"{len(rollout) - engines * split} of them idle",
        rule="an engine works on one device" if split == 1 else f"an engine works on rollout.tensor_parallel={split} devices",
        way_out=f"set rollout.num_engines={len(rollout) // split}{fewer}.",
    )


def _deal(numbers: Numbers, num: int) -> tuple[str, ...]:
    """A device for each of `num` processes, dealt in turn."""
    return tuple("cpu" if numbers is None else f"cuda:{numbers[index % len(numbers)]}" for index in range(num))


def _deal_groups(numbers: Numbers, num: int, size: int) -> tuple[tuple[str, ...], ...]:
    """`size` devices for each of `num` engines, dealt in turn."""
    dealt = _deal(numbers, num * size)
    return tuple(dealt[index * size : (index + 1) * size] for index in range(num))


def _eval_device(config: RunConfig, ranks: Sequence[str], parallel: Sequence[Sequence[str]], num_cuda: int, mode: Mode) -> str:
    """Where the eval engine goes, which is split over no devices. It works beside training at any time: on CUDA it has no part in turns
    and no place with the trainer.
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
            rule="it evaluates beside training, with weights and KV cache of its own, so it needs a device that the trainer does not use",
            way_out=f"set {key}=cpu or the number of another CUDA device, or set eval=none and evaluate the checkpoints later.",
        )
    return device


def _written(config: RunConfig) -> str:
    return f"placement.trainer={config.placement.trainer}, placement.rollout={config.placement.rollout}"
