"""samples.jsonl: a few rollouts of each step as text, one JSON object a line.

The text may be hostile. Long texts are cut.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired

import numpy as np
from pydantic import ConfigDict, TypeAdapter, with_config
from typing_extensions import TypedDict

from asyncrl.base.errors import ConfigError
from asyncrl.messages.records import (
    Batch,
    Group,
    GroupId,
    Prompt,
    Rollout,
    Trajectory,
    num_sampled,
    versions_of,
)
from asyncrl.observe.metrics import rollouts_of
from asyncrl.observe.run_dir import append_bounded, cut_steps, older_of, read_bounded
from asyncrl.observe.run_numbers import plain, several
from asyncrl.rollouts.rollout import FailedRollout, how_failed

SampleKind = Literal["best", "worst", "random", "failed"]
"""Best and worst reward of the batch, random (seeded), or failed."""
SAMPLES_FILE = "samples.jsonl"
MAX_BYTES = 20_000_000
"""A larger file replaces samples.1.jsonl."""
MAX_PARTS = 40
MAX_CHARS = 4000
MAX_MESSAGES = 40
"""Limits: parts of a rollout, characters of a part or message, messages."""
MAX_MATES = 8
MATE_CHARS = 60
"""Limits: rollouts shown of a group, and characters of each if the sample itself is
short.
"""
SLACK = 8
"""Characters that may be between two tokens: a space, or a character of several tokens.
"""


class ShownPart(TypedDict):
    """Neighboring tokens of a branch: all sampled, or all given (prompt, tool results).

    A sampled part has `tokens`, three characters for each token: chr(48 + its length in
    `text`), and its probability in percent, 00 to 99. `versions`: [first token,
    policy_version]. `reward`: of the turn. `agent`: of a sub-agent's call. A cut text
    has `tokens` for its beginning.

    Example: text "so 42", tokens "297392", versions [[0, 7], [1, 8]]: version 7 sampled
    "so" (97 %), version 8 sampled " 42" (92 %).
    """

    branch: int
    is_sampled: bool
    text: str
    num_tokens: NotRequired[int]
    tokens: NotRequired[str]
    versions: NotRequired[list[tuple[int, int]]]
    reward: NotRequired[float]
    agent: NotRequired[str]


Mate = tuple[int, float, float | None, int, str]
"""A rollout of a group: sample_index, reward, advantage, sampled tokens, text of the
last branch.
"""


@with_config(ConfigDict(allow_inf_nan=False))
class ShownRollout(TypedDict):
    """A rollout as text.

    `step`: the step that trained on it, or the next step for a failed one; `rewards`:
    parts of the reward; `versions`: oldest and newest policy_version; `staleness`: of
    its oldest token in the loss; `logprob_gap`: mean |engine - trainer| in nats over
    fresh tokens; `advantage`: the trainer's, mean over tokens in the loss; `group`: it
    and others of its group, the best first.
    """

    step: int
    kind: SampleKind
    group_id: int
    sample_index: int
    prompt_id: str
    task: str | None
    messages: list[dict[str, str]]
    answer: str | None
    reward: float | None
    rewards: NotRequired[dict[str, float]]
    metrics: dict[str, float]
    num_sampled: int
    versions: list[int]
    staleness: int | None
    logprob_gap: float | None
    is_truncated: bool
    num_interruptions: int
    parts: list[ShownPart]
    error: str | None
    advantage: NotRequired[float | None]
    group: NotRequired[list[Mate]]


_SHOWN = TypeAdapter(ShownRollout)
Decode = Callable[..., str]
"""HFChatTokenizer.decode."""
ByRollout = Mapping[tuple[int, int], float]
"""A value of rollouts by group_id and sample_index."""


def choose(
    batch: Batch, num: int, seed: int
) -> list[tuple[SampleKind, Group, Rollout]]:
    """Pick the best and the worst rollout by reward, then random ones (seeded), `num`
    in all.
    """
    rollouts = [
        (group, rollout) for group in batch.groups for rollout in rollouts_of(group)
    ]
    *others, best = sorted(rollouts, key=lambda entry: entry[1][0].reward)
    found: list[tuple[SampleKind, Group, Rollout]] = [("best", *best)]
    found += [("worst", *entry) for entry in others[:1]]
    others = others[1:]
    # By step, so that a step that is trained again shows the same rollouts.
    random.Random(f"{seed} {batch.version}").shuffle(others)
    return (found + [("random", *entry) for entry in others])[:num]


def shown(
    prompt: Prompt,
    rollout: Rollout,
    decode: Decode,
    *,
    step: int,
    gap: float | None = None,
    min_version: int | None = None,
    error: str | None = None,
) -> dict[str, Any]:
    """Return all of a ShownRollout but kind, group_id and sample_index.

    `min_version`: oldest version in the loss; None if it was not trained on.
    """
    versions = versions_of(rollout)
    in_loss = [
        version
        for version in versions
        if min_version is not None and version >= min_version
    ]
    parts = [part for branch in rollout for part in _parts(branch, decode)]
    messages = prompt.messages[-MAX_MESSAGES:]
    return {
        "step": step,
        "prompt_id": prompt.prompt_id,
        "task": prompt.task or None,
        "messages": [
            {name: _cut(value) for name, value in message.items()}
            for message in messages
        ],
        "answer": None if prompt.answer is None else _cut(str(prompt.answer)),
        "reward": float(rollout[0].reward) if min_version is not None else None,
        "rewards": rollout[0].part_values if rollout else {},
        "metrics": {name: float(value) for name, value in rollout[0].metrics.items()}
        if rollout
        else {},
        "num_sampled": num_sampled(rollout),
        "versions": [int(min(versions)), int(max(versions))] if versions else [],
        "staleness": int(step - 1 - min(in_loss)) if in_loss else None,
        "logprob_gap": gap,
        "is_truncated": any(branch.is_truncated for branch in rollout),
        "num_interruptions": sum(branch.num_interruptions for branch in rollout),
        "parts": parts[-MAX_PARTS:],
        "error": None if error is None else _cut(error),
    }


def _parts(branch: Trajectory, decode: Decode) -> Iterator[ShownPart]:
    mask = branch.loss_mask
    edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
    for first, end in itertools.pairwise(edges):
        ids = branch.token_ids[first:end].tolist()
        text = decode(ids, skip_special_tokens=False)
        is_sampled = bool(mask[first])
        part: ShownPart = {
            "branch": branch.branch,
            "is_sampled": is_sampled,
            "text": _cut(text),
            "num_tokens": end - first,
        }
        if is_sampled:
            # Only the beginning that _cut keeps has marks: the rest would not fit its
            # text.
            most = len(text) if len(text) <= MAX_CHARS else MAX_CHARS - MAX_CHARS // 3
            ends = token_ends(ids, text, most, decode)
            part["tokens"] = _marks(
                ends, branch.tokens.behaviour_logprobs[first:end].tolist()
            )
            part["versions"] = [
                (span.start - first, int(span.version))
                for span in branch.tokens.spans
                if first <= span.start < end
            ]
        agents = [call.agent for call in branch.calls if call.start <= first < call.end]
        if any(agents):
            part["agent"] = agents[0]
        inside = [each for each in branch.credits if first <= each.start < end]
        if num := sum(each.end - each.start for each in inside):
            earned = sum(each.reward * (each.end - each.start) for each in inside)
            part["reward"] = earned / num
        yield part


def token_ends(ids: Sequence[int], text: str, most: int, decode: Decode) -> list[int]:
    """Return where each token ends in `text`, up to character `most`.

    Several tokens of one character count for the last of them. The rest of a text that
    single tokens do not spell belongs to no token.

    Each token is decoded by itself and searched for within a few characters from the
    end of the token before. Example: the text "é ok" of four tokens. The first two are
    the bytes of "é", which decode to U+FFFD and are not found.

        token     byte 1    byte 2    " "    "ok"
        end       0         1         2      4
    """
    ends: list[int] = []
    end = 0
    is_unknown = False
    for token in ids:
        piece = decode([token], skip_special_tokens=False)
        found = text.find(piece, end, end + len(piece) + SLACK)
        # The text between is of the unknown token before.
        if found > end and is_unknown:
            ends[-1] = found
        is_unknown = found < 0
        end = end if is_unknown else found + len(piece)
        ends.append(end)
        if end >= most:
            break
    if most - end <= SLACK:
        ends[-1] = most
    return ends


def _marks(ends: Sequence[int], logprobs: Sequence[float]) -> str:
    """Return ShownPart.tokens."""
    marks = []
    for (start, end), logprob in zip(
        itertools.pairwise([0, *ends]), logprobs, strict=False
    ):
        # Two digits, so that each token has three characters.
        percent = min(99, int(100 * math.exp(logprob)))
        marks.append(f"{chr(48 + end - start)}{percent:02}")
    return "".join(marks)


def _mates(
    group: Group, own: Rollout, advantages: ByRollout, decode: Decode
) -> list[Mate]:
    """Return `own` and other rollouts of its group, the best first.

    Their texts, cut in the middle, are together about as long as the text of `own`.
    """
    # About four characters are a token; with up to MAX_MATES others of an eighth of the
    # sample's length each, the group takes as much space as the sample.
    most = max(MATE_CHARS, num_sampled(own) // 2)
    others = [
        rollout
        for rollout in rollouts_of(group)
        if rollout[0].sample_index != own[0].sample_index
    ]
    # Sorted, so that every n-th rollout below also spans the rewards of a large group.
    others.sort(key=lambda rollout: rollout[0].reward)
    mates: list[Mate] = []
    for rollout in (own, *others[:: 1 + len(others) // MAX_MATES]):
        last = rollout[-1]
        text = decode(
            last.token_ids[last.loss_mask].tolist(), skip_special_tokens=False
        )
        mates.append(
            (
                last.sample_index,
                round(float(last.reward), 6),
                advantages.get((group.group_id, last.sample_index)),
                num_sampled(rollout),
                _cut(_middle_cut(text, most)),
            )
        )
    return sorted(mates, key=lambda mate: -mate[1])


def _cut(value: object) -> str:
    """Keep beginning and end of a long text, without lone surrogates."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return _middle_cut(text, MAX_CHARS).encode(errors="replace").decode()


