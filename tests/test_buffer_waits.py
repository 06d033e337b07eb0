"""Waits, cancellation and filters of the buffer, on the virtual clock."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from buffer_groups import make_buffer, make_group
from rollout_cases import virtual

from asyncrl.base.errors import TaskError
from asyncrl.buffer.buffer import Buffer, rewards_of
from asyncrl.messages.records import Credit
from asyncrl.testing.virtual_time import all_blocked


def admit(buffer: Buffer, count: int) -> list[int]:
    return [buffer.admit_nowait().group_id for _ in range(count)]


def finish(buffer: Buffer, *group_ids: int, version: int = 0) -> None:
    for group_id in group_ids:
        buffer.finish_nowait(make_group(group_id, [version]))


@virtual
async def test_a_cancelled_trainer_takes_no_batch_with_it() -> None:
    buffer = make_buffer(max_staleness=0)
    admit(buffer, 2)
    waiting = asyncio.create_task(buffer.wait_batch(), name="trainer")
    await all_blocked()
    finish(buffer, 0, 1)
    waiting.cancel()  # awake already, not run yet
    await all_blocked()
    assert waiting.cancelled()
    assert (await buffer.wait_batch()).version == 0


@virtual
async def test_a_wait_is_split_by_what_was_waited_for() -> None:
    buffer = make_buffer(max_staleness=1)
    admit(buffer, 4)
    finish(buffer, 0, 1)
    await buffer.wait_batch()
    assert buffer.last_wait.total_s == 0
    finish(buffer, 2)

    async def others() -> None:
        await asyncio.sleep(3)  # batch 1 waits for group 3: generation
        buffer.set_served_nowait(1)
        admit(buffer, 2)
        finish(buffer, 4, version=1)  # now two are ready, but group 3 would be late in batch 2
        await asyncio.sleep(5)
        finish(buffer, 3)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(others(), name="others")
        batch = await buffer.wait_batch()
    assert [group.group_id for group in batch.groups] == [2, 3]
    wait = buffer.last_wait
    assert (wait.generation_s, wait.stragglers_s, wait.publishing_s) == (3, 5, 0)


@pytest.mark.parametrize(("oldest", "newest"), [(0, 1), (1, 2)], ids=["older than its ticket", "too new"])
def test_tokens_that_cannot_be_are_refused_and_change_nothing(oldest: int, newest: int) -> None:
    buffer = make_buffer()
    finish(buffer, *admit(buffer, 4)[:3])
    buffer.take_nowait()
    buffer.set_served_nowait(1)
    (late, _) = admit(buffer, 2)
    with pytest.raises(AssertionError, match="group 4 has a token"):
        buffer.finish_nowait(make_group(late, [oldest, newest]))
    assert (buffer.rule.num_running, buffer.rule.num_ready) == (3, 1)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([(0.5, 0.5), (0.5, 0.5)], {0.5}),
        ([(0.0, 1.0), (0.0, 1.0)], {0.0, 1.0}),  # one turn was better than the other
        ([(0.5, 0.5), (1.0, 1.0)], {0.5, 1.0}),
    ],
)
def test_rewards_of_parts_count_not_their_mean(
    rewards: list[tuple[float, float]], expected: set[float]
) -> None:
    group = make_group(0, *([0, 0] for _ in rewards), rewards=[sum(pair) / 2 for pair in rewards])
    branches = (
        replace(branch, credits=(Credit(2, 3, first, 0), Credit(3, 4, second, 1)))
        for branch, (first, second) in zip(group.trajectories, rewards, strict=True)
    )
    assert rewards_of(replace(group, trajectories=tuple(branches))) == expected


def test_too_many_filtered_groups_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.buffer.buffer.MAX_FILTERED_GROUPS", 3)
    buffer = make_buffer(max_staleness=3, filter="equal_rewards")
    same, other = ([0.25, 0.25], [0.0, 1.0])
    for rewards in (same, same, other, same, same):  # not in a row
        (group_id,) = admit(buffer, 1)
        became = buffer.finish_nowait(make_group(group_id, [0], [0], rewards=rewards))
        assert became == ("filtered" if rewards is same else "ready")
    admit(buffer, 1)
    with pytest.raises(TaskError, match=r"3 groups in a row .*group 5, prompt p5: 0.25(.|\n)*Way out"):
        buffer.finish_nowait(make_group(5, [0], [0], rewards=same))
