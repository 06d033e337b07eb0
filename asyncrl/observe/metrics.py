"""Declare every metric once, and measure batches. job/reporter.py collects the gauges() of all parts, and
trainer/step_metrics.py measures optimizer steps. docs/metrics.md is written from GAUGES.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from statistics import fmean, pstdev
from typing import Literal

import numpy as np

from asyncrl.messages.records import Batch, Group, Rollout, Trajectory

GaugeKind = Literal["step", "now", "total", "eval"]
KINDS: Mapping[GaugeKind, str] = {
    "step": "Per batch and optimizer step",
    "now": "At the end of the step",
    "total": "Counted over the whole run, including restarts and resumes",
    "eval": "Per evaluation, in eval.jsonl and in the metrics of the next step",
}


@dataclass(frozen=True, slots=True)
class Gauge:
    kind: GaugeKind
    unit: str
    meaning: str


GAUGES: Mapping[str, Gauge] = {
    "step": Gauge("step", "", "number of the optimizer step, from 1"),
    "policy_version": Gauge("step", "", "version made by the step; equals step"),
    "time_s": Gauge("step", "s", "training time up to the end of the step; continues after a resume"),
    "reward/mean": Gauge("step", "", "mean reward of the batch's rollouts"),
    "reward/std": Gauge("step", "", "standard deviation of those rewards (population)"),
    "reward/equal_fraction": Gauge("step", "0..1", "groups whose rollouts all have the same reward"),
    "sample/staleness_mean": Gauge("step", "versions", "mean age of each rollout's oldest token in the loss"),
    "sample/staleness_max": Gauge("step", "versions", "largest age; never above buffer.max_staleness"),
    "sample/length_mean": Gauge("step", "tokens", "sampled tokens of a rollout"),
    "sample/truncated_fraction": Gauge("step", "0..1", "rollouts cut at rollout.max_tokens or another limit"),
    "sample/special_fraction": Gauge("step", "0..1", "rollouts with a special token inside an answer"),
    "sample/unfinished_fraction": Gauge("step", "0..1", "rollouts whose last answer lacks end-of-turn"),
    "sample/masked_fraction": Gauge("step", "0..1", "sampled tokens without a loss weight: too old"),
    "sample/interrupted_fraction": Gauge("step", "0..1", "rollouts that a weight swap interrupted"),
    "tokens/sampled": Gauge("step", "tokens", "sampled tokens of the batch"),
    "tokens/trained": Gauge("step", "tokens", "sampled tokens with a loss weight"),
    "tokens/generated": Gauge("total", "tokens", "sampled by the engines, used or not"),
    "task/*": Gauge("step", "", "mean of a value that task or harness reports per rollout, by name"),
    "policy/loss": Gauge("step", "", "loss of the batch"),
    "policy/grad_norm": Gauge("step", "", "norm of the gradient before it is clipped"),
    "policy/clip_fraction": Gauge("step", "0..1", "tokens whose gradient or weight the loss clipped"),
    "policy/*": Gauge("step", "", "other statistics per loss token: importance_weight, kl_teacher, ..."),
    "policy/entropy": Gauge("step", "nats", "entropy of the policy, mean over the tokens in the loss"),
    "policy/kl_behaviour": Gauge("step", "nats", "KL divergence between the trained and the sampling policy"),
    "policy/ess": Gauge("step", "0..1", "effective sample size of the importance weights"),
    "policy/logprob_gap_mean": Gauge("step", "nats", "|engine - trainer| on fresh tokens; by engine too"),
    "policy/logprob_gap_max": Gauge("step", "nats", "the largest such gap; by engine too"),
    "trainer/learning_rate": Gauge("step", "", "of the step"),
    "trainer/skipped_steps": Gauge("step", "steps", "of this batch, skipped because they were not finite"),
    "perf/step_s": Gauge("step", "s", "from the end of the previous step to the end of this step"),
    "perf/train_s": Gauge("step", "s", "in the trainer; the next six are its parts, on the first rank"),
    "perf/pack_s": Gauge("step", "s", "to make micro-batches and bring them to the device"),
    "perf/logprobs_s": Gauge("step", "s", "in passes without gradient: proximal and reference logprobs"),
    "perf/forward_s": Gauge("step", "s", "in forward passes and losses"),
    "perf/backward_s": Gauge("step", "s", "in backward passes, including recomputed layers"),
    "perf/optimizer_s": Gauge("step", "s", "to clip the gradient and change the weights"),
    "perf/blocked_s": Gauge("step", "s", "waiting until an export or a checkpoint had copied the weights"),
    "perf/compile_s": Gauge("step", "s", "compiling, mostly in perf/forward_s; if the layers are compiled"),
    "perf/device_tokens_per_s": Gauge("step", "tokens/s", "packed tokens over perf/train_s and devices"),
    "perf/mfu": Gauge("step", "0..1", "model FLOPs over the peak FLOPs of all devices in perf/train_s"),
    "perf/device_memory_bytes": Gauge("step", "bytes", "peak tensor memory of the fullest device; CUDA only"),
    "perf/host_memory_bytes": Gauge("step", "bytes", "peak resident memory since the start, all ranks"),
    "perf/wait_s": Gauge("step", "s", "the trainer waited for the batch; the sum of the next three"),
    "perf/wait_generation_s": Gauge("step", "s", "for rollouts to be generated"),
    "perf/wait_stragglers_s": Gauge("step", "s", "for groups close to the staleness bound (on_overdue=wait)"),
    "perf/wait_publishing_s": Gauge("step", "s", "for a newer version to be served"),
    "perf/journal_s": Gauge("step", "s", "until the batch was durable in the journal"),
    "perf/request_s": Gauge("step", "s", "to bring the batch to the trainer, and the report back"),
    "perf/export_s": Gauge("step", "s", "until the new weights' copy began; not perf/to_engines_s"),
    "perf/record_s": Gauge("step", "s", "for metrics, samples and trackers"),
    "perf/inline_rewards_s": Gauge("total", "s", "of inline rewards on the controller's loop; by task too"),
    "perf/reward_workers_full": Gauge("now", "0..1", "1 if all task.reward_workers are busy; by task too"),
    "perf/weight_sync_s": Gauge("now", "s", "of the last weight push, from export to announcement"),
    "perf/weight_sync_pause_s": Gauge("now", "s", "the longest pause of an engine's decoding in that push"),
    "perf/tokens_per_s": Gauge("step", "tokens/s", "trained tokens over perf/step_s"),
    "perf/handover_s": Gauge("step", "s", "in both handovers around the step (colocated)"),
    "perf/to_trainer_s": Gauge("step", "s", "of the handover to the trainer"),
    "perf/to_engines_s": Gauge("step", "s", "of the handover to the engines"),
    "buffer/ready": Gauge("now", "groups", "complete, and not in a batch yet"),
    "buffer/running": Gauge("now", "groups", "whose rollouts run"),
    "buffer/look_ahead": Gauge("now", "batches", "that may run ahead of the current batch"),
    "rollout/inflight": Gauge("now", "rollouts", "started and not finished"),
    "rollout/failed": Gauge("total", "rollouts", "failed in every attempt"),
    "rollout/retried": Gauge("total", "attempts", "after a failed attempt"),
    "rollout/interrupted": Gauge("total", "", "interruptions of completions that later resumed"),
    "rollout/dropped": Gauge("total", "groups", "dropped as too old, and generated again"),
    "rollout/failed_groups": Gauge("total", "groups", "with too few usable rollouts"),
    "rollout/given_up": Gauge("total", "prompts", "given up (rollout.max_requeues)"),
    "rollout/abandoned": Gauge("total", "calls", "of a reward function, abandoned as too slow"),
    "rollout/filtered": Gauge("total", "groups", "replaced because they teach nothing (buffer.filter)"),
    "rollout/filtered_tokens": Gauge("total", "tokens", "sampled in filtered groups"),
    "weight_sync/skipped": Gauge("total", "versions", "not pushed, because a newer version existed"),
    "trainer/compiled": Gauge("step", "", "1 if the layers are compiled, else 0; CUDA only"),
    "trainer/flash_attention": Gauge("step", "", "version of FlashAttention in use; Hopper only"),
    "trainer/restarts": Gauge("now", "", "restarts of the trainer's processes"),
    "engine/down": Gauge("now", "engines", "without work, including parked engines"),
    "engine/decode_s": Gauge("total", "s", "of decoding, summed over engines"),
    "engine/restarts": Gauge("total", "", "restarts of engine processes"),
    "engine/policy_version": Gauge("now", "", "version that each of several engines serves"),
    "engine/busy_slots": Gauge("step", "slots", "busy since the previous step, mean over time, all engines"),
    "engine/up": Gauge("now", "engines", "that get work, if num_engines is a range"),
    "gateway/calls": Gauge("total", "calls", "of harnesses to the model"),
    "gateway/extended": Gauge("total", "calls", "that continued a branch"),
    "gateway/realigned": Gauge("total", "calls", "whose prompt tokenizes differently than it was sampled"),
    "gateway/kept_thought": Gauge("total", "calls", "realigned: the template strips a thought"),
    "gateway/kept_opening": Gauge("total", "calls", "realigned: an earlier generation prompt wrote text"),
    "gateway/kept_end_token": Gauge("total", "calls", "realigned: another end token was sampled"),
    "gateway/kept_form": Gauge("total", "calls", "realigned: an answer has another form"),
    "gateway/edited": Gauge("total", "calls", "that started a branch with an edited history"),
    "gateway/with_notes": Gauge("total", "calls", "with a note for a tool's image"),
    "gateway/refused": Gauge("total", "calls", "answered with an error"),
    "harness/queued": Gauge("now", "rollouts", "waiting for a worker"),
    "harness/workers": Gauge("now", "workers", "connected"),
    "harness/lost": Gauge("total", "rollouts", "failed because their worker was lost"),
    "harness/abandoned": Gauge("total", "calls", "of harnesses, abandoned as too slow"),
    "harness/cpu_s": Gauge("total", "s", "of CPU time of the run's own workers"),
    "harness/restarts": Gauge("total", "", "workers started again"),
    "evaluation/held_s": Gauge("now", "s", "new weights waited for an evaluation on the rollout engines"),
    "eval/version": Gauge("eval", "", "evaluated version"),
    "eval/reward_mean": Gauge("eval", "", "mean over prompts of the mean reward"),
    "eval/standard_error": Gauge("eval", "", "of eval/reward_mean"),
    "eval/length_mean": Gauge("eval", "tokens", "sampled tokens of a sample"),
    "eval/truncated_fraction": Gauge("eval", "0..1", "samples cut at the token limit"),
    "eval/task/*": Gauge("eval", "", "mean of a value that task or harness reports per sample, by name"),
    "eval/failed": Gauge("eval", "samples", "without a reward"),
    "eval/seconds": Gauge("eval", "s", "from loading the weights to the last reward"),
    "eval/skipped": Gauge("total", "evaluations", "due while another ran"),
    "eval/abandoned": Gauge("total", "evaluations", "started and abandoned"),
}


PROGRESS = frozenset(
    """
    buffer/admitted buffer/next_batch buffer/served checkpoint/failed checkpoint/made engine/down
    engine/restarts engine/tokens evaluation/ended gateway/calls harness/leases harness/workers
    policy_version publish/version rollout/failed rollout/finished teacher/restarts teacher/tokens
    trainer/down trainer/restarts trainer/version turns/phases
    """.split()
)
"""Counters whose change shows progress, for the watchdog."""


@lru_cache(maxsize=4096)
def gauge_of(name: str) -> Gauge | None:
    """Return a declaration; NAME/* covers all names below it.

    A third part names a task or an engine: reward/mean/sums. eval/NAME/... is of one evaluation.
    """
    first, *rest = name.split("/")
    if first == "eval" and len(rest) > 1 and rest[0] != "task":
        rest = rest[1:]
    declared = "/".join([first, *rest[:1]])
    return GAUGES.get(declared) or GAUGES.get(f"{declared}/*") or GAUGES.get(f"{first}/*")


def is_total(name: str) -> bool:
    gauge = gauge_of(name)
    return gauge is not None and gauge.kind == "total"


class Totals:
    """Counters of the whole run, across processes.

    Invariant: a total never falls; a source that reports less was restarted.
    """

    def __init__(self) -> None:
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._seen: dict[tuple[str, str], float] = {}

    def starts_from(self, totals: Mapping[str, float]) -> None:
        for name, value in totals.items():
            self._totals[name] = max(value, self._totals.get(name, value))

    def add(self, counted: Mapping[str, float | Mapping[str, float]]) -> dict[str, float]:
        """`counted`: counts so far, of one source or of several by name."""
        for name, value in counted.items():
            for source, now in (value if isinstance(value, Mapping) else {"": value}).items():
                before = self._seen.get((name, source), 0)
                self._totals[name] += now - before if now >= before else now
                self._seen[name, source] = now
        return {name: self._totals[name] for name in counted}


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """`end_ids` end a turn; `stray_ids` have no place inside an answer."""

    end_ids: frozenset[int] = frozenset()
    stray_ids: frozenset[int] = frozenset()


def batch_metrics(batch: Batch, special: SpecialTokens) -> dict[str, float]:
    """Return rewards, ages, lengths and endings, with all branches. Without a token in the loss no
    staleness is reported.
    """
    groups = [rollouts_of(group) for group in batch.groups]
    rollouts = [rollout for group in groups for rollout in group]
    kept = [[_kept(branch, batch) for branch in rollout] for rollout in rollouts]
    oldest = [[version for _, version in branches if version is not None] for branches in kept]
    ages = [batch.version - min(versions) for versions in oldest if versions]
    num_sampled = sum(branch.num_sampled for rollout in rollouts for branch in rollout)
    num_trained = sum(num for branches in kept for num, _ in branches)
    metrics = {
        "reward/std": pstdev(rollout[0].reward for rollout in rollouts),
        "reward/equal_fraction": fmean(len({r[0].reward for r in group}) == 1 for group in groups),
        "sample/special_fraction": fmean(_has_stray(rollout, special) for rollout in rollouts),
        "sample/unfinished_fraction": fmean(_is_unfinished(rollout, special) for rollout in rollouts),
        "sample/masked_fraction": 1 - num_trained / num_sampled if num_sampled else 0.0,
        "sample/interrupted_fraction": fmean(any(branch.num_interruptions for branch in r) for r in rollouts),
        "tokens/sampled": num_sampled,
        "tokens/trained": num_trained,
        **_means(rollouts, ""),
    }
    if ages:
        metrics |= {"sample/staleness_mean": fmean(ages), "sample/staleness_max": max(ages)}
    for task in dict.fromkeys(group.prompt.task for group in batch.groups if group.prompt.task):
        of_task = [rollouts_of(group) for group in batch.groups if group.prompt.task == task]
        metrics |= _means([rollout for found in of_task for rollout in found], f"/{task}")
    for name in dict.fromkeys(name for rollout in rollouts for name in rollout[0].metrics):
        reported = (rollout[0].metrics for rollout in rollouts)
        metrics[f"task/{name}"] = fmean(values[name] for values in reported if name in values)
    return metrics


def _means(rollouts: Sequence[Rollout], ending: str) -> dict[str, float]:
    return {
        f"reward/mean{ending}": fmean(rollout[0].reward for rollout in rollouts),
        f"sample/length_mean{ending}": fmean(sum(branch.num_sampled for branch in r) for r in rollouts),
        f"sample/truncated_fraction{ending}": fmean(any(b.is_truncated for b in r) for r in rollouts),
    }


def rollouts_of(group: Group) -> list[Rollout]:
    """Return the rollouts, each with all its branches."""
    by_index = groupby(group.trajectories, lambda branch: branch.sample_index)
    return [tuple(branches) for _, branches in by_index]


def _has_stray(rollout: Rollout, special: SpecialTokens) -> bool:
    sampled = (branch.token_ids[branch.loss_mask] for branch in rollout)
    return any(not special.stray_ids.isdisjoint(ids.tolist()) for ids in sampled)


def _is_unfinished(rollout: Rollout, special: SpecialTokens) -> bool:
    """An answer that ended before its agent met a limit is not truncated."""
    last = rollout[-1]
    return last.is_truncated and int(last.token_ids[-1]) not in special.end_ids


def num_turns(rollout: Rollout) -> int:
    """Count stretches of sampled tokens; turns are always separated."""
    masks = [branch.loss_mask for branch in rollout]
    return sum(int(mask[0]) + int(np.count_nonzero(mask[1:] > mask[:-1])) for mask in masks)


def _kept(trajectory: Trajectory, batch: Batch) -> tuple[int, int | None]:
    """Return the number of tokens with a loss weight, and their oldest version."""
    num = 0
    versions = []
    for span in trajectory.version_spans:
        if not (batch.mask_older and span.version < batch.min_version):
            num += span.end - span.start
            versions.append(span.version)
    return num, min(versions, default=None)
