"""How long generation stands still when new weights come, against a plain memory copy of the same bytes.

One real engine process with >= 250 MB of weights and a light load of generation: the embedded one, then vLLM
where it is installed. Each repetition, in the same run and under the same load: a memory copy of as many
bytes (source and target warm), an export into shared memory, prepare (while generation goes on), commit; with
vLLM its own reload too (`reload_weights` from a folder between pause and resume: on the CPU it leaves a tied
lm_head stale). Two sets of weights take turns, so that every push changes every byte.

Before that a trainer of the same model takes optimizer steps with an export beside each: `held by an export`
is the time in which it neither computes nor steps, until the export is begun and then right before weights
change.

    python benchmarks/publish.py [--seconds 60] [--interrupt abort] [--engine embedded|vllm]

`pause, server` is the time in which no token could be decoded, as the engine reports it (vLLM: as its client
does, from the pause to the resume); two rows measured from outside bound it.
`commit, round trip` also holds the rest of the decode step in hand. `wait, client` is the longest time
between two answers of a stream of one-token requests around the commit; it also holds the prefill of all
interrupted sequences under the new weights (abort and keep), which is computing, not a copy: --interrupt
keep_kv does without. `wait, client, usual` is the same without a commit. No canary is sent along: it is two
requests of 160 tokens after the resume. `file, no digest` is what an export copies, into a new file in shared
memory: a tensor is hashed while it is written, which takes no time as long as `digest` is the smaller one.

Last line: `ratio: X` = pause, server over memory copy, medians of the same run, of the embedded engine where
it took part.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from checkpoint import as_a_child, make_step, timed, train_once
from engine_servers import engine_server, has_vllm
from pydantic import BaseModel
from random_model import qwen3_69m
from report import options, reported
from transformers.utils.logging import disable_progress_bar

from asyncrl.base.http import Caller
from asyncrl.base.staging import clear_stale_staging, new_staging_dir, remove_staging_dir
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.pool import EnginePool
from asyncrl.messages.engine_api import Interrupt
from asyncrl.messages.records import SamplingRequest
from asyncrl.weights.export import export_weights, named_weights
from asyncrl.weights.tensor_files import digest_tensors, host_bytes

SLOTS, MAX_LENGTH = 8, 256
MIN_REPETITIONS = 3
LIMIT_S = 300.0
LOAD = 3
"""Long requests that generate all the time, beside the stream of one-token requests."""


@dataclass(frozen=True)
class Repetition:
    """Seconds of one publish, and of the memory copy beside it."""

    memcpy_s: float
    digest_s: float
    file_s: float
    export_s: float
    prepare_s: float
    commit_s: float
    pause_s: float
    client_wait_s: float
    reload_s: float | None = None


class TokenStream:
    """One-token requests, one after the other; `gaps` are (start, end) of each wait for an answer."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self.gaps: list[tuple[float, float]] = []
        self._answered = asyncio.Event()

    async def run(self) -> None:
        """Ask until cancelled."""
        last = time.perf_counter()
        number = 0
        while True:
            await self._pool.generate(
                SamplingRequest(f"probe-{number}", tuple(range(16)), 1, 1.0, seed=number)
            )
            now = time.perf_counter()
            self.gaps.append((last, now))
            last, number = now, number + 1
            self._answered.set()

    def longest(self, start: float, end: float) -> float:
        """The longest wait that touches [start, end]."""
        return max(after - before for before, after in self.gaps if before < end and after > start)

    async def answered_after(self, moment: float) -> None:
        """Return when a wait that began after `moment` has ended."""
        while not self.gaps or self.gaps[-1][0] < moment:
            self._answered.clear()
            await self._answered.wait()


async def keep_generating(pool: EnginePool, number: int) -> None:
    """One long request after the other."""
    turn = 0
    while True:
        await pool.generate(
            SamplingRequest(f"load-{number}-{turn}", tuple(range(number, number + 16)), 200, 1.0, seed=turn)
        )
        turn += 1


def copy_once(source: np.ndarray, target: np.ndarray) -> float:
    """Seconds of a plain copy."""
    start = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - start


def write_once(weights: dict[str, torch.Tensor], path: Path) -> float:
    """Seconds to write them into a new file, without a digest."""
    start = time.perf_counter()
    with path.open("wb") as file:
        for tensor in weights.values():
            file.write(host_bytes(tensor))
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


