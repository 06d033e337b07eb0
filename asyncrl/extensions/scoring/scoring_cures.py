"""Advice of the report to a run that waits for teachers, judges or reward models."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.run_config import key_of
from asyncrl.extensions.scoring.scoring_rules import judge_of, teachers
from asyncrl.observe.pace import Pace


def teacher_cures(pace: Pace) -> Iterator[str]:
    if all(one.base_url for one in teachers(pace.config)):
        yield "Give the server at teacher.base_url more or faster devices."
    else:
        yield pace.faster("placement.teacher")


def model_cures(pace: Pace) -> Iterator[str]:
    yield pace.faster("placement.reward")


def judge_cures(pace: Pace) -> Iterator[str]:
    for name, task in pace.config.tasks.items():
        judge = judge_of(task)
        if judge is None:
            continue
        section = f"{key_of('task', name)}.reward.judge"
        if judge.is_served:
            now = judge.max_concurrent
            yield (
                f"Raise {section}.max_concurrent (now {now}), or give it a faster device "
                f"({pace.now('placement.judge')})."
            )
            continue
        limits = judge.given("requests_per_minute", "tokens_per_minute")
        for key in limits or ["max_concurrent"]:
            now = getattr(judge, key)
            yield f"Raise {section}.{key} (now {now}) if its endpoint allows more."
