"""What the gateway costs: added latency, requests a second of one core, memory under many sessions; LiteLLM's
proxy beside it.

    python benchmarks/gateway.py [--seconds 90] [--litellm-python VENV/bin/python | --no-litellm] [--write]

Three processes: the load (this one) and the engine share one core, the proxy has another for itself. The
engine is the simulated one (asyncrl_servers.simulated): every answer has 32 tokens and takes 32 ms, however
many run. LiteLLM gets the same engine over a route of the same server that speaks OpenAI; it is installed on
demand into ~/.cache/asyncrl-bench (its own environment), one worker, no key, no database, no logging. The
load are conversations of 4 calls that grow, a system prompt and about 45 tokens a turn, over bare sockets;
each has a session of its own in our gateway, which is ended by its rollout and replaced. Opening and ending
count as our time, not as our requests.

added latency    Calls through the gateway against calls of the engine's /generate, in turns, same sessions,
same pauses between the
                 calls of a session (exponential, mean 0.3 s), so that neither core is busy. Seconds from
                 writing the request to the last byte of the answer, as the load sees them. Added p50 is p50
                 through it less p50 without it, and so for p99: the median of these differences over the
                 rounds.
requests         Every session calls at once after its answer. `requests/s` is by the clock on the wall, `of a
core` are requests
                 for each processor second of the proxy: the same when it uses its core whole (`busy`). Where
                 the load or the engine are slower than the proxy, or other work holds the machine, the wall
                 says less than the proxy could do, and `of a core` still says what it costs. Medians over
                 rounds, ours and LiteLLM in turns.
memory           2,000 sessions, each with a call in flight all the time, ended after 4 calls and replaced.
Before that 10,000 were
                 opened and ended, as many as leave a reason behind for calls that come too late, and all of
                 the 2,000 were replaced twice. Growth: least squares of resident memory over ended sessions,
                 from then on, over 2,000 of them at least.

Targets: added p50 <= 1 ms and p99 <= 5 ms at 64 sessions; >= 800 requests a second of a core; growth about 0;
ratio >= 6. Last line: `ratio: X` = requests for each second of the proxy's core at 64 sessions, ours over
LiteLLM's; none without LiteLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import secrets
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression, median

import gateway_litellm
import gateway_sides as sides
from gateway_litellm import NotInstalled
from gateway_load import Load, Measured
from gateway_sides import EngineAlone, LiteLLM, Ours
from report import options, reported

SMOLLM2 = Path(__file__).parent.parent / "models" / "smollm2-135m-instruct"
SESSIONS, MANY_SESSIONS, NUM_ENDED_FIRST = 64, 2000, 10_000
SETTLING = 2
"""Times that all of the many sessions are replaced before memory is watched: the allocator's high-water mark
comes late.
"""
THINK_S, WARM_UP_S = 0.3, 1.0
ROUNDS = 3


@dataclass(frozen=True)
class Added:
    """Latencies of one round, without and with the gateway."""

    direct: Measured
    through: Measured

    def added_s(self, percent: float) -> float:
        """What the gateway adds at this percentile."""
        return self.through.percentile(percent) - self.direct.percentile(percent)


def growth_per_thousand(samples: Sequence[tuple[int, int]]) -> float:
    """Bytes for each 1,000 ended sessions: least squares over (ended so far, resident bytes)."""
    ended, resident = zip(*samples, strict=True)
    return 1000 * linear_regression(ended, resident).slope


async def measure(
    side: EngineAlone | Ours | LiteLLM, sessions: int, seconds: float, *, think_s: float = 0.0
) -> Measured:
    """One round of load."""
    load = Load(side, sessions, think_s=think_s)
    measured = await load.run(asyncio.sleep(WARM_UP_S), asyncio.sleep(seconds), lambda: sides.cpu_s(side.pid))
    await side.finish()
    return measured


async def measure_added(alone: EngineAlone, ours: Ours, seconds: float) -> list[Added]:
    """Rounds of both, in turns."""
    part_s = seconds / (2 * ROUNDS)
    return [
        Added(
            await measure(alone, SESSIONS, part_s, think_s=THINK_S),
            await measure(ours, SESSIONS, part_s, think_s=THINK_S),
        )
        for _ in range(ROUNDS)
    ]


async def measure_rates(
    proxies: Sequence[Ours | LiteLLM], seconds: float
) -> dict[tuple[str, int], list[Measured]]:
    """Rounds of all proxies, in turns, at one session and at SESSIONS; most of the time goes to the
    latter.
    """
    found: dict[tuple[str, int], list[Measured]] = {}
    for _ in range(ROUNDS):
        for sessions, share in ((1, 0.25), (SESSIONS, 0.75)):
            for proxy in proxies:
                measured = await measure(proxy, sessions, share * seconds / (ROUNDS * len(proxies)))
                found.setdefault((type(proxy).__name__, sessions), []).append(measured)
    return found


@dataclass(frozen=True)
class Held:
    """Memory of the gateway: with no session open before and after (resident bytes, Python objects), and over
    time between.
    """

    before: tuple[int, int]
    after: tuple[int, int]
    samples: list[tuple[int, int]]
    measured: Measured


async def measure_memory(ours: Ours, seconds: float) -> Held:
    """Many sessions, ended and replaced."""
    for _ in range(NUM_ENDED_FIRST // 1000):
        await ours.open_and_end(1000)
    before, first = await ours.held(), ours.num_ended
    samples: list[tuple[int, int]] = []

    async def window() -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s or ours.num_ended - first < (SETTLING + 1) * MANY_SESSIONS:
            samples.append((ours.num_ended - first, sides.resident_bytes(ours.pid)))
            await asyncio.sleep(0.25)

    load = Load(ours, MANY_SESSIONS)
    measured = await load.run(
        ours.wait_ended(first + SETTLING * MANY_SESSIONS), window(), lambda: sides.cpu_s(ours.pid)
    )
    await ours.finish()
    return Held(before, await ours.held(), samples, measured)


async def show_ended(ours: Ours, num_sessions: int) -> None:
    """Resident memory at each tenth of so many ended sessions of two calls each, SESSIONS at once."""
    print(f"\nmemory over {num_sessions} ended sessions, {SESSIONS} at once, 2 calls each")

    async def window() -> None:
        for tenth in range(1, 11):
            await ours.wait_ended(num_sessions * tenth // 10)
            print(f"{ours.num_ended:>9}{sides.resident_bytes(ours.pid) / 2**20:>9.1f} MiB", flush=True)

    await Load(ours, SESSIONS, turns=2).run(asyncio.sleep(0), window(), lambda: sides.cpu_s(ours.pid))
    await ours.finish()
    resident, objects = await ours.held()
    print(f"with no session open: {resident / 2**20:.1f} MiB and {objects:,} Python objects")


def show_added(rounds: Sequence[Added]) -> None:
    """The first table."""
    print(f"\nadded latency: {SESSIONS} sessions, mean pause {THINK_S} s, medians of {len(rounds)} rounds")
    print(f"{'':<22}{'calls/s':>9}{'p50 ms':>9}{'p99 ms':>9}")
    for name, side in (
        ("engine alone", [one.direct for one in rounds]),
        ("through the gateway", [one.through for one in rounds]),
    ):
        p50, p99 = (1e3 * median(one.percentile(percent) for one in side) for percent in (50, 99))
        print(f"{name:<22}{median(one.rate for one in side):>9.0f}{p50:>9.2f}{p99:>9.2f}")
    p50, p99 = (1e3 * median(one.added_s(percent) for one in rounds) for percent in (50, 99))
    print(f"{'added':<22}{'':>9}{p50:>9.2f}{p99:>9.2f}")


def show_rates(found: dict[tuple[str, int], list[Measured]]) -> None:
    """The second table."""
    print(f"\nrequests, medians of {ROUNDS} rounds")
    print(
        f"{'sessions':<10}{'proxy':<9}{'requests/s':>11}{'of a core':>11}{'busy':>7}{'ms of core':>12}{'p50 ms':>9}{'p99 ms':>9}"  # noqa: E501
    )
    for (name, sessions), rounds in sorted(found.items(), key=lambda item: item[0][1]):
        rate, of_core = median(one.rate for one in rounds), median(one.core_rate for one in rounds)
        busy = median(one.cpu_s / one.seconds for one in rounds)
        p50, p99 = (1e3 * median(one.percentile(percent) for one in rounds) for percent in (50, 99))
        print(
            f"{sessions:<10}{name:<9}{rate:>11.0f}{of_core:>11.0f}{busy:>7.0%}{1e3 / of_core:>12.2f}{p50:>9.1f}{p99:>9.1f}",  # noqa: E501
            flush=True,
        )


def show_memory(held: Held) -> None:
    """The figures of the third part."""
    measured, (first, _), (last, _) = held.measured, held.samples[0], held.samples[-1]
    resident = [each / 2**20 for _, each in held.samples]
    print(
        f"\nmemory: {MANY_SESSIONS} sessions, a call of each in flight, {measured.rate:.0f} requests/s "
        f"({measured.core_rate:.0f} of a core)"
    )
    print(
        f"resident {resident[0]:.1f} MiB, {last - first} ended sessions later {resident[-1]:.1f} MiB, at "
        f"most {max(resident):.1f} MiB"
    )
    print(f"growth for each 1,000 ended sessions: {growth_per_thousand(held.samples) / 2**10:.0f} KiB")
    before, after = (
        f"{resident / 2**20:.1f} MiB and {objects:,} Python objects"
        for resident, objects in (held.before, held.after)
    )
    print(f"with no session open: {before} before, {after} after")


async def run(arguments: argparse.Namespace, folder: Path) -> None:
    """All three parts."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit(
            "this benchmark needs two cores: the proxy has one for itself.\n  Way out: let it use two "
            "(taskset)."
        )
    proxy_core, other_core = cores[sides.PROXY_CORE], cores[sides.OTHER_CORE]
    os.sched_setaffinity(0, {other_core})
    secret, tokenizer = secrets.token_hex(16), find_tokenizer(folder)
    python, why_none = find_peer(arguments)
    print(f"load average at the start: {' '.join(f'{each:.1f}' for each in os.getloadavg())}")
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(
            sides.engine(folder, secret, other_core, vocab_size_of(tokenizer))
        )
        ours = await stack.enter_async_context(
            sides.gateway(folder, secret, proxy_core, engine, tokenizer, arguments.profile)
        )
        if arguments.ended:
            await show_ended(ours, arguments.ended)
            return
        show_added(await measure_added(EngineAlone(engine, secret), ours, 0.3 * arguments.seconds))
        found: dict[tuple[str, int], list[Measured]] = {}
        async with contextlib.AsyncExitStack() as peers:
            proxies: list[Ours | LiteLLM] = [ours]
            if python is not None:
                pid, port = await peers.enter_async_context(
                    gateway_litellm.running(python, engine.url, secret, proxy_core, folder)
                )
                proxies.append(LiteLLM(pid, port))
                print(f"\nLiteLLM {gateway_litellm.version_of(python)}")
                await measure(proxies[1], SESSIONS, 2.0)
            found = await measure_rates(proxies, 0.4 * arguments.seconds)
        show_rates(found)
        show_memory(await measure_memory(ours, 0.3 * arguments.seconds))
        stats = await ours.stats()
        print(
            f"\nour calls: {stats['calls']}, extended {stats['extended']}, realigned {stats['realigned']}, "
            f"edited {stats['edited']}, uncut {stats['uncut']}"
        )
        if stats["edited"] or stats["uncut"] or stats["refused"] or stats["sessions"]:
            raise SystemExit(f"conversations did not go on from what was recorded, or were refused: {stats}")
    print(f"load average at the end: {' '.join(f'{each:.1f}' for each in os.getloadavg())}")
    if python is None:
        print(f"no ratio: {why_none}")
    else:
        print_ratio(found)


