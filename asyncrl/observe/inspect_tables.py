"""Tables of `asyncrl inspect`, drawn from its plain summary: the bound, the batches, the journal's groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from asyncrl.observe.run_numbers import grid, plain
from asyncrl.observe.status import field_table
from asyncrl.observe.verdict import Verdict, summary_panel

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


def inspect_tables(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What the journal says, the bound, the batches and their trajectories, what broke a promise, the
    verdict.
    """
    if "journal" in summary:
        run = summary["journal"]
        yield _grid(run | {"events": run["events"][-_MAX_EVENTS:]})
    if "batch" in summary:
        yield _grid(summary["batch"], "groups")
        yield field_table(_GROUP, summary["batch"]["groups"])
    if "story" in summary:
        yield from _story(summary["story"])
    yield _bound(summary)
    shown = summary["steps"][-_MAX_ROWS:]
    if shown:
        if "trajectories" not in shown[0] and len(shown) < summary["num_steps"]:
            yield Text(f"the last {len(shown)} of {summary['num_steps']} steps; --step N shows any of them:")
        yield field_table(_BATCH, list(map(_batch, shown)))
    for step in shown:
        if "trajectories" in step:
            yield Text(f"step {step['step']}")
            yield field_table(_TRAJECTORY, list(map(_trajectory, step["trajectories"])))
    for violation in summary["violations"][:_MAX_VIOLATIONS]:
        yield Text(f"broken: {violation}", style="red")
    yield from (Text(f"problem: {problem}", style="red") for problem in summary["problems"])
    if summary["verdict"]:
        yield summary_panel(Verdict.from_dict(summary["verdict"]), title=summary["run_dir"])


def _grid(values: Mapping[str, Any], *drawn: str) -> RenderableType:
    """A row a field, but for those that are drawn in another form."""
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


def _story(story: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield _grid(story, "messages", "rollouts")
    for message in story["messages"]:
        yield Text.assemble((f"{message['role']}: ", "cyan"), message["content"])
    for rollout in story["rollouts"]:
        yield Text.assemble((f"sample {rollout['sample_index']}: ", "green"), _rollout(rollout))
        for branch in rollout.get("branches", (rollout,)):
            if branch is not rollout:
                yield Text(f" branch {branch['branch']}: {branch['num_sampled']} tokens", style="green")
            yield from _sampled(branch)


def _rollout(rollout: Mapping[str, Any]) -> str:
    """What it is, in a line."""
    match rollout["state"]:
        case "finished":
            cut = ", cut at rollout.max_tokens" if rollout["is_truncated"] else ""
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
    """What was sampled in it, each piece behind its version, and which tokens of it earned what."""
    for piece in branch.get("pieces", ()):
        shown = piece["text"] if "text" in piece else " ".join(map(str, piece["token_ids"]))
        place = f"  [v{piece['version']}, {piece['start']}..{piece['end'] - 1}] "
        yield Text.assemble((place, "magenta"), shown)
    for credit in branch.get("credits", ()):
        place = f"  [{credit['start']}..{credit['end'] - 1}] "
        yield Text.assemble((place, "magenta"), f"reward {plain(credit['reward'])}, unit {credit['unit']}")
