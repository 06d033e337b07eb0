"""Section `placement`: which device each side uses, as it is written. The number of devices is read later."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import NonNegativeInt, field_validator

from asyncrl.config.sections import FrozenConfig

Devices = Literal["auto", "cpu", "cuda", "all"] | NonNegativeInt | str | list[NonNegativeInt]
"""auto, cpu, cuda, all, the number of a CUDA device, a list of numbers, or a range like 0-3. Anything else is
refused by `_checked`.
"""

WORDS = ("auto", "cpu", "cuda", "all")
RANGE = re.compile(r"(\d+)-(\d+)")
FORMS = (
    "auto, cpu, cuda, all, a device number like 0, a list like [0, 1] that names each once, or a range like "
    "0-3; devices are those of one machine so far, so a node cannot be named"
)


class PlacementConfig(FrozenConfig):
    """Which device each side uses. Both on the same CUDA devices, or rollout: trainer, means that they take
    turns (docs/colocation.md).
    """

    trainer: Devices = "auto"
    """Devices of the trainer, one for each of trainer.world_size processes: cpu, the number of a CUDA device,
    a list [0, 1], a range 0-3, all. cuda = as many as needed; auto = the same, or cpu where there is none."""
    rollout: Devices = "auto"
    """Devices of the engines, which are spread over them: as for the trainer, or `trainer`: the same devices,
    in turns. auto and cuda = those that the trainer leaves; where it leaves none, the same in turns at
    buffer.max_staleness=0, else refused."""
    eval: Literal["auto", "cpu"] | NonNegativeInt = "auto"
    """Device of the eval engine: cpu or the number of one CUDA device (auto = one that no other part uses,
    else with the engines).
    """

    @field_validator("trainer", "rollout", "eval", mode="before")
    @classmethod
    def _is_a_form(cls, value: Any, info: Any) -> Any:
        if value == "trainer" and info.field_name == "rollout":
            return value
        if value == "rollout" and info.field_name == "trainer":
            raise ValueError(
                "write it the other way round: placement.rollout=trainer, and the devices in "
                "placement.trainer"
            )
        checked = _checked(value)
        if info.field_name == "eval" and not (checked in ("auto", "cpu") or isinstance(checked, int)):
            raise ValueError("one engine evaluates, on one device: auto, cpu, or the number of a CUDA device")
        return checked

    def conflict_with(self, max_staleness: int) -> str | None:
        """Why these devices and this bound exclude each other, as far as it can be known without looking at
        the machine.
        """
        trainer, rollout = numbers_of(self.trainer), numbers_of(self.rollout)
        is_same = trainer is not None and rollout is not None and set(trainer) == set(rollout)
        if max_staleness > 0 and (
            self.rollout == "trainer" or is_same or self.trainer == self.rollout == "all"
        ):
            what = turns_need_no_staleness(
                f"placement.trainer={self.trainer}, placement.rollout={self.rollout}", max_staleness
            )
            return f"{what}; {TURNS_WAY_OUT}"
        if trainer is not None and rollout is not None and not is_same and set(trainer) & set(rollout):
            return f"{partly_shared(trainer, rollout)}; {PARTLY_WAY_OUT}"
        return None


def numbers_of(devices: Any) -> tuple[int, ...] | None:
    """The device numbers that are written out; None for a word."""
    if isinstance(devices, int):
        return (devices,)
    if isinstance(devices, list):
        return tuple(devices)
    if match := RANGE.fullmatch(devices):
        return tuple(range(int(match[1]), int(match[2]) + 1))
    return None


def turns_need_no_staleness(what: str, max_staleness: int) -> str:
    """Why turns on one device are refused at a bound above 0."""
    return (
        f"{what} puts trainer and engines on the same devices, where they take turns: nothing is sampled "
        f"while the trainer works, so every "
        f"batch is on-policy and buffer.max_staleness={max_staleness} could never be used"
    )


TURNS_WAY_OUT = "set buffer.max_staleness=0, or give placement.rollout devices of its own"


def partly_shared(trainer: tuple[int, ...], rollout: tuple[int, ...]) -> str:
    """Why devices of which some are shared are refused."""
    shared = sorted(set(trainer) & set(rollout))
    return (
        f"placement.trainer={list(trainer)} and placement.rollout={list(rollout)} share {shared} and not the "
        f"others: on a shared device "
        "one side must wait for the other, and the devices that are not shared would wait with it"
    )


PARTLY_WAY_OUT = (
    "give both sides the same devices (placement.rollout=trainer, at buffer.max_staleness=0), "
    "or none in common"
)


def _checked(value: Any) -> Any:
    numbers = value if isinstance(value, list) else None
    if isinstance(value, int) and not isinstance(value, bool):
        numbers = [value]
    elif isinstance(value, str) and (match := RANGE.fullmatch(value)):
        numbers = [*range(int(match[1]), int(match[2]) + 1)]
    if value in WORDS:
        return value
    is_each_once = numbers and len(set(map(str, numbers))) == len(numbers)
    if is_each_once and all(type(number) is int and number >= 0 for number in numbers or ()):
        return value
    raise ValueError(f"give {FORMS}")
