"""A policy per role: adapters that one run trains, pushes and samples together."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import job_runs
import openai
import pytest
import torch
from adapter_cases import spec, tensors_of
from engine_in_process import (
    answered,
    drawn,
    make_qwen3,
    make_request,
    publish,
    running_engine,
    stage_file,
)
from engine_replies import ask
from gateway_cases import HI, talking
from job_runs import read_lines, run, start, wait_for_steps, write_config
from made_runs import MadeRun
from torch import Tensor
from trainer_cases import MakeStep, make_batch
from transformers import AutoModelForCausalLM

from asyncrl.agents import Outcome
from asyncrl.base.errors import ConfigError
from asyncrl.base.http import Refused
from asyncrl.config.offload_config import POLICY_WEIGHTS
from asyncrl.job import checkpoint_callback
from asyncrl.job.run_export import export_run
from asyncrl.messages.tokens import Tokens
from asyncrl.messages.trainer_api import BatchHeader
from asyncrl.trainer.loss import packing
from asyncrl.trainer.ranks.rank import TrainerRank
from asyncrl.weights.tensor_files import of_role

ROLES: dict[str, Any] = {
    "critic": {"rank": 4, "alpha": 8, "targets": ["q_proj", "o_proj", "lm_head"]},
    "solver": {"rank": 8, "alpha": 16},
}


def batch_of(version: int, *roles: str) -> tuple[BatchHeader, Tokens]:
    """Return four groups: the first half plays the first of `roles`, the rest the last."""
    header, arrays = make_batch(num_groups=4, seed=version, version=version)
    entries = [
        entry.model_copy(update={"adapter": roles[0 if entry.group_index < 2 else -1]})
        for entry in header.trajectories
    ]
    return header.model_copy(update={"trajectories": entries}), arrays


def weights_of(step: TrainerRank, role: str) -> dict[str, Tensor]:
    assert step.adapters is not None
    return {key: one.clone() for key, one in step.adapters.tensors(role).items()}


@pytest.mark.parametrize("epochs", [1, 2])
def test_each_role_trains_as_a_run_of_one_policy(
    make_step: MakeStep, epochs: int
) -> None:
    """The oracle is a run with trainer.lora, whose batches have this role's half only."""
    settings = {"epochs": epochs, "mini_batches": 2}
    together = make_step(trainer={"roles": ROLES, **settings})
    metrics = [together.train(*batch_of(number, *ROLES)) for number in range(3)]
    for place, (role, lora) in enumerate(ROLES.items()):
        alone = make_step(trainer={"lora": lora, **settings}, seed=place)
        for number, numbers in enumerate(metrics):
            halves = packing.cut_where(
                *batch_of(number, *ROLES), lambda one: one.adapter
            )
            header, arrays = halves[place]
            entries = [
                entry.model_copy(update={"adapter": ""})
                for entry in header.trajectories
            ]
            own = alone.train(
                header.model_copy(update={"trajectories": entries}), arrays
            )
            for name in ("policy/loss", "policy/grad_norm", "policy/entropy"):
                assert numbers[f"{name}/{role}"] == own[name]
        found, expected = weights_of(together, role), weights_of(alone, "")
        assert found.keys() == expected.keys()
        for key, tensor in found.items():
            assert torch.equal(tensor, expected[key]), key
    assert together.policy_version == 3


def test_batch_without_a_role_leaves_its_policy(make_step: MakeStep) -> None:
    step = make_step(trainer={"roles": ROLES, "weight_decay": 0.1})
    step.train(*batch_of(0, *ROLES))
    before = weights_of(step, "solver")
    metrics = step.train(*batch_of(1, "critic"))
    assert "policy/loss/solver" not in metrics
    after = weights_of(step, "solver")
    assert all(torch.equal(one, after[key]) for key, one in before.items())
    assert step.policy_version == 2


def test_a_gradient_that_is_not_finite_skips_its_policy_only(
    make_step: MakeStep,
) -> None:
    step = make_step(trainer={"roles": ROLES})
    step.train(*batch_of(0, *ROLES))
    assert step.adapters is not None
    (spoiled, *_) = step.adapters.need(["critic"])[0].weights.values()
    with torch.no_grad():
        spoiled[0, 0] = torch.nan
    before = weights_of(step, "solver")
    metrics = step.train(*batch_of(1, *ROLES))
    assert metrics["trainer/skipped_steps/critic"] == 1
    assert metrics["trainer/skipped_steps/solver"] == 0
    assert step.skipped_in_a_row == {"critic": 1}
    after = weights_of(step, "solver")
    assert any(not torch.equal(one, after[key]) for key, one in before.items())


