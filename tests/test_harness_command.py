"""Commands as harnesses, plain and in bubblewrap, with real processes: input, output
and no leftovers.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from gateway_cases import in_loop, until
from harness_gateway import (
    WORKER_KEY,
    need_bubblewrap,
    open_gateway,
    processes_of,
    working,
)

from asyncrl.agents import Outcome, Session, Task
from asyncrl.agents.command import (
    MARK_ENV,
    OF_HOME,
    TAIL_BYTES,
    CommandHarness,
    last_line_outcome,
)
from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.base.http import WORKER_KEY_ENV
from asyncrl.config import GeneratorConfig
from asyncrl.config.generator_config import ENDPOINT_ENV

MESSAGES = ({"role": "user", "content": "What is 6 * 7?"},)
TASK = Task("p0", MESSAGES, {"kind": "times"}, 5, 1, 2, answer=42)
SESSION = Session("http://127.0.0.1:9/v1", "secret-key", "policy")


@pytest.fixture(autouse=True)
def own_temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the commands' folders; empty again at the end."""
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == [], "the folders of commands are removed"


def shell(script: str, **env: str) -> CommandHarness:
    return made("/bin/bash", "-c", script, env=env)


def made(*command: str, **settings: Any) -> CommandHarness:
    return CommandHarness(GeneratorConfig(command=list(command), **settings))


def run(script: str, session: Session = SESSION) -> Outcome:
    harness = shell(script)
    try:
        return asyncio.run(harness.run(TASK, session))
    finally:
        assert processes_of(harness.token) == []


def test_last_line_is_the_outcome_or_a_failure() -> None:
    marked = Outcome(1.0, {"\u2028\x85": 1.0})
    for text, outcome in (
        ("", Outcome()),
        ("42 apples\n", Outcome()),
        ("thinking\n0.5\n\n  \n", Outcome(0.5)),
        (
            '{"turn_rewards": {"chatcmpl-0": 1}}\n',
            Outcome(turn_rewards={"chatcmpl-0": 1.0}),
        ),
        ('0.5\n"done"', Outcome()),
        ('{"type": "reward", "text": 1}\nGoodbye!', Outcome()),
        ('0.5\r\n{"reward": 1, "metrics": {"\u2028\x85": 1}}\r\n', marked),
    ):
        assert last_line_outcome(text) == outcome
    for text in ("nan", '{"rewrd": 1}', "{", "x" * TAIL_BYTES):
        with pytest.raises(RolloutFailure, match="last line is not an outcome"):
            last_line_outcome(text)
    with pytest.raises(RolloutFailure, match="is text, after the outcome.*0.7"):
        last_line_outcome('{"reward": 0.7}\nGoodbye!\n')


