"""A rank that dies makes the first one refuse what it cannot do alone: that is a loss, and no refusal."""

from __future__ import annotations

import asyncio

import pytest
from test_trainer_supervision import START_S, TRAIN_S, House, fails, live

from asyncrl.errors import TrainerError, TrainerLost

BROKEN = "RuntimeError: Read error: Connection reset by peer"


@pytest.mark.parametrize("after_s", [0.0, 0.5])
def test_a_step_that_is_refused_as_another_rank_dies_is_taken_again_by_new_ranks(after_s: float) -> None:
    async def story(house: House) -> None:
        await house.steps(2)
        house.server.refuse["/train"] = BROKEN
        asyncio.get_running_loop().call_later(after_s, house.server.peers[0].die)
        await house.steps(2)
        house.check()

    assert live(story, num_ranks=2).trainer.num_restarts == 1


def test_a_rank_that_dies_while_batches_are_trained_again_costs_another_restart() -> None:
    async def story(house: House) -> None:
        await house.steps(2)
        house.server.die()
        going = house.go(1)
        await asyncio.sleep(
            house.trainer.config.backoff_s + START_S + TRAIN_S / 2
        )  # new ranks are at the first batch again
        assert house.trainer.num_restarts == 1
        house.server.refuse["/train"] = BROKEN
        asyncio.get_running_loop().call_later(TRAIN_S, house.server.peers[0].die)
        await going
        house.check()

    assert live(story, num_ranks=2).trainer.num_restarts == 2


def test_a_refusal_of_ranks_that_live_ends_the_run_without_a_restart() -> None:
    async def story(house: House) -> None:
        await house.steps(2)
        house.server.refuse["/train"] = "batch 2 gave loss nan"
        await house.steps(1)

    error = fails(story, num_ranks=2)
    assert isinstance(error, TrainerError)
    assert not isinstance(error, TrainerLost)
    assert "loss nan" in str(error)
