"""Words of a verdict: what held a run back, which knob to turn, what other choices would have changed. Knows
no rooms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from asyncrl.config import RunConfig
from asyncrl.observe.run_numbers import (
    OverdueNumbers,
    Steps,
    TimeShares,
    counted,
    mean,
    overdue_from_steps,
    time_shares,
    total,
)
from asyncrl.observe.text import duration, several

Bottleneck = Literal["training", "generation", "stragglers", "publishing", "turns", "other", "balanced"]

NUM_NAMED = 5
"""So many batches are named of those with a skipped step."""
FILTERED_SHARE = 0.03
"""From this share of filtered groups on it is said what the filter cost."""


def what_held_it_back(bottleneck: Bottleneck, shares: TimeShares) -> str:
    """The bottleneck with the shares of time it is read from."""
    numbers = (
        f"training {shares.training:.0%}, waiting for generation {shares.generation:.0%}, for stragglers "
        f"{shares.stragglers:.0%}, "
        f"for publishing {shares.publishing:.0%}, "
        + (f"taking turns {shares.turns:.0%}, " if shares.turns else "")
        + f"other {shares.other:.0%}"
    )
    match bottleneck:
        case "training":
            return f"Training set the pace: the trainer waited only {shares.waiting:.0%} of the time ({numbers})."
        case "balanced":
            return f"Balanced: the trainer was busy or nearly so and waited {shares.waiting:.0%} of the time ({numbers})."
        case "turns":
            return f"Taking turns held the run back: {shares.turns:.0%} of the time went into handovers ({numbers})."
        case "other":
            return f"Neither training nor generation: {shares.other:.0%} of the time went into neither training nor waiting ({numbers})."
        case _:
            return f"{bottleneck.capitalize()} held the run back: the trainer waited {shares.waiting:.0%} of the time ({numbers})."


def knob(bottleneck: Bottleneck, steps: Steps, config: RunConfig) -> str:
    """Which knob to turn, with the value it has."""
    eta, look_ahead = config.buffer.max_staleness, config.buffer.look_ahead
    match bottleneck:
        case "generation" if eta == 0:
            return "Knob: buffer.max_staleness=0 makes trainer and engines take turns; 1 or more lets them work at the same time."
        case "generation" if look_ahead != "auto" and look_ahead < eta:
            return f"Knob: buffer.look_ahead={look_ahead} lets few batches start early; set it to auto or up to {eta}."
        case "generation":
            return f"Knob: more generation, {_engine_knob(steps, config)}."
        case "stragglers":
            longest = config.rollout.max_tokens
            higher = f"raise buffer.max_staleness (now {eta}) to {max(2, 2 * eta)}"
            return f"Knob: buffer.on_overdue=mask never waits for a straggler; or {higher}; or lower rollout.max_tokens={longest}."
        case "publishing" if eta == 0:
            return "Knob: buffer.max_staleness=0 waits for every push; 1 or more hides it behind training."
        case "publishing" if look_ahead != "auto" and look_ahead < eta:
            return f"Knob: with buffer.look_ahead={look_ahead} generation stops until a push is served; set it to auto or up to {eta}."
        case "publishing":
            push_s = mean(steps, "perf/publish_s")
            pushes = "pushes" if push_s is None else f"pushes ({push_s:.2g} s on average)"
            drain = (
                " publisher.interrupt=wait drains the engines before each one; abort does not."
                if config.publisher.interrupt == "wait"
                else ""
            )
            return f"Knob: raise buffer.max_staleness (now {eta}), so that more may start while {pushes} are under way.{drain}"
        case "training":
            age = mean(steps, "sample/staleness_mean")
            fresher = (
                f" Generation had time to spare: data was {age:.1f} versions old on average, a lower "
                f"look_ahead makes it fresher."
                if age
                else ""
            )
            return f"Knob: a faster trainer (trainer.threads={config.trainer.threads}, placement.trainer={config.placement.trainer}).{fresher}"
        case "turns":
            return (
                f"Knob: longer turns cost fewer handovers, raise trainer.num_groups (now "
                f"{config.trainer.num_groups}); or give trainer and "
                "engines devices of their own, with buffer.max_staleness=1 or more."
            )
        case "balanced":
            return "Knob: none stands out; more speed needs both a faster trainer and more generation."
        case _:
            return (
                "Knob: none of the settings; read logs/controller.log for what the run did between two steps."
            )


def _engine_knob(steps: Steps, config: RunConfig) -> str:
    num, slots = config.rollout.num_engines, config.rollout.slots
    inflight = mean(steps, "rollout/inflight")
    if inflight is None:
        return f"raise rollout.num_engines (now {num}) or rollout.slots (now {slots})"
    used = f"{inflight:.0f} rollouts were in flight on average in {num * slots} slots"
    if inflight >= 0.9 * num * slots:
        return f"{used}, all full: raise rollout.slots (now {slots}) or rollout.num_engines (now {num})"
    return f"{used}, so more slots would not help: raise rollout.num_engines (now {num}) or rollout.threads, or change placement.rollout"


def other_choices(overdue: OverdueNumbers, steps: Steps, config: RunConfig) -> tuple[str, ...]:
    """What wait, mask and drop would have changed; nothing is said where nothing was overdue."""
    wall_s = total(steps, "perf/step_s")
    share = overdue.straggler_s / wall_s if wall_s else 0.0
    again = f"{several(overdue.num_handed_back, 'group')} {_were(overdue.num_handed_back)} generated again"
    match config.buffer.on_overdue:
        case "wait" if overdue.straggler_s > 0:
            tokens, groups = "some old tokens", "those groups"
            if overdue.num_waited_groups:
                tokens, groups = (
                    f"about {overdue.waited_fraction:.1%} of the tokens",
                    f"about {several(overdue.num_waited_groups, 'group')}",
                )
            return (
                f"on_overdue=wait cost {overdue.straggler_s:.1f} s ({share:.1%}) in "
                f"{overdue.num_straggler_waits} of {len(steps)} batches "
                f"and threw nothing away. mask would have saved at most that and taken the gradient of "
                f"{tokens}; drop would have generated "
                f"{groups} again.",
            )
        case "mask" if overdue.masked_fraction > 0 or overdue.num_handed_back:
            groups = (
                f" in {overdue.num_masked_groups} of {overdue.num_groups} groups"
                if overdue.num_masked_groups
                else ""
            )
            return (
                f"on_overdue=mask took the gradient of {overdue.masked_fraction:.1%} of the tokens{groups}; "
                f"{again}. wait would have kept "
                "every gradient and waited for the stragglers instead; drop would have generated every one "
                "of those groups again.",
            )
        case "drop" if overdue.num_handed_back:
            part = overdue.num_handed_back / max(1, overdue.num_handed_back + overdue.num_groups)
            return (
                f"on_overdue=drop: {again} ({part:.1%} of what was started). mask would have kept their "
                f"young tokens, wait all of them "
                "at the price of idle time.",
            )
        case _:
            return ()


def given_up_prompts(steps: Steps, config: RunConfig) -> tuple[str, ...]:
    """Prompts that the run has gone without."""
    num_given_up = counted(steps, "rollout/given_up")
    if not num_given_up:
        return ()
    max_hand_backs, whose = config.rollout.max_hand_backs, "its" if num_given_up == 1 else "their"
    return (
        f"{several(num_given_up, 'prompt')} {_were(num_given_up)} given up, because {whose} groups failed or "
        f"became too old "
        f"{several(max_hand_backs + 1, 'time')} (rollout.max_hand_backs={max_hand_backs}), or can never be "
        f"sampled; "
        "logs/controller.log names them.",
    )


def skipped_steps(steps: Steps) -> tuple[str, ...]:
    """Optimizer steps that were not taken, with their batches; nothing is said where all were."""
    found = zip(steps.column("step"), steps.column("trainer/skipped_steps"), strict=True)
    batches = [f"{step:.0f}" for step, num_skipped in found if num_skipped > 0]
    if not batches:
        return ()
    named = ", ".join([*batches[:NUM_NAMED], *(["..."] if len(batches) > NUM_NAMED else [])])
    named = f"{'batch' if len(batches) == 1 else 'batches'} {named}"
    return (
        f"Skipped: loss or gradient was not finite in "
        f"{several(total(steps, 'trainer/skipped_steps'), 'optimizer step')} (of {named}, "
        "counted from 0), so the weights stayed as they were. logs/trainer-0.log has the values, "
        "failed_batches/ the batches.",
    )


def filtered_groups(steps: Steps, config: RunConfig) -> tuple[str, ...]:
    """What buffer.filter cost, and where it was going at the end; nothing is said of a few groups."""
    num_filtered, num_trained = counted(steps, "rollout/filtered"), len(steps) * config.trainer.num_groups
    share = _share(num_filtered, num_trained)
    if share < FILTERED_SHARE:
        return ()
    num_last = max(1, len(steps) // 10)
    share_at_last = _share(
        counted(steps, "rollout/filtered", last=num_last), num_last * config.trainer.num_groups
    )
    tokens = several(counted(steps, "rollout/filtered_tokens"), "token")
    sentence = (
        f"buffer.filter={config.buffer.filter} replaced {several(num_filtered, 'group')} ({share:.1%} of "
        f"those that finished, "
        f"{share_at_last:.1%} in the last {several(num_last, 'step')}; {tokens}) because all their rewards "
        f"were the same."
    )
    if share_at_last < 0.5:
        return (sentence,)
    return (
        f"{sentence} Most of what is sampled teaches nothing: prompts of another difficulty would use the "
        f"engines better.",
    )


def _were(num: float) -> str:
    return "was" if num == 1 else "were"


def _share(num_filtered: float, num_trained: int) -> float:
    return num_filtered / (num_filtered + num_trained)


# What held a run back, in words and numbers, from its step metrics. Knows metrics and settings; knows no
# rooms.


__all__ = ["OverdueNumbers", "TimeShares", "Verdict", "judge"]

BUSY_WAIT_SHARE = 0.10
"""Below this share of waiting the trainer was busy: training itself set the pace."""
BALANCED_WAIT_SHARE = 0.25
"""Below this share of waiting neither side waited much for the other."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end-of-run summary. `bottleneck` in one word, `sentences` for people: what held the run back, which
    knob to turn.
    """

    num_steps: int
    wall_s: float
    reward_first: float | None
    """Mean of the first 5 steps (of a run below 10 steps: its first half)."""
    reward_last: float | None
    """Mean of the last tenth of the steps."""
    shares: TimeShares
    bottleneck: Bottleneck
    sentences: tuple[str, ...]
    num_skipped_steps: int = 0
    """Optimizer steps that were not taken, because loss or gradient was not finite."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Verdict:
        """The inverse of as_dict."""
        return cls(
            **{**plain, "shares": TimeShares(**plain["shares"]), "sentences": tuple(plain["sentences"])}
        )


