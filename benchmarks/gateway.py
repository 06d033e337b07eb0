"""Cost of the gateway: added latency, and requests per second of one core, next to a
plain FastAPI server of the same engine.

    python benchmarks/gateway.py [--seconds 60] [--write]

The load (this process) and the engine share one core; the server has another. The engine
is simulated: each completion has 32 tokens and takes 32 ms, however many run. The load
holds conversations of 4 calls with about 225 tokens per turn (one per character); each
one is a session of our gateway, which ends with its rollout. Opening and ending sessions
count as our time, not as our requests.

added latency    p50 and p99 of calls through a server minus those of the engine, with a mean
                 pause of 0.3 s between the calls of a session. Medians over the rounds.
requests         Every session calls again at once. `of a core`: requests per CPU second of
                 the server.
plain            A FastAPI server of the same engine with nothing that a gateway adds
                 (gateway_plain.py): what parsing, tokenizing and the engine link cost.

Target: 0.9 of the plain server. Last line: `ratio: X` = requests per CPU second at 64
sessions, ours over the plain server's: the median over the rounds. A round measures both
in turn, so a machine that is busy for some seconds slows both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import secrets
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol
from urllib.parse import urlsplit

import psutil
from common import (
    SMOLLM2,
    START_S,
    child_environ,
    child_server,
    options,
    printable_tokenizer,
    reported,
)
from pydantic_core import from_json, to_json

from asyncrl.launch.processes import ChildProcess, bind_socket
from asyncrl.messages.engine_api import EngineHealth
from asyncrl.rollouts.tokenizer import HFChatTokenizer

HOST = "127.0.0.1"
SESSIONS = 64
ROUNDS = 15
TURNS = 4
THINK_S = 0.3
WARM_UP_S = 1.0
TOKENS = 32
STEP_S = 0.001
SYSTEM = "You are a careful assistant. You answer in a few words and say so when you do not know."
WORDS = "the cat sat on a warm roof while rain fell over green hills and seven boats went home slowly".split()


class Wire:
    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, key: str, content: object) -> tuple[bytes, float]:
        """Return the response body and the seconds it took. Raises SystemExit for any
        status but 200.
        """
        if self._streams is None or self._streams[0].at_eof():
            self._streams = await asyncio.open_connection(HOST, self._port)
        reader, writer = self._streams
        body = to_json(content)
        head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        started_s = time.perf_counter()
        writer.write(head.encode() + body)
        answer_head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = re.search(rb"content-length: (\d+)", answer_head)
        if length is None or not answer_head.startswith(b"http/1.1 200"):
            raise SystemExit(f"{path} failed: {answer_head[:300]!r}")
        answer = await reader.readexactly(int(length[1]))
        return answer, time.perf_counter() - started_s

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()


class Talk(Protocol):
    async def call(self, wire: Wire) -> float:
        """Make the next call; return its seconds."""
        ...


class Chat:
    """A conversation whose messages grow; the same texts for the same number."""

    def __init__(self, key: str, number: int) -> None:
        self.key = key
        self._draw = random.Random(number)
        self._messages = [{"role": "system", "content": SYSTEM}]

    async def call(self, wire: Wire) -> float:
        text = " ".join(self._draw.choices(WORDS, k=32))
        note = f"Note {len(self._messages)}: {text}. What do you make of it?"
        self._messages.append({"role": "user", "content": note})
        content = {"model": "policy", "messages": self._messages}
        answer, seconds = await wire.post("/v1/chat/completions", self.key, content)
        message = from_json(answer)["choices"][0]["message"]
        self._messages.append({"role": "assistant", "content": message["content"]})
        return seconds


class EngineTalk:
    """Requests to /generate as long as a chat's."""

    def __init__(self, secret: str, number: int) -> None:
        self._secret = secret
        self._number = number
        self._turn = 0

    async def call(self, wire: Wire) -> float:
        self._turn += 1
        content = {
            "request_id": f"direct-{self._number}-{self._turn}",
            "prompt_ids": [1] * (60 + 90 * self._turn),
            "max_tokens": 4 * TOKENS,
        }
        return (await wire.post("/generate", self._secret, content))[1]


class Side:
    """A server under load: the plain one, whose conversations need no session."""

    def __init__(self, pid: int, port: int) -> None:
        self.pid = pid
        self.port = port
        self.num_talks = 0

    async def next_talk(self, talk: Talk | None, wire: Wire) -> Talk:
        self.num_talks += 1
        return Chat("none", self.num_talks)

    async def finish(self) -> None:
        """End open sessions."""

    def cpu_s(self) -> float:
        """Return the CPU seconds of its process so far."""
        return sum(psutil.Process(self.pid).cpu_times()[:2])


class EngineAlone(Side):
    """The engine without a proxy."""

    def __init__(self, engine: ChildProcess, secret: str) -> None:
        super().__init__(engine.pid or 0, urlsplit(engine.url).port or 0)
        self._secret = secret

    async def next_talk(self, talk: Talk | None, wire: Wire) -> Talk:
        self.num_talks += 1
        return EngineTalk(self._secret, self.num_talks)


