"""Part 5: decode speeds of the engines; a vLLM server that is pushed to, sleeps and is
killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
import traceback
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from asyncrl.base.errors import EngineLost
from asyncrl.base.files import new_staging_dir, remove_staging_dir
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.pool import EnginePool
from asyncrl.messages.engine_api import Interrupt
from asyncrl.messages.records import Completion
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.sync.push import Push
from asyncrl.weights.export import LazyWeights, export_weights, named_weights
from asyncrl_servers.vllm.arguments import first_error
from gpu.models import architecture, make_folder
from gpu.pushes import make_chunks, push_chunks
from gpu.rows import Bench

Sampled = tuple[SamplingRequest, Completion]

VLLM_ARGS = "ASYNCRL_GPU_VLLM_ARGS"
"""Environment variable: arguments of `vllm serve` as JSON, over those of vllm_args();
null drops one.
"""
ROWS = (1, 32, 64, 256)
PROMPT, NEW = 32, 128
MAX_LENGTH = {"embedded": 256, "vllm": 1100}
LIMIT = {"cuda": 0.1, "cpu": 1e-3}
"""Largest mean difference of logprobs from transformers, in nats: bfloat16 and float32.
"""
MOST_READ = 8
"""Completions that transformers reads again."""
LOG_LINES = 40
TOLD = r"attention backend|Graph captur|init engine|LLM engine \(v|KV cache size|Enforce eager"
"""Lines of vLLM's log that say how it runs."""
GRACE_S = 15.0
"""For the log and the end of the server."""


def vllm_args(bench: Bench) -> dict[str, Any]:
    """Return arguments of `vllm serve`: graphs without torch.compile, unless VLLM_ARGS
    says otherwise.
    """
    graphs = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    given: dict[str, Any] = json.loads(os.environ.get(VLLM_ARGS, "{}"))
    return (graphs if bench.device == "cuda" else {}) | given


def log_of(run_dir: Path) -> list[str]:
    """Return the lines of an engine's log, without their long prefixes, and its first
    error.
    """
    log = run_dir / "logs" / "engine-0.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [
        line.rpartition("] ")[2][:160]
        for line in text.splitlines()
        if "^^^" not in line
    ]
    return [*lines, f"first error of the engine: {first_error(text)}"]


class Case:
    """Two sets of weights that a server gets in turn, and what transformers computes
    with them.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.folder = make_folder(bench, "0.6B")
        self.sizes = (1, 8) if bench.is_tiny else ROWS
        self.slots = self.sizes[-1]
        self.dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
        self.model = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=self.dtype
        ).to(bench.device)
        first = named_weights(self.model)
        # Every matrix and norm differs.
        self.sets = (
            first,
            {name: 1.25 * tensor.flip(0) for name, tensor in first.items()},
        )

    def weights(self, version: int) -> LazyWeights:
        """Version 0 is the model's folder."""
        return LazyWeights(self.sets[version % 2])

    def server(self, kind: str, run_dir: Path, **fields: Any) -> Any:
        """Start a server of `kind`."""
        from common import engine_server

        dtype = str(self.dtype).removeprefix("torch.")
        given = {"device": self.bench.device, "dtype": dtype, **fields}
        return engine_server(
            kind,
            self.folder,
            run_dir,
            slots=self.slots,
            max_length=MAX_LENGTH[kind],
            **given,
        )

    def requests(self, name: str, count: int, num_new: int) -> list[SamplingRequest]:
        vocab_size = architecture(self.bench, "0.6B")["vocab_size"]
        prompts = np.random.default_rng(len(name)).integers(
            0, vocab_size, (count, PROMPT)
        )
        return [
            SamplingRequest(f"{name}-{n}", ids, num_new, seed=n)
            for n, ids in enumerate(prompts)
        ]

    @torch.no_grad()
    def gaps(self, request: SamplingRequest, done: Completion) -> Tensor:
        """Return each logprob's difference from that of the weights of its version, in
        nats.
        """
        ids = torch.tensor(
            [[*request.prompt_ids, *done.token_ids]], device=self.model.device
        )
        right = []
        for span in done.sampled.spans:
            found = functional_call(
                self.model, dict(self.weights(span.version)), (ids,)
            )
            logprobs = (
                found.logits[0, PROMPT - 1 : -1][span.start : span.end]
                .float()
                .log_softmax(-1)
            )
            right.append(
                logprobs.gather(1, ids[0, PROMPT:][span.start : span.end, None])[:, 0]
            )
        return (torch.cat(right).cpu() - torch.tensor(done.behaviour_logprobs)).abs()

    def tell_gaps(
        self, name: str, sampled: Sequence[Sampled], *, is_exact: bool = True
    ) -> None:
        """Print differences of the newest tokens, and of the two at the boundary of two
        versions.
        """
        parts: dict[str, list[Tensor]] = {
            "logprob gap": [],
            "logprob gap at the boundary": [],
        }
        for request, done in sampled[-MOST_READ:]:
            start = done.sampled.spans[-1].start
            gaps = self.gaps(request, done)
            parts["logprob gap"].append(gaps[start:])
            if start > 0:
                parts["logprob gap at the boundary"].append(gaps[start - 1 : start + 1])
        for what, found in parts.items():
            if found:
                gaps = torch.cat(found)
                is_right = float(gaps.mean()) <= LIMIT[self.bench.device]
                against = f"maximum {float(gaps.max()):.1e}"
                ok = is_right if is_exact else None
                self.bench.tell(
                    f"{name}: {what}, mean nats",
                    f"{float(gaps.mean()):.1e}",
                    against=against,
                    ok=ok,
                )

    async def tell_decode(self, name: str, client: EngineClient) -> None:
        """Print the speed of each number of requests at once, second time, and the
        logprob gap.
        """
        pool = EnginePool([client], slots=self.slots)
        for rows in self.sizes:
            for turn in range(2):
                requests = self.requests(f"{name}-{rows}-{turn}", rows, NEW)
                started_s = time.perf_counter()
                answers = await asyncio.gather(*map(pool.generate, requests))
                seconds = time.perf_counter() - started_s
            what = f"{name}: {rows} requests of {NEW} tokens, tokens/s"
            against = f"{1e3 * seconds / NEW:.2f} ms a token"
            self.bench.tell(what, f"{rows * NEW / seconds:,.0f}", against=against)
        self.tell_gaps(name, list(zip(requests, answers, strict=True)))


