"""What was trained on, from the trainer's own record, and whether it kept the bound. Trusts no other counter.

Step v is the one whose batch turned policy_version v into v + 1: the same number as `step` in metrics.jsonl.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncrl.observe.recorder import LOST_KEY
from asyncrl.observe.run_files import lines_of, parse_line, steps_are_missing, tell

TRAINED_FILE = "trained.jsonl"
Line = Mapping[str, Any]
"""Of the record: version, min_version and trajectories, as asyncrl.trainer.record writes them."""
_ROW = ("start", "version", "num_trajectories", "num_loss_tokens", "sum_of_ages", "num_ages", "largest_age")
_MAX_FAULTS = 1000
_FIELDS = itemgetter(
    "group_id", "sample_index", "branch", "num_tokens", "num_loss_tokens", "reward", "prompt_id", "spans"
)


class TrainedRecord:
    """trained.jsonl as it counts, and whether it kept the bound. Life: made empty -> add() line by line ->
    asked.

    A later line of a version that was restored counts, and what was done there before is only compared with
    it. No line is kept: some numbers of each step, where its line begins, and where each group was trained
    on. What is shown is read again.
    """

    def __init__(self, path: Path, max_staleness: int) -> None:
        self.path, self.max_staleness = path, max_staleness
        self.restored: list[int] = []
        self.replay_faults: list[str] = []
        """Batches that were not the same the second time."""
        self._rows = array("q")
        """_ROW after _ROW."""
        self._lost: list[tuple[int, int, str]] = []
        self._faults: list[tuple[int, str]] = []
        self._before: dict[int, int] = {}
        self._trained_in: dict[int, int] = {}
        """Group -> where the line begins of the step that it was trained in."""

    def __len__(self) -> int:
        return len(self._rows) // len(_ROW)

    def add(self, start: int, line: Line) -> None:
        """One line of the file, which begins at `start`. Raises KeyError, TypeError, ValueError and the like
        if it is of no step.
        """
        if "restored" in line:
            self._restore(int(line["restored"]))
            if LOST_KEY in line:
                first, last = line[LOST_KEY]
                self._lost.append((int(first), int(last), str(line.get("why"))))
            return
        version = line["version"] + 0  # raises if it is no number
        row, groups, faults = _count(version, line["trajectories"], self.max_staleness)
        line["min_version"] + 0
        numbers = array("q", (start, version, *row))  # raises before anything is changed
        self._note(start, faults)
        for group in groups:
            earlier = self._trained_in.setdefault(group, start)
            if earlier != start:
                if (at := self._index(earlier)) is None:  # a step that was restored
                    self._trained_in[group] = start
                else:
                    self._find_twice(start, line, earlier, self._rows[at * len(_ROW) + 1], group)
        dropped = self._before.get(version)
        if dropped is not None and _data(self._read(dropped)) != _data(line):
            text = f"step {version} was trained again on other data than before it was restored"
            if len(self.replay_faults) < _MAX_FAULTS:
                self.replay_faults.append(text)
        self._rows.extend(numbers)

    def violations(self) -> list[str]:
        """Every way in which the record breaks a promise: too old, from the future, trained twice, does not
        add up, a step is missing.
        """
        found, expected = list(self._faults), 0
        for start, version in zip(self._column("start"), self._column("version"), strict=True):
            if version < expected:
                found.append((start, f"step {version} follows step {expected - 1}"))
            elif version > expected and self._why_lost(expected, version - 1) is None:
                found.append((start, f"{steps_are_missing(expected, version - 1)} in the record"))
            expected = version + 1
        return [text for _, text in sorted(found, key=itemgetter(0))] + self.replay_faults

    def lost_steps(self) -> list[str]:
        """Steps that are missing for a reason that the record gives, in words."""
        found, expected = [], 0
        for version in self._column("version"):
            if version > expected and (why := self._why_lost(expected, version - 1)) is not None:
                found.append(f"{steps_are_missing(expected, version - 1)} in the record ({why})")
            expected = version + 1
        return found

    def totals(self) -> dict[str, Any]:
        """Plain values of all steps."""
        ages, num_ages = self._column("sum_of_ages"), sum(self._column("num_ages"))
        return {
            "num_steps": len(self),
            "num_trajectories": sum(self._column("num_trajectories")),
            "num_loss_tokens": sum(self._column("num_loss_tokens")),
            "staleness_mean": sum(ages) / num_ages if num_ages else None,
            "staleness_max": max(self._column("largest_age")) if num_ages else None,
        }

    @property
    def range_text(self) -> str:
        """The steps that it has, in words."""
        versions = self._column("version")
        return f"steps {versions[0]} to {versions[-1]}" if versions else "no steps"

    def newest(self, num: int) -> list[Line]:
        """The last steps, read again."""
        return [self._read(start) for start in self._column("start")[max(0, len(self) - num) :]]

    def of_step(self, step: int) -> list[Line]:
        """All of that number: one, or none, if the record is as it should be."""
        both = zip(self._column("start"), self._column("version"), strict=True)
        return [self._read(start) for start, version in both if version == step]

    def of_group(self, group_id: int) -> Line | None:
        """The first step that a group was trained on."""
        start = self._trained_in.get(group_id)
        return self._read(start) if start is not None and self._index(start) is not None else None

    def _read(self, start: int) -> Line:
        with self.path.open("rb") as file:
            file.seek(start)
            line: Line = parse_line(file.readline())
            return line

    def _column(self, name: str) -> array[int]:
        return self._rows[_ROW.index(name) :: len(_ROW)]

    def _index(self, start: int) -> int | None:
        """Of the step whose line begins there, if it counts still."""
        at = bisect_left(range(len(self)), start, key=lambda at: self._rows[at * len(_ROW)])
        return at if at < len(self) and self._rows[at * len(_ROW)] == start else None

    def _restore(self, version: int) -> None:
        self.restored.append(version)
        gone = set()
        while self._rows and self._rows[1 - len(_ROW)] >= version:
            start, dropped = self._rows[-len(_ROW) : 2 - len(_ROW)]
            gone.add(start)
            self._before[dropped] = start
            del self._rows[-len(_ROW) :]
        self._faults = [(start, fault) for start, fault in self._faults if start not in gone]

    def _note(self, start: int, faults: Sequence[str]) -> None:
        self._faults += [(start, fault) for fault in faults[: max(0, _MAX_FAULTS - len(self._faults))]]

    def _find_twice(self, start: int, line: Line, earlier: int, before: int, group: int) -> None:
        """A group is trained on in one step; which of its trajectories were there before is read again."""
        if len(self._faults) < _MAX_FAULTS:
            names = [
                {_name(entry) for entry in found["trajectories"] if entry["group_id"] == group}
                for found in (line, self._read(earlier))
            ]
            said = f"was trained on in step {before} already"
            self._note(
                start, [f"step {line['version']}, {name}: {said}" for name in sorted(names[0] & names[1])]
            )

    def _why_lost(self, first: int, last: int) -> str | None:
        """The reason that the record gives for all of these; of several marks that meet, the first."""
        found = None
        for begin, end, why in sorted(self._lost):
            if begin <= first <= end:
                found, first = found or why, end + 1
            if first > last:
                return found
        return None


def read_record(path: Path, problems: list[str], max_staleness: int) -> TrainedRecord:
    """Lines without the fields that they need are left out and told in `problems`."""
    record = TrainedRecord(path, max_staleness)
    for number, (start, line) in enumerate(lines_of(path, problems), start=1):
        try:
            record.add(start, line)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            why = f"{type(error).__name__} {error}"
            tell(problems, f"{path.name} object {number} is no record of a step and is left out: {why}")
    return record


def _count(
    version: int, entries: Sequence[Line], max_staleness: int
) -> tuple[tuple[int, ...], set[int], list[str]]:
    """The row of a batch, its groups and its faults, in one pass over its plain values."""
    num_tokens = sum_of_ages = num_ages = largest_age = 0
    names, groups, faults = set(), set(), list[str]()
    for entry in entries:
        group, index, branch, num_all, num_loss, reward, _, spans = _FIELDS(entry)
        name = (group, index, branch)
        num_all + group + index + reward  # raises if one is no number
        num, oldest, newest = 0, version, version
        for start, end, sampled in spans:
            num += end - start
            if sampled < oldest:
                oldest = sampled
            elif sampled > newest:
                newest = sampled
        if num != num_loss or oldest < version - max_staleness or newest > version or name in names:
            faults += [
                f"step {version}, {_name(entry)}: {fault}" for fault in _faults(version, entry, max_staleness)
            ]
            if name in names:
                faults.append(f"step {version}, {_name(entry)}: was trained on in step {version} already")
        names.add(name)
        groups.add(group)
        num_tokens += num_loss
        if spans:
            age = version - oldest
            sum_of_ages += age
            num_ages += 1
            if age > largest_age:
                largest_age = age
    return (len(entries), num_tokens, sum_of_ages, num_ages, largest_age), groups, faults


def _faults(version: int, entry: Line, max_staleness: int) -> list[str]:
    found, num_in_spans = [], 0
    for start, end, sampled in entry["spans"]:
        what = f"tokens {start}..{end - 1} are of version {sampled}"
        num_in_spans += end - start
        if sampled < version - max_staleness:
            found.append(f"{what}, {version - sampled} behind; {max_staleness} are allowed")
        if sampled > version:
            found.append(f"{what}, which did not exist yet")
    if num_in_spans != entry["num_loss_tokens"]:
        found.append(f"{entry['num_loss_tokens']} tokens in the loss, but spans of {num_in_spans}")
    return found


def _name(entry: Line) -> str:
    """`group 3, sample 1`, and the branch if it is not the first."""
    branch = f", branch {entry['branch']}" if entry["branch"] else ""
    return f"group {entry['group_id']}, sample {entry['sample_index']}{branch}"


def _data(line: Line) -> list[Any]:
    """What has to be the same when a step is taken again."""
    names = ("group_id", "sample_index", "branch", "reward", "tokens_sha")
    return [[entry.get(name) for name in names] for entry in line["trajectories"]]


def batch_summary(line: Line) -> dict[str, Any]:
    """Plain values of a step, without its trajectories."""
    version, entries = line["version"], line["trajectories"]
    ages = [age for age in (_age(version, entry) for entry in entries) if age is not None]
    rewards = [entry["reward"] for entry in entries if entry["branch"] == 0]  # that of the rollout
    tokens: Counter[int] = Counter()
    for entry in entries:
        for start, end, sampled in entry["spans"]:
            tokens[sampled] += end - start
    return {
        "step": version,
        "version": version,
        "min_version": line["min_version"],
        "group_ids": sorted({entry["group_id"] for entry in entries}),
        "num_trajectories": len(entries),
        "num_loss_tokens": sum(entry["num_loss_tokens"] for entry in entries),
        "reward_mean": fmean(rewards) if rewards else None,
        "staleness_mean": fmean(ages) if ages else None,
        "staleness_max": max(ages, default=None),
        "tokens_by_version": {str(sampled): num for sampled, num in sorted(tokens.items())},
    }


def trajectory_summaries(line: Line, group_id: int | None = None) -> list[dict[str, Any]]:
    """Plain values of a step's trajectories, or of those of one group."""
    names = ("group_id", "prompt_id", "sample_index", "branch", "reward", "num_tokens", "num_loss_tokens")
    return [
        {name: entry[name] for name in names}
        | {"staleness": _age(line["version"], entry), "spans": entry["spans"]}
        for entry in line["trajectories"]
        if group_id in (None, entry["group_id"])
    ]


def _age(version: int, entry: Line) -> int | None:
    """Versions between the batch and the oldest token with a loss weight."""
    return version - min(sampled for *_, sampled in entry["spans"]) if entry["spans"] else None
