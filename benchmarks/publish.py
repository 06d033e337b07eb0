"""How long generation pauses for new weights, against a memory copy of the same bytes.

    python benchmarks/publish.py [--seconds 60] [--interrupt abort] [--engine
    embedded|vllm] [--write]

One engine process with 277 MB of weights and a light load: the embedded engine, then
vLLM if it is installed. Each repetition: a memory copy of that size (source and target
warm), an export into shared memory, prepare (generation continues), commit; for vLLM
also its own reload (`reload_weights` between pause and resume: on the CPU it leaves a
tied lm_head stale). Two sets of weights alternate, so each push changes every byte.
Before that a trainer of the same model takes optimizer steps with an export in
parallel: `held` is the time in which it neither computes nor steps.

`pause, server` is the time in which no token could be decoded, as the engine (for vLLM:
its client) reports it. `commit, round trip` also holds the rest of the current decode
step.

Last line: `ratio: X` = pause, server over memory copy, of the embedded engine if it
took part.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch
from checkpoint import as_a_child, make_step, timed, train_once
from common import copy_costs, engine_server, has_vllm, options, qwen3_69m, reported
from pydantic import BaseModel
from transformers.utils.logging import disable_progress_bar

from asyncrl.base.files import clear_stale_staging, new_staging_dir, remove_staging_dir
from asyncrl.base.http import Caller
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.pool import EnginePool
from asyncrl.messages.engine_api import Interrupt
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.weights.export import export_weights, named_weights

SLOTS = 8
MAX_LENGTH = 256
RELOAD = "vLLM's own reload, pause to resume"
MIN_REPETITIONS = 3
LIMIT_S = 300.0
LOAD = 3
"""Long requests that generate all the time."""


async def keep_generating(pool: EnginePool, number: int) -> None:
    turn = 0
    while True:
        await pool.generate(
            SamplingRequest(
                f"load-{number}-{turn}",
                tuple(range(number, number + 16)),
                200,
                seed=turn,
            )
        )
        turn += 1


async def repeat(
    server: EngineClient,
    weights: dict[str, torch.Tensor],
    staging: Path,
    version: int,
    interrupt: Interrupt,
) -> dict[str, float]:
    """Copy the bytes once and push them once; return the seconds."""
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    (memcpy_s, _), _ = await asyncio.to_thread(
        copy_costs, num_bytes, torch.device("cpu")
    )
    start = time.perf_counter()
    sent = await asyncio.to_thread(
        export_weights, weights, staging / f"{version}.safetensors", version
    )
    exported = time.perf_counter()
    await server.prepare(sent)
    prepared = time.perf_counter()
    report = await server.commit(version, sent.digest, interrupt)
    committed = time.perf_counter()
    await asyncio.to_thread(Path(sent.path).unlink)
    assert report.digest == sent.digest, (
        f"the engine serves {report.digest}; {sent.digest} was sent"
    )
    return {
        "memory copy": memcpy_s,
        "export, digest included": exported - start,
        "prepare, generation continues": prepared - exported,
        "commit, round trip": committed - prepared,
        "pause, server": report.pause_s,
    }


class Anything(BaseModel, extra="allow"):
    """An answer of vLLM's own routes."""


class Reload(BaseModel):
    """The body of vLLM's /collective_rpc."""

    method: str = "reload_weights"
    kwargs: dict[str, str]


async def vllm_reload(caller: Caller, folder: Path, interrupt: Interrupt) -> float:
    """Seconds between pause and resume in which vLLM reloads its weights by itself."""
    mode, clear = ("keep", "false") if interrupt == "keep_kv" else (interrupt, "true")
    start = time.perf_counter()
    await caller.post(
        f"/pause?mode={mode}&clear_cache={clear}", None, Anything, timeout_s=LIMIT_S
    )
    try:
        await caller.post(
            "/collective_rpc",
            Reload(kwargs={"weights_path": str(folder)}),
            Anything,
            timeout_s=LIMIT_S,
        )
    finally:
        await caller.post("/resume", None, Anything, timeout_s=LIMIT_S)
    return time.perf_counter() - start


