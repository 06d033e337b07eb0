"""Who waits for whom, in words. Knows the rooms by the names of their functions and by the numbers that they
report; imports none.

A room's line comes from where its task really is, so it cannot lie about what it waits in; the numbers say
for what.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.waits import Place


@dataclass(frozen=True, slots=True)
class ChildState:
    """A child process: `process` is what the kernel says of it (sleeping, stopped, ended), `answer` what
    /health said, if it did.
    """

    name: str
    process: str
    answer: str
    is_well: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.process}; {self.answer}"


@dataclass(frozen=True, slots=True)
class Reported:
    """What a run says of itself at one moment.

    `marks`: counters; a change of any of them is progress. `facts`: the numbers that the sentences below
    name. `places`: where its tasks wait. `oldest`: (rollout, seconds since its start), oldest first.
    `is_mending`: a process is being started again, which has limits of its own.
    """

    marks: Mapping[str, float]
    facts: Mapping[str, Any]
    places: tuple[Place, ...] = ()
    oldest: tuple[tuple[str, float], ...] = ()
    is_mending: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """One line: `who` waits in `where` for `what` since `seconds`, and `waker` would wake it."""

    who: str
    where: str
    what: str
    waker: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.who} waits in {self.where} for {self.what}, {self.seconds:.0f} s, to be woken by {self.waker}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for status.json."""
        return {
            "who": self.who,
            "where": self.where,
            "what": self.what,
            "waker": self.waker,
            "seconds": round(self.seconds, 1),
        }


@dataclass(frozen=True, slots=True)
class Kind:
    """A wait that this system knows. `what` and `waker` are formats over the facts and `server`; `mark` is
    the counter it restarts with.
    """

    who: str
    what: str
    waker: str
    mark: str = "policy_version"