class Ours(Side):
    """Our gateway: each conversation has a session, opened and ended over a route of
    the benchmark.
    """

    def __init__(self, pid: int, port: int) -> None:
        super().__init__(pid, port)
        self._open: list[str] = []
        """Sessions without a conversation yet."""
        self._used: list[str] = []
        """Sessions with one, which has ended or will."""
        self._ended: list[str] = []
        self._opening = asyncio.Lock()

    async def next_talk(self, talk: Talk | None, wire: Wire) -> Talk:
        self.num_talks += 1
        if isinstance(talk, Chat):
            self._used.remove(talk.key)
            self._ended.append(talk.key)
        # A run opens sessions without HTTP, so a request of the benchmark opens many.
        async with self._opening:
            if not self._open:
                ended, self._ended = self._ended, []
                self._open += await self._turn(wire, ended, SESSIONS)
            key = self._open.pop()
        self._used.append(key)
        return Chat(key, self.num_talks)

    async def finish(self) -> None:
        wire = Wire(self.port)
        await self._turn(wire, [*self._used, *self._ended], 0)
        self._used, self._ended = [], []
        wire.close()

    async def stats(self) -> dict[str, Any]:
        """End the sessions without a conversation, and return what the gateway has
        counted.
        """
        wire = Wire(self.port)
        await self._turn(wire, self._open, 0)
        self._open = []
        body, _ = await wire.post("/bench/stats", "none", {})
        wire.close()
        stats: dict[str, Any] = from_json(body)
        return stats

    async def _turn(self, wire: Wire, ended: list[str], num_open: int) -> list[str]:
        body, _ = await wire.post(
            "/bench/turn", "none", {"end": ended, "open": num_open}
        )
        keys: list[str] = from_json(body)
        return keys


@dataclass(frozen=True)
class Measured:
    """Calls that ended within the window."""

    seconds: float
    cpu_s: float
    latencies_s: list[float]

    @property
    def rate(self) -> float:
        """Calls per wall second."""
        return len(self.latencies_s) / self.seconds

    @property
    def core_rate(self) -> float:
        """Calls per CPU second."""
        return len(self.latencies_s) / self.cpu_s

    def percentile_ms(self, percent: float) -> float:
        """Return the nearest rank in milliseconds."""
        ordered = sorted(self.latencies_s)
        return 1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


async def measure(
    side: Side, sessions: int, seconds: float, *, think_s: float = 0.0
) -> Measured:
    """Load `side` with that many conversations; sessions end after the call that they
    are in.
    """
    latencies_s: list[float] = []
    is_over = False

    async def talk_on(number: int) -> None:
        draw = random.Random(number)
        wire = Wire(side.port)
        talk = None
        # of the first conversation, so that they do not end together
        num_turns = draw.randint(1, TURNS)
        await asyncio.sleep(draw.random() * think_s)
        while not is_over:
            talk = await side.next_talk(talk, wire)
            for _ in range(num_turns):
                latencies_s.append(await talk.call(wire))
                if is_over:
                    break
                if think_s:
                    await asyncio.sleep(draw.expovariate(1 / think_s))
            num_turns = TURNS
        wire.close()

    async with asyncio.TaskGroup() as group:
        for number in range(sessions):
            group.create_task(talk_on(number))
        await asyncio.sleep(WARM_UP_S)
        latencies_s.clear()
        cpu_s = side.cpu_s()
        started_s = time.perf_counter()
        await asyncio.sleep(seconds)
        measured = Measured(
            time.perf_counter() - started_s, side.cpu_s() - cpu_s, [*latencies_s]
        )
        is_over = True
    await side.finish()
    return measured


async def added_latency(
    direct: EngineAlone, servers: dict[str, Side], seconds: float
) -> None:
    """Print the first table."""
    sides = {"engine": direct, **servers}
    part_s = seconds / (len(sides) * ROUNDS)
    rounds = [
        {
            name: await measure(side, SESSIONS, part_s, think_s=THINK_S)
            for name, side in sides.items()
        }
        for _ in range(ROUNDS)
    ]
    print(
        f"\nadded latency: {SESSIONS} sessions, mean pause {THINK_S} s, medians of {ROUNDS} rounds"
    )
    print(f"{'':<22}{'p50 ms':>9}{'p99 ms':>9}")
    for name in sides:
        added = [
            median(
                each[name].percentile_ms(percent)
                - each["engine"].percentile_ms(percent) * (name != "engine")
                for each in rounds
            )
            for percent in (50, 99)
        ]
        label = name if name == "engine" else f"added by {name}"
        print(f"{label:<22}{added[0]:>9.2f}{added[1]:>9.2f}")


