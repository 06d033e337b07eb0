"""CPU of a request, and of an interruption by a weight update, in engine and controller together.

    python benchmarks/request_cost.py [--seconds S] [--tokens N] [--write]

An EnginePool samples on one simulated engine server, a process of its own over the real link, with 100, 1,000
and 10,000 requests in flight: groups of 8 with a prompt of 128 tokens each, answers of N tokens. The server's
latency model costs no CPU a step, and this process looks for garbage as seldom as that of a run, so what both
processes use is the cost of the requests alone: asking, routing, frames both ways, checks, joining, and the
coroutine of the caller. Interruptions: all that is in flight is interrupted by a commit, N tokens after the
one before, answered with what it has (which a journal would keep: its rows are encoded and written here too),
and resumed. CPU seconds, so that a busy machine counts for little. The last line is the larger of the two at
10,000 in flight over 0.3 ms: below 1 is the goal; and it is linear if the three rows are alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
from report import options, reported
from safetensors.numpy import save_file

from asyncrl.base.http import Caller
from asyncrl.engines.engine import EngineServer
from asyncrl.engines.pool import EnginePool
from asyncrl.job.lifecycle import rare_collections
from asyncrl.journal.tokens import encode_partial
from asyncrl.launch.processes import ChildProcess, ProcessSpec
from asyncrl.messages.digest import weights_digest
from asyncrl.messages.engine_api import EngineHealth
from asyncrl.messages.records import Completion, GroupId, SamplingRequest
from asyncrl.messages.trainer_api import ExportResponse

GOAL_MS = 0.3
IN_FLIGHT = (100, 1_000, 10_000)
GROUP, PROMPT, STEP_S = 8, 128, 0.02


class Cost:
    """CPU seconds of both processes since it was made."""

    def __init__(self, server: psutil.Process) -> None:
        self._server, self._began = server, self._now(server)

    def seconds(self) -> float:
        return self._now(self._server) - self._began

    @staticmethod
    def _now(server: psutil.Process) -> float:
        theirs = server.cpu_times()
        return time.process_time() + theirs.user + theirs.system


@contextlib.asynccontextmanager
async def simulated(slots: int, folder: Path) -> AsyncIterator[tuple[EngineServer, psutil.Process]]:
    """A server whose answers end at max_tokens alone, one token a STEP_S."""
    secret = secrets.token_hex(16)
    spec = {"name": "engine-0", "slots": slots, "max_length": 2**24, "vocab_size": 32_000}
    spec |= {"mean_tokens": 1e9, "sigma": 0.0, "decode_step_s": STEP_S, "per_row_s": 0.0}
    module = "asyncrl_servers.simulated"
    child = ChildProcess(ProcessSpec("engine-0", module, json.dumps(spec), folder, secret))
    await child.start()
    caller = Caller("engine-0", child.url, secret)
    try:
        await caller.get("/health", EngineHealth, timeout_s=60)
        assert child.pid is not None
        yield EngineServer(caller), psutil.Process(child.pid)
    finally:
        await caller.aclose()
        await child.aclose()


def request(index: int, tokens: int, prompts: dict[int, tuple[int, ...]]) -> SamplingRequest:
    """Request `index`; those of a group share one prompt."""
    group = index // GROUP
    ids = prompts.setdefault(group, tuple(np.random.default_rng(group).integers(0, 32_000, PROMPT).tolist()))
    return SamplingRequest(
        request_id=f"g{group}/r{index % GROUP}",
        prompt_ids=ids,
        max_tokens=tokens,
        temperature=1.0,
        seed=index,
    )


async def requests_ms(num: int, tokens: int, seconds: float, folder: Path) -> tuple[float, int]:
    """(ms of CPU a request, how many)."""
    async with simulated(num, folder) as (server, process):
        pool, prompts, count = EnginePool([server], slots=num), dict[int, tuple[int, ...]](), 0
        asked = [request(index, tokens, prompts) for index in range(num)]
        await pool.generate(asked[0])  # opens the link
        deadline, cost = time.perf_counter() + seconds, Cost(process)
        while count == 0 or time.perf_counter() < deadline:
            await asyncio.gather(*(pool.generate(one) for one in asked))
            count += num
        return 1e3 * cost.seconds() / count, count


async def until(server: EngineServer, num_running: int) -> None:
    """Return once so many requests run, and none is queued."""
    now = await server.health()
    while now.num_running < num_running or now.num_queued:
        await asyncio.sleep(0.01)
        now = await server.health()


async def interruptions_ms(num: int, tokens: int, seconds: float, folder: Path) -> tuple[float, int]:
    """(ms of CPU an interruption, how many)."""
    written = 0

    def keep(partial: Completion) -> None:
        nonlocal written
        written += len(encode_partial(GroupId(0), 0, partial))

    async with simulated(num, folder) as (server, process):
        pool, prompts = EnginePool([server], slots=num), dict[int, tuple[int, ...]]()
        # What each has sampled grows with the interruptions, and with it what is written: as in a run, few.
        running = [
            asyncio.ensure_future(pool.generate(request(index, 2**20, prompts), on_segment=keep))
            for index in range(num)
        ]
        await until(server, num)
        costs, deadline, version = list[float](), time.perf_counter() + seconds, 0
        while len(costs) < 3 or time.perf_counter() < deadline:
            version += 1
            cost = Cost(process)
            await asyncio.sleep(tokens * STEP_S)
            path = folder / "weights.safetensors"
            weights = {"w": np.full(4, version, np.float32)}
            save_file(weights, path)
            entries = [("w", "float32", (4,), weights["w"].tobytes())]
            digest = weights_digest(entries)
            manifest = ExportResponse(
                version=version, path=str(path), digest=digest, num_tensors=1, num_bytes=16
            )
            await server.commit(version, await server.prepare(manifest), "abort")
            await until(server, num)
            costs.append(1e3 * cost.seconds() / num)
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return statistics.median(costs), version * num


def main() -> None:
    parser = options(__doc__, seconds=30.0)
    parser.add_argument(
        "--tokens", type=int, default=16, help="tokens of an answer, or between interruptions"
    )
    given = parser.parse_args()
    share = given.seconds / (2 * len(IN_FLIGHT))
    with reported("request_cost", is_kept=given.write):
        print(
            f"CPU of engine and controller together, simulated engine over the real link: groups of {GROUP}, "
            f"prompts of {PROMPT} tokens, {given.tokens} tokens an answer or between two interruptions"
        )
        print(
            f"{'in flight':>10}{'ms a request':>15}{'requests':>10}{'ms an interruption':>21}{'of them':>9}"
        )
        for num in IN_FLIGHT:
            with tempfile.TemporaryDirectory() as name, rare_collections():
                each, count = asyncio.run(requests_ms(num, given.tokens, share, Path(name)))
            with tempfile.TemporaryDirectory() as name, rare_collections():
                stop, stops = asyncio.run(interruptions_ms(num, given.tokens, share, Path(name)))
            print(f"{num:>10,}{each:>15.3f}{count:>10,}{stop:>21.3f}{stops:>9,}")
        print(f"goal: {GOAL_MS} ms each")
        print(f"ratio: {max(each, stop) / GOAL_MS:.2f}")


if __name__ == "__main__":
    main()
