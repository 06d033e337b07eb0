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
from asyncrl.config import RunConfig
from asyncrl.errors import RolloutFailure, RoomError
from asyncrl.messages.records import GroupId, Outcome, Prompt, Rollout
from asyncrl.rollouts.producers import Spawn
from asyncrl.rollouts.recording import Recorder, spans_of
from asyncrl.rollouts.rollout import FailedRollout, Generator, RolloutRunner
from asyncrl.run.agents import num_rollouts
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

    def __init__(self, gateway: Gateway, queue: RolloutQueue, recorder: Recorder, life: Life) -> None:
        self.key, self.outcome_key = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self._gateway, self._recorder, self._life = gateway, recorder, life
        # Drawn, so that the next time does not draw the same tokens.
        self._name = f"people/{secrets.token_hex(4)}"
        self._session = self._open(0)
        queue.on_outcome(self.outcome_key, self._take, sampling_key=self.key)

    def close(self) -> None:
        """No calls any more; what was begun is recorded. Raises RoomError if that cannot be written."""
        self._session.end_nowait("the gateway was ended")
        try:
            rollout = self._session.rollout(0, Outcome(), 0.0)
        except RolloutFailure:  # nothing was sampled
            return
        self._keep(self._session, None, rollout)

    def _open(self, number: int) -> GatewaySession:
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
        self._session = self._open(session.sample_index + 1)
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
    """What came of one rollout; `failure` if it failed at each attempt."""

    prompt: Prompt
    sample_index: int
    rollout: Rollout
    failure: FailedRollout | None = None

    @property
    def reward(self) -> float:
        """Of one that has not failed."""
        return self.rollout[0].reward

    def line(self) -> str:
        """In words."""
        name = f"{self.prompt.prompt_id} sample {self.sample_index}"
        if self.failure is not None:
            return f"{name} {self.failure.how}: {self.failure.failure.what}"
        return f"{name}: reward {self.reward:.4g}, {shape_text(self.rollout)}"


async def try_rollouts(
    config: RunConfig,
    generator: Generator,
    prompts: Sequence[Prompt],
    recorder: Recorder,
    *,
    say: Callable[[str], None],
    spawn: Spawn,
) -> list[Tried]:
    """`rollout.group_size` rollouts of each prompt; `say` is told of each as it ends. A RoomError ends
    `spawn`'s group.

    They are recorded in the order of prompts and samples, each as soon as all before it are done: in the
    order of their ends a recording would begin with what is short.
    """
    rollout, free = config.rollout, asyncio.Semaphore(num_rollouts(config))
    runner = RolloutRunner(generator, timeout_s=rollout.timeout_s, retries=rollout.retries)
    places = [(prompt, index) for prompt in prompts for index in range(rollout.group_size)]
    held, all_tried, recorded = dict[int, Tried](), list[Tried](), 0

    async def no_wait() -> None:
        """`free` is what is waited for, for all attempts together."""

    def record(*, is_over: bool = False) -> None:
        nonlocal recorded
        while recorded < len(places) and (is_over or recorded in held):
            tried = held.pop(recorded, None)
            recorded += 1
            if tried is not None and tried.failure is None:
                recorder.record(tried.prompt, tried.reward, tried.rollout)

    async def one(place: int) -> None:
        prompt, index = places[place]
        async with free:
            group_id = GroupId(place // rollout.group_size)
            result = await runner.run(
                group_id, prompt, index, wait_slot=no_wait, stopped_sampling=lambda: None
            )
        if isinstance(result, FailedRollout):
            tried = Tried(prompt, index, (), result)
        else:
            tried = Tried(prompt, index, result)
        held[place] = tried
        all_tried.append(tried)
        say(f"[{len(all_tried)}/{len(places)}] {tried.line()}")
        record()

    try:
        await asyncio.wait([spawn(one(place), name=f"rollout {place}") for place in range(len(places))])
    finally:
        record(is_over=True)
    return all_tried


def result_table(prompts: Sequence[Prompt], all_tried: Sequence[Tried]) -> Table:
    """A line a prompt."""
    table = Table(box=None, padding=(0, 1))
    for title in ("prompt", "done", "failed", "reward", "lowest", "highest", "turns", "tokens"):
        table.add_column(title, justify="left" if title == "prompt" else "right", overflow="fold")
    for prompt in prompts:
        tried = [one for one in all_tried if one.prompt is prompt]
        done = [one for one in tried if one.failure is None]
        rewards = [one.reward for one in done]
        sizes = [[num_turns(one.rollout) for one in done], [num_tokens(one.rollout) for one in done]]
        numbers = [fmean(rewards), min(rewards), max(rewards), *map(fmean, sizes)] if done else []
        cells = [f"{value:.4g}" for value in numbers] or [*"-----"]
        table.add_row(prompt.prompt_id, str(len(done)), str(len(tried) - len(done)), *cells)
    return table


def verdict(all_tried: Sequence[Tried]) -> str:
    """All of it in a line, and the last failure."""
    rewards = [tried.reward for tried in all_tried if tried.failure is None]
    failures = [tried.failure for tried in all_tried if tried.failure is not None]
    parts = [f"mean reward {fmean(rewards):.4f} over {len(rewards)} rollouts"] if rewards else []
    if failures:
        last = failures[-1].failure
        parts.append(f"{len(failures)} of {len(all_tried)} rollouts failed, the last one: {last}")
    return "; ".join(parts)
