"""`asyncrl serve gateway`: user keys, evaluations and worker keys."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest
from gateway_cases import ScriptedEngine, World, gateway_world
from launch_cases import URLS, load
from rollout_cases import virtual

from asyncrl.agents.work_queue import RolloutQueue, WorkerRecord
from asyncrl.base.errors import ComponentError, ConfigError, EngineError
from asyncrl.base.http import WORKER_KEY_ENV
from asyncrl.job import agent_runtime
from asyncrl.job.agent_runtime import GOODBYE_S, AgentRuntime
from asyncrl.job.serve import RolloutRecorder, UserKey, serve_engine
from asyncrl.messages.sampling import SamplingParameters


class Desk:
    """A person's key over a real gateway with a scripted engine."""

    def __init__(self, world: World, queue: RolloutQueue, path: Path) -> None:
        self.world, self.said = world, list[str]()
        self.recorder = RolloutRecorder(world.engine.tokenizer, path)
        log: Any = SimpleNamespace(info=self.said.append)
        self.people = UserKey(world.gateway, queue, self.recorder, log)
        self.headers = {"Authorization": f"Bearer {self.people.key}"}

    async def ask(self, *texts: str) -> tuple[int, Any]:
        roles = ["user", "assistant", "user"]
        messages = [
            {"role": role, "content": text}
            for role, text in zip(roles, texts, strict=False)
        ]
        return await self.world.post(
            {"model": "m", "messages": messages}, headers=self.headers
        )

    async def outcome(self, **outcome: Any) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {self.people.outcome_key}"}
        status, answer = await self.world.post(
            outcome, path="/v1/outcome", headers=headers
        )
        return status, json.dumps(answer)


def at_desk(story: Any, path: Path, **config: Any) -> list[Any]:
    async def live() -> None:
        queue = RolloutQueue(
            worker_key="k", model="m", lease_timeout_s=60.0, task_seed=lambda work: 0
        )
        async with gateway_world(extra_routes=queue.routes(), **config) as world:
            desk = Desk(world, queue, path)
            await story(desk)
            desk.people.close()

    asyncio.run(live())
    return [json.loads(line) for line in path.read_text().splitlines()]


def sampled_in(branch: Any) -> int:
    return sum(branch["loss_mask"])


def test_outcome_ends_a_rollout_and_the_key_stays(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        status, told = await desk.outcome(reward=1.0)
        assert (status, "not one sampled token" in told) == (400, True)
        status, answer = await desk.ask("Hi")
        text = answer["choices"][0]["message"]["content"]
        for _ in range(4):  # gateway.max_calls is 2: it is the harnesses' limit
            assert (await desk.ask("Hi", text, "and?"))[0] == status == 200
        status, answer = await desk.world.post(
            {"reward": 1.0}, path="/v1/outcome", headers=desk.headers
        )
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), (
            "of what an agent inherits"
        )
        status, told = await desk.outcome(turn_rewards={"chatcmpl-7": 1.0})
        assert (status, "chatcmpl-7" in told) == (400, True)
        assert (await desk.outcome(rewrad=1.0))[0] == 400
        assert (await desk.outcome(reward=0.5, metrics={"good": 1.0}))[0] == 200
        assert (await desk.ask("Hi"))[1]["id"] == "chatcmpl-0"
        assert (await desk.outcome(turn_rewards={"chatcmpl-0": 0.25}))[0] == 200
        await desk.ask("Ho")
        assert desk.said == [
            "rollout 0: reward 0.5, 5 turns, 65 sampled tokens, 4 branches",
            "rollout 1: reward 0.25, 1 turn, 13 sampled tokens",
        ]

    records = at_desk(story, tmp_path / "r.jsonl", max_calls=2)
    found = [
        (record["reward"], record["sample_index"], len(record["branches"]))
        for record in records
    ]
    assert found == [(0.5, 0, 4), (0.25, 0, 1), (None, 0, 1)]
    branch = records[1]["branches"][0]
    assert (
        len(branch["token_ids"]) == len(branch["logprobs"]) == len(branch["loss_mask"])
    )
    assert sum(end - start for start, end, _ in branch["version_spans"]) == sampled_in(
        branch
    )