async def repeat(
    server: EngineClient,
    stream: TokenStream,
    weights: dict[str, torch.Tensor],
    staging: Path,
    version: int,
    interrupt: Interrupt,
) -> tuple[Repetition, int]:
    """One memory copy and one publish; also the bytes of the weights."""
    size = sum(tensor.nbytes for tensor in weights.values())
    source, target = np.ones(size, dtype=np.uint8), np.ones(size, dtype=np.uint8)
    memcpy_s = median([await asyncio.to_thread(copy_once, source, target) for _ in range(3)])
    del source, target
    start = time.perf_counter()
    await asyncio.to_thread(digest_tensors, weights)
    digest_s = time.perf_counter() - start
    file_s = await asyncio.to_thread(write_once, weights, staging / "copy")
    start = time.perf_counter()
    sent = await asyncio.to_thread(export_weights, weights, staging / f"{version}.safetensors", version)
    exported = time.perf_counter()
    await server.prepare(sent)
    prepared = time.perf_counter()
    report = await server.commit(version, sent.digest, interrupt)
    committed = time.perf_counter()
    await asyncio.to_thread(Path(sent.path).unlink)
    assert report.digest == sent.digest, f"engine serves {report.digest}, sent was {sent.digest}"
    await stream.answered_after(committed)
    client_wait_s = stream.longest(prepared, committed)
    times = Repetition(
        memcpy_s,
        digest_s,
        file_s,
        exported - start,
        prepared - exported,
        committed - prepared,
        report.pause_s,
        client_wait_s,
    )
    return times, sent.num_bytes


class Anything(BaseModel, extra="allow"):
    """Whatever one of vLLM's own routes answers."""


class Reload(BaseModel):
    """The body of vLLM's /collective_rpc."""

    method: str = "reload_weights"
    kwargs: dict[str, str]


async def vllm_reload(caller: Caller, folder: Path, interrupt: Interrupt) -> float:
    """Seconds between pause and resume in which vLLM reloads its weights by itself."""
    mode, clear = ("keep", "false") if interrupt == "keep_kv" else (interrupt, "true")
    start = time.perf_counter()
    await caller.post(f"/pause?mode={mode}&clear_cache={clear}", None, Anything, timeout_s=LIMIT_S)
    try:
        await caller.post(
            "/collective_rpc", Reload(kwargs={"weights_path": str(folder)}), Anything, timeout_s=LIMIT_S
        )
    finally:
        await caller.post("/resume", None, Anything, timeout_s=LIMIT_S)
    return time.perf_counter() - start


async def measure(
    kind: str, seconds: float, interrupt: Interrupt, folder: Path, staging: Path
) -> tuple[list[Repetition], list[float], int]:
    """Repetitions until the time is over; the usual waits of the stream; bytes of the weights."""
    first = named_weights(await asyncio.to_thread(qwen3_69m, folder / "model", MAX_LENGTH))
    second = {name: tensor * 1.01 for name, tensor in first.items()}
    async with engine_server(kind, folder / "model", folder, slots=SLOTS, max_length=MAX_LENGTH) as (
        server,
        caller,
    ):
        pool = EnginePool([server], slots=SLOTS)
        stream = TokenStream(pool)
        tasks = [asyncio.create_task(stream.run())]
        tasks += [asyncio.create_task(keep_generating(pool, number)) for number in range(LOAD)]
        try:
            await stream.answered_after(time.perf_counter())
            repetitions: list[Repetition] = []
            usual: list[float] = []
            end = time.perf_counter() + seconds
            while time.perf_counter() < end or len(repetitions) < MIN_REPETITIONS:
                num_before = len(stream.gaps)
                await asyncio.sleep(0.5)
                usual += [after - before for before, after in stream.gaps[num_before:]]
                version = len(repetitions) + 1
                reload_s = await vllm_reload(caller, folder / "model", interrupt) if kind == "vllm" else None
                done, num_bytes = await repeat(
                    server, stream, second if version % 2 else first, staging, version, interrupt
                )
                repetitions.append(replace(done, reload_s=reload_s))
                for task in tasks:
                    if task.done():
                        task.result()
        finally:
            for task in tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks)
    return repetitions, usual, num_bytes


