"""Judge from step metrics the speed of a run, the setting that would change it, and its losses. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.buffer.staleness import POLICIES
from asyncrl.config import RunConfig
from asyncrl.observe.run_numbers import Steps, TimeShares, several
from asyncrl.observe.verdict.verdict_learning import MIN_STEPS

MIN_TRAINING_S = 10.0
"""A run with less training is too short to judge its speed."""
FILTERED_SHARE, HOPELESS_SHARE, MASKED_SHARE = 0.03, 0.5, 0.05
"""Shares of filtered groups: from the first one on the verdict names their cost, from the second one on it
advises other prompts. And of masked tokens, or groups generated again, from which on it names a larger bound.
"""
BUSY_WAIT_SHARE, BALANCED_WAIT_SHARE = 0.10, 0.25
"""Below the first share of waiting training set the pace, below the second neither side waited much."""
_FULL, _IDLE = 0.9, 0.5
"""Shares of slots from which on they count as full, and below which as idle."""
_MUCH_OTHER = 0.25
"""Share of the controller's own work from which the advice names it in addition to a slower part."""


def is_short(steps: Steps) -> bool:
    """Return whether the run is too short to judge its speed."""
    return len(steps) < MIN_STEPS or steps.total("perf/step_s") < MIN_TRAINING_S


def bottleneck_of(shares: TimeShares) -> str:
    """Return training, generation, stragglers, publishing, turns, other or balanced."""
    for name in ("other", "turns"):
        if getattr(shares, name) > max(BALANCED_WAIT_SHARE, shares.training, shares.waiting):
            return name
    if shares.waiting < BUSY_WAIT_SHARE:
        return "training"
    if shares.waiting < BALANCED_WAIT_SHARE:
        return "balanced"
    return max("generation", "stragglers", "publishing", key=lambda name: float(getattr(shares, name)))


def speed_of(steps: Steps, config: RunConfig, shares: TimeShares, bottleneck: str) -> Iterator[str]:
    """Say what set the pace, which setting would change it, and what the run lost."""
    if is_short(steps):
        needed = f"{MIN_STEPS} steps and {MIN_TRAINING_S:.0f} s of training"
        yield f"Too short to judge speed: {needed} are needed."
    else:
        yield _pace(bottleneck, shares)
        advice = _advice(bottleneck, steps, config, shares)
        is_setting = "." in advice.split()[0]  # a setting begins with a small letter
        yield advice + "." if is_setting else f"{advice[0].upper()}{advice[1:]}."
    yield from _losses(steps, config)


def _pace(bottleneck: str, shares: TimeShares) -> str:
    """Name the bottleneck with the share of time that shows it."""
    waited = f"the trainer waited {shares.waiting:.0%} of the time"
    return {
        "training": f"Training set the pace: {waited}.",
        "balanced": f"Training and generation kept pace: {waited}.",
        "turns": f"Handovers of the devices set the pace: {shares.turns:.0%} of the time.",
        "other": f"Work between steps set the pace: {shares.other:.0%} of the time.",
    }.get(bottleneck, f"{bottleneck.capitalize()} set the pace: {waited}.")


def _advice(bottleneck: str, steps: Steps, config: RunConfig, shares: TimeShares) -> str:
    """Name the setting that would change the speed, with its value."""
    bound, ahead = config.buffer.max_staleness, config.buffer.look_ahead
    if bottleneck == "generation" and (advice := _outside_advice(steps, config)):
        return advice
    if bottleneck in ("generation", "publishing"):
        if bound == 0:
            return "buffer.max_staleness=0 has trainer and engines wait for each other; 1 or more does not"
        if ahead != "auto" and ahead < bound:
            return f"buffer.look_ahead={ahead} lets few batches start early; set it to auto or up to {bound}"
    num_groups = config.trainer.num_groups
    other = (
        f"the controller took {shares.other * (steps.mean('perf/step_s') or 0.0):.2g} s a step for batches, "
        f"the journal and samples: raise trainer.num_groups (now {num_groups}) to pay that less often"
    )
    others = f"; {other}" if shares.other >= _MUCH_OTHER else ""
    match bottleneck:
        case "generation":
            return _generation_advice(steps, config)
        case "stragglers":
            higher = f"raise buffer.max_staleness (now {bound}) to {max(2, 2 * bound)}"
            return f"buffer.on_overdue=mask never waits for a straggler; or {higher}"
        case "publishing":
            if config.weight_sync.interrupt == "wait":
                return "weight_sync.interrupt=wait drains the engines before each push; abort does not"
            push_s = steps.mean("perf/weight_sync_s") or 0.0
            return f"raise buffer.max_staleness (now {bound}): a push takes {push_s:.2g} s on average"
        case "training":
            where = f"trainer.threads={config.trainer.threads}, placement.trainer={config.placement.trainer}"
            return f"{'' if others else 'only '}a faster trainer would help ({where}){others}"
        case "turns":
            return f"raise trainer.num_groups (now {num_groups}): longer turns cost fewer handovers"
        case "balanced":
            return f"more speed needs both a faster trainer and more generation{others}"
    return other


