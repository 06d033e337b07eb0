"""What held a run back, in words and numbers, from its step metrics: which knob to turn, what other choices
would have changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    duration,
    overdue_from_steps,
    several,
    time_shares,
)

Bottleneck = Literal["training", "generation", "stragglers", "publishing", "turns", "other", "balanced"]

NUM_NAMED = 5
"""So many batches are named of those with a skipped step."""
FILTERED_SHARE = 0.03
"""From this share of filtered groups on it is said what the filter cost."""
BUSY_WAIT_SHARE = 0.10
"""Below this share of waiting the trainer was busy: training itself set the pace."""
BALANCED_WAIT_SHARE = 0.25
"""Below this share of waiting neither side waited much for the other."""
_BAR = 30
_SHARES = {
    "training": ("training", "green"),
    "generation": ("waiting for generation", "yellow"),
    "stragglers": ("waiting for stragglers", "red"),
    "publishing": ("waiting for publishing", "magenta"),
    "turns": ("taking turns", "cyan"),
    "other": ("other", "bright_black"),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end-of-run summary. `bottleneck` in one word, `sentences` for people: what held the run back, which
    knob to turn. `reward_first`: mean of the first 5 steps (of a run below 10 steps: its first half);
    `reward_last`: of the last tenth. `num_skipped_steps`: optimizer steps left out, because loss or gradient
    was not finite.
    """

    num_steps: int
    wall_s: float
    reward_first: float | None
    reward_last: float | None
    shares: TimeShares
    bottleneck: Bottleneck
    sentences: tuple[str, ...]
    num_skipped_steps: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Verdict:
        """The inverse of as_dict."""
        shares, sentences = TimeShares(**plain["shares"]), tuple(plain["sentences"])
        return cls(**{**plain, "shares": shares, "sentences": sentences})


