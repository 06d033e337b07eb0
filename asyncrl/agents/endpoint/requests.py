"""What a call may ask for: an allow-list of parameters, each checked. Nothing else reaches a template or an
engine. Knows no session.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic_core import from_json

from asyncrl.agents.endpoint.chat_messages import LONG_BODY, TextBudget, check_messages, check_tools
from asyncrl.agents.endpoint.refusals import invalid, shown

log = logging.getLogger(__name__)

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
DEFAULT_TEXT_TOKENS = 16
"""Of /v1/completions, as OpenAI has it. A chat without max_tokens gets the run's."""

_HARMLESS = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "prediction".split()
)
"""Change nothing of what is sampled."""

_NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "frequency_penalty": (
        (0,),
        "a penalty changes the distribution that is sampled from, and training would not know",
    ),
    "presence_penalty": (
        (0,),
        "a penalty changes the distribution that is sampled from, and training would not know",
    ),
    "repetition_penalty": (
        (1,),
        "a penalty changes the distribution that is sampled from, and training would not know",
    ),
    "logit_bias": (
        ({},),
        "a bias changes the distribution that is sampled from, and training would not know",
    ),
    "top_k": ((-1, 0), "it cuts the distribution that is sampled from, and training would not know"),
    "min_p": ((0,), "it cuts the distribution that is sampled from, and training would not know"),
    "top_logprobs": ((0,), "the engines report the logprob of the sampled token alone"),
    "parallel_tool_calls": ((True,), "the model's tool-call format has no way to forbid a second call"),
    "modalities": ((["text"],), "this model writes text"),
    "best_of": ((1,), "every sampled completion is an answer"),
    "echo": ((False,), "prompts are not echoed"),
    "response_format": (
        ({"type": "text"},),
        "the engines sample without a grammar; ask for the form in the prompt, and parse the answer",
    ),
}
"""Parameters that are accepted at the values that mean "off", and why other values are refused."""

_REFUSED: Mapping[str, str] = {
    "functions": "it is deprecated; use tools",
    "function_call": "it is deprecated; use tool_choice",
    "audio": "this model writes text",
    "suffix": "this model completes, it does not fill in",
    "reasoning_effort": "how long this model thinks is its own doing",
    "verbosity": "how much this model writes is its own doing",
    "web_search_options": "there is no web search here",
}

_SHARED = frozenset("model n stop seed max_tokens temperature top_p logprobs stream stream_options".split())
_CHAT = _SHARED | frozenset("messages tools tool_choice max_completion_tokens".split())
_TEXT = _SHARED | {"prompt"}


@dataclass(frozen=True, slots=True)
class CallRules:
    """What the run fixes for every call. Lengths in tokens."""

    model_name: str
    temperature: float
    top_p: float
    max_tokens: int
    max_prompt_tokens: int
    max_length: int
    """Of prompt and completion together, in the engines."""
    vocab_size: int
    max_token_bytes: int
    """Text that one token can hold at most."""
    message_tokens: int = 1
    """Tokens that a message is at least, see fewest_message_tokens()."""
    on_sampling_override: Literal["use_config", "refuse"] = "use_config"


@dataclass(frozen=True, slots=True)
class CallShape:
    """The checked values of one call. Exactly one of `messages`, `prompt_text` and `prompt_ids` is given.

    `tool_choice`: none, auto, required, or `function:NAME`.
    """

    messages: list[dict[str, Any]] | None = None
    prompt_text: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str = "none"
    n: int = 1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    max_tokens: int | None = None
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    is_long: bool = False
    """Its body has LONG_BODY bytes or more."""


def parse_json(body: bytes) -> dict[str, Any]:
    """The body as an object. Depth is bounded and text is Unicode: the parser refuses lone surrogates. Raises
    ApiError.
    """
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"The body is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise invalid(f"The body must be a JSON object, not {shown(value)}.")
    return value