@pytest.mark.asyncio
async def test_evaluation_calls_use_their_own_engine() -> None:
    other, broken = ScriptedEngine(lambda _: "other"), list[ComponentError]()
    async with gateway_world() as world:
        values: Any = {"seed_of": lambda *_: 7, "on_broken": broken.append}
        host = world.gateway.add_route(
            other, sampling=SamplingParameters(temperature=0.0), **values
        )
        session = host.open_nowait(
            "eval", prompt_id="0/1", sample_index=0, attempt=0, route_key="x"
        )
        before = world.gateway.gauges()
        headers = {"Authorization": f"Bearer {session.key}"}
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "Hi"}],
            "temperature": 1.0,
        }
        status, answer = await world.post(body, headers=headers)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "other")
        (request,) = other.requests
        assert (request.temperature, request.seed, request.request_id) == (
            0.0,
            7,
            "eval/a0/c0",
        )
        assert world.gateway.gauges() == before
        assert (await world.ask("Hi"))[1]["choices"][0]["message"][
            "content"
        ] == "Hello there."
        other.error = EngineError("engine-eval", "gone")
        assert (await world.post(body, headers=headers))[0] == 503
        assert (broken, world.broken) == ([other.error], [])


def test_local_worker_key_stays_out_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(**generator: Any) -> str:
        """Return the objects that a start of the run makes, without starting them."""
        task = {"files": ["x.jsonl"], "reward": "math"}
        sections = {"model": {"path": "x"}, "task": task, "generator": generator}
        config, nothing = (
            agent_runtime.RunConfig.model_validate(sections),
            cast("Any", None),
        )
        job: Any = SimpleNamespace(config=config, run_dir=tmp_path, on_broken=print)
        supervision = agent_runtime.Supervision(config.supervision, 1.0, print, print)

        async def made() -> str:
            return agent_runtime.AgentRuntime(
                job, nothing, nothing, supervision
            ).worker_key

        return asyncio.run(made())

    gateway, queue = Mock(bind=lambda: "http://127.0.0.1:1"), Mock()
    monkeypatch.setattr(
        agent_runtime, "make_gateway", lambda *_, **__: (gateway, queue)
    )
    monkeypatch.setenv(WORKER_KEY_ENV, "known-to-others")
    keys = [key(python="my_agent:run") for _ in range(2)]
    assert len({*keys, "known-to-others"}) == 3
    written = tmp_path / "gateway.json"
    assert json.loads(written.read_text()) == {"url": "http://127.0.0.1:1"}
    monkeypatch.delenv(WORKER_KEY_ENV)
    first, again = (key(remote=True) for _ in range(2))
    assert first == again == json.loads(written.read_text())["worker_key"]
    monkeypatch.setenv(WORKER_KEY_ENV, "chosen")
    assert key(remote=True) == "chosen"


@pytest.mark.parametrize(("leaves_s", "waited_s"), [(3.0, 3.0), (99.0, GOODBYE_S)])
@virtual
async def test_finished_run_waits_for_remote_workers(
    leaves_s: float, waited_s: float
) -> None:
    loop = asyncio.get_running_loop()
    queue = RolloutQueue(
        worker_key="", model="", lease_timeout_s=60.0, task_seed=lambda work: 0
    )
    queue._workers["w", "its instance"] = WorkerRecord()
    loop.call_later(leaves_s, queue.worker_gone_nowait, "w", "it left")
    queue.is_over = True
    parts: Any = SimpleNamespace(
        queue=queue, workers=(), gateway=AsyncMock(sessions=Mock())
    )
    await AgentRuntime.aclose(parts)
    assert loop.time() == pytest.approx(waited_s)
    parts.gateway.aclose.assert_awaited_once()


def test_served_engine_of_others_is_refused(tmp_path: Path) -> None:
    """Its key is not this run's, which the command would print."""
    config = load(*URLS)
    with pytest.raises(ConfigError, match="others have started these engines"):
        serve_engine(config, tmp_path / "run", name="engine")
