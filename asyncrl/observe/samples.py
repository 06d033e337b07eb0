"""samples.jsonl: what the model said, a few rollouts a step, as text for people. One JSON object a line.

The record of what was trained on is trained.jsonl; this file is for eyes: bounded, and long texts are cut.
Text is hostile: it is what a model wrote.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from asyncrl.files import lines_from_end, sync
from asyncrl.observe.recorder import SAMPLES_FILE, parse_line, reading, tell

SampleKind = Literal["best", "worst", "random", "failed"]
"""Why a rollout was taken: by its reward among those of its batch; by chance (seeded); as it failed."""

MAX_BYTES = 64_000_000
"""Size of the file from which older steps are thinned out."""


class ShownTokens(TypedDict):
    """Neighbouring tokens of a branch that are all sampled in it, or all not (prompt, tool replies).

    `text` is decoded from all of these tokens together. Of sampled ones, with one entry a token: `pieces`
    (text that a token adds; joined they are `text`), `logprobs` (behaviour, nats), `versions`
    (policy_version) and `in_loss` (false: older than the bound and masked, or never trained on). `cut`:
    tokens that are left out after it: a long stretch is shown as its beginning and its end, and of very many
    stretches the first and the last.
    """

    is_sampled: bool
    text: str
    pieces: NotRequired[list[str]]
    logprobs: NotRequired[list[float]]
    versions: NotRequired[list[int]]
    in_loss: NotRequired[list[bool]]
    cut: NotRequired[int]


class ShownBranch(TypedDict):
    """One branch of a rollout. `parent` and `num_shared`: the branch that it forks from, and how many of its
    first tokens they share; None and 0 for one that begins anew. `stretches` begin after the shared tokens.
    `credits`: [start, end, reward] of its tokens, where turns or branches were rewarded one by one.
    """

    branch: int
    parent: int | None
    num_shared: int
    num_tokens: int
    stretches: list[ShownTokens]
    credits: NotRequired[list[tuple[int, int, float]]]


class ShownRollout(TypedDict):
    """A rollout as people read it.

    `step`: the step that trained on it, or, of a failed one, the step that was next. `task`: name of
    its task, where a run has several. `metrics`: the parts of its reward, and what else task and harness
    report. `spans`: [start, end, version] over all sampled tokens of all branches, in order. `staleness`: of
    its oldest token in the loss. `logprob_gap`: mean of |engine - trainer| in nats over its fresh tokens;
    None if it has none. `error`: why it failed. `cut_branches`: how many more it has.
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
    spans: list[tuple[int, int, int]]
    staleness: int | None
    logprob_gap: float | None
    is_truncated: bool
    num_interruptions: int
    branches: list[ShownBranch]
    cut_branches: NotRequired[int]
    error: str | None


_SHOWN = TypeAdapter(ShownRollout)


def as_sample(line: object) -> ShownRollout:
    """Checks what a line of the file says. Raises ValueError; for NaN and infinity too: a page takes none."""
    sample = _SHOWN.validate_python(line)
    json.dumps(sample, allow_nan=False)
    return sample


def read_samples(
    run_dir: Path,
    problems: list[str],
    step: int | None = None,
    *,
    group: int | None = None,
    kinds: Sequence[str] = (),
    newest: int | None = None,
) -> list[ShownRollout]:
    """The samples of a run, or of one step, group or kind, by step; at most so many of the `newest`, for
    which no more of the file is read than they need. Lines that are none are left out and told in `problems`.
    """
    path, found = run_dir / SAMPLES_FILE, list[ShownRollout]()
    for line in _from_end(path, problems):
        sample = parse_line(line)
        if sample is None:
            tell(problems, f"a line of {path.name} is no JSON object and is left out: {line[:60]!r}")
            continue
        if step not in (None, sample.get("step")) or group not in (None, sample.get("group_id")):
            continue
        if kinds and sample.get("kind") not in kinds:
            continue
        try:
            found.append(as_sample(sample))
        except ValueError as error:
            why = error.errors()[0]["loc"] if isinstance(error, ValidationError) else error
            tell(problems, f"a line of {path.name} is no sample and is left out: {why}")
        if len(found) == newest:
            break
    found.reverse()
    return sorted(found, key=lambda sample: sample["step"])


def _from_end(path: Path, problems: list[str]) -> Iterator[bytes]:
    """Its lines, last first, but for half a line at its end."""
    with reading(path, problems):
        for _, line in lines_from_end(path):
            if line.endswith(b"\n"):
                yield line
            else:
                tell(problems, f"{path.name} ends in half a line, which is left out")


class SampleFile:
    """The file as a run writes it. One thread uses it; every method blocks, and raises OSError.

    Invariant: past `max_bytes` every other one of the older steps goes, until it is below: of the newest
        quarter of the steps all stay, of older ones fewer and fewer. It is replaced as a whole, so a kill at
        any moment leaves whole lines, but for half a one at its end.
    """

    def __init__(self, run_dir: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path, self.max_bytes = run_dir / SAMPLES_FILE, max_bytes

    def append(self, samples: Sequence[ShownRollout]) -> None:
        """Add lines. Half a line that a killed process has left is made a line of its own first."""
        if not samples:
            return
        text = "".join(json.dumps(sample) + "\n" for sample in samples)
        with self.path.open("a+b") as file:
            if end := file.seek(0, os.SEEK_END):
                file.seek(end - 1)
                text = text if file.read(1) == b"\n" else "\n" + text
            file.write(text.encode())
            size = file.tell()
        if size > self.max_bytes:
            self._thin()

    def goes_on_at(self, step: int, *, keeps_failed: bool) -> set[tuple[int, int]]:
        """Steps from `step` on are about to be taken again: drop their lines, and what is no line. Failed
        rollouts stay, if `keeps_failed`: they do not fail again. Returns (group_id, sample_index) of those.
        """
        failed, dropped = set[tuple[int, int]](), False
        keep = list[bool]()
        for sample in self._heads():
            is_failed = keeps_failed and sample.get("kind") == "failed"
            keep.append(bool(sample) and (sample["step"] < step or is_failed))
            dropped |= not keep[-1]
            if is_failed:
                failed.add((sample.get("group_id", -1), sample.get("sample_index", -1)))
        if dropped:
            self._rewrite(keep)
        return failed

    def _thin(self) -> None:
        step_of = [sample.get("step", -1) for sample in self._heads()]
        steps = sorted(set(step_of))
        older = steps[: len(steps) - max(1, len(steps) // 4)]
        if gone := set(older[1::2]):
            self._rewrite([step not in gone for step in step_of])

    def _heads(self) -> Iterator[dict[str, Any]]:
        """What each line says, {} for one that is no sample."""
        if self.path.exists():
            with self.path.open("rb") as file:
                for line in file:
                    found = parse_line(line) if line.endswith(b"\n") else None
                    yield found if found and isinstance(found.get("step"), int) else {}

    def _rewrite(self, keep: Sequence[bool]) -> None:
        """Keep these lines alone."""
        unfinished = self.path.with_name(f".{self.path.name}.new")
        with self.path.open("rb") as old, unfinished.open("wb") as new:
            for line, is_kept in zip(old, keep, strict=True):
                if is_kept:
                    new.write(line)
        sync(unfinished)
        unfinished.replace(self.path)
        sync(self.path.parent)
