"""Python functions as harnesses: what they are given, what they return and raise, and their client."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import importlib
import pickle
from typing import Any

import pytest
from gateway_cases import in_loop, in_virtual_time
from harness_gateway import open_gateway

from asyncrl.agents import Outcome, Session, Task
from asyncrl.agents.harness import (
    GRACE_S,
    HarnessSpec,
    PythonHarness,
    TaskWithoutAnswer,
    build_harness,
    make_http_client,
)
from asyncrl.errors import ConfigError, RolloutFailure
from asyncrl.user_code import MAX_ABANDONED

TASK = Task("p0", ({"role": "user", "content": "hi"},), answer="0.25")
SESSION = Session("http://127.0.0.1:9/v1", "key", "policy")


def run(name: str, **args: Any) -> Outcome:
    harness = build_harness(HarnessSpec(python=f"harnesses_for_test:{name}", args=args))
    return asyncio.run(harness.run(TASK, SESSION))


def test_a_task_is_a_record_and_an_answer_that_is_not_given_is_missing() -> None:
    without: Any = TaskWithoutAnswer("p0", TASK.messages)
    for task in (TASK, without):
        assert task == copy.deepcopy(task) == pickle.loads(pickle.dumps(task))
        assert "0.25" not in repr(task)
    assert getattr(without, "answer", "no answer") == "no answer"
    assert "answer" not in dataclasses.asdict(without)
    with pytest.raises(ConfigError, match=r"task\.answer, which it is not given(.|\n)*give_answer=true"):
        _ = without.answer


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("plain", Outcome(0.25)),
        ("says_nothing", Outcome()),
        ("numpy_reward", Outcome(0.5)),
        ("judge", Outcome(0.75)),
        ("whole_outcome", Outcome(None, {"ok": 1.0}, {"chatcmpl-0": 1.0, "chatcmpl-1": 0.0})),
    ],
)
def test_a_number_an_outcome_or_nothing_is_taken(name: str, outcome: Outcome) -> None:
    assert run(name) == outcome


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("says_text", "'good' (str): it is a text"),
        ("not_finite", "reward Input should be a finite number"),
        ("metric_not_finite", "metrics.loss Input should be a finite number"),
    ],
)
def test_a_value_that_is_no_outcome_is_a_failure_that_names_it(name: str, said: str) -> None:
    with pytest.raises(RolloutFailure) as failure:
        run(name)
    assert said in str(failure.value)
    assert f"harnesses_for_test:{name}" in str(failure.value)


@in_virtual_time
async def test_a_function_that_swallows_its_cancellation_is_given_up_and_too_many_end_the_worker() -> None:
    harness = PythonHarness("harnesses_for_test:swallows", {})

    async def run_for_10_s() -> None:
        async with asyncio.timeout(10.0):
            await harness.run(TASK, SESSION)

    with pytest.raises(TimeoutError):
        await run_for_10_s()
    assert asyncio.get_running_loop().time() == 10.0 + GRACE_S
    assert harness.num_abandoned == 1
    found = await asyncio.gather(*(run_for_10_s() for _ in range(MAX_ABANDONED - 1)), return_exceptions=True)
    assert {type(error) for error in found} == {TimeoutError}
    with pytest.raises(
        ConfigError, match=rf"{MAX_ABANDONED} calls of generator.python=.*:swallows did not end"
    ):
        await run_for_10_s()


@pytest.mark.parametrize(
    ("spec", "args", "said"),
    [
        ("harnesses_for_test:two_turn", {}, "did you mean two_turns"),
        ("harnesses_for_test:no_session", {}, "cannot be called as"),
        ("harnesses_for_test:two_turns", {"bonuss": 1}, "generator.args"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_any_rollout(
    spec: str, args: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        build_harness(HarnessSpec(python=spec, args=args))
    assert said in str(error.value)


@in_loop
async def test_the_openai_client_of_a_session_calls_with_its_key_and_shares_the_connections() -> None:
    client = make_http_client()
    async with open_gateway() as gateway:
        harness = build_harness(HarnessSpec(python="harnesses_for_test:two_turns", args={"bonus": 0.5}))
        for number in range(2):
            session = Session(f"{gateway.url}/v1", f"key-{number}", "policy", http_client=lambda: client)
            assert await harness.run(TASK, session) == Outcome(1.5, {"turns": 2.0})
            assert session.client is session.client
            assert session.client.timeout is None
    assert [key for key, _ in gateway.calls] == ["key-0", "key-0", "key-1", "key-1"]
    assert [len(body["messages"]) for _, body in gateway.calls] == [1, 3, 1, 3]
    await client.aclose()


def test_without_openai_the_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[harness\]'"):
        _ = Session("http://127.0.0.1:9/v1", "key", "policy").client
