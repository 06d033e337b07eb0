"""Part 5: decode speeds of the engines; a vLLM server that is pushed to, sleeps and is killed, on one device."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import signal
import time
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from asyncrl.base.errors import EngineLost
from asyncrl.base.files import new_staging_dir, remove_staging_dir
from asyncrl.base.http import Caller
from asyncrl.config import RolloutConfig
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.pool import EnginePool
from asyncrl.engines.vllm_process import VllmRequirements
from asyncrl.engines.vllm_server import VllmServer
from asyncrl.launch.machine import find_python
from asyncrl.launch.processes import ChildProcess, ProcessSpec
from asyncrl.messages.engine_api import Interrupt
from asyncrl.messages.records import Completion
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.sync.push import Push
from asyncrl.weights.export import LazyWeights, export_weights, named_weights
from asyncrl_servers.vllm.arguments import first_error
from gpu.models import architecture, make_folder
from gpu.pushes import make_chunks, push_chunks
from gpu.rows import Bench

VLLM_ARGS = "ASYNCRL_GPU_VLLM_ARGS"
"""Environment variable: arguments of `vllm serve` as JSON, over those of vllm_args(); null drops one."""
ROWS = (1, 32, 64, 256)
PROMPT, NEW, MAX_LENGTH = 32, 128, 512
LOAD_NEW = 384
"""Tokens of a request during a push."""
GAP = {"cuda": 0.1, "cpu": 1e-3}
"""Largest mean difference from transformers, in nats: bfloat16 and float32."""
LOG_LINES = 40
TOLD = r"attention backend|Graph captur|Capturing|init engine|torch.compile takes|KV cache size|eager"
"""Lines of vLLM's log that say how it runs."""
MOST_READ = 8
"""Sequences that transformers reads again."""
START_S = 150.0
GRACE_S = 15.0
"""For the log and the end of the server."""


def vllm_args(bench: Bench) -> dict[str, Any]:
    """Return arguments of `vllm serve`: graphs without torch.compile, unless VLLM_ARGS says otherwise."""
    graphs = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    given = json.loads(os.environ.get(VLLM_ARGS, "{}"))
    return (graphs if bench.device == "cuda" else {}) | given


# ---- sequences and their exact logprobs


class Truth:
    """Weights of each version, and what transformers computes with them."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype).to(bench.device).eval()
        first = named_weights(self.model)
        # Every matrix and norm differs.
        other = {name: 1.25 * tensor.flip(0) for name, tensor in first.items()}
        self._sets = first, other

    def weights(self, version: int) -> dict[str, Tensor]:
        """Return one of two sets; version 0 is the model's folder."""
        return self._sets[version % 2]

    @torch.no_grad()
    def gaps(self, request: SamplingRequest, done: Completion, version: int) -> Tensor:
        """Return the differences of the completion's logprobs from those of a version, in nats."""
        ids = torch.tensor([[*request.prompt_ids, *done.token_ids]], device=self.model.device)
        first = len(request.prompt_ids)
        logits = functional_call(self.model, self.weights(version), (ids,)).logits[0, first - 1 : -1]
        right = logits.float().log_softmax(-1).gather(1, ids[0, first:, None])[:, 0]
        return (right.cpu() - torch.tensor(done.behaviour_logprobs)).abs()

    def tell(self, bench: Bench, name: str, sampled: Sequence[Sampled], version: int) -> None:
        gaps = torch.cat([self.gaps(*one, version) for one in sampled[:MOST_READ]])
        bench.check(f"{name}: logprob gap, mean nats", float(gaps.mean()), GAP[bench.device], ".1e")
        bench.tell(f"{name}: logprob gap, maximum", f"{float(gaps.max()):.1e}")


Sampled = tuple[SamplingRequest, Completion]


def make_requests(bench: Bench, name: str, count: int, num_new: int) -> list[SamplingRequest]:
    rng = np.random.default_rng(len(name))
    vocab_size = architecture(bench, "0.6B")["vocab_size"]
    prompts = rng.integers(0, vocab_size, (count, PROMPT)).tolist()
    return [SamplingRequest(f"{name}-{n}", ids, num_new, seed=n) for n, ids in enumerate(prompts)]


def all_rows(bench: Bench) -> tuple[int, ...]:
    return (1, 8) if bench.is_tiny else ROWS


async def tell_decode(bench: Bench, name: str, pool: EnginePool, truth: Truth) -> None:
    """Print the speed of each number of requests at once, second time, and the logprob gap."""
    for rows in all_rows(bench):
        for turn in range(2):
            requests = make_requests(bench, f"{name}-{rows}-{turn}", rows, NEW)
            started_s = time.perf_counter()
            answers = await asyncio.gather(*map(pool.generate, requests))
            seconds = time.perf_counter() - started_s
        what = f"{name}: {rows} requests of {NEW} tokens, tokens/s"
        bench.tell(what, f"{rows * NEW / seconds:,.0f}", against=f"{1e3 * seconds / NEW:.2f} ms a token")
    truth.tell(bench, name, list(zip(requests, answers, strict=True)), 0)


