"""Declare every number of a run once: its name, kind, unit and meaning; and measure batches. Each part counts
its own in `gauges()`. metrics.jsonl, status.json and the watchdog are views of all of them; docs/metrics.md
is written from GAUGES.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from statistics import fmean, pstdev
from typing import Literal

import numpy as np

from asyncrl.messages.records import Batch, Group, Rollout, Trajectory

GaugeKind = Literal["step", "now", "total", "eval", "run"]
KINDS: Mapping[GaugeKind, str] = {
    "step": "Per batch and optimizer step",
    "now": "At the end of the step",
    "total": "Counted over the whole run, including restarts and resumes",
    "eval": "Per evaluation, in eval.jsonl and in the metrics of the next step",
    "run": "Per process, in status.json or for the watchdog; not in metrics.jsonl",
}


@dataclass(frozen=True, slots=True)
class Gauge:
    """`is_progress`: a change of it means that the run moves."""

    kind: GaugeKind
    unit: str
    meaning: str
    is_progress: bool = False


GAUGES: Mapping[str, Gauge] = {
    "step": Gauge("step", "", "number of the optimizer step, from 1"),
    "policy_version": Gauge("step", "", "version made by the step; equals step", is_progress=True),
    "time_s": Gauge(
        "step", "s", "training time up to the end of the step, without set-up; continues after a resume"
    ),
    "reward/mean": Gauge("step", "", "mean reward of the batch's rollouts"),
    "reward/std": Gauge("step", "", "standard deviation of those rewards (population)"),
    "reward/equal_fraction": Gauge("step", "0..1", "groups whose rollouts all have the same reward"),
    "reward/mean/*": Gauge("step", "", "of the rollouts of one task, by name, if there are several"),
    "reward/std/*": Gauge("step", "", "of the rollouts of one task, by name, if there are several"),
    "sample/groups/*": Gauge("step", "groups", "of one task in the batch, if there are several"),
    "sample/staleness_mean": Gauge("step", "versions", "mean age of each rollout's oldest token in the loss"),
    "sample/staleness_max": Gauge("step", "versions", "largest age; never above buffer.max_staleness"),
    "sample/length_mean": Gauge("step", "tokens", "sampled tokens of a rollout"),
    "sample/length_mean/*": Gauge("step", "tokens", "the same of one task, if there are several"),
    "sample/truncated_fraction": Gauge(
        "step",
        "0..1",
        "rollouts cut at rollout.max_tokens, or ended by a limit (generator.on_overflow)",
    ),
    "sample/truncated_fraction/*": Gauge("step", "0..1", "the same of one task, if there are several"),
    "sample/special_fraction": Gauge(
        "step",
        "0..1",
        "rollouts that sampled a special token, except end-of-turn and the marks of tool calls and thoughts",
    ),
    "sample/unfinished_fraction": Gauge(
        "step",
        "0..1",
        "rollouts whose last answer was truncated: it does not end with end-of-turn",
    ),
    "sample/masked_fraction": Gauge(
        "step", "0..1", "sampled tokens without a loss weight because they are too old"
    ),
    "sample/interrupted_fraction": Gauge("step", "0..1", "rollouts that a weight swap interrupted"),
    "sample/turns_mean": Gauge("step", "turns", "per rollout, if a rollout has several"),
    "sample/branches_mean": Gauge("step", "branches", "per rollout, if a rollout has several"),
    "tokens/sampled": Gauge("step", "tokens", "sampled tokens of the batch"),
    "tokens/trained": Gauge("step", "tokens", "sampled tokens with a loss weight"),
    "tokens/generated": Gauge("total", "tokens", "sampled by the engines, used or not"),
    "task/*": Gauge("step", "", "mean of a value that task or harness reports per rollout, by name"),
    "policy/loss": Gauge("step", "", "loss of the batch"),
    "policy/grad_norm": Gauge("step", "", "norm of the gradient before it is clipped"),
    "policy/clip_fraction": Gauge("step", "0..1", "tokens whose gradient or weight the loss clipped"),
    "policy/importance_weight": Gauge(
        "step", "", "mean importance weight; below 1 the correction clips or masks"
    ),
    "policy/off_policy_fraction": Gauge("step", "0..1", "tokens masked by algorithm.off_policy_mask"),
    "policy/kl_teacher": Gauge("step", "nats", "KL divergence to the teacher, if there is one"),
    "policy/kl_reference": Gauge("step", "nats", "KL divergence to the initial weights, if enabled"),
    "policy/*": Gauge("step", "", "any other statistic of algorithm.loss, by name, per loss token"),
    "policy/entropy": Gauge("step", "nats", "entropy of the policy, mean over the tokens in the loss"),
    "policy/kl_behaviour": Gauge("step", "nats", "KL divergence between the trained and the sampling policy"),
    "policy/ess": Gauge("step", "0..1", "effective sample size of the importance weights"),
    "policy/logprob_gap_*": Gauge("step", "nats", "engine to trainer, fresh tokens: mean, max, by engine"),
    "trainer/learning_rate": Gauge("step", "", "of the step"),
    "trainer/optimizer_steps": Gauge("step", "steps", "taken so far"),
    "trainer/skipped_steps": Gauge("step", "steps", "of this batch, skipped because they were not finite"),
    "perf/step_s": Gauge("step", "s", "from the end of the previous step to the end of this step"),
    "perf/train_s": Gauge("step", "s", "in the trainer; the next six are its parts, on the first rank"),
    "perf/pack_s": Gauge("step", "s", "to make micro-batches and bring them to the device"),
    "perf/logprobs_s": Gauge("step", "s", "in passes without gradient: proximal and reference logprobs"),
    "perf/forward_s": Gauge("step", "s", "in forward passes and losses"),
    "perf/backward_s": Gauge("step", "s", "in backward passes, including recomputed layers"),
    "perf/optimizer_s": Gauge("step", "s", "to clip the gradient and change the weights"),
    "perf/blocked_s": Gauge("step", "s", "waiting until an export or a checkpoint had copied the weights"),
    "perf/export_s": Gauge("step", "s", "since the previous step: the trainer was busy with exports"),
    "perf/packed_tokens": Gauge(
        "step", "tokens", "in forward and backward passes; shared prefixes count once"
    ),
    "perf/device_tokens_per_s": Gauge("step", "tokens/s", "packed tokens over perf/train_s and devices"),
    "perf/mfu": Gauge("step", "0..1", "model FLOPs over the peak FLOPs of all devices in perf/train_s"),
    "perf/device_memory_bytes": Gauge("step", "bytes", "peak tensor memory of the fullest device; CUDA only"),
    "perf/device_reserved_bytes": Gauge("step", "bytes", "the same, including the allocator's reserve"),
    "perf/host_memory_bytes": Gauge("step", "bytes", "peak resident memory since the start, all ranks"),
    "perf/wait_s": Gauge("step", "s", "the trainer waited for the batch; the sum of the next three"),
    "perf/wait_generation_s": Gauge("step", "s", "for rollouts to be generated"),
    "perf/wait_stragglers_s": Gauge("step", "s", "for groups close to the staleness bound (on_overdue=wait)"),
    "perf/wait_publishing_s": Gauge("step", "s", "for a newer version to be served"),
    "perf/weight_sync_s": Gauge("now", "s", "of the last weight push, from export to announcement"),
    "perf/weight_sync_pause_s": Gauge("now", "s", "the longest pause of an engine's decoding in that push"),
    "perf/tokens_per_s": Gauge("step", "tokens/s", "trained tokens over perf/step_s"),
    "perf/handover_s": Gauge("step", "s", "in both handovers around the step (colocated)"),
    "perf/to_trainer_s": Gauge("step", "s", "of the handover to the trainer"),
    "perf/to_engines_s": Gauge("step", "s", "of the handover to the engines"),
    "perf/handover_bytes": Gauge("step", "bytes", "freed, taken and moved in both"),
    "buffer/ready": Gauge("now", "groups", "complete, and not in a batch yet"),
    "buffer/running": Gauge("now", "groups", "whose rollouts run"),
    "buffer/look_ahead": Gauge("now", "batches", "that may run ahead of the current batch"),
    "buffer/served": Gauge("run", "", "version that every engine serves"),
    "buffer/next_batch": Gauge("run", "batches", "taken by the trainer", is_progress=True),
    "buffer/admitted": Gauge("run", "groups", "started", is_progress=True),
    "rollout/inflight": Gauge("now", "rollouts", "started and not finished"),
    "rollout/finished": Gauge("run", "rollouts", "that ended with a reward", is_progress=True),
    "rollout/failed": Gauge("total", "rollouts", "failed in every attempt", is_progress=True),
    "rollout/failed/*": Gauge("total", "rollouts", "of one task, if there are several"),
    "rollout/retried": Gauge("total", "attempts", "after a failed attempt"),
    "rollout/interrupted": Gauge("total", "", "interruptions of completions that later resumed"),
    "rollout/dropped": Gauge("total", "groups", "dropped as too old, and generated again"),
    "rollout/failed_groups": Gauge("total", "groups", "with too few usable rollouts"),
    "rollout/given_up": Gauge("total", "prompts", "given up (rollout.max_requeues)"),
    "rollout/abandoned": Gauge("total", "calls", "of a reward function, abandoned as too slow"),
    "rollout/filtered": Gauge("total", "groups", "replaced because they teach nothing (buffer.filter)"),
    "rollout/filtered/*": Gauge("total", "groups", "of one task, if there are several"),
    "rollout/filtered_tokens": Gauge("total", "tokens", "sampled in filtered groups"),
    "weight_sync/skipped": Gauge("total", "versions", "not pushed, because a newer version existed"),
    "publish/version": Gauge("run", "", "version announced last", is_progress=True),
    "engine/decode_s": Gauge("total", "s", "of decoding, summed over engines"),
    "engine/restarts": Gauge("total", "", "restarts of engine processes", is_progress=True),
    "engine/policy_version/*": Gauge("now", "", "version that an engine serves, if there are several"),
    "engine/tokens": Gauge("run", "tokens", "sampled, from the engines' /health", is_progress=True),
    "engine/down": Gauge("run", "engines", "without work, including parked engines", is_progress=True),
    "engine/wanted": Gauge("now", "engines", "requested by `asyncrl scale`, if num_engines is a range"),
    "engine/busy_slots": Gauge(
        "step", "slots", "busy since the previous step, mean over time, sum over engines"
    ),
    "engine/up": Gauge("now", "engines", "that get work, if num_engines is a range"),
    "gateway/calls": Gauge("total", "calls", "of harnesses to the model", is_progress=True),
    "gateway/extended": Gauge("total", "calls", "that continued a branch"),
    "gateway/realigned": Gauge("total", "calls", "whose prompt tokenizes differently than it was sampled"),
    "gateway/edited": Gauge("total", "calls", "that started a branch with an edited history"),
    "gateway/uncut": Gauge("total", "calls", "that started a branch because of the chat template"),
    "gateway/refused": Gauge("total", "calls", "answered with an error"),
    "harness/queued": Gauge("now", "rollouts", "waiting for a worker"),
    "harness/leased": Gauge("now", "rollouts", "running on workers"),
    "harness/workers": Gauge("now", "workers", "connected", is_progress=True),
    "harness/slots": Gauge("run", "rollouts", "slots of all workers"),
    "harness/unseen_s": Gauge("run", "s", "since the last message of any worker"),
    "harness/leases": Gauge("run", "rollouts", "given to workers", is_progress=True),
    "harness/lost": Gauge("total", "rollouts", "failed because their worker was lost"),
    "harness/abandoned": Gauge("total", "calls", "of harnesses, abandoned as too slow"),
    "harness/restarts": Gauge("total", "", "workers started again"),
    "teacher/tokens": Gauge("run", "tokens", "scored by the teacher", is_progress=True),
    "teacher/restarts": Gauge("run", "", "of the teacher's process", is_progress=True),
    "trainer/restarts": Gauge("run", "", "of the trainer's processes", is_progress=True),
    "trainer/down": Gauge("run", "0 or 1", "1 while the trainer restarts", is_progress=True),
    "trainer/version": Gauge("run", "", "of the trainer, from /health", is_progress=True),
    "checkpoint/made": Gauge("run", "checkpoints", "written", is_progress=True),
    "checkpoint/failed": Gauge("run", "checkpoints", "not written because of an error", is_progress=True),
    "turns/phases": Gauge("run", "", "of handovers done", is_progress=True),
    "evaluation/version": Gauge("run", "", "version in evaluation, or the last one evaluated"),
    "evaluation/ended": Gauge("run", "evaluations", "finished, skipped or abandoned", is_progress=True),
    "evaluation/held_s": Gauge("run", "s", "new weights waited for an evaluation on the rollout engines"),
    "eval/version": Gauge("eval", "", "evaluated version"),
    "eval/reward_mean": Gauge("eval", "", "mean over prompts of the mean reward"),
    "eval/reward_std": Gauge("eval", "", "standard deviation of the prompts' means"),
    "eval/standard_error": Gauge("eval", "", "of eval/reward_mean"),
    "eval/length_mean": Gauge("eval", "tokens", "sampled tokens of a sample"),
    "eval/truncated_fraction": Gauge("eval", "0..1", "samples cut at the token limit"),
    "eval/task/*": Gauge("eval", "", "mean of a value that task or harness reports per sample, by name"),
    "eval/*": Gauge("eval", "", "each of these for one evaluation, as eval/NAME/..., if there are several"),
    "eval/failed": Gauge("eval", "samples", "without a reward"),
    "eval/seconds": Gauge("eval", "s", "from loading the weights to the last reward"),
    "eval/skipped": Gauge("total", "evaluations", "due while another ran"),
    "eval/abandoned": Gauge("total", "evaluations", "started and abandoned"),
    "eval/abandoned_calls": Gauge("total", "calls", "of the eval reward function, abandoned as too slow"),
}


@lru_cache(maxsize=4096)
def gauge_of(name: str) -> Gauge | None:
    """Return the declaration of a name; a declared NAME* covers all names with that prefix."""
    parts = (name[:end] for end in range(len(name), 0, -1))
    return GAUGES.get(name) or next((GAUGES[f"{part}*"] for part in parts if f"{part}*" in GAUGES), None)


def is_total(name: str) -> bool:
    """Counted over the whole run."""
    gauge = gauge_of(name)
    return gauge is not None and gauge.kind == "total"


class Totals:
    """Counters of the whole run by metric name; they outlive the processes that count them.

    Life: begins at 0, or at the totals of starts_from; then add() gets each source's count since its start.
    Invariant: a total never falls. A source that reports less than before was restarted: its whole count is
        new.
    """

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._seen: dict[tuple[str, str], float] = {}

    def starts_from(self, totals: Mapping[str, float]) -> None:
        """Start from the counts of earlier processes; a higher total stays."""
        for name, value in totals.items():
            self._totals[name] = max(value, self._totals.get(name, value))

    def add(self, counted: Mapping[str, float | Mapping[str, float]]) -> dict[str, float]:
        """The totals of these names, now that their sources (one, or several by name) have counted so far."""
        for name, value in counted.items():
            for source, now in (value if isinstance(value, Mapping) else {"": value}).items():
                before = self._seen.get((name, source), 0)
                self._totals[name] = self._totals.get(name, 0) + (now - before if now >= before else now)
                self._seen[name, source] = now
        return {name: self._totals.get(name, 0) for name in counted}


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Token ids of one tokenizer: `end_ids` end a turn; `stray_ids` are the special tokens that have no place
    inside an answer.
    """

    end_ids: frozenset[int] = frozenset()
    stray_ids: frozenset[int] = frozenset()


