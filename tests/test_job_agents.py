"""Real runs of agents: trained tokens, lost workers and hostile agents."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked_processes
import psutil
import pytest
import yaml
from agents_for_test import BODIES, WAYS
from held_task import held_slice
from job_runs import (
    ROOT,
    environment,
    read_lines,
    run,
    start,
    variant,
    wait_until,
    write_config,
)
from process_ends import all_gone

from asyncrl.base.http import WORKER_KEY_ENV
from asyncrl.journal.read import read_batch, reading
from asyncrl.observe.show import render_inspect
from asyncrl.rollouts.tokenizer import HFChatTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NUM_STEPS = 5
PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of the lookup agent. A rollout blocks its worker, another
    kills the next.
    """
    folder, run_dir = (
        tmp_path_factory.mktemp("agent"),
        tmp_path_factory.mktemp("agent") / "run",
    )
    marks = [folder / "blocks", folder / "dies"]
    for mark in marks:
        mark.touch()
    config = variant(
        ROOT / "configs" / "agent.yaml",
        folder,
        generator={
            "python": "agents_for_test:loses_two_workers",
            "args": {"marks": str(folder)},
            "workers": 1,
        },
        gateway={"lease_timeout_s": 8},
        rollout={"slots": 16, "threads": 1, "retries": 8},
        trainer={"num_steps": NUM_STEPS, "num_groups": 2, "threads": 1},
        journal={"keep": "all"},
        observe={"console": "plain", "trackers": [], "heartbeat_s": 15},
    )
    ended = run(config, run_dir)
    assert ended.returncode == 0, ended.stderr
    assert not any(mark.exists() for mark in marks)
    return run_dir


def test_blocked_or_killed_worker_is_restarted(agents: Path) -> None:
    metrics = read_lines(agents / "metrics.jsonl")
    last = metrics[-1]
    assert len(metrics) == NUM_STEPS
    assert (
        last["harness/workers"],
        last["rollout/failed"],
        last["gateway/edited"],
    ) == (1, 0, 0)
    assert (
        min(last["harness/restarts"] - 1, last["harness/lost"], last["rollout/retried"])
        > 0
    )
    assert (
        last["gateway/calls"] >= sum(step["task/tool_calls"] for step in metrics) * 16
    )
    assert last["gateway/realigned"] + last["gateway/extended"] > 0
    names = {"task/tool_calls", "task/right_name", "task/exact"}
    assert all(names <= set(step) for step in metrics)
    said = inspected(agents)
    assert said["bound_kept"] is True
    assert said["staleness_max"] <= said["max_staleness"] == 4


def test_loss_covers_only_sampled_tokens(agents: Path) -> None:
    tokenizer = HFChatTokenizer(agents / "model")
    answer = r"((<\|im_end\|>)?<\|tool\|>[0-5-]<\|im_end\|><\|assistant\|>){0,2}"
    given = re.compile(rf"<\|user\|>[a-f]<\|im_end\|><\|assistant\|>{answer}")
    with reading(agents / "journal.sqlite") as connection:
        groups = [
            group
            for version in range(NUM_STEPS)
            for group in read_batch(connection, version).groups
        ]
    contexts = list[str]()
    for branch in [branch for group in groups for branch in group.trajectories]:
        assert branch.num_sampled == branch.loss_mask.sum()
        ids = branch.token_ids[~branch.loss_mask].tolist()
        contexts.append(tokenizer.decode(ids, skip_special_tokens=False))
    assert all(map(given.fullmatch, contexts))
    assert any("<|tool|>" in context for context in contexts), (
        "no rollout came to a tool's answer"
    )
    lines = read_lines(agents / "trained.jsonl")
    assert sum(len(line["trajectories"]) for line in lines) == len(contexts)