# ---- the embedded engine


def decode(bench: Bench) -> None:
    """Time decode steps of the embedded engine and whole requests through its server, each kind of step."""
    from asyncrl_servers.embedded.decoder import EmbeddedSpec

    # A further kind of step is one more entry.
    kinds = {"embedded": {}, "embedded, fused": {"fused_decode": True}}
    for name, fields in kinds.items():
        if fields.keys() <= EmbeddedSpec.model_fields.keys():
            asyncio.run(_decode_embedded(bench, name, fields))


async def _decode_embedded(bench: Bench, name: str, fields: dict[str, Any]) -> None:
    from common import engine_server

    folder = make_folder(bench, "0.6B")
    truth = Truth(bench, folder)
    given = {"device": bench.device, "dtype": str(truth.dtype).removeprefix("torch."), **fields}
    slots = all_rows(bench)[-1]
    run_dir = bench.folder / name
    started_s = time.perf_counter()
    async with engine_server(
        "embedded", folder, run_dir, slots=slots, max_length=MAX_LENGTH, **given
    ) as (server, _):
        bench.tell(f"{name}: start, seconds", f"{time.perf_counter() - started_s:.1f}")
        await tell_decode(bench, name, EnginePool([server], slots=slots), truth)


# ---- vLLM


class Serving:
    """A vLLM server and its client; start() again after a loss begins a new process."""

    def __init__(self, bench: Bench, model: Path, dtype: str, slots: int) -> None:
        of_device = {"gpu_memory_utilization": 0.5, "enable_sleep_mode": True}
        args = (of_device if bench.device == "cuda" else {}) | vllm_args(bench)
        spec = {"name": "engine-0", "model_path": str(model), "dtype": dtype, "device": bench.device}
        spec |= {"slots": slots, "max_length": MAX_LENGTH, "deterministic": False, "args": args}
        secret = secrets.token_hex(16)
        python = partial(find_python, RolloutConfig(engine="vllm"))
        module = "asyncrl_servers.vllm"
        process = ProcessSpec("engine-0", module, json.dumps(spec), bench.folder, secret, python=python)
        needed = VllmRequirements(str(model), dtype, slots, MAX_LENGTH, end_ids=())
        self.child = ChildProcess(process)
        self.caller = Caller("engine-0", "", secret)
        self.client = VllmServer(self.caller, needed)
        self.log = process.log_path

    async def start(self) -> float:
        """Return the seconds until it is ready."""
        started_s = time.perf_counter()
        await self.child.start()
        self.caller.url = self.child.url
        ready = asyncio.create_task(self.client.ready(START_S))
        ended = asyncio.create_task(self.child.wait())
        await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            raise RuntimeError(f"vLLM ended with {self.child.returncode} before it was ready")
        ended.cancel()
        await ready
        return time.perf_counter() - started_s

    async def restart(self) -> float:
        await self.child.aclose()
        self.child = self.child.renewed()
        self.client.reset_nowait()
        return await self.start()


@asynccontextmanager
async def serving(bench: Bench, model: Path, dtype: str, slots: int) -> AsyncIterator[Serving]:
    """End the server, keep its log in `out`, and show the end of the log if the block fails."""
    server = Serving(bench, model, dtype, slots)
    try:
        yield server
    except BaseException as error:
        text = server.log.read_text(errors="replace") if server.log.exists() else ""
        lines = [line.rpartition("] ")[2][:200] for line in text.splitlines() if "^^^" not in line]
        print("\n".join([*lines[-LOG_LINES:], f"first error: {first_error(text)}"]), flush=True)
        # The whole traceback would push the log out of what is shown.
        print("".join(traceback.format_exception(error, limit=-3, chain=False)), flush=True)
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    finally:
        await server.caller.aclose()
        await server.child.aclose()
        if server.log.exists():
            bench.out.mkdir(parents=True, exist_ok=True)
            shutil.copy(server.log, bench.out / f"{bench.label}-vllm.log")


def vllm(bench: Bench) -> None:
    """Measure one vLLM server from its start to its end; each result is printed at once."""
    asyncio.run(_vllm(bench))


