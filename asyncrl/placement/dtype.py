"""What `model.dtype: auto` is on this machine, and what bfloat16 costs on a CPU that has no instructions for it. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.placement.cuda import CudaDevice, find_cuda_devices
from asyncrl.placement.devices import NO_DEVICE, place

BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Of /proc/cpuinfo, where a CPU multiplies in bfloat16; the last one is ARM's."""
NAMES = "avx512_bf16, amx_bf16"
COST = "8.6 times the time of a float32 step, measured with SmolLM2 135M"


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU has instructions for bfloat16; one that does not say has none."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return not BFLOAT16_FLAGS.isdisjoint(flags)


def settle_dtype(
    config: RunConfig, *, begun: str | None = None, cuda: Sequence[CudaDevice] | None = None, has_bfloat16: bool | None = None
) -> tuple[RunConfig, str]:
    """The config with a type in place of `model.dtype: auto`, one for trainer and engines, and what to tell people ("" = nothing).

    `begun`: that of the run that is gone on with, which auto then is. `cuda`, `has_bfloat16`: what the machine has, else it is asked.
    Raises ConfigError for a placement that cannot be.
    """
    placement = place(config, len(find_cuda_devices() if cuda is None else cuda))
    engines = {device for index in range(len(placement.rollout)) for device in placement.devices_of(index)}
    is_on_cpu = "cpu" in {*placement.trainer, *engines} - {NO_DEVICE}
    is_slow = is_on_cpu and not (cpu_has_bfloat16() if has_bfloat16 is None else has_bfloat16)
    given = config.model.dtype
    if given != "auto":
        if given == "float32" or not is_slow:
            return config, ""
        return config, (
            f"model.dtype: {given}, and this CPU has no instructions for it ({NAMES}): {COST}; model.dtype=float32 (or auto) is faster here"
        )
    if begun is not None and begun != "auto":
        dtype, why = begun, "as the run began"
    elif is_slow:
        dtype, why = "float32", f"this CPU has no bfloat16 instructions ({NAMES})"
    else:
        dtype, why = "bfloat16", "this CPU has instructions for it" if is_on_cpu else "trainer and engines are on CUDA"
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})}), f"model.dtype: auto is {dtype}: {why}"
