"""What a call may ask for: allow-lists of parameters, each checked. Nothing else reaches a template or
engine.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, FailFast, Field, ValidationError
from pydantic_core import from_json

from asyncrl.agents.endpoint.chat_messages import OPEN, ROLES, STRICT, ChatMessage, Tools
from asyncrl.agents.endpoint.refusals import ApiError, invalid, shown, too_long

log = logging.getLogger(__name__)

LONG_BODY = 2**14
"""Bytes from which on a body is read, and its chat rendered, in a thread: 500 of the smallest messages, 10
ms.
"""
MAX_CHOICES = 16
MAX_STOPS = 16

_HARMLESS = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "prediction".split()
)
"""Change nothing of what is sampled."""

_CHANGES = "it changes the distribution that is sampled from, and training would not know"
_TEXT_ONLY = "this model reads and writes text"
_OFF: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "frequency_penalty": ((0,), _CHANGES),
    "presence_penalty": ((0,), _CHANGES),
    "repetition_penalty": ((1,), _CHANGES),
    "logit_bias": (({},), _CHANGES),
    "top_k": ((-1, 0), _CHANGES),
    "min_p": ((0,), _CHANGES),
    "top_logprobs": ((0,), "the engines report the logprob of the sampled token alone"),
    "parallel_tool_calls": ((True,), "the model's tool-call format has no way to forbid a second call"),
    "modalities": ((["text"],), _TEXT_ONLY),
    "best_of": ((1,), "every sampled completion is an answer"),
    "echo": ((False,), "prompts are not echoed"),
    "response_format": (
        ({"type": "text"},),
        "the engines sample without a grammar; ask for the form in the prompt, and parse the answer",
    ),
    "functions": ((), "it is deprecated; use tools"),
    "function_call": ((), "it is deprecated; use tool_choice"),
    "audio": ((), _TEXT_ONLY),
    "suffix": ((), "this model completes, it does not fill in"),
    "reasoning_effort": ((), "how long this model thinks is its own doing"),
    "verbosity": ((), "how much this model writes is its own doing"),
    "web_search_options": ((), "there is no web search here"),
}
"""Parameters, the values of them that mean "off", and why others are refused."""


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
    message_tokens: int = 1
    """Tokens that a message has at least, see fewest_message_tokens()."""
    on_sampling_override: Literal["use_config", "refuse"] = "use_config"


@dataclass(frozen=True, slots=True)
class CallRequest:
    """What one call asks for, whichever endpoint it came by. One of `messages`, `prompt_text` and
    `prompt_ids` is given. `tool_choice`: none, auto, required, or `function:NAME`.
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

    @property
    def param(self) -> str:
        """The parameter that holds the prompt."""
        return "prompt" if self.messages is None else "messages"


Stop = Annotated[str, Field(min_length=1, max_length=1024)]


class _StreamOptions(BaseModel):
    model_config = OPEN
    include_usage: bool | None = None


class _Body(BaseModel):
    model_config = STRICT

    model: Annotated[str, Field(min_length=1, max_length=256)] = "policy"
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Annotated[
        list[Stop],
        Field(max_length=MAX_STOPS),
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    ] = []
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None


class _ChatBody(_Body):
    messages: Annotated[list[ChatMessage], Field(min_length=1), FailFast()]
    tools: Tools = []
    tool_choice: Any = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False


class _TextBody(_Body):
    prompt: Any
    max_tokens: Annotated[int, Field(ge=1)] | None = 16  # without it, as OpenAI has it
    logprobs: Literal[0] | None = None


Body = TypeVar("Body", bound=_Body)


