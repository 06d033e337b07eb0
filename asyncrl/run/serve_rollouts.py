"""Rollouts of `asyncrl serve gateway`: those of a person who tries an agent by hand, and those of the
config's own generator on some prompts. Trains nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rich.table import Table

from asyncrl.agents.endpoint.gateway import Gateway
from asyncrl.agents.endpoint.sessions import GatewaySession
from asyncrl.agents.endpoint.work_routes import RolloutQueue
from asyncrl.errors import RolloutFailure, RoomError
from asyncrl.messages.records import GroupId, Outcome, Prompt, Rollout
from asyncrl.rollouts.producers import Spawn
from asyncrl.rollouts.recording import RolloutRecorder, spans_of
from asyncrl.rollouts.rollout import FailedRollout, Generator, RolloutAttempt, RolloutRunner, Slots
from asyncrl.run.life import Life


class PeoplesKey:
    """The keys of a person who tries an agent by hand: calls with one, an outcome with the other, then calls
    again.

    Life:       open -> calls -> an outcome is posted: what was sampled since the last one is a rollout, and
                is recorded -> a new session -> ... -> close: what has no outcome yet is recorded without a
                reward.
    Invariant:  a completion is in one rollout: the calls that are in hand when an outcome comes are answered
                410 and are in none.
    """

    def __init__(self, gateway: Gateway, queue: RolloutQueue, recorder: RolloutRecorder, life: Life) -> None:
        self.key, self.outcome_key = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self._gateway, self._recorder, self._life = gateway, recorder, life
        # Drawn, so that the next time does not draw the same tokens.
        self._name = f"people/{secrets.token_hex(4)}"
        self._num_rollouts = 0
        self._session = self._open()
        queue.on_outcome(self.outcome_key, self._take, sampling_key=self.key)

    def close(self) -> None:
        """No calls any more; what was begun is recorded. Raises RoomError if that cannot be written."""
        self._session.end_nowait("the gateway was ended")
        try:
            rollout = self._session.rollout(0, Outcome(), 0.0)
        except RolloutFailure:  # nothing was sampled
            return
        self._keep(self._session, None, rollout)

    def _open(self) -> GatewaySession:
        number = self._num_rollouts
        return self._gateway.open_for_person_nowait(
            self.key, f"{self._name}/{number}", prompt_id=self._name, sample_index=number
        )

    def _take(self, outcome: Outcome) -> None:
        """An outcome was posted. Raises RolloutFailure, and nothing has changed, if it does not fit what was
        sampled.
        """
        parts = [*outcome.turn_rewards.values(), *outcome.branch_rewards.values()]
        reward = sum(parts) / len(parts) if outcome.reward is None and parts else outcome.reward
        session = self._session
        rollout = session.rollout(0, outcome, reward or 0.0)
        session.end_nowait("an outcome was posted: it ended this rollout, and the key goes on with a new one")
        self._num_rollouts += 1
        self._session = self._open()
        try:
            self._keep(session, reward, rollout)
        except RoomError as error:
            self._life.on_broken(error)
            raise RolloutFailure(f"this rollout cannot be recorded: {error.what}") from error

    def _keep(self, session: GatewaySession, reward: float | None, rollout: Rollout) -> None:
        messages = tuple(session.opening or ())
        digest = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:16]
        # The same opening words are the same prompt: a group to be replayed.
        prompt = Prompt(f"people/{digest}", messages)
        index = self._recorder.next_sample(prompt.prompt_id)
        numbered = tuple(replace(branch, sample_index=index) for branch in rollout)
        self._recorder.record(prompt, reward, numbered)
        told = "none" if reward is None else f"{reward:.4g}"
        self._life.say(f"rollout {session.sample_index}: reward {told}, {shape_text(rollout)}")


def num_turns(rollout: Rollout) -> int:
    """Completions: runs of sampled tokens."""
    return sum(len(spans_of(branch.loss_mask)) for branch in rollout)


def num_tokens(rollout: Rollout) -> int:
    """Sampled ones."""
    return sum(branch.num_sampled for branch in rollout)


def shape_text(rollout: Rollout) -> str:
    """Turns, tokens, and branches where there is more than one."""
    turns = num_turns(rollout)
    text = f"{turns} turn{'s' if turns != 1 else ''}, {num_tokens(rollout)} sampled tokens"
    return text if len(rollout) == 1 else f"{text}, {len(rollout)} branches"


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of one rollout; `number` is that of its prompt, from 0."""

    number: int
    prompt: Prompt
    sample_index: int
    attempt: int
    outcome: Rollout | FailedRollout

    @property
    def has_failed(self) -> bool:
        """At each attempt."""
        return isinstance(self.outcome, FailedRollout)

    @property
    def rollout(self) -> Rollout:
        """Of one that has not failed."""
        assert not isinstance(self.outcome, FailedRollout)
        return self.outcome

    @property
    def reward(self) -> float:
        """Of one that has not failed."""
        return self.rollout[0].reward

    def line(self) -> str:
        """In words."""
        name = f"{self.prompt.prompt_id} sample {self.sample_index}"
        if isinstance(self.outcome, FailedRollout):
            return f"{name} {self.outcome.how}: {self.outcome.failure.what}"
        return f"{name}: reward {self.reward:.4g}, {shape_text(self.outcome)}"