class ShapeReader:
    """Turns bodies into CallShapes by the rules of the run. What is ignored is logged once for each name."""

    def __init__(self, rules: CallRules) -> None:
        self._rules = rules
        self._max_bytes = rules.max_prompt_tokens * rules.max_token_bytes
        self._logged: set[str] = set()

    def chat(self, body: bytes) -> CallShape:
        """A call of /v1/chat/completions. Raises ApiError."""
        given = self._given(parse_json(body), _CHAT)
        budget = TextBudget(self._max_bytes, self._rules.max_prompt_tokens)
        messages = check_messages(
            given.get("messages"), budget, self._rules.max_prompt_tokens, self._rules.message_tokens
        )
        tools = check_tools(given["tools"], budget) or None if "tools" in given else None
        choice = _tool_choice(given.get("tool_choice"), tools)
        asked = [
            _integer(given[name], name, 1, None)
            for name in ("max_completion_tokens", "max_tokens")
            if name in given
        ]
        logprobs = _boolean(given.get("logprobs", False), "logprobs")
        return CallShape(
            messages=messages,
            tools=None if choice == "none" else tools,
            tool_choice=choice,
            max_tokens=min(asked, default=None),
            logprobs=logprobs,
            is_long=len(body) >= LONG_BODY,
            **self._shared(given),
        )

    def text(self, body: bytes) -> CallShape:
        """A call of /v1/completions. Raises ApiError."""
        given = self._given(parse_json(body), _TEXT)
        logprobs = given.get("logprobs")
        if logprobs is not None and (isinstance(logprobs, bool) or logprobs != 0):
            raise invalid(
                f"logprobs={shown(logprobs)} is refused: the engines report the logprob of the sampled token "
                f"alone (0).",
                "logprobs",
            )
        asked = _integer(given.get("max_tokens", DEFAULT_TEXT_TOKENS), "max_tokens", 1, None)
        prompt = self._prompt(given.get("prompt"))
        return CallShape(**prompt, max_tokens=asked, logprobs=logprobs is not None, **self._shared(given))

    def _given(self, body: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
        """The parameters that say something. Raises ApiError for those that are refused or unknown."""
        given = {}
        for name, value in body.items():
            if name in known:
                if value is not None:
                    given[name] = value
            elif name in _NEUTRAL:
                neutral, why = _NEUTRAL[name]
                if value is not None and not any(
                    value == off and isinstance(value, bool) == isinstance(off, bool) for off in neutral
                ):
                    raise invalid(f"{name}={shown(value)} is refused: {why}.", name)
            elif name in _HARMLESS:
                self._log_once(
                    name, f"calls give `{name}`, which is ignored: it changes nothing of what is sampled"
                )
            elif name in _REFUSED:
                if value is not None:
                    raise invalid(f"{name} is refused: {_REFUSED[name]}.", name)
            else:
                raise invalid(f"Unknown parameter: {shown(name)}.", name[:64], code="unknown_parameter")
        return given

    def _shared(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What both endpoints understand."""
        if "model" in given:
            _text(given["model"], "model", 256)
        self._check_sampling(given, "temperature", self._rules.temperature, 0.0, 2.0)
        self._check_sampling(given, "top_p", self._rules.top_p, 0.0, 1.0)
        stream = _boolean(given.get("stream", False), "stream")
        options = given.get("stream_options", {})
        if not isinstance(options, dict):
            raise invalid(f"stream_options must be an object, not {shown(options)}.", "stream_options")
        if options and not stream:
            raise invalid("stream_options is only allowed with stream=true.", "stream_options")
        return {
            "n": _integer(given.get("n", 1), "n", 1, MAX_CHOICES),
            "stop": _stops(given.get("stop", [])),
            "seed": _integer(given["seed"], "seed", -(2**63), 2**63 - 1) if "seed" in given else None,
            "stream": stream,
            "include_usage": _boolean(options.get("include_usage") or False, "stream_options.include_usage"),
        }

    def _check_sampling(
        self, given: Mapping[str, Any], name: str, fixed: float, low: float, high: float
    ) -> None:
        """Another value than the run's is overruled or refused, by gateway.on_sampling_override."""
        value = given.get(name)
        if value is None:
            return
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not low <= value <= high
            or not math.isfinite(value)
        ):
            raise invalid(f"{name} must be a number from {low} to {high}, not {shown(value)}.", name)
        if value == fixed:
            return
        if self._rules.on_sampling_override == "refuse":
            raise invalid(
                f"{name}={value} is refused: training samples at {name}={fixed}. Leave {name} out, or set "
                f"gateway.on_sampling_override to "
                "use_config.",
                name,
            )
        self._log_once(
            name, f"a call asks for {name}={value} and gets the run's {name}={fixed}, as every other one will"
        )

    def _prompt(self, prompt: Any) -> dict[str, Any]:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        budget = TextBudget(self._max_bytes, self._rules.max_prompt_tokens)
        if isinstance(prompt, str) and prompt:
            return {"prompt_text": budget.spend(prompt, "prompt")}
        if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], int):
            raise invalid(
                "prompt must be a text that is not empty, or a list of token ids, one of them in a call.",
                "prompt",
            )
        known = self._rules.vocab_size
        wrong = next((token for token in prompt if type(token) is not int or not 0 <= token < known), None)
        if wrong is not None:
            raise invalid(
                f"prompt holds {shown(wrong)}; the model knows token ids 0 to {known - 1}.", "prompt"
            )
        return {"prompt_ids": tuple(prompt)}

    def _log_once(self, name: str, text: str) -> None:
        if name not in self._logged:
            self._logged.add(name)
            log.warning("gateway: %s", text)


def _tool_choice(value: Any, tools: list[dict[str, Any]] | None) -> str:
    """none, auto, required or function:NAME."""
    if value is None:
        return "auto" if tools else "none"
    if value in ("none", "auto"):
        return str(value) if tools else "none"
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if value != "required" and not isinstance(name, str):
        raise invalid(
            f"tool_choice must be none, auto, required, or name a function, not {shown(value)}.",
            "tool_choice",
        )
    if not tools:
        raise invalid("tool_choice is only allowed when tools are given.", "tool_choice")
    if value == "required":
        return "required"
    if all(tool["function"]["name"] != name for tool in tools):
        raise invalid(f"tool_choice names {shown(name)}, which is not among the tools.", "tool_choice")
    return f"function:{name}"


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise invalid(
            f"stop must be a text or a list of at most {MAX_STOPS} texts, not {shown(value)}.", "stop"
        )
    return tuple(_text(stop, "stop", MAX_STOP_LENGTH) for stop in stops)


def _text(value: Any, param: str, max_length: int) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= max_length:
        raise invalid(f"{param} must be text of 1 to {max_length} characters, not {shown(value)}.", param)
    return value


def _integer(value: Any, param: str, low: int, high: int | None) -> int:
    if type(value) is not int or value < low or (high is not None and value > high):
        bound = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise invalid(f"{param} must be an integer {bound}, not {shown(value)}.", param)
    return value


def _boolean(value: Any, param: str) -> bool:
    if not isinstance(value, bool):
        raise invalid(f"{param} must be true or false, not {shown(value)}.", param)
    return value
