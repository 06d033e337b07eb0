"""Picks the rollouts that are shown, and makes text of them, in a thread of its own: no step waits for it."""

from __future__ import annotations

import itertools
import json
import logging
import os.path
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from asyncrl.errors import RolloutFailure
from asyncrl.messages.calls import TrainResponse
from asyncrl.messages.records import Batch, Group, GroupId, Prompt, Rollout, Trajectory, VersionSpan
from asyncrl.observe.metrics import SpecialTokens
from asyncrl.observe.samples import (
    SampleFile,
    SampleKind,
    ShownBranch,
    ShownRollout,
    ShownSibling,
    ShownTokens,
)
from asyncrl.rollouts.rollout import FailedRollout

log = logging.getLogger(__name__)

MAX_STRETCH, MIN_STRETCH, MAX_TOKENS = 1024, 32, 2048
"""Tokens that are shown of a stretch: the most of any, as many of each of very many, and of a rollout."""
MAX_BRANCHES, MAX_MESSAGES, MAX_CHARS = 16, 40, 4000
"""Branches and messages of a rollout that are shown, and characters of a message."""
MAX_SIBLINGS, SIBLING_TOKENS, SIBLING_CHARS = 32, 256, 300
"""Rollouts of a group that are shown in short, and how much of each."""
MAX_WAITING = 128
"""Rollouts whose text may wait to be made; more are left out, with a warning."""


class PrefixDecoder(Protocol):
    """What is needed of a tokenizer, in another thread than its owner's."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids."""
        ...

    def decode_prefixes(self, token_ids: Sequence[int]) -> list[str]:
        """Text of the first 1, 2, ... and of all the ids, with the special tokens."""
        ...


class Chosen(NamedTuple):
    """A rollout to be shown. `min_version`: None if it is not trained on. `group`: the rollouts of its group,
    with their `advantages` by sample_index.
    """

    kind: SampleKind
    group_id: GroupId
    sample_index: int
    prompt: Prompt
    rollout: Rollout
    step: int
    min_version: int | None = None
    gap: float | None = None
    error: str | None = None
    group: tuple[Rollout, ...] = ()
    advantages: Mapping[int, float] = {}
    special: SpecialTokens = SpecialTokens()


def rollouts_of(group: Group) -> tuple[Rollout, ...]:
    """Return the group's trajectories as rollouts, each with all its branches."""
    by_index = itertools.groupby(group.trajectories, key=lambda branch: branch.sample_index)
    return tuple(tuple(branches) for _, branches in by_index)


def choose(batch: Batch, num: int, seed: int, gaps: Mapping[tuple[int, int], float]) -> list[Chosen]:
    """The best and the worst by reward, then others by chance, `num` in all: the same in every run with this
    seed and batch. Equal rewards are told apart by chance.
    """
    rollouts: list[tuple[Group, Rollout]] = [
        (group, rollout) for group in batch.groups for rollout in rollouts_of(group)
    ]
    random.Random(f"{seed} {batch.version}").shuffle(rollouts)
    found = list[tuple[SampleKind, tuple[Group, Rollout]]]()
    for kind, pick in (("best", max), ("worst", min)):
        if rollouts and len(found) < num:
            one = pick(rollouts, key=lambda entry: entry[1][0].reward)
            rollouts.remove(one)
            found.append((kind, one))  # type: ignore[arg-type]
    found += [("random", one) for one in rollouts[: num - len(found)]]
    return [
        Chosen(
            kind=kind,
            group_id=group.group_id,
            sample_index=(index := rollout[0].sample_index),
            prompt=group.prompt,
            rollout=rollout,
            step=batch.version + 1,
            min_version=batch.min_version,
            gap=gaps.get((group.group_id, index)),
            group=rollouts_of(group),
        )
        for kind, (group, rollout) in found
    ]