def inspected(run_dir: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(render_inspect(run_dir, as_json=True))
    return said


def test_hostile_agent_costs_only_its_rollouts(tmp_path: Path) -> None:
    log, run_dir = tmp_path / "log", tmp_path / "run"
    config = write_config(
        tmp_path,
        task={"python": "rewards_for_test:JudgeThatNeverGivesUp"},
        generator={"python": "agents_for_test:misbehaves", "args": {"log": str(log)}},
        gateway={"max_calls": 8},
        rollout={
            "timeout_s": 6,
            "retries": 4,
            "max_tokens": 8,
            "max_prompt_tokens": 40,
        },
        trainer={"num_steps": 3},
    )
    ended = run(config, run_dir)
    assert ended.returncode == 0, ended.stderr

    metrics = read_lines(run_dir / "metrics.jsonl")
    said: dict[str, set[int]] = {}
    for way, status in read_lines(log):  # type: ignore[misc]
        said.setdefault(way, set()).add(status)
    assert set(said) == set(WAYS)
    late = {401, 410}  # the time of its rollout was over
    assert all(
        said[way] - late == {413 if way == "too large a body" else 400}
        for way in BODIES
    ), said
    assert said["floods"] == said["calls after its end"] == {401}
    last = metrics[-1]
    assert last["rollout/retried"] > 0, (
        "what failed was tried again; what ran out of time was not"
    )
    assert (len(metrics), last["harness/restarts"]) == (3, 0)
    assert last["rollout/abandoned"] == 1
    assert (
        "rewards_for_test:JudgeThatNeverGivesUp kept running"
        in ended.stdout + ended.stderr
    )
    failed = [
        one for one in read_lines(run_dir / "samples.jsonl") if one["kind"] == "failed"
    ]
    assert 0 < len(failed) <= 3 * 5
    assert all(
        one["error"] and one["messages"] and one["reward"] is None for one in failed
    )
    assert "failed rollout of step " in ended.stdout
    assert inspected(run_dir)["bound_kept"] is True


PROGRAM = """
import json, os, pathlib, time, urllib.request
task = json.load(open(0))
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
body = {"model": os.environ["OPENAI_MODEL"], "messages": task["messages"]}
head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
call = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), head)
urllib.request.urlopen(call).read()
with open(os.environ["HELD_RUN_DIR"] + ".programs", "a") as file:
    file.write("x")
    number = file.tell()
while number > 8 and os.path.exists(os.environ["HELD_RUN_DIR"] + ".slice"):
    time.sleep(0.02)
print(number)
"""


def test_signal_that_ends_agents_too_makes_no_failure(tmp_path: Path) -> None:
    """Programs of the next batch end by SIGTERM while the trainer is in a step."""
    config = write_config(
        tmp_path,
        generator={
            "command": [sys.executable, "-c", PROGRAM],
            "pass_env": ["HELD_RUN_DIR"],
        },
        rollout={"max_tokens": 8, "max_prompt_tokens": 64, "slots": 8},
        algorithm={"advantage": "held_task:held_rloo"},
        buffer={"max_staleness": 1},
        trainer={"num_steps": 2, "num_groups": 2},
    )
    run_dir = tmp_path / "run"
    held_slice(run_dir).touch()
    process = start(config, run_dir)
    controller = psutil.Process(process.pid)
    programs = tmp_path / "run.programs"
    wait_until(lambda: programs.exists() and len(programs.read_text()) == 16, process)
    agents = [
        each
        for each in controller.children(recursive=True)
        if PROGRAM in each.cmdline()
    ]
    assert len(agents) == 8
    for member in (controller, *controller.children(recursive=True)):
        member.terminate()
    assert all_gone(agents)
    held_slice(run_dir).unlink()
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "restarting" in stdout) == (143, False), stderr
    assert " failed (" not in (run_dir / "logs" / "controller.log").read_text()
    assert run(config, run_dir).returncode == 0
    assert len(read_lines(run_dir / "metrics.jsonl")) == 2


