"""Tables of `asyncrl status` and `asyncrl inspect`, drawn from their plain summaries. Knows no files, no rooms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from asyncrl.observe.summary import summary_panel
from asyncrl.observe.text import evaluation_text, sparkline
from asyncrl.observe.verdict import Verdict
from asyncrl.observe.waits import Wait

_STATE_COLOURS = {"done": "green", "running": "blue", "starting": "blue", "interrupted": "yellow", "failed": "red", "crashed": "red"}
_MAX_ROWS = 100
_LEFT_OUT = ("state", "step", "num_steps", "pid", "host", "boot_id", "updated_s", "why")


def status_table(summary: Mapping[str, Any]) -> RenderableType:
    """State, progress, staleness, what the rooms said last, verdict so far."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(ratio=1, overflow="fold")
    state = summary["state"]
    rows.add_row("state", Text.assemble((state, _STATE_COLOURS.get(state, "")), "  ", summary["explanation"]))
    rows.add_row("steps", f"{summary['steps_done']} of {summary['num_steps']}")
    last = summary["last_metrics"]
    if summary["rewards"]:
        line = sparkline(summary["rewards"], width=32)
        rows.add_row("reward", Text(f"{summary['rewards'][-1]:.3f}  {line}  from {summary['rewards'][0]:.3f}"))
    if "sample/staleness_max" in last and "sample/staleness_mean" in last:
        mean, largest = last["sample/staleness_mean"], last["sample/staleness_max"]
        rows.add_row("staleness", f"{mean:.1f} on average, {largest:.0f} at most of {summary['max_staleness']} allowed (last step)")
    for words in _evaluations(summary["evaluations"]):
        rows.add_row("eval", Text(words))
    for name, value in summary["status"].items():
        if name not in _LEFT_OUT and value is not None:
            rows.add_row(Text(name), Text(_waits(value) if name == "waits" else _plain(value)))
    for problem in summary["problems"]:
        rows.add_row("problem", Text(problem, style="red"))
    panel = Panel(rows, title=Text(summary["run_dir"]), title_align="left", border_style="blue")
    verdict = Verdict.from_dict(summary["verdict"]) if summary["verdict"] else None
    return Group(panel, summary_panel(verdict, title="so far")) if verdict else panel


def _waits(value: Any) -> str:
    """A sentence each; whatever is no list of waits, as it is."""
    try:
        return "\n".join(str(Wait(**entry)) for entry in value) or "none"
    except (TypeError, ValueError):
        return _plain(value)


def _evaluations(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One row: the last evaluation, and the rewards of all."""
    if lines:
        rewards = [line["eval/reward_mean"] for line in lines if "eval/reward_mean" in line]
        yield f"{evaluation_text(lines[-1])}\n{sparkline(rewards, width=32)}"


def inspect_tables(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The bound, the batches, their trajectories where asked for, what broke a promise, the verdict."""
    yield _bound(summary)
    if summary["steps"]:
        shown = summary["steps"][-_MAX_ROWS:]
        if "trajectories" not in shown[0] and len(shown) < summary["num_steps"]:
            yield Text(f"the last {len(shown)} of {summary['num_steps']} steps; --step N shows any of them:")
        yield _batches(shown)
    for batch in summary["steps"]:
        if "trajectories" in batch:
            yield _trajectories(batch)
    for violation in summary["violations"][:20]:
        yield Text(f"broken: {violation}", style="red")
    for problem in summary["problems"]:
        yield Text(f"problem: {problem}", style="red")
    if summary["verdict"]:
        yield summary_panel(Verdict.from_dict(summary["verdict"]), title=summary["run_dir"])


def _bound(summary: Mapping[str, Any]) -> Text:
    allowed = f"max_staleness {summary['max_staleness']}, on_overdue {summary['on_overdue']}"
    if summary["bound_kept"] is None:
        return Text(f"nothing was trained yet ({allowed}).")
    counted = f"{summary['num_loss_tokens']} tokens of {summary['num_trajectories']} trajectories in {summary['num_steps']} steps"
    if summary["bound_kept"] and summary["lost"]:
        missing = "; ".join(summary["lost"])
        return Text(f"bound kept in all that is recorded: {counted} ({allowed}); {missing}.", style="yellow")
    if summary["bound_kept"]:
        oldest = summary["staleness_max"]
        return Text(f"bound kept: {counted}, the oldest {oldest} versions behind its batch ({allowed}).", style="green")
    return Text(f"BOUND OR RECORD BROKEN in {len(summary['violations'])} places: {counted} ({allowed}).", style="bold red")


def _batches(steps: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 1))
    for name in ("step", "groups", "tokens", "reward", "staleness", "max"):
        table.add_column(name, justify="right")
    table.add_column("loss tokens by version", overflow="fold")
    for batch in steps:
        versions = " ".join(f"v{version}:{num}" for version, num in batch["tokens_by_version"].items())
        cells = (len(batch["group_ids"]), batch["num_loss_tokens"], batch["reward_mean"], batch["staleness_mean"], batch["staleness_max"])
        table.add_row(str(batch["step"]), *(_plain(cell) for cell in cells), versions)
    return table


def _trajectories(batch: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 1), title=f"step {batch['step']}", title_justify="left")
    has_branches = any(entry["branch"] for entry in batch["trajectories"])
    for name in ("group", "sample", *(("branch",) if has_branches else ()), "reward", "tokens", "in loss", "staleness"):
        table.add_column(name, justify="right")
    table.add_column("prompt", overflow="fold")
    table.add_column("spans of loss tokens", overflow="fold")
    for entry in batch["trajectories"]:
        spans = " ".join(f"{start}..{end - 1}@v{version}" for start, end, version in entry["spans"])
        cells = (
            entry["group_id"],
            entry["sample_index"],
            *((entry["branch"],) if has_branches else ()),
            entry["reward"],
            entry["num_tokens"],
            entry["num_loss_tokens"],
            entry["staleness"],
        )
        table.add_row(*(_plain(cell) for cell in cells), Text(entry["prompt_id"]), spans)
    return table


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        between = "\n" if any(isinstance(item, (list, tuple, Mapping)) for item in value) else ", "
        return between.join(_plain(item) for item in value) or "none"
    return str(value)
