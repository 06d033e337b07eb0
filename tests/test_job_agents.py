"""Real runs of agents: what is trained on and counted, and what a worker costs that is killed, blocked, or
runs elsewhere; and an agent that misbehaves in every way.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_agents_for_test import BODIES, WAYS
from job_runs import (
    ROOT,
    children_of,
    environment,
    read_lines,
    run,
    start,
    variant,
    wait_for_more_steps,
    wait_until,
    write_config,
)

from asyncrl.journal.read import read_batch, reading
from asyncrl.messages.work import WORKER_KEY_ENV
from asyncrl.rollouts.tokenizer import HFChatTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NUM_STEPS = 8
PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a run of the lookup agent. Its worker is blocked by a rollout, and killed later."""
    folder = tmp_path_factory.mktemp("agent")
    mark, run_dir = folder / "mark", folder / "run"
    mark.touch()
    config = variant(
        ROOT / "configs" / "agent.yaml",
        folder,
        generator={"python": "agents_for_test:blocks_once", "args": {"mark": str(mark)}},
        gateway={"lease_timeout_s": 6},
        rollout={"slots": 16, "threads": 1, "retries": 8},
        trainer={"num_steps": NUM_STEPS, "num_groups": 2, "threads": 1},
        journal={"keep": "all"},
        observe={"console": "plain", "tensorboard": False, "heartbeat_s": 10},
    )
    process = start(config, run_dir)
    try:
        wait_for_more_steps(run_dir, 2, process)
        assert not mark.exists()
        (worker,) = children_of(process, "asyncrl.agents.worker")
        worker.kill()
        _, stderr = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, stderr
        yield run_dir
    finally:
        process.kill()


def test_a_worker_that_is_blocked_or_killed_is_started_again_and_the_run_goes_on(agents: Path) -> None:
    metrics = read_lines(agents / "metrics.jsonl")
    assert len(metrics) == NUM_STEPS
    last = metrics[-1]
    assert last["harness/restarts"] >= 1
    assert last["harness/workers"] == 1
    assert last["harness/lost"] > 0
    assert last["rollout/retried"] > 0
    assert last["rollout/failed"] == 0, "each was tried again"


def test_loss_is_on_what_the_model_sampled_and_never_on_what_the_tool_said(agents: Path) -> None:
    tokenizer = HFChatTokenizer(agents / "model")
    trained = {
        (line["version"], each["group_id"], each["sample_index"], each["branch"]): each
        for line in read_lines(agents / "trained.jsonl")
        for each in line["trajectories"]
    }
    num_with_tool = 0
    given = re.compile(
        r"<\|user\|>[a-f]<\|im_end\|><\|assistant\|>((<\|im_end\|>)?<\|tool\|>[0-5-]<\|im_end\|><\|assistant\|>){0,2}"
    )
    with reading(agents / "journal.sqlite") as connection:
        for version in range(NUM_STEPS):
            for group in read_batch(connection, agents / "journal.sqlite", version).groups:
                for trajectory in group.trajectories:
                    not_sampled = trajectory.token_ids[~trajectory.loss_mask].tolist()
                    context = tokenizer.decode(not_sampled, skip_special_tokens=False)
                    assert given.fullmatch(context), context
                    place = (version, group.group_id, trajectory.sample_index, trajectory.branch)
                    record = trained.pop(place)
                    in_spans = sum(end - start for start, end, _ in record["spans"])
                    assert record["num_loss_tokens"] == trajectory.loss_mask.sum() == in_spans
                    num_with_tool += "<|tool|>" in context
    assert not trained, "what was trained on is what was journaled"
    assert num_with_tool > 0, "no rollout came to a tool's answer"


def test_calls_are_counted_and_metrics_of_the_agent_are_there(agents: Path) -> None:
    metrics = read_lines(agents / "metrics.jsonl")
    last = metrics[-1]
    assert last["gateway/calls"] >= sum(step["task/tool_calls"] for step in metrics) * 16
    assert last["gateway/realigned"] + last["gateway/extended"] > 0
    assert last["gateway/forked"] == 0
    names = {"task/tool_calls", "task/right_name", "task/right_room", "harness/leased"}
    assert all(names <= set(step) for step in metrics)