def test_second_worker_takes_over_from_a_killed_one(tmp_path: Path) -> None:
    """The first one plays two steps' rollouts, then holds all that it leases: it is
    killed with a lease, however fast the run is.
    """
    config = write_config(
        tmp_path,
        generator={"remote": True},
        gateway={"lease_timeout_s": 5.0},
        rollout={"max_tokens": 8, "max_prompt_tokens": 64, "retries": 8},
        trainer={"num_steps": 4, "num_groups": 2},
        observe={"heartbeat_s": 8.0},
        supervision={"watchdog_s": 2.0},
    )
    run_dir, mark = tmp_path / "run", tmp_path / "held"
    process = start(config, run_dir)
    log = run_dir / "logs" / "controller.log"
    workers = list[Any]()

    def work(agent: str, **args: Any) -> subprocess.Popen[bytes]:
        """Start `asyncrl work` as a separate process."""
        command = [
            sys.executable,
            "-m",
            "asyncrl.cli",
            "work",
            gateway["url"],
            "--python",
            agent,
        ]
        env = environment(**{WORKER_KEY_ENV: gateway["worker_key"]})
        workers.append(
            forked_processes.popen([*command, "--args", json.dumps(args)], env)
        )
        return workers[-1]

    try:
        waits = "to be woken by a worker's result"
        wait_until(lambda: log.exists() and waits in log.read_text(), process)
        assert (run_dir / "gateway.json").stat().st_mode & 0o077 == 0
        gateway = json.loads((run_dir / "gateway.json").read_text())
        played = 2 * 2 * 4  # steps, groups, rollouts
        first = work(
            "agents_for_test:plays_then_holds", num_played=played, mark=str(mark)
        )
        wait_until(mark.exists, process)
        first.kill()
        second = work("agents_for_test:two_turns")
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, stderr
        assert second.wait(timeout=60) == 0, "it ends with its run, by itself"
    finally:
        for each in (process, *workers):
            each.kill()
            each.wait()
    command = f"asyncrl work {gateway['url']} --key-file {run_dir / 'gateway.json'} --python MODULE:FUNCTION"
    assert command in stdout, "it says what to start"
    assert gateway["worker_key"] not in stdout + stderr
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    holders = [
        path.name
        for path in files
        if gateway["worker_key"].encode() in path.read_bytes()
    ]
    assert holders == ["gateway.json"]
    metrics = read_lines(run_dir / "metrics.jsonl")
    assert (len(metrics), metrics[-1]["task/turns"]) == (4, 2)
    assert metrics[-1]["harness/lost"] > 0, (
        "what the first one held when it was killed was lost"
    )


# ---- verifiers


@pytest.mark.extras
@pytest.mark.extension("verifiers")
def test_verifiers_environment_is_trained_and_evaluated(tmp_path: Path) -> None:
    config = variant(
        ROOT / "configs" / "agent.yaml",
        tmp_path,
        model={
            "scratch": {
                "characters": "ab01234567 ",
                "architecture": {
                    "model_type": "qwen3",
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 1,
                    "head_dim": 16,
                    "max_position_embeddings": 64,
                    "tie_word_embeddings": True,
                },
            }
        },
        generator={
            "python": None,
            "give_answer": False,
            "verifiers": "letters_env_for_test",
            "workers": 1,
            "args": {"agent": {"runtime": {"type": "subprocess"}}},
        },
        gateway={"tool_format": "auto"},
        rollout={"slots": 8, "threads": 1, "group_size": 4, "max_tokens": 8},
        trainer={"num_steps": 2, "num_groups": 2, "threads": 1},
        observe={"console": "plain", "trackers": []},
    )
    loaded = yaml.safe_load(config.read_text())
    loaded["task"] = {"verifiers": True}
    loaded["eval"] = {
        "task": {"verifiers": True, "args": {"letters": "b"}},
        "every": 2,
        "num_prompts": 4,
        "slots": 4,
        "engine": "rollout",
    }
    config.write_text(yaml.safe_dump(loaded))
    ended = run(config, tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [step["task/is_b"] for step in steps] == [0.0, 0.0]
    evaluated = read_lines(tmp_path / "run" / "eval.jsonl")
    assert [line["policy_version"] for line in evaluated] == [0, 2]
    assert all(line["eval/task/is_b"] == 1.0 for line in evaluated)
    assert all(line["eval/failed"] == 0 for line in evaluated)
