"""Recipes of tinker_cookbook, unmodified, against a real Tinker server, without a network."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker")
pytest.importorskip("tinker_cookbook")
pytest.importorskip("pylatexenc")  # of recipes of math

from tinker_recipes import MODEL, Cookbook, make_place, read_jsonl, steps_of
from tinker_served import served
from tinker_stories import KEYS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extras,
    pytest.mark.extension("tinker"),
    pytest.mark.timeout(600),
]
MOST_KL = 1e-4
"""Between sampler and trainer under the same weights, in nats a token."""
ARITHMETIC: dict[str, Any] = {
    "env": "arithmetic",
    "groups_per_batch": 4,
    "group_size": 4,
    "lora_rank": 8,
    "learning_rate": 1e-3,
    "eval_every": 0,
}


@pytest.fixture(scope="module")
def cookbook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cookbook]:
    place = tmp_path_factory.mktemp("cookbook")
    make_place(place)
    model = [
        "model.scratch=none",
        f"model.path={place / MODEL}",
        f"tinker.names=[{MODEL}]",
    ]
    with served(place / "run", *model) as server:
        yield Cookbook(place, server.url, KEYS["ann"])


@pytest.fixture(scope="module")
def tuned(cookbook: Cookbook) -> Path:
    """Return the logs of three steps of supervised learning."""
    options = {"batch_size": 4, "lora_rank": 8, "learning_rate": 1e-3, "max_steps": 3}
    return cookbook.run("sl_loop", **options)


def check_steps(log_path: Path, numbers: list[int]) -> list[dict[str, float]]:
    """Check that a recipe made these steps, all with finite metrics; return the metrics."""
    steps = steps_of(log_path)
    assert [int(metrics["step"]) for metrics in steps] == numbers
    for metrics in steps:
        assert not [name for name in metrics if not math.isfinite(metrics[name])]
    return steps


def check_kl(metrics: dict[str, float]) -> None:
    """Check that sampler and trainer had the same logprobs."""
    assert abs(metrics["optim/kl_sample_train_v1"]) < MOST_KL
    assert metrics["optim/kl_sample_train_v2"] < MOST_KL


def test_sl_loop_lowers_its_loss(tuned: Path) -> None:
    losses = [metrics["train_mean_nll"] for metrics in check_steps(tuned, [0, 1, 2])]
    assert losses == sorted(losses, reverse=True)


def test_rl_loop_trains_with_its_default_loss(cookbook: Cookbook) -> None:
    options = {"batch_size": 2, "group_size": 8, "lora_rank": 8, "max_tokens": 8}
    steps = check_steps(cookbook.run("rl_loop", **options, max_steps=3), [0, 1, 2])
    assert {metrics["staleness:max"] for metrics in steps} == {0.0}


@pytest.mark.parametrize("loss_fn", ["stable_reinforce", "ppo"])
def test_async_run_reports_the_age_of_its_tokens(
    cookbook: Cookbook, loss_fn: str
) -> None:
    log_path = cookbook.run(
        "math_rl.train",
        log=f"async-{loss_fn}",
        **ARITHMETIC,
        max_steps_off_policy=1,
        loss_fn=loss_fn,
        max_steps=3,
    )
    first, *later = check_steps(log_path, [0, 1, 2])
    check_kl(first)
    # Groups of equal rewards have no token with a weight, so the server may see less.
    for metrics in later:
        assert metrics["staleness:max"] <= metrics["async/staleness_max"]
    assert max(metrics["staleness:max"] for metrics in later) >= 1.0


def test_mini_batches_are_trained_as_they_are_ready(cookbook: Cookbook) -> None:
    log_path = cookbook.run(
        "math_rl.train",
        log="mini-batches",
        **ARITHMETIC,
        **{
            "stream_minibatch_config.groups_per_batch": 4,
            "stream_minibatch_config.num_minibatches": 2,
        },
        loss_fn="importance_sampling",
        max_steps=3,
    )
    for number, metrics in enumerate(check_steps(log_path, [0, 1, 2]), start=1):
        check_kl(metrics)
        assert metrics["num_steps:max"] == number


def test_guess_number_trains_on_turns(cookbook: Cookbook) -> None:
    log_path = cookbook.run(
        "multiplayer_rl.guess_number.train",
        renderer_name="qwen3",
        batch_size=2,
        group_size=2,
        max_tokens=3,
        eval_every=0,
        max_steps=2,
    )
    for metrics in check_steps(log_path, [0, 1]):
        check_kl(metrics)


def test_dpo_prefers_the_chosen_answers(cookbook: Cookbook) -> None:
    options = {"batch_size": 4, "learning_rate": 1e-3, "max_steps": 3}
    first, *_, last = check_steps(
        cookbook.run("preference.dpo.train", **options), [0, 1, 2]
    )
    # Before the first step the model is its reference.
    assert first["dpo_loss"] == pytest.approx(math.log(2))
    assert last["dpo_loss"] < first["dpo_loss"]


def test_distillation_comes_closer_to_a_tuned_teacher(
    cookbook: Cookbook, tuned: Path
) -> None:
    log_path = cookbook.run(
        "distillation.on_policy_distillation",
        teacher_model=MODEL,
        teacher_checkpoint=read_jsonl(tuned / "checkpoints.jsonl")[-1]["sampler_path"],
        groups_per_batch=2,
        group_size=8,
        lora_rank=8,
        learning_rate=3e-3,
        max_tokens=8,
        max_steps=4,
    )
    steps = check_steps(log_path, [0, 1, 2, 3])
    for metrics in steps:
        check_kl(metrics)
    assert steps[-1]["teacher_kl"] < steps[0]["teacher_kl"]


def test_killed_run_resumes_where_it_was_saved(cookbook: Cookbook) -> None:
    options = ARITHMETIC | {"loss_fn": "importance_sampling", "save_every": 1}
    with cookbook.start("math_rl.train", log="killed", **options) as process:
        assert process.stdout is not None
        saved = (line for line in process.stdout if "Saved checkpoints" in line)
        next(saved)
        next(saved)  # so the first one is recorded
        process.kill()
    log_path = cookbook.log_path("killed")
    start = read_jsonl(log_path / "checkpoints.jsonl")[-1]["batch"]
    num_logged = len(steps_of(log_path))
    cookbook.run(
        "math_rl.train",
        log="killed",
        **options,
        behavior_if_log_dir_exists="resume",
        max_steps=start + 2,
    )
    resumed = steps_of(log_path)[num_logged:]
    assert [metrics["step"] for metrics in resumed] == [start, start + 1]
    for metrics in resumed:
        check_kl(metrics)
        # The server counts on from the saved number of optimizer steps.
        assert metrics["num_steps:max"] == metrics["step"] + 1
