"""Rollouts in a file, one a line, to be trained on later: what is read is what was written, bit for bit.
Knows no model and no engine.

Lines are JSON. The first is the header (SampledBy, with the format's name and version); every other one is a
rollout: its prompt, the reward (null: nobody gave one), and its branches. Of a branch: token_ids of all
tokens; `loss` and `versions` as [start, end) and [start, end, version), with the number of the engine server
as a fourth where it is known, counted from its first token; behaviour_logprobs of the tokens in `loss` alone,
one after the other, float32 values written in full; `text` is what the tokens say, for people, and is not
read again.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import Field, ValidationError

from asyncrl.errors import ConfigError, RoomError
from asyncrl.messages.base import Message
from asyncrl.messages.protocols import ChatRenderer
from asyncrl.messages.records import Credit, Prompt, Rollout, Trajectory, VersionSpan

FORMAT, FORMAT_VERSION = "asyncrl-rollouts", 1
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Read = TypeVar("Read", bound=Message)


@dataclass(frozen=True, slots=True)
class SampledBy:
    """What the rollouts of a file were sampled from. `model_digest`: weights_digest of the model folder's
    tensors, in their stored type.

    `dtype` is the type that the engines computed in; `tokenizer` a digest of vocabulary and chat template.
    """

    model_digest: str
    dtype: str
    tokenizer: str
    temperature: float


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRollout:
    """One finished rollout of `prompt`. `reward` None: nobody gave one, and the branches' is 0."""

    prompt: Prompt
    attempt: int
    reward: float | None
    rollout: Rollout


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A whole file."""

    sampled_by: SampledBy
    rollouts: tuple[RecordedRollout, ...]


class _Header(Message):
    format: Literal["asyncrl-rollouts"]
    version: int
    model_digest: str
    dtype: str
    tokenizer: str
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _PromptLine(Message):
    prompt_id: str
    messages: list[dict[str, Any]]
    answer: Any = None
    info: dict[str, Any] = {}


class _CreditLine(Message):
    start: Count
    end: Count
    reward: Finite
    unit: Count


class _BranchLine(Message):
    token_ids: list[Count]
    loss: list[tuple[Count, Count]]
    behaviour_logprobs: list[Finite]
    versions: list[tuple[Count, Count, Count] | tuple[Count, Count, Count, Count]]
    is_truncated: bool
    num_interruptions: Count
    metrics: dict[str, Finite]
    credits: list[_CreditLine]
    text: str = ""


class _RolloutLine(Message):
    prompt: _PromptLine
    sample_index: Count
    attempt: Count
    reward: Finite | None
    branches: Annotated[list[_BranchLine], Field(min_length=1)]


class RecordFile:
    """A file that rollouts are put behind, one line each, whole.

    Life:       opened: new, or with its lines checked and the same header -> append -> close. A line is
    written at once, so that a
                process that is killed leaves whole lines, the last one aside.
    """

    def __init__(self, path: Path, sampled_by: SampledBy, *, must_be_new: bool = False) -> None:
        """Raises ConfigError if it cannot be written, is no such file, is damaged, or was sampled from
        something else.
        """
        self.path, self.sampled_by = path, sampled_by
        self.before: tuple[RecordedRollout, ...] = ()
        """What it held when it was opened."""
        try:
            has_lines = path.exists() and path.stat().st_size > 0
            if has_lines and must_be_new:
                raise ConfigError(
                    f"{path} holds something already",
                    rule="these rollouts are one recording",
                    way_out="name a new file.",
                )
            if has_lines:
                recording = read_recording(path)
                refuse_difference(path, recording.sampled_by, sampled_by)
                self.before = recording.rollouts
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            if not has_lines:
                self._write({"format": FORMAT, "version": FORMAT_VERSION, **asdict(sampled_by)})
        except OSError as error:
            raise ConfigError(
                f"cannot write rollouts to {path}: {error}", way_out="name another file."
            ) from error

    def __repr__(self) -> str:
        return f"<RecordFile {self.path}>"

    def append(self, record: RecordedRollout, texts: Sequence[str]) -> None:
        """Write a rollout; `texts` of its branches. Raises OSError, and ValueError for a prompt that would
        not be the same when read.
        """
        prompt, first = record.prompt, record.rollout[0]
        _check_same(prompt)
        self._write(
            {
                "prompt": {
                    "prompt_id": prompt.prompt_id,
                    "messages": list(prompt.messages),
                    "answer": prompt.answer,
                    "info": dict(prompt.info),
                },
                "sample_index": first.sample_index,
                "attempt": record.attempt,
                "reward": record.reward,
                "branches": [
                    _branch_line(branch, text) for branch, text in zip(record.rollout, texts, strict=True)
                ],
            }
        )

    def close(self) -> None:
        """Idempotent."""
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()


def read_recording(path: Path) -> Recording:
    """All lines, checked. Raises ConfigError with the number of the line that is torn or wrong."""
    try:
        *lines, rest = path.read_text(encoding="utf-8").split(
            "\n"
        )  # not splitlines(): U+2028 in a text ends no line
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read recorded rollouts from {path}: {error}",
            way_out="give a file that `asyncrl serve gateway --record` has written.",
        ) from error
    if rest:
        raise _bad(path, len(lines) + 1, "it is torn: it has no end")
    if not lines:
        raise _bad(path, 1, "there is no header")
    header = _parse(path, 1, lines[0], _Header)
    if header.version != FORMAT_VERSION:
        raise _bad(path, 1, f"format version {header.version}, this asyncrl reads {FORMAT_VERSION}")
    found: list[RecordedRollout] = []
    prompts: dict[str, Prompt] = {}
    places: dict[tuple[str, int], int] = {}
    for number, line in enumerate(lines[1:], 2):
        record = _record(path, number, _parse(path, number, line, _RolloutLine))
        prompt, index = record.prompt, record.rollout[0].sample_index
        if prompts.setdefault(prompt.prompt_id, prompt) != prompt:
            raise _bad(path, number, f"prompt {prompt.prompt_id} is another one than before")
        if (earlier := places.setdefault((prompt.prompt_id, index), number)) != number:
            raise _bad(
                path, number, f"sample {index} of prompt {prompt.prompt_id} is in line {earlier} already"
            )
        found.append(record)
    return Recording(
        SampledBy(header.model_digest, header.dtype, header.tokenizer, header.temperature), tuple(found)
    )


def refuse_difference(path: Path, recorded: SampledBy, now: SampledBy) -> None:
    """Raise ConfigError if the rollouts of a file were sampled from something else than what samples now."""
    names = {
        "model_digest": "the weights",
        "dtype": "model.dtype",
        "tokenizer": "tokenizer or chat template",
        "temperature": "temperature",
    }
    then, new = asdict(recorded), asdict(now)
    differ = [
        f"{what}: {then[key]} then, {new[key]} now" for key, what in names.items() if then[key] != new[key]
    ]
    if differ:
        raise ConfigError(
            f"the rollouts in {path} were sampled from something else: {'; '.join(differ)}",
            rule="recorded tokens are data of the policy that sampled them, whose probabilities stand beside "
            "them",
            way_out="use the model and the settings of the recording, or record anew with these.",
        )


def _branch_line(branch: Trajectory, text: str) -> dict[str, Any]:
    return {
        "text": text,
        "token_ids": branch.token_ids.tolist(),
        "loss": spans_of(branch.loss_mask),
        "behaviour_logprobs": branch.behaviour_logprobs[branch.loss_mask].astype(np.float64).tolist(),
        "versions": [span.plain for span in branch.version_spans],
        "is_truncated": branch.is_truncated,
        "num_interruptions": branch.num_interruptions,
        "metrics": dict(branch.metrics),
        "credits": [asdict(credit) for credit in branch.credits],
    }


def spans_of(mask: np.ndarray[Any, np.dtype[np.bool_]]) -> list[list[int]]:
    """[start, end) of each run of true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return edges.reshape(-1, 2).tolist()