def judge(steps: Steps, config: RunConfig, overdue: OverdueNumbers | None = None) -> Verdict:
    """The verdict of a run with at least one step; `overdue` defaults to what the step metrics alone say.

    Raises ValueError without any step.
    """
    if not steps:
        raise ValueError("no steps, no verdict")
    shares = time_shares(steps)
    bottleneck = _bottleneck(shares)
    overdue = overdue or overdue_from_steps(steps, config)
    num_first = max(1, min(5, len(steps) // 2))
    num_last = max(1, len(steps) // 10)
    return Verdict(
        num_steps=len(steps),
        wall_s=float(steps.last.get("time_s", total(steps, "perf/step_s"))),
        reward_first=mean(steps, "reward/mean", slice(num_first)),
        reward_last=mean(steps, "reward/mean", slice(-num_last, None)),
        shares=shares,
        bottleneck=bottleneck,
        num_skipped_steps=int(total(steps, "trainer/skipped_steps")),
        sentences=(
            what_held_it_back(bottleneck, shares),
            knob(bottleneck, steps, config),
            *other_choices(overdue, steps, config),
            *filtered_groups(steps, config),
            *given_up_prompts(steps, config),
            *skipped_steps(steps),
        ),
    )


def _bottleneck(shares: TimeShares) -> Bottleneck:
    if shares.other > max(0.25, shares.training, shares.waiting):
        return "other"
    if shares.turns > max(0.25, shares.training, shares.waiting):
        return "turns"
    if shares.waiting < BUSY_WAIT_SHARE:
        return "training"
    if shares.waiting < BALANCED_WAIT_SHARE:
        return "balanced"
    waits: dict[Bottleneck, float] = {
        "generation": shares.generation,
        "stragglers": shares.stragglers,
        "publishing": shares.publishing,
    }
    return max(waits, key=lambda name: waits[name])


# Draws a verdict with rich: the end-of-run summary, and part of status and inspect. Knows numbers; knows no
# files, no rooms.


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
        table.add_row(
            name, Text(f"{share:4.0%}", justify="right"), Text("█" * round(share * _BAR), style=colour)
        )
    return table
