"""Words of a verdict: what held a run back, which knob to turn, what other choices would have changed. Knows no rooms."""

from __future__ import annotations

from typing import Literal

from asyncrl.config import RunConfig
from asyncrl.observe.run_numbers import OverdueNumbers, Steps, TimeShares, counted, mean, total
from asyncrl.observe.text import several

Bottleneck = Literal["training", "generation", "stragglers", "publishing", "turns", "other", "balanced"]

NUM_NAMED = 5
"""So many batches are named of those with a skipped step."""
FILTERED_SHARE = 0.03
"""From this share of filtered groups on it is said what the filter cost."""


def what_held_it_back(bottleneck: Bottleneck, shares: TimeShares) -> str:
    """The bottleneck with the shares of time it is read from."""
    numbers = (
        f"training {shares.training:.0%}, waiting for generation {shares.generation:.0%}, for stragglers {shares.stragglers:.0%}, "
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
                f" Generation had time to spare: data was {age:.1f} versions old on average, a lower look_ahead makes it fresher."
                if age
                else ""
            )
            return (
                f"Knob: a faster trainer (trainer.threads={config.trainer.threads}, placement.trainer={config.placement.trainer}).{fresher}"
            )
        case "turns":
            return (
                f"Knob: longer turns cost fewer handovers, raise trainer.num_groups (now {config.trainer.num_groups}); or give trainer and "
                "engines devices of their own, with buffer.max_staleness=1 or more."
            )
        case "balanced":
            return "Knob: none stands out; more speed needs both a faster trainer and more generation."
        case _:
            return "Knob: none of the settings; read logs/controller.log for what the run did between two steps."


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
                f"on_overdue=wait cost {overdue.straggler_s:.1f} s ({share:.1%}) in {overdue.num_straggler_waits} of {len(steps)} batches "
                f"and threw nothing away. mask would have saved at most that and taken the gradient of {tokens}; drop would have generated "
                f"{groups} again.",
            )
        case "mask" if overdue.masked_fraction > 0 or overdue.num_handed_back:
            groups = f" in {overdue.num_masked_groups} of {overdue.num_groups} groups" if overdue.num_masked_groups else ""
            return (
                f"on_overdue=mask took the gradient of {overdue.masked_fraction:.1%} of the tokens{groups}; {again}. wait would have kept "
                "every gradient and waited for the stragglers instead; drop would have generated every one of those groups again.",
            )
        case "drop" if overdue.num_handed_back:
            part = overdue.num_handed_back / max(1, overdue.num_handed_back + overdue.num_groups)
            return (
                f"on_overdue=drop: {again} ({part:.1%} of what was started). mask would have kept their young tokens, wait all of them "
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
        f"{several(num_given_up, 'prompt')} {_were(num_given_up)} given up, because {whose} groups failed or became too old "
        f"{several(max_hand_backs + 1, 'time')} (rollout.max_hand_backs={max_hand_backs}), or can never be sampled; "
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
        f"Skipped: loss or gradient was not finite in {several(total(steps, 'trainer/skipped_steps'), 'optimizer step')} (of {named}, "
        "counted from 0), so the weights stayed as they were. logs/trainer-0.log has the values, failed_batches/ the batches.",
    )


def filtered_groups(steps: Steps, config: RunConfig) -> tuple[str, ...]:
    """What buffer.filter cost, and where it was going at the end; nothing is said of a few groups."""
    num_filtered, num_trained = counted(steps, "rollout/filtered"), len(steps) * config.trainer.num_groups
    share = _share(num_filtered, num_trained)
    if share < FILTERED_SHARE:
        return ()
    num_last = max(1, len(steps) // 10)
    share_at_last = _share(counted(steps, "rollout/filtered", last=num_last), num_last * config.trainer.num_groups)
    tokens = several(counted(steps, "rollout/filtered_tokens"), "token")
    sentence = (
        f"buffer.filter={config.buffer.filter} replaced {several(num_filtered, 'group')} ({share:.1%} of those that finished, "
        f"{share_at_last:.1%} in the last {several(num_last, 'step')}; {tokens}) because all their rewards were the same."
    )
    if share_at_last < 0.5:
        return (sentence,)
    return (f"{sentence} Most of what is sampled teaches nothing: prompts of another difficulty would use the engines better.",)


def _were(num: float) -> str:
    return "was" if num == 1 else "were"


def _share(num_filtered: float, num_trained: int) -> float:
    return num_filtered / (num_filtered + num_trained)
