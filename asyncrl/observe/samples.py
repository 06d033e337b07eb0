"""samples.jsonl: a few rollouts of each step as text, one JSON object a line.

The text may be hostile. Long texts are cut.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict, TypeAdapter, with_config
from typing_extensions import TypedDict

from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.messages.records import Batch, Group, GroupId, Prompt, Rollout, Trajectory
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


class ShownPart(TypedDict):
    """Neighboring tokens of a branch: all sampled, or all given (prompt, tool results)."""

    branch: int
    is_sampled: bool
    text: str


@with_config(ConfigDict(allow_inf_nan=False))
class ShownRollout(TypedDict):
    """A rollout as text.

    `step`: the step that trained on it, or the next step for a failed one; `metrics`: parts of the
    reward; `versions`: oldest and newest policy_version; `staleness`: of its oldest token in the loss;
    `logprob_gap`: mean |engine - trainer| in nats over fresh tokens.
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


Decode = Callable[..., str]
"""HFChatTokenizer.decode."""


def choose(batch: Batch, num: int, seed: int) -> list[tuple[SampleKind, Group, Rollout]]:
    """Pick the best and the worst rollout by reward, then random ones (seeded), `num` in all."""
    rollouts = [(group, rollout) for group in batch.groups for rollout in rollouts_of(group)]
    *others, best = sorted(rollouts, key=lambda entry: entry[1][0].reward)
    found: list[tuple[SampleKind, Group, Rollout]] = [("best", *best)]
    found += [("worst", *entry) for entry in others[:1]]
    others = others[1:]
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
    versions = [span.version for branch in rollout for span in branch.version_spans]
    in_loss = [version for version in versions if min_version is not None and version >= min_version]
    parts = [part for branch in rollout for part in _parts(branch, decode)]
    messages = prompt.messages[-MAX_MESSAGES:]
    return {
        "step": step,
        "prompt_id": prompt.prompt_id,
        "task": prompt.task or None,
        "messages": [{name: _cut(value) for name, value in message.items()} for message in messages],
        "answer": None if prompt.answer is None else _cut(str(prompt.answer)),
        "reward": float(rollout[0].reward) if min_version is not None else None,
        "metrics": {name: float(value) for name, value in rollout[0].metrics.items()} if rollout else {},
        "num_sampled": sum(branch.num_sampled for branch in rollout),
        "versions": [int(min(versions)), int(max(versions))] if versions else [],
        "staleness": int(step - 1 - min(in_loss)) if in_loss else None,
        "logprob_gap": gap,
        "is_truncated": any(branch.is_truncated for branch in rollout),
        "num_interruptions": sum(branch.num_interruptions for branch in rollout),
        "parts": parts[-MAX_PARTS:],
        "error": error and _cut(error),
    }


def _parts(branch: Trajectory, decode: Decode) -> Iterator[ShownPart]:
    mask = branch.loss_mask
    edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
    for first, end in itertools.pairwise(edges):
        text = decode(branch.token_ids[first:end].tolist(), skip_special_tokens=False)
        yield {"branch": branch.branch, "is_sampled": bool(mask[first]), "text": _cut(text)}


def _cut(value: Any) -> str:
    """Keep beginning and end of a long text, without lone surrogates."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return _middle_cut(text, MAX_CHARS).encode(errors="replace").decode()


def _middle_cut(text: str, most: int | None) -> str:
    if most is None or len(text) <= most:
        return text
    return f"{text[: most - most // 3]} [...] {text[-(most // 3) :]}"


@dataclass
class SampleWriter:
    """Raises OSError."""

    run_dir: Path
    seed: int
    per_step: int
    _next_step: int = 1
    _num_failed: int = 0

    def resume_at(self, step: int) -> None:
        """Drop lines from `step` on, which is trained again."""
        self._next_step = step
        for path in (self.run_dir / SAMPLES_FILE, older_of(self.run_dir / SAMPLES_FILE)):
            if path.exists():
                cut_steps(path, step - 1)

    def step(self, batch: Batch, gaps: Mapping[tuple[int, int], float], decode: Decode) -> list[ShownRollout]:
        """`gaps` by group and sample."""
        self._next_step = batch.version + 2
        self._num_failed = 0
        samples: list[Any] = []
        for kind, group, rollout in choose(batch, self.per_step, self.seed):
            index = rollout[0].sample_index
            text = shown(
                group.prompt,
                rollout,
                decode,
                step=batch.version + 1,
                gap=gaps.get((group.group_id, index)),
                min_version=batch.min_version,
            )
            samples.append({"kind": kind, "group_id": int(group.group_id), "sample_index": index, **text})
        return self._append(samples)

    def failed(
        self, group_id: GroupId, prompt: Prompt, failed: FailedRollout, decode: Decode
    ) -> list[ShownRollout]:
        """Write a failed rollout, if few were written since the last step."""
        self._num_failed += 1
        if self._num_failed > self.per_step:
            return []
        rollout: Rollout = ()
        with contextlib.suppress(RolloutFailure):  # nothing was sampled
            rollout = failed.seen()
        error = f"{how_failed(failed.num_attempts)}: {failed.failure}"
        text = shown(prompt, rollout, decode, step=self._next_step, error=error)
        name = {"kind": "failed", "group_id": int(group_id), "sample_index": failed.sample_index}
        return self._append([name | text])

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
    reward = "no reward" if sample["reward"] is None else f"reward {plain(sample['reward'])}"
    what = "failed rollout" if sample["kind"] == "failed" else f"{sample['kind']} sample"
    gap = sample["logprob_gap"]
    words = [
        f"{what} of step {sample['step']}: {reward}",
        *(f"{name} {plain(value)}" for name, value in sample["metrics"].items()),
        sample["versions"] and f"versions {'..'.join(map(str, dict.fromkeys(sample['versions'])))}",
        sample["staleness"] is not None and f"staleness {sample['staleness']}",
        several(sample["num_sampled"], "token"),
        gap is not None and f"logprob gap {gap:.2g}",
        sample["is_truncated"] and "truncated",
        sample["num_interruptions"] and several(sample["num_interruptions"], "interruption"),
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
            lines += _block(message.get("role", "?")[:LABEL], message.get("content", ""), most)
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


def samples_text(samples: Sequence[ShownRollout], run_dir: Path, problems: Sequence[str]) -> str:
    """Raises ConfigError if there are no samples."""
    if not samples:
        raise ConfigError(
            f"{run_dir} has no such sample",
            rule="only observe.samples_per_step rollouts of a step are written",
            way_out=f"`asyncrl inspect {run_dir} --samples` shows the newest.",
        )
    texts = [f"problem: {harmless(problem)}" for problem in problems]
    return "\n\n".join([*texts, *map(sample_text, samples)])