def _middle_cut(text: str, most: int | None) -> str:
    if most is None or len(text) <= most:
        return text
    return f"{text[: most - most // 3]} [...] {text[-(most // 3) :]}"


@dataclass
class SampleWriter:
    """Writes rollouts of each step, and some failed ones, to samples.jsonl. Raises
    OSError.
    """

    run_dir: Path
    seed: int
    per_step: int
    _next_step: int = 1
    _num_failed: int = 0

    def resume_at(self, step: int) -> None:
        """Drop lines from `step` on, which is trained again."""
        self._next_step = step
        for path in (
            self.run_dir / SAMPLES_FILE,
            older_of(self.run_dir / SAMPLES_FILE),
        ):
            if path.exists():
                cut_steps(path, step - 1)

    def step(
        self, batch: Batch, gaps: ByRollout, advantages: ByRollout, decode: Decode
    ) -> list[ShownRollout]:
        self._next_step = batch.version + 2
        self._num_failed = 0
        samples: list[Any] = []
        for kind, group, rollout in choose(batch, self.per_step, self.seed):
            group_id = int(group.group_id)
            index = rollout[0].sample_index
            text = shown(
                group.prompt,
                rollout,
                decode,
                step=batch.version + 1,
                gap=gaps.get((group_id, index)),
                min_version=batch.min_version,
            )
            samples.append(
                {
                    "kind": kind,
                    "group_id": group_id,
                    "sample_index": index,
                    **text,
                    "advantage": advantages.get((group_id, index)),
                    "group": _mates(group, rollout, advantages, decode),
                }
            )
        return self._append(samples)

    def add_failed(
        self,
        group_id: GroupId,
        prompt: Prompt,
        failed: FailedRollout,
        rollout: Rollout,
        decode: Decode,
    ) -> list[ShownRollout]:
        """Write the sampled part of a failed rollout, if few were written since the last
        step.
        """
        self._num_failed += 1
        # A broken reward fails every rollout, and would fill the file with one message.
        if self._num_failed > self.per_step:
            return []
        failure = failed.failure
        error = f"{how_failed(failed.num_attempts)} ({failure.kind}): {failure}"
        sample = {
            "kind": "failed",
            "group_id": int(group_id),
            "sample_index": failed.sample_index,
            **shown(prompt, rollout, decode, step=self._next_step, error=error),
        }
        return self._append([sample])

    def _append(self, samples: list[Any]) -> list[ShownRollout]:
        append_bounded(self.run_dir / SAMPLES_FILE, samples, MAX_BYTES)
        return samples


