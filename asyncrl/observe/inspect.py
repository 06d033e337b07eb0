"""What `asyncrl inspect` says: the trainer's record beside the journal, as JSON or for people. Reads alone; a
live run may write on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Group as Rendered

from asyncrl.errors import ConfigError, JournalError
from asyncrl.journal.story import BatchStory, GroupLine, GroupStory, batch_story, events, group_story, totals
from asyncrl.messages.records import PartialCompletion, Rollout, Trajectory, VersionSpan
from asyncrl.observe.run_files import RunFiles, read_run
from asyncrl.observe.run_numbers import masked_tokens
from asyncrl.observe.status import inspect_summary, inspect_tables, to_json, to_text
from asyncrl.observe.story_tables import story_tables
from asyncrl.rollouts.tokenizer import HFChatTokenizer

JOURNAL_FILE = "journal.sqlite"


def render_inspect(
    run_dir: str | Path, *, as_json: bool = False, step: int | None = None, group: int | None = None
) -> str:
    """A run's batches, waste, restarts and resumes; `step` narrows it to one batch, `group` tells one group's
    whole story.

    Raises ConfigError if `run_dir` is no run directory, or has no such step or group.
    """
    summary = summarise(read_run(run_dir, step=step), step=step, group=group)
    return (
        to_json(summary) if as_json else to_text(Rendered(*story_tables(summary), *inspect_tables(summary)))
    )


def summarise(files: RunFiles, *, step: int | None = None, group: int | None = None) -> dict[str, Any]:
    """Plain values. The trainer's record says what was trained on; keys `journal`, `batch` and `story` are
    from the journal.

    Raises ConfigError for a step or group that neither knows.
    """
    path, problems = files.run_dir / JOURNAL_FILE, list[str]()
    told: dict[str, Any] = {}
    if path.is_file():
        try:
            if group is not None and (story := group_story(path, group)) is not None:
                told["story"] = _story(story, files)
            if step is not None and (batch := batch_story(path, step)) is not None:
                told["batch"] = _batch(batch)
            if group is None and step is None:
                told["journal"] = _run(path, files)
        except JournalError as error:
            problems.append(str(error))
    summary = inspect_summary(
        files, step=step, group=group, is_required=not told
    )  # what is not trained on yet, the journal alone knows
    return {**summary, **told, "problems": [*summary["problems"], *problems]}


def _run(path: Path, files: RunFiles) -> dict[str, Any]:
    run = totals(path)
    tokens = run.sampled_tokens
    wasted = {
        "retried": run.lost_tokens,
        "failed": tokens.get("failed", 0),
        "filtered": tokens.get("filtered", 0),
        "handed_back": tokens.get("handed_back", 0),
        "masked": masked_tokens(files.steps),
    }
    return {
        "run_id": run.run_id,
        "groups": dict(run.groups),
        "num_batches": run.num_batches,
        "num_trained": run.num_trained,
        "newest_published": run.newest_published,
        "failed_rollouts": run.failed_rollouts,
        "sampled_tokens": sum(tokens.values()) + run.lost_tokens,
        "wasted_tokens": wasted,
        "checkpoints": [
            {"version": version, "path": where, "state": state} for version, where, state in run.checkpoints
        ],
        "tokens_deleted_before": run.compacted_before,
        "events": [
            {"at": _time(event.at_s), "what": event.what, "detail": dict(event.detail)}
            for event in events(path)
        ],
    }


def _batch(batch: BatchStory) -> dict[str, Any]:
    return {
        "version": batch.version,
        "min_version": batch.min_version,
        "taken_at": _time(batch.taken_s),
        "trained_at": _time(batch.trained_s),
        "published_at": _time(batch.published_s),
        "loss": batch.loss,
        "tokens_by_version": None
        if batch.tokens_by_version is None
        else {str(v): num for v, num in batch.tokens_by_version.items()},
        "masked_tokens": batch.masked_tokens if batch.mask_older else 0,
        "groups": [
            {
                "group_id": line.group_id,
                "prompt_id": line.prompt_id,
                **_numbers(line),
            }
            for line in batch.groups
        ],
    }


def _numbers(line: GroupLine) -> dict[str, Any]:
    return {
        "num_rollouts": line.num_rollouts,
        "num_failed": line.num_failed,
        "num_sampled": line.num_sampled,
        "oldest_version": line.oldest_version,
        "reward_mean": line.reward_mean,
        "retried_tokens": line.lost_tokens,
    }


def _story(story: GroupStory, files: RunFiles) -> dict[str, Any]:
    line = story.line
    decoder = Decoder.of_run(files)
    batch = batch_story(files.run_dir / JOURNAL_FILE, story.batch) if story.batch is not None else None
    has_tokens = story.prompt is not None
    return {
        "group_id": line.group_id,
        "prompt_id": line.prompt_id,
        "state": line.state,
        "reason": story.reason,
        "start_version": story.start_version,
        "admitted_at": _time(story.admitted_s),
        "ended_at": _time(story.ended_s),
        "batch": story.batch,
        "trained_at": None if batch is None else _time(batch.trained_s),
        **_numbers(line),
        "same_prompt": list(story.siblings),
        "has_tokens": has_tokens,
        "messages": [dict(message) for message in story.prompt.messages] if story.prompt is not None else [],
        "rollouts": [
            _rollout(story, index, decoder)
            for index in _indices(story, files.config.rollout.group_size if has_tokens else 0)
        ],
        "text_from": decoder.source,
    }


def _indices(story: GroupStory, group_size: int) -> list[int]:
    """Of all rollouts that are known of; of a group that runs, those too that have no token yet."""
    known = {*story.rollouts, *story.failures, *story.partials}
    return sorted(known | set(range(group_size)) if story.line.state == "running" else known)


def _rollout(story: GroupStory, index: int, decoder: Decoder) -> dict[str, Any]:
    plain: dict[str, Any] = {"sample_index": index}
    if (rollout := story.rollouts.get(index)) is not None:
        return plain | {"state": "finished"} | _finished(rollout, decoder)
    if (failure := story.failures.get(index)) is not None:
        return plain | {"state": "failed", "attempts": failure[0], "why": failure[1]}
    if (partial := story.partials.get(index)) is not None:
        attempt, turn, completion = partial
        return plain | {"state": "running", "attempt": attempt, "turn": turn} | _partial(completion, decoder)
    return plain | {"state": "running"}


def _finished(rollout: Rollout, decoder: Decoder) -> dict[str, Any]:
    """The only branch itself, or numbers of all and then each."""
    branches = [_branch(branch, decoder) for branch in rollout]
    plain = {
        "reward": rollout[0].reward,
        "num_sampled": sum(branch.num_sampled for branch in rollout),
        "num_interruptions": sum(branch.num_interruptions for branch in rollout),
        "is_truncated": any(branch.is_truncated for branch in rollout),
        "metrics": dict(rollout[0].metrics),
    }
    return plain | (branches[0] if len(branches) == 1 else {"branches": branches})


def _branch(branch: Trajectory, decoder: Decoder) -> dict[str, Any]:
    plain = {
        "branch": branch.branch,
        "num_sampled": branch.num_sampled,
        "num_interruptions": branch.num_interruptions,
        "is_truncated": branch.is_truncated,
        "pieces": pieces(branch.token_ids.tolist(), branch.version_spans, decoder),
    }
    return plain | ({"credits": [asdict(credit) for credit in branch.credits]} if branch.credits else {})


def _partial(completion: PartialCompletion, decoder: Decoder) -> dict[str, Any]:
    return {
        "num_sampled": len(completion.token_ids),
        "num_interruptions": completion.num_interruptions,
        "pieces": pieces(list(completion.token_ids), completion.version_spans, decoder),
    }


def _time(seconds: float | None) -> str | None:
    """Local time with its offset, to the millisecond."""
    return (
        None
        if seconds is None
        else datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="milliseconds")
    )


# Sampled tokens as text again, one piece for each version. Knows a run's tokenizer where it lies; imports no
# torch for it.


class Decoder:
    """Text of token ids, if the run's tokenizer can be found. `source` is its folder, or why there is
    none.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str] | None, source: str) -> None:
        self.decode, self.source = decode, source

    @classmethod
    def of_run(cls, files: RunFiles) -> Decoder:
        """From the model folder of the run, else the one that it was given. Only tokenizer.json: other
        formats would import torch.
        """
        model = files.config.model
        folders = [
            files.run_dir / "model",
            files.run_dir / "final",
            *([Path(model.path).expanduser()] if model.path else []),
        ]
        folder = next((folder for folder in folders if (folder / "tokenizer.json").is_file()), None)
        if folder is None:
            return cls(None, f"no tokenizer.json in {', '.join(map(str, folders))}")
        try:
            return cls(HFChatTokenizer(folder, chat_template=model.chat_template).decode, str(folder))
        except ConfigError as error:
            return cls(None, str(error))


def pieces(token_ids: Sequence[int], spans: Sequence[VersionSpan], decoder: Decoder) -> list[dict[str, Any]]:
    """[start, end), version, engine (where known) and text of each span, or its token ids where there is no
    tokenizer.

    A character may need the tokens of two spans that follow each other: it is shown with the later one.
    """
    found = []
    first, shown = 0, ""
    for number, span in enumerate(spans):
        if (
            number == 0 or span.start != spans[number - 1].end
        ):  # a turn begins: what stands before it was not sampled
            first, shown = span.start, ""
        plain: dict[str, Any] = {"start": span.start, "end": span.end, "version": span.version}
        if span.engine >= 0:
            plain["engine"] = span.engine
        if decoder.decode is None:
            found.append(plain | {"token_ids": list(token_ids[span.start : span.end])})
            continue
        whole = decoder.decode(token_ids[first : span.end])
        if number + 1 < len(spans) and spans[number + 1].start == span.end:
            whole = whole.rstrip("�")
        text = (
            whole[len(shown) :]
            if whole.startswith(shown)
            else decoder.decode(token_ids[span.start : span.end])
        )
        found.append(plain | {"text": text})
        shown = whole
    return found