def shown(chosen: Chosen, decoder: PrefixDecoder) -> ShownRollout:
    """The rollout as text."""
    prompt, rollout, since = chosen.prompt, chosen.rollout, chosen.min_version
    is_trained, spans = since is not None, [span for branch in rollout for span in branch.version_spans]
    in_loss = [span.version for span in spans if since is not None and span.version >= since]
    sample: ShownRollout = {
        "step": chosen.step,
        "kind": chosen.kind,
        "group_id": int(chosen.group_id),
        "sample_index": chosen.sample_index,
        "prompt_id": prompt.prompt_id,
        "messages": _messages(prompt.messages),
        "reward": float(rollout[0].reward) if is_trained else None,
        "metrics": {name: float(value) for name, value in rollout[0].metrics.items()} if rollout else {},
        "num_sampled": sum(branch.num_sampled for branch in rollout),
        "spans": _spans(spans),
        "staleness": chosen.step - 1 - min(in_loss) if in_loss else None,
        "logprob_gap": chosen.gap,
        "is_truncated": any(branch.is_truncated for branch in rollout),
        "num_interruptions": sum(branch.num_interruptions for branch in rollout),
        "branches": _branches(rollout[:MAX_BRANCHES], chosen, decoder),
        "error": chosen.error and _cut_text(chosen.error),
    }
    if prompt.task:
        sample["task"] = prompt.task
    if prompt.answer is not None:
        sample["answer"] = _cut_text(str(prompt.answer))
    if len(rollout) > MAX_BRANCHES:
        sample["cut_branches"] = len(rollout) - MAX_BRANCHES
    if len(chosen.group) > 1:
        sample["group"] = [_sibling(one, chosen, decoder) for one in chosen.group[:MAX_SIBLINGS]]
    sampled_ids = [token for branch in rollout for token in branch.token_ids[branch.loss_mask].tolist()]
    if num_stray := sum(token in chosen.special.stray_ids for token in sampled_ids):
        sample["num_stray"] = num_stray
    return sample


