"""Twelve failures of the infrastructure, planted under real harnesses: each has its
name, and none becomes a reward.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
import socketserver
import ssl
import sys
import threading
import tomllib
import traceback
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_cases import started
from gateway_cases import in_loop
from harness_gateway import TestGateway, need_bubblewrap, open_gateway, working
from rollout_cases import FakeSink, make_producers, one_token, scored, virtual

from asyncrl.agents.harness import Harness, build_harness
from asyncrl.agents.worker import Worker, WorkerSettings
from asyncrl.base.errors import RolloutFailure, TaskError, first_cause
from asyncrl.base.failures import WAYS_OUT, FailureKind, kind_of_error, kind_of_text
from asyncrl.config import GeneratorConfig, OnTimeout, TaskConfig
from asyncrl.config.generator_config import HARNESSES
from asyncrl.messages.records import GroupId, Prompt, Rollout
from asyncrl.observe.metrics import gauge_of
from asyncrl.rollouts.producers import Producers
from asyncrl.rollouts.recent_failures import RecentFailures
from asyncrl.rollouts.rollout import (
    FailedRollout,
    HarnessGenerator,
    RolloutAttempt,
    RolloutRunner,
    Score,
    Slots,
    TurnProgress,
)
from asyncrl.tasks import TaskScorer

AGENTS = "faulty_agents_for_test"
PROMPT = Prompt("p0", ({"role": "user", "content": "What is 6 * 7?"},), answer="42")


def build(config: GeneratorConfig) -> Harness:
    # A worker's commands have a guard, which would outlive these tests.
    return build_harness(config, is_worker=False)


async def run(
    gateway: TestGateway,
    *,
    scorers: Any = None,
    timeout_s: float | None = None,
    prompt: Prompt = PROMPT,
    retries: int = 0,
    on_timeout: OnTimeout = "fail",
) -> Rollout | FailedRollout:
    scorers = scorers or SimpleNamespace(of=lambda _: NO_SCORE)
    generator = HarnessGenerator(
        gateway.host, gateway.queue, scorers, on_timeout=on_timeout
    )
    runner = RolloutRunner(generator, timeout_s=timeout_s, retries=retries)
    attempt = RolloutAttempt("g0/r0", GroupId(0), prompt, 0)
    return await runner.run(attempt, slots=Slots(1), order=())


NO_SCORE: Any = SimpleNamespace(
    has_score=False,
    shows_special=True,
    scores_groups=False,
    judge=None,
    weights={},
)


def play(
    config: GeneratorConfig, limits: dict[str, Any] | None = None, **more: Any
) -> Rollout | FailedRollout:
    """Return what becomes of a rollout of this harness, without retries."""

    async def story() -> Rollout | FailedRollout:
        async with (
            open_gateway(limits=limits or {}) as gateway,
            working(gateway, build(config)),
        ):
            return await run(gateway, **more)

    return asyncio.run(story())


def kind_of(outcome: Rollout | FailedRollout) -> FailureKind:
    assert isinstance(outcome, FailedRollout), "it is trained"
    return outcome.failure.kind


def agent(name: str, **args: Any) -> GeneratorConfig:
    return GeneratorConfig(python=f"{AGENTS}:{name}", args=args)


def shell(script: str, **settings: Any) -> GeneratorConfig:
    return GeneratorConfig(command=["/bin/bash", "-c", script], **settings)


CALL = """
curl -sf $OPENAI_BASE_URL/chat/completions -H "Authorization: Bearer $OPENAI_API_KEY" \
    -d '{"messages": [{"role": "user", "content": "hi"}]}' >&2
