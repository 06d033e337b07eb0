"""Part 3: what it costs that trainer and embedded engine take turns on one device."""

from __future__ import annotations

import asyncio
from statistics import median
from typing import Literal

import torch

from asyncrl.base.staging import clear_stale_staging
from asyncrl.job import servers
from gpu.models import make_folder
from gpu.rows import Bench

MIB = 2**20


def handover(bench: Bench, way: Literal["ipc", "shm"]) -> None:
    """Turns of benchmarks/colocation.py with the 0.6B shape. ipc: chunks lie in memory that both sides open;
    shm: in files.
    """
    import colocation
    from offload import copy_costs

    clear_stale_staging()
    model = make_folder(bench, "0.6B")
    if way == "shm":
        servers.chunk_devices = lambda *_: ()
    config = colocation.make_config(model, bench.device, 256 * MIB, is_shared=True)
    dtype = "bfloat16" if bench.device == "cuda" else "float32"
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    seconds = 0.0 if bench.is_tiny else 30.0
    if bench.is_tiny:
        colocation.MIN_TURNS = 1
    measured = colocation.measure(config, model, way, bench.device, seconds, bench.folder / "turns")
    case = asyncio.run(measured)
    size = 16 * MIB if bench.is_tiny else colocation.COPY_BYTES
    (copy_s, _), _ = copy_costs(size, torch.device(bench.device))
    moved, copies_s = median(case.moved), median(case.moved) * copy_s / size
    bench.tell(
        "to the trainer, seconds", f"{median(case.to_trainer_s):.3f}", against=f"{len(case.moved)} turns"
    )
    bench.tell(
        "to the engine, seconds", f"{median(case.to_engines_s):.3f}", against="with the push of new weights"
    )
    for name in case.phases[0]:
        bench.tell(f"  {name}", f"{median(phase[name] for phase in case.phases):.3f}")
    bench.tell(
        "bytes moved in both, GB", f"{moved / 1e9:.3g}", against="state of the trainer twice, and the push"
    )
    against = f"{case.handover_s / copies_s:.2f} of them in both handovers, {case.handover_s:.3f} s"
    bench.tell("memory copy of as many, pinned, seconds", f"{copies_s:.3f}", against=against)
    bench.tell("first turn, both handovers, seconds", f"{case.first_s:.3f}")
    bench.tell("most memory of both, GB", f"{case.memory.peak(case.ready_s) / 1e9:.2f}")
    _plot(bench, case.memory.samples, case.memory.marks, way)


def _plot(
    bench: Bench, samples: list[tuple[float, int, int]], marks: list[tuple[float, str]], way: str
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    begin = samples[0][0]
    figure, axis = pyplot.subplots(figsize=(10, 4))
    times = [at_s - begin for at_s, *_ in samples]
    axis.step(times, [(trainer + engine) / 1e9 for _, trainer, engine in samples], where="post")
    for at_s, what in marks:
        if what in ("generating", "training"):
            axis.axvline(at_s - begin, color="green" if what == "generating" else "red", linewidth=0.5)
    axis.set(xlabel="seconds; green: generating begins; red: training begins", ylabel="GB on the device")
    axis.set_title(f"{bench.label}: turns, {way}")
    path = bench.out / f"{bench.label}-turns-{way}.png"
    figure.savefig(path, dpi=100, bbox_inches="tight")
    bench.tell("memory over time", path.name)