def read_samples(run_dir: Path, problems: list[str]) -> list[ShownRollout]:
    """Return samples by step."""
    return [*read_bounded(run_dir / SAMPLES_FILE, problems, _SHOWN)]


# ---- as text

NEWEST = 10
"""Samples shown as text without --step and --group."""
LABEL = 12
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def harmless(text: str) -> str:
    """Escape control characters except the line end."""
    return "".join(
        char
        if char == "\n" or unicodedata.category(char) not in _HIDDEN
        else char.encode("unicode_escape").decode()
        for char in text
    )


def headline(sample: ShownRollout) -> str:
    reward = (
        "no reward" if sample["reward"] is None else f"reward {plain(sample['reward'])}"
    )
    what = (
        "failed rollout" if sample["kind"] == "failed" else f"{sample['kind']} sample"
    )
    gap = sample["logprob_gap"]
    advantage = sample.get("advantage")
    words = [
        f"{what} of step {sample['step']}: {reward}",
        *(
            f"{name} {plain(value)}"
            for name, value in sample.get("rewards", {}).items()
        ),
        advantage is not None and f"advantage {advantage:+.3g}",
        *(f"{name} {plain(value)}" for name, value in sample["metrics"].items()),
        sample["versions"]
        and f"versions {'..'.join(map(str, dict.fromkeys(sample['versions'])))}",
        sample["staleness"] is not None and f"staleness {sample['staleness']}",
        several(sample["num_sampled"], "token"),
        gap is not None and f"logprob gap {gap:.2g}",
        sample["is_truncated"] and "truncated",
        sample["num_interruptions"]
        and several(sample["num_interruptions"], "interruption"),
        f"group {sample['group_id']} sample {sample['sample_index']}, prompt {sample['prompt_id']}",
    ]
    return harmless(", ".join(str(word) for word in words if word).replace("\n", " "))


