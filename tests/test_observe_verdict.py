from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from asyncrl.config import RunConfig
from asyncrl.observe import verdict
from asyncrl.observe.run_numbers import OverdueNumbers, Steps, time_shares
from asyncrl.observe.verdict import Verdict


def config(**sections: Any) -> RunConfig:
    task = {"python": "my.tasks:Letters"}
    return RunConfig.model_validate({"model": {"path": "some/model"}, "task": task, **sections})


def steps(num: int = 20, **parts: float) -> list[dict[str, float]]:
    """Steps of 1 s each; `parts` are perf seconds of one step, other names are given in full with dots as
    slashes.
    """
    metrics = {"perf/step_s": 1.0}
    for name, value in parts.items():
        metrics[name.replace("__", "/") if "__" in name else f"perf/{name}"] = value
    return [{"step": n, "time_s": 10.0 + n, "reward/mean": n / num, **metrics} for n in range(1, num + 1)]


def judge(
    lines: Sequence[Mapping[str, float]], config: RunConfig, overdue: OverdueNumbers | None = None
) -> Verdict:
    return verdict.judge(Steps(lines), config, overdue)


def words(verdict: Any) -> str:
    return " ".join(verdict.sentences)


def test_a_trainer_that_hardly_waits_sets_the_pace() -> None:
    verdict = judge(steps(train_s=0.93, wait_generation_s=0.04, sample__staleness_mean=1.5), config())
    assert verdict.bottleneck == "training"
    assert "Training set the pace: the trainer waited only 4% of the time (training 93%" in words(verdict)
    assert "trainer.threads=auto" in words(verdict)
    assert "1.5 versions old" in words(verdict)


def test_a_trainer_that_waits_for_rollouts_is_told_whether_slots_or_engines_are_short() -> None:
    full = judge(
        steps(train_s=0.3, wait_generation_s=0.65, rollout__inflight=64), config(rollout={"slots": 64})
    )
    assert full.bottleneck == "generation"
    assert "Generation held the run back: the trainer waited 65%" in words(full)
    assert "64 rollouts were in flight on average in 64 slots, all full" in words(full)
    free = judge(
        steps(train_s=0.3, wait_generation_s=0.65, rollout__inflight=20), config(rollout={"slots": 64})
    )
    assert "so more slots would not help" in words(free)
    unknown = judge(steps(train_s=0.3, wait_generation_s=0.65), config())
    assert "rollout.num_engines (now 1) or rollout.slots (now 64)" in words(unknown)


def test_at_staleness_0_the_knob_is_max_staleness() -> None:
    settings = config(buffer={"max_staleness": 0})
    assert "buffer.max_staleness=0 makes trainer and engines take turns" in words(
        judge(steps(train_s=0.4, wait_generation_s=0.6), settings)
    )
    assert "1 or more hides it" in words(judge(steps(train_s=0.4, wait_publishing_s=0.6), settings))


def test_handovers_are_a_share_of_their_own_and_longer_turns_the_knob() -> None:
    verdict = judge(
        steps(train_s=0.2, wait_generation_s=0.2, handover_s=0.5), config(buffer={"max_staleness": 0})
    )
    assert verdict.bottleneck == "turns"
    assert "Taking turns held the run back: 50% of the time went into handovers" in words(verdict)
    assert "taking turns 50%, other 10%" in words(verdict)
    assert "raise trainer.num_groups (now" in words(verdict)
    assert verdict.from_dict(verdict.as_dict()) == verdict
    assert "taking turns" not in words(judge(steps(train_s=0.9), config()))


def test_a_short_look_ahead_is_the_knob_before_more_engines() -> None:
    settings = config(buffer={"max_staleness": 4, "look_ahead": 1})
    assert "buffer.look_ahead=1" in words(judge(steps(train_s=0.4, wait_generation_s=0.6), settings))
    assert "buffer.look_ahead=1" in words(judge(steps(train_s=0.4, wait_publishing_s=0.6), settings))


