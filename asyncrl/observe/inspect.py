"""What `asyncrl inspect` says: the trainer's record beside the journal, as JSON or for people. Reads alone; a
live run may write on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, JournalError
from asyncrl.journal.story import BatchStory, GroupLine, GroupStory, batch_story, events, group_story, totals
from asyncrl.messages.records import Trajectory, VersionSpan
from asyncrl.observe.inspect_tables import inspect_tables
from asyncrl.observe.run_files import RunFiles, read_run
from asyncrl.observe.run_numbers import masked_tokens
from asyncrl.observe.status import to_text
from asyncrl.observe.trained import (
    TRAINED_FILE,
    Line,
    TrainedRecord,
    batch_summary,
    read_record,
    trajectory_summaries,
)
from asyncrl.observe.verdict import judge
from asyncrl.rollouts.tokenizer import HFChatTokenizer

JOURNAL_FILE = "journal.sqlite"
Decode = Callable[[Sequence[int]], str]
SHOWN_STEPS = 1000
"""Number of newest steps that are listed one by one; a terminal gets the last hundred of them."""


def render_inspect(
    run_dir: str | Path, *, as_json: bool = False, step: int | None = None, group: int | None = None
) -> str:
    """A run's batches, waste, restarts and resumes; `step` narrows it to one batch, `group` tells one group's
    whole story.

    Raises ConfigError if `run_dir` is no run directory, or has no such step or group.
    """
    summary = summarise(read_run(run_dir, step=step), step=step, group=group)
    return json.dumps(summary, indent=2) if as_json else to_text(*inspect_tables(summary))


def summarise(files: RunFiles, *, step: int | None = None, group: int | None = None) -> dict[str, Any]:
    """Plain values: staleness recomputed from the spans, whether the bound was kept, the verdict, and each of
    the newest batches (or that of `step` or `group`), from the trainer's record; `journal`, `batch` and
    `story` are from the journal. Raises ConfigError for a step or group that neither knows.
    """
    problems, bound = list(files.problems), files.config.buffer.max_staleness
    record = read_record(files.run_dir / TRAINED_FILE, problems, bound)
    told: dict[str, Any] = {}
    try:
        if (path := files.run_dir / JOURNAL_FILE).is_file():
            told = _journal(path, files, step, group)
    except JournalError as error:
        problems.append(str(error))
    shown = _chosen(record, step, group)
    if not shown and not told and (step is not None or group is not None):
        what = f"step {step}" if group is None else f"group {group}"
        raise ConfigError(
            f"{files.run_dir} has no record of {what}; it has {record.range_text}",
            rule="only groups that a batch took are in the record",
            way_out="take a step or a group id from `asyncrl inspect RUN_DIR --json`.",
        )
    violations, lost = record.violations(), record.lost_steps()
    return {
        "run_dir": str(files.run_dir),
        "state": files.state,
        "max_staleness": bound,
        "on_overdue": files.config.buffer.on_overdue,
        **record.totals(),
        "bound_kept": not violations if len(record) else None,
        "violations": violations,
        "lost": lost,
        "restored_from": record.restored,
        "steps": [_step(line, files, step, group) for line in shown],
        "verdict": judge(files.steps, files.config).as_dict() if files.steps else None,
        **told,
        "problems": [*problems, *lost],
    }


def _chosen(record: TrainedRecord, step: int | None, group: int | None) -> list[Line]:
    if group is not None:
        return [line for line in record.of_group(group) if step in (None, line["version"])]
    return record.newest(SHOWN_STEPS) if step is None else record.of_step(step)


def _step(line: Line, files: RunFiles, step: int | None, group: int | None) -> dict[str, Any]:
    plain = batch_summary(line)
    if step is not None or group is not None:
        plain["trajectories"] = trajectory_summaries(line, group)
    if step is not None and files.one_step is not None:
        plain["metrics"] = dict(files.one_step)
    return plain


def _journal(path: Path, files: RunFiles, step: int | None, group: int | None) -> dict[str, Any]:
    """What the journal says of the group, the step, or else of the whole run."""
    if step is None and group is None:
        return {"journal": _run(path, files)}
    told: dict[str, Any] = {}
    if group is not None and (story := group_story(path, group)) is not None:
        told["story"] = _story(story, files)
    if step is not None and (batch := batch_story(path, step)) is not None:
        told["batch"] = _batch(batch)
    return told


def _run(path: Path, files: RunFiles) -> dict[str, Any]:
    run = totals(path)
    plain, tokens = asdict(run), run.sampled_tokens
    wasted = {name: tokens.get(name, 0) for name in ("failed", "filtered", "handed_back")}
    wasted = {"retried": plain.pop("lost_tokens"), **wasted, "masked": masked_tokens(files.steps)}
    plain["tokens_deleted_before"] = plain.pop("compacted_before")
    return {
        **plain,
        "sampled_tokens": sum(tokens.values()) + run.lost_tokens,
        "wasted_tokens": wasted,
        "checkpoints": [
            {"version": version, "path": where, "state": state} for version, where, state in run.checkpoints
        ],
        "events": [
            {"at": _time(event.at_s), "what": event.what, "detail": dict(event.detail)}
            for event in events(path)
        ],
    }


def _batch(batch: BatchStory) -> dict[str, Any]:
    by_version = batch.tokens_by_version
    times = {f"{what}_at": _time(getattr(batch, f"{what}_s")) for what in ("taken", "trained", "published")}
    return {
        "version": batch.version,
        "min_version": batch.min_version,
        **times,
        "loss": batch.loss,
        "tokens_by_version": by_version and {str(version): num for version, num in by_version.items()},
        "masked_tokens": batch.masked_tokens if batch.mask_older else 0,
        "groups": [_numbers(line) for line in batch.groups],
    }


def _numbers(line: GroupLine) -> dict[str, Any]:
    numbers = asdict(line)
    numbers["retried_tokens"] = numbers.pop("lost_tokens")
    return numbers


def _story(story: GroupStory, files: RunFiles) -> dict[str, Any]:
    decode, source = find_decoder(files)
    batch = batch_story(files.run_dir / JOURNAL_FILE, story.batch) if story.batch is not None else None
    known = {*story.rollouts, *story.failures, *story.partials}
    if story.line.state == "running" and story.prompt is not None:  # those too that have no token yet
        known |= set(range(files.config.rollout.group_size))
    return {
        **_numbers(story.line),
        "reason": story.reason,
        "start_version": story.start_version,
        "admitted_at": _time(story.admitted_s),
        "ended_at": _time(story.ended_s),
        "batch": story.batch,
        "trained_at": None if batch is None else _time(batch.trained_s),
        "same_prompt": list(story.siblings),
        "has_tokens": story.prompt is not None,
        "messages": [dict(message) for message in (story.prompt.messages if story.prompt else ())],
        "rollouts": [{"sample_index": index, **_rollout(story, index, decode)} for index in sorted(known)],
        "text_from": source,
    }


def _rollout(story: GroupStory, index: int, decode: Decode | None) -> dict[str, Any]:
    if (rollout := story.rollouts.get(index)) is not None:
        branches = [_branch(branch, decode) for branch in rollout]
        whole = {
            "state": "finished",
            "reward": rollout[0].reward,
            "num_sampled": sum(branch.num_sampled for branch in rollout),
            "num_interruptions": sum(branch.num_interruptions for branch in rollout),
            "is_truncated": any(branch.is_truncated for branch in rollout),
            "metrics": dict(rollout[0].metrics),
        }
        return whole | (branches[0] if len(branches) == 1 else {"branches": branches})
    if (failure := story.failures.get(index)) is not None:
        return {"state": "failed", "attempts": failure[0], "why": failure[1]}
    if (partial := story.partials.get(index)) is None:
        return {"state": "running"}
    attempt, turn, completion = partial
    return {
        "state": "running",
        "attempt": attempt,
        "turn": turn,
        "num_sampled": len(completion.token_ids),
        "num_interruptions": completion.num_interruptions,
        "pieces": pieces(completion.token_ids, completion.version_spans, decode),
    }


def _branch(branch: Trajectory, decode: Decode | None) -> dict[str, Any]:
    plain = {
        "branch": branch.branch,
        "num_sampled": branch.num_sampled,
        "num_interruptions": branch.num_interruptions,
        "is_truncated": branch.is_truncated,
        "pieces": pieces(branch.token_ids.tolist(), branch.version_spans, decode),
    }
    return plain | ({"credits": [asdict(credit) for credit in branch.credits]} if branch.credits else {})


def _time(seconds: float | None) -> str | None:
    """Local time with its offset, to the millisecond."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="milliseconds")


