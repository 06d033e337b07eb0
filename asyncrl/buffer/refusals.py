"""The sentences of every error that the buffer raises, each in one place."""

from __future__ import annotations

from collections import Counter

from asyncrl.errors import RoomError, TaskError
from asyncrl.types import GroupId

ROOM = "buffer"


def look_ahead_out_of_range(look_ahead: int, max_staleness: int) -> RoomError:
    """More may start than can be trained on in time."""
    return RoomError(
        ROOM,
        f"look_ahead={look_ahead} with max_staleness={max_staleness}",
        rule=f"it lies in 0..{max_staleness}, or a group could start that is too old when its turn comes",
        way_out=f"set buffer.look_ahead to auto or 0..{max_staleness}.",
    )


def served_goes_back(version: int, served: int) -> RoomError:
    """A published version was taken back."""
    return RoomError(
        ROOM,
        f"served version {version} was reported after {served}",
        rule="the oldest version that any engine serves never goes back",
        way_out="report the minimum over all engines, and only when it has grown; read the log of the engine that restarted.",
    )


def version_unknown(what: str, newest: int) -> RoomError:
    """A version came up that no optimizer step has made."""
    return RoomError(
        ROOM,
        f"{what}, but {newest} batches have been taken",
        rule=f"version {newest} is the newest that can exist",
        way_out="read the engine's log: it stamps tokens with a version that was never published.",
    )


def token_too_old(group_id: GroupId, oldest: int, start_version: int) -> RoomError:
    """An engine sampled under weights that it should not have had any more."""
    return RoomError(
        ROOM,
        f"group {group_id} has a token of version {oldest}, its ticket says {start_version}",
        rule="no token of a group may be older than the version that every engine served when the group was admitted",
        way_out=f"read the engines' logs: one of them served version {oldest} after {start_version} had been announced.",
    )


def no_sampled_token(group_id: GroupId, sample_index: int) -> RoomError:
    """A trajectory without a token of its own has no version."""
    return RoomError(
        ROOM,
        f"group {group_id}, sample {sample_index}, has no sampled token",
        rule="every trajectory carries version_spans over its sampled tokens, at least one",
        way_out="count such a rollout as failed in the producer.",
    )


def not_running(group_id: GroupId, *, was_admitted: bool, is_ready: bool) -> RoomError:
    """Somebody speaks of a group that he has no ticket for."""
    state = "is ready already" if is_ready else "was consumed, failed or handed back already" if was_admitted else "was never admitted"
    return RoomError(
        ROOM,
        f"group {group_id} {state}",
        rule="every admitted group is reported exactly once, by finish_nowait or fail_nowait",
        way_out="this is a bug in the producer that reported it.",
    )


def all_filtered(rewards: Counter[float], group_id: GroupId, prompt_id: str) -> TaskError:
    """Nothing that is sampled teaches anything. `rewards`: how many groups had which one; the group is the last of them."""
    common = rewards.most_common(4)
    shown = ", ".join(f"{reward:g} in {count}" for reward, count in common)
    others = rewards.total() - sum(count for _, count in common)
    more = f", another in {others}" if others else ""
    return TaskError(
        ROOM,
        f"{rewards.total()} groups in a row had the same reward for all their rollouts ({shown}{more}; the last was group {group_id}, "
        f"prompt {prompt_id})",
        rule=f"buffer.filter=equal_rewards replaces such groups, and buffer.max_filtered_groups={rewards.total()} in a row end the run",
        way_out="if that is the lowest reward, give easier prompts, pay parts of an answer, raise rollout.group_size or mend the reward "
        "function; if it is the highest, the task is learnt: take fewer trainer.num_steps or harder prompts. "
        "buffer.filter=none trains on such groups too.",
    )


def after_the_last_batch(num_batches: int) -> RoomError:
    """The trainer asks for more than the run has."""
    return RoomError(
        ROOM,
        f"a batch was asked for after all {num_batches} were taken",
        rule="a run takes trainer.num_steps batches, and no group is admitted beyond them",
        way_out="end the training loop after the last batch, or raise trainer.num_steps.",
    )
