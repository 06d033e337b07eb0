"""Checks of what a call says: chat messages and tools. What passes is small in depth, plain text, and safe
for a template.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic_core import from_json, to_json

from asyncrl.agents.endpoint.refusals import invalid, shown, too_long
from asyncrl.messages.protocols import ChatRenderer

MAX_TOOLS = 128
MAX_DEPTH = 32
"""Levels of a tool's schema, and of a tool call's arguments."""
MAX_NODES = 20_000

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}\Z")
_EMPTY: tuple[Any, ...] = (None, [], {}, "")
_IGNORED: Mapping[str, tuple[str, ...]] = {
    "assistant": ("refusal", "audio", "annotations", "function_call", "parsed")
}
"""Keys that OpenAI's own client writes into a message that it got and sends back."""


class TextBudget:
    """Counts bytes of text, and refuses more than the longest prompt can hold before anything is
    tokenised.
    """

    def __init__(self, max_bytes: int, max_prompt_tokens: int) -> None:
        self._left = self._max_bytes = max_bytes
        self._max_prompt_tokens = max_prompt_tokens

    def spend(self, text: str, param: str) -> str:
        """The text itself."""
        self._left -= len(text) if text.isascii() else len(text.encode())
        if self._left < 0:
            raise too_long(
                f"The text of this call is longer than {self._max_bytes} bytes, and "
                f"{self._max_prompt_tokens} tokens cannot hold more; "
                f"the longest prompt of this run is {self._max_prompt_tokens} tokens "
                f"(rollout.max_prompt_tokens).",
                param,
            )
        return text


def check_messages(
    value: Any, budget: TextBudget, max_prompt_tokens: int, message_tokens: int
) -> list[dict[str, Any]]:
    """The messages, with nothing in them but what a template may see. Raises ApiError; for too many of them
    before any is looked at.
    """
    if not isinstance(value, list) or not value:
        raise invalid(f"messages must be a list with at least one message, not {shown(value)}.", "messages")
    if len(value) * message_tokens > max_prompt_tokens:
        raise too_long(
            f"{len(value)} messages are more than the {max_prompt_tokens} tokens of the longest prompt "
            f"(rollout.max_prompt_tokens) hold: "
            f"with this chat template a message is {message_tokens} at least.",
            "messages",
        )
    return [_check_message(message, f"messages[{index}]", budget) for index, message in enumerate(value)]


def _check_message(message: Any, at: str, budget: TextBudget) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise invalid(f"{at} must be an object, not {shown(message)}.", at)
    role = message.get("role")
    check = _ROLES.get(role) if isinstance(role, str) else None
    if check is None:
        raise invalid(f"{at}.role is {shown(role)}; it must be one of {', '.join(_ROLES)}.", f"{at}.role")
    checked: dict[str, Any] = {"role": role}
    ignored = _IGNORED.get(str(role), ())
    if message.get("name") is not None:
        checked["name"] = budget.spend(_text(message["name"], f"{at}.name"), f"{at}.name")
    known = check(message, checked, at, budget)
    for key, given in message.items():
        if key in ("role", "name") or key in known or given is None or (given in _EMPTY and key in ignored):
            continue
        if key in ignored:
            raise invalid(f"{at}.{shown(key)} is not supported: this model reads and writes text.", at)
        raise invalid(f"{at} has an unknown key {shown(key)}.", at)
    return checked


def _check_plain(
    message: Mapping[str, Any], checked: dict[str, Any], at: str, budget: TextBudget
) -> tuple[str, ...]:
    checked["content"] = _content(message.get("content"), f"{at}.content", budget)
    return ("content",)


def _check_assistant(
    message: Mapping[str, Any], checked: dict[str, Any], at: str, budget: TextBudget
) -> tuple[str, ...]:
    content, calls, reasoning = (
        message.get("content"),
        message.get("tool_calls"),
        message.get("reasoning_content"),
    )
    if content is None and calls in _EMPTY:
        raise invalid(f"{at} has neither content nor tool_calls; an assistant message needs one of them.", at)
    # some templates (SmolLM2, Phi 3) take no message without content; to the others none is the same as empty
    checked["content"] = "" if content is None else _content(content, f"{at}.content", budget)
    if reasoning is not None:
        checked["reasoning_content"] = budget.spend(_text(reasoning, f"{at}.reasoning_content"), at)
    if calls not in _EMPTY:
        if not isinstance(calls, list) or len(calls) > MAX_TOOLS:
            raise invalid(
                f"{at}.tool_calls must be a list of at most {MAX_TOOLS} calls, not {shown(calls)}.",
                f"{at}.tool_calls",
            )
        checked["tool_calls"] = [
            _check_tool_call(call, f"{at}.tool_calls[{index}]", budget) for index, call in enumerate(calls)
        ]
    return "content", "tool_calls", "reasoning_content"


