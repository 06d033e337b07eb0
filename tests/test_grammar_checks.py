"""Grammars are checked in a process of their own: what stops it stops nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from gateway_cases import HI, gateway_world, in_loop

from asyncrl.messages import grammar_checks
from asyncrl.messages.grammar_checks import GrammarProcess
from asyncrl.messages.token_grammars import MAX_GRAMMAR_BYTES


def chained(number: int) -> dict[str, Any]:
    """Schemas that are each a list of the next one."""
    lists = {f"d{at}": {"type": "array", "items": {"$ref": f"#/$defs/d{at + 1}"}} for at in range(number)}
    return {"$defs": {**lists, f"d{number}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def patterned(number: int) -> dict[str, Any]:
    """A text that many patterns have to fit. What llguidance says of them has twice the length for each."""
    return {"allOf": [{"type": "string", "pattern": f".*{at}.*{at + 1}.*"} for at in range(number)]}


def lark(schema: dict[str, Any]) -> str:
    return f"start: %json {json.dumps(schema)}"


FINE = lark({"type": "integer"})


def test_a_grammar_that_crashes_its_check_is_refused_and_the_next_one_is_checked() -> None:
    process = GrammarProcess()
    for _ in range(2):
        assert process.why_not(FINE) == ""
        assert "too deep" in process.why_not(lark(chained(3000)))
    assert process.why_not(lark(chained(50))) == ""
    process.close()


def test_a_check_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    process = GrammarProcess()
    assert process.why_not(FINE) == ""
    monkeypatch.setattr(grammar_checks, "CHECK_TIMEOUT_S", 0.2)
    assert "could not be checked in 0.2 s" in process.why_not(lark(patterned(300)))
    monkeypatch.undo()
    assert process.why_not(FINE) == ""
    process.close()


def test_the_process_gets_no_keys_and_ends_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "sk-1")
    process = GrammarProcess()
    assert process.why_not(FINE) == ""
    running = process._running
    assert running is not None
    assert b"sk-1" not in Path(f"/proc/{running.pid}/environ").read_bytes()
    del process
    assert running.returncode is not None
    assert not Path(f"/proc/{running.pid}").exists()


def bodies(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    form = {"type": "json_schema", "schema": schema}
    chat_form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool = {"name": "f", "parameters": schema}
    return {
        "chat/completions": {"messages": HI, "response_format": chat_form},
        "responses": {"input": "Hi", "text": {"format": {"name": "x", **form}}},
        "messages": {"messages": HI, "output_config": {"format": form}},
        "chat/completions?tools": {
            "messages": HI,
            "tools": [{"type": "function", "function": tool}],
            "tool_choice": "required",
        },
    }


LARGE = {"type": "object", "properties": {f"key {at}": {"type": "string"} for at in range(10_000)}}


@pytest.mark.parametrize("path", bodies({}))
@pytest.mark.parametrize(("schema", "why"), [(chained(3000), "too deep"), (LARGE, "bytes")])
@in_loop
async def test_a_bomb_costs_its_own_call_at_each_endpoint_and_is_not_kept(
    path: str, schema: dict[str, Any], why: str
) -> None:
    assert len(json.dumps(LARGE)) > MAX_GRAMMAR_BYTES
    async with gateway_world() as world:
        status, answer = await world.post(bodies(schema)[path], path=f"/v1/{path}")
        assert (status, why in answer["error"]["message"]) == (400, True), answer
        known = world.gateway._route.checks._known
        assert sum(map(len, known)) <= 16 * len(known)
        status, answer = await world.post(bodies({"type": "integer"})[path], path=f"/v1/{path}")
        assert status == 200, answer


@in_loop
async def test_a_gateway_that_is_closed_ends_its_process() -> None:
    def running() -> set[int]:
        return {
            child.pid
            for child in psutil.Process().children()
            if "grammar_checks" in " ".join(child.cmdline())
        }

    before = running()
    async with gateway_world() as world:
        assert (await world.ask(response_format={"type": "json_object"}))[0] == 200
        assert len(running() - before) == 1
    assert running() <= before
