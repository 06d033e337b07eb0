"""Draws a verdict with rich: the end-of-run summary, and part of status and inspect. Knows numbers; knows no files, no rooms."""

from __future__ import annotations

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from asyncrl.observe.text import duration
from asyncrl.observe.verdict import Verdict

_BAR = 30


def summary_panel(verdict: Verdict, *, title: str) -> RenderableType:
    """Steps, time, reward, where the time went, and the verdict in words. Fits 80 columns."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", width=7, no_wrap=True)
    rows.add_column(ratio=1, overflow="fold")
    per_step = f", {verdict.wall_s / verdict.num_steps:.2f} s each"
    rows.add_row("steps", f"{verdict.num_steps} in {duration(verdict.wall_s)}{per_step}")
    if verdict.reward_first is not None and verdict.reward_last is not None:
        rows.add_row("reward", f"{verdict.reward_first:.3f} at first, {verdict.reward_last:.3f} at last")
    rows.add_row("time", shares_table(verdict))
    rows.add_row("verdict", Text("\n".join(verdict.sentences)))
    return Panel(rows, title=Text(title), title_align="left", border_style="blue")


def shares_table(verdict: Verdict) -> RenderableType:
    """One bar a part of the wall time."""
    shares = verdict.shares
    parts = [
        ("training", shares.training, "green"),
        ("waiting for generation", shares.generation, "yellow"),
        ("waiting for stragglers", shares.stragglers, "red"),
        ("waiting for publishing", shares.publishing, "magenta"),
        *([("taking turns", shares.turns, "cyan")] if shares.turns else []),
        ("other", shares.other, "bright_black"),
    ]
    table = Table.grid(padding=(0, 1))
    for name, share, colour in parts:
        table.add_row(name, Text(f"{share:4.0%}", justify="right"), Text("█" * round(share * _BAR), style=colour))
    return table
