"""A teacher's logprobs in trajectories and gradients, and a teacher that is silent or
dies.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import job_runs
import numpy as np
import pytest
import torch
from crash_fuzz import killed_on_the_way
from engine_processes import SECRET, engine_process
from tiny_model import make_tiny_model
from token_cases import trajectory_of
from trainer_cases import (
    MakeStep,
    changed,
    make_batch,
    naive_logprobs,
    plain_advantages,
    plain_loss,
)
from transformers import AutoModelForCausalLM

from asyncrl.base.errors import ConfigError
from asyncrl.base.http import Caller
from asyncrl.config import RunConfig, ScratchConfig
from asyncrl.engines.teacher import Teacher
from asyncrl.job.check import find_models
from asyncrl.messages.records import Rollout, Trajectory, VersionSpan
from asyncrl.messages.tokens import SUPPORT, TEACHER, Ragged, Tokens
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.trainer.random_init import ScratchSpec, make_scratch_model

# one process imports the modules that they fork
pytestmark = pytest.mark.xdist_group("forks")
VOCABULARY = 52


def make_branch(num_tokens: int, sampled: list[slice], seed: int = 0) -> Trajectory:
    """Make random tokens and mark these as sampled."""
    mask = np.zeros(num_tokens, np.bool_)
    for part in sampled:
        mask[part] = True
    ids = (
        np.random.default_rng(seed).integers(0, VOCABULARY, num_tokens).astype(np.int32)
    )
    spans = tuple(VersionSpan(part.start, part.stop, 0) for part in sampled)
    return trajectory_of(0, ids, mask, np.where(mask, -1, 0), spans)


def cut_at(branch: Trajectory, place: int) -> Trajectory:
    """Draw this token from a support: itself."""
    lists = [[] for _ in branch.token_ids]
    lists[place] = [int(branch.token_ids[place])]
    columns = {SUPPORT: Ragged.of(lists, "<i4")}
    return replace(branch, tokens=branch.tokens.with_columns(columns))


ROLLOUTS: list[Rollout] = [
    (make_branch(6, [slice(3, 6)]),),
    (cut_at(make_branch(9, [slice(3, 8)], seed=4), 5),),
    (make_branch(300, [slice(1, 300)], seed=1),),
    (
        make_branch(40, [slice(5, 9), slice(20, 33)], seed=2),
        make_branch(12, [slice(11, 12)], seed=3),
    ),
    # Its second branch has only untrained calls, such as greedy ones.
    (make_branch(20, [slice(5, 9)], seed=5), make_branch(8, [], seed=6)),
]


def taught(tokens: Tokens) -> np.ndarray:
    values: np.ndarray = tokens.columns[TEACHER]
    return values


def plain_logprobs(model: Any, branch: Trajectory, temperature: float) -> np.ndarray:
    """Return the logprobs of all tokens but the first by one forward."""
    ids = torch.from_numpy(branch.token_ids.astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0].numpy()


def test_teachers_logprobs_equal_a_plain_forwards(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    model, temperature = AutoModelForCausalLM.from_pretrained(tiny_model_dir), 0.7
    spec = {
        "name": "teacher",
        "slots": 1,
        "score_slots": 3,
        "max_length": 300,
        "device": "cpu",
    }

    async def story(url: str) -> list[Rollout]:
        caller = Caller("teacher", url, SECRET)
        teacher = Teacher(caller, temperature=temperature, on_lost=None)
        found = await asyncio.gather(
            *(teacher.judge(rollout) for rollout in [*ROLLOUTS, *ROLLOUTS])
        )
        await caller.aclose()
        return found

    with engine_process(
        "embedded", spec | {"model_path": str(tiny_model_dir)}, tmp_path
    ) as server:
        found = asyncio.run(story(server.url))
    for rollout, again in zip(
        found[: len(ROLLOUTS)], found[len(ROLLOUTS) :], strict=True
    ):
        for branch, same in zip(rollout, again, strict=True):
            assert np.array_equal(taught(branch.tokens), taught(same.tokens)), (
                "in every batch"
            )
            expected = np.concatenate(
                [[0.0], plain_logprobs(model, branch, temperature)]
            )
            expected[~branch.loss_mask] = 0.0
            # No term: the teacher would have drawn from other tokens.
            is_cut = branch.tokens.column(SUPPORT).sizes > 0
            expected[is_cut] = branch.tokens.behaviour_logprobs[is_cut]
            np.testing.assert_allclose(taught(branch.tokens), expected, atol=2e-5)


def test_gradient_follows_reward_and_reverse_kl(
    make_step: MakeStep, tiny_model_dir: Path
) -> None:
    header, arrays = make_batch()
    sampled = arrays.is_sampled
    draw = np.random.default_rng(1).normal(-3.0, 2.0, len(sampled)).clip(max=0)
    arrays = changed(
        arrays, teacher_logprobs=np.where(sampled, draw, 0).astype(np.float32)
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    distance = arrays.behaviour_logprobs - taught(arrays)
    advantages = 0.5 * plain_advantages(header, len(sampled)) - 0.3 * distance
    loss = plain_loss(model, header, arrays, advantages, aggregate="token")
    loss.backward()
    weights = {"distill_weight": 0.3, "reward_weight": 0.5}
    step, again = (make_step(algorithm=weights) for _ in range(2))
    metrics = step.forward_backward(header, arrays)
    assert metrics["policy/loss"] == pytest.approx(loss.item(), abs=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            step.masters.named[name].grad, parameter.grad, rtol=1e-4, atol=1e-6
        )
    current = naive_logprobs(model, header, arrays, 1.0)
    divergence = float((current - taught(arrays))[sampled].mean())
    assert again.train(header, arrays)["policy/kl_teacher"] == pytest.approx(
        divergence, abs=1e-5
    )


def test_teacher_of_other_tokens_is_refused(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {
        "model": {"path": str(tiny_model_dir)},
        "task": {"files": ["x"], "reward": "math"},
    }
    config |= {"algorithm": {"distill_weight": 1}, "teacher": {"path": str(other)}}
    ours = HFChatTokenizer(tiny_model_dir)
    with pytest.raises(
        ConfigError, match=r"teacher.path=.*: id \d+ is 'b' in the teacher, 'a' in"
    ):
        find_models(RunConfig.model_validate(config), ours)


# ---- runs


def divergences(run_dir: Path) -> list[float]:
    return [
        step["policy/kl_teacher"]
        for step in job_runs.read_lines(run_dir / "metrics.jsonl")
    ]


@pytest.mark.slow
def test_student_gets_the_same_logprobs_despite_kills(tmp_path: Path) -> None:
    scratch = ScratchConfig(**job_runs.CONFIG["model"]["scratch"])
    make_scratch_model(ScratchSpec(out=tmp_path / "other", seed=11, scratch=scratch))
    config = job_runs.write_config(
        tmp_path,
        teacher={"path": str(tmp_path / "other")},
        algorithm={"distill_weight": 1.0, "reward_weight": 0.0},
        trainer={"num_steps": 16, "learning_rate": 0.003},
        checkpoint={"every": 4},
    )
    run_dir = tmp_path / "run"

    def without_its_teacher() -> subprocess.Popen[str]:
        process = job_runs.start(config, run_dir)
        job_runs.wait_for_steps(run_dir, 1, process)
        (teacher,) = job_runs.children_of(process, "teacher")
        teacher.kill()
        return process

    killed_on_the_way(
        without_its_teacher, lambda: len(divergences(run_dir)) >= 6, run_dir
    )
    before = divergences(run_dir)
    ended = job_runs.run(config, run_dir)
    assert ended.returncode == 0, ended.stderr
    found = divergences(run_dir)
    assert len(found) == 16
    assert found[: len(before)] == before, "what the teacher said is in the journal"
    events = [
        what for what, _ in job_runs.events(run_dir) if what.startswith("teacher")
    ]
    assert events == ["teacher lost", "teacher up"]