def test_stragglers_are_named_with_their_price_and_the_other_choices() -> None:
    verdict = judge(
        steps(train_s=0.4, wait_generation_s=0.1, wait_stragglers_s=0.5), config(buffer={"max_staleness": 2})
    )
    assert verdict.bottleneck == "stragglers"
    assert "buffer.on_overdue=mask never waits" in words(verdict)
    assert "raise buffer.max_staleness (now 2) to 4" in words(verdict)
    assert "on_overdue=wait cost 10.0 s (50.0%) in 20 of 20 batches" in words(verdict)
    numbers = OverdueNumbers(
        straggler_s=10.0, num_straggler_waits=20, num_waited_groups=31, waited_fraction=0.044
    )
    counted = judge(steps(train_s=0.4, wait_stragglers_s=0.5), config(buffer={"max_staleness": 2}), numbers)
    assert (
        "the gradient of about 4.4% of the tokens; drop would have generated about 31 groups again"
        in words(counted)
    )


def test_publishing_is_named_with_the_time_of_a_push() -> None:
    settings = config(weight_sync={"interrupt": "wait"})
    verdict = judge(steps(train_s=0.4, wait_publishing_s=0.6, weight_sync_s=2.5), settings)
    assert verdict.bottleneck == "publishing"
    assert "pushes (2.5 s on average)" in words(verdict)
    assert "weight_sync.interrupt=wait drains the engines" in words(verdict)


def test_small_waits_are_balanced_and_unnamed_time_is_other() -> None:
    assert judge(steps(train_s=0.82, wait_generation_s=0.18), config()).bottleneck == "balanced"
    verdict = judge(steps(train_s=0.3, wait_generation_s=0.1), config())
    assert verdict.bottleneck == "other"
    assert "60% of the time went into neither" in words(verdict)


def test_what_masking_and_dropping_did_is_said_with_their_alternatives() -> None:
    busy = steps(train_s=0.95, tokens__trained=90, tokens__sampled=100, rollout__dropped=3)
    masked = judge(busy, config(buffer={"max_staleness": 2, "on_overdue": "mask"}))
    assert "on_overdue=mask took the gradient of 10.0% of the tokens; 3 groups were generated again" in words(
        masked
    )
    numbers = OverdueNumbers(masked_fraction=0.02, num_masked_groups=7, num_groups=160)
    given = judge(busy, config(buffer={"max_staleness": 2, "on_overdue": "mask"}), numbers)
    assert "2.0% of the tokens in 7 of 160 groups" in words(given)
    dropped = judge(
        busy,
        config(buffer={"max_staleness": 2, "on_overdue": "drop"}),
        OverdueNumbers(num_handed_back=40, num_groups=160),
    )
    assert "on_overdue=drop: 40 groups were generated again (20.0% of what was started)" in words(dropped)


def test_prompts_that_were_given_up_are_told_with_the_key_that_bounds_their_tries() -> None:
    verdict = judge(steps(train_s=0.95, rollout__given_up=5), config(rollout={"max_hand_backs": 2}))
    assert (
        "5 prompts were given up, because their groups failed or became too old 3 times "
        "(rollout.max_hand_backs=2)" in words(verdict)
    )
    assert "given up" not in words(judge(steps(train_s=0.95, rollout__given_up=0), config()))


def test_nothing_overdue_means_nothing_said_about_it() -> None:
    for choice in ("wait", "mask", "drop"):
        verdict = judge(steps(train_s=0.95), config(buffer={"on_overdue": choice}))
        assert "on_overdue" not in words(verdict)


def test_the_reward_is_that_of_the_first_five_steps_and_of_the_last_tenth() -> None:
    verdict = judge(steps(num=50, train_s=1.0), config())
    assert verdict.reward_first == pytest.approx(3 / 50)
    assert verdict.reward_last == pytest.approx(48 / 50)
    assert (verdict.num_steps, verdict.wall_s) == (50, 60.0)
    one = judge(steps(num=1, train_s=1.0), config())
    assert one.reward_first == one.reward_last == 1.0


