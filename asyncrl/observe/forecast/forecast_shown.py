"""What `asyncrl simulate` shows: the table, the same as JSON, and the plot. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from asyncrl.observe.forecast.forecast import Forecast, ForecastSetting, Row, rate_text, result_words
from asyncrl.observe.forecast.forecast_case import Given, make_case
from asyncrl.observe.status import to_text

_TITLES = {
    "": "left",
    "max_\nstale-\nness": "right",
    "on_\noverdue": "left",
    "look_\nahead": "right",
    "trainer\n+ eng.": "left",
    "steps\n/s": "right",
    "trainer\nidle": "right",
    "engines\nidle": "right",
    "mean\nage": "right",
    "worst\nage": "right",
    "masked": "right",
    "again": "right",
}
_MARKS = {"mask": "o", "wait": "s", "drop": "^"}
_COLOURS = {"mask": "#2a6fb0", "wait": "#c0504d", "drop": "#5b9a57"}


def render_forecast(
    source: Path, overrides: Sequence[str], given: Given, *, as_json: bool = False, plot: Path | None = None
) -> str:
    """The table and the choice for a run directory or a config; with `plot` also a PNG there. Raises
    ConfigError.
    """
    forecast = Forecast.of(make_case(source, overrides, given))
    if plot is not None:
        draw_forecast(forecast, plot, title=source.name)
    if as_json:
        return json.dumps(_plain(forecast), indent=2)
    return to_text(*_shown(forecast), *([] if plot is None else [Text(f"plot: {plot}")]))


def _plain(forecast: Forecast) -> dict[str, Any]:
    measured, rows = forecast.case.measured, [asdict(one) | asdict(result) for one, result in forecast.rows]
    return {
        "present": rows[0],
        "choice": rows[forecast.rows.index(forecast.choice)],
        "why": forecast.why(),
        "sources": forecast.case.sources,
        "measured": measured and {"steps_per_s": measured.steps_per_s, "age_mean": measured.age_mean},
        "settings": rows,
    }


def _shown(forecast: Forecast) -> Iterator[RenderableType]:
    case, sizes = forecast.case, forecast.case.config
    num_groups, group_size, slots = sizes.trainer.num_groups, sizes.rollout.group_size, sizes.rollout.slots
    yield Text(f"simulated: {num_groups} groups of {group_size} a step, engines of {slots} slots")
    yield from map(Text, case.sources)
    if (real := case.measured) is not None:
        told = f"{rate_text(real.steps_per_s)} steps/s, mean age {real.age_mean:.2f}"
        yield Text(f"the run was at {told}; simulated: {result_words(forecast.present[1])}")
    yield Text("")
    yield _table(forecast)
    yield Text("> present, * chosen; again: groups that were too late and are generated again")
    yield Text("")
    choice, *reasons = forecast.why()
    yield Text(choice, style="bold")
    yield from map(Text, reasons)


def _table(forecast: Forecast) -> Table:
    """A line a setting, those of the same machine first."""
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for title, side in _TITLES.items():
        table.add_column(title, justify=side, no_wrap=True, vertical="bottom")  # type: ignore[arg-type]
    (present, _), (chosen, _) = forecast.present, forecast.choice
    shown = sorted(forecast.rows, key=lambda row: _place(row[0], present))
    for number, (setting, result) in enumerate(shown):
        if number and _block(setting, present) != _block(shown[number - 1][0], present):
            table.add_row()
        is_auto = setting.look_ahead == "auto"
        mark = ">" * (setting == present) + "*" * (setting == chosen)
        table.add_row(
            mark,
            str(setting.max_staleness),
            setting.on_overdue if setting.max_staleness else "-",
            f"auto {result.look_ahead_mean:.1f}" if is_auto else str(setting.look_ahead),
            setting.parts,
            rate_text(result.batches_per_s),
            f"{result.trainer_idle:.0%}",
            f"{result.engines_idle:.0%}",
            f"{result.age_mean:.2f}",
            str(result.age_max),
            f"{result.masked_fraction:.1%}",
            f"{result.again_fraction:.1%}",
            style="bold" if mark else "",
        )
    return table


def _block(setting: ForecastSetting, present: ForecastSetting) -> tuple[Any, ...]:
    """Lines that stand together."""
    is_other = setting.parts != present.parts
    return is_other, setting.look_ahead != "auto", not is_other and setting.on_overdue != present.on_overdue


def _place(setting: ForecastSetting, present: ForecastSetting) -> tuple[Any, ...]:
    ahead = -1 if setting.look_ahead == "auto" else setting.look_ahead
    parts = setting.num_trainer is None, setting.num_trainer or 0, setting.num_engines
    return *_block(setting, present), setting.on_overdue, parts, setting.max_staleness, ahead


def draw_forecast(forecast: Forecast, path: Path, *, title: str) -> None:
    """A PNG over max_staleness: speed and mean age, a line for each on_overdue, and what idles."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    present = forecast.present[0]
    auto = [row for row in forecast.same_machine if row[0].look_ahead == "auto"]
    for on_overdue in dict.fromkeys(setting.on_overdue for setting, _ in auto):
        rows = [row for row in auto if row[0].on_overdue == on_overdue or not row[0].max_staleness]
        rows.sort(key=lambda row: row[0].max_staleness)
        style: dict[str, Any] = {
            "marker": _MARKS[on_overdue],
            "color": _COLOURS[on_overdue],
            "label": on_overdue,
        }
        bounds = [row[0].max_staleness for row in rows]
        panels[0].plot(bounds, [row[1].batches_per_s for row in rows], **style)
        panels[1].plot(bounds, [row[1].age_mean for row in rows], **style)
        if on_overdue == present.on_overdue:
            panels[2].plot(
                bounds, [100 * row[1].trainer_idle for row in rows], marker="o", label="trainer idle"
            )
            panels[2].plot(
                bounds, [100 * row[1].engines_idle for row in rows], marker="o", label="engines idle"
            )
            masked = [100 * row[1].masked_fraction for row in rows]
            panels[2].plot(bounds, masked, marker=".", color="0.5", label="tokens masked")
    for row, colour, size, name in (
        (forecast.present, "0.2", 190, "present"),
        (forecast.choice, "#e07b00", 330, "chosen"),
    ):
        _ring(panels, row, colour, size, name)
    titles = (
        "optimizer steps a second",
        "mean age of what is trained on, versions",
        f"idle time and masked tokens in %, {present.on_overdue}",
    )
    for panel, words in zip(panels, titles, strict=True):
        panel.set_title(words, fontsize=10, loc="left")
        panel.set_xlabel("buffer.max_staleness")
        panel.set_xticks(sorted({setting.max_staleness for setting, _ in auto}))
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=9, labelspacing=0.9)
    figure.suptitle(f"{title}, simulated: look_ahead auto, trainer + engines {present.parts}")
    figure.savefig(path)


def _ring(panels: Any, row: Row, colour: str, size: int, name: str) -> None:
    """Around a setting, where speed and age are shown."""
    for panel, value in zip(panels, (row[1].batches_per_s, row[1].age_mean), strict=False):
        places = [row[0].max_staleness], [value]
        panel.scatter(
            *places, s=size, facecolors="none", edgecolors=colour, linewidths=1.8, label=name, zorder=3
        )
