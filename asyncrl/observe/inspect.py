"""`asyncrl inspect`: the trainer's record and the journal, as JSON or as tables. Only reads; the run may be
live.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from asyncrl.base.errors import ConfigError, JournalError
from asyncrl.journal.read import batch_story, group_story, reading, run_story
from asyncrl.journal.tokens import failures_of, partials_of, rollouts_of
from asyncrl.messages.records import Rollout, VersionSpan
from asyncrl.observe.run_dir import JOURNAL_FILE, SAMPLES_FILE, TRAINED_FILE, read_metrics
from asyncrl.observe.run_numbers import grid, masked_tokens, plain, several
from asyncrl.observe.sample_text import harmless, render_samples
from asyncrl.observe.samples import read_samples
from asyncrl.observe.status import RunFiles, read_run, to_text
from asyncrl.observe.trained import Line, TrainedRecord, batch_summary, trajectory_summaries
from asyncrl.observe.verdict.verdict import summary_panel
from asyncrl.rollouts.tokenizer import HFChatTokenizer

Decode = Callable[[Sequence[int]], str]


def render_inspect(
    run_dir: str | Path,
    *,
    as_json: bool = False,
    step: int | None = None,
    group: int | None = None,
    samples: bool = False,
    kinds: Sequence[str] = (),
) -> str:
    """Describe a run's batches, waste, restarts and resumes; `step` selects one batch, `group` one group with
    its rollouts. `samples`, or `kinds` of samples: text of rollouts from samples.jsonl instead.

    Raises ConfigError if `run_dir` is no run directory, or has no such step, group or sample.
    """
    files = read_run(run_dir)
    if samples or kinds:
        return render_samples(
            files.run_dir, files.problems, as_json=as_json, step=step, group=group, kinds=kinds
        )
    summary = summarise(files, step, group)
    return json.dumps(summary, indent=2) if as_json else to_text(*_tables(files, summary))


def summarise(files: RunFiles, step: int | None, group: int | None) -> dict[str, Any]:
    """Return plain values from the trainer's record: staleness by its spans, whether the bound was kept, the
    verdict, and the newest batches (or the batch of `step` or `group`); `journal`, `batch` and `story` from
    the journal. Raises ConfigError for an unknown step or group.
    """
    problems, bound = [*files.problems], files.config.buffer.max_staleness
    record = TrainedRecord(files.run_dir / TRAINED_FILE, problems, bound)
    told: dict[str, Any] = {}
    try:
        if (path := files.run_dir / JOURNAL_FILE).is_file():
            with reading(path) as connection:
                told = _journal(connection, files, step, group)
    except JournalError as error:
        problems.append(str(error))
    shown = record.lines(step, group)
    if not shown and not told and (step, group) != (None, None):
        what = f"step {step}" if group is None else f"group {group}"
        raise ConfigError(
            f"{files.run_dir} has no record of {what}; it has {record.range_text}",
            rule="only groups that a batch took are in the record",
            way_out="take a step or a group id from `asyncrl inspect RUN_DIR --json`.",
        )
    violations, lost = record.violations()
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
        "verdict": files.verdict and asdict(files.verdict),
        **told,
        "problems": [*problems, *lost],
    }


def _step(line: Line, files: RunFiles, step: int | None, group: int | None) -> dict[str, Any]:
    summary = batch_summary(line)
    if (step, group) != (None, None):
        summary["trajectories"] = trajectory_summaries(line, group)
    if step is not None:
        for metrics in read_metrics(files.run_dir, []):
            if metrics["step"] == step:
                summary["metrics"] = metrics
    return summary


def _journal(
    connection: sqlite3.Connection, files: RunFiles, step: int | None, group: int | None
) -> dict[str, Any]:
    """Read the group, the step or the whole run from the journal."""
    told: dict[str, Any] = {}
    if group is not None:
        told["story"] = _story(connection, group, files)
    if step is not None:
        told["batch"] = batch_story(connection, step - 1)
    if not told:
        told["journal"] = run = run_story(connection)
        run["wasted_tokens"]["masked"] = masked_tokens(files.steps)
    return {name: found for name, found in told.items() if found is not None}


def _story(connection: sqlite3.Connection, group_id: int, files: RunFiles) -> dict[str, Any] | None:
    """Return a group with its rollouts by sample_index, and their sampled tokens."""
    if (story := group_story(connection, group_id)) is None:
        return None
    if not story["has_tokens"]:
        story["samples"] = len(read_samples(files.run_dir, [], group=group_id))
    decode, source = find_decoder(files)
    rollouts = dict[int, dict[str, Any]]()
    if story["state"] == "running" and story["has_tokens"]:  # those too that have no token yet
        rollouts = {index: {"state": "running"} for index in range(files.config.rollout.group_size)}
    for index, (attempt, turn, partial) in partials_of(connection, group_id).items():
        rollouts[index] = {
            "state": "running",
            "attempt": attempt,
            "turn": turn,
            "num_sampled": len(partial.token_ids),
            "num_interruptions": partial.num_interruptions,
            "pieces": pieces(partial.token_ids, partial.version_spans, decode),
        }
    for index, (attempts, why) in failures_of(connection, group_id).items():
        rollouts[index] = {"state": "failed", "attempts": attempts, "why": why}
    for index, rollout in rollouts_of(connection, group_id).items():
        rollouts[index] = _finished(rollout, decode)
    told = [{"sample_index": index, **rollout} for index, rollout in sorted(rollouts.items())]
    return story | {"rollouts": told, "text_from": source}


def _finished(rollout: Rollout, decode: Decode | None) -> dict[str, Any]:
    """Describe a rollout, and its branches if there are several."""
    branches: list[dict[str, Any]] = [
        {
            "branch": branch.branch,
            "num_sampled": branch.num_sampled,
            "num_interruptions": branch.num_interruptions,
            "is_truncated": branch.is_truncated,
            "pieces": pieces(branch.token_ids.tolist(), branch.version_spans, decode),
            **({"credits": list(map(asdict, branch.credits))} if branch.credits else {}),
        }
        for branch in rollout
    ]
    whole = {"state": "finished", "reward": rollout[0].reward, "metrics": dict(rollout[0].metrics)}
    if len(branches) == 1:
        return whole | branches[0]
    sums = {name: sum(each[name] for each in branches) for name in ("num_sampled", "num_interruptions")}
    is_truncated = any(branch.is_truncated for branch in rollout)
    return whole | sums | {"is_truncated": is_truncated, "branches": branches}


def find_decoder(files: RunFiles) -> tuple[Decode | None, str]:
    """Return a decoder and the folder of its tokenizer, or None and a reason. The run's model folder comes
    first, then model.path. Only tokenizer.json: other formats import torch.
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
    """Return start, end, version, engine (if known) and text of each span, or its token ids without a
    tokenizer. A character across two spans is in the later one.
    """
    found = []
    first, shown = 0, ""
    for number, span in enumerate(spans):
        if number == 0 or span.start != spans[number - 1].end:
            first, shown = span.start, ""  # a turn begins, after tokens that were not sampled
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


