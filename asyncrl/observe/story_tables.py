"""What the journal tells in `asyncrl inspect`, drawn from plain values: waste and events, a batch, a group's
story. Knows no rooms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

_WASTE = {
    "retried": "of attempts that failed or were dropped, as far as they had been interrupted once",
    "failed": "in groups with too few usable rollouts",
    "filtered": "in groups that teach nothing (buffer.filter)",
    "handed_back": "in groups that became too old and were generated again",
    "masked": "trained on without loss weight, as too old (buffer.on_overdue=mask)",
}
_MAX_EVENTS = 30


def story_tables(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Those of the keys journal, batch and story that are there."""
    if "journal" in summary:
        yield from _run(summary["journal"])
    if "batch" in summary:
        yield from _batch(summary["batch"])
    if "story" in summary:
        yield from _story(summary["story"])


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
    table = Table(box=None, padding=(0, 1))
    names = (
        "group_id",
        "num_rollouts",
        "num_failed",
        "num_sampled",
        "oldest_version",
        "reward_mean",
        "retried_tokens",
        "prompt_id",
    )
    for name, title in zip(
        names,
        ("group", "rollouts", "failed", "sampled", "oldest", "reward", "retried", "prompt"),
        strict=True,
    ):
        table.add_column(title, justify="left" if name == "prompt_id" else "right", overflow="fold")
    for line in batch["groups"]:
        table.add_row(*(Text(_plain(line[name])) for name in names))
    yield table


def _story(story: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield Text(f"group {story['group_id']}, prompt {story['prompt_id']}: {_state(story)}", style="bold")
    yield Text(f"admitted {story['admitted_at']} at version {story['start_version']}" + _ended(story))
    if story["retried_tokens"]:
        yield Text(f"{story['retried_tokens']} tokens were lost with attempts that failed or were dropped")
    if story["same_prompt"]:
        yield Text(f"groups of the same prompt: {', '.join(map(str, story['same_prompt']))}")
    if not story["has_tokens"]:
        numbers = f"{story['num_rollouts']} rollouts, {story['num_sampled']} tokens, mean reward {_plain(story['reward_mean'])}"
        yield Text(
            f"{numbers}. Its tokens were deleted, as no checkpoint needs them any more (journal.keep)."
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
            f"reward {_plain(rollout['reward'])}, {rollout['num_sampled']} tokens, "
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
        text.append(f"reward {_plain(credit['reward'])}, unit {credit['unit']}")


def _state(story: Mapping[str, Any]) -> str:
    if story["batch"] is not None:
        return f"in batch {story['batch']}, {'trained ' + story['trained_at'] if story['trained_at'] else 'not trained yet'}"
    state = str(story["state"]).replace("_", " ")
    return f"{state} ({story['reason']})" if story["reason"] else state


def _ended(story: Mapping[str, Any]) -> str:
    oldest = "" if story["oldest_version"] is None else f", oldest token of version {story['oldest_version']}"
    return (f", ended {story['ended_at']}" if story["ended_at"] else "") + oldest


def _detail(detail: Mapping[str, Any]) -> str:
    """One line; what is long (the report of the watchdog) is for --json."""
    parts = [
        f"{name} {_plain(value)}" for name, value in detail.items() if not isinstance(value, (list, dict))
    ]
    parts += [
        f"{name} {len(value)} entries" for name, value in detail.items() if isinstance(value, (list, dict))
    ]
    return ", ".join(parts).replace("\n", " ")


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_plain(item) for item in value)
    return "-" if value is None else str(value)
