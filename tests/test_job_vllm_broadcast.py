"""Whole runs on real vLLM servers that are sent their weights in one broadcast (publisher.transport=nccl,
which on the CPU is gloo's).
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from job_runs import all_gone, children_of, interrupt, read_lines, staging_of, start, wait_for_steps
from test_job_supervision import wait_for_engine, wait_for_more_steps
from test_job_vllm import CONFIG, LONG, START_S, finish, group_of, on_policy, small, trained, wait_for_event

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]
BROADCAST = "publisher.transport=nccl"
EVALUATION = "eval={task: {python: 'asyncrl.tasks.letters:Letters'}, every: 3, num_prompts: 8, slots: 8}"


def test_a_run_whose_weights_are_sent_trains_on_what_a_run_with_files_trains_on_bit_for_bit(
    tmp_path: Path,
) -> None:
    finish(tmp_path / "files", *on_policy())
    finish(tmp_path / "sent", *on_policy(BROADCAST, EVALUATION))
    assert trained(tmp_path / "sent") == trained(tmp_path / "files")
    assert len(read_lines(tmp_path / "sent" / "trained.jsonl")) == 6
    assert {line["policy_version"] for line in read_lines(tmp_path / "sent" / "eval.jsonl")} == {0, 3, 6}, (
        "an evaluation has its file"
    )


def test_two_engines_go_on_when_one_of_them_is_killed_and_then_the_trainer(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(
        CONFIG,
        run_dir,
        *small(LONG, BROADCAST, "rollout.num_engines=2", "buffer.max_staleness=2", "observe.heartbeat_s=20"),
    )
    wait_for_steps(run_dir, 3, process, START_S)
    killed = wait_for_engine(process, 1, lambda child: True)
    family = group_of(killed)
    killed.kill()
    wait_for_more_steps(run_dir, 2, process)
    assert all_gone(family)
    wait_for_event(run_dir, process, ("engine up", "engine-1"))
    wait_for_more_steps(run_dir, 2, process)
    (trainer,) = children_of(process, "asyncrl.trainer.rank_process")
    trainer.kill()
    wait_for_more_steps(run_dir, 4, process)
    children: list[psutil.Process] = children_of(process)
    stdout, stderr = interrupt(process)
    assert process.returncode == 130, stderr
    assert f"engine-1: process {killed.pid} was killed by SIGKILL" in stdout
    lines = read_lines(run_dir / "metrics.jsonl")
    assert all(line["sample/staleness_max"] <= 2 for line in lines)
    assert max(line["engine/policy_version/engine-1"] for line in lines) > 1
    assert all_gone(children)
    assert staging_of(process.pid) == []