def test_shares_add_up_to_one_even_where_parts_exceed_the_whole() -> None:
    shares = time_shares(Steps(steps(train_s=0.9, wait_generation_s=0.3)))
    assert shares.training + shares.waiting + shares.other == pytest.approx(1.0)
    assert shares.training == pytest.approx(0.75)
    assert time_shares(Steps([{"step": 1}])).other == 1.0


def test_no_steps_give_no_verdict() -> None:
    with pytest.raises(ValueError, match="no steps"):
        judge([], config())


def test_many_filtered_groups_are_told_with_the_trend_and_few_are_not() -> None:
    settings = config(buffer={"filter": "equal_rewards"}, trainer={"num_groups": 8})
    run = [
        step | {"rollout/filtered": 2 * n, "rollout/filtered_tokens": 100 * n}
        for n, step in enumerate(steps(train_s=0.95), start=1)
    ]
    said = words(judge(run, settings))
    assert (
        "buffer.filter=equal_rewards replaced 40 groups (20.0% of those that finished, 20.0% in the last 2 "
        "steps; 2000 tokens)" in said
    )
    assert "prompts of another difficulty" not in said
    run[-1] |= {"rollout/filtered": 76}
    said = words(judge(run, settings))
    assert "replaced 76 groups (32.2% of those that finished, 71.4% in the last 2 steps" in said
    assert "Most of what is sampled teaches nothing: prompts of another difficulty" in said
    assert "buffer.filter" not in words(
        judge([step | {"rollout/filtered": 4} for step in steps(train_s=0.95)], settings)
    )
    assert "buffer.filter" not in words(judge(steps(train_s=0.95), config()))


def test_a_counter_is_that_of_the_lines_that_have_it() -> None:
    run = Steps([{"n": 2.0}, {}, {"n": 5.0}, {"n": 6.0}, {}], names=("n", "m"))
    assert run.counted("n") == 6.0
    assert [run.counted("n", last=num) for num in (1, 2, 3, 5, 9)] == [0.0, 1.0, 4.0, 6.0, 6.0]
    assert run.counted("m") == run.counted("m", last=2) == 0.0


def test_a_step_that_was_taken_again_takes_the_place_of_all_from_there_on() -> None:
    run = Steps([{"step": step, "reward/mean": step} for step in (0, 1, 2, 1)])
    assert (len(run), run.values("reward/mean"), run.last) == (2, [0.0, 1.0], {"step": 1, "reward/mean": 1})


def test_one_of_a_kind_is_told_in_the_singular() -> None:
    skipped = [
        step | {"trainer/skipped_steps": float(step["step"] == 4)}
        for step in steps(train_s=0.9, rollout__given_up=1)
    ]
    masks = config(buffer={"max_staleness": 2, "on_overdue": "mask"}, rollout={"max_hand_backs": 0})
    told = words(judge(skipped, masks, OverdueNumbers(masked_fraction=0.1, num_handed_back=1)))
    assert "not finite in 1 optimizer step (of batch 4, counted from 0)" in told
    assert "1 prompt was given up, because its groups failed or became too old 1 time (" in told
    assert "1 group was generated again" in told
    filtered = steps(num=1, train_s=0.9, rollout__filtered=1, rollout__filtered_tokens=1)
    assert re.search(
        r"replaced 1 group \(.* in the last 1 step; 1 token\)",
        words(judge(filtered, config(buffer={"filter": "equal_rewards"}))),
    )


def test_steps_that_were_skipped_are_counted_and_their_batches_named() -> None:
    run = steps(num=20, train_s=0.9)
    assert "Skipped" not in words(judge(run, config()))
    verdict = judge(
        [step | {"trainer/skipped_steps": float(step["step"] in (4, 7))} for step in run], config()
    )
    assert (
        "Skipped: loss or gradient was not finite in 2 optimizer steps (of batches 4, 7, counted from 0), so "
        "the weights stayed" in words(verdict)
    )
    assert verdict.num_skipped_steps == 2
    many = judge([step | {"trainer/skipped_steps": 1.0} for step in run], config())
    assert "in 20 optimizer steps (of batches 1, 2, 3, 4, 5, ..., counted from 0)" in words(many)