def show(
    kind: str, repetitions: list[Repetition], usual: list[float], num_bytes: int, interrupt: str
) -> float:
    """The table of one engine; returns pause over memory copy."""
    memcpy_s = median(one.memcpy_s for one in repetitions)
    print(
        f"\n{kind}: {num_bytes / 1e6:.0f} MB of float32 weights, interrupt={interrupt}, {len(repetitions)} "
        f"repetitions, medians"
    )
    print(f"{'':36}{'seconds':>10}{'GB/s':>8}{'of memcpy':>12}")
    rows = {
        "memory copy": memcpy_s,
        "digest": median(one.digest_s for one in repetitions),
        "file, no digest": median(one.file_s for one in repetitions),
        "export, digest included": median(one.export_s for one in repetitions),
        "prepare (beside generation)": median(one.prepare_s for one in repetitions),
        "commit, round trip": median(one.commit_s for one in repetitions),
        "pause, server": (pause_s := median(one.pause_s for one in repetitions)),
        "wait, client, at commit": median(one.client_wait_s for one in repetitions),
        "wait, client, usual": median(usual),
    }
    reloads = [one.reload_s for one in repetitions if one.reload_s is not None]
    if reloads:
        rows["vLLM's own reload, pause to resume"] = median(reloads)
    for name, seconds in rows.items():
        print(f"{name:36}{seconds:10.4f}{num_bytes / seconds / 1e9:8.1f}{seconds / memcpy_s:12.2f}")
    if reloads:
        print(f"vLLM's own reload takes {median(reloads) / pause_s:.2f} times the pause of ours")
    return pause_s / memcpy_s


def held_by_an_export(folder: Path) -> None:
    """Print how long a trainer is held by the export of its weights, and what the export itself takes."""
    step = make_step(folder)
    train_once(step)
    rows = []
    for _ in range(MIN_REPETITIONS):
        start = time.perf_counter()
        step.export(folder / "alone.safetensors")
        alone_s, start = time.perf_counter() - start, time.perf_counter()
        finish = step.begin_export(folder / "beside.safetensors")
        begun_s = time.perf_counter() - start
        with timed(step) as waits:
            train_s = train_once(step)
        finish()
        rows.append((alone_s, begun_s + sum(waits), train_s))
    alone_s, held_s, train_s = (median(column) for column in zip(*rows, strict=True))
    print(f"trainer: export alone {alone_s:.4f} s, held by an export beside a step {held_s:.4f} s, that step")
    print(f"{train_s:.4f} s; held / export alone {held_s / alone_s:.3f}")


def run_kind(kind: str, seconds: float, interrupt: Interrupt) -> tuple[list[Repetition], list[float], int]:
    """One engine in folders of its own."""
    staging = new_staging_dir()
    try:
        with tempfile.TemporaryDirectory(prefix="asyncrl-publish-") as folder:
            return asyncio.run(measure(kind, seconds, interrupt, Path(folder), staging))
    finally:
        remove_staging_dir(staging)


def main() -> None:
    """Parse, measure, print."""
    parser = options(__doc__, seconds=60.0)
    parser.add_argument("--interrupt", choices=["abort", "keep", "keep_kv", "wait"], default="abort")
    parser.add_argument(
        "--engine",
        choices=["embedded", "vllm"],
        default=None,
        help="one alone (default: both, vLLM if it is installed)",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    as_a_child()
    disable_progress_bar()
    logging.disable(logging.WARNING)  # random tokens are none that the model sampled
    clear_stale_staging()
    kinds = [arguments.engine] if arguments.engine else ["embedded", *(["vllm"] if has_vllm() else [])]
    with reported("publish", is_kept=arguments.write):
        if "vllm" not in kinds and arguments.engine is None:
            print("vllm: not installed (make setup-vllm), not measured")
        staging = new_staging_dir()
        try:
            held_by_an_export(staging)
        finally:
            remove_staging_dir(staging)
        ratios = [
            show(
                kind,
                *run_kind(kind, arguments.seconds / len(kinds), arguments.interrupt),
                arguments.interrupt,
            )
            for kind in kinds
        ]
        print(f"ratio: {ratios[0]:.2f}")


if __name__ == "__main__":
    main()