def parse_json(body: bytes) -> dict[str, Any]:
    """The body as an object. The parser bounds its depth and refuses lone surrogates. Raises ApiError."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"The body is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise invalid(f"The body must be a JSON object, not {shown(value)}.")
    return value


class RequestReader:
    """Turns bodies into CallRequests. What is ignored is logged once for each name."""

    def __init__(self, rules: CallRules) -> None:
        self._rules = rules
        self._logged: set[str] = set()

    def chat(self, body: bytes) -> CallRequest:
        """A call of /v1/chat/completions. Raises ApiError; for too many messages before any is looked at."""
        given, rules = parse_json(body), self._rules
        messages = given.get("messages")
        if isinstance(messages, list) and len(messages) * rules.message_tokens > rules.max_prompt_tokens:
            raise too_long(
                f"{len(messages)} messages are more than the {rules.max_prompt_tokens} tokens of the longest "
                f"prompt (rollout.max_prompt_tokens) hold: with this chat template a message is "
                f"{rules.message_tokens} at least.",
                "messages",
            )
        asked = self._checked(given, _ChatBody)
        choice = _tool_choice(asked.tool_choice, asked.tools)
        limits = [each for each in (asked.max_completion_tokens, asked.max_tokens) if each is not None]
        return self._request(
            asked,
            messages=asked.messages,
            tools=None if choice == "none" else asked.tools,
            tool_choice=choice,
            max_tokens=min(limits, default=None),
            logprobs=asked.logprobs,
            is_long=len(body) >= LONG_BODY,
        )

    def text(self, body: bytes) -> CallRequest:
        """A call of /v1/completions. Raises ApiError."""
        asked = self._checked(parse_json(body), _TextBody)
        prompt = asked.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        more: dict[str, Any] = {"max_tokens": asked.max_tokens, "logprobs": asked.logprobs is not None}
        if isinstance(prompt, str) and prompt:
            return self._request(asked, prompt_text=prompt, **more)
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
        return self._request(asked, prompt_ids=tuple(prompt), **more)

    def _checked(self, body: Mapping[str, Any], shape: type[Body]) -> Body:
        """The parameters that say something, as `shape` has them. Raises ApiError."""
        given = {}
        for name, value in body.items():
            if value is None:
                continue
            if name in _OFF:
                off, why = _OFF[name]
                if not any(
                    value == each and isinstance(value, bool) == isinstance(each, bool) for each in off
                ):
                    raise invalid(f"{name}={shown(value)} is refused: {why}.", name)
            elif name in _HARMLESS:
                self._log_once(
                    name, f"calls give `{name}`, which is ignored: it changes nothing of what is sampled"
                )
            else:
                given[name] = value
        try:
            asked = shape.model_validate(given)
        except ValidationError as error:
            raise _refused(error) from None
        if asked.stream_options is not None and not asked.stream:
            raise invalid("stream_options is only allowed with stream=true.", "stream_options")
        self._check_sampling("temperature", asked.temperature, self._rules.temperature)
        self._check_sampling("top_p", asked.top_p, self._rules.top_p)
        return asked

    def _request(self, asked: _Body, **more: Any) -> CallRequest:
        options = asked.stream_options
        return CallRequest(
            n=asked.n,
            stop=tuple(asked.stop),
            seed=asked.seed,
            stream=asked.stream,
            include_usage=bool(options is not None and options.include_usage),
            **more,
        )

    def _check_sampling(self, name: str, value: float | None, fixed: float) -> None:
        """Another value than the run's is overruled or refused, by gateway.on_sampling_override."""
        if value is None or value == fixed:
            return
        if self._rules.on_sampling_override == "refuse":
            raise invalid(
                f"{name}={value} is refused: training samples at {name}={fixed}. Leave {name} out, or set "
                f"gateway.on_sampling_override to use_config.",
                name,
            )
        self._log_once(
            name, f"a call asks for {name}={value} and gets the run's {name}={fixed}, as every other one will"
        )

    def _log_once(self, name: str, text: str) -> None:
        if name not in self._logged:
            self._logged.add(name)
            log.warning("gateway: %s", text)


def _refused(error: ValidationError) -> ApiError:
    """The first thing that is wrong, where it stands in the body, and what stands there."""
    first = error.errors(include_url=False)[0]
    loc = [part for part in first["loc"] if part not in ROLES]  # pydantic names the kind of a message, too
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")[:200]
    if first["type"] == "extra_forbidden":
        if len(loc) == 1:
            return invalid(f"Unknown parameter: {shown(loc[0])}.", param[:64], code="unknown_parameter")
        return invalid(f"{param} is not known: no message of this role has such a key.", param)
    given = "" if first["type"] in ("missing", "wrong") else f", not {shown(first['input'])}"
    return invalid(f"{param}: {first['msg']}{given}.", param)


def _tool_choice(value: Any, tools: list[Any]) -> str:
    """none, auto, required or function:NAME. Raises ApiError."""
    if value in (None, "none", "auto"):
        return str(value or "auto") if tools else "none"
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
