"""The controller's half: how groups are packed, who wakes the publisher, and what its errors say."""

from __future__ import annotations

import asyncio
from dataclasses import astuple, replace
from typing import Any, cast

import numpy as np
import pytest
from pydantic import BaseModel

from asyncrl.errors import TrainerError
from asyncrl.http import Caller, CallLost, CallRefused
from asyncrl.messages.base import ErrorBody
from asyncrl.messages.records import Batch, Group, GroupId, Prompt, Trajectory, VersionSpan
from asyncrl.messages.trainer_calls import Credit, TrainResponse, pack_batch, unpack_batch
from asyncrl.testing.virtual_time import all_blocked, run_virtual
from asyncrl.trainer.trainer_client import TrainerClient, pack_groups, token_versions


def make_trajectory(
    sample_index: int = 0, spans: tuple[VersionSpan, ...] = (VersionSpan(2, 4, 3), VersionSpan(4, 5, 4))
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
    groups = tuple(
        Group(
            GroupId(index),
            Prompt(f"0-{index}", ({"role": "user", "content": "hi"},)),
            (make_trajectory(0), make_trajectory(2)),
        )
        for index in (7, 9)
    )
    return Batch(version=version, groups=groups, min_version=3, mask_older=True)


class FakeTrainer:
    """Answers /train as a worker does: with the version after the batch's, or the failure it was given."""

    url, name = "http://fake", "trainer-0"

    def __init__(self, failure: Exception | None = None, answer_offset: int = 1) -> None:
        self.failure, self.answer_offset = failure, answer_offset

    async def post(
        self, path: str, body: BaseModel | bytes | None, answer: type[Any], *, timeout_s: float | None
    ) -> Any:
        await asyncio.sleep(1.0)
        if self.failure is not None:
            raise self.failure
        assert isinstance(body, bytes)
        return TrainResponse(
            policy_version=unpack_batch(body)[0].version + self.answer_offset, metrics={"policy/loss": 0.25}
        )


def client_of(trainer: FakeTrainer, policy_version: int = 4) -> TrainerClient:
    return TrainerClient(cast(Caller, trainer), policy_version=policy_version)


def test_groups_are_packed_one_after_the_other_with_a_version_a_token() -> None:
    header, arrays = pack_groups(make_types_batch())
    assert (header.version, header.min_version, header.mask_older) == (4, 3, True)
    assert [
        (t.group_index, t.group_id, t.sample_index, t.prompt_id, t.start, t.end, t.reward)
        for t in header.trajectories
    ] == [
        (0, 7, 0, "0-7", 0, 5, 0.5),
        (0, 7, 2, "0-7", 5, 10, 2.5),
        (1, 9, 0, "0-9", 10, 15, 0.5),
        (1, 9, 2, "0-9", 15, 20, 2.5),
    ]
    assert arrays.token_ids.tolist() == [10, 11, 12, 13, 14, 12, 13, 14, 15, 16] * 2
    assert arrays.versions.tolist() == [-1, -1, 3, 3, 4] * 4
    assert arrays.versions.dtype == np.int32
    assert arrays.behaviour_logprobs.dtype == np.float32
    assert (arrays.engines.tolist(), arrays.engines.dtype) == ([-1] * 20, np.int16)


def test_each_token_says_which_engine_sampled_it() -> None:
    moved = make_trajectory(spans=(VersionSpan(2, 3, 3, 0), VersionSpan(3, 4, 3, 1), VersionSpan(4, 5, 4, 1)))
    batch = replace(
        make_types_batch(), groups=(Group(GroupId(7), Prompt("0-7", ()), (moved, make_trajectory(2))),)
    )
    _, arrays = unpack_batch(pack_batch(*pack_groups(batch)))
    assert arrays.engines.tolist() == [-1, -1, 0, 1, 1, *[-1] * 5]
    assert arrays.versions.tolist() == [-1, -1, 3, 3, 4] * 2


def test_branches_and_credits_cross_to_the_worker() -> None:
    main = replace(make_trajectory(0), credits=(Credit(2, 4, 1.0, 0), Credit(4, 5, 0.25, 1)))
    fork = replace(main, branch=1, credits=(Credit(0, 5, 0.25, 1),))
    batch = replace(
        make_types_batch(), groups=(Group(GroupId(7), Prompt("0-7", ()), (main, fork, make_trajectory(2))),)
    )
    header, _ = unpack_batch(pack_batch(*pack_groups(batch)))
    assert [(t.sample_index, t.branch, t.reward) for t in header.trajectories] == [
        (0, 0, 0.5),
        (0, 1, 0.5),
        (2, 0, 2.5),
    ]
    assert [[astuple(credit) for credit in t.credits] for t in header.trajectories] == [
        [(2, 4, 1.0, 0), (4, 5, 0.25, 1)],
        [(0, 5, 0.25, 1)],
        [],
    ]


@pytest.mark.parametrize(
    "spans",
    [
        (VersionSpan(2, 4, 3),),
        (VersionSpan(1, 5, 3),),
        (VersionSpan(2, 5, 3), VersionSpan(4, 5, 4)),
        (VersionSpan(2, 6, 3),),
    ],
)
def test_spans_that_do_not_cover_the_sampled_tokens_exactly_are_refused(
    spans: tuple[VersionSpan, ...],
) -> None:
    with pytest.raises(TrainerError, match="do not cover its 3 sampled tokens"):
        token_versions(make_trajectory(spans=spans))


def test_everybody_who_waits_for_a_version_wakes_when_a_step_brings_it() -> None:
    async def story() -> None:
        client = client_of(FakeTrainer())
        async with asyncio.TaskGroup() as tasks:
            at_once = tasks.create_task(client.wait_version_above(3))
            next_one = [tasks.create_task(client.wait_version_above(4)) for _ in range(2)]
            later = tasks.create_task(client.wait_version_above(5))
            await all_blocked()
            assert at_once.done()
            assert not any(task.done() for task in (*next_one, later))
            report = await client.train(make_types_batch(4))
            assert (report.policy_version, report.metrics) == (5, {"policy/loss": 0.25})
            await all_blocked()
            assert [task.result() for task in next_one] == [5, 5]
            assert not later.done()
            await client.train(make_types_batch(5))
            assert await later == 6

    run_virtual(story())


REFUSED = CallRefused("t", "/train", 409, ErrorBody(error="batch 4 is odd", rule="r", way_out="do this."))
BROKEN = CallRefused("t", "/train", 500, ErrorBody(error="boom"))
LOST = CallLost("t", "/train", "ServerDisconnectedError")


@pytest.mark.parametrize(
    ("failure", "message", "way_out"),
    [
        (REFUSED, "/train was refused (409): batch 4 is odd", "do this."),
        (BROKEN, "/train was refused (500): boom", "log"),
        (LOST, "no answer to /train: ServerDisconnectedError", "log"),
    ],
)
def test_a_refusal_or_a_lost_worker_is_a_trainer_error_with_a_way_out(
    failure: Exception, message: str, way_out: str
) -> None:
    client = client_of(FakeTrainer(failure))
    with pytest.raises(TrainerError) as caught:
        run_virtual(client.train(make_types_batch()))
    assert caught.value.room == "trainer"
    assert message in caught.value.what
    assert way_out in caught.value.way_out
    assert client.policy_version == 4