def batch_metrics(batch: Batch, special: SpecialTokens) -> dict[str, float]:
    """Return the rewards, ages, lengths and endings of a batch's rollouts. A rollout is all its branches
    together; without any token in the loss no staleness is reported.
    """
    groups, by_name = [rollouts_of(group) for group in batch.groups], dict[str, list[Sequence[Rollout]]]()
    rollouts = [rollout for group in groups for rollout in group]
    for group, of_group in zip(batch.groups, groups, strict=True):
        by_name.setdefault(group.prompt.task, []).append(of_group)
    rewards = [rollout[0].reward for rollout in rollouts]
    kept = [[_kept(branch, batch) for branch in rollout] for rollout in rollouts]
    oldest = [[version for _, version in branches if version is not None] for branches in kept]
    ages = [batch.version - min(versions) for versions in oldest if versions]
    num_sampled = sum(branch.num_sampled for rollout in rollouts for branch in rollout)
    num_trained = sum(num for branches in kept for num, _ in branches)
    metrics = {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/equal_fraction": fmean(len({r[0].reward for r in group}) == 1 for group in groups),
        "sample/length_mean": num_sampled / len(rollouts),
        "sample/truncated_fraction": fmean(any(branch.is_truncated for branch in r) for r in rollouts),
        "sample/special_fraction": fmean(_has_stray(rollout, special) for rollout in rollouts),
        "sample/unfinished_fraction": fmean(_is_unfinished(rollout, special) for rollout in rollouts),
        "sample/masked_fraction": 1 - num_trained / num_sampled if num_sampled else 0.0,
        "sample/interrupted_fraction": fmean(any(branch.num_interruptions for branch in r) for r in rollouts),
        "tokens/sampled": num_sampled,
        "tokens/trained": num_trained,
    }
    if ages:
        metrics |= {"sample/staleness_mean": fmean(ages), "sample/staleness_max": max(ages)}
    counts = {
        "sample/turns_mean": [num_turns(rollout) for rollout in rollouts],
        "sample/branches_mean": [len(rollout) for rollout in rollouts],
    }
    metrics |= {name: fmean(numbers) for name, numbers in counts.items() if max(numbers) > 1}
    for name, found in by_name.items() if any(by_name) else ():
        metrics |= _metrics_of_one(name, found)
    return metrics | _task_metrics(rollouts)


