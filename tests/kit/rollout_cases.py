"""Generators and producers over fakes, as most tests of rollouts need them."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

from fakes import FakeScorer, FakeSource, FakeTokenizer, MemoryJournal
from token_cases import completion_of

from asyncrl.base.errors import WouldWait
from asyncrl.buffer.buffer import OnRequeued
from asyncrl.config import EvalConfig
from asyncrl.config.rollout_config import RolloutConfig
from asyncrl.messages.records import (
    Finished,
    Group,
    GroupId,
    Rollout,
    Ticket,
    VersionSpan,
)
from asyncrl.rollouts.evaluation import HeldOut
from asyncrl.rollouts.late_rewards import LateRewards
from asyncrl.rollouts.producers import Producers
from asyncrl.rollouts.recent_failures import RecentFailures
from asyncrl.rollouts.rollout import (
    Generator,
    RolloutRunner,
    Score,
    SingleTurn,
    make_trajectory,
)
from asyncrl.testing.virtual_time import run_virtual


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run the coroutine of a test on the virtual clock."""

    @functools.wraps(test)
    def run(*arguments: Any, **keywords: Any) -> None:
        run_virtual(test(*arguments, **keywords))

    return run


def one_token(sample_index: int, version: int = 0, reward: float = 0.5) -> Any:
    """The answer "z" to "q"."""
    spans = [VersionSpan(0, 1, version)]
    completion = completion_of(
        [ord("z")], spans=spans, finish="stop", prompt=[ord("q")]
    )
    return make_trajectory(sample_index, completion, reward)


class FakeSink:
    """Replaces a Buffer: gives `allow(n)` tickets and records its calls."""

    def __init__(self, num_tickets: int = 0, *, start_version: int = 0) -> None:
        self.start_version = start_version
        self.admitted: list[Ticket] = []
        self.finished: list[Group] = []
        self.failed: list[GroupId] = []
        self.phases: list[tuple[GroupId, str]] = []
        self._tickets, self._changed = num_tickets, asyncio.Event()

    def requeue_to(self, owner: OnRequeued) -> None:
        """It requeues nothing by itself."""

    def allow(self, num_tickets: int) -> None:
        """Allow this number of further groups."""
        self._tickets += num_tickets
        self._changed.set()

    async def wait_open(self) -> None:
        while not self._tickets:
            self._changed.clear()
            await self._changed.wait()

    def admit_nowait(self) -> Ticket:
        """The next ticket, or WouldWait."""
        if not self._tickets:
            raise WouldWait("no ticket is left")
        self._tickets -= 1
        self.admitted.append(Ticket(GroupId(len(self.admitted)), self.start_version))
        return self.admitted[-1]

    def sampled_nowait(
        self,
        group_id: GroupId,
        group: Group | None = None,
        *,
        has_rewards: bool = False,
    ) -> None:
        """Kept in `phases`."""
        self.phases.append((group_id, "teaching" if has_rewards else "scoring"))

    def samples_again_nowait(self, group_id: GroupId) -> None:
        self.phases.append((group_id, "sampling"))

    def finish_nowait(self, group: Group) -> Finished:
        """Kept in `finished`."""
        self.finished.append(group)
        return "ready"

    def fail_nowait(self, group_id: GroupId) -> None:
        """Kept in `failed`."""
        self.failed.append(group_id)


def single_turn(engine: Any, scorer: Any = None, **settings: Any) -> SingleTurn:
    values = {"run_seed": 0, "max_tokens": 50, "max_prompt_tokens": 16} | settings
    return SingleTurn(
        engine, cast(Any, FakeTokenizer()), scorer or FakeScorer(), **values
    )


def scored(rollout: Rollout) -> Score:
    """The score of a rollout that needs none."""

    async def score() -> Rollout:
        return rollout

    return score


def make_held_out(generator: Any, prompts: Sequence[Any], **values: Any) -> HeldOut:
    """An evaluation; `values` are fields of HeldOut, and keys of its config."""
    keys = values.keys() & (EvalConfig.model_fields.keys() - {"name"})
    given = {"samples": 2, "slots": 4, "every": 1, "timeout_s": math.inf}
    config = EvalConfig.model_construct(
        **given | {key: values.pop(key) for key in keys}
    )
    values.setdefault("scorers", FakeScorer())
    return HeldOut(generator=generator, prompts=prompts, config=config, **values)


def make_producers(
    sink: Any,
    spawn: Any,
    generator: Generator,
    *,
    source: Any = None,
    journal: Any = None,
    **settings: Any,
) -> Producers:
    values = {"group_size": 2, "max_failed_groups": 3} | settings
    limits = {
        "timeout_s": values.pop("timeout_s", 100.0),
        "retries": values.pop("retries", 0),
        "failures": values.pop("failures", RecentFailures()),
    }
    others = {"scorers": FakeScorer(), "on_failed": lambda *_: None} | {
        name: values.pop(name)
        for name in ("on_failed", "scorers", "annotations", "columns")
        if name in values
    }
    capacity = values.pop("capacity", 8)
    journal = journal or MemoryJournal()
    late = values.pop("late", None) or LateRewards(journal, timeout_s=100.0)
    return Producers(
        sink=sink,
        source=source or FakeSource(),
        runner=RolloutRunner(generator, **limits),
        spawn=spawn,
        journal=journal,
        late=late,
        on_finished=lambda _: None,
        capacity=capacity,
        config=RolloutConfig(**values),
        **others,
    )