def _sibling(rollout: Rollout, chosen: Chosen, decoder: PrefixDecoder) -> ShownSibling:
    last = rollout[-1]
    token_ids, half = last.token_ids[last.loss_mask].tolist(), SIBLING_TOKENS // 2
    is_long = len(token_ids) > SIBLING_TOKENS
    parts = [token_ids[:half], token_ids[-half:]] if is_long else [token_ids]
    text = " … ".join(decoder.decode(part, skip_special_tokens=False) for part in parts)
    half = SIBLING_CHARS // 2
    return {
        "sample_index": last.sample_index,
        "reward": float(last.reward),
        "advantage": chosen.advantages.get(last.sample_index),
        "num_sampled": sum(branch.num_sampled for branch in rollout),
        "is_truncated": any(branch.is_truncated for branch in rollout),
        "text": _cut_text(f"{text[:half]} … {text[-half:]}" if len(text) > SIBLING_CHARS else text),
    }


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages of text that is not too long."""
    most, num = MAX_MESSAGES // 2, len(messages)
    told: list[Mapping[str, Any]] = [*messages]
    if num > MAX_MESSAGES:
        note = {"role": "...", "content": f"[{num - 2 * most} messages are left out]"}
        told = [*told[:most], note, *told[num - most :]]
    return [{name: _cut_text(_plain(value)) for name, value in message.items()} for message in told]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _cut_text(text: str) -> str:
    """Its beginning and its end; as Unicode, which JSON text of lone surrogates is not."""
    if len(text) > MAX_CHARS:
        half = MAX_CHARS // 2
        text = f"{text[:half]}[{len(text) - 2 * half} characters are left out]{text[-half:]}"
    return text.encode(errors="replace").decode()


def _spans(spans: Iterable[VersionSpan]) -> list[tuple[int, int, int]]:
    """[start, end, version] over the sampled tokens alone, neighbours of one version joined."""
    found, end = list[tuple[int, int, int]](), 0
    for span in spans:
        start, end = end, end + span.end - span.start
        if found and found[-1][2] == span.version:
            start = found.pop()[0]
        found.append((start, end, int(span.version)))
    return found


def _branches(rollout: Rollout, chosen: Chosen, decoder: PrefixDecoder) -> list[ShownBranch]:
    found = list[ShownBranch]()
    for number, branch in enumerate(rollout):
        parent, num_shared = _fork(branch, rollout[:number])
        one: ShownBranch = {
            "branch": branch.branch,
            "parent": parent,
            "num_shared": num_shared,
            "num_tokens": len(branch.token_ids),
            "stretches": _stretches(branch, num_shared, MAX_TOKENS // len(rollout), chosen, decoder),
        }
        if branch.credits:
            one["credits"] = [(credit.start, credit.end, float(credit.reward)) for credit in branch.credits]
        found.append(one)
    return found


def _fork(branch: Trajectory, before: Iterable[Trajectory]) -> tuple[int | None, int]:
    """(the earlier branch that it shares most of its first tokens with, how many). What it sampled itself is
    shared with none, the same ids or not.
    """
    found: tuple[int | None, int] = (None, 0)
    own = int(np.argmax(branch.loss_mask)) if branch.loss_mask.any() else len(branch.token_ids)
    for other in before:
        num = min(own, len(other.token_ids))
        differ = branch.token_ids[:num] != other.token_ids[:num]
        num_shared = int(np.argmax(differ)) if differ.any() else num
        if num_shared > found[1]:
            found = other.branch, num_shared
    return found


def _stretches(
    branch: Trajectory, start: int, most: int, chosen: Chosen, decoder: PrefixDecoder
) -> list[ShownTokens]:
    """Its tokens from `start` on, some `most` of them at most."""
    mask = branch.loss_mask
    edges = [start, *(np.flatnonzero(mask[start + 1 :] != mask[start:-1]) + start + 1).tolist(), len(mask)]
    whole = [(first, end) for first, end in itertools.pairwise(edges) if first < end]
    longest = MAX_STRETCH
    while longest > MIN_STRETCH and sum(min(end - first, longest) for first, end in whole) > most:
        longest //= 2
    half = max(1, most // MIN_STRETCH // 2)
    if longest == MIN_STRETCH and len(whole) > 2 * half:
        whole = [*whole[:half], *whole[-half:]]
    parts = list[tuple[int, int]]()
    for first, end in whole:
        is_long = end - first > longest
        parts += [(first, first + longest // 2), (end - longest // 2, end)] if is_long else [(first, end)]
    versions = np.full(len(mask), -1, np.int32)
    for span in branch.version_spans:
        versions[span.start : span.end] = span.version
    found = list[ShownTokens]()
    for (first, end), after in zip(parts, [*(first for first, _ in parts[1:]), len(mask)], strict=False):
        one = _tokens(branch, first, end, versions, chosen, decoder)
        if after > end:
            one["cut"] = after - end
        found.append(one)
    return found


def _tokens(
    branch: Trajectory,
    first: int,
    end: int,
    versions: npt.NDArray[np.int32],
    chosen: Chosen,
    decoder: PrefixDecoder,
) -> ShownTokens:
    token_ids = branch.token_ids[first:end].tolist()
    if not branch.loss_mask[first]:
        return {"is_sampled": False, "text": decoder.decode(token_ids, skip_special_tokens=False)}
    pieces, since = pieces_of(decoder.decode_prefixes(token_ids)), chosen.min_version
    of_token: list[int] = versions[first:end].tolist()
    marks = chosen.special.stray_ids | chosen.special.end_ids
    found: ShownTokens = {
        "is_sampled": True,
        "text": "".join(pieces),
        "pieces": pieces,
        "logprobs": [round(value, 4) for value in branch.behaviour_logprobs[first:end].tolist()],
        "versions": of_token,
        "in_loss": [since is not None and version >= since for version in of_token],
    }
    if special := [at for at, token in enumerate(token_ids) if token in marks]:
        found["special"] = special
    return found


def pieces_of(prefixes: Sequence[str]) -> list[str]:
    """What each token adds to the text: `prefixes` are the texts of the first 1, 2, ... and of all tokens.
    Joined they are the last of these.

    A character of several tokens (bytes) is added by the last of them: before, its place holds U+FFFD, which
    the whole text does not have there.
    """
    text, ends = prefixes[-1] if prefixes else "", [0]
    for prefix in prefixes:
        end = ends[-1]
        ends.append(end + len(os.path.commonprefix([prefix[end:], text[end : len(prefix)]])))
    return [text[start:end] for start, end in itertools.pairwise(ends)]


class Made(NamedTuple):
    """Of one batch, or failed rollouts since the one before; `problem`: why there are none."""

    step: int
    samples: list[ShownRollout]
    problem: str = ""


class SampleMaker:
    """Writes samples.jsonl, and hands out what was written.

    Life: goes_on_at() in a resumed run -> step() and failed() in any order, taken() now and then -> close(),
        then taken() once more. All of it on one thread, but for flush(); text is made and written on another
        one, in order.
    """

    def __init__(self, run_dir: Path, *, seed: int, per_step: int, failed_per_step: int) -> None:
        self.seed, self.per_step, self.failed_per_step = seed, per_step, failed_per_step
        self._file = SampleFile(run_dir)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._jobs = deque[tuple[int, Future[list[ShownRollout]]]]()
        self._next_step, self._num_failed = 1, 0
        self._left_out: list[Made] = []
        self._known_failed = set[tuple[int, int]]()
        """Failed rollouts that an earlier process has written; used on the other thread."""

    def goes_on_at(self, step: int, *, keeps_failed: bool) -> None:
        """The run goes on with this step. `keeps_failed`: what failed before does not run again."""
        self._next_step = step

        def heal() -> list[ShownRollout]:
            self._known_failed = self._file.goes_on_at(step, keeps_failed=keeps_failed)
            return []

        self._begin(step, heal)

    def step(
        self,
        batch: Batch,
        report: TrainResponse,
        decoder: PrefixDecoder,
        special: SpecialTokens = SpecialTokens(),
    ) -> None:
        """Show some rollouts of a batch that was trained on."""
        step = batch.version + 1
        self._next_step, self._num_failed = step + 1, 0
        if self.per_step:
            gaps = {(group, index): gap for group, index, gap in report.rollout_gaps}
            advantages = defaultdict[int, dict[int, float]](dict)
            for group, index, advantage in report.rollout_advantages:
                advantages[group][index] = advantage
            chosen = [
                one._replace(advantages=advantages[one.group_id], special=special)
                for one in choose(batch, self.per_step, self.seed, gaps)
            ]
            self._begin(step, lambda: self._write([shown(one, decoder) for one in chosen]))

    def failed(
        self, group_id: GroupId, prompt: Prompt, failed: FailedRollout, decoder: PrefixDecoder
    ) -> None:
        """A rollout has failed for good."""
        self._num_failed += 1
        if self._num_failed > self.failed_per_step:
            return
        try:
            rollout = failed.seen.rollout()
        except Exception as error:  # for people alone: it ends no run
            rollout = ()
            if not isinstance(error, RolloutFailure):  # it has sampled nothing
                log.warning(
                    "what g%d/r%d has sampled is not shown", group_id, failed.sample_index, exc_info=True
                )
        why = f"{failed.how}: {failed.failure}"
        index, step = failed.sample_index, self._next_step
        chosen = Chosen("failed", group_id, index, prompt, rollout, step, error=why)

        def make() -> list[ShownRollout]:
            is_known = (group_id, index) in self._known_failed
            return [] if is_known else self._write([shown(chosen, decoder)])

        self._begin(step, make)

    def taken(self) -> list[Made]:
        """What was written since the last call, in order."""
        found, self._left_out = self._left_out, []
        while self._jobs and self._jobs[0][1].done():
            step, job = self._jobs.popleft()
            if (error := job.exception()) is None:
                found.append(Made(step, job.result()))
            else:
                log.error("no samples of step %d", step, exc_info=error)
                found.append(Made(step, [], f"no samples of step {step} in {self._file.path.name}: {error}"))
        return [made for made in found if made.samples or made.problem]

    def flush(self) -> None:
        """Return when all is written that was told so far; any thread may call it, until close()."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Return when all is written; idempotent."""
        self._thread.shutdown()

    def _write(self, samples: list[ShownRollout]) -> list[ShownRollout]:
        self._file.append(samples)
        return samples

    def _begin(self, step: int, make: Callable[[], list[ShownRollout]]) -> None:
        if len(self._jobs) >= MAX_WAITING:
            self._left_out.append(
                Made(step, [], f"samples of step {step} are left out: text is made too slowly")
            )
        else:
            self._jobs.append((step, self._thread.submit(make)))