# ---- tables

_MAX_ROWS, _MAX_EVENTS, _MAX_VIOLATIONS = 100, 30, 20
_GROUP = {
    "group": "group_id",
    "rollouts": "num_rollouts",
    "failed": "num_failed",
    "sampled": "num_sampled",
    "oldest": "oldest_version",
    "reward": "reward_mean",
    "retried": "retried_tokens",
    "prompt": "prompt_id",
}
_BATCH = {
    "step": "step",
    "groups": "num_groups",
    "tokens": "num_loss_tokens",
    "reward": "reward_mean",
    "staleness": "staleness_mean",
    "max": "staleness_max",
    "loss tokens by version": "tokens_by_version",
}
_TRAJECTORY = {
    "group": "group_id",
    "sample": "sample",
    "reward": "reward",
    "tokens": "num_tokens",
    "in loss": "num_loss_tokens",
    "staleness": "staleness",
    "prompt": "prompt_id",
    "spans of loss tokens": "places",
}


def _tables(files: RunFiles, summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Show the journal, the bound, the batches and their trajectories, violations, and the verdict."""
    if "journal" in summary:
        run = summary["journal"]
        yield _grid(run | {"events": run["events"][-_MAX_EVENTS:]})
    if "batch" in summary:
        yield _grid(summary["batch"], "groups")
        yield _table(_GROUP, summary["batch"]["groups"])
    if "story" in summary:
        yield from _story_text(summary["story"])
    yield _bound(summary)
    shown = summary["steps"][-_MAX_ROWS:]
    if shown and "trajectories" not in shown[0] and len(shown) < summary["num_steps"]:
        yield Text(f"the last {len(shown)} of {summary['num_steps']} steps; --step N shows any of them:")
    if shown:
        yield _table(_BATCH, list(map(_batch, shown)))
    for step in shown:
        if "trajectories" in step:
            yield Text(f"step {step['step']}")
            yield _table(_TRAJECTORY, list(map(_trajectory, step["trajectories"])))
    for violation in summary["violations"][:_MAX_VIOLATIONS]:
        yield Text(f"broken: {violation}", style="red")
    yield from (Text(f"problem: {problem}", style="red") for problem in summary["problems"])
    if files.verdict:
        yield summary_panel(files.verdict, title=summary["run_dir"])


def _grid(values: Mapping[str, Any], *drawn: str) -> RenderableType:
    """Draw a row for each field, except the `drawn` ones."""
    return grid((name, Text(plain(value))) for name, value in values.items() if name not in drawn)


def _bound(summary: Mapping[str, Any]) -> Text:
    allowed = f"max_staleness {summary['max_staleness']}, on_overdue {summary['on_overdue']}"
    if summary["bound_kept"] is None:
        return Text(f"nothing was trained yet ({allowed}).")
    counted = (
        f"{summary['num_loss_tokens']} tokens of {summary['num_trajectories']} trajectories in "
        f"{summary['num_steps']} steps, the oldest {summary['staleness_max']} versions behind its batch "
        f"({allowed})"
    )
    if not summary["bound_kept"]:
        num = len(summary["violations"])
        return Text(f"BOUND OR RECORD BROKEN in {num} places: {counted}.", style="bold red")
    if lost := "; ".join(summary["lost"]):
        return Text(f"bound kept in all that is recorded: {counted}; {lost}.", style="yellow")
    return Text(f"bound kept: {counted}.", style="green")


def _batch(step: Mapping[str, Any]) -> dict[str, Any]:
    versions = {f"v{version}": num for version, num in step["tokens_by_version"].items()}
    return {**step, "num_groups": len(step["group_ids"]), "tokens_by_version": versions}


def _trajectory(entry: Mapping[str, Any]) -> dict[str, Any]:
    branch = f".{entry['branch']}" if entry["branch"] else ""
    places = (f"{start}..{end - 1}@v{version}" for start, end, version in entry["spans"])
    return {**entry, "sample": f"{entry['sample_index']}{branch}", "places": " ".join(places)}


def _story_text(story: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield _grid(story, "messages", "rollouts")
    if (num := story.get("samples")) is not None:
        command = f"`asyncrl inspect RUN_DIR --samples --group {story['group_id']}`"
        where = (
            f"{command} shows {several(num, 'rollout')} of it" if num else f"{SAMPLES_FILE} has none of it"
        )
        yield Text(f"its tokens are not in the journal any more (journal.keep=checkpoint); {where}")
    for message in story["messages"]:
        yield Text.assemble((f"{message['role']}: ", "cyan"), harmless(message["content"]))
    for rollout in story["rollouts"]:
        yield Text.assemble((f"sample {rollout['sample_index']}: ", "green"), _rollout_text(rollout))
        for branch in rollout.get("branches", (rollout,)):
            if branch is not rollout:
                yield Text(f" branch {branch['branch']}: {branch['num_sampled']} tokens", style="green")
            yield from _sampled(branch)


def _rollout_text(rollout: Mapping[str, Any]) -> str:
    """Describe a rollout in a line."""
    match rollout["state"]:
        case "finished":
            cut = ", truncated" if rollout["is_truncated"] else ""
            interrupted = f"{rollout['num_interruptions']} interruptions"
            return f"reward {plain(rollout['reward'])}, {rollout['num_sampled']} tokens, {interrupted}{cut}"
        case "failed" if rollout["attempts"]:
            return f"failed at each of {rollout['attempts']} attempts, the last: {rollout['why']}"
        case "failed":
            return f"cannot be sampled: {rollout['why']}"
    if "pieces" not in rollout:
        return "runs, nothing is written down yet"
    sampled = f"{rollout['num_sampled']} tokens so far"
    return f"runs, attempt {rollout['attempt'] + 1}, turn {rollout['turn']}, {sampled}"


def _sampled(branch: Mapping[str, Any]) -> Iterator[Text]:
    """Show sampled text with its versions, and rewards of parts."""
    for piece in branch.get("pieces", ()):
        shown = piece["text"] if "text" in piece else " ".join(map(str, piece["token_ids"]))
        place = f"  [v{piece['version']}, {piece['start']}..{piece['end'] - 1}] "
        yield Text.assemble((place, "magenta"), harmless(shown))
    for credit in branch.get("credits", ()):
        place = f"  [{credit['start']}..{credit['end'] - 1}] "
        yield Text.assemble((place, "magenta"), f"reward {plain(credit['reward'])}, unit {credit['unit']}")


def _table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> Table:
    """Draw `rows` as a table; `columns`: title -> field. Text is aligned left, numbers right."""
    table = Table(box=None, padding=(0, 1))
    for title, name in columns.items():
        is_text = any(isinstance(row[name], str) for row in rows)
        table.add_column(title, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(plain(row[name])) for name in columns.values()))
    return table
