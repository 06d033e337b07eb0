"""Time slices of trainer and engines: memory, announcements and deaths."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from colocated_cases import (
    MOVE_S,
    NUM_CHUNKS,
    START_S,
    ColocatedServer,
    World,
    make_request,
    play,
    play_to_its_error,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.base.errors import PublishError
from asyncrl.engines.role_client import RoleClient, least_busy

live, fails = partial(play, World), partial(play_to_its_error, World)


def phases(world: World) -> list[str]:
    return [span.text for span in world.spans if span.lane == "handovers"]


def test_step_is_two_handovers_and_then_an_announcement() -> None:
    async def story(world: World) -> None:
        assert world.publisher.status()["state"] == "generating"
        world.spans.clear()
        await world.publisher.to_trainer()
        assert world.worker.held == {"weights", "optimizer"}
        assert not world.announced
        await world.step()
        assert phases(world) == [
            "engines: sleep kv and weights",
            "trainer: onload weights and optimizer",
            "trainer: offload gradients and optimizer",
            "engines: wake weights",
            "publisher: push weights",
            "trainer: offload weights",
            "engines: wake kv",
        ]
        assert world.announced == [1]
        assert world.published == [(1, "w|p0#0")]
        assert [fake.weights for fake in world.fakes] == ["w|p0#0"] * 2
        numbers = world.publisher.gauges()
        assert numbers["perf/to_trainer_s"] == pytest.approx(2 * MOVE_S)
        assert numbers["perf/to_engines_s"] == pytest.approx(
            (4 + 2 * NUM_CHUNKS) * MOVE_S
        )
        assert world.publisher.version == 1
        assert world.publisher.report.publish_s == pytest.approx(
            2 * NUM_CHUNKS * MOVE_S
        )

    live(story)


class Always(dict[str, str]):
    """Refusals that are not used up."""

    def pop(self, key: str, default: Any = None) -> Any:
        return self.get(key, default)


def test_broken_lease_ends_the_run_with_the_reason() -> None:
    async def story(world: World) -> None:
        await world.step()
        world.worker.refuse = Always({"/onload": "CUDA out of memory"})
        asked = world.ask(make_request(max_tokens=4000))
        world.fakes[0].die()
        async with asyncio.timeout(24 * 3600):
            await asked

    error = fails(story)
    assert "engine-0 cannot be restarted: the device lease is broken" in str(error)
    assert "CUDA out of memory" in str(error)


@pytest.mark.parametrize("dies_again", [False, True])
def test_failed_slice_for_a_new_engine_ends_the_run(dies_again: bool) -> None:
    async def story(world: World) -> None:
        await world.step()
        world.worker.refuse["/offload"] = "a bug: once"
        asked = world.ask(make_request(max_tokens=4000))
        world.fakes[1].die()
        if dies_again:
            # its start, then the handover to the trainer
            await asyncio.sleep(START_S + 2.5 * MOVE_S)
            assert world.publisher.lease.phase.startswith("trainer: offload")
            world.fakes[1].die()
        async with asyncio.timeout(600):
            await asked

    error = fails(story)
    assert "cannot be restarted: handing over failed while" in str(error)
    assert "a bug: once" in str(error)


@pytest.mark.parametrize(
    ("after_s", "phase"),
    [(1.5 * MOVE_S, "trainer: onload"), (6.5 * MOVE_S, "publisher: push")],
)
def test_handover_limit_leaves_out_restarts(after_s: float, phase: str) -> None:
    async def story(world: World) -> None:
        async def kill() -> None:
            await asyncio.sleep(after_s)
            assert world.publisher.lease.phase.startswith(phase)
            world.worker.die()

        killing = world.tasks.create_task(kill(), name="killer")
        await world.step()
        await killing
        assert world.announced == [1]
        assert [what for what, _ in world.events] == ["trainer lost", "trainer up"]

    live(story, timeout_s=START_S - 1.0)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            {},
            "engine-1 loaded chunk 0 of policy_version 1 with digest corrupt, the trainer sent c0",
        ),
        ({"version": 5}, "failed in commit of policy_version 1"),
    ],
)
def test_changed_weights_are_never_announced(change: Any, what: str) -> None:
    houses = []

    async def story(world: World) -> None:
        houses.append(world)
        world.fakes[1].corrupt_digest = not change
        world.worker.wrong_chunk = lambda chunk: chunk.model_copy(update=change)
        await world.step()

    error = fails(story)
    assert "'publisher: push weights'" in str(error)
    assert what in str(error)
    assert isinstance(error.__cause__, PublishError)
    assert houses[0].announced == []


Kills = list[tuple[float, int]]


def tokens_of_six_steps(
    kills: Kills, *, stays: bool = False, has_server: bool = False
) -> list[list[tuple[int, ...]]]:
    """Return the tokens of the requests of six steps, each of which is scored; each kill
    follows the previous one after a delay.
    """
    tokens = []

    async def story(world: World) -> None:
        async def kill() -> None:
            for wait_s, number in kills:
                await asyncio.sleep(wait_s)
                [*world.fakes, world.worker, world.scorer][number].die()

        killing = world.tasks.create_task(kill(), name="killer")
        for number in range(6):
            requests = [
                world.ask(make_request(f"s{number}/{index}", seed=index))
                for index in range(4)
            ]
            tokens.append([(await request).token_ids for request in requests])
            if has_server:
                await asyncio.gather(*(world.score() for _ in requests))
            await world.step()
        await killing
        await asyncio.sleep(20 * START_S)
        assert world.announced == [1, 2, 3, 4, 5, 6]
        weights = ["w", *(f"p{index}#0" for index in range(6))]
        assert world.published == [
            (version, "|".join(weights[: version + 1])) for version in range(1, 7)
        ]
        assert world.pool.down == ()
        assert [fake.weights for fake in world.fakes] == [world.published[-1][1]] * 2

    live(story, stays=stays, has_server=has_server)
    return tokens


@pytest.fixture(scope="module")
def undisturbed() -> list[list[tuple[int, ...]]]:
    return tokens_of_six_steps([])


@settings(max_examples=25, deadline=None)
@given(
    kills=st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(0, 3)), max_size=6),
    mode=st.sampled_from(["moves", "stays", "with a server"]),
)
def test_deaths_leave_steps_and_tokens_unchanged(
    undisturbed: Any, kills: Kills, mode: str
) -> None:
    found = tokens_of_six_steps(
        kills, stays=mode == "stays", has_server=mode == "with a server"
    )
    assert found == undisturbed


@pytest.mark.parametrize("dies", ["never", "asleep", "awake"])
def test_server_of_the_trainers_device_works_in_the_engines_slice(dies: str) -> None:
    async def story(world: World) -> None:
        await world.step()
        if dies == "awake":
            world.scorer.die()
        await world.score()
        await world.publisher.to_trainer()
        assert (world.scoring.is_asleep, world.scorer.held) == (True, set())
        early = world.tasks.create_task(world.score(), name="early")
        if dies == "asleep":
            world.scorer.die()
        await asyncio.sleep(4 * START_S)
        assert (world.scorer.num_scored, early.done()) == (1, False)
        assert world.scorer.held == set(), "it starts in the engines' time slice only"
        await world.step()
        await early
        assert world.scorer.num_scored == 2
        lost = [] if dies == "never" else ["reward lost", "reward up"]
        assert [what for what, _ in world.events] == lost

    world = live(story, has_server=True)
    spans = {span.kind for span in world.spans if span.lane == "reward"}
    assert spans == {"sleep", "wake", "score"}
    of_engine = [span for span in world.spans if span.lane == "engine-0"]
    assert {span.kind for span in of_engine} == {"sleep", "wake", "generate"}
    slices = [span for span in of_engine if span.kind == "generate"]
    begun_s = min(span.start_s for span in of_engine if span.kind == "wake")
    assert [span.number for span in slices] == [0, 1]
    assert all(begun_s < span.start_s <= span.end_s for span in slices)


def test_sleep_has_time_for_slow_answers() -> None:
    """An answer takes longer than weight_sync.timeout_s, which limits a move."""

    async def story(world: World) -> None:
        await world.step()
        handle = world.scorer._handle

        async def slow(path: str, body: Any) -> Any:
            if path == "/reward":
                await asyncio.sleep(90.0)
            return await handle(path, body)

        world.scorer._handle = slow  # type: ignore[method-assign]
        scoring = world.tasks.create_task(world.score())
        await asyncio.sleep(0.1)
        await world.step()
        await scoring

    live(story, has_server=True, timeout_s=60.0)


def test_call_goes_to_a_copy_that_sleeps_before_one_that_is_gone() -> None:
    async def story(world: World) -> None:
        asleep, gone = (RoleClient(ColocatedServer()) for _ in range(2))
        await asleep.sleep()
        await gone.sleep()
        gone.disconnect_nowait()
        assert least_busy([gone, asleep]) is asleep
        assert least_busy([asleep, RoleClient(ColocatedServer())]) is not asleep

    live(story)


def test_sleep_waits_for_the_answers_of_sent_calls() -> None:
    async def story(world: World) -> None:
        await world.step()
        calls = [world.tasks.create_task(world.score()) for _ in range(5)]
        await asyncio.sleep(0)
        await world.scoring.sleep()
        assert world.scorer.num_scored == 2, "two had a place, and were sent"
        await world.step()
        await asyncio.gather(*calls)

    live(story, has_server=True)