def _record(path: Path, number: int, line: _RolloutLine) -> RecordedRollout:
    prompt = Prompt(line.prompt.prompt_id, tuple(line.prompt.messages), line.prompt.answer, line.prompt.info)
    branches = tuple(_trajectory(path, number, line, index) for index in range(len(line.branches)))
    if len({bool(branch.credits) for branch in branches}) > 1:
        raise _bad(path, number, "some branches have credits and some have none")
    return RecordedRollout(prompt, line.attempt, line.reward, branches)


def _trajectory(path: Path, number: int, line: _RolloutLine, index: int) -> Trajectory:
    branch = line.branches[index]
    length = len(branch.token_ids)
    mask = np.zeros(length, dtype=np.bool_)
    for start, end in branch.loss:
        mask[start:end] = True
    logprobs = np.zeros(length, dtype=np.float32)
    if spans_of(mask) != [list(span) for span in branch.loss] or not mask.any():
        raise _bad(
            path,
            number,
            f"branch {index}: loss {branch.loss} are no spans of {length} tokens, in order and apart",
        )
    if len(branch.behaviour_logprobs) != int(mask.sum()):
        raise _bad(
            path,
            number,
            f"branch {index}: {len(branch.behaviour_logprobs)} logprobs for {int(mask.sum())} sampled tokens",
        )
    logprobs[mask] = branch.behaviour_logprobs
    if not np.array_equal(logprobs[mask].astype(np.float64), branch.behaviour_logprobs):
        raise _bad(path, number, f"branch {index}: a logprob is no float32 value")
    credits = tuple(Credit(credit.start, credit.end, credit.reward, credit.unit) for credit in branch.credits)
    for what, spans in (
        ("versions", [span[:2] for span in branch.versions]),
        ("credits", [(one.start, one.end) for one in credits]),
    ):
        if (spans or what == "versions") and not _covers(spans, mask):
            raise _bad(
                path,
                number,
                f"branch {index}: {what} do not cover the tokens of `loss`, each once and in order",
            )
    return Trajectory(
        sample_index=line.sample_index,
        token_ids=np.array(branch.token_ids, dtype=np.int32),
        loss_mask=mask,
        behaviour_logprobs=logprobs,
        version_spans=tuple(VersionSpan(*span) for span in branch.versions),
        reward=0.0 if line.reward is None else line.reward,
        is_truncated=branch.is_truncated,
        num_interruptions=branch.num_interruptions,
        metrics=branch.metrics,
        branch=index,
        credits=credits,
    )