async def measure(
    kind: str, seconds: float, interrupt: Interrupt, folder: Path, staging: Path
) -> list[dict[str, float]]:
    """Repeat until the time is over."""
    first = named_weights(
        await asyncio.to_thread(qwen3_69m, folder / "model", MAX_LENGTH)
    )
    second = {name: tensor * 1.01 for name, tensor in first.items()}
    serving = engine_server(
        kind, folder / "model", folder, slots=SLOTS, max_length=MAX_LENGTH
    )
    async with serving as (server, caller):
        pool = EnginePool([server], slots=SLOTS)
        load = [
            asyncio.create_task(keep_generating(pool, number)) for number in range(LOAD)
        ]
        rows: list[dict[str, float]] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(rows) < MIN_REPETITIONS:
            await asyncio.sleep(0.5)
            version = len(rows) + 1
            row = {}
            if kind == "vllm":
                row = {RELOAD: await vllm_reload(caller, folder / "model", interrupt)}
            weights = second if version % 2 else first
            rows.append(
                await repeat(server, weights, staging, version, interrupt) | row
            )
        for task in load:
            assert not task.done(), f"the load failed: {task}"
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*load)
    return rows


def show(kind: str, repetitions: list[dict[str, float]], interrupt: str) -> float:
    """Print the table of one engine; return pause over memory copy."""
    rows = {name: median(one[name] for one in repetitions) for name in repetitions[0]}
    memcpy_s = rows["memory copy"]
    print(
        f"\n{kind}: 277 MB, interrupt={interrupt}, {len(repetitions)} repetitions, medians"
    )
    print(f"{'':36}{'seconds':>10}{'of memcpy':>12}")
    for name, seconds in rows.items():
        print(f"{name:36}{seconds:10.4f}{seconds / memcpy_s:12.2f}")
    if RELOAD in rows:
        print(
            f"vLLM's own reload takes {rows[RELOAD] / rows['pause, server']:.2f} times our pause"
        )
    return rows["pause, server"] / memcpy_s


def held_by_an_export(folder: Path) -> None:
    """Print how long an export takes, and how long it holds up a trainer."""
    step = make_step(folder)
    train_once(step)
    rows = []
    for _ in range(MIN_REPETITIONS):
        start = time.perf_counter()
        step.begin_export(folder / "alone.safetensors")()
        alone_s, start = time.perf_counter() - start, time.perf_counter()
        finish = step.begin_export(folder / "beside.safetensors")
        begun_s = time.perf_counter() - start
        with timed(step) as waits:
            train_s = train_once(step)
        finish()
        rows.append((alone_s, begun_s + sum(waits), train_s))
    alone_s, held_s, train_s = (median(column) for column in zip(*rows, strict=True))
    print(
        f"trainer: export {alone_s:.4f} s, held by an export {held_s:.4f} s, its step {train_s:.4f} s"
    )


def run_kind(kind: str, seconds: float, interrupt: Interrupt) -> float:
    staging = new_staging_dir()
    try:
        with tempfile.TemporaryDirectory(prefix="asyncrl-publish-") as folder:
            rows = asyncio.run(measure(kind, seconds, interrupt, Path(folder), staging))
    finally:
        remove_staging_dir(staging)
    return show(kind, rows, interrupt)


def main() -> None:
    """Parse, measure, print."""
    parser = options(__doc__, seconds=60.0)
    parser.add_argument(
        "--interrupt", choices=["abort", "keep", "keep_kv", "wait"], default="abort"
    )
    parser.add_argument(
        "--engine", choices=["embedded", "vllm"], help="only this one (default: all)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    as_a_child()
    disable_progress_bar()
    logging.disable(logging.WARNING)  # the model sampled none of these random tokens
    clear_stale_staging()
    kinds = (
        [arguments.engine]
        if arguments.engine
        else ["embedded", *(["vllm"] if has_vllm() else [])]
    )
    with reported("publish", is_kept=arguments.write):
        with tempfile.TemporaryDirectory(prefix="asyncrl-publish-") as folder:
            held_by_an_export(Path(folder))
        ratios = [
            run_kind(kind, arguments.seconds / len(kinds), arguments.interrupt)
            for kind in kinds
        ]
        print(f"ratio: {ratios[0]:.2f}")


if __name__ == "__main__":
    main()
