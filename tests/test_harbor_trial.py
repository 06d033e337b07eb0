"""Harbor itself, from .venv-harbor, runs task folders as trials of a worker."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent_cases import last_turn, text_of, tool_call
from gateway_cases import in_loop, until
from harness_gateway import WORKER_KEY, TestGateway, need_bubblewrap, open_gateway
from job_runs import environment, read_lines

from asyncrl.base.errors import RolloutFailure
from asyncrl.base.failures import FailureKind
from asyncrl.base.http import WORKER_KEY_ENV
from asyncrl.messages.records import Outcome, RewardPart
from examples.harbor.numbers import write

ROOT = Path(__file__).parents[1]
VENV = Path(os.environ.get("VENV_HARBOR", ROOT / ".venv-harbor"))
PYTHON = VENV / "bin/python"
ONE_COMMAND = "examples.harbor.one_command:OneCommand"
TASKS = ROOT / "examples/harbor/tasks"
LENGTHS = {"max_tokens": 2000, "max_prompt_tokens": 60_000, "max_length": 62_000}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs scripts/setup_harbor.sh"),
]


@contextmanager
def worker_of(gateway: TestGateway, **args: Any) -> Iterator[subprocess.Popen[bytes]]:
    command = [PYTHON, "-m", "asyncrl", "work", gateway.url]
    command += ["--python", "examples.harbor.trial:run", "--args", json.dumps(args)]
    env = {**os.environ, WORKER_KEY_ENV: WORKER_KEY, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(list(map(str, command)), env=env, cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


@asynccontextmanager
async def trials(
    agent: str, *, answer: Callable[[str], str] = lambda _: "", **args: Any
) -> AsyncIterator[TestGateway]:
    """A worker of this agent, whose model says `answer(prompt)`."""
    need_bubblewrap()
    async with open_gateway(limits=LENGTHS) as gateway:
        gateway.engine.answer = lambda request: answer(text_of(request))
        with worker_of(gateway, agent=agent, **args):
            yield gateway


async def play(gateway: TestGateway, folder: Path, number: int = 0) -> Outcome:
    return await gateway.run(number, info={"folder": str(folder)})


async def kind_of(gateway: TestGateway, folder: Path, said: str) -> FailureKind:
    with pytest.raises(RolloutFailure, match=said) as caught:
        await play(gateway, folder)
    return caught.value.kind


def changed(tmp_path: Path, files: Mapping[str, str]) -> Path:
    """A copy of the task word-count with other files."""
    folder = tmp_path / f"task-{len(list(tmp_path.iterdir()))}"
    shutil.copytree(TASKS / "word-count", folder)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


# ---- Harbor's own agents


def to_terminus(prompt: str) -> str:
    count = "wc -w <text.txt >answer.txt\n"
    return json.dumps(
        {
            "analysis": "A text and no answer.",
            "plan": "Count.",
            "commands": [{"keystrokes": count, "duration": 0.5}],
            "task_complete": True,
        }
    )


def to_mini_swe_agent(prompt: str) -> str:
    role, _ = last_turn(prompt)
    done = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    return tool_call(
        "bash", command=done if role == "tool" else "wc -w <text.txt >answer.txt"
    )


@in_loop
async def test_terminus_2_solves_a_task() -> None:
    async with trials("terminus-2", answer=to_terminus) as gateway:
        assert await play(gateway, TASKS / "word-count") == Outcome(1.0)
        assert len(gateway.engine.requests) == 2  # it asks whether it is done


@in_loop
async def test_mini_swe_agent_solves_a_task_inside() -> None:
    async with trials("mini-swe-agent", answer=to_mini_swe_agent) as gateway:
        assert await play(gateway, TASKS / "word-count") == Outcome(1.0)
        assert len(gateway.engine.requests) == 2


@in_loop
async def test_inside_only_the_endpoint_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        reach = f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null"

        def answer(prompt: str) -> str:
            said = to_mini_swe_agent(prompt)
            return said.replace("wc -w", f"{reach} || wc -w")

        async with trials("mini-swe-agent", answer=answer) as gateway:
            assert await play(gateway, TASKS / "word-count") == Outcome(1.0)


# ---- rewards and failures


@in_loop
async def test_oracle_solves_tasks_and_nop_does_not(tmp_path: Path) -> None:
    write(tmp_path)
    async with trials("oracle") as gateway:
        assert await play(gateway, TASKS / "sort-lines") == Outcome(
            1.0, {"num_lines": 3}
        )
        assert await play(gateway, tmp_path / "number-7", 1) == Outcome(1.0)
    async with trials("nop") as gateway:
        assert (await play(gateway, TASKS / "sort-lines")).reward == 0.0


@in_loop
async def test_each_failure_has_its_name(tmp_path: Path) -> None:
    test, settings = "tests/test.sh", "task.toml"
    failures = {
        FailureKind.REWARD_CRASH: ({test: "exit 3\n"}, "RewardFileNotFoundError"),
        FailureKind.CORRUPT_RESULT: (
            {test: "echo much >/logs/verifier/reward.txt\n"},
            "VerifierOutputParseError",
        ),
        FailureKind.REWARD_TIMEOUT: (
            {test: "sleep 100\n", settings: "[verifier]\ntimeout_sec = 0.5\n"},
            "VerifierTimeoutError",
        ),
        FailureKind.RUNTIME_START: (
            {"environment/Dockerfile": "FROM x\nRUN apt update\n"},
            "cannot honour 'RUN apt update'",
        ),
        FailureKind.ENVIRONMENT: (
            {settings: HEALTHCHECK.format(command="false")},
            "HealthcheckError",
        ),
    }
    async with trials("oracle") as gateway:
        for kind, (files, said) in failures.items():
            assert await kind_of(gateway, changed(tmp_path, files), said) == kind
        for file, text, said in (
            ("reward.txt", "inf", "finite"),
            ("reward.json", '{"score": "x"}', "score"),
        ):
            files = {test: f"echo '{text}' >/logs/verifier/{file}\n"}
            kind = await kind_of(gateway, changed(tmp_path, files), said)
            assert kind == FailureKind.CORRUPT_RESULT
        # Of the sandbox, nothing remains.
        assert await play(gateway, TASKS / "word-count") == Outcome(1.0)
        files = {test: """echo '{"score": 1}' >/logs/verifier/reward.json\n"""}
        outcome = await play(gateway, changed(tmp_path, files))
        assert outcome == Outcome({"score": RewardPart(1.0)})


@in_loop
async def test_slow_agent_is_out_of_time_also_if_the_tests_give_a_reward() -> None:
    sleeps = {"command": "echo 11 >answer.txt; sleep 100; echo {}"}
    async with trials(
        ONE_COMMAND, agent_args=sleeps, limits={"agent_s": 2.0}
    ) as gateway:
        outcome = await play(gateway, TASKS / "word-count")
        assert outcome == Outcome(1.0, timed_out=True)


HEALTHCHECK = """
[environment.healthcheck]
command = "{command}"
retries = 1
start_period_sec = 0
interval_sec = 0.1
"""


@in_loop
async def test_sandbox_has_no_key_and_no_network(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        look = (
            "cat /proc/[0-9]*/environ | grep -qa -e key- -e ASYNCRL && exit 1\n"
            f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && exit 1\n"
            "echo 1 > /logs/verifier/reward.txt\n"
        )
        async with trials("nop") as gateway:
            folder = changed(tmp_path, {"tests/test.sh": look})
            assert await play(gateway, folder) == Outcome(1.0)


STEPS = """
schema_version = "1.4"
multi_step_reward_strategy = "mean"