def _check_tool(
    message: Mapping[str, Any], checked: dict[str, Any], at: str, budget: TextBudget
) -> tuple[str, ...]:
    name = message.get("tool_call_id")
    if not isinstance(name, str) or not name:
        raise invalid(
            f"{at} has no tool_call_id; a tool message says which call it answers.", f"{at}.tool_call_id"
        )
    checked["content"] = _content(message.get("content"), f"{at}.content", budget)
    checked["tool_call_id"] = budget.spend(name, f"{at}.tool_call_id")
    return "content", "tool_call_id"


_ROLES: dict[str, Callable[[Mapping[str, Any], dict[str, Any], str, TextBudget], tuple[str, ...]]] = {
    "system": _check_plain,
    "developer": _check_plain,
    "user": _check_plain,
    "assistant": _check_assistant,
    "tool": _check_tool,
}


def _content(content: Any, at: str, budget: TextBudget) -> str:
    """Text, or a list of text parts joined."""
    if isinstance(content, str):
        return budget.spend(content, at)
    if not isinstance(content, list):
        raise invalid(f"{at} must be text or a list of text parts, not {shown(content)}.", at)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise invalid(f"{at}[{index}] is {shown(kind)}; this model reads text parts alone.", at)
        texts.append(budget.spend(_text(part.get("text"), f"{at}[{index}].text"), at))
    return "".join(texts)