async def _vllm(bench: Bench) -> None:
    started_s = time.perf_counter()
    folder = make_folder(bench, "0.6B")
    truth = Truth(bench, folder)
    slots = all_rows(bench)[-1]
    dtype = str(truth.dtype).removeprefix("torch.")
    staging = new_staging_dir()
    try:
        async with (
            asyncio.timeout(bench.limit_s - (time.perf_counter() - started_s) - GRACE_S),
            serving(bench, folder, dtype, slots) as server,
        ):
            start_s = await server.start()
            _tell_start(bench, server, start_s)
            pool = EnginePool([server.client], slots=slots)
            await tell_decode(bench, "vLLM", pool, truth)
            for interrupt in get_args(Interrupt):
                await _push(bench, server.client, truth, staging, interrupt)
            await _sleep(bench, server.client, truth, staging)
            left_s = bench.limit_s - (time.perf_counter() - started_s) - GRACE_S
            await _kill(bench, server, truth, staging, restarts=left_s > 1.3 * start_s + 20)
    finally:
        remove_staging_dir(staging)


def _tell_start(bench: Bench, server: Serving, start_s: float) -> None:
    bench.tell("vLLM: start, seconds", f"{start_s:.1f}")
    text = server.log.read_text(errors="replace")
    version = re.search(r"version (\d\S+)", text)
    found = [line.rpartition("] ")[2] for line in text.splitlines() if re.search(TOLD, line)]
    said = " | ".join(dict.fromkeys(line.strip()[:110] for line in found))
    bench.tell("vLLM: version", version[1] if version else "unknown", against=said[:900])


# ---- requests during a push, a sleep, a kill


