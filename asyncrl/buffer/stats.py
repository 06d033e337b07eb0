"""What the buffer can be asked: one frozen record of counts. All counts are of the whole run so far unless the field says otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.types import GroupId


@dataclass(frozen=True, slots=True)
class BufferStats:
    """Where the groups are, and what the choice of on_overdue cost or saved.

    Right now:
        admitted = consumed + running + ready (what failed, was filtered or handed back does not count); open: groups that may be admitted;
        next_batch, served, look_ahead: the rule's three numbers;
        oldest_running, oldest_running_start_version: the group that has run longest, None if none runs.
    Left over:
        failed: groups failed, last_failure the newest reason; filtered: groups replaced because they teach nothing (buffer.filter),
        filtered_tokens what they had sampled; dropped: handed back as too old (on_overdue=drop),
        dropped_tokens those of them that were ready (what running ones had sampled is not known here);
        all_masked: handed back because no token was young enough (on_overdue=mask).
    Waited, in seconds, by cause (see asyncrl.types.WaitReport); num_straggler_waits: batches that waited for a straggler.
    What another choice would have changed:
        straggler_s is what `mask` and `drop` would have saved at most (they may be held up by generation a moment later).
        waited_groups, waited_tokens (`wait`): groups that finished while the next batch waited for groups of their deadline, and their
        tokens of the versions that `mask` would have had to mask next, had it taken the batch at once. An estimate: waiting for one
        group shifts all that follows. `drop` would have generated these groups again, whole.
        masked_groups, masked_tokens (`mask`): trained on with masked tokens; consumed_tokens: all sampled tokens trained on or masked.
        hurried_batches (`mask`, `drop`): batches taken although something left behind was or became overdue; `wait` would have waited.
    """

    admitted: int
    consumed: int
    running: int
    ready: int
    open: int
    next_batch: int
    served: int
    look_ahead: int
    oldest_running: GroupId | None
    oldest_running_start_version: int | None
    failed: int
    last_failure: str
    filtered: int
    filtered_tokens: int
    dropped: int
    dropped_tokens: int
    all_masked: int
    generation_s: float
    straggler_s: float
    publishing_s: float
    num_straggler_waits: int
    waited_groups: int
    waited_tokens: int
    masked_groups: int
    masked_tokens: int
    consumed_tokens: int
    hurried_batches: int


@dataclass(slots=True)
class Tally:
    """The counters behind BufferStats that the rule does not keep itself."""

    failed: int = 0
    last_failure: str = ""
    filtered: int = 0
    filtered_tokens: int = 0
    dropped: int = 0
    dropped_tokens: int = 0
    all_masked: int = 0
    generation_s: float = 0.0
    straggler_s: float = 0.0
    publishing_s: float = 0.0
    num_straggler_waits: int = 0
    waited_groups: int = 0
    waited_tokens: int = 0
    masked_groups: int = 0
    masked_tokens: int = 0
    consumed_tokens: int = 0
    hurried_batches: int = 0