def decode(bench: Bench) -> None:
    """Time requests to the embedded engine, with each kind of decode step; put it to
    sleep and push other weights.
    """
    staging = new_staging_dir()
    try:
        asyncio.run(_decode(bench, staging))
    finally:
        remove_staging_dir(staging)


async def _decode(bench: Bench, staging: Path) -> None:
    from asyncrl_servers.embedded.decoder import EmbeddedSpec

    case = Case(bench)
    for name, fields in {
        "embedded": {},
        "embedded, fused": {"fused_decode": True, "moves": True},
    }.items():
        if fields.keys() <= EmbeddedSpec.model_fields.keys():
            async with case.server("embedded", bench.folder / name, **fields) as (
                client,
                _,
            ):
                await case.tell_decode(name, client)
                await _sleep(case, client, staging)


def vllm(bench: Bench) -> None:
    """Measure a vLLM server from start to end. Each result is printed at once."""
    try:
        asyncio.run(_vllm(bench, time.perf_counter() + bench.limit_s - GRACE_S))
    except Exception as error:
        # The whole traceback would push the log out of what is shown.
        print(*traceback.format_exception(error, limit=-2, chain=False))
        lines = [line for line in log_of(bench.folder) if line.strip()]
        print("\n".join(lines[-LOG_LINES:]))
        raise SystemExit(f"{type(error).__name__}: {error}") from None


async def _vllm(bench: Bench, end_s: float) -> None:
    case = Case(bench)
    sleeps = {"enable_sleep_mode": True, "gpu_memory_utilization": 0.5}
    args = (sleeps if bench.device == "cuda" else {}) | vllm_args(bench)
    server = partial(case.server, "vllm", deterministic=False, args=args)
    staging = new_staging_dir()
    started_s = time.perf_counter()
    try:
        async with asyncio.timeout(end_s - started_s):
            async with server(bench.folder) as (client, _):
                start_s = time.perf_counter() - started_s
                told = [
                    line.strip()[:110]
                    for line in log_of(bench.folder)
                    if re.search(TOLD, line)
                ]
                bench.tell(
                    "start, seconds",
                    f"{start_s:.1f}",
                    against=" | ".join(dict.fromkeys(told)),
                )
                await case.tell_decode("vLLM", client)
                for interrupt in get_args(Interrupt):
                    await _push(case, client, staging, interrupt)
                await _sleep(case, client, staging)
                await _kill(case, client)
            bench.tell("device GiB after the kill", f"{_used_gib(bench):.1f}")
    finally:
        remove_staging_dir(staging)


async def _begin(
    case: Case, client: EngineClient, name: str, on_segment: Any = None
) -> tuple[Any, ...]:
    """Start requests, of which the first streams. Return them, their tasks and the
    times of its tokens, of which there are some.
    """
    pool = EnginePool([client], slots=case.slots)
    # Of so many tokens that a push takes less time than they do, also on a busy CPU.
    requests = case.requests(name, 8 if case.bench.is_tiny else 64, 768)
    times = list[float]()
    flows = asyncio.Event()

    def note(_: Sequence[int]) -> None:
        times.append(time.perf_counter())
        if len(times) > PROMPT:
            flows.set()

    first = pool.generate(requests[0], on_tokens=note, on_segment=on_segment)
    tasks = [
        asyncio.create_task(one) for one in (first, *map(pool.generate, requests[1:]))
    ]
    await asyncio.wait(
        (asyncio.create_task(flows.wait()), *tasks), return_when=asyncio.FIRST_COMPLETED
    )
    return requests, tasks, times


