"""Forms in which settings name devices."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, NonNegativeInt

MAX_DEVICES = 1024
"""Devices in a range: more are a mistake in writing."""


def device_numbers(devices: Any) -> list[int] | None:
    """Return the listed device numbers, if the text has this form. Raises ValueError
    for a range of more than MAX_DEVICES.
    """
    if isinstance(devices, str) and (match := re.fullmatch(r"(\d+)-(\d+)", devices)):
        first, last = int(match[1]), int(match[2])
        if last - first >= MAX_DEVICES:
            raise ValueError(f"a range has at most {MAX_DEVICES} devices")
        devices = [*range(first, last + 1)]
    numbers = devices if isinstance(devices, list) else [devices]
    # type() and not isinstance(): YAML's true is an int as well.
    is_form = numbers and all(type(number) is int and number >= 0 for number in numbers)
    return numbers if is_form and len(set(numbers)) == len(numbers) else None


def server_devices(devices: Any) -> list[Any] | None:
    """Return the device of each copy of a server, if the value has such a form."""
    if devices in ("auto", "cpu"):
        return [devices]
    if not isinstance(devices, list):
        return device_numbers(devices)
    numbers = [one for one in devices if one != "cpu"]
    is_form = devices and (not numbers or device_numbers(numbers) is not None)
    return devices if is_form else None


def _is_a_servers_form(value: Any) -> Any:
    if server_devices(value) is None:
        raise ValueError(
            "give auto, cpu, a device number, a list like [4, 5], or a range like 4-7"
        )
    return value


ServerDevices = Annotated[
    Literal["auto", "cpu"]
    | NonNegativeInt
    | str
    | list[Literal["cpu"] | NonNegativeInt],
    BeforeValidator(_is_a_servers_form),
]
"""auto, cpu, a CUDA device number, or a list or range with one device for each copy of
the server.
"""
