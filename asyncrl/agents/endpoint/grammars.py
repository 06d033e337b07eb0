"""Grammars of structured output and forced calls, in llguidance's syntax, and their
checks.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

import regex  # with time limits, because patterns come from clients
from pydantic_core import to_json

from asyncrl.agents.endpoint.requests import (
    ApiError,
    ChatRequest,
    Function,
    Newest,
    invalid,
)
from asyncrl.agents.endpoint.tool_formats import ToolFormat, opens_thought
from asyncrl.messages.token_grammars import GrammarError, UncheckedError, check_grammar
from asyncrl.messages.worker_api import ChatTokenizer

ANY_OBJECT: Mapping[str, object] = {"type": "object"}
_MATCH_S = 0.1
NO_ARGUMENTS: Mapping[str, object] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


def prefill_of(
    asked: ChatRequest, tool_format: ToolFormat, tokenizer: ChatTokenizer
) -> str:
    """Return the beginning of an answer that forces a call; empty if the model may
    think first.
    """
    if not asked.callable_tools:
        return ""
    if tool_format.refusal:
        raise invalid(f"tools are refused: {tool_format.refusal}", "tools")
    if asked.tool_choice.mode == "auto":
        return ""
    prefill = tool_format.prefill(asked.forced_name)
    if prefill is None:
        why = f"tool format {tool_format.name} cannot force it."
        raise invalid(
            f"tool_choice {asked.forced_name or 'required'} is refused: {why}",
            "tool_choice",
        )
    has_grammar = tool_format.around("name") is not None
    return "" if has_grammar and thinks(tool_format, tokenizer) else prefill


def grammar_of(
    asked: ChatRequest,
    tool_format: ToolFormat,
    tokenizer: ChatTokenizer,
    *,
    prefill: str,
    prompt: str,
) -> str | None:
    rules = _Rules(tokenizer, tool_format)
    tools = [tool["function"] for tool in asked.callable_tools]
    if asked.tool_choice.mode == "required":
        call = rules.call(tools, prefill)
        return call and rules.text(call, prompt, has_thought=not prefill)
    if asked.response_format is None:
        return None
    answer = rules.content(asked.response_format)
    if tools:
        call = rules.call(tools)
        if call is None:
            why = (
                f"tool format {tool_format.name} has no grammar to force either of them"
            )
            raise invalid(
                f"response_format with tools is refused: {why}.", "response_format"
            )
        answer = f"{answer} | {call}"
    return rules.text(answer, prompt)


def thinks(tool_format: ToolFormat, tokenizer: ChatTokenizer) -> bool:
    return len(tokenizer.encode(tool_format.thinking[0])) == 1


def _overlapping_pattern(schema: object) -> str | None:
    """Return a pattern that matches a named property. llguidance fails in the middle of
    an answer if no other name remains for the pattern (NoExtensionBias).

    Example: `{"properties": {"a": {}}, "patternProperties": {"^a$": {}}}`.
    """
    if isinstance(schema, list):
        return next(filter(None, map(_overlapping_pattern, schema)), None)
    if not isinstance(schema, dict):
        return None
    patterns = schema.get("patternProperties")
    # The check of the grammar refuses any other value.
    for pattern in patterns if isinstance(patterns, dict) else ():
        try:
            names = [*(schema.get("properties") or ()), *(schema.get("required") or ())]
            if any(regex.search(pattern, name, timeout=_MATCH_S) for name in names):
                return str(pattern)
        except (TypeError, TimeoutError, regex.error):
            return str(pattern)
    return _overlapping_pattern(list(schema.values()))


@dataclass
class _Rules:
    tokenizer: ChatTokenizer
    tool_format: ToolFormat
    rules: list[str] = field(default_factory=list)

    @cached_property
    def _marks(self) -> dict[str, int]:
        """Return the ids of the marks that are special tokens."""
        marks: dict[str, int] = {}
        for mark in self.tool_format.opens:
            first, *others = self.tokenizer.encode(mark)
            if not others and first not in self.tokenizer.text_ids:
                marks[mark] = first
        return marks

    def content(self, response_format: Mapping[str, Any]) -> str:
        whole = {"schema": ANY_OBJECT, "strict": True}
        given = response_format.get("json_schema", whole)
        return self.json(given["schema"], given)

    def json(self, schema: Mapping[str, object], given: Mapping[str, object]) -> str:
        """Return the rule of a schema, followed exactly if it is `strict`."""
        options = (
            {} if given.get("strict") is True else {"x-guidance": {"lenient": True}}
        )
        try:
            text = to_json({**schema, **options}).decode()
        except ValueError:
            raise invalid("A schema is nested too deep.") from None
        if (pattern := _overlapping_pattern(schema)) is not None:
            why = f"patternProperties {pattern!r:.100} matches a name in properties or required"
            raise invalid(f"A schema cannot be followed: {why}. Drop one of them.")
        return self._add("json", f"%json {text}")

    def call(self, tools: Sequence[Function], prefill: str = "") -> str | None:
        """Return the rule of a call of any of the tools, None if the format has no JSON
        arguments.
        """
        calls: list[str] = []
        for tool in tools:
            around = self.tool_format.around(tool["name"])
            if around is None:
                return None
            arguments = self.json(tool.get("parameters") or NO_ARGUMENTS, tool)
            # The prefill is in the prompt. The grammar describes only sampled text.
            head = self.spelled(around[0].removeprefix(prefill))
            calls.append(f"{head} {arguments} {self.spelled(around[1])}")
        return self._add("call", " | ".join(calls))

    def text(self, answer: str, prompt: str, *, has_thought: bool = True) -> str:
        begin, end = self.tool_format.thinking
        start = f"({answer})"
        if opens_thought(prompt, self.tool_format.thinking):
            start = f"{self._until(end)} SPACE {start}"
        elif (
            has_thought
            and thinks(self.tool_format, self.tokenizer)
            and not prompt.rstrip().endswith(end)
        ):
            start = f"({self.spelled(begin)} {self._until(end)} SPACE)? {start}"
        fixed = "TEXT: /(.|\\n)*/\nSPACE: /[ \\t\\r\\n]*/"
        return "\n".join([f"start: {start}", fixed, *self.rules])

    def spelled(self, text: str) -> str:
        pattern = "|".join(map(re.escape, sorted(self._marks, key=len, reverse=True)))
        parts = re.split(f"({pattern})", text) if pattern else [text]
        return " ".join(
            f"<[{self._marks[part]}]>" if part in self._marks else json.dumps(part)
            for part in parts
            if part
        )

    def _until(self, mark: str) -> str:
        # A special token is never part of TEXT, so it ends it. A mark of plain
        # characters needs a lazy rule, which stops at the first one.
        if mark in self._marks:
            return f"TEXT {self.spelled(mark)}"
        return self._add("until", f"TEXT {json.dumps(mark)}", options="[lazy]")

    def _add(self, name: str, body: str, options: str = "") -> str:
        name = f"{name}_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name


NUM_CHECKING = 4
_NUM_KNOWN = 1024


class GrammarChecks:
    """Grammar verdicts by hash.

    Waits: for a process, at most CHECK_TIMEOUT_S.
    """

    def __init__(self) -> None:
        self._known = Newest[bytes, str](_NUM_KNOWN)
        self._checking = asyncio.Semaphore(NUM_CHECKING)

    async def wait_checked(self, text: str, param: str) -> None:
        key = blake2b(text.encode(), digest_size=16).digest()
        if key not in self._known:
            # Two calls may check one grammar at the same time, which costs only time.
            async with self._checking:
                try:
                    await asyncio.to_thread(check_grammar, text)
                    self._known[key] = ""
                except UncheckedError as error:
                    # Not remembered: the client's next try may find a machine with
                    # time.
                    raise ApiError(
                        503, f"{param}: {error}. Try again.", type="server_error"
                    ) from None
                except GrammarError as error:
                    self._known[key] = str(error)
        if why := self._known[key]:
            raise invalid(
                f"{param} is refused: {why}. Make the schema smaller or simpler.", param
            )
