"""The policy as its own teacher in runs: the weights and texts that its logprobs are of."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

import job_runs
import numpy as np
import pytest
import torch
from crash_fuzz import killed_on_the_way
from lessons import lesson
from taught_cases import taught
from transformers import AutoModelForCausalLM

from asyncrl.base.errors import ConfigError
from asyncrl.extensions.scoring.teacher import VERSION
from asyncrl.extensions.scoring.teacher_prompt import Attempt
from asyncrl.job.run_export import export_run
from asyncrl.journal.read import read_batch, reading
from asyncrl.messages.records import Group, Trajectory
from asyncrl.rollouts.tokenizer import HFChatTokenizer

pytestmark = [pytest.mark.extension("scoring"), pytest.mark.slow]

NUM_STEPS = 6


def logprobs_after(model: Any, before: list[int], sampled: list[int]) -> np.ndarray:
    ids = torch.tensor([[*before, *sampled]])
    with torch.no_grad():
        scores = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1)
    rows = range(len(before) - 1, len(before) + len(sampled) - 1)
    found: np.ndarray = scores[rows, sampled].numpy()
    return found


def attempt_of(branch: Trajectory, tokenizer: HFChatTokenizer) -> Attempt:
    ids = branch.token_ids[branch.loss_mask].tolist()
    is_ended = ids[-1] in tokenizer.end_ids
    # Their names are a part of the text that the reward reads.
    text = tokenizer.decode(ids[:-1] if is_ended else ids, skip_special_tokens=False)
    return Attempt(branch.sample_index, text, branch.reward, not is_ended, {})


def check_lessons(run_dir: Path, out: Path, max_staleness: int) -> int:
    """Compare the journal of a run with the weights of each version; return the number
    of lessons that were compared.
    """
    tokenizer = HFChatTokenizer(run_dir / "model")

    @functools.cache
    def model_at(version: int) -> Any:
        """Return None for a version of which no checkpoint was written."""
        folder = run_dir / "model"
        if version:
            folder = out / str(version)
            try:
                export_run(run_dir, folder, step=str(version), tell=lambda _: None)
            except ConfigError:
                return None
        return AutoModelForCausalLM.from_pretrained(folder)

    def check(group: Group, batch_version: int) -> int:
        num_lessons = 0
        attempts = [attempt_of(branch, tokenizer) for branch in group.trajectories]
        for branch, own in zip(group.trajectories, attempts, strict=True):
            siblings = [other for other in attempts if other is not own]
            text = lesson(group.prompt, own, siblings)
            found = taught(branch.tokens)[branch.loss_mask]
            if text is None:
                drawn = branch.tokens.behaviour_logprobs[branch.loss_mask]
                assert found.tolist() == drawn.tolist()
                assert VERSION not in branch.metrics
                continue
            version = int(branch.metrics[VERSION])
            assert batch_version - max_staleness <= version <= batch_version
            assert version >= branch.oldest_version
            if (model := model_at(version)) is None:
                continue
            num_lessons += 1
            before = tokenizer.encode_chat([{"role": "user", "content": text}])
            sampled = branch.token_ids[branch.loss_mask].tolist()
            expected = logprobs_after(model, [*before], sampled)
            np.testing.assert_allclose(found, expected, atol=1e-4)
        return num_lessons

    with reading(run_dir / "journal.sqlite") as connection:
        batches = [read_batch(connection, version) for version in range(NUM_STEPS)]
    return sum(
        check(group, batch.version) for batch in batches for group in batch.groups
    )


def config_for(folder: Path, **sections: Any) -> Path:
    values = {
        "teacher": {"policy": True, "prompt": "lessons:lesson"},
        "algorithm": {"distill_weight": 1.0},
        "checkpoint": {"every": 1, "keep_last": NUM_STEPS},
        "journal": {"keep": "all"},
        "trainer": {"num_steps": NUM_STEPS, "learning_rate": 0.003},
    }
    merged = {
        name: {**values.get(name, {}), **sections.get(name, {})}
        for name in {*values, *sections}
    }
    return job_runs.write_config(folder, **merged)


@pytest.mark.timeout(600)
def test_killed_run_is_taught_by_the_weights_of_each_batch(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    run_dir = tmp_path / "run"

    def begin() -> subprocess.Popen[str]:
        return job_runs.start(config, run_dir)

    def is_there() -> bool:
        return len(job_runs.read_lines(run_dir / "metrics.jsonl")) >= 2

    killed_on_the_way(begin, is_there, run_dir)
    ended = job_runs.run(config, run_dir)
    assert ended.returncode == 0, ended.stderr
    assert check_lessons(run_dir, tmp_path / "exports", max_staleness=0) > 0
    last = job_runs.read_lines(run_dir / "metrics.jsonl")[-1]
    assert last["teacher/tokens"] > 0 < last["teacher/untaught"]
    assert last[f"task/{VERSION}"] == NUM_STEPS - 1


@pytest.mark.timeout(600)
def test_interrupted_rollouts_of_adapters_are_taught_by_one_version(
    tmp_path: Path,
) -> None:
    config = config_for(
        tmp_path,
        trainer={"lora": {"rank": 4}},
        buffer={"max_staleness": 2},
        rollout={"slots": 6},
    )
    run_dir = tmp_path / "run"
    ended = job_runs.run(config, run_dir)
    assert ended.returncode == 0, ended.stderr
    assert check_lessons(run_dir, tmp_path / "exports", max_staleness=2) > 0
    lines = job_runs.read_lines(run_dir / "metrics.jsonl")
    assert any(line["sample/interrupted_fraction"] > 0 for line in lines)
