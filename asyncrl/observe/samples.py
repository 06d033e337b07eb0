"""samples.jsonl: a few rollouts of each step as text, one JSON object a line. Bounded: long texts are cut.

Text is hostile: a model wrote it. The record of training is trained.jsonl.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, Protocol

import numpy as np
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from asyncrl.base.errors import RolloutFailure
from asyncrl.messages.records import Batch, Group, GroupId, Prompt, Rollout, Trajectory
from asyncrl.observe.metrics import rollouts_of
from asyncrl.observe.run_dir import SAMPLES_FILE, append_lines, read_jsonl, tell
from asyncrl.rollouts.rollout import FailedRollout

SampleKind = Literal["best", "worst", "random", "failed"]
"""Best and worst reward of the batch, by chance (seeded), or failed."""
MAX_BYTES = 64_000_000
"""Size of the file above which every other older step is dropped."""
MAX_TOKENS, MAX_PARTS, MAX_CHARS, MAX_MESSAGES = 1024, 40, 4000, 40
"""Tokens of a part, parts of a rollout, characters of a message, messages."""


class ShownPart(TypedDict):
    """Neighboring tokens of a branch as text: all sampled, or all given (prompt, tool results)."""

    branch: int
    is_sampled: bool
    text: str


class ShownRollout(TypedDict):
    """A rollout as text. `step`: the step that trained on it, or the next step for a failed one; `metrics`:
    parts of the reward; `versions`: oldest and newest policy_version of its tokens; `staleness`: age of its
    oldest token in the loss; `logprob_gap`: mean of |engine - trainer| in nats over its fresh tokens;
    `error`: reason of a failure.
    """

    step: int
    kind: SampleKind
    group_id: int
    sample_index: int
    prompt_id: str
    task: NotRequired[str]
    messages: list[dict[str, Any]]
    answer: NotRequired[str]
    reward: float | None
    metrics: dict[str, float]
    num_sampled: int
    versions: list[int]
    staleness: int | None
    logprob_gap: float | None
    is_truncated: bool
    num_interruptions: int
    parts: list[ShownPart]
    error: str | None


_SHOWN = TypeAdapter(ShownRollout)


class SampleDecoder(Protocol):
    """Part of a tokenizer."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the ids."""


def choose(batch: Batch, num: int, seed: int) -> list[tuple[SampleKind, Group, Rollout]]:
    """Pick the best and the worst rollout by reward, then others by chance, `num` in all: the same in every
    run with this seed and batch.
    """
    rollouts = [(group, rollout) for group in batch.groups for rollout in rollouts_of(group)]
    random.Random(f"{seed} {batch.version}").shuffle(rollouts)
    found = list[tuple[SampleKind, Group, Rollout]]()
    picks: tuple[tuple[SampleKind, Any], ...] = (("best", max), ("worst", min))
    for kind, pick in picks[:num]:
        if rollouts:
            entry = pick(rollouts, key=lambda entry: entry[1][0].reward)
            rollouts.remove(entry)
            found.append((kind, *entry))
    return found + [("random", *entry) for entry in rollouts[: num - len(found)]]


def shown(
    kind: SampleKind,
    step: int,
    names: tuple[GroupId, int],
    prompt: Prompt,
    rollout: Rollout,
    decoder: SampleDecoder,
    *,
    gap: float | None = None,
    min_version: int | None = None,
    error: str | None = None,
) -> ShownRollout:
    """Make text of a rollout. `min_version`: the oldest version in the loss, None without training."""
    versions = [span.version for branch in rollout for span in branch.version_spans]
    in_loss = [version for version in versions if min_version is not None and version >= min_version]
    sample: ShownRollout = {
        "step": step,
        "kind": kind,
        "group_id": int(names[0]),
        "sample_index": names[1],
        "prompt_id": prompt.prompt_id,
        "messages": [
            {
                name: _cut(value if isinstance(value, str) else json.dumps(value, default=str))
                for name, value in message.items()
            }
            for message in prompt.messages[-MAX_MESSAGES:]
        ],
        "reward": float(rollout[0].reward) if min_version is not None else None,
        "metrics": {name: float(value) for name, value in rollout[0].metrics.items()} if rollout else {},
        "num_sampled": sum(branch.num_sampled for branch in rollout),
        "versions": [int(min(versions)), int(max(versions))] if versions else [],
        "staleness": int(step - 1 - min(in_loss)) if in_loss else None,
        "logprob_gap": gap,
        "is_truncated": any(branch.is_truncated for branch in rollout),
        "num_interruptions": sum(branch.num_interruptions for branch in rollout),
        "parts": list(itertools.chain.from_iterable(_parts(branch, decoder) for branch in rollout))[
            -MAX_PARTS:
        ],
        "error": error and _cut(error),
    }
    if prompt.task:
        sample["task"] = prompt.task
    if prompt.answer is not None:
        sample["answer"] = _cut(str(prompt.answer))
    return sample


