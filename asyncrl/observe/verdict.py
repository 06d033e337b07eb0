"""How a run went, from its step metrics: what held it back, in one word and in sentences, which knob to turn,
and the plot of its reward. Imports no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from asyncrl.buffer.staleness import POLICIES
from asyncrl.config import RunConfig
from asyncrl.observe.run_numbers import (
    SHARES,
    Steps,
    TimeShares,
    TrainerNumbers,
    boxed,
    by_evaluation,
    duration,
    several,
    thinned,
)

NUM_NAMED = 5
"""Number of batches with a skipped step that are named."""
FILTERED_SHARE, HOPELESS_SHARE, MASKED_SHARE = 0.03, 0.5, 0.05
"""Shares of filtered groups: from the first on it is said what the filter cost, from the second on to change
the prompts. And of masked tokens, or groups generated again, from which on a larger bound is named."""
BUSY_WAIT_SHARE, BALANCED_WAIT_SHARE = 0.10, 0.25
"""Below the first share of waiting training set the pace, below the second neither side waited much."""
_BAR = 30


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end-of-run summary. `bottleneck`: training, generation, stragglers, publishing, turns, other or
    balanced; `sentences` for people: what held the run back, which knob to turn, what was lost.
    `reward_first`: mean of the first 5 steps (of a run below 10 steps: its first half); `reward_last`: of the
    last tenth. `num_skipped_steps`: optimizer steps left out, because loss or gradient was not finite.
    """

    num_steps: int
    wall_s: float
    reward_first: float | None
    reward_last: float | None
    shares: TimeShares
    bottleneck: str
    sentences: tuple[str, ...]
    num_skipped_steps: int = 0
    trainer: TrainerNumbers | None = None