[[steps]]
name = "first"

[[steps]]
name = "second"
"""


@in_loop
async def test_steps_share_a_sandbox_and_their_mean_is_the_reward(
    tmp_path: Path,
) -> None:
    done = "echo {} >/logs/verifier/reward.txt\n"
    files = {
        "task.toml": STEPS,
        "steps/first/instruction.md": "Write 1.",
        "steps/first/solution/solve.sh": "echo 1 >/app/one.txt\n",
        "steps/first/tests/test.sh": "grep -q 1 /app/one.txt && " + done.format(1),
        "steps/second/instruction.md": "Write half of it.",
        "steps/second/solution/solve.sh": "cp /app/one.txt /app/two.txt\n",
        "steps/second/tests/test.sh": "grep -q 1 /app/two.txt && " + done.format(0.5),
    }
    async with trials("oracle") as gateway:
        assert await play(gateway, changed(tmp_path, files)) == Outcome(0.75)


def made_by_harbor(folder: Path) -> None:
    """Two tasks of `harbor init`: one whose verifier has a sandbox of its own, one of
    two steps. Harbor leaves instructions and tests to their author: 1 for any answer.
    """
    init = [VENV / "bin/harbor", "init", "--task", "--no-pytest", "-o", folder]
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    for name, *more in (
        ("plain",),
        ("steps", "--steps", 2, "--verifier-mode", "shared"),
    ):
        command = [*init, f"examples/{name}", *more]
        subprocess.run(
            list(map(str, command)), env=env, capture_output=True, check=True
        )
    for test in folder.rglob("test.sh"):
        with test.open("a") as file:
            file.write("[ -s answer.txt ] && echo 1 >/logs/verifier/reward.txt\n")
    for instruction in folder.rglob("instruction.md"):
        instruction.write_text("write 1\n")
    settings = folder / "plain/task.toml"
    # What the verifier's sandbox gets.
    passed = settings.read_text().replace(
        "artifacts = []", 'artifacts = ["/app/answer.txt"]'
    )
    settings.write_text(passed)


def test_run_trains_tasks_of_harbor_and_ten_of_ours(tmp_path: Path) -> None:
    need_bubblewrap()
    made_by_harbor(tmp_path / "tasks")
    write(tmp_path / "tasks")
    config = ROOT / "examples/harbor/numbers.yaml"
    command = [sys.executable, "-m", "asyncrl", "run", config, "observe.trackers=[]"]
    command += [f"task.args.folder={tmp_path / 'tasks'}", "task.size=12"]
    command += [f"generator.worker_python={PYTHON}", "trainer.num_steps=2"]
    command += ["trainer.num_groups=6", "rollout.group_size=2"]
    ended = subprocess.run(
        [*map(str, command), "--run-dir", str(tmp_path / "run")],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    steps = read_lines(tmp_path / "run/metrics.jsonl")
    # One token per call: each of the 12 tasks once, with two rollouts, and the second step.
    assert sum(step["tokens/trained"] for step in steps) == 12 * 2 + 2
    assert [step["rollout/failed"] for step in steps] == [0, 0]
    assert [step["failure/infrastructure"] for step in steps] == [0, 0]
    # The two of Harbor reward any answer.
    assert sum(step["reward/mean"] * 12 for step in steps) >= 4


# ---- limits and kills

MANY = "for _ in $(seq 200); do sleep 100 & done; wait\n"
LARGE = "for _ in 1 2 3 4; do python3 -c 'x = b\"x\" * (80 << 20); input()' < <(sleep 100) & done; wait\n"
ALONE = "python3 -c 'x = b\"x\" * (600 << 20)' || echo small >/app/found\n"
CPUS = "nproc >/app/found\n"


@in_loop
async def test_limits_end_what_exceeds_them_and_not_the_trial(tmp_path: Path) -> None:
    """Memory of one process and of all, number of processes, CPUs."""
    command = "bash /app/try.sh >said.txt 2>&1 </dev/null; echo {}"
    limits = {"cpus": 1, "memory_mb": 256, "processes": 32}
    async with trials(
        ONE_COMMAND, agent_args={"command": command}, limits=limits
    ) as gateway:
        for number, (script, found) in enumerate(
            ((MANY, ""), (LARGE, ""), (ALONE, "small"), (CPUS, "1"))
        ):
            files = {
                "environment/Dockerfile": "WORKDIR /app\nCOPY try.sh /app/\n",
                "environment/try.sh": script + "echo survived >>/app/found\n",
                "tests/test.sh": REPORT,
            }
            outcome = await play(gateway, changed(tmp_path, files), number)
            assert outcome.reward == {
                "reward": RewardPart(1.0),
                "survived": RewardPart(float(found != ""), 0.0),
                "small": RewardPart(float(found == "small"), 0.0),
                "one": RewardPart(float(found == "1"), 0.0),
            }, script


REPORT = """
has() { grep -qx "$1" /app/found 2>/dev/null && echo 1 || echo 0; }
echo "{\\"reward\\": 1, \\"survived\\": $(has survived), \\"small\\": $(has small), \\"one\\": $(has 1)}" \\
    >/logs/verifier/reward.json