def inspected(run_dir: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "asyncrl.cli", "inspect", str(run_dir), "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    said: dict[str, Any] = json.loads(answer.stdout)
    return said


def test_the_staleness_bound_holds_for_conversations(agents: Path) -> None:
    said = inspected(agents)
    assert said["bound_kept"] is True
    assert said["staleness_max"] <= said["max_staleness"] == 4


def test_an_agent_that_misbehaves_in_every_way_costs_its_rollouts_and_not_the_run(tmp_path: Path) -> None:
    log, run_dir = tmp_path / "log", tmp_path / "run"
    config = write_config(
        tmp_path,
        task={"python": "rewards_for_test:JudgeThatNeverGivesUp"},
        generator={"python": "hostile_agents_for_test:misbehaves", "args": {"log": str(log)}},
        gateway={"max_calls": 8},
        rollout={"timeout_s": 4, "retries": 4, "max_tokens": 8, "max_prompt_tokens": 40},
        trainer={"num_steps": 6},
    )
    ended = run(config, run_dir)
    assert ended.returncode == 0, ended.stderr

    metrics = read_lines(run_dir / "metrics.jsonl")
    assert len(metrics) == 6
    said: dict[str, set[int]] = {}
    for way, status in read_lines(log):  # type: ignore[misc]
        said.setdefault(way, set()).add(status)
    assert set(said) == set(WAYS)
    assert all(said[way] == {413 if way == "too large a body" else 400} for way in BODIES), said
    assert said["floods"] == said["calls after its end"] == {410}
    assert metrics[-1]["rollout/retried"] > 0, "what failed was tried again; what ran out of time was not"
    assert metrics[-1]["harness/restarts"] == 0
    assert metrics[-1]["rollout/abandoned"] == 1, (
        "a call of the judge, for which the end does not wait either"
    )
    assert "rewards_for_test:JudgeThatNeverGivesUp did not end within" in ended.stdout + ended.stderr
    assert inspected(run_dir)["bound_kept"] is True


def start_worker(
    gateway: dict[str, Any], log: Path, agent: str = "harnesses_for_test:two_turns", **args: Any
) -> subprocess.Popen[bytes]:
    """`asyncrl work`, as a process of its own beside the run; `args` are the agent's."""
    command = [sys.executable, "-m", "asyncrl.cli", "work", gateway["url"], "--python", agent]
    command += ["--name", log.stem, "--args", json.dumps(args)]
    env = environment(**{WORKER_KEY_ENV: gateway["worker_key"]})
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=env)


def test_a_run_waits_for_a_worker_and_a_second_one_takes_over_from_one_that_is_killed(tmp_path: Path) -> None:
    """The first one plays two steps' rollouts, then holds all that it leases: it is killed with a lease,
    however fast the run is.
    """
    config = write_config(
        tmp_path,
        generator={"remote": True},
        gateway={"lease_timeout_s": 5.0},
        rollout={"max_tokens": 8, "max_prompt_tokens": 64, "retries": 8},
        trainer={"num_steps": 8, "num_groups": 2},
        observe={"heartbeat_s": 8.0},
        supervision={"watchdog_s": 2.0},
    )
    run_dir, log = tmp_path / "run", tmp_path / "run" / "logs" / "controller.log"
    process = start(config, run_dir)
    workers: list[subprocess.Popen[bytes]] = []
    try:
        wait_until(
            lambda: log.exists() and "wait for a worker, 0 run on 0 workers" in log.read_text(), process
        )
        assert (run_dir / "gateway.json").stat().st_mode & 0o077 == 0, "the worker key is the owner's alone"
        gateway = json.loads((run_dir / "gateway.json").read_text())
        mark = tmp_path / "held"
        holds = {"num_played": 2 * 2 * 4, "mark": str(mark)}  # steps, groups, rollouts
        first = start_worker(gateway, tmp_path / "first.log", "agents_for_test:plays_then_holds", **holds)
        workers.append(first)
        wait_until(mark.exists, process)
        first.kill()
        workers.append(start_worker(gateway, tmp_path / "second.log"))
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, stderr
    finally:
        for each in (process, *workers):
            each.kill()
            each.wait()
    command = f"{WORKER_KEY_ENV}={gateway['worker_key']} asyncrl work {gateway['url']}"
    assert command in stdout + stderr, "it says what to start"
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    holders = [path.name for path in files if gateway["worker_key"].encode() in path.read_bytes()]
    assert holders == ["gateway.json"], "the key is printed, and in no log"
    metrics = read_lines(run_dir / "metrics.jsonl")
    assert len(metrics) == 8
    assert metrics[-1]["harness/lost"] > 0, "what the first one held when it was killed was lost"
    assert metrics[-1]["task/turns"] == 2