def judge(steps: Steps, config: RunConfig) -> Verdict:
    """The verdict of a run with at least one step."""
    shares = TimeShares.of(steps.total)
    bottleneck = _bottleneck(shares)
    return Verdict(
        num_steps=len(steps),
        wall_s=float(steps.last.get("time_s", steps.total("perf/step_s"))),
        reward_first=steps.mean("reward/mean", slice(max(1, min(5, len(steps) // 2)))),
        reward_last=steps.mean("reward/mean", slice(-max(1, len(steps) // 10), None)),
        shares=shares,
        bottleneck=bottleneck,
        num_skipped_steps=int(steps.total("trainer/skipped_steps")),
        trainer=TrainerNumbers.of(steps),
        sentences=(
            _what_held_it_back(bottleneck, shares),
            f"Knob: {_knob(bottleneck, steps, config)}.",
            *_losses(steps, config),
        ),
    )


def _bottleneck(shares: TimeShares) -> str:
    for name in ("other", "turns"):
        if getattr(shares, name) > max(BALANCED_WAIT_SHARE, shares.training, shares.waiting):
            return name
    if shares.waiting < BUSY_WAIT_SHARE:
        return "training"
    if shares.waiting < BALANCED_WAIT_SHARE:
        return "balanced"
    return max("generation", "stragglers", "publishing", key=lambda name: float(getattr(shares, name)))


def _what_held_it_back(bottleneck: str, shares: TimeShares) -> str:
    """The bottleneck with the shares of time it is read from."""
    waited = f"the trainer waited {shares.waiting:.0%} of the time"
    said = {
        "training": f"Training set the pace: {waited}",
        "balanced": f"Balanced: {waited}",
        "turns": f"Taking turns held the run back: {shares.turns:.0%} of the time went into handovers",
        "other": f"Neither training nor generation: {shares.other:.0%} of the time went into neither",
    }.get(bottleneck, f"{bottleneck.capitalize()} held the run back: {waited}")
    parts = {words: getattr(shares, name) for name, (words, *_) in SHARES.items()}
    return f"{said} ({', '.join(f'{words} {share:.0%}' for words, share in parts.items() if share)})."


def _knob(bottleneck: str, steps: Steps, config: RunConfig) -> str:
    """Which knob to turn, with the value it has."""
    bound, ahead = config.buffer.max_staleness, config.buffer.look_ahead
    if bottleneck in ("generation", "publishing"):
        if bound == 0:
            return "buffer.max_staleness=0 has trainer and engines wait for each other; 1 or more does not"
        if ahead != "auto" and ahead < bound:
            return f"buffer.look_ahead={ahead} lets few batches start early; set it to auto or up to {bound}"
    match bottleneck:
        case "generation":
            slots, num = config.rollout.slots, config.rollout.max_engines
            engines = steps.mean("engine/up") or num
            used = steps.mean("rollout/inflight")
            more = f"rollout.num_engines (now {engines:.3g})"
            if engines < num:
                more = f"engines=N of `asyncrl scale` ({engines:.3g} of at most {num} on average)"
            if used is None or used >= 0.9 * engines * slots:
                return f"raise rollout.slots (now {slots}) or {more}"
            return f"raise {more}: only {used:.0f} of {engines * slots:.0f} slots were used on average"
        case "stragglers":
            higher = f"raise buffer.max_staleness (now {bound}) to {max(2, 2 * bound)}"
            return f"buffer.on_overdue=mask never waits for a straggler; or {higher}"
        case "publishing":
            if config.weight_sync.interrupt == "wait":
                return "weight_sync.interrupt=wait drains the engines before each push; abort does not"
            push_s = steps.mean("perf/weight_sync_s") or 0.0
            return f"raise buffer.max_staleness (now {bound}): a push takes {push_s:.2g} s on average"
        case "training":
            age = steps.mean("sample/staleness_mean") or 0.0
            trainer = (
                f"trainer.threads={config.trainer.threads}, placement.trainer={config.placement.trainer}"
            )
            return f"a faster trainer ({trainer}); data of {age:.1f} versions on average may be fresher"
        case "turns":
            num_groups = config.trainer.num_groups
            return f"raise trainer.num_groups (now {num_groups}): longer turns cost fewer handovers"
        case "balanced":
            return "none stands out; more speed needs both a faster trainer and more generation"
    return "none of the settings; read logs/controller.log for what the run did between two steps"


def _losses(steps: Steps, config: RunConfig) -> Iterator[str]:
    """What was waited for, masked, generated again, replaced, given up or skipped, if anything was."""
    again, choice = steps.newest("rollout/dropped"), config.buffer.on_overdue
    policy = POLICIES[choice]
    waited_s, sampled = steps.total("perf/wait_stragglers_s"), steps.total("tokens/sampled")
    masked = 1 - steps.total("tokens/trained") / sampled if sampled else 0.0
    if policy.waits and waited_s:
        share = waited_s / max(waited_s, steps.total("perf/step_s"))
        yield f"on_overdue={choice} cost {waited_s:.1f} s ({share:.1%}) and threw nothing away."
    elif not policy.waits and (again or masked > 0):
        gradient = f"{masked:.1%} of the tokens were masked, " if policy.masks else ""
        advice = ""
        share = max(masked, again / (again + len(steps) * config.trainer.num_groups))
        if policy.masks and share >= MASKED_SHARE:
            advice = f" A larger buffer.max_staleness (now {config.buffer.max_staleness}) loses fewer."
        yield f"on_overdue={choice}: {gradient}{several(again, 'group')} generated again.{advice}"
    filtered = steps.newest("rollout/filtered")
    share = filtered / (filtered + len(steps) * config.trainer.num_groups)
    if share >= FILTERED_SHARE:
        tokens = several(steps.newest("rollout/filtered_tokens"), "token")
        advice = " Prompts of another difficulty would teach more." if share >= HOPELESS_SHARE else ""
        kind = next((one for one in config.filters.values() if one != "none"), "none")
        yield (
            f"buffer.filter={kind} replaced {several(filtered, 'group')} ({share:.1%} of "
            f"those that finished; {tokens}) because all their rewards were the same.{advice}"
        )
    if given_up := steps.newest("rollout/given_up"):
        bound = f"rollout.max_hand_backs={config.rollout.max_hand_backs}"
        yield f"{several(given_up, 'prompt')} given up ({bound}); logs/controller.log names them."
    both = zip(steps.column("step"), steps.column("trainer/skipped_steps"), strict=True)
    if batches := [f"{step:.0f}" for step, num_skipped in both if num_skipped > 0]:
        named = ", ".join([*batches[:NUM_NAMED], *(["..."] if len(batches) > NUM_NAMED else [])])
        num = several(steps.total("trainer/skipped_steps"), "optimizer step")
        yield (
            f"Skipped: loss or gradient was not finite in {num} (batches {named}, counted from 0). "
            "logs/trainer-0.log has the values, failed_batches/ the batches."
        )


def summary_panel(verdict: Verdict, *, title: str) -> RenderableType:
    """Steps, time, reward, a bar a part of the time, how the trainer used its own, and the verdict in words.
    Fits 80 columns.
    """
    bars = Table.grid(padding=(0, 1))
    for name, (words, colour, _) in SHARES.items():
        share = getattr(verdict.shares, name)
        if share or name != "turns":
            bars.add_row(words, Text(f"{share:4.0%}"), Text("█" * round(share * _BAR), colour))
    steps = f"{verdict.num_steps} in {duration(verdict.wall_s)}, "
    steps += f"{verdict.wall_s / verdict.num_steps:.2f} s each"
    rows: list[tuple[str, RenderableType]] = [("steps", steps)]
    if verdict.reward_first is not None and verdict.reward_last is not None:
        rows.append(("reward", f"{verdict.reward_first:.3f} at first, {verdict.reward_last:.3f} at last"))
    rows += [("time", bars), *(() if verdict.trainer is None else verdict.trainer.rows())]
    return boxed([*rows, ("verdict", Text("\n".join(verdict.sentences)))], title)


PLOT_FILE = "reward.png"
MAX_POINTS = 2000
_RAW, _SMOOTH, _EVAL = "#9ecae1", "#08519c", ("#d94801", "#238b45", "#6a51a3", "#ae017e")


def write_reward_plot(
    run_dir: Path, steps: Steps, *, title: str, evaluations: Sequence[dict[str, Any]] = ()
) -> Path:
    """Write RUN_DIR/reward.png over steps and over wall time: reward/mean, its running mean, and evaluations
    with their standard error, each where its version was published. Of very long runs a point is the mean of
    a stretch. At least one step must have a reward.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = (steps.column(name) for name in ("reward/mean", "step", "time_s"))
    shown = [row for row in zip(*columns, strict=True) if not math.isnan(row[0])]
    rewards, *axes = map(list, zip(*shown, strict=True))
    window = max(1, min(25, len(rewards) // 20))
    lines = (
        (rewards, _RAW, "each step"),
        (running_mean(rewards, window=window), _SMOOTH, f"mean of the last {window} steps"),
    )
    done = by_evaluation([line for line in evaluations if "eval/reward_mean" in line])
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels, names = figure.subplots(1, 2, sharey=True), ("optimizer step", "wall time in s")
    for panel, name, places, is_version in zip(panels, names, axes, (True, False), strict=True):
        for values, color, label in lines:
            panel.plot(thinned(places, MAX_POINTS), thinned(values, MAX_POINTS), color=color, label=label)
        for (eval_name, found), color in zip(done.items(), itertools.cycle(_EVAL), strict=False):
            panel.errorbar(
                [
                    one["policy_version"] if is_version else one["time_s"] - one["eval/seconds"]
                    for one in found
                ],
                [one["eval/reward_mean"] for one in found],
                [one.get("eval/standard_error", 0.0) for one in found],
                fmt="o",
                capsize=2,
                color=color,
                label=f"eval/{eval_name and f'{eval_name}/'}reward_mean",
            )
        panel.set_xlabel(name)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("reward/mean")
    panels[0].legend(loc="lower right", frameon=False)
    figure.suptitle(title)
    figure.savefig(run_dir / PLOT_FILE)
    return run_dir / PLOT_FILE


def running_mean(values: Sequence[float], *, window: int) -> list[float]:
    """Mean of the last `window` values at each place (of fewer at the start)."""
    parts = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(part) / len(part) for part in parts]
