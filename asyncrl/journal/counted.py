"""What a journal says that a run has generated and given up: counters of a run that goes on begin with it. Reads alone; knows no loop."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

_SUMS = """
SELECT total(sampled + lost_tokens), total(failed), total(state = 'filtered'), total(iif(state = 'filtered', sampled, 0)),
    total(state = 'handed_back' AND reason IN ('dropped', 'all_masked')), total(state = 'failed'),
    total(state IN ('handed_back', 'failed') AND requeued IS NULL)
FROM (SELECT state, reason, requeued, lost_tokens,
    coalesce(num_sampled, (SELECT sum(num_sampled) FROM trajectories t WHERE t.group_id = g.group_id), 0)
        + coalesce((SELECT sum(num_tokens) FROM segments s WHERE s.group_id = g.group_id), 0) AS sampled,
    coalesce(num_failed, (SELECT count(*) FROM failures f WHERE f.group_id = g.group_id)) AS failed
    FROM groups g WHERE group_id > ? AND group_id <= ?)
"""
_ALL = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Counted:
    """`generated`: tokens that the journal was told of; `failed`: rollouts; `filtered`, with their tokens, and the rest: groups.

    `dropped`: handed back by the staleness rule while the run went on, for one of its two reasons; what a resume hands back has others.
    `given_up`: those of `dropped` and `failed_groups` whose prompt does not come again.
    """

    generated: int = 0
    failed: int = 0
    filtered: int = 0
    filtered_tokens: int = 0
    dropped: int = 0
    failed_groups: int = 0
    given_up: int = 0


def read_counted(connection: sqlite3.Connection, start: int, stop: int) -> tuple[Counted, ...]:
    """After each of the batches start .. stop - 1, and last of all the groups there are. Raises sqlite3.Error.

    After a batch: of the groups up to the newest that any batch so far has taken. On-policy that is exact, for no later group had begun.
    """
    newest = dict(
        connection.execute(
            "SELECT version, max(max(group_id)) OVER (ORDER BY version) FROM batch_groups WHERE version < ? GROUP BY version", (stop,)
        )
    )
    found, sums, below = list[Counted](), [0] * 7, -1
    for last in (*(newest[version] for version in range(start, stop)), _ALL):
        row = connection.execute(_SUMS, (below, last)).fetchone()
        sums, below = [before + int(value) for before, value in zip(sums, row, strict=True)], last
        found.append(Counted(*sums))
    return tuple(found)