def print_ratio(found: dict[tuple[str, int], list[Measured]]) -> None:
    """The last line."""
    ours, peer = (found[name, SESSIONS] for name in ("Ours", "LiteLLM"))
    print(
        f"by the clock on the wall: {median(one.rate for one in ours) / median(one.rate for one in peer):.2f}"
    )
    print(f"ratio: {median(one.core_rate for one in ours) / median(one.core_rate for one in peer):.2f}")


def find_peer(arguments: argparse.Namespace) -> tuple[Path | None, str]:
    """Python of LiteLLM's environment, or why there is none."""
    if arguments.no_litellm:
        return None, "LiteLLM is left out (--no-litellm)"
    try:
        return gateway_litellm.find_python(arguments.litellm_python), ""
    except NotInstalled as why:
        return None, f"LiteLLM cannot be had: {why}"


def find_tokenizer(folder: Path) -> Path:
    """SmolLM2's, if it is here; else one of characters."""
    if SMOLLM2.is_dir():
        print("tokenizer and chat template: SmolLM2-135M-Instruct")
        return SMOLLM2
    from asyncrl.trainer.model.random_init import make_character_tokenizer

    print(
        f"tokenizer: one token a character, since there is no {SMOLLM2}; `python examples/smollm2.py` makes "
        f"it"
    )
    make_character_tokenizer("".join(map(chr, range(32, 127))) + "\n").save_pretrained(folder / "tokenizer")
    (folder / "tokenizer" / "config.json").write_text("{}")
    return folder / "tokenizer"


def vocab_size_of(tokenizer: Path) -> int:
    """Ids that the engine may draw."""
    from asyncrl.rollouts.tokenizer import HFChatTokenizer

    return HFChatTokenizer(tokenizer).vocab_size


def main() -> None:
    """Parse, measure, print."""
    parser = options(__doc__, seconds=90.0)
    parser.add_argument(
        "--litellm-python",
        type=Path,
        help="python of an environment with litellm[proxy] (default: one made on demand)",
    )
    parser.add_argument("--no-litellm", action="store_true", help="measure ours alone, and print no ratio")
    parser.add_argument(
        "--ended", type=int, default=0, help="only print memory at each tenth of so many ended sessions"
    )
    parser.add_argument(
        "--profile", default="", help="file for cProfile's figures of the gateway, which is slower then"
    )
    arguments = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (most, most)
    )  # a connection each for thousands of sessions, in the children too
    with (
        reported("gateway", is_kept=arguments.write),
        tempfile.TemporaryDirectory(prefix="asyncrl-gateway-") as folder,
    ):
        asyncio.run(run(arguments, Path(folder)))


if __name__ == "__main__":
    main()
