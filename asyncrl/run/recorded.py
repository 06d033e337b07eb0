"""Recorded rollouts. `asyncrl serve gateway` records them, from an agent that a user tries by hand or from
the config's own generator; a run begins with those that its own initial policy has sampled.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import xxhash
from rich.table import Table

from asyncrl.agents.endpoint.gateway import Gateway
from asyncrl.agents.endpoint.sessions import GatewaySession
from asyncrl.agents.endpoint.work_routes import RolloutQueue
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, RolloutFailure, RoomError
from asyncrl.files import write_whole
from asyncrl.messages.records import GroupId, Outcome, Prompt, Rollout
from asyncrl.placement.devices import Placement
from asyncrl.placement.plan import item_bytes
from asyncrl.rollouts.generators import RECORDED_VERSION, own_reward
from asyncrl.rollouts.producers import Spawn
from asyncrl.rollouts.recording import (
    RecordedRollout,
    Recording,
    RolloutRecorder,
    SampledBy,
    read_recording,
    refuse_difference,
    spans_of,
)
from asyncrl.rollouts.rollout import FailedRollout, Generator, RolloutRunner, Slots
from asyncrl.run.agents import num_rollouts
from asyncrl.run.engine_kinds import engine_kind
from asyncrl.run.life import Life
from asyncrl.trainer.model_folder import TOKENIZER, WEIGHTS, hash_files

RUN_COPY = "replay.jsonl"
"""Copy in the run directory of the recording that the run began with."""


class UserKey:
    """The keys of a user who tries an agent by hand: calls with one, an outcome with the other, then calls
    again.

    Life: open -> calls -> an outcome is posted: what was sampled since the last one is a rollout, and is
        recorded -> a new session -> ... -> close: what has no outcome yet is recorded without a reward.
    Invariant: a completion is in one rollout: the calls that are in hand when an outcome comes are answered
        410 and are in none.
    """

    def __init__(self, gateway: Gateway, queue: RolloutQueue, recorder: RolloutRecorder, life: Life) -> None:
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
        name, prompt_id = f"{self._name}/{number}", self._name
        return self._gateway.open_nowait(
            name, prompt_id=prompt_id, sample_index=number, attempt=0, route_key=name, user_key=self.key
        )

    def _take(self, outcome: Outcome) -> None:
        """An outcome was posted. Raises RolloutFailure, and nothing has changed, if it does not fit what was
        sampled.
        """
        reward, session = own_reward(outcome), self._session
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
    recorder: RolloutRecorder,
    *,
    say: Callable[[str], None],
    spawn: Spawn,
) -> list[Tried]:
    """`rollout.group_size` rollouts of each prompt; `say` gets a line for each as it ends. A RoomError ends
    `spawn`'s group.

    They are recorded in the order of prompts and samples, each as soon as all before it are done. In the
    order in which they end, a recording would begin with the short ones.
    """
    rollout, slots = config.rollout, Slots(num_rollouts(config))
    runner = RolloutRunner(generator, timeout_s=rollout.timeout_s, retries=rollout.retries)
    places = [(prompt, index) for prompt in prompts for index in range(rollout.group_size)]
    held, all_tried, recorded = dict[int, Tried](), list[Tried](), 0

    def record(*, is_over: bool = False) -> None:
        nonlocal recorded
        while recorded < len(places) and (is_over or recorded in held):
            tried = held.pop(recorded, None)
            recorded += 1
            if tried is not None and tried.failure is None:
                recorder.record(tried.prompt, tried.reward, tried.rollout)

    async def one(place: int) -> None:
        prompt, index = places[place]
        group_id = GroupId(place // rollout.group_size)
        result = await runner.run(group_id, prompt, index, slots=slots, order=(place, index))
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


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """What a run takes from a recording: prompts in the file's order with ids of their own, and the rollouts
    of each by sample index.

    `left_out`: how many rollouts cannot be taken, by why.
    """

    path: Path
    sampled_by: SampledBy
    prompts: tuple[Prompt, ...]
    rollouts: Mapping[str, tuple[Rollout, ...]]
    left_out: Mapping[str, int]

    def refuse_unless(self, sampled: SampledBy) -> None:
        """Raise ConfigError, with both digests, unless the run starts from what the recording was sampled
        from.
        """
        refuse_difference(self.path, self.sampled_by, sampled)

    def text(self, config: RunConfig) -> str:
        """How many can be taken at most, and why not all."""
        buffer, num_groups = config.buffer, config.trainer.num_groups
        look_ahead = buffer.max_staleness if buffer.look_ahead == "auto" else buffer.look_ahead
        num_first = min(look_ahead + 1, config.trainer.num_steps) * num_groups
        if buffer.filter != "none":  # a group that is filtered makes room for another at the same version
            num_first = len(self.prompts)
        num_rollouts = sum(map(len, self.rollouts.values()))
        most = sum(len(self.rollouts[prompt.prompt_id]) for prompt in self.prompts[:num_first])
        text = f"{num_rollouts} recorded rollouts of {len(self.prompts)} prompts, "
        text += f"of which at most {most} can be taken"
        if most < num_rollouts:
            text += (
                f": only (look_ahead + 1) * num_groups = {num_first} groups may start while policy_version "
                f"{RECORDED_VERSION} is served (buffer.max_staleness), later ones are sampled"
            )
        return text + (f"; left out: {_reasons(self.left_out)}" if self.left_out else "")


def open_replay(config: RunConfig, run_dir: Path | None) -> Replayed | None:
    """The recording that task.replay names, None if it names none. Raises ConfigError.

    It is copied into the run directory, if there is one, and a run that goes on reads the copy: its prompts
    keep their places in the order.
    """
    if config.task.replay is None:
        return None
    given = Path(config.task.replay)
    copy = given if run_dir is None else run_dir / RUN_COPY
    recording = read_recording(copy if copy.exists() else given)
    if not copy.exists():
        write_whole(copy, given.read_text(encoding="utf-8"))
    return choose(recording, config, given)


def settle_copy(config: RunConfig, run_dir: Path, *, is_new: bool) -> None:
    """Before a run opens its recording: remove what a failed start has left. Raises ConfigError if a resumed
    run began with a recording and now has none, or the other way round: its prompts would come in another
    order.
    """
    copy = run_dir / RUN_COPY
    if is_new:
        copy.unlink(missing_ok=True)
    elif copy.exists() != (config.task.replay is not None):
        began = "with recorded rollouts" if copy.exists() else "without any"
        raise ConfigError(
            f"task.replay={config.task.replay}, and the run in {run_dir} began {began}",
            rule="the prompts of a recording come first, so the place of every later one depends on them",
            way_out="put task.replay back as it was, or start a new run.",
        )


def choose(recording: Recording, config: RunConfig, path: Path) -> Replayed:
    """The usable rollouts by prompt, group_size of each at most. Raises ConfigError for another temperature,
    or if none is usable.
    """
    refuse_difference(
        path, recording.sampled_by, replace(recording.sampled_by, temperature=config.rollout.temperature)
    )
    left_out: Counter[str] = Counter()
    prompts: dict[str, Prompt] = {}
    rollouts: dict[str, tuple[Rollout, ...]] = {}
    for record in recording.rollouts:
        prompt = prompts.get(record.prompt.prompt_id) or replace(
            record.prompt, prompt_id=f"replay/{len(prompts)}"
        )
        taken = rollouts.get(prompt.prompt_id, ())
        is_full = len(taken) == config.rollout.group_size
        if why := _unusable(record, config) or ("beyond rollout.group_size" if is_full else ""):
            left_out[why] += 1
            continue
        prompts[record.prompt.prompt_id] = prompt
        renumbered = tuple(replace(branch, sample_index=len(taken)) for branch in record.rollout)
        rollouts[prompt.prompt_id] = (*taken, renumbered)
    if not rollouts:
        reasons = _reasons(left_out) or "none left out"
        raise ConfigError(
            f"task.replay={path} has no rollout to train on ({len(recording.rollouts)} rollouts; {reasons})",
            way_out="record rollouts with a reward, or remove task.replay.",
        )
    return Replayed(path, recording.sampled_by, tuple(prompts.values()), rollouts, left_out)


def _unusable(record: RecordedRollout, config: RunConfig) -> str:
    if record.reward is None:
        return "without a reward"
    if {span.version for branch in record.rollout for span in branch.version_spans} != {RECORDED_VERSION}:
        return f"with tokens of another policy_version than {RECORDED_VERSION}"
    if max(len(branch.token_ids) for branch in record.rollout) > config.rollout.max_length:
        return f"longer than max_prompt_tokens + max_tokens = {config.rollout.max_length}"
    return ""


def _reasons(left_out: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {why}" for why, count in left_out.items())


def sampled_by(config: RunConfig, model_path: Path, placement: Placement) -> SampledBy:
    """What rollouts at policy_version 0 are sampled from. Reads all weights."""
    dtype = "bfloat16" if item_bytes(config.model.dtype, placement.rollout[0]) == 2 else "float32"
    weights = _digest(model_path, WEIGHTS) if engine_kind(config).has_model else "simulated"
    template = config.model.chat_template and Path(config.model.chat_template).read_text(encoding="utf-8")
    tokenizer = _digest(model_path, TOKENIZER, json.dumps(template))
    return SampledBy(weights, dtype, tokenizer, config.rollout.temperature)


def _digest(folder: Path, patterns: Sequence[str], more: str = "") -> str:
    files = hash_files(folder, patterns, {})
    text = json.dumps([[name, file.xxh3] for name, file in files.items()]) + more
    return xxhash.xxh3_128_hexdigest(text.encode())