def _outside_advice(steps: Steps, config: RunConfig) -> str | None:
    """Advise if the engines idle because rollouts in flight wait for the agent or the reward function."""
    slots = (steps.mean("engine/up") or config.rollout.max_engines) * config.rollout.slots
    held, busy = steps.mean("rollout/inflight") or 0.0, steps.mean("engine/busy_slots")
    if busy is None or busy >= _IDLE * slots or held <= 2 * busy:
        return None
    used = f"{busy:.0f} of {slots:.0f} slots were busy on average"
    if config.generator.remote:
        return f"start more workers (`asyncrl work`): {used}, while {held:.0f} rollouts were in flight"
    if config.generator.is_harness:
        workers = f"raise generator.workers (now {config.generator.workers})"
        return f"{workers}: the engines wait for the agent, {used} while {held:.0f} rollouts were in flight"
    task = next(iter(config.tasks.values()))
    change = f"raise task.reward_workers (now {task.reward_workers})"
    if task.reward_pool == "inline":
        change = "set task.reward_pool=thread (now inline, one call at a time)"
    return f"the engines wait for the reward function, {used}: {change}"


def _generation_advice(steps: Steps, config: RunConfig) -> str:
    """Use busy slots as the engines see them: a rollout in flight may wait for its agent."""
    slots, num = config.rollout.slots, config.rollout.max_engines
    engines = steps.mean("engine/up") or num
    busy = steps.mean("engine/busy_slots")
    used = f"{busy or 0.0:.0f} of {engines * slots:.0f} slots were busy on average"
    if busy is not None and busy < _IDLE * engines * slots:
        more = f"buffer.max_staleness (now {config.buffer.max_staleness})"
        return f"raise {more} so that more rollouts start early: {used}"
    more = f"rollout.num_engines (now {engines:.3g})"
    if engines < num:
        more = f"engines=N of `asyncrl scale` ({engines:.3g} of at most {num} on average)"
    if busy is not None and busy >= _FULL * engines * slots:
        return f"raise rollout.slots (now {slots}) or {more}: {used}"
    return f"raise {more}" + (f": {used}" if busy is not None else "")


def _losses(steps: Steps, config: RunConfig) -> Iterator[str]:
    """Report time that was waited, and tokens, groups and prompts that were lost."""
    again, choice = steps.newest("rollout/dropped"), config.buffer.on_overdue
    policy = POLICIES[choice]
    waited_s, sampled = steps.total("perf/wait_stragglers_s"), steps.total("tokens/sampled")
    masked = 1 - steps.total("tokens/trained") / sampled if sampled else 0.0
    if policy.waits and waited_s:
        share = waited_s / max(waited_s, steps.total("perf/step_s"))
        yield f"on_overdue={choice} cost {waited_s:.1f} s ({share:.1%}) and threw nothing away."
    elif not policy.waits and (again or masked > 0):
        gradient = f"{masked:.1%} of the tokens were masked" if policy.masks else ""
        advice = ""
        share = max(masked, again / (again + len(steps) * config.trainer.num_groups))
        if policy.masks and share >= MASKED_SHARE:
            advice = f" A larger buffer.max_staleness (now {config.buffer.max_staleness}) loses fewer."
        groups = f"{several(again, 'group')} generated again" if again else ""
        yield f"Too old (on_overdue={choice}): {', '.join(filter(None, (gradient, groups)))}.{advice}"
    filtered = steps.newest("rollout/filtered")
    share = filtered / (filtered + len(steps) * config.trainer.num_groups)
    if share >= FILTERED_SHARE:
        tokens = several(steps.newest("rollout/filtered_tokens"), "token")
        advice = " Prompts of another difficulty would teach more." if share >= HOPELESS_SHARE else ""
        yield (
            f"buffer.filter={config.buffer.filter} replaced {several(filtered, 'group')} ({share:.1%} of "
            f"those that finished; {tokens}) because all their rewards were the same.{advice}"
        )
    if given_up := steps.newest("rollout/given_up"):
        bound = f"rollout.max_requeues={config.rollout.max_requeues}"
        yield f"{several(given_up, 'prompt')} given up ({bound}); logs/controller.log names them."
