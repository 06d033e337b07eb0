"""The controller's half: how groups are packed, and who wakes the publisher."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_server import FakeTrainerServer

from asyncrl.errors import TrainerError
from asyncrl.messages.calls import pack_batch, unpack_batch
from asyncrl.messages.records import Batch, Credit, Group, GroupId, Prompt, Trajectory, VersionSpan
from asyncrl.testing.virtual_time import all_blocked, run_virtual
from asyncrl.trainer.trainer_client import TrainerClient, pack_groups, sampled_by


def make_trajectory(
    sample_index: int = 0, spans: tuple[VersionSpan, ...] = (VersionSpan(2, 4, 3, 1), VersionSpan(4, 5, 4))
) -> Trajectory:
    return Trajectory(
        sample_index=sample_index,
        token_ids=np.arange(10, 15, dtype=np.int32) + sample_index,
        loss_mask=np.array([False, False, True, True, True]),
        behaviour_logprobs=np.array([0, 0, -1, -2, -3], np.float32),
        version_spans=spans,
        reward=0.5 + sample_index,
    )


def make_types_batch(version: int = 4) -> Batch:
    main = replace(make_trajectory(0), credits=(Credit(2, 4, 1.0, 0), Credit(4, 5, 0.25, 1)))
    fork = replace(main, branch=1, credits=(Credit(0, 5, 0.25, 1),))
    groups = (
        Group(GroupId(7), Prompt("0-7", ()), (main, fork, make_trajectory(2))),
        Group(GroupId(9), Prompt("0-9", ()), (make_trajectory(0),)),
    )
    return Batch(version=version, groups=groups, min_version=3, mask_older=True)


def test_groups_are_packed_one_after_the_other_with_a_version_and_an_engine_a_token() -> None:
    batch = make_types_batch()
    header, arrays = unpack_batch(pack_batch(*pack_groups(batch)))
    assert (header.version, header.min_version, header.mask_older) == (4, 3, True)
    assert [
        (t.group_index, t.group_id, t.sample_index, t.branch, t.prompt_id, t.start, t.end, t.reward)
        for t in header.trajectories
    ] == [
        (0, 7, 0, 0, "0-7", 0, 5, 0.5),
        (0, 7, 0, 1, "0-7", 5, 10, 0.5),
        (0, 7, 2, 0, "0-7", 10, 15, 2.5),
        (1, 9, 0, 0, "0-9", 15, 20, 0.5),
    ]
    rollouts = [trajectory for group in batch.groups for trajectory in group.trajectories]
    assert [tuple(t.credits) for t in header.trajectories] == [rollout.credits for rollout in rollouts]
    assert arrays.token_ids[8:].tolist() == [13, 14, 12, 13, 14, 15, 16, 10, 11, 12, 13, 14]
    assert (arrays.versions.tolist(), arrays.versions.dtype) == ([-1, -1, 3, 3, 4] * 4, np.int32)
    assert (arrays.engines.tolist(), arrays.engines.dtype) == ([-1, -1, 1, 1, -1] * 4, np.int16)
    assert arrays.behaviour_logprobs.dtype == np.float32


@pytest.mark.parametrize("spans", [[(2, 4, 3)], [(1, 5, 3)], [(2, 5, 3), (4, 5, 4)], [(2, 6, 3)]])
def test_spans_that_do_not_cover_the_sampled_tokens_exactly_are_refused(spans: list[Any]) -> None:
    whole, wrong = make_trajectory(), make_trajectory(spans=tuple(VersionSpan(*span) for span in spans))
    masks = [whole.loss_mask, wrong.loss_mask, whole.loss_mask]
    with pytest.raises(TrainerError, match="do not cover its 3 sampled tokens"):
        sampled_by([whole, wrong, whole], np.concatenate(masks))


def test_a_batch_is_packed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[int]()

    def packed(batch: Batch) -> Any:
        threads.append(threading.get_ident())
        return pack_groups(batch)

    monkeypatch.setattr("asyncrl.trainer.trainer_client.pack_groups", packed)
    asyncio.run(TrainerClient(FakeTrainerServer(train_s=0.0)).train(make_types_batch(0)))
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


def test_all_that_wait_for_a_version_wake_when_a_step_brings_it() -> None:
    async def story() -> None:
        client = TrainerClient(FakeTrainerServer())
        async with asyncio.TaskGroup() as tasks:
            next_one = [tasks.create_task(client.wait_version_above(0)) for _ in range(2)]
            later = tasks.create_task(client.wait_version_above(1))
            await all_blocked()
            assert not any(task.done() for task in (*next_one, later))
            assert (await client.train(make_types_batch(0))).policy_version == 1
            await all_blocked()
            assert [task.result() for task in next_one] == [1, 1]
            assert not later.done()
            await client.train(make_types_batch(1))
            assert await later == 2

    run_virtual(story())