"""


# ---- 1: the runtime does not start


def test_sandbox_that_does_not_start_has_its_name(tmp_path: Path) -> None:
    need_bubblewrap()
    gone = tmp_path / "gone"
    gone.mkdir()
    config = shell("echo 1", sandbox="bubblewrap", sandbox_paths=[str(gone)])
    harness = build(config)
    shutil.rmtree(gone)

    async def story() -> Rollout | FailedRollout:
        async with open_gateway() as gateway, working(gateway, harness):
            return await run(gateway)

    assert kind_of(asyncio.run(story())) == FailureKind.RUNTIME_START


# ---- 2: disk full, after a limit


def test_full_disk_after_a_limit_is_not_a_reward_of_0() -> None:
    limits = {"max_calls": 1}
    outcome = play(agent("over_its_limit", then="write"), limits)
    assert kind_of(outcome) == FailureKind.DISK_FULL
    stopped = play(agent("over_its_limit", then="stop"), limits)
    assert isinstance(stopped, tuple), "the policy's own limit still truncates"
    assert (stopped[0].reward, stopped[0].is_truncated) == (0.0, True)


# ---- 4, 5: the verifier crashes, or hangs


async def hangs(prompt: Prompt, completion: str) -> float:
    await asyncio.Event().wait()
    return 1.0


def crashes(prompt: Prompt, completion: str) -> float:
    return 1.0 / 0


def no_number(prompt: Prompt, completion: str) -> Any:
    return "right"


def scored_by(reward: Any, gateway: TestGateway) -> Any:
    config = TaskConfig.model_validate(
        {"python": "x:y", "reward_pool": "inline", "reward_timeout_s": 0.2}
    )
    task: Any = SimpleNamespace(score=reward)
    tokenizer: Any = gateway.engine.tokenizer
    scorer = TaskScorer(task, config, tokenizer, seed=0)
    return SimpleNamespace(of=lambda _: scorer)


@pytest.mark.parametrize(
    ("reward", "kind"),
    [
        (crashes, FailureKind.REWARD_CRASH),
        (hangs, FailureKind.REWARD_TIMEOUT),
        (no_number, FailureKind.CORRUPT_RESULT),
    ],
)
def test_reward_that_fails_has_its_name(reward: Any, kind: FailureKind) -> None:
    async def story() -> Rollout | FailedRollout:
        harness = build(shell(f"{CALL} echo done"))
        async with open_gateway() as gateway, working(gateway, harness):
            return await run(gateway, scorers=scored_by(reward, gateway))

    assert kind_of(asyncio.run(story())) == kind


# ---- 8, 10, 12: other services


CLIENTS = {
    "httpx": "import httpx; httpx.get(URL, timeout=1).raise_for_status()",
    "httpx async": """
import asyncio, httpx
asyncio.run(httpx.AsyncClient(timeout=1).get(URL)).raise_for_status()""",
    "aiohttp": """
import aiohttp, asyncio
async def get():
    limit = aiohttp.ClientTimeout(sock_read=1)
    async with aiohttp.ClientSession(timeout=limit, raise_for_status=True) as http:
        await http.get(URL)
asyncio.run(get())""",
    "urllib": "import urllib.request; urllib.request.urlopen(URL, timeout=1)",
    "requests": "import requests; requests.get(URL, timeout=1).raise_for_status()",
    "urllib3": """
import urllib3
if urllib3.request("GET", URL, timeout=1, retries=False).status in (429, 503):
    raise RuntimeError(f"HTTP {STATUS}")""",
    "http.client": """
import http.client
client = http.client.HTTPConnection(HOST, timeout=1)
client.request("GET", "/")
raise RuntimeError(f"status: {client.getresponse().status}")""",
    "openai": """
import openai
openai.OpenAI(base_url=URL, api_key="k", max_retries=0, timeout=1).models.list()""",
    "anthropic": """
import anthropic
anthropic.Anthropic(base_url=URL, api_key="k", max_retries=0, timeout=1).models.list()""",
    "websockets": """
import websockets.sync.client
websockets.sync.client.connect(f"ws://{HOST}", open_timeout=1)""",
    "curl": """
