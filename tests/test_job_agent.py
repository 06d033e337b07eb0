"""Real runs of the lookup agent: what is trained on, what is counted, and what a lost or blocked worker
costs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from job_runs import TESTS, children_of, environment, read_lines, wait_for_steps

from asyncrl.journal.read import read_batch, reading
from asyncrl.rollouts.tokenizer import HFChatTokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SHORT = (
    "rollout.slots=16",
    "rollout.threads=1",
    "trainer.num_groups=2",
    "trainer.threads=1",
    "journal.keep=all",
    "observe.console=plain",
    "observe.tensorboard=false",
)


def start_agent(run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    """`asyncrl run configs/agent.yaml`, small; started in the repository, as users do."""
    command = [
        sys.executable,
        "-m",
        "asyncrl.cli",
        "run",
        "configs/agent.yaml",
        *SHORT,
        *overrides,
        "--run-dir",
        str(run_dir),
    ]
    env = environment(PYTHONPATH=f"{TESTS}:{ROOT}")
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=ROOT,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> None:
    _, stderr = process.communicate(timeout=150)
    assert process.returncode == 0, stderr


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return children_of(process, "asyncrl.agents.worker")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a run whose worker was killed after two steps."""
    run_dir = tmp_path_factory.mktemp("agent") / "run"
    process = start_agent(run_dir, "trainer.num_steps=10")
    try:
        wait_for_steps(run_dir, 2, process)
        (worker,) = workers_of(process)
        worker.kill()
        finish(process)
        yield run_dir
    finally:
        process.kill()


def test_a_killed_worker_is_started_again_and_the_run_goes_on(killed: Path) -> None:
    metrics = read_lines(killed / "metrics.jsonl")
    assert len(metrics) == 10
    assert metrics[-1]["harness/restarts"] == 1
    assert metrics[-1]["harness/workers"] == 1


def test_loss_is_on_what_the_model_sampled_and_never_on_what_the_tool_said(killed: Path) -> None:
    tokenizer = HFChatTokenizer(killed / "model")
    trained = {
        (line["version"], each["group_id"], each["sample_index"], each["branch"]): each
        for line in read_lines(killed / "trained.jsonl")
        for each in line["trajectories"]
    }
    num_with_tool = 0
    given = re.compile(
        r"<\|user\|>[a-f]<\|im_end\|><\|assistant\|>((<\|im_end\|>)?<\|tool\|>[0-5-]<\|im_end\|><\|assistant\|>){0,2}"
    )
    with reading(killed / "journal.sqlite") as connection:
        for version in range(10):
            for group in read_batch(connection, killed / "journal.sqlite", version).groups:
                for trajectory in group.trajectories:
                    context = tokenizer.decode(
                        trajectory.token_ids[~trajectory.loss_mask].tolist(), skip_special_tokens=False
                    )
                    assert given.fullmatch(context), context
                    record = trained.pop(
                        (version, group.group_id, trajectory.sample_index, trajectory.branch)
                    )
                    assert (
                        record["num_loss_tokens"]
                        == trajectory.loss_mask.sum()
                        == sum(end - start for start, end, _ in record["spans"])
                    )
                    num_with_tool += "<|tool|>" in context
    assert not trained, "what was trained on is what was journaled"
    assert num_with_tool > 0, "no rollout came to a tool's answer"


def test_calls_are_counted_and_metrics_of_the_agent_are_there(killed: Path) -> None:
    metrics = read_lines(killed / "metrics.jsonl")
    last = metrics[-1]
    assert last["gateway/calls"] >= sum(step["task/tool_calls"] for step in metrics) * 16
    assert last["gateway/realigned"] + last["gateway/extended"] > 0
    assert last["gateway/forked"] == 0
    assert all(
        {"task/tool_calls", "task/right_name", "task/right_room", "harness/leased"} <= set(step)
        for step in metrics
    )


def test_the_staleness_bound_holds_for_conversations(killed: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "asyncrl.cli", "inspect", str(killed), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said: dict[str, Any] = json.loads(answer.stdout)
    assert said["bound_kept"] is True
    assert said["staleness_max"] <= said["max_staleness"] == 4


def test_an_agent_that_blocks_its_worker_for_ever_costs_its_rollouts_and_not_the_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.touch()
    process = start_agent(
        tmp_path / "run",
        "trainer.num_steps=4",
        "generator.python=agents_for_test:blocks_once",
        f"generator.args.mark={mark}",
        "gateway.lease_timeout_s=4",
        "observe.heartbeat_s=8",
        "rollout.retries=4",
    )
    try:
        finish(process)
    finally:
        process.kill()
    metrics = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(metrics) == 4
    assert not mark.exists()
    assert metrics[-1]["harness/lost"] > 0
    assert metrics[-1]["rollout/retried"] > 0
    assert metrics[-1]["rollout/failed"] == 0, "each was tried again"


def test_two_runs_with_one_seed_train_on_the_same_tokens_in_whatever_order_their_calls_arrive(
    tmp_path: Path,
) -> None:
    records = []
    for name in ("first", "second"):
        process = start_agent(tmp_path / name, "trainer.num_steps=4", "buffer.max_staleness=0")
        try:
            finish(process)
        finally:
            process.kill()
        records.append(read_lines(tmp_path / name / "trained.jsonl"))
    first, second = records
    assert len(first) == 4
    assert first == second