def rollouts_of(group: Group) -> list[Rollout]:
    """Return the rollouts of a group, each with all its branches."""
    of_one = groupby(group.trajectories, lambda branch: branch.sample_index)
    return [tuple(branches) for _, branches in of_one]


def _has_stray(rollout: Rollout, special: SpecialTokens) -> bool:
    sampled = (branch.token_ids[branch.loss_mask] for branch in rollout)
    return any(not special.stray_ids.isdisjoint(ids.tolist()) for ids in sampled)


def _is_unfinished(rollout: Rollout, special: SpecialTokens) -> bool:
    """Return whether the last branch is truncated. An answer ended by a stop text is not; nor is an answer
    that ended before its agent met a limit.
    """
    last = rollout[-1]
    return last.is_truncated and int(last.token_ids[-1]) not in special.end_ids


def _metrics_of_one(name: str, groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """Return the metrics of a single task in a run of several."""
    rollouts = [rollout for group in groups for rollout in group]
    rewards = [rollout[0].reward for rollout in rollouts]
    return {
        f"reward/mean/{name}": fmean(rewards),
        f"reward/std/{name}": pstdev(rewards),
        f"sample/groups/{name}": len(groups),
        f"sample/length_mean/{name}": fmean(sum(branch.num_sampled for branch in r) for r in rollouts),
        f"sample/truncated_fraction/{name}": fmean(any(b.is_truncated for b in r) for r in rollouts),
    }


def _task_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the means of the metrics reported by generators and tasks; all branches of a rollout share
    them.
    """
    names = dict.fromkeys(name for rollout in rollouts for name in rollout[0].metrics)
    return {
        f"task/{name}": fmean(rollout[0].metrics[name] for rollout in rollouts if name in rollout[0].metrics)
        for name in names
    }


def num_turns(rollout: Rollout) -> int:
    """Stretches of sampled tokens: between two turns there is always something that was not sampled."""
    masks = [branch.loss_mask for branch in rollout]
    return sum(int(mask[0]) + int(np.count_nonzero(mask[1:] > mask[:-1])) for mask in masks)


def _kept(trajectory: Trajectory, batch: Batch) -> tuple[int, int | None]:
    """(number of tokens with a loss weight, oldest version among them). A batch that masks nothing keeps its
    oldest token too.
    """
    num, versions = 0, []
    for span in trajectory.version_spans:
        num_in_loss = int(np.count_nonzero(trajectory.loss_mask[span.start : span.end]))
        if num_in_loss and not (batch.mask_older and span.version < batch.min_version):
            num += num_in_loss
            versions.append(span.version)
    return num, min(versions, default=None)