async def _push(
    case: Case, client: EngineClient, staging: Path, interrupt: Interrupt
) -> None:
    """Push during generation as a run does by files; check each token's version and
    logprob.
    """
    name = f"push, {interrupt}"
    version = client.policy_version + 1
    path = staging / f"{version}.safetensors"
    sent = await asyncio.to_thread(export_weights, case.weights(version), path, version)
    requests, tasks, times = await _begin(case, client, name)
    lost = list[EngineLost]()
    push = Push(
        version, [client], timeout_s=60.0, interrupt=interrupt, on_lost=lost.append
    )
    report = await push.whole(sent)  # compares digests
    if lost:
        raise lost[0]
    done = await asyncio.gather(*tasks)
    path.unlink()
    longest_s = max(after - before for before, after in pairwise(times))
    pauses = f"without a token {report.pause_s:.3f}, in a stream {longest_s:.3f}"
    case.bench.tell(f"{name}: seconds", f"{report.publish_s:.3f}", against=pauses)
    versions = [version - 1] if interrupt == "wait" else [version - 1, version]
    num_right = 0
    for one in done:
        ends = [0, *(span.end for span in one.sampled.spans)]
        is_whole = ends[-1] == len(one.token_ids) == requests[0].max_tokens
        is_joined = ends[:-1] == [span.start for span in one.sampled.spans]
        num_right += (
            is_whole
            and is_joined
            and versions == [span.version for span in one.sampled.spans]
        )
    what = f"{name}: completions of versions {versions}"
    case.bench.tell(what, f"{num_right} of {len(done)}", ok=num_right == len(done))
    case.tell_gaps(
        name, list(zip(requests, done, strict=True)), is_exact=interrupt != "keep_kv"
    )
    await _check_new(case, client, f"after {name}")


async def _check_new(case: Case, client: EngineClient, name: str) -> None:
    """Compare new requests with the newest weights."""
    requests = case.requests(name, MOST_READ, NEW)
    pool = EnginePool([client], slots=case.slots)
    done = await asyncio.gather(*map(pool.generate, requests))
    assert {span.version for one in done for span in one.sampled.spans} == {
        client.policy_version
    }
    case.tell_gaps(name, list(zip(requests, done, strict=True)))


async def _sleep(case: Case, client: EngineClient, staging: Path) -> None:
    """Sleep (vLLM: at level 2), wake and push by chunks (ipc), then compare logprobs."""
    bench = case.bench
    version = client.policy_version + 1
    chunks = make_chunks(
        case.weights(version), staging, torch.device(bench.device), case.dtype
    )
    used = [_used_gib(bench)]
    asleep_s = (await client.sleep()).seconds
    used.append(_used_gib(bench))
    times = await push_chunks(client, case.weights(version), chunks, version)
    used.append(_used_gib(bench))
    gib = ", ".join(f"{one:.1f}" for one in used)
    bench.tell(
        "sleep, seconds",
        f"{asleep_s:.3f}",
        against=f"device GiB before, asleep, awake: {gib}",
    )
    parts = ", ".join(
        f"{what.strip()} {seconds:.3f}" for what, seconds in times.items()
    )
    bench.tell(
        "wake and push by ipc, seconds",
        f"{times['without a token']:.3f}",
        against=parts,
    )
    await _check_new(case, client, "after sleep")


def _used_gib(bench: Bench) -> float:
    free, total = torch.cuda.mem_get_info() if bench.device == "cuda" else (0, 0)
    return (total - free) / 2**30


async def _kill(case: Case, client: EngineClient) -> None:
    """Kill all of vLLM's processes during generation: each request raises EngineLost."""
    kept = list[Completion]()
    _, tasks, _ = await _begin(case, client, "kill", kept.append)
    (leader,) = (
        one
        for one in psutil.Process().children()
        if "asyncrl_servers.vllm" in one.cmdline()
    )
    started_s = time.perf_counter()
    os.killpg(leader.pid, signal.SIGKILL)
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    seconds = time.perf_counter() - started_s
    num_lost = sum(isinstance(one, EngineLost) for one in answers)
    against = f"{num_lost} of {len(tasks)} requests; {len(kept[-1].token_ids)} tokens of a stream are kept"
    is_right = num_lost == len(tasks)
    case.bench.tell(
        "killed: until all requests know, seconds",
        f"{seconds:.3f}",
        against=against,
        ok=is_right,
    )
