"""A process that writes a journal until it is killed, or until the disk is full; run by the journal's tests.

    python journal_victim.py PATH [MAX_FILE_BYTES]

Goes on where the journal stands. Prints a line for each answer that says "durable", after the answer: `taken
V` or `flushed G`.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from pathlib import Path

from journal_cases import admit, make_batch, make_group, make_partial, open_journal, rollouts_of

from asyncrl.errors import JournalError
from asyncrl.journal.journal import Journal
from asyncrl.messages.records import GroupId

NUM_BRANCHES = 2
"""Of the last rollout of each group."""


async def live(journal: Journal) -> None:
    """Groups by twos into batches, a few left running, a few failing; what ran before ends first."""
    state = await journal.read_resume(0)
    for record in state.running:
        journal.group_ended_nowait(record.ticket.group_id, "handed_back", "restarted", requeued=1)
    ready = [int(ticket.group_id) for ticket, _ in state.ready]
    group_id, version = int(state.next_group_id), state.next_version
    while True:
        admit(journal, group_id)
        journal.segment_nowait(GroupId(group_id), 0, 0, 0, make_partial(40))
        if group_id % 5 == 3:
            journal.rollout_failed_nowait(GroupId(group_id), 0, 3, "no luck")
            journal.group_ended_nowait(GroupId(group_id), "failed", "no luck")
        elif group_id % 5 != 4:
            for rollout in rollouts_of(make_group(group_id, branches=NUM_BRANCHES)):
                journal.rollout_finished_nowait(GroupId(group_id), rollout)
            journal.group_ended_nowait(GroupId(group_id), "ready", "")
            ready.append(group_id)
        if group_id % 7 == 0:
            await journal.flush()
            print("flushed", group_id, flush=True)
        while len(ready) >= 2:
            await journal.batch_taken(make_batch(version, *ready[:2], branches=NUM_BRANCHES))
            print("taken", version, flush=True)
            journal.trained_nowait(version, {"policy/loss": 0.0})
            ready, version = ready[2:], version + 1
        group_id += 1


async def main() -> None:
    if len(sys.argv) > 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
    journal = open_journal(Path(sys.argv[1]))
    print("open", 0, flush=True)
    try:
        await live(journal)
    except JournalError as error:
        print(f"error {error}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