def sample_text(sample: ShownRollout, *, most: int | None = None) -> str:
    """Show at most `most` characters of each part, and only the last four parts."""
    lines = [headline(sample)]
    if sample["error"]:
        lines += _block("failed", sample["error"], most)
    if not sample["parts"]:
        for message in sample["messages"]:
            lines += _block(
                message.get("role", "?")[:LABEL], message.get("content", ""), most
            )
    branch = 0
    for part in sample["parts"] if most is None else sample["parts"][-4:]:
        if part["branch"] != branch:
            branch = part["branch"]
            lines.append(f"  branch {branch}")
        given = "prompt" if part is sample["parts"][0] else "context"
        lines += _block("model" if part["is_sampled"] else given, part["text"], most)
    if sample["answer"] is not None:
        lines += _block("answer", sample["answer"], most)
    return "\n".join(lines)


def _block(label: str, text: str, most: int | None) -> Iterator[str]:
    """Add a margin, so that a text cannot imitate our lines."""
    for line in harmless(_middle_cut(text, most).replace("\r\n", "\n")).split("\n"):
        yield f"{harmless(label):>{LABEL}} | {line}"
        label = ""


def samples_text(
    samples: Sequence[ShownRollout], run_dir: Path, problems: Sequence[str]
) -> str:
    """Return the samples as text. Raises ConfigError if there are none."""
    if not samples:
        raise ConfigError(
            f"{run_dir} has no such sample",
            rule="only observe.samples_per_step rollouts of a step are written",
            way_out=f"`asyncrl inspect {run_dir} --samples` shows the newest.",
        )
    texts = [f"problem: {harmless(problem)}" for problem in problems]
    return "\n\n".join([*texts, *map(sample_text, samples)])