@pytest.mark.parametrize("text", ["0.7\nGoodbye!", "Reward: 0.7", "-> score = .7 "])
def test_text_that_looks_like_a_reward_is_named(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    for hard in ("-\n" * 10**5, f"{'1' * 10**6}x", "." * 10**6):
        assert last_line_outcome(f"\n{hard}\nend") == Outcome(), "in linear time"
    assert not caplog.text
    assert last_line_outcome(text) == Outcome()
    assert "the task scores" in caplog.text
    assert "7" in caplog.text


TOOL = """
    {
        env
        tr '\\0' '\\n' < /proc/$PPID/environ
        timeout 5 cat /proc/$PPID/fd/0
        cat
    } > loot 2>&1
    key="Authorization: Bearer $OPENAI_API_KEY"
    curl -s "$OPENAI_BASE_URL/outcome" -H "$key" -d '{"reward": 1.0}' > answered
"""
"""A command that a policy may have its shell tool run to get a reward: it looks for
keys and the answer, and posts with the key that it inherits.
"""


@pytest.mark.slow
def test_policy_shell_cannot_pay_itself(tmp_path: Path) -> None:
    agent = f"""
        set -e
        task=$(cat)
        sh -c {shlex.quote(TOOL)}
        cp loot answered {tmp_path}
        printf '%s' "$task" > {tmp_path}/task
        url=$(jq -r .outcome_url <<<"$task")
        key=$(jq -r .outcome_key <<<"$task")
        printf 'Authorization: Bearer %s' "$key" | curl -sf "$url" -H @- -d '{{"reward": 0.25}}' >&2
        echo 1.0   # of a tool, perhaps: where outcomes are posted it is nobody's reward
    """

    async def story() -> Outcome:
        async with (
            open_gateway(outcomes="posted", give_answer=False) as gateway,
            working(gateway, shell(agent)),
        ):
            return await gateway.run(0, answer="SECRET-ANSWER-42")

    assert asyncio.run(story()) == Outcome(0.25), (
        "what the tool has posted counts nowhere"
    )
    assert "sets no reward" in (tmp_path / "answered").read_text()
    given, loot = (
        json.loads((tmp_path / "task").read_text()),
        (tmp_path / "loot").read_text(),
    )
    assert "OPENAI_API_KEY=key-0" in loot, "it has looked"
    assert "answer" not in given
    for secret in ("SECRET-ANSWER-42", "What is 0?", given["outcome_key"]):
        assert secret not in loot


@pytest.mark.slow
def test_command_has_a_clean_environment_and_folder(
    monkeypatch: pytest.MonkeyPatch, own_temp: Path
) -> None:
    monkeypatch.setenv("ASYNCRL_SECRET", "of the run")
    report = own_temp.parent / "report"
    monkeypatch.setenv("JUDGE_KEY", "0.75")
    script = f"env > {report}; pwd >> {report}; ls -A >> {report}"
    script += "; touch here $TMPDIR/there; mkdir -m 500 shut"
    harness = made(
        "/bin/bash", "-c", script, env={"CORPUS": "/data"}, pass_env=["JUDGE_KEY"]
    )
    assert asyncio.run(harness.run(TASK, SESSION)) == Outcome()
    said = report.read_text()
    names = {line.split("=")[0] for line in said.splitlines() if "=" in line}
    ours = {MARK_ENV, "CORPUS", "JUDGE_KEY"}
    ours |= {*ENDPOINT_ENV, "NO_PROXY", "no_proxy"}
    shells = {"PWD", "SHLVL", "_", "OLDPWD"}
    folders = {"PATH", "HOME", "LANG", "TMPDIR", *OF_HOME}
    assert names - shells <= ours | folders
    assert ours <= names
    folder = said.splitlines()[-1]
    assert folder.startswith(str(own_temp)), "nothing is in the folder when it starts"


@pytest.mark.slow
def test_bad_exit_is_a_failure() -> None:
    for script, said in (
        (
            "echo last words >&2; exit 3",
            "exited with code 3; the end of its standard error: last words",
        ),
        (
            "kill -SEGV $$",
            r"was killed by SIGSEGV; the end of its standard error: \(empty\)",
        ),
    ):
        with pytest.raises(RolloutFailure, match=said):
            run(script)


@pytest.mark.slow
def test_end_of_a_flood_counts() -> None:
    """Of megabytes of two-byte characters without a line end, and of errors."""
    flood = "head -c 5000001 /dev/zero | tr '\\0' X | sed 's/X/é/g'"
    assert run(f"{flood}; {flood} >&2; echo; echo 0.5") == Outcome(0.5)
    with pytest.raises(RolloutFailure, match="not an outcome.*é"):
        run(flood)


@pytest.mark.slow
def test_each_rollout_has_a_home_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Except with pass_env. Installed packages and downloads are those of the worker."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".cache/uv").mkdir(parents=True)
    script = 'echo note >> ~/.notes; [ "$UV_CACHE_DIR" = PLACE ] && wc -l < ~/.notes'
    script = script.replace("PLACE", str(tmp_path / ".cache/uv"))
    for pass_env, counts in (([], [1.0, 1.0]), (["HOME"], [1.0, 2.0])):
        harness = made("/bin/bash", "-c", script, pass_env=pass_env)
        assert [
            asyncio.run(harness.run(TASK, SESSION)).reward for _ in range(2)
        ] == counts


PROXIED = """
import openai
said = [{"role": "user", "content": "hi"}]
openai.OpenAI().chat.completions.create(model="policy", messages=said)
print(1.0)
"""


@pytest.mark.slow
@in_loop
async def test_proxies_of_the_environment_are_not_asked_for_the_endpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not by programs, and not by the clients of agents."""
    proxies = ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"]
    for name in proxies:
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "example.org")
    program = made(sys.executable, "-c", PROXIED, pass_env=[*proxies, "no_proxy"])
    async with open_gateway() as gateway, working(gateway, program):
        assert (await gateway.run(0)).reward == 1.0
    async with open_gateway() as gateway:
        url = f"{gateway.url}/s/key-0/v1"
        agent = ["--python", "faulty_agents_for_test:asks_elsewhere"]
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "asyncrl", "work", gateway.url, *agent),
            *("--args", json.dumps({"url": url})),
            env={**os.environ, WORKER_KEY_ENV: WORKER_KEY},
            cwd=Path(__file__).parent / "kit",
        )
        assert await gateway.run(0) == Outcome()
        worker.terminate()
        await worker.wait()


@pytest.mark.slow
def test_command_that_forks_and_exits_leaves_nothing() -> None:
    """A program whose children hold standard output and ignore SIGTERM."""
    script = """
        sleep 3600 &
        (trap '' TERM; touch $TMPDIR/deaf; while :; do sleep 1; done) &
        until [ -e $TMPDIR/deaf ]; do :; done
        echo 0.5
    """
    assert run(script) == Outcome(0.5)


def test_pipe_that_stays_open_delays_no_rollout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncrl.agents.command._DRAIN_S", 0.1)
    harness = shell("setsid sleep 3600 & echo 0.5")
    try:
        assert asyncio.run(
            asyncio.wait_for(harness.run(TASK, SESSION), 30.0)
        ) == Outcome(0.5)
    finally:
        for pid in processes_of(harness.token):
            os.kill(pid, signal.SIGKILL)


def test_what_cannot_run_is_refused_before_any_rollout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for command, settings, said in (
        ("no-such-program", {}, "there is no program no-such-program"),
        ("/bin/true", {"sandbox": "bubblewrap"}, "there is no program bwrap"),
        (
            "/bin/true",
            {"pass_env": ["JUDGE_KEY"]},
            "pass_env names JUDGE_KEY, which this process does not",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            made(command, **settings)


# ---- in bubblewrap


async def run_sandboxed(
    *command: str, session: Session = SESSION, **settings: Any
) -> Outcome:
    need_bubblewrap()
    harness = CommandHarness(
        GeneratorConfig(command=list(command), sandbox="bubblewrap", **settings)
    )
    try:
        return await harness.run(TASK, session)
    finally:
        assert processes_of(harness.token) == []


SEES = """
import json, os, socket, sys
def tried(what):
    try:
        return str(what())
    except OSError as error:
        return type(error).__name__
def connected(*address):
    return tried(lambda: socket.create_connection(address, timeout=5).close())
task = json.load(sys.stdin)
seen = {
    "answer": task["answer"], "folder": os.getcwd(), "home": os.environ["HOME"],
    "interfaces": [name for _, name in socket.if_nameindex()],
    "outside": connected("192.0.2.1", 9), "localhost": connected("127.0.0.1", PORT),
    "secret": tried(lambda: open("SECRET").read()),
    "system": tried(lambda: open("/usr/bin/x", "w")), "root": tried(lambda: open("/x", "w")),
    "devices": tried(lambda: open("/dev/x", "w")),
    "few processes": len([name for name in os.listdir("/proc") if name.isdigit()]) < 6,
    "note": tried(lambda: open("NOTE").read()),
}
open("x", "w").write("x"), open(os.environ["TMPDIR"] + "/x", "w").write("x")
print(json.dumps(seen), file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.slow
@in_loop
async def test_a_command_sees_only_its_folders_and_the_system(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("SECRET-ANSWER-42")
    (tmp_path / "note").write_text("readable")
    # a server of this machine that is not the session's
    async with open_gateway() as gateway:
        script = SEES.replace("PORT", gateway.url.rpartition(":")[2])
        script = script.replace("SECRET", str(tmp_path / "secret")).replace(
            "NOTE", str(tmp_path / "note")
        )
        with pytest.raises(RolloutFailure, match="exited with code 3") as failure:
            await run_sandboxed(
                sys.executable, "-c", script, sandbox_paths=[str(tmp_path / "note")]
            )
    seen, _ = json.JSONDecoder().raw_decode(
        str(failure.value).partition("standard error: ")[2]
    )
    assert seen == {
        "answer": 42,
        "folder": "/rollout",
        "home": "/rollout",
        "interfaces": ["lo"],
        "outside": "OSError",
        "localhost": "ConnectionRefusedError",
        "secret": "FileNotFoundError",
        "system": "OSError",
        "root": "OSError",
        "devices": "OSError",
        "few processes": True,
        "note": "readable",
    }


CALLS = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
def post(url, key, body):
    head = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)) as answer:
        return json.load(answer)
asked = {"model": "policy", "messages": task["messages"]}
for _ in range(3):
    said = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"], asked)
assert said["choices"][0]["message"]["content"] == "answer 3", said
post(task["outcome_url"], task["outcome_key"], {"reward": 0.5})
"""


@pytest.mark.slow
@in_loop
async def test_a_command_reaches_the_gateway() -> None:
    need_bubblewrap()
    command = [sys.executable, "-c", CALLS]
    harness = CommandHarness(
        GeneratorConfig(command=command, outcomes="posted", sandbox="bubblewrap")
    )
    async with open_gateway(outcomes="posted") as gateway, working(gateway, harness):
        assert (await gateway.run(0)).reward == 0.5
    assert len(gateway.engine.requests) == 3


@pytest.mark.slow
@in_loop
async def test_a_command_that_is_cancelled_twice_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its folder goes, and before a loop may close."""
    begun, remove = tmp_path / "begun", shutil.rmtree
    was_there = list[bool]()

    def noting(*given: Any, **options: Any) -> None:
        was_there.append(psutil.pid_exists(process.pid))
        remove(*given, **options)

    monkeypatch.setattr(shutil, "rmtree", noting)
    script = f"trap '' TERM; touch {begun}; sleep 1000 & wait"
    running = asyncio.create_task(shell(script).run(TASK, SESSION))
    await until(begun.exists)
    (process,) = [
        each for each in psutil.Process().children() if script in each.cmdline()
    ]
    running.cancel()
    await asyncio.sleep(0.1)  # in the grace of SIGTERM
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert was_there == [False]


@in_loop
async def test_a_process_cannot_exceed_its_memory_limit() -> None:
    greedy = "kept = []\nwhile True: kept.append(bytearray(b'x' * 2**20))"
    with pytest.raises(RolloutFailure, match="MemoryError"):
        await run_sandboxed(sys.executable, "-c", greedy, max_memory_mb=100)


DEAF = """
    trap '' TERM
    bash -c 'trap "" TERM; sleep 3600; :' &
    sleep 3600 &
    curl -s $OPENAI_BASE_URL/models >&2
    while :; do sleep 1; done
"""
HIDES = (
    "(setsid env -i sleep 1000 &) ; curl -s $OPENAI_BASE_URL/models >&2 ; sleep 1000"
)


@pytest.mark.slow
@pytest.mark.parametrize("script", [DEAF, HIDES], ids=["process group", "bubblewrap"])
@in_loop
async def test_a_cancelled_command_ends_with_its_children(script: str) -> None:
    started = asyncio.Event()

    async def begun(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        started.set()
        writer.close()

    server = await asyncio.start_server(begun, "127.0.0.1", 0)
    session = Session(
        f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", "key", "policy"
    )
    if script is HIDES:
        need_bubblewrap()
    harness = made(
        "/bin/bash", "-c", script, sandbox="bubblewrap" if script is HIDES else "none"
    )
    running = asyncio.ensure_future(harness.run(TASK, session))
    await asyncio.wait(
        [running, asyncio.ensure_future(started.wait())],
        return_when=asyncio.FIRST_COMPLETED,
    )
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert processes_of(harness.token) == []
    server.close()