def test_an_offload_moves_the_weights_of_all_roles(make_step: MakeStep) -> None:
    step = make_step(trainer={"roles": ROLES})
    step.train(*batch_of(0, *ROLES))
    before = {role: weights_of(step, role) for role in ROLES}
    moved = {id(tensor) for tensor in step._tensors_of(POLICY_WEIGHTS)}
    assert step.adapters is not None
    for adapter in step.adapters.need(ROLES):
        assert {id(one) for one in adapter.weights.values()} <= moved
    step.offload(["weights", "optimizer"])
    step.onload(["weights", "optimizer"])
    for role in ROLES:
        found = weights_of(step, role)
        assert all(torch.equal(one, found[key]) for key, one in before[role].items())


def test_checkpoint_restores_all_roles(make_step: MakeStep, tmp_path: Path) -> None:
    step = make_step(trainer={"roles": ROLES})
    step.train(*batch_of(0, *ROLES))
    step.begin_save_state(tmp_path / "state").result()
    step.train(*batch_of(1, *ROLES))
    resumed = make_step(trainer={"roles": ROLES})
    resumed.load_state(tmp_path / "state")
    assert resumed.policy_version == 1
    resumed.train(*batch_of(1, *ROLES))
    for role in ROLES:
        found, expected = weights_of(resumed, role), weights_of(step, role)
        assert all(torch.equal(one, expected[key]) for key, one in found.items())