def _parts(branch: Trajectory, decoder: SampleDecoder) -> Iterator[ShownPart]:
    mask = branch.loss_mask
    edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
    for first, end in itertools.pairwise(edges):
        token_ids = branch.token_ids[first:end].tolist()
        shown_ids = [token_ids]
        if len(token_ids) > MAX_TOKENS:
            shown_ids = [token_ids[: MAX_TOKENS // 2], token_ids[-MAX_TOKENS // 2 :]]
        text = " [...] ".join(decoder.decode(ids, skip_special_tokens=False) for ids in shown_ids)
        yield {"branch": branch.branch, "is_sampled": bool(mask[first]), "text": text}


def _cut(text: str) -> str:
    """Keep beginning and end of a long text; as Unicode, without lone surrogates."""
    if len(text) > MAX_CHARS:
        text = f"{text[: MAX_CHARS // 2]} [...] {text[-MAX_CHARS // 2 :]}"
    return text.encode(errors="replace").decode()


class SampleWriter:
    """Writes samples.jsonl. Life: goes_on_at() in a resumed run -> step() and failed(). Raises OSError."""

    def __init__(self, run_dir: Path, *, seed: int, per_step: int, failed_per_step: int) -> None:
        self.path = run_dir / SAMPLES_FILE
        self.seed = seed
        self.per_step = per_step
        self.failed_per_step = failed_per_step
        self._next_step = 1
        self._num_failed = 0

    def goes_on_at(self, step: int) -> None:
        """Drop the lines of steps from `step` on, which are trained again."""
        self._next_step = step
        if self.path.exists():
            self._rewrite(lambda line: line["step"] < step)

    def step(
        self, batch: Batch, gaps: Mapping[tuple[int, int], float], decoder: SampleDecoder
    ) -> list[ShownRollout]:
        """Write some rollouts of a trained batch; `gaps` by group and sample."""
        self._next_step = batch.version + 2
        self._num_failed = 0
        samples = list[ShownRollout]()
        for kind, group, rollout in choose(batch, self.per_step, self.seed):
            names = group.group_id, rollout[0].sample_index
            samples.append(
                shown(
                    *(kind, batch.version + 1, names, group.prompt, rollout, decoder),
                    gap=gaps.get(names),
                    min_version=batch.min_version,
                )
            )
        return self._append(samples)

    def failed(
        self, group_id: GroupId, prompt: Prompt, failed: FailedRollout, decoder: SampleDecoder
    ) -> list[ShownRollout]:
        """Write a rollout that failed for good, if few did since the last step."""
        self._num_failed += 1
        if self._num_failed > self.failed_per_step:
            return []
        rollout: Rollout = ()
        with contextlib.suppress(RolloutFailure):  # nothing was sampled
            rollout = failed.seen.rollout()
        names = group_id, failed.sample_index
        why = f"{failed.how}: {failed.failure}"
        return self._append([shown("failed", self._next_step, names, prompt, rollout, decoder, error=why)])

    def _append(self, samples: list[ShownRollout]) -> list[ShownRollout]:
        if samples:
            append_lines(self.path, samples)
        if samples and self.path.stat().st_size > MAX_BYTES:
            steps = sorted({line["step"] for line in read_jsonl(self.path, [])})
            gone = set(steps[: -max(1, len(steps) // 4)][1::2])
            self._rewrite(lambda line: line["step"] not in gone)
        return samples

    def _rewrite(self, is_kept: Any) -> None:
        unfinished = self.path.with_name(f".{self.path.name}.new")
        unfinished.unlink(missing_ok=True)
        append_lines(unfinished, filter(is_kept, read_jsonl(self.path, [], "step")))
        unfinished.replace(self.path)


def read_samples(
    run_dir: Path,
    problems: list[str],
    step: int | None = None,
    *,
    group: int | None = None,
    kinds: Sequence[str] = (),
    newest: int | None = None,
) -> list[ShownRollout]:
    """Return the samples of a run, a step, a group or some kinds, by step; at most the `newest` ones."""
    found = list[ShownRollout]()
    for line in read_jsonl(run_dir / SAMPLES_FILE, problems, "step", from_end=True):
        if step not in (None, line["step"]) or group not in (None, line.get("group_id")):
            continue
        if kinds and line.get("kind") not in kinds:
            continue
        try:
            json.dumps(line, allow_nan=False)
            found.append(_SHOWN.validate_python(line))
        except ValueError as error:
            why = error.errors()[0]["loc"] if isinstance(error, ValidationError) else error
            tell(problems, f"a line of {SAMPLES_FILE} is no sample, skipped: {why}")
        if len(found) == newest:
            break
    found.reverse()
    return sorted(found, key=lambda sample: sample["step"])