"""


def name_of(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def living(processes: list[psutil.Process]) -> list[int]:
    found = list[int]()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@in_loop
@pytest.mark.parametrize("end", ["kill", "timeout"])
async def test_no_process_outlives_its_worker_or_its_rollout(
    tmp_path: Path, end: str
) -> None:
    need_bubblewrap()
    leave = "setsid sleep 987 & setsid nohup sleep 987 & sleep 987\n"
    folder = changed(tmp_path, {"solution/solve.sh": leave})
    async with open_gateway(lease_timeout_s=30.0) as gateway:
        with worker_of(gateway, agent="oracle") as worker:
            limit = None if end == "kill" else 20.0
            playing = asyncio.ensure_future(
                gateway.run(info={"folder": str(folder)}, timeout_s=limit)
            )
            root = psutil.Process(worker.pid)

            def started() -> list[psutil.Process]:
                below = root.children(recursive=True)
                sleeps = [each for each in below if name_of(each) == "sleep"]
                return below if len(sleeps) == 3 else []

            await until(lambda: started() != [] or playing.done())
            below = started()
            if end == "kill":
                worker.send_signal(signal.SIGKILL)
                playing.cancel()
            else:
                with pytest.raises(RolloutFailure) as caught:
                    await playing
                assert caught.value.kind == FailureKind.AGENT_TIMEOUT
            assert len(below) > 5, "bubblewrap, the server, bash and three times sleep"
            await until(lambda: living(below) == [])
