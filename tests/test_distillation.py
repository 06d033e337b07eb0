"""A teacher's logprobs in trajectories and gradients, and a teacher that is silent or
dies.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import job_runs
import numpy as np
import pytest
import torch
import yaml
from crash_fuzz import killed_on_the_way
from engine_processes import SECRET, engine_process
from pydantic import ValidationError
from taught_cases import (
    QUESTION,
    ROLLOUTS,
    VOCABULARY,
    check_journal,
    check_tops,
    make_scoring,
    plain_logprobs,
    taught,
)
from tiny_model import make_tiny_model
from trainer_cases import (
    MakeStep,
    changed,
    gradient_of,
    make_batch,
    naive_logprobs,
    plain_advantages,
    plain_loss,
)
from transformers import AutoModelForCausalLM

from asyncrl.algorithms import losses
from asyncrl.base.errors import ConfigError
from asyncrl.base.http import Caller, Refused
from asyncrl.config import AlgorithmConfig, RolloutConfig, RunConfig
from asyncrl.config.model_config import ScratchConfig
from asyncrl.extensions.scoring.teacher import Teacher
from asyncrl.extensions.scoring.teacher_config import TeacherConfig
from asyncrl.job.check.model_check import find_models
from asyncrl.job.run_export import export_run
from asyncrl.messages.records import Rollout
from asyncrl.messages.tokens import (
    SUPPORT,
    Ragged,
    Tokens,
)
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.trainer.model import policy as policy_module
from asyncrl.trainer.model.random_init import ScratchSpec, make_scratch_model

pytestmark = pytest.mark.extension("scoring")


@pytest.mark.xdist_group("forks")  # one process imports the modules that they fork
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
        "aside_dir": str(tmp_path),
    }

    async def story(url: str) -> list[Rollout]:
        caller = Caller("teacher", url, SECRET)
        scoring = make_scoring(temperature, top_k=4)
        teacher = Teacher(caller, TeacherConfig(path="m"))
        found = list[Rollout]()
        for _ in range(2):
            calls = [
                scoring.annotate(teacher.score, rollout, QUESTION)
                for rollout in ROLLOUTS
            ]
            found += await asyncio.gather(*calls)
            assert (await teacher.sleep()).num_bytes > 0
            await teacher.wake()
        await caller.aclose()
        return found

    with engine_process(
        "embedded",
        spec | {"model_path": str(tiny_model_dir)},
        tmp_path,
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
            check_tops(model, branch, temperature, branch.loss_mask & ~is_cut)


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
    assert gradient_of(step, header, arrays).loss == pytest.approx(
        loss.item(), abs=1e-6
    )
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            step.masters.named[name].grad, parameter.grad, rtol=1e-4, atol=1e-6
        )
    current = naive_logprobs(model, header, arrays, 1.0)
    divergence = float((current - taught(arrays))[sampled].mean())
    assert again.train(header, arrays)["policy/kl_teacher"] == pytest.approx(
        divergence, abs=1e-5
    )


TEMPERATURE = 0.7
LOSSES = [
    ({"distill_loss": "topk_reverse_kl"}, 1.0),
    ({"distill_loss": "jsd", "distill_beta": 0}, 0.0),
    ({"distill_loss": "jsd", "distill_beta": 0.3}, 0.3),
]


def student_logits(model: Any, header: Any, arrays: Tokens) -> torch.Tensor:
    """Logits before all sampled tokens, [M, V]."""
    parts = []
    for entry in header.trajectories:
        ids = torch.from_numpy(arrays.ids[entry.start : entry.end].astype(np.int64))
        mask = torch.from_numpy(arrays.is_sampled[entry.start + 1 : entry.end])
        parts.append(model(input_ids=ids[None]).logits[0, :-1][mask])
    return torch.cat(parts)


def trl_loss(
    student_MV: torch.Tensor, teacher_MV: torch.Tensor, top_k: int, beta: float
) -> torch.Tensor:
    """TRL's loss over the whole vocabulary, or over the top_k and a bucket, mean over
    tokens.
    """
    from trl.experimental.gkd import gkd_trainer
    from trl.experimental.server_distillation import server_distillation_trainer as trl

    if top_k == VOCABULARY:
        dense: torch.Tensor = gkd_trainer.GKDTrainer.generalized_jsd_loss(
            student_MV[None],
            teacher_MV[None],
            beta=beta,
            temperature=TEMPERATURE,
            reduction="sum",
        )
        return dense / len(student_MV)
    student, teacher = (
        torch.log_softmax(logits / TEMPERATURE, -1)
        for logits in (student_MV, teacher_MV)
    )
    chosen = teacher.topk(top_k).indices
    is_valid = torch.ones_like(chosen, dtype=torch.bool)
    (student, mask), (teacher, _) = (
        trl._add_tail_bucket(logprobs.gather(-1, chosen), is_valid)
        for logprobs in (student, teacher)
    )
    sparse: torch.Tensor = trl._jsd_divergence(student, teacher, beta, mask)
    return sparse.sum(-1).mean()


# TRL's import is no warning of ours.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.xdist_group("trl")
@pytest.mark.parametrize(
    ("top_k", "has_plain_head"), [(1, True), (8, False), (VOCABULARY, True)]
)
@pytest.mark.parametrize(("settings", "beta"), LOSSES)
def test_losses_over_likeliest_tokens_equal_trls(
    make_step: MakeStep,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    beta: float,
    top_k: int,
    has_plain_head: bool,
) -> None:
    header, arrays = make_batch()
    num_sampled = int(arrays.is_sampled.sum())
    teacher_MV = 2 * torch.randn(
        num_sampled, VOCABULARY, generator=torch.Generator().manual_seed(3)
    )
    top = torch.log_softmax(teacher_MV / TEMPERATURE, -1).topk(top_k)
    sizes = np.where(arrays.is_sampled, top_k, 0).astype(np.int32)
    arrays = changed(
        arrays,
        teacher_logprobs=np.zeros(len(sizes), np.float32),
        distill_ids=Ragged(top.indices.flatten().numpy().astype(np.int32), sizes),
        distill_logprobs=Ragged(top.values.flatten().numpy(), sizes),
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    student_MV = student_logits(model, header, arrays)
    loss = 0.3 * trl_loss(student_MV, teacher_MV, top_k, beta)
    loss.backward()
    algorithm = {"distill_weight": 0.3, "reward_weight": 0, "distill_top_k": top_k}
    step = make_step(algorithm=algorithm | settings, temperature=TEMPERATURE)
    plan = step.policy.plan._replace(has_plain_head=has_plain_head)
    monkeypatch.setattr(step.policy, "plan", plan)
    # Several slices of the vocabulary.
    monkeypatch.setitem(policy_module.MOST_LOGITS, "cpu", 16)
    monkeypatch.setattr(policy_module, "MIN_SLICE", 20)
    assert gradient_of(step, header, arrays).loss == pytest.approx(
        loss.item(), abs=1e-5
    )
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            step.masters.named[name].grad, parameter.grad, rtol=1e-4, atol=1e-5
        )


def test_forward_kl_of_samples_is_the_gradient_of_the_whole() -> None:
    student_V = torch.randn(6, requires_grad=True)
    teacher_V = torch.log_softmax(torch.randn(6), -1)
    current_V = torch.log_softmax(student_V, -1)
    behaviour_V = current_V.detach()
    advantage_V = losses.distillation(behaviour_V, teacher_V, "forward_kl")
    # The mean over all samples, each as often as the student draws it.
    surrogate = -(behaviour_V.exp() * advantage_V * current_V).sum()
    divergence = (teacher_V.exp() * (teacher_V - current_V)).sum()
    found, expected = (
        torch.autograd.grad(one, student_V, retain_graph=True)[0]
        for one in (surrogate, divergence)
    )
    assert float((teacher_V - behaviour_V).exp().max()) < losses.MOST_RATIO
    torch.testing.assert_close(found, expected)
    rare = losses.distillation(torch.tensor([-30.0]), torch.tensor([0.0]), "forward_kl")
    assert rare.tolist() == [losses.MOST_RATIO - 1]


def test_likeliest_id_that_the_model_lacks_is_refused(make_step: MakeStep) -> None:
    header, arrays = make_batch()
    lists = [[VOCABULARY] if is_sampled else [] for is_sampled in arrays.is_sampled]
    broken = changed(arrays, distill_ids=Ragged.of(lists, "<i4"))
    with pytest.raises(Refused, match=f"{arrays.is_sampled.sum()} invalid tokens"):
        make_step().train(header, broken)


def test_more_likeliest_tokens_than_the_model_has_are_refused(
    tiny_model_dir: Path,
) -> None:
    algorithm = {"distill_weight": 1, "distill_loss": "jsd", "distill_top_k": 1024}
    config = {
        "model": {"path": str(tiny_model_dir)},
        "task": {"files": ["x"], "reward": "math"},
        "teacher": {"path": str(tiny_model_dir)},
        "algorithm": algorithm,
    }
    found = RunConfig.model_validate(config)
    with pytest.raises(ConfigError, match=r"distill_top_k=1024, and the model has \d+"):
        find_models(found, HFChatTokenizer(tiny_model_dir))
    with pytest.raises(ValidationError, match="1024"):
        AlgorithmConfig(**algorithm | {"distill_top_k": 1025})


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


@pytest.mark.extension("vllm")
def test_teacher_with_few_positions_is_refused(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short"
    shutil.copytree(tiny_model_dir, short)
    architecture = json.loads((short / "config.json").read_text())
    architecture["max_position_embeddings"] = 32
    (short / "config.json").write_text(json.dumps(architecture))
    config = RunConfig.model_validate(
        {
            "model": {"path": str(tiny_model_dir)},
            "task": {"files": ["x"], "reward": "math"},
            "algorithm": {"distill_weight": 1},
            "teacher": {"path": str(short)},
        }
    )
    with pytest.raises(ConfigError, match="has max_position_embeddings=32"):
        find_models(config, HFChatTokenizer(tiny_model_dir))
    lengths = {"max_prompt_tokens": 16, "max_tokens": 16}
    exact = config.model_copy(update={"rollout": RolloutConfig(**lengths)})
    assert find_models(exact, HFChatTokenizer(tiny_model_dir)) == {"teacher": short}
    by_vllm = TeacherConfig(path=str(short), engine="vllm")
    served = exact.model_copy(update={"teacher": by_vllm})
    with pytest.raises(
        ConfigError, match="of at most 32 tokens, and its server samples one"
    ):
        find_models(served, HFChatTokenizer(tiny_model_dir))


def test_teacher_may_name_the_only_task() -> None:
    # The name of a single task is '' in a run.
    assert TeacherConfig(path="m", tasks=["sums"]).scores("")


# ---- runs


def divergences(run_dir: Path) -> list[float]:
    return [
        step["policy/kl_teacher"]
        for step in job_runs.read_lines(run_dir / "metrics.jsonl")
    ]


@pytest.mark.slow
def test_each_task_has_its_own_teacher(tmp_path: Path) -> None:
    scratch = ScratchConfig(**job_runs.CONFIG["model"]["scratch"])
    folders = {"words": tmp_path / "a", "letters": tmp_path / "b"}
    for seed, folder in enumerate(folders.values(), 11):
        make_scratch_model(ScratchSpec(out=folder, seed=seed, scratch=scratch))
    config = job_runs.write_config(
        tmp_path,
        algorithm={"distill_weight": 1.0, "distill_loss": "jsd", "distill_top_k": 4},
        trainer={"num_steps": 2},
    )
    values = yaml.safe_load(config.read_text())
    values["task"] = [job_runs.CONFIG["task"] | {"name": name} for name in folders]
    values["teacher"] = [
        {"path": str(folder), "tasks": [name]} for name, folder in folders.items()
    ]
    config.write_text(json.dumps(values))
    run_dir = tmp_path / "run"
    ended = job_runs.run(config, run_dir)
    assert ended.returncode == 0, ended.stderr
    models = {
        name: AutoModelForCausalLM.from_pretrained(folder)
        for name, folder in folders.items()
    }
    num_scored = check_journal(run_dir, models, top_k=4)
    assert len(num_scored) == 2
    last = job_runs.read_lines(run_dir / "metrics.jsonl")[-1]
    assert last["teacher/tokens"] >= num_scored.total(), "of both teachers"


@pytest.mark.slow
def test_model_learns_from_an_earlier_version_of_itself(tmp_path: Path) -> None:
    config = job_runs.write_config(
        tmp_path, trainer={"num_steps": 4}, checkpoint={"every": 2}
    )
    first_run = tmp_path / "first"
    ended = job_runs.run(config, first_run)
    assert ended.returncode == 0, ended.stderr
    earlier = tmp_path / "earlier"
    export_run(first_run, earlier, step="2", tell=lambda text: None)
    values = yaml.safe_load(config.read_text())
    values["model"] = {"path": str(first_run / "final"), "dtype": "float32"}
    del values["checkpoint"]  # would delete tokens of the journal
    values["teacher"] = {"path": str(earlier)}
    values["algorithm"] = {"distill_weight": 1.0, "reward_weight": 0.0}
    values["algorithm"] |= {"distill_loss": "jsd", "distill_top_k": 4}
    again = tmp_path / "again.yaml"
    again.write_text(json.dumps(values))
    ended = job_runs.run(again, tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    model = AutoModelForCausalLM.from_pretrained(earlier)
    assert check_journal(tmp_path / "run", {"": model}, top_k=4).total() > 0
    assert divergences(tmp_path / "run")[0] != 0, "the final weights are others"


@pytest.mark.slow
def test_student_gets_the_same_logprobs_despite_kills(tmp_path: Path) -> None:
    scratch = ScratchConfig(**job_runs.CONFIG["model"]["scratch"])
    make_scratch_model(ScratchSpec(out=tmp_path / "other", seed=11, scratch=scratch))
    config = job_runs.write_config(
        tmp_path,
        teacher={"path": str(tmp_path / "other")},
        algorithm={
            "distill_weight": 1.0,
            "reward_weight": 0.0,
            "distill_loss": "jsd",
            "distill_top_k": 4,
        },
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
