from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config import RunConfig
from asyncrl.observe.run_numbers import Steps, TimeShares
from asyncrl.observe.verdict import Verdict, judge


def config(**sections: Any) -> RunConfig:
    task = {"python": "my.tasks:Letters"}
    return RunConfig.model_validate({"model": {"path": "some/model"}, "task": task, **sections})


def steps(num: int = 20, **parts: float) -> list[dict[str, float]]:
    """Steps of 1 s each; `parts` are perf seconds of one step, other names are given in full with __ as /."""
    metrics = {"perf/step_s": 1.0}
    for name, value in parts.items():
        metrics[name.replace("__", "/") if "__" in name else f"perf/{name}"] = value
    return [{"step": n, "time_s": 10.0 + n, "reward/mean": n / num, **metrics} for n in range(1, num + 1)]


def buffer(max_staleness: int, **more: Any) -> dict[str, Any]:
    return {"buffer": {"max_staleness": max_staleness, **more}}


@pytest.mark.parametrize(
    ("parts", "sections", "bottleneck", "words"),
    [
        (
            {"train_s": 0.93, "wait_generation_s": 0.04, "sample__staleness_mean": 1.5},
            {},
            "training",
            "Training set the pace: the trainer waited 4% of the time (training 93%, waiting for",
        ),
        ({"train_s": 0.95, "sample__staleness_mean": 1.5}, {}, "training", "data of 1.5 versions"),
        (
            {"train_s": 0.3, "wait_generation_s": 0.65, "rollout__inflight": 64},
            {},
            "generation",
            "Generation held the run back: the trainer waited 65% of the time",
        ),
        (
            {"train_s": 0.3, "wait_generation_s": 0.65, "rollout__inflight": 64},
            {},
            "generation",
            "Knob: raise rollout.slots (now 64) or rollout.num_engines (now 1)",
        ),
        (
            {"train_s": 0.3, "wait_generation_s": 0.65, "rollout__inflight": 20},
            {},
            "generation",
            "Knob: raise rollout.num_engines (now 1): only 20 of 64 slots were used",
        ),
        ({"train_s": 0.4, "wait_generation_s": 0.6}, buffer(0), "generation", "Knob: buffer.max_staleness=0"),
        ({"train_s": 0.4, "wait_publishing_s": 0.6}, buffer(0), "publishing", "Knob: buffer.max_staleness=0"),
        (
            {"train_s": 0.4, "wait_generation_s": 0.6},
            buffer(4, look_ahead=1),
            "generation",
            "buffer.look_ahead=1",
        ),
        (
            {"train_s": 0.4, "wait_publishing_s": 0.6, "weight_sync_s": 2.5},
            {},
            "publishing",
            "a push takes 2.5 s",
        ),
        (
            {"train_s": 0.4, "wait_publishing_s": 0.6},
            {"weight_sync": {"interrupt": "wait"}},
            "publishing",
            "weight_sync.interrupt=wait drains",
        ),
        (
            {"train_s": 0.4, "wait_generation_s": 0.1, "wait_stragglers_s": 0.5},
            buffer(2),
            "stragglers",
            "or raise buffer.max_staleness (now 2) to 4",
        ),
        (
            {"train_s": 0.4, "wait_generation_s": 0.1, "wait_stragglers_s": 0.5},
            buffer(2),
            "stragglers",
            "on_overdue=wait cost 10.0 s (50.0%)",
        ),
        (
            {"train_s": 0.2, "wait_generation_s": 0.2, "handover_s": 0.5},
            buffer(0),
            "turns",
            "50% of the time went into handovers",
        ),
        ({"train_s": 0.82, "wait_generation_s": 0.18}, {}, "balanced", "none stands out"),
        ({"train_s": 0.3, "wait_generation_s": 0.1}, {}, "other", "60% of the time went into neither"),
        (
            {"train_s": 0.95, "tokens__trained": 90, "tokens__sampled": 100, "rollout__dropped": 3},
            buffer(2, on_overdue="mask"),
            "training",
            "on_overdue=mask: 10.0% of the tokens were masked, 3 groups generated again.",
        ),
        (
            {"train_s": 0.95, "rollout__dropped": 1},
            buffer(2, on_overdue="drop"),
            "training",
            "on_overdue=drop: 1 group generated again.",
        ),
        (
            {"train_s": 0.95, "rollout__given_up": 5},
            {"rollout": {"max_hand_backs": 2}},
            "training",
            "5 prompts given up (rollout.max_hand_backs=2)",
        ),
        (
            {"train_s": 0.95, "rollout__filtered": 20, "rollout__filtered_tokens": 2000},
            {**buffer(1, filter="equal_rewards"), "trainer": {"num_groups": 4}},
            "training",
            "replaced 20 groups (20.0% of those that finished; 2000 tokens)",
        ),
        (
            {"train_s": 0.95, "rollout__filtered": 100},
            {**buffer(1, filter="equal_rewards"), "trainer": {"num_groups": 4}},
            "training",
            "Prompts of another difficulty would teach more.",
        ),
        (
            {"train_s": 0.95, "trainer__skipped_steps": 1.0},
            {},
            "training",
            "not finite in 20 optimizer steps (batches 1, 2, 3, 4, 5, ..., counted from 0)",
        ),
    ],
)
def test_a_verdict_names_what_held_the_run_back_its_knob_and_what_was_lost(
    parts: dict[str, float], sections: dict[str, Any], bottleneck: str, words: str
) -> None:
    verdict = judge(Steps(steps(**parts)), config(**sections))
    assert verdict.bottleneck == bottleneck
    assert words in " ".join(verdict.sentences)
    assert Verdict.from_dict(verdict.as_dict()) == verdict


@pytest.mark.parametrize("choice", ["wait", "mask", "drop"])
def test_nothing_lost_means_nothing_said_about_it(choice: str) -> None:
    run = steps(train_s=0.95, rollout__given_up=0, rollout__filtered=1, trainer__skipped_steps=0.0)
    assert len(judge(Steps(run), config(**buffer(1, on_overdue=choice))).sentences) == 2


def test_the_reward_is_that_of_the_first_five_steps_and_of_the_last_tenth() -> None:
    verdict = judge(Steps(steps(num=50, train_s=1.0)), config())
    assert (verdict.reward_first, verdict.reward_last) == (pytest.approx(3 / 50), pytest.approx(48 / 50))
    assert (verdict.num_steps, verdict.wall_s) == (50, 60.0)
    one = judge(Steps(steps(num=1, train_s=1.0)), config())
    assert one.reward_first == one.reward_last == 1.0


def test_shares_add_up_to_one_even_where_parts_exceed_the_whole() -> None:
    shares = TimeShares.of(Steps(steps(train_s=0.9, wait_generation_s=0.3)).total)
    assert shares.training + shares.waiting + shares.other == pytest.approx(1.0)
    assert shares.training == pytest.approx(0.75)
    assert TimeShares.of(Steps([{"step": 1}]).total).other == 1.0


def test_a_step_that_was_taken_again_takes_the_place_of_all_from_there_on() -> None:
    run = Steps([{"step": step, "reward/mean": step} for step in (0, 1, 2, 1)])
    assert (len(run), run.values("reward/mean"), run.last) == (2, [0.0, 1.0], {"step": 1, "reward/mean": 1})
