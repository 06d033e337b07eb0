"""What a rollout costs to write down, beside a plain file that gets the same bytes and one fsync a batch.

    python benchmarks/journal.py [--seconds 30] [--write]

Batches of 16 groups of 8 rollouts of 320 tokens (64 of prompt) with one segment each, told as producers tell
them: admitted, segments, rollouts finished, group ready, then batch_taken, awaited. Nothing else runs, so the
writer has all the time between two batches for nothing; in a run it writes while the engines sample.
Microseconds a rollout, medians over the batches:

    loop         wall of the event loop inside the journal's calls (the awaited batch_taken left out: that
    waits for the disk) thread       wall of the writer's thread: encoding, SQLite, fsync
    whole        from the first call to the answer of batch_taken
    plain        open().write of the same blobs (encoded beforehand), flush and fsync once a batch: what the
    disk allows encode       the packing of the blobs alone

Then the commits a batch, the longest that the loop was late for a 1 ms timer while the journal wrote, the
bytes, and how long a run with so many groups in its journal takes to read where it stands.

Last line: `ratio: X` = plain over whole. 1 would be as fast as a plain file.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from report import options, reported

from asyncrl.journal.journal import Journal
from asyncrl.journal.tokens import encode_partial, encode_trajectory
from asyncrl.messages.records import (
    Batch,
    Group,
    GroupId,
    PartialCompletion,
    Prompt,
    Ticket,
    Trajectory,
    VersionSpan,
)

NUM_GROUPS, GROUP_SIZE, PROMPT_TOKENS, NUM_TOKENS = 16, 8, 64, 320
ROLLOUTS = NUM_GROUPS * GROUP_SIZE
PARTIAL = PartialCompletion(
    tuple(range(128)),
    tuple(np.linspace(-2, 0, 128, dtype=np.float32).tolist()),
    (VersionSpan(0, 128, 0),),
    num_interruptions=1,
)


def make_batch(version: int, draw: np.random.Generator) -> Batch:
    """Token ids as a model's: mostly small ones; logprobs as a model's: mostly near 0."""
    groups = []
    for group_id in range(version * NUM_GROUPS, (version + 1) * NUM_GROUPS):
        prompt = Prompt(
            f"0/{group_id}",
            ({"role": "user", "content": "What is the sum of all of these numbers? " * 6},),
            answer="42",
        )
        mask = np.arange(NUM_TOKENS) >= PROMPT_TOKENS
        trajectories = tuple(
            Trajectory(
                index,
                np.minimum(draw.zipf(1.3, NUM_TOKENS), 50_000).astype(np.int32),
                mask,
                np.where(mask, -draw.gamma(0.3, size=NUM_TOKENS), 0).astype(np.float32),
                (VersionSpan(PROMPT_TOKENS, NUM_TOKENS, version),),
                reward=float(draw.integers(2)),
            )
            for index in range(GROUP_SIZE)
        )
        groups.append(Group(GroupId(group_id), prompt, trajectories))
    return Batch(version, tuple(groups), version)


async def tell(journal: Journal, batch: Batch) -> tuple[float, float]:
    """(seconds of the loop in the journal's calls, seconds in all) of one batch."""
    started_s = time.perf_counter()
    for group in batch.groups:
        journal.admitted_nowait(Ticket(group.group_id, batch.version), group.prompt)
    for group in batch.groups:
        for trajectory in group.trajectories:
            journal.segment_nowait(group.group_id, trajectory.sample_index, 0, 0, PARTIAL)
        for trajectory in group.trajectories:
            journal.rollout_finished_nowait(group.group_id, (trajectory,))
        journal.group_ended_nowait(group.group_id, "ready", "")
    loop_s = time.perf_counter() - started_s
    await journal.batch_taken(batch)
    return loop_s, time.perf_counter() - started_s


def encode(batch: Batch) -> list[bytes]:
    """All that goes into the journal for a batch, as bytes."""
    blobs = []
    for group in batch.groups:
        blobs.append(json.dumps(group.prompt.messages).encode())
        for trajectory in group.trajectories:
            blobs.append(encode_partial(group.group_id, trajectory.sample_index, PARTIAL))
            blobs.append(encode_trajectory(group.group_id, trajectory))
    return blobs


async def longest_delay_s(is_over: asyncio.Event) -> float:
    """By how much a timer of 1 ms was late at worst, until told to stop."""
    longest_s = 0.0
    while not is_over.is_set():
        started_s = time.perf_counter()
        await asyncio.sleep(0.001)
        longest_s = max(longest_s, time.perf_counter() - started_s - 0.001)
    return longest_s


async def delay_s(journal: Journal, batch: Batch | None) -> float:
    """The longest delay of the loop's timers while a batch is written, or over the same kind of time in which
    nothing is.
    """
    is_over = asyncio.Event()
    watching = asyncio.create_task(longest_delay_s(is_over))
    if batch is None:
        await asyncio.sleep(0.05)
    else:
        await tell(journal, batch)
    is_over.set()
    return await watching


async def measure(folder: Path, seconds: float) -> float:
    """Print the table, return the ratio."""
    journal = Journal.open(folder / "journal.sqlite", run_id="benchmark")
    draw = np.random.default_rng(0)
    rows: dict[str, list[float]] = {name: [] for name in ("loop", "thread", "whole", "plain", "encode")}
    commits: list[int] = []
    busy_delays: list[float] = []
    idle_delays: list[float] = []
    num_blob_bytes, version, until_s = 0, 0, time.perf_counter() + seconds
    with (folder / "plain").open("wb") as plain:
        while version < 10 or time.perf_counter() < until_s:
            batch = make_batch(version, draw)
            await journal.flush()
            num_commits, busy_s = journal.num_commits, journal.busy_s
            loop_s, whole_s = await tell(journal, batch)
            rows["loop"].append(loop_s)
            rows["whole"].append(whole_s)
            rows["thread"].append(journal.busy_s - busy_s)
            commits.append(journal.num_commits - num_commits)
            started_s = time.perf_counter()
            blobs = encode(batch)
            rows["encode"].append(time.perf_counter() - started_s)
            num_blob_bytes += sum(map(len, blobs))
            started_s = time.perf_counter()
            for blob in blobs:
                plain.write(blob)
            plain.flush()
            os.fsync(plain.fileno())
            rows["plain"].append(time.perf_counter() - started_s)
            version += 1
            idle_delays.append(await delay_s(journal, None))
            busy_delays.append(await delay_s(journal, make_batch(version, draw)))
            version += 1
    print(
        f"{len(rows['loop'])} batches of {ROLLOUTS} rollouts\n{'':>8} {'us a rollout':>13} {'ms a batch':>11}"
    )
    for name, found in rows.items():
        print(f"{name:>8} {1e6 * median(found) / ROLLOUTS:>13.1f} {1e3 * median(found):>11.2f}")
    print(f"commits a batch: {median(commits):.0f}; longest {1e3 * journal.longest_commit_s:.0f} ms")
    for name, delays in (("a batch is", busy_delays), ("nothing is", idle_delays)):
        print(
            f"latest timer of the loop while {name} written: {1e3 * median(delays):.1f} ms (median; worst "
            f"{1e3 * max(delays):.1f})"
        )
    raw, blob_bytes = 9 * NUM_TOKENS, num_blob_bytes / len(rows["loop"]) / ROLLOUTS
    print(
        f"bytes a rollout: {raw} as arrays, {blob_bytes:.0f} as blobs (with a segment and its share of the "
        f"prompt), ",
        end="",
    )
    await journal.flush()
    print(f"{(folder / 'journal.sqlite').stat().st_size / (version * ROLLOUTS):.0f} in the file")
    started_s = time.perf_counter()
    state = await journal.read_resume(version - 2)
    print(
        f"resume with {version * NUM_GROUPS} groups: {1e3 * (time.perf_counter() - started_s):.0f} ms, ",
        end="",
    )
    started_s = time.perf_counter()
    num_batches = len([state.load_batch(number) for number in range(version - 2, state.next_version)])
    print(
        f"and {1e3 * (time.perf_counter() - started_s) / num_batches:.0f} ms for each batch that is trained "
        f"again"
    )
    await journal.aclose()
    return median(rows["plain"]) / median(rows["whole"])


def main() -> None:
    """Measure in a temporary folder of the current directory: /tmp may be no disk."""
    arguments = options(__doc__, seconds=30.0).parse_args()
    with reported("journal", is_kept=arguments.write), tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        ratio = asyncio.run(measure(Path(folder), arguments.seconds))
        print(f"\nratio: {ratio:.2f}")


if __name__ == "__main__":
    main()