@dataclass
class Load:
    """Requests that follow each other in `num` tasks until stop(). The first task streams."""

    bench: Bench
    pool: EnginePool
    name: str
    num: int
    sampled: list[Sampled] = field(default_factory=list)
    told: list[float] = field(default_factory=list)
    """Times at which the streaming task got tokens."""

    def __post_init__(self) -> None:
        self._is_over = False
        self._flows = asyncio.Event()
        self._tasks = [asyncio.create_task(self._repeat(number)) for number in range(self.num)]

    async def _repeat(self, number: int) -> None:
        turn = 0
        while not self._is_over:
            name = f"{self.name}-{turn}"
            request = make_requests(self.bench, name, self.num, LOAD_NEW)[number]
            on_tokens = self._note if number == 0 else None
            self.sampled.append((request, await self.pool.generate(request, on_tokens=on_tokens)))
            turn += 1

    def _note(self, token_ids: Sequence[int]) -> None:
        self.told.append(time.perf_counter())
        if len(self.told) > PROMPT:
            self._flows.set()

    async def flowing(self) -> None:
        """Wait until tokens come."""
        flows = asyncio.create_task(self._flows.wait())
        done, _ = await asyncio.wait((flows, *self._tasks), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        """Wait for the last completions."""
        self._is_over = True
        await asyncio.gather(*self._tasks)


async def _push(
    bench: Bench, client: EngineClient, truth: Truth, staging: Path, interrupt: Interrupt
) -> None:
    """Push other weights during generation, and check each token's version and logprob."""
    old = client.policy_version
    new = old + 1
    load = Load(bench, EnginePool([client], slots=all_rows(bench)[-1]), interrupt, 8 if bench.is_tiny else 64)
    await load.flowing()
    started_s = time.perf_counter()
    report = await push_file(client, truth, staging, new, interrupt)
    ended_s = time.perf_counter()
    await load.stop()
    waits = [after - before for before, after in pairwise(load.told) if before < ended_s and after > started_s]
    name = f"push, {interrupt}"
    against = f"{report.num_interrupted} requests interrupted"
    bench.tell(f"{name}: seconds, without export", f"{report.publish_s:.3f}", against=against)
    against = f"{max(waits):.3f} s in a stream"
    bench.tell(f"{name}: without a token, seconds", f"{report.pause_s:.3f}", against=against)
    _check_versions(bench, name, load.sampled, (old, new), is_mixed=interrupt != "wait")
    _tell_gaps(bench, name, load.sampled, truth, (old, new), is_exact=interrupt != "keep_kv")


async def push_file(
    client: EngineClient, truth: Truth, staging: Path, version: int, interrupt: Interrupt
) -> Any:
    """Push as a run does by files; raises if the digest differs, or the engine is lost."""
    path = staging / f"{version}.safetensors"
    sent = await asyncio.to_thread(export_weights, LazyWeights(truth.weights(version)), path, version)

    def on_lost(lost: EngineLost) -> None:
        raise lost

    push = Push(version, [client], timeout_s=60.0, interrupt=interrupt, on_lost=on_lost)
    report = await push.whole(sent)
    path.unlink()
    return report


def _check_versions(
    bench: Bench, name: str, sampled: Sequence[Sampled], versions: tuple[int, int], *, is_mixed: bool
) -> None:
    """Spans cover all tokens in order; with `is_mixed` some completions have both versions, else none."""
    num_wrong = 0
    num_mixed = 0
    for request, done in sampled:
        spans = done.version_spans
        is_whole = spans[0].start == 0 and spans[-1].end == len(done.token_ids) == request.max_tokens
        is_ordered = all(one.end == two.start and one.version < two.version for one, two in pairwise(spans))
        is_known = {span.version for span in spans} <= {*versions}
        num_wrong += not (is_whole and is_ordered and is_known)
        num_mixed += len(spans) > 1
    bench.check(f"{name}: completions with wrong versions", num_wrong, 0, "d")
    what = f"{name}: completions of two versions"
    bench.tell(what, f"{num_mixed} of {len(sampled)}", ok=(num_mixed > 0) == is_mixed)


def _tell_gaps(
    bench: Bench,
    name: str,
    sampled: Sequence[Sampled],
    truth: Truth,
    versions: tuple[int, int],
    *,
    is_exact: bool,
) -> None:
    """Compare tokens with transformers by their version: with the new weights, and at the boundary."""
    old, new = versions
    mixed_first = sorted(sampled, key=lambda one: (-len(one[1].version_spans), -one[1].version_spans[-1].version))
    after = []
    as_old = []
    boundary = []
    for request, done in mixed_first[:MOST_READ]:
        span = done.version_spans[-1]
        by_old, by_new = (truth.gaps(request, done, version) for version in (old, new))
        right = torch.cat([by_old[: span.start], by_new[span.start :]])
        if span.version == new:
            after.append(by_new[span.start :])
            as_old.append(by_old[span.start :])
        if span.start > 0:
            boundary.append(right[span.start - 1 : span.start + 1])
    mean = float(torch.cat(after).mean())
    limit = GAP[bench.device]
    against = f"maximum {float(torch.cat(after).max()):.1e}; with the old weights {float(torch.cat(as_old).mean()):.1e}"
    is_right = mean <= limit and mean < 0.3 * float(torch.cat(as_old).mean())
    bench.tell(f"{name}: gap after it, mean", f"{mean:.1e}", against=against, ok=is_right if is_exact else None)
    if boundary:
        gaps = torch.cat(boundary)
        against = f"maximum {float(gaps.max()):.1e}"
        is_right = float(gaps.mean()) <= limit
        what = f"{name}: gap of tokens at the boundary, mean"
        bench.tell(what, f"{float(gaps.mean()):.1e}", against=against, ok=is_right if is_exact else None)


async def _sleep(bench: Bench, client: EngineClient, truth: Truth, staging: Path) -> None:
    """Sleep at level 2, wake, push by chunks (ipc), and compare logprobs."""
    version = client.policy_version + 1
    weights = LazyWeights(truth.weights(version))
    cut = make_chunks(weights, staging, torch.device(bench.device), truth.dtype)
    held = [_used_gib(bench)]
    started_s = time.perf_counter()
    await client.sleep()
    asleep_s = time.perf_counter() - started_s
    held.append(_used_gib(bench))
    times = await push_chunks(client, weights, cut, version)
    held.append(_used_gib(bench))
    gib = ", ".join(f"{one:.1f}" for one in held)
    bench.tell("sleep, seconds", f"{asleep_s:.3f}", against=f"device GiB before, asleep, awake: {gib}")
    for what, seconds in times.items():
        bench.tell(f"asleep, ipc: {what.strip()}, seconds", f"{seconds:.3f}")
    pool = EnginePool([client], slots=all_rows(bench)[-1])
    requests = make_requests(bench, "awake", MOST_READ, NEW)
    answers = await asyncio.gather(*map(pool.generate, requests))
    truth.tell(bench, "awake", list(zip(requests, answers, strict=True)), version)


def _used_gib(bench: Bench) -> float:
    if bench.device == "cpu":
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


async def _kill(bench: Bench, server: Serving, truth: Truth, staging: Path, *, restarts: bool) -> None:
    """Kill all of vLLM's processes while requests run; a new server continues them."""
    client = server.client
    is_lost = asyncio.Event()

    def on_lost(lost: EngineLost) -> None:
        pool.down_nowait(lost.name)
        is_lost.set()

    pool = EnginePool([client], slots=all_rows(bench)[-1], on_lost=on_lost)
    load = Load(bench, pool, "kill", 8 if bench.is_tiny else 64)
    await load.flowing()
    version = client.policy_version
    assert server.child.pid is not None
    os.killpg(server.child.pid, signal.SIGKILL)
    started_s = time.perf_counter()
    await is_lost.wait()
    bench.tell("kill: until its client knows, seconds", f"{time.perf_counter() - started_s:.3f}")
    if not restarts:
        bench.tell("kill: new server", "no time")
        load.cancel()
        return
    bench.tell("kill: new server, seconds", f"{await server.restart():.1f}")
    await push_file(client, truth, staging, version + 1, "abort")
    pool.up_nowait(client.name)
    await load.stop()
    _check_versions(bench, "kill", load.sampled, (version, version + 1), is_mixed=True)
    _tell_gaps(bench, "kill", load.sampled, truth, (version, version + 1), is_exact=True)
