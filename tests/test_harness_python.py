"""Python functions as harnesses: input, outcomes, errors and clients."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from typing import Any

import pytest
from gateway_cases import in_loop
from harness_gateway import open_gateway

from asyncrl.agents import Outcome, Session, Task
from asyncrl.agents.harness import AnyTask, as_outcome, build_harness, make_http_client
from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.config import GeneratorConfig

TASK = Task("p0", ({"role": "user", "content": "hi"},), answer="0.25")
SESSION = Session("http://127.0.0.1:9/v1", "key", "policy")


def run(name: str, **args: Any) -> Outcome:
    harness = build_harness(
        GeneratorConfig(python=f"agents_for_test:{name}", args=args)
    )
    return as_outcome(asyncio.run(harness.run(TASK, SESSION)))


def test_task_without_an_answer_says_so() -> None:
    without: Any = AnyTask("p0", TASK.messages)
    for task in (TASK, without):
        assert task == pickle.loads(pickle.dumps(task))
        assert "0.25" not in repr(task)
    assert "answer" not in dataclasses.asdict(without)
    with pytest.raises(
        ConfigError, match=r"task\.answer, which it is not given(.|\n)*give_answer=true"
    ):
        _ = without.answer


@pytest.mark.parametrize("name", ["plain", "agent"])
def test_outcomes_are_taken_and_all_else_fails(name: str) -> None:
    parts = Outcome(None, {"ok": 1.0}, {"chatcmpl-0": 1.0, "chatcmpl-1": 0.0})
    taken = {"nothing": Outcome(), "numpy": Outcome(0.5), "outcome": parts}
    assert {result: run(name, result=result) for result in taken} == taken
    for result, said in (
        ("text", r"'good' \(str\)"),
        ("not finite", "loss Input should be"),
    ):
        with pytest.raises(RolloutFailure, match=said):
            run(name, result=result)


@in_loop
async def test_openai_client_uses_the_session_key_and_shared_connections() -> None:
    client = make_http_client()
    async with open_gateway() as gateway:
        harness = build_harness(
            GeneratorConfig(python="agents_for_test:two_turns", args={"bonus": 0.5})
        )
        for number in range(2):
            session = Session(
                f"{gateway.url}/v1",
                f"key-{number}",
                "policy",
                http_client=lambda: client,
            )
            assert (await harness.run(TASK, session)).reward == 1.5
            assert session.client.timeout is None
    requests = gateway.engine.requests
    assert [each.route_key for each in requests] == ["key-0", "key-0", "key-1", "key-1"]
    assert len(requests[0].prompt_ids) < len(requests[1].prompt_ids), (
        "the second call has the first answer"
    )
    await client.aclose()
