"""Where the numbers of a forecast come from: a run directory that measured them, or a config and what its
owner knows or lets assume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from asyncrl.buffer.workload import Lognormal, SimulatedMachine
from asyncrl.config import RunConfig, load_config
from asyncrl.errors import ConfigError
from asyncrl.observe.forecast.forecast import Case
from asyncrl.observe.forecast.run_timing import read_timing
from asyncrl.observe.status import CONFIG_FILE, read_config


@dataclass(frozen=True, slots=True)
class Given:
    """What is known of a run that has not begun, by the command's flags; None is assumed. Lengths in tokens.
    `lengths` and `tool_s` are "MEAN,SIGMA" of a lognormal.
    """

    tokens_per_s: float | None = None
    lengths: str | None = None
    tool_s: str | None = None
    train_s: float | None = None
    push_s: float | None = None
    handover_s: float | None = None
    devices: int | None = None


def make_case(source: Path, overrides: Sequence[str], given: Given) -> Case:
    """Of a run directory, or of a config file. Raises ConfigError."""
    if source.is_dir():
        return _measured(source, overrides, given)
    return _assumed(load_config(source, overrides), given)


def _measured(run_dir: Path, overrides: Sequence[str], given: Given) -> Case:
    own = read_config(run_dir)
    measured = [one.name for one in fields(given) if one.name not in ("handover_s", "devices")]
    if named := [f"--{name.replace('_', '-')}" for name in measured if getattr(given, name) is not None]:
        raise ConfigError(
            f"{', '.join(named)} is given for the run {run_dir}",
            rule="of a run its own numbers are taken",
            way_out=f"leave it out, or simulate {run_dir / CONFIG_FILE}.",
        )
    config = load_config(run_dir / CONFIG_FILE, overrides) if overrides else own
    slots, group_size = _slots(config), config.rollout.group_size
    timing = read_timing(run_dir, own, slots=slots, group_size=group_size)
    machine, in_turns = timing.machine, timing.handover_s > 0
    is_shared = config.placement.trainer == "cpu" or machine.train_drag + machine.decode_drag > 0
    handover_s = timing.handover_s or machine.publish_s
    if given.handover_s is not None:
        handover_s = given.handover_s
    full_s = machine.step_s + slots * machine.row_s
    sources = [
        f"measured in {timing.num_steps} steps of {run_dir}: {slots / max(full_s, 1e-9):,.0f} tokens/s of an "
        f"engine with {slots} busy slots, {machine.train_s:.3g} s and {machine.train_token_s * 1e3:.3g} ms a "
        f"token for a training step, {machine.publish_s:.3g} s for a push, {machine.read_s * 1e3:.3g} ms to "
        f"read a token"
    ]
    if machine.train_drag + machine.decode_drag > 0:
        sources.append(
            f"side by side the engines lose {machine.train_drag:.0%} of their speed, the trainer "
            f"{machine.decode_drag:.0%} of its own"
        )
    if not in_turns:
        words = "assumed, as a push" if given.handover_s is None else "given"
        sources.append(f"a turn's handovers: {handover_s:.3g} s ({words})")
    return Case(
        config,
        machine,
        timing.workload,
        handover_s,
        given.devices or (None if is_shared else _devices(config, in_turns=in_turns)),
        in_turns,
        (*sources, *timing.notes),
        timing,
    )


def _slots(config: RunConfig) -> int:
    """Rollouts that run at once, an engine."""
    concurrency = config.generator.concurrency
    return config.rollout.slots if concurrency == "auto" else -(-concurrency // config.rollout.max_engines)


def _devices(config: RunConfig, *, in_turns: bool) -> int:
    engines = config.rollout.max_engines * config.rollout.tensor_parallel
    return max(config.trainer.world_size, engines) if in_turns else config.trainer.world_size + engines


class _Numbers:
    """Numbers that are given, known or assumed, and what each is, in words."""

    def __init__(self) -> None:
        self.words: dict[str, list[str]] = {"known": [], "assumed": []}

    def take(self, given: float | None, otherwise: float, words: str) -> float:
        """`words`: with {} for the number, and the flag that gives it."""
        what, _, flag = words.partition(" --")
        value = otherwise if given is None else given
        text = what.format(f"{value:,.0f}" if value >= 1000 else f"{value:.4g}")
        self.words["assumed" if given is None else "known"].append(
            f"{text} (--{flag})" if given is None else text
        )
        return value

    @property
    def sources(self) -> tuple[str, ...]:
        """A line for each kind."""
        return tuple(f"{kind}: {', '.join(words)}" for kind, words in self.words.items() if words)


def _assumed(config: RunConfig, given: Given) -> Case:
    rollout, engine, numbers = config.rollout, config.rollout.simulated, _Numbers()
    step_s, row_s, pause_s, read_s = engine.decode_step_s, engine.per_row_s, engine.swap_s, 0.0
    lengths, tool_s = _pair(given.lengths, "--lengths"), _pair(given.tool_s, "--tool-s")
    if rollout.engine == "simulated":
        numbers.words["known"].append("speed and lengths of the simulated engine")
        lengths, read_s = lengths or (engine.mean_tokens, engine.sigma), engine.prefill_s_per_token
    else:
        words = "{} tokens/s of an engine with all slots busy --tokens-per-s"
        step_s, row_s, pause_s = rollout.slots / numbers.take(given.tokens_per_s, 2000.0, words), 0.0, 0.0
        mean = lengths and lengths[0]
        sigma = lengths[1] if lengths else 1.0
        words = f"lengths of {{}} tokens in the mean, sigma {sigma:g} --lengths"
        lengths = numbers.take(mean, rollout.max_tokens / 4, words), sigma
    wait_s = numbers.take(tool_s and tool_s[0], 0.0, "{} s of tools and reward a rollout --tool-s")
    tokens = config.trainer.num_groups * rollout.group_size * min(lengths[0], rollout.max_tokens)
    decode_s = tokens * (step_s + rollout.slots * row_s) / rollout.slots / rollout.max_engines
    train_s = numbers.take(given.train_s, decode_s, "{} s for a training step --train-s")
    push_s = numbers.take(given.push_s, 0.05 * train_s, "{} s for a push of the weights --push-s")
    handover_s = numbers.take(given.handover_s, 2 * push_s, "{} s for the handovers of a turn --handover-s")
    in_turns = config.placement.rollout == "trainer"
    is_shared = config.placement.trainer == "cpu"
    return Case(
        config,
        SimulatedMachine(
            rollout.slots,
            step_s=step_s,
            row_s=row_s,
            read_s=read_s,
            train_s=train_s,
            publish_s=push_s,
            pause_s=pause_s,
            reads_again=config.interrupt in ("abort", "keep"),
        ),
        Lognormal(
            sigma=lengths[1],
            tokens=lengths[0],
            tool_s=wait_s,
            tool_sigma=tool_s[1] if tool_s else 1.0,
            holds_slot=config.generator.is_harness,
            group_size=rollout.group_size,
            most=rollout.max_tokens,
        ),
        handover_s,
        given.devices or (None if is_shared else _devices(config, in_turns=in_turns)),
        in_turns,
        numbers.sources,
    )


def _pair(text: str | None, flag: str) -> tuple[float, float] | None:
    """MEAN,SIGMA."""
    if text is None:
        return None
    try:
        mean, sigma = map(float, text.split(","))
        if not (0 <= mean < 1e9 and 0 <= sigma <= 10):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"{flag}={text}", rule="it is MEAN,SIGMA of a lognormal, such as 400,0.8; sigma is 0 to 10"
        ) from None
    return mean, sigma
