"""A person's key, rollouts that are tried, sessions of another engine, and attempts that belong to no
group.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_cases import ScriptedEngine, World, gateway_world
from recorded_cases import SAMPLED_BY, make_branch, make_prompt
from rich.console import Console

from asyncrl.agents.endpoint.work_routes import RolloutQueue
from asyncrl.errors import ConfigError, EngineError, RolloutFailure, RoomError
from asyncrl.messages.records import Rollout
from asyncrl.rollouts.evaluator import Evaluator
from asyncrl.rollouts.recording import RecordedRollout, RecordFile, RolloutRecorder, read_recording
from asyncrl.rollouts.rollout import RolloutAttempt
from asyncrl.run.life import say
from asyncrl.run.serve import open_folder
from asyncrl.run.serve_rollouts import InOrder, PeoplesKey, Tried, result_table, try_rollouts, verdict
from asyncrl.testing.virtual_time import run_virtual

# ---- a person's key


class Desk:
    """A person's key over a real gateway with a scripted engine."""

    def __init__(self, world: World, queue: RolloutQueue, file: RecordFile | None) -> None:
        self.world, self.said, self.broken = world, list[str](), list[RoomError]()
        self.recorder = RolloutRecorder(file, world.engine.tokenizer, warn=self.said.append)
        self.people = PeoplesKey(
            world.gateway,
            queue,
            self.recorder,
            SimpleNamespace(say=self.said.append, on_broken=self.broken.append),
        )
        self.headers = {"Authorization": f"Bearer {self.people.key}"}

    async def ask(self, *texts: str) -> tuple[int, Any]:
        messages = [
            {"role": "user" if number % 2 == 0 else "assistant", "content": text}
            for number, text in enumerate(texts)
        ]
        return await self.world.post({"model": "m", "messages": messages}, headers=self.headers)

    async def outcome(self, **outcome: Any) -> tuple[int, Any]:
        return await self.world.post(
            outcome, path="/v1/outcome", headers={"Authorization": f"Bearer {self.people.outcome_key}"}
        )


def at_desk(story: Any, path: Path | None = None, engine: Any = None, **config: Any) -> list[RecordedRollout]:
    async def live() -> None:
        queue = RolloutQueue(worker_key="k", model="m", lease_timeout_s=60.0, task_seed=lambda work: 0)
        async with gateway_world(engine, extra_routes=queue.routes(), **config) as world:
            desk = Desk(world, queue, None if path is None else RecordFile(path, SAMPLED_BY))
            await story(desk)
            desk.people.close()
            desk.recorder.close()

    asyncio.run(live())
    return [] if path is None else list(read_recording(path).rollouts)


