"""Reads a run directory for the page; changes nothing in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.base.errors import JournalError
from asyncrl.config import RunConfig
from asyncrl.journal.read import reading
from asyncrl.observe.metrics import gauge_of
from asyncrl.observe.page.curves import curves_of
from asyncrl.observe.page.lanes import Events, shown_events, timeline_view
from asyncrl.observe.page.run_facts import events_of, failures_of_run, settings_of, warnings_of
from asyncrl.observe.page.shape import Curve, Failure, RunView, Share, ShownVerdict, Tile
from asyncrl.observe.run_dir import JOURNAL_FILE, SUMMARY_FILE, TIMELINE_FILE, read_object
from asyncrl.observe.run_numbers import (
    SHARES,
    Steps,
    TimeShares,
    duration,
    masked_tokens,
    recent,
    seconds_left,
)
from asyncrl.observe.samples import ShownRollout, read_samples
from asyncrl.observe.status import read_run
from asyncrl.observe.timeline import read_timeline
from asyncrl.observe.verdict.verdict import Verdict

MAX_EVALUATIONS = 1000
NUM_SAMPLES = 60
"""Number of the newest samples on the page, and of older ones from the whole run."""


def view_run(run_dir: str | Path) -> RunView:
    """Return the data of a run for the page. `problems` names what could not be read. Raises
    ConfigError if `run_dir` is no run directory or its config cannot be read.
    """
    files = read_run(run_dir)
    folder = files.run_dir
    config = files.config
    steps = files.steps
    problems = files.problems
    why = files.explanation
    if files.state in ("done", "failed", "interrupted"):  # without the age: the page is read later
        why = str(files.status.get("why") or f"{len(steps)} of {config.trainer.num_steps} steps done")
    events, failures = _from_journal(folder, problems)
    rows = read_timeline(folder / TIMELINE_FILE, problems)
    if steps and not rows:
        problems.append(f"there is no {TIMELINE_FILE}: the time line is empty")
    timeline = timeline_view(rows, shown_events(events), problems, config.rollout.slots)
    curves = curves_of(steps)
    num_points = len(curves["step"]["mean"]) if curves else 0
    x = {name: [at or 0.0 for at in curves[name]["mean"]] for name in ("step", "time_s") if name in curves}
    return {
        "name": folder.resolve().name,
        "run_dir": str(folder),
        "state": files.state,
        "why": why,
        "started_s": timeline["start_s"],
        "num_steps": config.trainer.num_steps,
        "max_staleness": config.buffer.max_staleness,
        "verdict": verdict_of(files.state, why, steps, files.verdict),
        "window": max(1, round(num_recent(steps) * num_points / max(1, len(steps)))),
        "tiles": [*time_tiles(files.state, steps, config), *tiles_of(steps, config, files.evaluations)],
        "step": x.get("step", []),
        "time_s": x.get("time_s", [0.0] * num_points),
        "curves": {name: curve for name, curve in curves.items() if name != "step"},
        "step_times": step_times_of(curves),
        "evaluations": files.evaluations[:: 1 + len(files.evaluations) // MAX_EVALUATIONS],
        "gauges": gauges_of(curves),
        "shares": shares_of(steps, files.verdict),
        "timeline": timeline,
        "samples": some_samples(folder, problems),
        "failures": failures,
        "warnings": warnings_of(files.status, read_object(folder / SUMMARY_FILE, []), events),
        "settings": settings_of(config),
        "problems": problems,
    }


def some_samples(folder: Path, problems: list[str]) -> list[ShownRollout]:
    """Return the newest samples, and older ones spread over the run."""
    samples = read_samples(folder, problems)
    older = samples[:-NUM_SAMPLES]
    return older[:: 1 + len(older) // NUM_SAMPLES] + samples[-NUM_SAMPLES:]


def _from_journal(folder: Path, problems: list[str]) -> tuple[Events, list[Failure]]:
    if not (folder / JOURNAL_FILE).is_file():
        problems.append(f"there is no {JOURNAL_FILE}: failures and restarts are not known")
        return [], []
    try:
        with reading(folder / JOURNAL_FILE) as connection:
            return events_of(connection), failures_of_run(connection)
    except JournalError as error:
        problems.append(str(error))
        return [], []


def num_recent(steps: Steps) -> int:
    """Return the number of steps whose mean is the verdict's last reward."""
    rewards = steps.values("reward/mean")
    return len(rewards[recent(len(rewards))])


