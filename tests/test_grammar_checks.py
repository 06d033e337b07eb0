"""Grammars are checked in a separate process, whose crash stops nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from gateway_cases import HI, gateway_world, in_loop

from asyncrl.agents.endpoint import grammars
from asyncrl.messages import token_grammars
from asyncrl.messages.token_grammars import GrammarError, check_grammar


def chained(number: int) -> dict[str, Any]:
    """Schemas that are each a list of the next one."""
    lists = {
        f"d{at}": {"type": "array", "items": {"$ref": f"#/$defs/d{at + 1}"}}
        for at in range(number)
    }
    return {"$defs": {**lists, f"d{number}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def patterned(number: int) -> dict[str, Any]:
    """A text that many patterns have to fit. What llguidance says of them has twice the
    length for each.
    """
    return {
        "allOf": [
            {"type": "string", "pattern": f".*{at}.*{at + 1}.*"} for at in range(number)
        ]
    }


def lark(schema: dict[str, Any]) -> str:
    return f"start: %json {json.dumps(schema)}"


def test_grammar_that_crashes_its_check_is_refused() -> None:
    check_grammar(lark(chained(50)))
    with pytest.raises(GrammarError, match="too deep"):
        check_grammar(lark(chained(3000)))


def test_check_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_grammars, "CHECK_TIMEOUT_S", 0.5)
    with pytest.raises(GrammarError, match=r"could not be checked in 0.5 s"):
        check_grammar(lark(patterned(300)))


@in_loop
async def test_check_without_time_is_no_refusal_of_the_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": SMALL}}
    body = {"messages": HI, "tools": [tool], "tool_choice": "required"}
    async with gateway_world() as world:
        with monkeypatch.context() as busy:
            busy.setattr(token_grammars, "CHECK_TIMEOUT_S", 0.0)
            status, answer = await world.post(body)
            assert (status, answer["error"]["type"]) == (503, "server_error")
            assert (
                "could not be checked in 0.0 s. Try again."
                in answer["error"]["message"]
            )
        assert (await world.post(body))[0] == 200


def test_check_gets_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run

    def without_key(*args: Any, env: dict[str, str], **options: Any) -> Any:
        assert "sk-1" not in env.values()
        return run(*args, env=env, **options)

    monkeypatch.setenv("SECRET_KEY", "sk-1")
    monkeypatch.setattr(subprocess, "run", without_key)
    check_grammar(lark({"type": "integer"}))


SMALL = {"type": "object", "properties": {"a": {"type": "string"}}}
LARGE = {
    "type": "object",
    "properties": {f"key {at}": {"type": "string"} for at in range(10_000)},
}


@pytest.mark.parametrize(
    ("schema", "why"), [(chained(3000), "too deep"), (LARGE, "bytes")]
)
@in_loop
async def test_hostile_schema_costs_only_its_own_call(
    schema: dict[str, Any], why: str
) -> None:
    def body(schema: dict[str, Any]) -> dict[str, Any]:
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        return {"messages": HI, "tools": [tool], "tool_choice": "required"}

    async with gateway_world() as world:
        status, answer = await world.post(body(schema))
        assert (status, why in answer["error"]["message"]) == (400, True), answer
        assert (await world.post(body({"type": "object"})))[0] == 200


def test_check_is_bounded_in_time_and_memory() -> None:
    limits = "*map(resource.getrlimit, (resource.RLIMIT_CPU, resource.RLIMIT_AS))"
    names = "resource; from asyncrl.messages import token_grammars"
    code = f"import {names}; token_grammars._check = lambda _: print({limits}); token_grammars.main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input="",
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, size = token_grammars.CHECK_CPU_S, token_grammars.MEMORY_BYTES
    assert done.stdout == f"{(seconds, seconds)} {(size, size)}\n"


def test_pattern_that_takes_too_long_is_refused() -> None:
    pattern = "^(a|aa|b?a)+$"
    schema = {"patternProperties": {pattern: {}}, "properties": {"a" * 60 + "!": {}}}
    assert grammars._overlapping_pattern(schema) == pattern
