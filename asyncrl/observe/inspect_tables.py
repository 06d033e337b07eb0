"""Tables of `asyncrl inspect`, drawn from its plain summary: the bound, the batches, the journal's groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from asyncrl.observe.run_numbers import plain
from asyncrl.observe.status import field_table
from asyncrl.observe.verdict import Verdict, summary_panel

_MAX_ROWS = 100
_MAX_EVENTS = 30
_WASTE = {
    "retried": "of attempts that failed or were dropped, as far as they had been interrupted once",
    "failed": "in groups with too few usable rollouts",
    "filtered": "in groups that teach nothing (buffer.filter)",
    "handed_back": "in groups that became too old and were generated again",
    "masked": "trained on without loss weight, as too old (buffer.on_overdue=mask)",
}
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
    "loss tokens by version": "versions",
}
_TRAJECTORY = {
    "group": "group_id",
    "sample": "sample_index",
    "branch": "branch",
    "reward": "reward",
    "tokens": "num_tokens",
    "in loss": "num_loss_tokens",
    "staleness": "staleness",
    "prompt": "prompt_id",
    "spans of loss tokens": "places",
}


def inspect_tables(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What the journal says, the bound, the batches and their trajectories, what broke a promise, the
    verdict.
    """
    if "journal" in summary:
        yield from _run(summary["journal"])
    if "batch" in summary:
        yield from _batch(summary["batch"])
    if "story" in summary:
        yield from _story(summary["story"])
    yield _bound(summary)
    shown = summary["steps"][-_MAX_ROWS:]
    if shown:
        if "trajectories" not in shown[0] and len(shown) < summary["num_steps"]:
            yield Text(f"the last {len(shown)} of {summary['num_steps']} steps; --step N shows any of them:")
        yield field_table(_BATCH, [_with_versions(batch) for batch in shown])
    for batch in shown:
        if "trajectories" in batch:
            yield _trajectories(batch)
    yield from (Text(f"broken: {violation}", style="red") for violation in summary["violations"][:20])
    yield from (Text(f"problem: {problem}", style="red") for problem in summary["problems"])
    if summary["verdict"]:
        yield summary_panel(Verdict.from_dict(summary["verdict"]), title=summary["run_dir"])


def _bound(summary: Mapping[str, Any]) -> Text:
    allowed = f"max_staleness {summary['max_staleness']}, on_overdue {summary['on_overdue']}"
    if summary["bound_kept"] is None:
        return Text(f"nothing was trained yet ({allowed}).")
    counted = (
        f"{summary['num_loss_tokens']} tokens of {summary['num_trajectories']} trajectories in "
        f"{summary['num_steps']} steps"
    )
    if not summary["bound_kept"]:
        broken = f"BOUND OR RECORD BROKEN in {len(summary['violations'])} places: {counted} ({allowed})."
        return Text(broken, style="bold red")
    if lost := "; ".join(summary["lost"]):
        return Text(f"bound kept in all that is recorded: {counted} ({allowed}); {lost}.", style="yellow")
    oldest = f"the oldest {summary['staleness_max']} versions behind its batch"
    return Text(f"bound kept: {counted}, {oldest} ({allowed}).", style="green")


def _with_versions(batch: Mapping[str, Any]) -> dict[str, Any]:
    versions = " ".join(f"v{version}:{num}" for version, num in batch["tokens_by_version"].items())
    return {**batch, "num_groups": len(batch["group_ids"]), "versions": versions}


def _trajectories(batch: Mapping[str, Any]) -> Table:
    rows = [
        {
            **entry,
            "places": " ".join(f"{start}..{end - 1}@v{version}" for start, end, version in entry["spans"]),
        }
        for entry in batch["trajectories"]
    ]
    has_branches = any(row["branch"] for row in rows)
    columns = {title: name for title, name in _TRAJECTORY.items() if has_branches or name != "branch"}
    table = field_table(columns, rows)
    table.title, table.title_justify = f"step {batch['step']}", "left"
    return table


def _run(run: Mapping[str, Any]) -> Iterator[RenderableType]:
    groups = ", ".join(f"{num} {state.replace('_', ' ')}" for state, num in run["groups"].items()) or "none"
    yield Text(
        f"groups: {groups}; {run['num_trained']} of {run['num_batches']} batches trained; "
        f"{run['failed_rollouts']} rollouts failed."
    )
    sampled = run["sampled_tokens"]
    wasted = {name: num for name, num in run["wasted_tokens"].items() if num}
    if not wasted:
        yield Text(f"tokens: {sampled} sampled in rollouts that ended, none wasted.")
    else:
        total = sum(wasted.values())
        yield Text(
            f"tokens: {sampled} sampled in rollouts that ended, {total} wasted "
            f"({total / max(1, sampled):.1%}):",
            style="yellow",
        )
        for name, num in wasted.items():
            yield Text(f"  {num} {_WASTE[name]}")
    for checkpoint in run["checkpoints"]:
        if checkpoint["state"] != "removed":
            yield Text(f"checkpoint: policy_version {checkpoint['version']} in {checkpoint['path']}")
    events = run["events"]
    if len(events) > _MAX_EVENTS:
        yield Text(f"{len(events) - _MAX_EVENTS} earlier events are in --json")
    for event in events[-_MAX_EVENTS:]:
        yield Text(f"{event['at']}  {event['what']}: {_detail(event['detail'])}")