def verdict_of(state: str, why: str, steps: Steps, verdict: Verdict | None) -> ShownVerdict:
    """Return the verdict, and how a run ended that did not end well."""
    ended = f"The run {state}: {why}" if state in ("failed", "crashed") else ""
    ended = f"The run was interrupted: {why}" if state == "interrupted" else ended
    return {
        "ended": ended,
        "headline": "No step has ended yet." if verdict is None else verdict.headline,
        "learning": [] if verdict is None else [*verdict.learning],
        "health": None if verdict is None else [*verdict.health],
        "speed": [] if verdict is None else [*verdict.speed],
        "reward_first": None if verdict is None else verdict.reward_first,
        "reward_last": None if verdict is None else verdict.reward_last,
        "reward_noise": None if verdict is None else verdict.reward_noise,
        "num_recent": num_recent(steps),
        "trend": "unknown" if verdict is None else verdict.trend,
    }


def time_tiles(state: str, steps: Steps, config: RunConfig) -> Iterator[Tile]:
    """Yield steps, time and, in a live run, the remaining time."""
    num, num_steps, step_s = len(steps), config.trainer.num_steps, steps.mean("perf/step_s")
    pace = "" if step_s is None else f", {step_s:.3g} s each"
    yield {"label": "steps", "value": f"{num:,}", "note": f"of {num_steps:,}{pace}"}
    if state == "running" and (left_s := seconds_left(steps, num_steps)) is not None:
        yield {"label": "time left", "value": duration(left_s), "note": "at the pace of the last 20 steps"}
    if num:
        wall_s, in_steps = float(steps.last.get("time_s", 0.0)), duration(steps.total("perf/step_s"))
        yield {"label": "time", "value": duration(wall_s), "note": f"{in_steps} of it in steps"}


def tiles_of(steps: Steps, config: RunConfig, evaluations: list[dict[str, Any]]) -> Iterator[Tile]:
    """Yield the newest evaluation, throughput, staleness and failed rollouts."""
    decides = [line for line in evaluations if line.get("name", "") == (config.best_eval or "")]
    if means := [line["eval/reward_mean"] for line in decides if "eval/reward_mean" in line]:
        label = f"last evaluation {config.best_eval or ''}".strip()
        yield {"label": label, "value": f"{means[-1]:.3f}", "note": f"best of {len(means)}: {max(means):.3f}"}
    wall_s, tokens = float(steps.last.get("time_s", 0.0)), steps.total("tokens/trained")
    if tokens and wall_s > 0:
        note = f"waits included; {masked_tokens(steps):,} tokens were masked as too old"
        yield {"label": "trained tokens a second", "value": f"{tokens / wall_s:,.0f}", "note": note}
    if (age := steps.mean("sample/staleness_mean")) is not None:
        largest, bound = steps.most("sample/staleness_max"), config.buffer.max_staleness
        note = f"largest {largest or 0:.0f}, bound {bound}"
        yield {"label": "staleness", "value": f"{age:.2f} versions", "note": note}
    if (failed := steps.last.get("rollout/failed")) is not None:
        note = f"{steps.last.get('rollout/retried', 0):.0f} retries"
        yield {"label": "failed rollouts", "value": f"{failed:.0f}", "note": note}


def shares_of(steps: Steps, verdict: Verdict | None) -> list[Share]:
    """Return the shares of the wall time of all steps."""
    shares = TimeShares() if verdict is None else verdict.shares
    parts = {name: steps.total(metric) for name, (*_, metric) in SHARES.items() if metric}
    whole_s = max(steps.total("perf/step_s"), sum(parts.values()))
    fractions = {words: float(getattr(shares, name)) for name, (words, *_) in SHARES.items()}
    return [
        {"name": words, "seconds": round(share * whole_s, 3), "fraction": round(share, 4)}
        for words, share in fractions.items()
        if share or words != "taking turns"
    ]


def step_times_of(curves: dict[str, Curve]) -> dict[str, list[float | None]]:
    """Split the mean perf/step_s of each point into its parts; `other` is the rest."""
    if "perf/step_s" not in curves:
        return {}
    whole = curves["perf/step_s"]["mean"]
    parts = {words: curves[metric]["mean"] for words, _, metric in SHARES.values() if metric in curves}
    named = [math.fsum(part[index] or 0.0 for part in parts.values()) for index in range(len(whole))]
    both = zip(whole, named, strict=True)
    left = [None if step_s is None else max(0.0, step_s - named_s) for step_s, named_s in both]
    rounded = [None if value is None else float(f"{value:.6g}") for value in left]
    used = {words: part for words, part in parts.items() if any(part) or words != "taking turns"}
    return {**used, "other": rounded}


def gauges_of(curves: dict[str, Curve]) -> dict[str, dict[str, str]]:
    """Return unit and meaning of each declared metric."""
    found = {name: gauge_of(name) for name in curves}
    return {name: {"unit": gauge.unit, "meaning": gauge.meaning} for name, gauge in found.items() if gauge}