def test_exports_are_of_one_role(
    make_step: MakeStep, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """By name, at the end of the run, and for the callback of a checkpoint."""
    trainer = {"roles": ROLES}
    section = {"every": 1, "callback": "trackers_for_test:record_roles"}
    agent = {"python": "agents_for_test:solver_and_critic"}
    made = MadeRun(
        tmp_path, tiny_model_dir, trainer=trainer, checkpoint=section, generator=agent
    )
    step = make_step(trainer=trainer)
    step.train(*batch_of(0, *ROLES))
    made.checkpoint(step)
    made.end(step)
    for wanted, said in ((None, "no --role is given"), ("judge", "--role judge")):
        with pytest.raises(ConfigError, match=f"{said}; the roles .* critic, solver"):
            made.export(tmp_path / "none", role=wanted)
    checkpoint_callback.main(made.path, 1)
    exported = {}
    for role in ROLES:
        folder = made.export(tmp_path / role, role=role)
        exported[role] = (folder / "model.safetensors").read_bytes()
        final = made.path / "final" / role / "model.safetensors"
        assert final.read_bytes() == exported[role]
        assert (made.path / f"seen_{role}_1").read_bytes() == exported[role]
    assert exported["critic"] != exported["solver"]


def test_names_say_the_role() -> None:
    assert of_role("", {"w": 1}) == {"w": 1}
    assert of_role("critic", {"w": 1}) == {"critic/w": 1}


# ---- runs


def config_of(folder: Path, **trainer: Any) -> Path:
    targets = ["q_proj", "o_proj", "lm_head"]
    roles = {role: one | {"targets": targets} for role, one in ROLES.items()}
    sections = {"roles": roles, "learning_rate": 5e-3, **trainer}
    agent = {"python": "agents_for_test:solver_and_critic"}
    return write_config(folder, trainer=sections, generator=agent)


def logprobs_of(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: Tensor = model(torch.arange(2, 8)[None]).logits
    return logits.log_softmax(-1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_roles_learn_opposite_rewards_over_a_kill(tmp_path: Path) -> None:
    config = config_of(tmp_path, num_steps=45)
    process = start(config, tmp_path / "run")
    wait_for_steps(tmp_path / "run", 12, process)
    process.kill()
    process.communicate()
    answer = run(config, tmp_path / "run", timeout_s=600.0)
    assert answer.returncode == 0, answer.stderr
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == 45
    assert max(step["policy/logprob_gap_max"] for step in steps) <= 1e-4
    for role in ROLES:
        name = f"task/{role}"
        first, last = (
            sum(step[name] for step in some) for some in (steps[:5], steps[-5:])
        )
        assert last > 2 * first, f"{role} has not learned its letter"
    merged = {}
    for role in ROLES:
        folder = tmp_path / role
        export_run(tmp_path / "run", folder, role=role)
        merged[role] = logprobs_of(folder)
        final = logprobs_of(tmp_path / "run" / "final" / role)
        assert torch.equal(merged[role], final)
    assert (merged["solver"] - merged["critic"]).abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.extension("verifiers")
@pytest.mark.timeout(900)
def test_two_agents_of_verifiers_learn_their_own_rewards(tmp_path: Path) -> None:
    local = {"runtime": {"type": "subprocess"}}
    agents = {"first": local, "second": local}
    form = {"rank": 8, "alpha": 16, "targets": ["q_proj", "o_proj", "lm_head"]}
    scratch = job_runs.CONFIG["model"]["scratch"]
    known = {*scratch["characters"], *"(no prompt) first second verifiers task"}
    config = write_config(
        tmp_path,
        model={"scratch": {**scratch, "characters": "".join(sorted(known))}},
        trainer={
            "roles": dict.fromkeys(agents, form),
            "learning_rate": 5e-3,
            "num_steps": 40,
        },
        task={"verifiers": True, "python": None},
        rollout={"max_prompt_tokens": 64},
        generator={
            "verifiers": "duel_env_for_test",
            "workers": 1,
            "args": {"letters": True, **agents},
        },
    )
    answer = run(config, tmp_path / "run", timeout_s=800.0)
    assert answer.returncode == 0, answer.stderr
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    for role in agents:
        name = f"task/{role}/reward/points"
        first, last = (
            sum(step[name] for step in some) for some in (steps[:5], steps[-5:])
        )
        assert last > 2 * first, f"{role} has not learned its letter"


# ---- calls and engines


def test_a_call_names_its_role_as_the_model() -> None:
    async def story() -> None:
        async with talking(roles=(*ROLES,)) as talk:
            ask = talk.gpt.chat.completions.create
            with pytest.raises(openai.NotFoundError, match="roles are critic, solver"):
                await talk.chat()
            listed = await talk.gpt.models.list()
            assert [one.id for one in listed.data] == [*ROLES]
            messages: list[Any] = [*HI]
            for role in ("solver", "critic"):
                answer = await ask(model=role, messages=messages)
                assert answer.model == role
                messages.append(answer.choices[0].message.model_dump())
                messages.append({"role": "user", "content": "Go on"})
            asked = [request.role for request in talk.world.engine.requests]
            assert asked == ["solver", "critic"]
            rollout = talk.world.session.rollout(0, Outcome(1.0), 1.0)
            # The critic reads the solver's answer, and continues no tokens of it.
            assert [branch.role for branch in rollout] == ["solver", "critic"]
            assert len({branch.num_sampled for branch in rollout}) == 1

    asyncio.run(story())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_adds_the_adapter_of_the_role(tmp_path: Path, dtype: str) -> None:
    folder = make_qwen3(tmp_path / "model")
    ranks = {"critic": 4, "solver": 8}
    forms = {role: spec(rank) for role, rank in ranks.items()}
    tensors = {
        role: {
            key: one.to(getattr(torch, dtype))
            for key, one in tensors_of(folder, rank, rank).items()
        }
        for role, rank in ranks.items()
    }
    sent: dict[str, Tensor] = {}
    for role, own in tensors.items():
        sent |= of_role(role, own)
    roles = [*ROLES] * 2
    fields = {"dtype": dtype, "num_kept": 4}
    with running_engine(folder, roles=forms, **fields) as engine:
        publish(engine, stage_file(sent, 1, tmp_path))
        requests = [
            make_request(f"{role} {number}", role=role)
            for number, role in enumerate(roles)
        ]
        answers = [one.result(timeout=60) for one in ask(engine, requests)]
        # Its prompt is in the cache, computed by another adapter.
        again = [answered(engine, role=role) for role in ROLES]
        with pytest.raises(Refused, match="role 'judge' has no adapter here"):
            answered(engine, role="judge")
    for role, own in tensors.items():
        with running_engine(folder, adapters=forms[role], **fields) as engine:
            publish(engine, stage_file(own, 1, tmp_path))
            alone = drawn(answered(engine))
        together = [
            drawn(one) for one, of in zip(answers, roles, strict=True) if of == role
        ]
        assert together == [alone, alone]
        assert drawn(again[[*ROLES].index(role)]) == alone
