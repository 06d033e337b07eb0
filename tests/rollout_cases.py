"""Generators and producers over fakes, as most tests of rollouts need them."""

from __future__ import annotations

from typing import Any

from asyncrl.rollouts.generators import SingleTurn
from asyncrl.rollouts.producers import Producers
from asyncrl.rollouts.rollout import Generator, RolloutRunner
from asyncrl.testing.fakes import FakeScorer, FakeSource, FakeTokenizer
from asyncrl.testing.memory_journal import MemoryJournal


def single_turn(engine: Any, scorer: Any = None, **settings: Any) -> SingleTurn:
    values = {"run_seed": 0, "max_tokens": 50, "max_prompt_tokens": 16, "temperature": 1.0} | settings
    return SingleTurn(engine, FakeTokenizer(), scorer or FakeScorer(), **values)


def make_producers(
    sink: Any,
    spawn: Any,
    generator: Generator,
    *,
    source: Any = None,
    journal: MemoryJournal | None = None,
    timeout_s: float | None = 100.0,
    retries: int = 0,
    **settings: Any,
) -> Producers:
    values = {"group_size": 2, "capacity": 8, "max_failed_groups": 3, "max_hand_backs": 3} | settings
    return Producers(
        sink,
        source or FakeSource(),
        RolloutRunner(generator, timeout_s=timeout_s, retries=retries),
        spawn=spawn,
        journal=journal or MemoryJournal(),
        **values,
    )