def find_decoder(files: RunFiles) -> tuple[Decode | None, str]:
    """Text of token ids, and the folder of its tokenizer; or why there is none. From the model folder of the
    run, else the one that it was given. Only tokenizer.json: other formats would import torch.
    """
    model = files.config.model
    folders = [files.run_dir / "model", files.run_dir / "final"]
    folders += [Path(model.path).expanduser()] if model.path else []
    folder = next((folder for folder in folders if (folder / "tokenizer.json").is_file()), None)
    if folder is None:
        return None, f"no tokenizer.json in {', '.join(map(str, folders))}"
    try:
        return HFChatTokenizer(folder, chat_template=model.chat_template).decode, str(folder)
    except ConfigError as error:
        return None, str(error)


def pieces(
    token_ids: Sequence[int], spans: Sequence[VersionSpan], decode: Decode | None
) -> list[dict[str, Any]]:
    """[start, end), version, engine (where known) and text of each span, or its token ids without a
    tokenizer.

    A character may need the tokens of two spans that follow each other: it is shown with the later one.
    """
    found = []
    first, shown = 0, ""
    for number, span in enumerate(spans):
        if number == 0 or span.start != spans[number - 1].end:
            first, shown = span.start, ""  # a turn begins: what stands before it was not sampled
        piece: dict[str, Any] = {"start": span.start, "end": span.end, "version": span.version}
        if span.engine >= 0:
            piece["engine"] = span.engine
        sampled = list(token_ids[span.start : span.end])
        if decode is None:
            piece["token_ids"] = sampled
        else:
            whole = decode(token_ids[first : span.end])
            if number + 1 < len(spans) and spans[number + 1].start == span.end:
                whole = whole.rstrip("\ufffd")
            piece["text"] = whole[len(shown) :] if whole.startswith(shown) else decode(sampled)
            shown = whole
        found.append(piece)
    return found