def _check_tool_call(call: Any, at: str, budget: TextBudget) -> dict[str, Any]:
    """The call with its arguments as an object, which is how templates read them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise invalid(f"{at} must be an object with an id, the type function, and a function.", at)
    name, arguments = (
        _function_name(function.get("name"), at),
        _text(function.get("arguments"), f"{at}.function.arguments"),
    )
    try:
        parsed = from_json(arguments, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"{at}.function.arguments is not JSON: {error}.", f"{at}.function.arguments") from None
    if not isinstance(parsed, dict):
        raise invalid(
            f"{at}.function.arguments must be a JSON object, not {shown(parsed)}.", f"{at}.function.arguments"
        )
    check_bounded(parsed, f"{at}.function.arguments")
    budget.spend(arguments, at)
    identifier = budget.spend(_text(call.get("id"), f"{at}.id"), f"{at}.id")
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": parsed}}


def check_tools(value: Any, budget: TextBudget) -> list[dict[str, Any]]:
    """The tools as they were given, of functions alone, bounded in depth. Nothing in a schema is followed: it
    is text for the model.
    """
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise invalid(f"tools must be a list of at most {MAX_TOOLS} functions, not {shown(value)}.", "tools")
    for index, tool in enumerate(value):
        at = f"tools[{index}]"
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise invalid(f"{at} must be an object of the type function, with a function.", at)
        _function_name(function.get("name"), at)
        if function.get("description") is not None:
            _text(function["description"], f"{at}.function.description")
        if not isinstance(function.get("parameters", {}), dict):
            raise invalid(
                f"{at}.function.parameters must be a JSON schema, not {shown(function['parameters'])}.", at
            )
    check_bounded(value, "tools")
    budget.spend(to_json(value).decode(), "tools")
    return value


def fewest_message_tokens(renderer: ChatRenderer) -> int:
    """Tokens by which one more empty message makes a chat longer in this template, the least of the kinds
    that it takes; 1 at least.
    """
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    user, answer = {"role": "user", "content": ""}, {"role": "assistant", "content": ""}
    asked, result = (
        [user, {**answer, "tool_calls": [call]}],
        {"role": "tool", "tool_call_id": "c", "content": ""},
    )
    kinds: tuple[tuple[list[Any], list[Any]], ...] = (
        ([user], [answer, user]),
        ([user], [user]),
        ([user, answer], [answer]),
        (asked, [result]),
        ([{"role": "system", "content": ""}], [{"role": "system", "content": ""}]),
        (asked[:1], [asked[1], result]),
    )
    found = []
    for begin, more in kinds:
        try:
            lengths = [len(renderer.encode(renderer.render([*begin, *more * times]))) for times in (2, 6)]
        except ValueError:  # not taken by this template
            continue
        found.append((lengths[1] - lengths[0]) // (4 * len(more)))
    return max(1, min(found, default=1))


def check_bounded(value: Any, at: str) -> None:
    """Raise ApiError if a JSON value is too deep or too large for those who walk it later, or holds a number
    that is none.
    """
    level, nodes = [value], 0
    for _ in range(MAX_DEPTH):
        if not level:
            return
        nodes += len(level)
        if nodes > MAX_NODES:
            raise invalid(f"{at} has more than {MAX_NODES} values.", at)
        below: list[Any] = []
        for entry in level:
            if isinstance(entry, dict):
                below.extend(entry.values())
            elif isinstance(entry, list):
                below.extend(entry)
            elif isinstance(entry, float) and not math.isfinite(entry):
                raise invalid(f"{at} holds a number that is out of range.", at)
        level = below
    if level:
        raise invalid(f"{at} is nested deeper than {MAX_DEPTH} levels.", at)


def _function_name(name: Any, at: str) -> str:
    if not isinstance(name, str) or not _NAME.match(name):
        raise invalid(
            f"{at}.function.name is {shown(name)}; it must be 1 to 64 letters, digits, _, - or dots.",
            f"{at}.function.name",
        )
    return name


def _text(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise invalid(f"{at} must be text, not {shown(value)}.", at)
    return value


# Calls that are long: what they cost is spent in threads, and texts far too long are found without tokenising
# them whole.
#
# Tokenising a megabyte takes about a second, a few thousand tokens take milliseconds; so do a chat of 30,000
# small messages and one of
# hundred. Knows no messages and no template.


Value = TypeVar("Value")

USUAL_CHARACTERS = 6
"""Texts with fewer characters a token than this are tokenised as they are: most of them fit, and the others
are not much too long.
"""

LONG_BODY = 2**14
"""Bytes from which on a body is read, and its chat rendered, in a thread: 500 of the smallest messages, some
10 ms.
"""

LONG_TEXT = 2**14
"""Characters from which on a text is tokenised in a thread: some 15 ms, in which no other call would move."""

_SLICE = 2**14
_CUT_TOKENS = 16
"""More than what a cut in a text can add to its tokens."""


NUM_ENCODING = 4
"""Texts that are tokenised at once: each has a core of its own meanwhile, and memory of many times its
length.
"""


class OneThread:
    """Runs functions of Python alone beside the event loop, one at a time, so that the loop keeps half of the
    interpreter's time.

    Tokenising leaves the interpreter alone: NUM_ENCODING of it run at once.
    Life: made -> run() and encode(), any number of them, first come first served -> close_nowait(): what has
    not begun never will.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="long calls")
        self._encoding = ThreadPoolExecutor(NUM_ENCODING, thread_name_prefix="long texts")

    async def run(self, function: Callable[..., Value], *args: Any) -> Value:
        """What it returns or raises. Cancelled, it goes on to its end, and the next one waits for that."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    async def encode(self, text: str, renderer: ChatRenderer, max_tokens: int | None) -> tuple[int, ...]:
        """encode_bounded(), which for a long text runs in a thread: the loop goes on meanwhile."""
        if len(text) < LONG_TEXT:
            return encode_bounded(text, renderer, max_tokens)
        return await asyncio.get_running_loop().run_in_executor(
            self._encoding, encode_bounded, text, renderer, max_tokens
        )

    def close_nowait(self) -> None:
        """Idempotent."""
        for executor in (self._executor, self._encoding):
            executor.shutdown(wait=False, cancel_futures=True)


class FarTooLong(ValueError):  # noqa: N818  what a call holds, and no failure of ours
    """A text has more tokens than a prompt may have; how many is not known."""


def encode_bounded(text: str, renderer: ChatRenderer, max_tokens: int | None) -> tuple[int, ...]:
    """Token ids of the text. Raises FarTooLong, or ValueError for text that is no Unicode."""
    if max_tokens is not None and is_far_too_long([text], renderer, max_tokens):
        raise FarTooLong("the text of this call is far too long")
    return renderer.encode(text)


def is_far_too_long(texts: Sequence[str], renderer: ChatRenderer, max_tokens: int) -> bool:
    """Whether the texts have more than max_tokens tokens, as far as that can be told by their first ones.

    Never true for texts that fit; not true for every text that does not. Raises ValueError for text that is
    no Unicode.
    """
    if sum(map(len, texts)) <= USUAL_CHARACTERS * max_tokens:
        return False
    num_tokens = 0
    for text in texts:
        for start in range(0, len(text), _SLICE):
            num_tokens += max(0, len(renderer.encode(text[start : start + _SLICE])) - _CUT_TOKENS)
            if num_tokens > max_tokens:
                return True
    return False