def _batch(batch: Mapping[str, Any]) -> Iterator[RenderableType]:
    trained = f"trained {batch['trained_at']}" if batch["trained_at"] else "not trained yet"
    published = f", served {batch['published_at']}" if batch["published_at"] else ""
    yield Text(
        f"batch {batch['version']}: taken {batch['taken_at']}, {trained}{published}; no loss below version "
        f"{batch['min_version']}."
    )
    if batch["tokens_by_version"] is None:
        yield Text("its tokens were deleted, as no checkpoint needs them any more (journal.keep)")
    else:
        counts = " ".join(f"v{version}:{num}" for version, num in batch["tokens_by_version"].items())
        yield Text(f"sampled tokens by version: {counts}; {batch['masked_tokens']} of them masked")
    yield field_table(_GROUP, batch["groups"])


def _story(story: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield Text(f"group {story['group_id']}, prompt {story['prompt_id']}: {_state(story)}", style="bold")
    yield Text(f"admitted {story['admitted_at']} at version {story['start_version']}" + _ended(story))
    if story["retried_tokens"]:
        yield Text(f"{story['retried_tokens']} tokens were lost with attempts that failed or were dropped")
    if story["same_prompt"]:
        yield Text(f"groups of the same prompt: {', '.join(map(str, story['same_prompt']))}")
    if not story["has_tokens"]:
        yield Text(
            f"{story['num_rollouts']} rollouts, {story['num_sampled']} tokens, mean reward "
            f"{plain(story['reward_mean'])}. Its tokens were deleted, as no checkpoint needs them any more "
            f"(journal.keep)."
        )
        return
    for message in story["messages"]:
        yield Text.assemble((f"{message['role']}: ", "cyan"), message["content"])
    for rollout in story["rollouts"]:
        yield _rollout(rollout)
    branches = [branch for rollout in story["rollouts"] for branch in rollout.get("branches", (rollout,))]
    if any("token_ids" in piece for branch in branches for piece in branch.get("pieces", ())):
        yield Text(f"token ids instead of text: {story['text_from']}", style="yellow")


def _rollout(rollout: Mapping[str, Any]) -> Text:
    """A line of what it is, then what was sampled, each piece behind its version."""
    words = {
        "finished": lambda: (
            f"reward {plain(rollout['reward'])}, {rollout['num_sampled']} tokens, "
            f"{rollout['num_interruptions']} interruptions"
            + (", cut at rollout.max_tokens" if rollout["is_truncated"] else "")
        ),
        "failed": lambda: (
            f"failed at each of {rollout['attempts']} attempts, the last: {rollout['why']}"
            if rollout["attempts"]
            else f"cannot be sampled: {rollout['why']}"
        ),
        "running": lambda: (
            f"runs, attempt {rollout['attempt'] + 1}, turn {rollout['turn']}, {rollout['num_sampled']} "
            f"tokens so far"
            if "pieces" in rollout
            else "runs, nothing is written down yet"
        ),
    }[rollout["state"]]()
    text = Text.assemble((f"sample {rollout['sample_index']}: ", "green"), words)
    _append_branch(text, rollout)
    for branch in rollout.get("branches", ()):
        text.append(f"\n branch {branch['branch']}: ", "green")
        text.append(
            f"{branch['num_sampled']} tokens"
            + (", cut at rollout.max_tokens" if branch["is_truncated"] else "")
        )
        _append_branch(text, branch)
    return text


def _append_branch(text: Text, branch: Mapping[str, Any]) -> None:
    """What was sampled in it, and which tokens of it earned what."""
    for piece in branch.get("pieces", ()):
        shown = piece["text"] if "text" in piece else " ".join(map(str, piece["token_ids"]))
        text.append(f"\n  [v{piece['version']}, {piece['start']}..{piece['end'] - 1}] ", "magenta")
        text.append(shown)
    for credit in branch.get("credits", ()):
        text.append(f"\n  [{credit['start']}..{credit['end'] - 1}] ", "magenta")
        text.append(f"reward {plain(credit['reward'])}, unit {credit['unit']}")


def _state(story: Mapping[str, Any]) -> str:
    if story["batch"] is not None:
        trained = f"trained {story['trained_at']}" if story["trained_at"] else "not trained yet"
        return f"in batch {story['batch']}, {trained}"
    state = str(story["state"]).replace("_", " ")
    return f"{state} ({story['reason']})" if story["reason"] else state


def _ended(story: Mapping[str, Any]) -> str:
    oldest = "" if story["oldest_version"] is None else f", oldest token of version {story['oldest_version']}"
    return (f", ended {story['ended_at']}" if story["ended_at"] else "") + oldest


def _detail(detail: Mapping[str, Any]) -> str:
    """One line; what is long (the report of the watchdog) is for --json."""
    long = {name for name, value in detail.items() if isinstance(value, (list, dict))}
    parts = [f"{name} {plain(value)}" for name, value in detail.items() if name not in long]
    parts += [f"{name} {len(detail[name])} entries" for name in detail if name in long]
    return ", ".join(parts).replace("\n", " ")