def test_an_outcome_ends_what_was_sampled_so_far_and_the_same_key_goes_on(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        status, answer = await desk.ask("Hi")
        text = answer["choices"][0]["message"]["content"]
        for _ in range(4):  # gateway.max_calls is 2: it is the harnesses' limit
            assert (await desk.ask("Hi", text, "and?"))[0] == status == 200
        status, answer = await desk.world.post({"reward": 1.0}, path="/v1/outcome", headers=desk.headers)
        assert (status, answer["error"]["code"]) == (403, "outcome_refused"), (
            "what an agent inherits sets no reward"
        )
        assert await desk.outcome(reward=0.5, metrics={"good": 1.0}) == (200, {})
        assert (await desk.ask("Hi"))[1]["id"] == "chatcmpl-0"
        assert (await desk.outcome(turn_rewards={"chatcmpl-0": 0.25}))[0] == 200
        await desk.ask("Ho")
        assert desk.said == [
            "rollout 0: reward 0.5, 5 turns, 65 sampled tokens, 4 branches",
            "rollout 1: reward 0.25, 1 turn, 13 sampled tokens",
        ]

    records = at_desk(story, tmp_path / "r.jsonl", max_calls=2)
    assert [record.reward for record in records] == [0.5, 0.25, None]
    assert [record.rollout[0].sample_index for record in records] == [0, 1, 0]
    assert records[0].prompt == records[1].prompt != records[2].prompt
    assert records[0].rollout[0].metrics == {"good": 1.0}
    assert [len(record.rollout) for record in records] == [4, 1, 1]
    assert records[1].rollout[0].credits[0].reward == 0.25


@pytest.mark.parametrize(
    ("limit", "told"),
    [({"max_calls": 1}, "16 calls"), ({"max_rollout_tokens": 20}, "tokens in its branches")],
)
def test_what_a_persons_key_holds_without_an_outcome_is_bounded_and_an_outcome_frees_it(
    limit: dict[str, int], told: str
) -> None:
    async def story(desk: Desk) -> None:
        answers = [await desk.ask(f"Hi {number}") for number in range(17)]
        status, answer = answers[-1]
        assert (answers[0][0], status, answer["error"]["code"]) == (200, 429, "rate_limit_exceeded")
        assert told in answer["error"]["message"]
        assert "Post an outcome to /v1/outcome" in answer["error"]["message"]
        assert (await desk.outcome(reward=1.0))[0] == 200
        assert (await desk.ask("Hi"))[0] == 200

    at_desk(story, **limit)


def test_an_outcome_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        status, answer = await desk.outcome(reward=1.0)
        assert (status, "not one sampled token" in answer["error"]["message"]) == (400, True)
        await desk.ask("Hi")
        status, answer = await desk.outcome(turn_rewards={"chatcmpl-7": 1.0})
        assert (status, "turn_rewards names chatcmpl-7" in answer["error"]["message"]) == (400, True)
        assert (await desk.outcome(rewrad=1.0))[0] == 400
        assert (await desk.outcome(reward=1.0))[0] == 200

    (record,) = at_desk(story, tmp_path / "r.jsonl")
    assert (record.reward, len(record.rollout[0].version_spans)) == (1.0, 2)


def test_a_call_under_way_when_the_outcome_comes_is_in_no_rollout(tmp_path: Path) -> None:
    gate = asyncio.Event()
    engine = ScriptedEngine(gate=gate)

    async def story(desk: Desk) -> None:
        gate.set()
        await desk.ask("Hi")
        gate.clear()
        engine.started.clear()
        async with asyncio.TaskGroup() as tasks:
            cut = tasks.create_task(desk.ask("Ho"))
            await engine.started.wait()
            assert (await desk.outcome(reward=1.0))[0] == 200
        assert cut.result()[0] == 410
        assert "an outcome was posted" in cut.result()[1]["error"]["message"]

    (record,) = at_desk(story, tmp_path / "r.jsonl", engine)
    assert record.prompt.messages == ({"role": "user", "content": "Hi"},)


def test_a_recording_that_cannot_be_written_ends_the_command(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await desk.ask("Hi")
        desk.recorder.close()
        desk.recorder._file._file = Path("/dev/full").open("w")  # type: ignore[union-attr]  # noqa: SIM115, ASYNC230
        status, answer = await desk.outcome(reward=1.0)
        assert (status, "cannot be recorded" in answer["error"]["message"]) == (400, True)
        assert "No space left on device" in str(desk.broken[0])
        with contextlib.suppress(OSError):
            desk.recorder.close()
        desk.recorder._file = None

    at_desk(story, tmp_path / "r.jsonl")


def test_a_directory_of_somebody_else_is_not_served_from(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with (
        pytest.raises(ConfigError, match="holds what no `asyncrl serve` has written"),
        open_folder(tmp_path, "x", None),
    ):  # type: ignore[arg-type]
        pass


def test_nobody_who_reads_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as broken:  # what it still holds is written when it is closed
        monkeypatch.setattr(sys, "stdout", broken)
        say("ready")
        say("serving")


# ---- rollouts that are tried


class Agent:
    """A Generator: a second for each rollout; sample 1 fails at first, sample 2 always."""

    def __init__(self) -> None:
        self.running = self.peak = 0

    async def run_attempt(self, attempt: RolloutAttempt) -> Rollout:
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await asyncio.sleep(1.0)
        finally:
            self.running -= 1
        if attempt.sample_index == 2 or (attempt.sample_index == 1 and attempt.attempt == 0):
            raise RolloutFailure(f"{attempt.rollout_id} went wrong")
        return (
            make_branch(((2, 4), (5, 6)), sample_index=attempt.sample_index, reward=float(attempt.group_id)),
        )


def test_each_prompt_is_tried_as_often_as_a_group_is_large_and_failures_are_told() -> None:
    agent, told = Agent(), list[Tried]()

    async def story() -> list[Tried]:
        async with asyncio.TaskGroup() as tasks:
            return await try_rollouts(
                agent,
                [make_prompt(number) for number in range(2)],
                group_size=3,
                capacity=2,
                timeout_s=None,
                retries=1,
                on_tried=told.append,
                spawn=tasks.create_task,
            )

    all_tried = run_virtual(story())
    assert all_tried == told
    assert agent.peak == 2
    assert {(tried.prompt.prompt_id, tried.sample_index): tried.attempt for tried in told} == {
        (f"0/{number}", index): int(index > 0) for number in range(2) for index in range(3)
    }
    assert told[0].line() == "0/0 sample 0: reward 0, 2 turns, 3 sampled tokens"
    assert "0/1 sample 2 failed 2 times, last: g1/r2 went wrong" in [tried.line() for tried in told]
    assert verdict(told).startswith(
        "mean reward 0.5000 over 4 rollouts; 2 of 6 rollouts failed, the last one: g"
    )
    console = Console(file=io.StringIO(), width=100)
    console.print(result_table([tried.prompt for tried in told if tried.sample_index == 0], told))
    rows = [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert rows[1:] == [
        ["0/0", "2", "1", "0", "0", "0", "2", "3"],
        ["0/1", "2", "1", "1", "1", "1", "2", "3"],
    ]
    nothing = [tried for tried in told if tried.has_failed]
    assert verdict(nothing).startswith("2 of 2 rollouts failed")


def test_what_is_recorded_keeps_the_order_of_the_prompts_whatever_is_done_first() -> None:
    def tried(number: int, index: int) -> Tried:
        return Tried(number, make_prompt(number), index, index, (make_branch(sample_index=index),))

    given = list[tuple[int, int]]()
    recorder = SimpleNamespace(
        record=lambda prompt, reward, rollout: given.append(
            (int(prompt.prompt_id[2:]), rollout[0].sample_index)
        )
    )
    in_order = InOrder(2, recorder)
    for place in ((1, 0), (0, 1)):
        in_order.take(tried(*place))
    assert given == []
    in_order.take(tried(0, 0))
    assert given == [(0, 0), (0, 1), (1, 0)]
    in_order.take(tried(3, 1))
    in_order.take(tried(2, 0))
    in_order.close()
    assert given[3:] == [(2, 0), (3, 1)], "what was never done is passed over at the end"


# ---- sessions of another engine


def test_calls_of_another_route_go_to_its_own_engine_at_its_own_temperature_and_count_for_nobody_else() -> (
    None
):
    async def story() -> None:
        other, broken = ScriptedEngine(lambda _: "other"), list[RoomError]()
        async with gateway_world(on_sampling_override="refuse") as world:
            host = world.gateway.add_route(
                other, temperature=0.0, seed_of=lambda *_: 7, on_broken=broken.append
            )
            session = host.open_nowait(
                "eval-v3/0/1/s0", prompt_id="0/1", sample_index=0, attempt=0, route_key="x"
            )
            before = world.gateway.stats()
            headers = {"Authorization": f"Bearer {session.key}"}
            body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "temperature": 1.0}
            status, answer = await world.post(body, headers=headers)
            assert (status, answer["choices"][0]["message"]["content"]) == (200, "other")
            assert session.last_text() == "other"
            (request,) = other.requests
            assert (request.temperature, request.seed, request.request_id) == (0.0, 7, "eval-v3/0/1/s0/a0/c0")
            assert replace(world.gateway.stats(), connections=0) == before
            assert (await world.ask("Hi"))[1]["choices"][0]["message"]["content"] == "Hello there."
            other.error = EngineError("engine-eval", "gone")
            assert (await world.post(body | {"temperature": 0.5}, headers=headers))[0] == 503
            assert (broken, world.broken) == ([other.error], []), "the run goes on"

    asyncio.run(story())


# ---- attempts of no group


class OneTry:
    """A Generator that takes `seconds`, after it was queued for `queued` seconds with its clock held."""

    def __init__(
        self, seconds: float = 1.0, *, queued: float = 0.0, failure: Exception | None = None, version: int = 7
    ) -> None:
        self.seconds, self.queued, self.failure, self.version = seconds, queued, failure, version
        self.names: list[str] = []

    async def run_attempt(self, attempt: RolloutAttempt) -> Rollout:
        self.names.append(attempt.rollout_id)
        attempt.clock.hold()
        await asyncio.sleep(self.queued)
        attempt.clock.resume()
        await asyncio.sleep(self.seconds)
        if self.failure is not None:
            raise self.failure
        spans = make_branch(
            ((2, 4), (5, 6)),
            version=self.version,
            sample_index=attempt.sample_index,
            is_truncated=True,
            reward=0.5,
        )
        return (
            spans,
            make_branch(
                ((3, 6),), version=self.version, sample_index=attempt.sample_index, branch=1, reward=0.5
            ),
        )


def make_evaluator(agent: OneTry, broken: list[RoomError] | None = None) -> Evaluator:
    prompts = [make_prompt(number) for number in range(3)]
    return Evaluator(agent, prompts, samples=2, slots=2, timeout_s=50.0, broken=broken)


def test_an_evaluation_of_an_agent_takes_its_rewards_and_the_tokens_of_all_its_turns() -> None:
    async def story() -> None:
        agent = OneTry(queued=500.0)  # time in the queue is no time of the attempt
        result = await make_evaluator(agent).evaluate(7)
        assert agent.names == [
            f"eval-v7/{make_prompt(n).prompt_id}/s{sample}" for n in range(3) for sample in range(2)
        ]
        assert {(sample.reward, sample.length, sample.is_truncated) for sample in result.samples} == {
            (0.5, 6, True)
        }
        assert (len(result.samples), result.num_failed) == (6, 0)

        failed = await make_evaluator(OneTry(failure=RolloutFailure("no worker"))).evaluate(7)
        assert (failed.num_failed, "no worker" in failed.last_failure) == (6, True)
        with pytest.raises(
            EngineError, match=r"has tokens of policy_version 7; every token .* at policy_version 8"
        ):
            await make_evaluator(OneTry()).evaluate(8)

    run_virtual(story())


def test_a_harness_that_fails_because_its_engine_broke_is_no_data() -> None:
    async def story() -> None:
        broken: list[RoomError] = []

        class Breaks(OneTry):
            async def run_attempt(self, attempt: RolloutAttempt) -> Rollout:
                broken.append(EngineError("engine-eval", "gone"))
                raise RolloutFailure("503")

        with pytest.raises(EngineError, match="gone"):
            await make_evaluator(Breaks(), broken).evaluate(7)

    run_virtual(story())
