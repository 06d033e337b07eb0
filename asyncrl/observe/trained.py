"""What was trained on, and whether it kept the staleness bound: from the trainer's record alone.

Step v + 1, as in metrics.jsonl, trained on the batch that turned policy_version v into v + 1.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, NotRequired

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from asyncrl.observe.recorder import LOST_KEY, lines_of, parse_line, tell

TRAINED_FILE = "trained.jsonl"
SHOWN_STEPS = 1000
"""Number of newest steps that are listed one by one; a terminal gets the last hundred of them."""


class Entry(TypedDict):
    """A trajectory in a line of the record, as asyncrl.trainer.step_report writes it."""

    group_id: int
    prompt_id: str
    sample_index: int
    branch: int
    reward: float
    num_tokens: int
    num_loss_tokens: int
    tokens_sha: NotRequired[str]
    spans: list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Line:
    """What is read of a line."""

    version: int
    min_version: int
    trajectories: list[Entry]


_CHECK = TypeAdapter(Line)


def _parse(line: bytes) -> Line | Mapping[str, Any] | None:
    """A step in one go, for files of gigabytes; else the JSON object that the line is."""
    try:
        return _CHECK.validate_json(line)
    except ValidationError:
        return parse_line(line)


class TrainedStep(NamedTuple):
    """Numbers of one step. `start`: where its line begins; `data`: hash of what has to be the same when the
    step is taken again; `faults`: ways in which it breaks a promise.
    """

    start: int
    version: int
    num_trajectories: int
    num_loss_tokens: int
    sum_of_ages: int
    num_ages: int
    largest_age: int
    data: int
    faults: tuple[str, ...]


class TrainedRecord:
    """trained.jsonl as it counts, and whether it kept the bound. Life: read when it is made -> asked.

    A later line of a version that was restored counts, and what was done there before is only compared with
    it. Lines are not kept in memory: those to be shown are read again. Lines without the fields that they
    need are left out and told in `problems`.
    """

    def __init__(self, path: Path, problems: list[str], max_staleness: int) -> None:
        self.path, self.max_staleness = path, max_staleness
        self.restored: list[int] = []
        self._steps: list[TrainedStep] = []
        self._lost: list[tuple[range, str]] = []
        """Steps whose lines are lost, and why."""
        self._before: dict[int, int] = {}
        """Step -> hash of its data before it was restored."""
        self._trained_in: dict[int, int] = {}
        """Group -> step."""
        self._replay_faults: list[str] = []
        lines: Iterator[tuple[int, Line | Mapping[str, Any]]] = lines_of(path, problems, _parse)
        for number, (start, line) in enumerate(lines, start=1):
            try:
                self._add(start, line)
            except (TypeError, ValueError, OverflowError) as error:
                why = error.errors()[0]["loc"] if isinstance(error, ValidationError) else error
                tell(problems, f"{path.name} object {number} is no record of a step and is left out: {why}")

    def __len__(self) -> int:
        return len(self._steps)

    def _add(self, start: int, line: Line | Mapping[str, Any]) -> None:
        """One line of the file, which begins at `start`. Raises ValueError or TypeError for others."""
        if not isinstance(line, Line) and "restored" in line:
            self._restore(int(line["restored"]))
            if LOST_KEY in line:
                first, last = line[LOST_KEY]
                self._lost.append((range(first, last + 1), str(line.get("why"))))
            return
        step = self._checked(start, line if isinstance(line, Line) else _CHECK.validate_python(line))
        if self._before.get(step.version, step.data) != step.data:
            again = f"step {step.version + 1} was trained again on other data than before it was restored"
            self._replay_faults.append(again)
        self._steps.append(step)

    def violations(self) -> tuple[list[str], list[str]]:
        """Every way in which the record breaks a promise: too old, from the future, trained twice, does not
        add up, a step is missing; and steps that are missing for a reason that the record gives.
        """
        broken, lost, expected = list[str](), list[str](), 0
        for step in self._steps:
            if step.version < expected:
                broken.append(f"step {step.version + 1} follows step {expected}")
            elif step.version > expected:
                is_one = step.version == expected + 1
                what = f"step {expected + 1} is" if is_one else f"steps {expected + 1}..{step.version} are"
                if all(map(self._why_lost, range(expected, step.version))):
                    lost.append(f"{what} missing in the record ({self._why_lost(expected)})")
                else:
                    broken.append(f"{what} missing in the record")
            broken += step.faults
            expected = step.version + 1
        return broken + self._replay_faults, lost

    def totals(self) -> dict[str, Any]:
        """Plain values of all steps."""
        num_ages = sum(step.num_ages for step in self._steps)
        return {
            "num_steps": len(self),
            "num_trajectories": sum(step.num_trajectories for step in self._steps),
            "num_loss_tokens": sum(step.num_loss_tokens for step in self._steps),
            "staleness_mean": sum(step.sum_of_ages for step in self._steps) / num_ages if num_ages else None,
            "staleness_max": max(step.largest_age for step in self._steps) if num_ages else None,
        }

    @property
    def range_text(self) -> str:
        """The steps that it has, in words."""
        if not self._steps:
            return "no steps"
        return f"steps {self._steps[0].version + 1} to {self._steps[-1].version + 1}"

    def lines(self, step: int | None = None, group: int | None = None) -> list[Line]:
        """Those of a step, and of the step that a group was trained on, else of the newest; read again."""
        shown = self._steps[-SHOWN_STEPS:] if step is None and group is None else self._steps
        if step is not None:
            shown = [one for one in shown if one.version == step - 1]
        if group is not None:
            shown = [one for one in shown if one.version == self._trained_in.get(group)]
        found = []
        for one in shown:
            with self.path.open("rb") as file:
                file.seek(one.start)
                found.append(_CHECK.validate_python(parse_line(file.readline())))
        return found

    def _why_lost(self, version: int) -> str:
        return next((why for versions, why in self._lost if version in versions), "")

    def _restore(self, version: int) -> None:
        self.restored.append(version)
        while self._steps and self._steps[-1].version >= version:
            dropped = self._steps.pop()
            self._before[dropped.version] = dropped.data
        self._trained_in = {group: step for group, step in self._trained_in.items() if step < version}

    def _checked(self, start: int, line: Line) -> TrainedStep:
        """The numbers of a line, with what is wrong in it."""
        version, entries, ages, faults = line.version, line.trajectories, list[int](), list[str]()
        names = [(entry["group_id"], entry["sample_index"], entry["branch"]) for entry in entries]
        is_suspect = len(set(names)) < len(names)
        for entry in entries:
            num, oldest = 0, version
            for first, end, sampled in entry["spans"]:
                num += end - first
                if sampled < oldest:
                    oldest = sampled
                elif sampled > version:
                    is_suspect = True
            if entry["spans"]:
                ages.append(version - oldest)
            if num != entry["num_loss_tokens"] or version - oldest > self.max_staleness:
                is_suspect = True
        if is_suspect:
            faults += self._faults(line)
        for group in sorted({group for group, *_ in names}):
            if (earlier := self._trained_in.setdefault(group, version)) != version:
                faults.append(
                    f"step {version + 1}, group {group}: was trained on in step {earlier + 1} already"
                )
        rewards = array("d", [entry["reward"] for entry in entries]).tobytes()  # hash(-1.0) is hash(-2.0)
        data = hash((*names, rewards, *(entry.get("tokens_sha") for entry in entries)))
        num_tokens = sum(entry["num_loss_tokens"] for entry in entries)
        numbers = len(entries), num_tokens, sum(ages), len(ages), max(ages, default=0)
        return TrainedStep(start, version, *numbers, data, tuple(faults))

    def _faults(self, line: Line) -> Iterator[str]:
        """What is wrong in it, in words."""
        names = set[str]()
        for entry in line.trajectories:
            name = f"step {line.version + 1}, group {entry['group_id']}, sample {entry['sample_index']}"
            name += f", branch {entry['branch']}" if entry["branch"] else ""
            num = 0
            for start, end, sampled in entry["spans"]:
                num += end - start
                age, what = line.version - sampled, f"{name}: tokens {start}..{end - 1}"
                if age > self.max_staleness:
                    yield f"{what} are of version {sampled}, {age} behind; {self.max_staleness} are allowed"
                if age < 0:
                    yield f"{what} are of version {sampled}, which did not exist yet"
            if num != entry["num_loss_tokens"]:
                yield f"{name}: {entry['num_loss_tokens']} tokens in the loss, but spans of {num}"
            if name in names:
                yield f"{name}: was trained on in step {line.version + 1} already"
            names.add(name)


def _age(version: int, entry: Entry) -> int:
    """Versions between the batch and the oldest token with a loss weight, of which there is one."""
    return version - min([sampled for _, _, sampled in entry["spans"]])


def batch_summary(line: Line) -> dict[str, Any]:
    """Plain values of a step, without its trajectories."""
    version, entries = line.version, line.trajectories
    ages = [_age(version, entry) for entry in entries if entry["spans"]]
    rewards = [entry["reward"] for entry in entries if entry["branch"] == 0]  # that of the rollout
    tokens = Counter[int]()
    for entry in entries:
        for start, end, sampled in entry["spans"]:
            tokens[sampled] += end - start
    return {
        "step": version + 1,
        "version": version,
        "min_version": line.min_version,
        "group_ids": sorted({entry["group_id"] for entry in entries}),
        "num_trajectories": len(entries),
        "num_loss_tokens": sum(entry["num_loss_tokens"] for entry in entries),
        "reward_mean": fmean(rewards) if rewards else None,
        "staleness_mean": fmean(ages) if ages else None,
        "staleness_max": max(ages, default=None),
        "tokens_by_version": dict(sorted(tokens.items())),
    }


def trajectory_summaries(line: Line, group_id: int | None = None) -> list[dict[str, Any]]:
    """Plain values of a step's trajectories, or of those of one group."""
    return [
        {**entry, "staleness": _age(line.version, entry) if entry["spans"] else None}
        for entry in line.trajectories
        if group_id in (None, entry["group_id"])
    ]