class InOrder:
    """Records what was tried in the order of prompts and samples, whatever is done first: a recording would
    begin with what is short, else.
    """

    def __init__(self, group_size: int, recorder: RolloutRecorder) -> None:
        self._group_size, self._recorder = group_size, recorder
        self._held: dict[int, Tried] = {}
        self._next = 0

    def take(self, tried: Tried) -> None:
        """One is done: it is recorded as soon as all before it are done."""
        self._held[tried.number * self._group_size + tried.sample_index] = tried
        while (found := self._held.pop(self._next, None)) is not None:
            self._next += 1
            self._record(found)

    def close(self) -> None:
        """Nothing comes any more: record the rest."""
        for place in sorted(self._held):
            self._record(self._held.pop(place))

    def _record(self, tried: Tried) -> None:
        if not tried.has_failed:
            self._recorder.record(tried.prompt, tried.reward, tried.rollout)


class _Counting:
    """A Generator that remembers which attempt a rollout came from."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.attempts: dict[tuple[int, int], int] = {}

    async def run_attempt(self, attempt: RolloutAttempt) -> Rollout:
        self.attempts[attempt.group_id, attempt.sample_index] = attempt.attempt
        return await self._generator.run_attempt(attempt)


async def try_rollouts(
    generator: Generator,
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    capacity: int,
    timeout_s: float | None,
    retries: int,
    on_tried: Callable[[Tried], None],
    spawn: Spawn,
) -> list[Tried]:
    """`group_size` rollouts of each prompt, `capacity` at once; `on_tried` is told of each as it ends. A
    RoomError ends `spawn`'s group.
    """
    counting, slots, all_tried = _Counting(generator), Slots(capacity), list[Tried]()
    runner = RolloutRunner(counting, timeout_s=timeout_s, retries=retries)

    async def one(number: int, index: int) -> None:
        group_id, prompt = GroupId(number), prompts[number]
        outcome = await runner.run(group_id, prompt, index, slots=slots, order=(number, index))
        tried = Tried(number, prompt, index, counting.attempts[group_id, index], outcome)
        all_tried.append(tried)
        on_tried(tried)

    places = [(number, index) for number in range(len(prompts)) for index in range(group_size)]
    await asyncio.wait(
        [spawn(one(number, index), name=f"rollout g{number}/r{index}") for number, index in places]
    )
    return all_tried


def result_table(prompts: Sequence[Prompt], all_tried: Sequence[Tried]) -> Table:
    """A line a prompt."""
    table = Table(box=None, padding=(0, 1))
    for title in ("prompt", "done", "failed", "reward", "lowest", "highest", "turns", "tokens"):
        table.add_column(title, justify="left" if title == "prompt" else "right", overflow="fold")
    for prompt in prompts:
        tried = [one for one in all_tried if one.prompt is prompt]
        done = [one for one in tried if not one.has_failed]
        rewards = [one.reward for one in done]
        sizes = [[num_turns(one.rollout) for one in done], [num_tokens(one.rollout) for one in done]]
        numbers = [fmean(rewards), min(rewards), max(rewards), *map(fmean, sizes)] if done else []
        cells = [f"{value:.4g}" for value in numbers] or [*"-----"]
        table.add_row(prompt.prompt_id, str(len(done)), str(len(tried) - len(done)), *cells)
    return table


def verdict(all_tried: Sequence[Tried]) -> str:
    """All of it in a line, and the last failure."""
    rewards = [tried.reward for tried in all_tried if not tried.has_failed]
    failures = [tried.outcome.failure for tried in all_tried if isinstance(tried.outcome, FailedRollout)]
    parts = [f"mean reward {fmean(rewards):.4f} over {len(rewards)} rollouts"] if rewards else []
    if failures:
        parts.append(f"{len(failures)} of {len(all_tried)} rollouts failed, the last one: {failures[-1]}")
    return "; ".join(parts)