KNOWN: Mapping[str, Kind] = {
    "Slots.wait_spare": Kind(
        "producers",
        "a free sequence in the engines ({sampling} of {capacity} sample)",
        "a rollout that ends",
        "groups_admitted",
    ),
    "Slots.wait": Kind(
        "rollouts", "a free sequence in the engines ({sampling} of {capacity} sample)", "a rollout that ends"
    ),
    "Buffer.wait_open": Kind(
        "producers",
        "leave to start a group ({ready} ready, {running} run, batch {next_batch} is next, version {served} "
        "is served)",
        "a version served, or a group failed or handed back",
        "groups_admitted",
    ),
    "Buffer.wait_batch": Kind("train loop", "{batch}", "the rollout that completes a group", "batches_taken"),
    "TrainerClient.train": Kind("train loop", "the optimizer step of batch {policy_version}", "{server}"),
    "TrainerClient.save": Kind(
        "train loop", "the saved weights of policy_version {policy_version}", "{server}"
    ),
    "TrainerClient.recover": Kind(
        "catching up", "the journaled batches to be trained on again", "{server}", "trainer_version"
    ),
    "TrainerClient.begin_save_state": Kind(
        "train loop", "the copy of the state of policy_version {policy_version}", "{server}"
    ),
    "TrainerClient.wait_save_state": Kind(
        "checkpoint", "the state of the trainer on disk", "{server}", "checkpoints"
    ),
    "LivingTrainer.recover": Kind(
        "catching up", "the trainer to be back", "watch trainer", "trainer_restarts"
    ),
    "LivingTrainer.train": Kind(
        "train loop",
        "the trainer to be back, and batch {policy_version}",
        "watch trainer",
        "trainer_restarts",
    ),
    "LivingTrainer.export": Kind("publisher", "the trainer to be back", "watch trainer", "trainer_restarts"),
    "LivingTrainer.save": Kind("train loop", "the trainer to be back", "watch trainer", "trainer_restarts"),
    "Checkpointer.after_step": Kind("train loop", "a folder for a checkpoint", "the disk"),
    "Checkpointer.make_last": Kind(
        "the run's end", "the last checkpoint", "the trainer, the disk", "checkpoints"
    ),
    "Checkpointer._finish": Kind(
        "checkpoint", "its files to be checked and renamed", "the disk", "checkpoints"
    ),
    "Publisher.wait_announced": Kind(
        "the run's start", "the engines to serve the weights it goes on with", "the publisher", "published"
    ),
    "Publisher.wait_exported_or_busy": Kind(
        "train loop", "the copy of the weights of policy_version {policy_version}", "the publisher"
    ),
    "TrainerClient.wait_version_above": Kind(
        "publisher", "a policy_version above {published}", "the train loop"
    ),
    "TrainerClient.export": Kind("publisher", "the export of policy_version {policy_version}", "{server}"),
    "EngineServer.prepare": Kind(
        "publisher",
        "prepare of new weights (version {published} is out) on {server}",
        "{server}",
        "published",
    ),
    "EngineServer.commit": Kind(
        "publisher", "commit of new weights (version {published} is out) on {server}", "{server}", "published"
    ),
    "EngineServer.sleep": Kind("handover", "sleep of {server}", "{server}", "handover_phases"),
    "EngineServer.wake": Kind("handover", "memory of {server}", "{server}", "handover_phases"),
    "EngineServer.load_chunk": Kind(
        "handover", "a chunk of new weights (version {published} is out) in {server}", "{server}"
    ),
    "VllmServer.ready": Kind("supervisor", "{server} to be ready", "{server}", "restarts"),
    "VllmServer.prepare": Kind(
        "publisher",
        "prepare of new weights (version {published} is out) on {server}",
        "{server}",
        "published",
    ),
    "VllmServer.commit": Kind(
        "publisher",
        "commit and canary of new weights (version {published} is out) on {server}",
        "{server}",
        "published",
    ),
    "VllmServer.sleep": Kind("handover", "sleep of {server}", "{server}", "handover_phases"),
    "VllmServer.wake": Kind("handover", "memory of {server}", "{server}", "handover_phases"),
    "VllmServer.load_chunk": Kind(
        "handover", "a chunk of new weights (version {published} is out) in {server}", "{server}"
    ),
    "TrainerClient.offload": Kind(
        "handover", "the trainer to leave the devices", "{server}", "handover_phases"
    ),
    "TrainerClient.onload": Kind(
        "handover", "the trainer's memory on the devices", "{server}", "handover_phases"
    ),
    "TrainerClient.export_chunk": Kind(
        "handover", "a chunk of the weights of policy_version {policy_version}", "{server}"
    ),
    "LivingTrainer.offload": Kind("handover", "the trainer to be back", "watch trainer", "trainer_restarts"),
    "LivingTrainer.onload": Kind("handover", "the trainer to be back", "watch trainer", "trainer_restarts"),
    "LivingTrainer.export_chunk": Kind(
        "handover", "the trainer to be back", "watch trainer", "trainer_restarts"
    ),
    "TakingTurns.start": Kind(
        "the run's start",
        "the first turn (a handover is at: {phase})",
        "trainer and engines",
        "handover_phases",
    ),
    "TakingTurns.to_trainer": Kind(
        "train loop",
        "the trainer's turn (a handover is at: {phase})",
        "trainer and engines",
        "handover_phases",
    ),
    "TakingTurns.to_engines": Kind(
        "train loop",
        "the engines' turn (a handover is at: {phase})",
        "trainer and engines",
        "handover_phases",
    ),
    "TakingTurns.room_for_engine": Kind(
        "supervisor", "the engines' turn, to start one of them ({turn})", "the train loop", "restarts"
    ),
    "TakingTurns.bring_up": Kind(
        "supervisor",
        "an empty turn that brings version {published}",
        "trainer and engines",
        "handover_phases",
    ),
    "TakingTurns.wait_room_for_trainer": Kind(
        "supervisor",
        "engines to leave the devices, to start the trainer ({turn})",
        "the train loop",
        "trainer_restarts",
    ),
    "Publisher.bring_up": Kind(
        "supervisor", "an engine's turn to get version {published}", "a push that runs", "restarts"
    ),
    "Supervisor._replace": Kind("supervisor", "a new process for {server}", "{server}", "restarts"),
    "Evaluation.run": Kind("evaluation", "a published version that is due", "the publisher", "evaluations"),
    "Evaluation.wait_last": Kind(
        "the run's end", "the evaluation of the last version", "the evaluation", "evaluations"
    ),
    "Evaluator.evaluate": Kind(
        "evaluation", "its samples", "engine-eval, its reward function", "evaluations"
    ),
    "Journal.batch_taken": Kind(
        "train loop", "its batch to be durable in the journal", "the journal's thread", "batches_taken"
    ),
    "Journal.flush": Kind("the job", "the journal to be durable", "the journal's thread", "batches_taken"),
    "Journal.read_resume": Kind(
        "catching up", "what the journal says of the run", "the journal's thread", "trainer_restarts"
    ),
    "Journal.compact": Kind(
        "checkpoint", "old tokens to be deleted from the journal", "the journal's thread", "checkpoints"
    ),
    "EnginePool.generate": Kind("rollouts", "completions of {server}", "{server}", "rollouts_finished"),
    "RolloutQueue.run": Kind(
        "rollouts",
        "harnesses ({queued} wait for a worker, {leased} run on {workers} workers)",
        "a worker's result",
        "rollouts_finished",
    ),
    "TaskScorer.score": Kind("rollouts", "their rewards", "the reward function", "rollouts_finished"),
}
"""By the name of the function in which somebody waits. A test proves that each of them exists."""


