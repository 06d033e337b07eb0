"""What set the pace of a run, and the settings that its numbers support. Imports no
torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from operator import attrgetter
from statistics import median
from typing import NamedTuple

from asyncrl.algorithms.registry import AGE_AT_NO_PRICE, slow_with_age
from asyncrl.base.extensions import load_place, rows
from asyncrl.config import RunConfig
from asyncrl.config.run_config import key_of
from asyncrl.observe.run_numbers import Steps, several

MIN_STEPS = 20
MIN_TRAINING_S = 10.0
"""A shorter run is not judged."""
SECOND_SHARE = 0.25
"""The second largest share of the time is named from here on."""
FULL = 0.75
"""Usual use from which slots, rollouts, workers or a reward pool count as exhausted."""
BUSY_CORES = 0.8
"""Share of the cores from which their use is named. The quickstart, without other work, used 0.93 of
two cores (median of 180 steps).
"""
BLOCKING_SHARE = 0.1
"""Share of the time from which rewards that hold the controller are named."""
POSTED = "Rewards that programs post"
FUNCTIONS = "Rewards"
PARTS = {
    "perf/request_s": "requests to the trainer",
    "perf/export_s": "exports of the weights",
    "perf/journal_s": "the journal",
    "perf/record_s": "metrics and samples",
}
"""Parts of the work between steps."""
LOSSES = {
    "engine/preempted": "Sequences computed again, since the KV cache was full (rollout.slots=auto helps)",
    "rollout/dropped": "Groups dropped as too old and generated again (buffer.on_overdue)",
    "rollout/filtered": "Groups of equal rewards replaced (buffer.filter)",
    "rollout/given_up": "Prompts given up (rollout.max_requeues; logs/controller.log names them)",
}


class Pace(NamedTuple):
    """The shares of the time, and cures. A cure names a setting whose limit the numbers
    show.

    Example: an agent waits for its tool, with 1 of 16 slots busy and 16 rollouts in
    flight. More slots or workers change nothing: generator.concurrency (auto: 16)
    admits no more rollouts.
    """

    steps: Steps
    config: RunConfig
    shares: Mapping[str, float]

    @property
    def wall_s(self) -> float:
        return self.steps.total("perf/step_s")

    @property
    def bottleneck(self) -> str:
        if len(self.steps) < MIN_STEPS or self.wall_s < MIN_TRAINING_S:
            return "unknown"
        return max(self.shares, key=self.shares.__getitem__)

    def sentences(self, *, has_cures: bool) -> Iterator[str]:
        """`has_cures`: False while the run is ill, because a slow part is then a
        symptom.
        """
        if self.bottleneck == "unknown":
            yield f"Too short to judge speed: {MIN_STEPS} steps and {MIN_TRAINING_S:.0f} s are needed."
        else:
            how = "set the pace:"
            for name in sorted(self.shares, key=self.shares.__getitem__, reverse=True)[
                :2
            ]:
                if how != "took" or self.shares[name] > SECOND_SHARE:
                    yield self._share_text(name, how)
                    yield from self._cures(name) if has_cures else ()
                how = "took"
            yield from self._cores()
        yield from self._losses()

    def _share_text(self, name: str, how: str) -> str:
        text = f"{how} {self.shares[name]:.0%} of the time over {several(len(self.steps), 'step')}"
        if name == "rewards":
            return f"{self._waited_for} {text}."
        if name != "other":
            return f"{name.capitalize()} {text}."
        seconds = {part: self.steps.total(metric) for metric, part in PARTS.items()}
        largest = max(seconds, key=seconds.__getitem__)
        unknown_s = self.shares[name] * self.wall_s - sum(seconds.values())
        if seconds[largest] > unknown_s:
            text += (
                f", the largest part {largest} ({seconds[largest] / self.wall_s:.0%})"
            )
        return f"Work between steps {text}."

    @property
    def _waited_for(self) -> str:
        """Return what sampled rollouts waited for most."""
        if self.config.generator.outcomes == "later":
            return POSTED
        totals = defaultdict[str, float](float)
        for name, task in self.config.tasks.items():
            by = FUNCTIONS
            if task.scored_by is not None:
                by = task.scored_by.title.capitalize()
            totals[by] += self.steps.newest(f"perf/scoring_s{name and f'/{name}'}")
        return max(totals, key=totals.__getitem__)

    def _cores(self) -> Iterator[str]:
        busy = self._usual("perf/cores_fraction")
        if busy >= BUSY_CORES:
            text = f"The machine's cores were {busy:.0%} busy"
            yield f"{text}: trainer, engines and controller compete for them."

    # ---- cures

    def _usual(self, metric: str) -> float:
        """Return the median: first and last steps differ."""
        return median(self.steps.values(metric) or [0.0])

    def faster(self, key: str) -> str:
        return f"Give it a faster device ({self.now(key)}), or take a smaller model."

    def now(self, key: str) -> str:
        return f"{key} (now {attrgetter(key)(self.config)})"

    def _cures(self, name: str) -> Iterator[str]:
        config = self.config
        if name == "training":
            yield from self._training_cures()
        elif name == "handovers":
            yield f"Raise {self.now('trainer.num_groups')}: larger batches need fewer handovers."
        # Slow rewards also look like slow generation or stragglers, so they are checked
        # first.
        elif rewards := [*self._reward_cures()]:
            yield from rewards
        elif name == "stragglers" and config.buffer.on_overdue == "wait":
            yield "Set buffer.on_overdue=mask: it never waits for a straggler."
        elif name == "rewards":
            yield from self._scorer_cures()
        elif name in rows("cures"):
            yield from load_place(rows("cures")[name])(self)
        elif name == "publishing":
            yield from self._more_ahead()
        elif name == "generation":
            yield from self._generation_cures()

    def _training_cures(self) -> Iterator[str]:
        steps = self.steps
        if steps.values("perf/device_memory_bytes"):  # of CUDA devices
            yield f"Raise {self.now('trainer.world_size')} if more devices are free."
        if (
            steps.values("trainer/compiled")[-1:] == [0.0]
            and self.config.trainer.compile == "auto"
        ):
            yield "The trainer's layers ran uncompiled, at about half the speed: logs/trainer-0.log says why."
        if steps.values("trainer/flash_attention")[-1:] == [2.0]:
            yield "The trainer ran FlashAttention 2, at 1.1 to 1.6 times 3's time: install flash-attn-3."

    def _reward_cures(self) -> Iterator[str]:
        for name, task in self.config.tasks.items():
            ending = name and f"/{name}"
            share = self.steps.newest(f"perf/rewards_s{ending}") / self.wall_s
            key = key_of("task", name)
            if task.reward_pool == "inline" and share >= BLOCKING_SHARE:
                yield f"Set {key}.reward_pool=thread: rewards held the controller {share:.0%} of the time."
            elif task.reward_pool != "inline" and share >= FULL * task.reward_workers:
                yield f"Raise {key}.reward_workers (now {task.reward_workers}): all were busy."

    def _scorer_cures(self) -> Iterator[str]:
        # Plain functions that hold the controller or all workers have their own cure.
        if self._waited_for in (POSTED, FUNCTIONS):
            yield from self._more_ahead()
        elif self._waited_for in rows("cures"):
            yield from load_place(rows("cures")[self._waited_for])(self)

    def _generation_cures(self) -> Iterator[str]:
        rollout, generator = self.config.rollout, self.config.generator
        busy = self._usual("engine/busy_slots")
        held = self._usual("rollout/inflight")
        # `asyncrl scale` may have changed the number of engines; the median shows what
        # was usual.
        slots = rollout.num_slots * (self._usual("engine/up") or rollout.max_engines)
        slots = self._usual("rollout/slots") or slots
        limit = slots if generator.concurrency == "auto" else generator.concurrency
        if busy >= FULL * slots:
            is_auto = rollout.slots == "auto"
            more = "" if is_auto else f"{self.now('rollout.slots')} or "
            yield f"Raise {more}{self.now('rollout.num_engines')}."
        elif not self.config.trains_agent or held < FULL * limit:
            yield from self._more_ahead()
        elif generator.remote and self._usual("harness/queued"):
            yield "Start more workers (asyncrl work)."
        elif (
            self.steps.newest("harness/cpu_s") >= FULL * self.wall_s * generator.workers
        ):
            yield f"Raise {self.now('generator.workers')}: they computed all the time."
        else:
            yield f"Raise {self.now('generator.concurrency')} above {limit:.0f}."
        yield f"{busy:.0f} of {slots:.0f} slots were busy, {held:.0f} rollouts in flight."

    def _more_ahead(self) -> Iterator[str]:
        """Advise more batches ahead, if the batches ahead were used up."""
        look_ahead = self.config.buffer.look_ahead
        bound = self.config.buffer.max_staleness
        ahead, keys = (
            (bound, []) if look_ahead == "auto" else (look_ahead, ["buffer.look_ahead"])
        )
        # look_ahead may not exceed max_staleness, so raising only one of the two may be
        # refused or change nothing.
        if ahead == bound:
            keys.append("buffer.max_staleness")
        oldest = max(self.steps.values("sample/staleness_max"), default=-1.0)
        # Both must have been at the limit: long rollouts make old tokens, too.
        used = min(oldest, self.steps.newest("buffer/look_ahead"))
        # which needs max_staleness=0
        is_colocated = self.steps.total("perf/handover_s") > 0
        if used >= ahead and not is_colocated:
            text = f"Raise {' and '.join(map(self.now, keys))}: all batches ahead were in use."
            if ahead >= AGE_AT_NO_PRICE and slow_with_age(self.config):
                text += " Then set algorithm.loss=age_clip, or older tokens teach more slowly."
            yield text

    def _losses(self) -> Iterator[str]:
        sampled = self.steps.total("tokens/sampled")
        if sampled and (masked := 1 - self.steps.total("tokens/trained") / sampled) > 0:
            yield f"Too old for buffer.max_staleness: {masked:.1%} of the tokens, which were masked."
        if share := self.steps.mean("task/unreadable"):
            yield f"A library raised on {share:.1%} of the answers, which earned 0 (task/unreadable)."
        age = self.steps.mean("sample/staleness_mean") or 0.0
        if age >= AGE_AT_NO_PRICE + 1 and (loss := slow_with_age(self.config)):
            yield (
                f"The oldest trained tokens of rollouts were {age:.1f} versions old on average, from which "
                f"algorithm.loss={loss} learns slowly: set algorithm.loss=age_clip, or lower "
                "buffer.look_ahead."
            )
        for metric, words in LOSSES.items():
            if num := self.steps.newest(metric):
                yield f"{words}: {num:.0f}."
