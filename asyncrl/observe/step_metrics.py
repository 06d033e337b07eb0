"""Metrics of one batch, from the batch itself and nothing else: staleness is measured where it is consumed. Knows no rooms."""

from __future__ import annotations

from statistics import fmean, pstdev

from asyncrl.types import Batch, Trajectory


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Rewards, ages and lengths of the trajectories of one batch, by metric name.

    reward/mean, reward/std            over trajectories (population standard deviation)
    sample/staleness_mean and _max     policy versions between the batch and the oldest token with a loss weight of a
                                       trajectory; trajectories without such a token are left out, and with none at all the keys are
    sample/length_mean                 sampled tokens of a trajectory
    sample/truncated_fraction          trajectories that ran into rollout.max_tokens
    sample/masked_fraction             sampled tokens that get loss weight 0 because of their age
    sample/interrupted_fraction        trajectories that at least one weight swap interrupted
    tokens/sampled, tokens/trained     sampled tokens, and those of them with a loss weight
    """
    trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
    rewards = [trajectory.reward for trajectory in trajectories]
    kept = [_kept(trajectory, batch) for trajectory in trajectories]
    ages = [batch.version - oldest for _, oldest in kept if oldest is not None]
    num_sampled = sum(trajectory.num_sampled for trajectory in trajectories)
    num_trained = sum(num for num, _ in kept)
    metrics = {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "sample/length_mean": num_sampled / len(trajectories),
        "sample/truncated_fraction": fmean(trajectory.is_truncated for trajectory in trajectories),
        "sample/masked_fraction": 1 - num_trained / num_sampled if num_sampled else 0.0,
        "sample/interrupted_fraction": fmean(trajectory.num_interruptions > 0 for trajectory in trajectories),
        "tokens/sampled": num_sampled,
        "tokens/trained": num_trained,
    }
    if ages:
        metrics |= {"sample/staleness_mean": fmean(ages), "sample/staleness_max": max(ages)}
    return metrics


def _kept(trajectory: Trajectory, batch: Batch) -> tuple[int, int | None]:
    """(number of tokens with a loss weight, oldest version among them). A batch that masks nothing keeps its oldest token too."""
    num, versions = 0, []
    for span in trajectory.version_spans:
        num_in_loss = int(trajectory.loss_mask[span.start : span.end].sum())
        if num_in_loss and not (batch.mask_older and span.version < batch.min_version):
            num += num_in_loss
            versions.append(span.version)
    return num, min(versions, default=None)