class WaitClock:
    """Since when each wait goes on: from when it was first seen, until it is gone or its room's counter has
    moved.
    """

    def __init__(self) -> None:
        self._since_s: dict[tuple[str, str, str, float], float] = {}

    def waits(self, reported: Reported, now_s: float) -> tuple[Wait, ...]:
        """What is waited for now, a line for each room and function, in the order of KNOWN."""
        found: dict[tuple[str, str, str, float], Wait] = {}
        num: dict[tuple[str, str, str, float], int] = {}
        for name, place in _known_places(reported.places):
            kind = KNOWN[name]
            server = place.name_below(name)
            facts = _Facts(
                reported.facts, server=server or "a server that is up", batch=_batch(reported.facts)
            )
            who = "evaluation" if kind.who in ("publisher", "rollouts") and _evaluates(place) else kind.who
            key = (who, name, server, reported.marks.get(kind.mark, 0.0))
            num[key] = num.get(key, 0) + 1
            seconds = now_s - self._since_s.get(key, now_s)
            found[key] = Wait(who, name, kind.what.format_map(facts), kind.waker.format_map(facts), seconds)
        self._since_s = {key: self._since_s.get(key, now_s) for key in found}
        order = {name: number for number, name in enumerate(KNOWN)}
        keys = sorted(found, key=lambda key: (order[key[1]], key))
        return tuple(_counted(found[key], num[key]) for key in keys)


class _Facts(dict[str, Any]):
    """A number that was not reported is a question mark: a report about something stuck must never fail
    itself.
    """

    def __missing__(self, key: str) -> str:
        return "?"


def place_of(rollout: str, places: Iterable[Place]) -> Place | None:
    """Where the task of one rollout is."""
    return next((place for place in places if place.task == f"rollout {rollout}"), None)


def known_function(place: Place) -> str:
    """The innermost function of its way that KNOWN names, or the innermost of all."""
    return next(
        (name for name in reversed(place.functions) if name in KNOWN),
        place.functions[-1] if place.functions else "its start",
    )


def _known_places(places: Iterable[Place]) -> Iterator[tuple[str, Place]]:
    for place in places:
        name = known_function(place)
        if name in KNOWN:
            yield name, place


def _evaluates(place: Place) -> bool:
    return any(name.startswith(("Evaluation.", "Evaluator.")) for name in place.functions)


def _counted(wait: Wait, num: int) -> Wait:
    return wait if num == 1 else Wait(f"{num} {wait.who}", wait.where, wait.what, wait.waker, wait.seconds)


def _batch(facts: Mapping[str, Any]) -> str:
    """What the next batch waits for: the three causes of types.WaitReport."""
    num = {name: int(facts.get(name, 0)) for name in ("ready", "num_groups", "running", "open", "next_batch")}
    batch = f"batch {num['next_batch']}: {num['ready']} of {num['num_groups']} groups are ready, {num['running']} run"
    oldest = facts.get("oldest_running")
    straggler = (
        ""
        if oldest is None
        else f"; the oldest is group g{oldest}, start_version {facts.get('oldest_running_start_version')}"
    )
    if num["ready"] >= num["num_groups"]:
        return f"stragglers that would become too old ({batch}{straggler})"
    if num["ready"] + num["running"] < num["num_groups"] and num["open"] == 0:
        return f"publishing, for no group may start before a newer version is served ({batch})"
    return f"generation ({batch}{straggler})"
