"""Rollouts in a file, one a line, to be trained on later: what is read is what was written, bit for bit.

Lines are JSON. The first is the header (SampledBy, with the format's name and version); every other one is a
rollout: its prompt, the reward (null: there is none), and its branches. Of a branch, `tokens` is its
trajectory as in the journal (journal.tokens, base64), and `text` what the tokens say, for people, which is
not read again.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO, TypeVar

from pydantic import Base64Bytes, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from asyncrl.errors import ConfigError, RoomError
from asyncrl.journal.tokens import decode_trajectory, encode_trajectory
from asyncrl.messages.base import Message
from asyncrl.messages.records import Prompt, Rollout
from asyncrl.rollouts.tokenizer import HFChatTokenizer

NO_GROUP = 0
Read = TypeVar("Read")


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class SampledBy:
    """What the rollouts of a file were sampled from. `model_digest`: of the names and contents of the
    model's weight files, or `simulated`.

    `dtype` is the type that the engines computed in; `tokenizer` a digest of vocabulary and chat template.
    """

    model_digest: str
    dtype: str
    tokenizer: str
    temperature: Annotated[FiniteFloat, Field(gt=0)]


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class _Header(SampledBy):
    format: Literal["asyncrl-rollouts"]
    version: Literal[2]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRollout:
    """One finished rollout of `prompt`. `reward` None: there is none, and the branches' is 0."""

    prompt: Prompt
    reward: float | None
    rollout: Rollout


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A whole file."""

    sampled_by: SampledBy
    rollouts: tuple[RecordedRollout, ...]


class _PromptLine(Message):
    prompt_id: str
    messages: list[dict[str, Any]]
    answer: Any = None
    info: dict[str, Any] = {}


class _BranchLine(Message):
    text: str
    tokens: Base64Bytes


class _RolloutLine(Message):
    prompt: _PromptLine
    sample_index: int
    reward: FiniteFloat | None
    branches: Annotated[list[_BranchLine], Field(min_length=1)]


class RolloutRecorder:
    """The writer of `--record`. Until a file is opened it records nothing.

    Life: open, a new file or one with its lines checked and the same header -> record, once a rollout ->
        close. A line is written at once, so that a process that is killed leaves whole lines, the last one
        aside. A write that fails ends the command: --record was asked for.
    """

    def __init__(self, tokenizer: HFChatTokenizer, *, warn: Callable[[str], None]) -> None:
        self._tokenizer, self._warn = tokenizer, warn
        self._file: TextIO | None = None
        self._samples = Counter[str]()
        self.num_recorded = 0

    def open(self, path: Path, sampled_by: SampledBy, *, must_be_new: bool = False) -> None:
        """Raises ConfigError if it cannot be written, is no such file, is damaged, or was sampled from
        something else.
        """
        try:
            has_lines = path.exists() and path.stat().st_size > 0
            if has_lines and must_be_new:
                raise ConfigError(f"{path} holds something already", way_out="name a new file.")
            if has_lines:
                recording = read_recording(path)
                refuse_difference(path, recording.sampled_by, sampled_by)
                self._samples.update(record.prompt.prompt_id for record in recording.rollouts)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            if not has_lines:
                _write(self._file, {"format": "asyncrl-rollouts", "version": 2, **asdict(sampled_by)})
        except OSError as error:
            what = f"cannot write rollouts to {path}: {error}"
            raise ConfigError(what, way_out="name another file.") from error

    def next_sample(self, prompt_id: str) -> int:
        """Number of samples that there are of this prompt: the index of the next one."""
        return self._samples[prompt_id]

    def record(self, prompt: Prompt, reward: float | None, rollout: Rollout) -> None:
        """Write it. Raises RoomError if the file cannot be written; a prompt that would not be the same when
        read is left out, with a warning.
        """
        self._samples[prompt.prompt_id] += 1
        if self._file is None:
            return
        row: dict[str, Any] = {"prompt_id": prompt.prompt_id, "messages": list(prompt.messages)}
        row |= {"answer": prompt.answer, "info": dict(prompt.info)}
        try:
            is_same = json.loads(json.dumps(row, allow_nan=False)) == row
        except (TypeError, ValueError, RecursionError):
            is_same = False
        if not is_same:
            self._warn(f"prompt {prompt.prompt_id} is not recorded: it is no plain JSON, or has tuples")
            return
        branches = []
        for branch in rollout:
            text = self._tokenizer.decode(branch.token_ids.tolist(), skip_special_tokens=False)
            tokens = base64.b64encode(encode_trajectory(NO_GROUP, branch)).decode()
            branches.append({"text": text, "tokens": tokens})
        line = {"prompt": row, "sample_index": rollout[0].sample_index, "reward": reward}
        try:
            _write(self._file, {**line, "branches": branches})
        except OSError as error:
            what = f"cannot write {self._file.name}: {error}"
            raise RoomError("recording", what, way_out="free space, or name another file.") from error
        self.num_recorded += 1

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            self._file.close()


def _write(file: TextIO, line: dict[str, Any]) -> None:
    file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
    file.flush()


def read_recording(path: Path) -> Recording:
    """All lines, checked. Raises ConfigError with the number of the line that is torn or wrong."""
    try:
        # not splitlines(): U+2028 in a text ends no line
        *lines, rest = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot read recorded rollouts from {path}: {error}"
        raise ConfigError(what, way_out="give a file of `asyncrl serve gateway --record`.") from error
    if rest:
        raise _bad(path, len(lines) + 1, "it is torn: it has no end")
    header = _parse(path, 1, lines[0] if lines else "", TypeAdapter(_Header))
    of_rollouts, found = TypeAdapter(_RolloutLine), list[RecordedRollout]()
    prompts: dict[str, Prompt] = {}
    places: dict[tuple[str, int], int] = {}
    for number, text in enumerate(lines[1:], 2):
        line = _parse(path, number, text, of_rollouts)
        given, index = line.prompt, line.sample_index
        prompt = Prompt(given.prompt_id, tuple(given.messages), given.answer, given.info)
        if prompts.setdefault(prompt.prompt_id, prompt) != prompt:
            raise _bad(path, number, f"prompt {prompt.prompt_id} is another one than before")
        if (earlier := places.setdefault((prompt.prompt_id, index), number)) != number:
            what = f"sample {index} of prompt {prompt.prompt_id} is in line {earlier} already"
            raise _bad(path, number, what)
        try:
            rollout = tuple(
                decode_trajectory(branch.tokens, NO_GROUP, index, branch_index)
                for branch_index, branch in enumerate(line.branches)
            )
        except ValueError as error:
            raise _bad(path, number, str(error)) from error
        found.append(RecordedRollout(prompt, line.reward, rollout))
    sampled_by = SampledBy(header.model_digest, header.dtype, header.tokenizer, header.temperature)
    return Recording(sampled_by, tuple(found))


def refuse_difference(path: Path, recorded: SampledBy, now: SampledBy) -> None:
    """Raise ConfigError if the rollouts of a file were sampled from something else than what samples now."""
    pairs = [(name, getattr(recorded, name), new) for name, new in asdict(now).items()]
    differ = [f"{name}: {then} then, {new} now" for name, then, new in pairs if then != new]
    if differ:
        raise ConfigError(
            f"the rollouts in {path} were sampled from something else: {'; '.join(differ)}",
            rule="recorded tokens are data of the policy that sampled them",
            way_out="use the model and the settings of the recording, or record anew with these.",
        )


def _parse(path: Path, number: int, line: str, shape: TypeAdapter[Read]) -> Read:
    try:
        return shape.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _bad(path, number, f"{where}: {first['msg']}" if where else first["msg"]) from error


def _bad(path: Path, number: int, what: str) -> ConfigError:
    return ConfigError(
        f"line {number} of {path}: {what}",
        rule="every line of a recording is read, or none is",
        way_out=f"remove that line (sed -i {number}d FILE) if it is the last; else record anew.",
    )