def _covers(spans: Sequence[tuple[int, int]], mask: np.ndarray[Any, np.dtype[np.bool_]]) -> bool:
    places = [place for start, end in spans for place in range(start, min(end, len(mask) + 1))]
    return places == np.flatnonzero(mask).tolist()


def _check_same(prompt: Prompt) -> None:
    given = {"messages": list(prompt.messages), "answer": prompt.answer, "info": dict(prompt.info)}
    try:
        is_same = json.loads(json.dumps(given, allow_nan=False)) == given
    except (TypeError, ValueError, RecursionError):
        is_same = False
    if not is_same:
        raise ValueError(
            f"prompt {prompt.prompt_id} cannot be recorded: its messages, answer and info must be plain JSON "
            f"(no tuples)"
        )


def _parse(path: Path, number: int, line: str, shape: type[Read]) -> Read:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _bad(path, number, f"it is torn, or no JSON ({error})") from error
    try:
        return shape.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _bad(path, number, f"{where + ': ' if where else ''}{first['msg']}") from error


def _bad(path: Path, number: int, what: str) -> ConfigError:
    return ConfigError(
        f"line {number} of {path}: {what}",
        rule="every line of a recording is read, or none is",
        way_out=f"if a process was killed while it wrote the last line, remove that line (sed -i {number}d "
        f"FILE); else record anew.",
    )


# Puts finished rollouts into a file, with their text for people. Knows no session and no harness.


log = logging.getLogger(__name__)


class Recorder:
    """The writer of `--record`. Without a file it records nothing.

    Life: opened with its file -> record, once a rollout -> close. What cannot be written ends the command: it
    was asked for.
    """

    def __init__(
        self, file: RecordFile | None, tokenizer: ChatRenderer, *, warn: Callable[[str], None]
    ) -> None:
        self._file, self._tokenizer, self._warn = file, tokenizer, warn
        self.num_recorded = 0
        self._samples = (
            Counter(record.prompt.prompt_id for record in file.before) if file is not None else Counter[str]()
        )

    def __repr__(self) -> str:
        return f"<Recorder {self.num_recorded} recorded in {self._file!r}>"

    def next_sample(self, prompt_id: str) -> int:
        """Number of samples that there are of this prompt: the index of the next one."""
        return self._samples[prompt_id]

    def record(self, prompt: Prompt, attempt: int, reward: float | None, rollout: Rollout) -> None:
        """Write it. Raises RoomError if the file cannot be written; a prompt that is no JSON is told and left
        out.
        """
        self._samples[prompt.prompt_id] += 1
        if self._file is None:
            return
        texts = [
            self._tokenizer.decode(branch.token_ids.tolist(), skip_special_tokens=False) for branch in rollout
        ]
        try:
            self._file.append(RecordedRollout(prompt, attempt, reward, rollout), texts)
        except OSError as error:
            raise RoomError(
                "recording",
                f"cannot write {self._file.path}: {error}",
                way_out="free space, or name another file.",
            ) from error
        except ValueError as error:
            self._warn(f"not recorded: {error}")
            return
        self.num_recorded += 1

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            self._file.close()