import subprocess
run = subprocess.run(["curl", "-sSf", "-m1", URL], capture_output=True, text=True)
raise RuntimeError(run.stderr)""",
}


class Faulty(socketserver.StreamRequestHandler):
    """Answer with `status`, cut the connection ("cut"), or keep it open ("silent")."""

    server: Any

    def handle(self) -> None:
        self.rfile.readline()
        if self.server.status == "silent":
            self.rfile.read()
        elif self.server.status != "cut":
            head = f"HTTP/1.1 {self.server.status} Nope\r\nContent-Length: 0\r\n\r\n"
            self.wfile.write(head.encode())


@pytest.mark.extras
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("status", ["refused", "cut", "silent", "503", "429"])
def test_service_that_is_lost_or_refuses_has_one_name_in_all_clients(
    client: str, status: str
) -> None:
    """By its exception, and by what a program prints of it."""
    server: Any
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Faulty) as server:
        server.daemon_threads, server.block_on_close = True, False
        server.status = status
        threading.Thread(target=server.serve_forever).start()
        port = 9 if status == "refused" else server.server_address[1]
        names = {"HOST": f"127.0.0.1:{port}", "URL": f"http://127.0.0.1:{port}"}
        with pytest.raises(Exception) as met:  # noqa: PT011  of any client
            exec(CLIENTS[client], names | {"STATUS": status})
        server.shutdown()
    kind = FailureKind.QUOTA if status == "429" else FailureKind.ENDPOINT_LOST
    assert kind_of_error(met.value, FailureKind.AGENT_CRASH) == kind
    printed = "".join(traceback.format_exception(met.value))[-2000:]
    assert kind_of_text(printed, FailureKind.AGENT_CRASH) == kind


# ---- 9: the host is lost


@pytest.mark.slow
@in_loop
async def test_worker_that_dies_or_has_a_wrong_clock(tmp_path: Path) -> None:
    async with open_gateway(lease_timeout_s=3.0) as gateway:
        async with started(gateway, tmp_path, agent("is_a_day_ahead")):
            outcome = await run(gateway)
            assert isinstance(outcome, tuple), "no limit reads a worker's clock"
            assert outcome[0].reward == 1.0
        async with started(gateway, tmp_path, agent("dies")):
            assert kind_of(await run(gateway)) == FailureKind.HOST_LOST


@in_loop
async def test_worker_that_leaves_has_its_name() -> None:
    async with open_gateway() as gateway:
        caller = gateway.worker()
        harness = build(agent("hangs", after_answer=True))
        worker = asyncio.ensure_future(
            Worker([harness], caller, WorkerSettings(name="w", slots=1)).run()
        )
        running = asyncio.ensure_future(run(gateway))
        await gateway.engine.started.wait()
        worker.cancel()
        assert kind_of(await running) == FailureKind.HOST_LOST
        await asyncio.wait({worker})
        await caller.aclose()


# ---- the table: planted failures by harness

PLANTED = tomllib.loads(Path(__file__).with_name("planted_failures.toml").read_text())[
    "planted"
]


def harness_of(planted: dict[str, Any]) -> str:
    return next(iter(planted["config"]))


@pytest.fixture(scope="module")
def openenv_server() -> Iterator[Any]:
    from openenv_served import Server

    server = Server("text")
    try:
        yield server
    finally:
        server.kill()


@pytest.mark.extras
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(
            each,
            marks=pytest.mark.extension(harness_of(each))
            if harness_of(each) in ("openenv", "verifiers")
            else (),
        )
        for each in PLANTED
    ],
    ids=[f"{each['what']}, {harness_of(each)}" for each in PLANTED],
)
def test_planted_failure_has_its_name_and_is_never_a_reward(
    planted: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    config, prompt = GeneratorConfig(**planted["config"]), PROMPT
    if config.command:
        *shell, script = config.command
        config = GeneratorConfig(command=[*shell, script.replace("CALL", CALL)])
    if harness_of(planted) == "openenv":
        server = request.getfixturevalue("openenv_server")
        if server.process.poll() is not None:  # another failure has ended it
            server.start()
        config = config.model_copy(update={"openenv": server.wait_ready().url})
    if harness_of(planted) == "verifiers":
        from verifiers_alone import task_of

        name = planted["config"]["verifiers"]
        task = task_of(name, config.args, planted.get("index", 3))
        prompt = Prompt("p0", PROMPT.messages, info=dict(task.info))
    harness = build(config)

    async def story() -> Rollout | FailedRollout:
        async with open_gateway() as gateway, working(gateway, harness):
            gateway.engine.answer = lambda _: planted.get("says", "0")
            limit_s = planted.get("timeout_s", 500.0)
            return await run(gateway, prompt=prompt, timeout_s=limit_s)

    assert kind_of(asyncio.run(story())) == planted["kind"]


@pytest.mark.extension("openenv")
def test_page_has_the_table_of_planted_failures() -> None:
    names = {(each["what"], harness_of(each)): each["kind"] for each in PLANTED}
    lines = [f"| planted | {' | '.join(HARNESSES)} |", f"|{' --- |' * 5}"]
    for what in dict.fromkeys(each["what"] for each in PLANTED):
        cells = [names.get((what, kind), "") for kind in HARNESSES]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    page = Path(__file__).parents[1] / "docs/failures.md"
    assert table in page.read_text(), f"write this table into docs/failures.md\n{table}"


def test_agent_out_of_time_is_scored_only_if_that_is_asked_for() -> None:
    """With the harness's reward, else the task's. All wait for their timeouts at once."""

    async def quarter(prompt: Prompt, completion: str) -> float:
        return 0.25

    async def check(harness: GeneratorConfig, reward: float, on_timeout: Any) -> None:
        async with open_gateway() as gateway, working(gateway, build(harness)):
            scorers = scored_by(quarter, gateway)
            outcome = await run(
                gateway, scorers=scorers, timeout_s=20.0, on_timeout=on_timeout
            )
        if on_timeout == "fail":
            assert kind_of(outcome) == FailureKind.TIMEOUT_AFTER_ANSWER
        else:
            assert isinstance(outcome, tuple)
            assert outcome[0].reward == reward

    async def check_all() -> None:
        async with asyncio.TaskGroup() as tasks:
            for on_timeout in ("fail", "score"):
                for harness, reward in (
                    (agent("gives", reward=0.5, timed_out=True), 0.5),
                    (agent("hangs", after_answer=True), 0.25),
                    (shell(f"{CALL} sleep 1000"), 0.25),
                ):
                    tasks.create_task(check(harness, reward, on_timeout))

    asyncio.run(check_all())


@pytest.mark.extras
@pytest.mark.extension("verifiers")
def test_container_of_a_verifiers_environment_that_does_not_start_has_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from agent_cases import EXAMPLE
    from verifiers_alone import task_of

    monkeypatch.chdir(EXAMPLE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # A daemon that runs here would pull the image.
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    args = {"agent": {"runtime": {"type": "docker", "image": "no/such:1"}}}
    task = task_of("calculator_env", args, 0)
    prompt = Prompt("p0", PROMPT.messages, info=dict(task.info))
    config = GeneratorConfig(verifiers="calculator_env", args=args)
    assert kind_of(play(config, prompt=prompt)) == FailureKind.RUNTIME_START


# ---- the share, and the end of a run


class Ends:
    """A generator whose attempts of 1 s end as `kind_of` says."""

    def __init__(self, kind_of: Callable[[RolloutAttempt], FailureKind | None]) -> None:
        self._kind_of = kind_of

    async def sample(self, attempt: RolloutAttempt) -> Score:
        await asyncio.sleep(1.0)
        kind = self._kind_of(attempt)
        if kind is not None:
            raise RolloutFailure(f"{attempt.rollout_id} met {kind}", kind=kind)
        attempt.progress = TurnProgress(attempt.sample_index)
        return scored((one_token(attempt.sample_index),))


async def produce(
    kind_of: Callable[[RolloutAttempt], FailureKind | None],
    *,
    limit: float,
    num_groups: int = 40,
) -> Producers:
    """Run groups of 4 with 2 retries until all have ended."""
    sink = FakeSink(num_groups)
    tasks = list[asyncio.Task[Any]]()
    async with asyncio.TaskGroup() as group:

        def spawn(work: Coroutine[Any, Any, None], *, name: str) -> Any:
            tasks.append(group.create_task(work, name=name))
            return tasks[-1]

        producers = make_producers(
            sink,
            spawn,
            Ends(kind_of),
            group_size=4,
            retries=2,
            max_failed_groups=1000,
            capacity=8,
            failures=RecentFailures(limit),
        )
        running = group.create_task(producers.run())
        await asyncio.sleep(100.0)
        running.cancel()
    return producers


def fails_half(attempt: RolloutAttempt) -> FailureKind | None:
    """Every second rollout fails in all its attempts, mostly by a full disk."""
    if attempt.sample_index % 2:
        return None
    return FailureKind.QUOTA if attempt.sample_index else FailureKind.DISK_FULL


@virtual
async def test_run_ends_above_the_share_and_names_the_most_frequent_failure() -> None:
    def mostly_full(attempt: RolloutAttempt) -> FailureKind | None:
        is_rare = attempt.sample_index == 3
        return FailureKind.QUOTA if is_rare else FailureKind.DISK_FULL

    with pytest.raises(ExceptionGroup) as met:
        await produce(mostly_full, limit=0.5)
    error = first_cause(met.value)
    assert isinstance(error, TaskError)
    for words in (
        "producers: 100% of the newest 100 attempts of rollouts failed",
        "most often disk_full (",
        " met disk_full; ",
        "supervision.max_infrastructure_failures=0.5 is the limit",
        "free space where the worker runs",
    ):
        assert words in str(error)


@virtual
async def test_shares_are_metrics_and_a_run_below_the_limit_continues() -> None:
    producers = await produce(fails_half, limit=0.8)
    gauges = producers.gauges()
    shares = {name: num for name, num in gauges.items() if name.startswith("failure/")}
    # Of 8 attempts of a group, 3 meet a full disk, 3 a quota, and 2 succeed.
    assert shares == {
        "failure/disk_full": pytest.approx(3 / 8, abs=0.03),
        "failure/quota": pytest.approx(3 / 8, abs=0.03),
        "failure/infrastructure": pytest.approx(6 / 8, abs=0.03),
    }
    assert all(gauge_of(name) for name in shares)
    assert gauges["rollout/finished"] == 80
    assert producers.last_failure.startswith(("[quota] g", "[disk_full] g"))


@virtual
async def test_lost_host_whose_rollouts_succeed_again_ends_no_run() -> None:
    def lost_once(attempt: RolloutAttempt) -> FailureKind | None:
        return None if attempt.attempt else FailureKind.HOST_LOST

    producers = await produce(lost_once, limit=0.0)
    gauges = producers.gauges()
    assert (gauges["rollout/failed"], gauges["rollout/retried"]) == (0, 160)


@virtual
async def test_lost_hosts_and_a_bad_prompt_end_no_run() -> None:
    """Nor does a failure that is not of the infrastructure, among many lost hosts."""

    def lost(attempt: RolloutAttempt) -> FailureKind | None:
        is_late = attempt.sample_index == 3
        return FailureKind.TIMEOUT_AFTER_ANSWER if is_late else FailureKind.HOST_LOST

    gauges = (await produce(lost, limit=0.5)).gauges()
    assert gauges["failure/host_lost"] > 0.5

    failures = RecentFailures(0.1)
    disk_full = RolloutFailure("no space", kind=FailureKind.DISK_FULL)
    for number in range(100):
        failures.note_end_nowait(disk_full, f"bad prompt {number % 2}")
    failures.check(disk_full, "producers")
    failures.note_end_nowait(disk_full, "a third prompt")
    failures.check(RolloutFailure("lost", kind=FailureKind.HOST_LOST), "producers")
    with pytest.raises(TaskError, match="most often disk_full"):
        failures.check(disk_full, "producers")


def test_type_of_an_error_counts_behind_a_refusal_of_the_endpoint() -> None:
    """A full disk met while the agent handles a limit is no truncated rollout."""
    refusal = RuntimeError("429: gateway.max_calls=1 is the limit")
    full = OSError(errno.ENOSPC, "No space left on device")
    full.__context__ = refusal
    assert kind_of_error(full, FailureKind.AGENT_CRASH) is FailureKind.DISK_FULL
    assert kind_of_error(refusal, FailureKind.AGENT_CRASH) is FailureKind.LIMIT
    pipe = BrokenPipeError(errno.EPIPE, "Broken pipe")
    assert kind_of_error(pipe, FailureKind.AGENT_CRASH) is FailureKind.AGENT_CRASH


@virtual
async def test_failures_that_the_policy_may_cause_end_no_run() -> None:
    def raises(attempt: RolloutAttempt) -> FailureKind | None:
        attempt.progress = TurnProgress(attempt.sample_index)
        return FailureKind.AGENT_CRASH if attempt.sample_index else None

    gauges = (await produce(raises, limit=0.0)).gauges()
    assert gauges["failure/crash_after_answer"] == pytest.approx(0.9, abs=0.03)
    assert gauges["failure/infrastructure"] == 0.0


# ---- names


LOST = """
httpcore.ConnectError: All connection attempts failed
TypeError: fetch failed  [cause]: Error: connect ECONNREFUSED 127.0.0.1:9
Error: getaddrinfo ENOTFOUND no.such.host
dial tcp 127.0.0.1:9: connect: connection refused
dial tcp: lookup no.such on 10.0.0.2:53: no such host
Post "http://10.0.0.1/v1": EOF
context deadline exceeded (Client.Timeout exceeded while awaiting headers)
java.net.UnknownHostException: no.such.host
java.net.http.HttpConnectTimeoutException: HTTP connect timed out
status = StatusCode.UNAVAILABLE details = "failed to connect to all addresses"
curl: (28) Operation timed out after 1002 milliseconds with 0 bytes received
wget: unable to resolve host address 'no.such.host'
error sending request for url (http://10.0.0.1/): tcp connect error
socket.gaierror: [Errno -3] Temporary failure in name resolution
""".strip().split("\n")
"""What clients of other languages print."""


def test_every_kind_has_a_way_out() -> None:
    assert set(WAYS_OUT) == set(FailureKind)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("OSError: [Errno 28] No space left on device", FailureKind.DISK_FULL),
        ("openai.RateLimitError: Error code: 429 - {}", FailureKind.QUOTA),
        ("curl: (22) The requested URL returned error: 429", FailureKind.QUOTA),
        ("Error code: 429 - gateway.max_calls=8 is the limit.", FailureKind.LIMIT),
        ("curl: (7) Failed to connect to 10.0.0.7 port 80", FailureKind.ENDPOINT_LOST),
        ("httpx.HTTPStatusError: HTTP/1.1 503", FailureKind.ENDPOINT_LOST),
        ("bwrap: Can't find source path /gone", FailureKind.RUNTIME_START),
        (
            "certificate verify failed: certificate is not yet valid",
            FailureKind.CLOCK_SKEW,
        ),
        *((said, FailureKind.ENDPOINT_LOST) for said in LOST),
        ("Request failed with status code 404", FailureKind.AGENT_CRASH),
        (
            "TimeoutExpired: '/bin/sh' timed out after 5 seconds",
            FailureKind.AGENT_CRASH,
        ),
        ("ValueError: 429 is no word", FailureKind.AGENT_CRASH),
        ("KeyError: 'answer'", FailureKind.AGENT_CRASH),
    ],
)
def test_words_of_programs_name_the_failure(said: str, kind: FailureKind) -> None:
    assert kind_of_text(said, FailureKind.AGENT_CRASH) == kind


def test_a_cause_names_the_failure_and_no_class_breaks_the_classifier() -> None:
    class HostileError(Exception):
        @property
        def status_code(self) -> int:
            raise ZeroDivisionError

        def __str__(self) -> str:
            raise GeneratorExit

    def of(error: BaseException) -> FailureKind:
        return kind_of_error(error, FailureKind.AGENT_CRASH)

    assert of(HostileError()) == FailureKind.AGENT_CRASH
    early = ssl.SSLCertVerificationError(1, "certificate verify failed")
    early.verify_code = 9  # X509_V_ERR_CERT_NOT_YET_VALID
    assert of(early) == FailureKind.CLOCK_SKEW
    hidden = ExceptionGroup("tasks", [RuntimeError("no notes")])
    hidden.exceptions[0].__cause__ = OSError(28, "full")
    assert of(hidden) == FailureKind.DISK_FULL
    circle = ValueError("a")
    circle.__context__ = KeyError("b")
    circle.__context__.__context__ = circle
    assert of(circle) == FailureKind.AGENT_CRASH
