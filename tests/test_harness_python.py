"""Python functions as harnesses: what they return and raise, and the client that they are given."""

from __future__ import annotations

import asyncio
import builtins
from typing import Any

import pytest
from gateway_cases import in_loop, in_virtual_time
from harness_gateway import open_gateway

from asyncrl.agents import Outcome, Session, Task
from asyncrl.agents.harness import GRACE_S, HarnessSpec, HttpClients, build_harness
from asyncrl.agents.python import PythonHarness
from asyncrl.errors import ConfigError, RolloutFailure
from asyncrl.user_code import MAX_ABANDONED

TASK = Task("p0", ({"role": "user", "content": "hi"},), answer="0.25")


def run(name: str, session: Session | None = None, **args: Any) -> Outcome:
    harness = build_harness(HarnessSpec(python=f"harnesses_for_test:{name}", args=args))
    return asyncio.run(harness.run(TASK, session or Session("http://127.0.0.1:9/v1", "key", "policy")))


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
        ("says_text", "reward is 'good' (str)"),
        ("not_finite", "reward is nan, which is not finite"),
        ("metric_not_finite", "metrics[loss] is inf, which is not finite"),
    ],
)
def test_a_value_that_is_no_outcome_is_a_failure_that_names_it(name: str, said: str) -> None:
    with pytest.raises(RolloutFailure) as failure:
        run(name)
    assert said in str(failure.value)
    assert f"harnesses_for_test:{name}" in str(failure.value)


def test_what_a_function_raises_passes_also_out_of_its_thread() -> None:
    with pytest.raises(ZeroDivisionError):
        run("raises")
    with pytest.raises(RuntimeError, match="StopIteration: no more"):
        run("raises_in_thread")
    with pytest.raises(RuntimeError, match=r"sys\.exit\(3\)"):
        run("exits")


@in_virtual_time
async def test_a_function_that_swallows_its_cancellation_is_given_up_and_too_many_end_the_worker() -> None:
    harness = PythonHarness("harnesses_for_test:swallows", {})
    session = Session("http://127.0.0.1:9/v1", "key", "policy")

    async def run_for_10_s() -> None:
        async with asyncio.timeout(10.0):
            await harness.run(TASK, session)

    with pytest.raises(TimeoutError):
        await run_for_10_s()
    assert asyncio.get_running_loop().time() == 10.0 + GRACE_S
    assert harness.num_abandoned == 1
    found = await asyncio.gather(*(run_for_10_s() for _ in range(MAX_ABANDONED - 1)), return_exceptions=True)
    assert {type(error) for error in found} == {TimeoutError}
    with pytest.raises(
        ConfigError,
        match=rf"{MAX_ABANDONED} calls of generator.python=harnesses_for_test:swallows did not end",
    ):
        await run_for_10_s()


@pytest.mark.parametrize(
    ("spec", "args", "said"),
    [
        ("harnesses_for_test:two_turn", {}, "did you mean two_turns"),
        ("no_such_module_here:f", {}, "there is no module no_such_module_here"),
        ("harnesses_for_test", {}, "is not module:name"),
        ("harnesses_for_test:no_session", {}, "cannot be called as"),
        ("harnesses_for_test:two_turns", {"bonuss": 1}, "generator.args"),
        ("harnesses_for_test:TASK_WORDS", {}, "has no TASK_WORDS"),
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
    clients = HttpClients()
    async with open_gateway() as gateway:
        harness = build_harness(HarnessSpec(python="harnesses_for_test:two_turns", args={"bonus": 0.5}))
        for number in range(2):
            session = Session(f"{gateway.url}/v1", f"key-{number}", "policy", http_client=clients.get)
            assert await harness.run(TASK, session) == Outcome(1.5, {"turns": 2.0})
            assert session.client is session.client
            assert session.client.timeout is None
    assert [key for key, _ in gateway.calls] == ["key-0", "key-0", "key-1", "key-1"]
    assert [len(body["messages"]) for _, body in gateway.calls] == [1, 3, 1, 3]
    await clients.aclose()
    await clients.aclose()


def test_without_openai_the_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "openai":
            raise ModuleNotFoundError("No module named 'openai'", name="openai")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[harness\]'"):
        _ = Session("http://127.0.0.1:9/v1", "key", "policy").client


def test_a_spec_names_one_harness() -> None:
    for given in ({}, {"python": "a:b", "command": ["c"]}):
        with pytest.raises(ValueError, match="give one of python, command, verifiers"):
            HarnessSpec(**given)