async def request_rates(proxies: dict[str, Side], seconds: float) -> float:
    """Print the second table; return the ratio of requests per CPU second at SESSIONS."""
    found: dict[tuple[int, str], list[Measured]] = {}
    for _ in range(ROUNDS):
        for sessions, share in ((1, 0.25), (SESSIONS, 0.75)):
            for name, proxy in proxies.items():
                measured = await measure(
                    proxy, sessions, share * seconds / (ROUNDS * len(proxies))
                )
                found.setdefault((sessions, name), []).append(measured)
    print(f"\nrequests, medians of {ROUNDS} rounds")
    print(
        f"{'sessions':<10}{'proxy':<9}{'requests/s':>11}{'of a core':>11}{'p50 ms':>9}{'p99 ms':>9}"
    )
    for (sessions, name), rounds in sorted(found.items()):
        rate = median(one.rate for one in rounds)
        of_core = median(one.core_rate for one in rounds)
        p50, p99 = (
            median(one.percentile_ms(percent) for one in rounds) for percent in (50, 99)
        )
        print(
            f"{sessions:<10}{name:<9}{rate:>11.0f}{of_core:>11.0f}{p50:>9.1f}{p99:>9.1f}"
        )
    pairs = zip(found[SESSIONS, "ours"], found[SESSIONS, "plain"], strict=True)
    return median(ours.core_rate / plain.core_rate for ours, plain in pairs)


async def wait_open(port: int, is_dead: Any) -> None:
    """Return once the port accepts a connection. Raises SystemExit if the process ended
    or START_S passed.
    """
    try:
        async with asyncio.timeout(START_S):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection(HOST, port)
                    writer.close()
                    return
                if is_dead():
                    raise SystemExit("a server of the benchmark ended while it started")
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise SystemExit(
            f"a server of the benchmark did not start within {START_S:.0f} s"
        ) from None


async def run(
    arguments: argparse.Namespace, folder: Path, cores: Sequence[int]
) -> None:
    """Run both parts."""
    proxy_core, other_core, *_ = cores
    os.sched_setaffinity(0, {other_core})
    secret = secrets.token_hex(16)
    how = {"secret": secret, "env": {"PYTHONPATH": child_environ()["PYTHONPATH"]}}
    tokenizer = SMOLLM2 if SMOLLM2.is_dir() else printable_tokenizer(folder)
    print(f"tokenizer: {tokenizer.name}; load average {os.getloadavg()[0]:.1f}")
    texts = HFChatTokenizer(tokenizer)
    engine_spec = {
        "slots": 4096,
        "max_length": 4096,
        "vocab_size": texts.vocab_size,
        "num_special": min(texts.text_ids),
        "decode_step_s": STEP_S,
        "mean_tokens": TOKENS,
        "sigma": 0.0,
        "core": other_core,
    }
    with bind_socket() as listener:
        port = listener.getsockname()[1]
    async with contextlib.AsyncExitStack() as stack:
        engine, caller = await stack.enter_async_context(
            child_server("engine-0", "gateway_backend", engine_spec, folder, **how)
        )
        await caller.get("/health", EngineHealth, timeout_s=START_S)
        spec = {
            "core": proxy_core,
            "model": str(tokenizer),
            "engine": engine.url,
            "port": port,
        }
        gateway, _ = await stack.enter_async_context(
            child_server("gateway", "gateway_ours", spec, folder, **how)
        )
        await wait_open(port, lambda: gateway.returncode is not None)
        ours = Ours(gateway.pid or 0, port)
        with bind_socket() as listener:
            plain_port = listener.getsockname()[1]
        plain_spec = spec | {"port": plain_port}
        plain, _ = await stack.enter_async_context(
            child_server("plain", "gateway_plain", plain_spec, folder, **how)
        )
        await wait_open(plain_port, lambda: plain.returncode is not None)
        proxies: dict[str, Side] = {
            "ours": ours,
            "plain": Side(plain.pid or 0, plain_port),
        }
        direct = EngineAlone(engine, secret)
        await added_latency(direct, proxies, 0.4 * arguments.seconds)
        ratio = await request_rates(proxies, 0.6 * arguments.seconds)
        stats = await ours.stats()
        print(
            "prompts:",
            ", ".join(f"{name} {stats[name]}" for name in ("extended", "realigned")),
        )
        if stats["edited"] or stats["refused"] or stats["sessions"]:
            raise SystemExit(
                f"conversations did not extend their record, or were refused: {stats}"
            )
    print(f"ratio: {ratio:.2f}")


def main() -> None:
    """Parse, measure, print."""
    parser = options(__doc__, seconds=60.0)
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit(
            "this benchmark needs two cores.\n  Way out: allow two (taskset)."
        )
    with (
        reported("gateway", is_kept=arguments.write),
        tempfile.TemporaryDirectory(prefix="asyncrl-gateway-") as folder,
    ):
        asyncio.run(run(arguments, Path(folder), cores))


if __name__ == "__main__":
    main()