def judge(steps: Steps, config: RunConfig, overdue: OverdueNumbers | None = None) -> Verdict:
    """The verdict of a run with at least one step; `overdue` defaults to what the step metrics alone say.

    Raises ValueError without any step.
    """
    if not steps:
        raise ValueError("no steps, no verdict")
    shares = time_shares(steps)
    bottleneck = _bottleneck(shares)
    num_first = max(1, min(5, len(steps) // 2))
    num_last = max(1, len(steps) // 10)
    return Verdict(
        num_steps=len(steps),
        wall_s=float(steps.last.get("time_s", steps.total("perf/step_s"))),
        reward_first=steps.mean("reward/mean", slice(num_first)),
        reward_last=steps.mean("reward/mean", slice(-num_last, None)),
        shares=shares,
        bottleneck=bottleneck,
        num_skipped_steps=int(steps.total("trainer/skipped_steps")),
        sentences=(
            _what_held_it_back(bottleneck, shares),
            f"Knob: {_knob(bottleneck, steps, config)}",
            *_other_choices(overdue or overdue_from_steps(steps, config), steps, config),
            *_filtered_groups(steps, config),
            *_given_up_prompts(steps, config),
            *_skipped_steps(steps),
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
    waits: tuple[Bottleneck, ...] = ("generation", "stragglers", "publishing")
    return max(waits, key=lambda name: float(getattr(shares, name)))


def _what_held_it_back(bottleneck: Bottleneck, shares: TimeShares) -> str:
    """The bottleneck with the shares of time it is read from."""
    turns = f"taking turns {shares.turns:.0%}, " if shares.turns else ""
    numbers = (
        f"(training {shares.training:.0%}, waiting for generation {shares.generation:.0%}, for stragglers "
        f"{shares.stragglers:.0%}, for publishing {shares.publishing:.0%}, {turns}other {shares.other:.0%})"
    )
    waited = f"{shares.waiting:.0%} of the time"
    match bottleneck:
        case "training":
            said = f"Training set the pace: the trainer waited only {waited}"
        case "balanced":
            said = f"Balanced: the trainer was busy or nearly so and waited {waited}"
        case "turns":
            said = f"Taking turns held the run back: {shares.turns:.0%} of the time went into handovers"
        case "other":
            said = (
                f"Neither training nor generation: {shares.other:.0%} of the time went into neither of them"
            )
        case _:
            said = f"{bottleneck.capitalize()} held the run back: the trainer waited {waited}"
    return f"{said} {numbers}."


def _knob(bottleneck: Bottleneck, steps: Steps, config: RunConfig) -> str:
    """Which knob to turn, with the value it has."""
    bound, ahead = config.buffer.max_staleness, config.buffer.look_ahead
    is_ahead_low = ahead != "auto" and ahead < bound
    match bottleneck:
        case "generation" if bound == 0:
            return (
                "buffer.max_staleness=0 makes trainer and engines take turns; 1 or more lets them work at "
                "the same time."
            )
        case "generation" if is_ahead_low:
            return f"buffer.look_ahead={ahead} lets few batches start early; set it to auto or up to {bound}."
        case "generation":
            return f"more generation, {_engine_knob(steps, config)}."
        case "stragglers":
            return (
                "buffer.on_overdue=mask never waits for a straggler; or raise buffer.max_staleness (now "
                f"{bound}) to {max(2, 2 * bound)}; or lower rollout.max_tokens={config.rollout.max_tokens}."
            )
        case "publishing" if bound == 0:
            return "buffer.max_staleness=0 waits for every push; 1 or more hides it behind training."
        case "publishing" if is_ahead_low:
            return (
                f"with buffer.look_ahead={ahead} generation stops until a push is served; set it to auto or "
                f"up to {bound}."
            )
        case "publishing":
            push_s = steps.mean("perf/weight_sync_s")
            pushes = "pushes" if push_s is None else f"pushes ({push_s:.2g} s on average)"
            is_drained = config.weight_sync.interrupt == "wait"
            drain = " weight_sync.interrupt=wait drains the engines before each one; abort does not."
            return (
                f"raise buffer.max_staleness (now {bound}), so that more may start while {pushes} are under "
                f"way.{drain if is_drained else ''}"
            )
        case "training":
            trainer = (
                f"trainer.threads={config.trainer.threads}, placement.trainer={config.placement.trainer}"
            )
            age = steps.mean("sample/staleness_mean")
            spare = (
                f" Generation had time to spare: data was {age:.1f} versions old on average, a lower "
                f"look_ahead makes it fresher."
                if age
                else ""
            )
            return f"a faster trainer ({trainer}).{spare}"
        case "turns":
            return (
                "longer turns cost fewer handovers, raise trainer.num_groups (now "
                f"{config.trainer.num_groups}); or give trainer and engines devices of their own, with "
                "buffer.max_staleness=1 or more."
            )
        case "balanced":
            return "none stands out; more speed needs both a faster trainer and more generation."
        case _:
            return "none of the settings; read logs/controller.log for what the run did between two steps."


def _engine_knob(steps: Steps, config: RunConfig) -> str:
    engines, slots = config.rollout.num_engines, config.rollout.slots
    inflight = steps.mean("rollout/inflight")
    if inflight is None:
        return f"raise rollout.num_engines (now {engines}) or rollout.slots (now {slots})"
    used = f"{inflight:.0f} rollouts were in flight on average in {engines * slots} slots"
    if inflight >= 0.9 * engines * slots:
        return f"{used}, all full: raise rollout.slots (now {slots}) or rollout.num_engines (now {engines})"
    return (
        f"{used}, so more slots would not help: raise rollout.num_engines (now {engines}) or "
        "rollout.threads, or change placement.rollout"
    )


def _other_choices(overdue: OverdueNumbers, steps: Steps, config: RunConfig) -> Iterator[str]:
    """What wait, mask and drop would have changed; nothing is said where nothing was overdue."""
    num_again = overdue.num_handed_back
    again = f"{several(num_again, 'group')} {_were(num_again)} generated again"
    match config.buffer.on_overdue:
        case "wait" if overdue.straggler_s > 0:
            wall_s = steps.total("perf/step_s")
            share = overdue.straggler_s / wall_s if wall_s else 0.0
            tokens, groups = "some old tokens", "those groups"
            if overdue.num_waited_groups:
                tokens = f"about {overdue.waited_fraction:.1%} of the tokens"
                groups = f"about {several(overdue.num_waited_groups, 'group')}"
            yield (
                f"on_overdue=wait cost {overdue.straggler_s:.1f} s ({share:.1%}) in "
                f"{overdue.num_straggler_waits} of {len(steps)} batches and threw nothing away. mask would "
                f"have saved at most that and taken the gradient of {tokens}; drop would have generated "
                f"{groups} again."
            )
        case "mask" if overdue.masked_fraction > 0 or num_again:
            num_masked = overdue.num_masked_groups
            groups = f" in {num_masked} of {overdue.num_groups} groups" if num_masked else ""
            yield (
                f"on_overdue=mask took the gradient of {overdue.masked_fraction:.1%} of the tokens{groups}; "
                f"{again}. wait would have kept every gradient and waited for the stragglers instead; drop "
                "would have generated every one of those groups again."
            )
        case "drop" if num_again:
            part = num_again / max(1, num_again + overdue.num_groups)
            yield (
                f"on_overdue=drop: {again} ({part:.1%} of what was started). mask would have kept their "
                "young tokens, wait all of them at the price of idle time."
            )


def _filtered_groups(steps: Steps, config: RunConfig) -> Iterator[str]:
    """What buffer.filter cost, and where it was going at the end; nothing is said of a few groups."""
    num_filtered, num_last = steps.counted("rollout/filtered"), max(1, len(steps) // 10)
    share = num_filtered / (num_filtered + len(steps) * config.trainer.num_groups)
    if share < FILTERED_SHARE:
        return
    at_last = steps.counted("rollout/filtered", last=num_last)
    share_at_last = at_last / (at_last + num_last * config.trainer.num_groups)
    tokens = several(steps.counted("rollout/filtered_tokens"), "token")
    advice = (
        " Most of what is sampled teaches nothing: prompts of another difficulty would use the engines "
        "better."
    )
    yield (
        f"buffer.filter={config.buffer.filter} replaced {several(num_filtered, 'group')} ({share:.1%} of "
        f"those that finished, {share_at_last:.1%} in the last {several(num_last, 'step')}; {tokens}) "
        f"because all their rewards were the same.{advice if share_at_last >= 0.5 else ''}"
    )


def _given_up_prompts(steps: Steps, config: RunConfig) -> Iterator[str]:
    """Prompts that the run has gone without."""
    if num := steps.counted("rollout/given_up"):
        max_hand_backs, whose = config.rollout.max_hand_backs, "its" if num == 1 else "their"
        yield (
            f"{several(num, 'prompt')} {_were(num)} given up, because {whose} groups failed or became too "
            f"old {several(max_hand_backs + 1, 'time')} (rollout.max_hand_backs={max_hand_backs}), or can "
            "never be sampled; logs/controller.log names them."
        )


def _skipped_steps(steps: Steps) -> Iterator[str]:
    """Optimizer steps that were not taken, with their batches; nothing is said where all were."""
    found = zip(steps.column("step"), steps.column("trainer/skipped_steps"), strict=True)
    if batches := [f"{step:.0f}" for step, num_skipped in found if num_skipped > 0]:
        named = ", ".join([*batches[:NUM_NAMED], *(["..."] if len(batches) > NUM_NAMED else [])])
        num = several(steps.total("trainer/skipped_steps"), "optimizer step")
        yield (
            f"Skipped: loss or gradient was not finite in {num} (of "
            f"{'batch' if len(batches) == 1 else 'batches'} {named}, counted from 0), so the weights stayed "
            "as they were. logs/trainer-0.log has the values, failed_batches/ the batches."
        )


def _were(num: float) -> str:
    return "was" if num == 1 else "were"


def summary_panel(verdict: Verdict, *, title: str) -> RenderableType:
    """Steps, time, reward, a bar a part of the time, and the verdict in words. Fits 80 columns."""
    bars = Table.grid(padding=(0, 1))
    for name, (words, colour) in _SHARES.items():
        share = getattr(verdict.shares, name)
        if share or name != "turns":
            bars.add_row(
                words, Text(f"{share:4.0%}", justify="right"), Text("█" * round(share * _BAR), colour)
            )
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", width=7, no_wrap=True)
    rows.add_column(ratio=1, overflow="fold")
    per_step = f"{verdict.wall_s / verdict.num_steps:.2f} s each"
    rows.add_row("steps", f"{verdict.num_steps} in {duration(verdict.wall_s)}, {per_step}")
    if verdict.reward_first is not None and verdict.reward_last is not None:
        rows.add_row("reward", f"{verdict.reward_first:.3f} at first, {verdict.reward_last:.3f} at last")
    rows.add_row("time", bars)
    rows.add_row("verdict", Text("\n".join(verdict.sentences)))
    return Panel(rows, title=Text(title), title_align="left", border_style="blue")
