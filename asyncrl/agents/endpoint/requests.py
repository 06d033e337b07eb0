"""What a call may ask for: allow-lists of parameters, each checked. Nothing else reaches a template or
engine.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError
from pydantic_core import PydanticCustomError, from_json
from typing_extensions import TypedDict

from asyncrl.agents.endpoint.answers import ApiError, invalid, shown, too_long
from asyncrl.agents.endpoint.tool_calls import MAX_TOOLS

log = logging.getLogger(__name__)

MAX_CHOICES = 16
MAX_STOPS = 16
ROLES = ("system", "developer", "user", "assistant", "tool")

_IGNORED = (
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prediction"
)
IGNORED = frozenset(_IGNORED.split())
"""Change nothing of what is sampled."""

_CHANGES = "it changes the distribution that is sampled from, and training would not know"
_TEXT_ONLY = "this model reads and writes text"
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
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
    "response_format": (({"type": "text"},), "the engines have no grammar; ask for it in the prompt"),
    "functions": ((), "it is deprecated; use tools"),
    "function_call": ((), "it is deprecated; use tool_choice"),
    "audio": ((), _TEXT_ONLY),
    "suffix": ((), "this model completes, it does not fill in"),
    "reasoning_effort": ((), "the engines cannot control how long this model thinks"),
    "verbosity": ((), "the engines cannot control how much this model writes"),
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
    on_sampling_override: Literal["use_config", "refuse"] = "use_config"


# ---- chat messages and tools, as a call sends them and as a chat template reads them


def _wrong(why: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{why}", {"why": why})


def _joined(content: Any) -> Any:
    """Text, or the text of a list of text parts."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise _wrong(f"a part is {shown(kind)}; this model reads text parts alone")
    return "".join(part["text"] for part in content)


def _parsed(arguments: Any) -> Any:
    """Arguments as an object, which is how templates read them."""
    try:
        return from_json(arguments, allow_inf_nan=False)
    except (ValueError, TypeError) as error:
        raise _wrong(f"arguments must be the text of a JSON object: {error}") from None


Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}\z")]
Content = Annotated[str, BeforeValidator(_joined)]
STRICT = ConfigDict(strict=True, extra="forbid")
OPEN = ConfigDict(strict=True, extra="ignore")


class _CalledFunction(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    name: Name
    arguments: Annotated[dict[str, Any], BeforeValidator(_parsed)]


class _SentCall(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    id: str
    type: NotRequired[Literal["function"]]
    function: _CalledFunction


class _Message(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    name: NotRequired[str]
    content: Content


class _Plain(_Message):
    role: Literal["system", "developer", "user"]


class _Assistant(_Message):
    role: Literal["assistant"]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[Annotated[list[_SentCall], Field(max_length=MAX_TOOLS)]]


class _ToolResult(_Message):
    role: Literal["tool"]
    tool_call_id: Annotated[str, Field(min_length=1)]


_EMPTY = ("refusal", "audio", "annotations", "function_call", "parsed", "tool_calls")
"""Keys that OpenAI's own client writes into an answer that it sends back, where they say nothing."""


def _tidy(message: Any) -> Any:
    """Without keys that say nothing. An answer of calls alone has empty content: some templates (SmolLM2,
    Phi 3) take no message without it.
    """
    if not isinstance(message, dict):
        return message
    said = {key: value for key, value in message.items() if value or not (value is None or key in _EMPTY)}
    return {"content": "", **said} if said.get("role") == "assistant" else said


ChatMessage = Annotated[
    _Plain | _Assistant | _ToolResult, Field(discriminator="role"), BeforeValidator(_tidy)
]


class _Described(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    name: Name
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any]]


class _GivenTool(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    type: Literal["function"]
    function: _Described


def _tool_choice(value: Any) -> str:
    """none, auto, required or function:NAME."""
    match value:
        case "none" | "auto" | "required":
            return str(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return f"function:{name}"
    raise _wrong("it must be none, auto, required, or name a function")


def _prompt(value: Any) -> Any:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    is_ids = isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)
    if not value or not (is_ids or isinstance(value, str)):
        raise _wrong("it must be a text that is not empty, or a list of token ids, one of them in a call")
    return value


# ---- calls


class CallRequest(BaseModel):
    """The body of a call, whichever route it came by."""

    model_config = STRICT
    param: ClassVar[str]
    """The parameter that holds the prompt."""

    model: Annotated[str, Field(min_length=1, max_length=256)] = "policy"
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1024)]],
        Field(max_length=MAX_STOPS),
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    ] = []
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool = False
    stream_options: dict[str, Any] = {}
    logprobs: bool | Literal[0] | None = None

    @property
    def has_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs is not False

    @property
    def include_usage(self) -> bool:
        return self.stream_options.get("include_usage") is True


class ChatRequest(CallRequest):
    """Of /v1/chat/completions. Once it is read, `tool_choice` is none, auto, required or function:NAME,
    `tools` is empty with none, and `max_tokens` is the smaller of the two limits.
    """

    param = "messages"

    messages: Annotated[list[ChatMessage], Field(min_length=1), FailFast()]
    tools: Annotated[list[_GivenTool], Field(max_length=MAX_TOOLS)] = []
    tool_choice: Annotated[str, BeforeValidator(_tool_choice)] = "auto"
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False


class TextRequest(CallRequest):
    """Of /v1/completions."""

    param = "prompt"

    prompt: Annotated[str | list[int], BeforeValidator(_prompt)]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16  # without it, as OpenAI has it
    logprobs: Literal[0] | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt as a chat."""
        return [{"role": "user", "content": self.prompt if isinstance(self.prompt, str) else ""}]


AnyRequest = ChatRequest | TextRequest
Call = TypeVar("Call", bound=CallRequest)


class RequestReader:
    """Turns bodies into CallRequests. What is ignored is logged once for each name."""

    def __init__(self, rules: CallRules) -> None:
        self._rules = rules
        self._logged: set[str] = set()

    def chat(self, body: bytes) -> ChatRequest:
        """A call of /v1/chat/completions. Raises ApiError; for too many messages before any is looked at."""
        given, most = parse_json(body), self._rules.max_prompt_tokens
        messages = given.get("messages")
        if isinstance(messages, list) and len(messages) > most:
            why = f"{len(messages)} messages are more than rollout.max_prompt_tokens={most}: each is a token."
            raise too_long(why, "messages")
        asked = self._checked(given, ChatRequest)
        names = [f"function:{tool['function']['name']}" for tool in asked.tools]
        if asked.tool_choice == "auto" and not names:
            asked.tool_choice = "none"
        if asked.tool_choice not in (("none", "auto", "required", *names) if names else ("none",)):
            raise invalid(f"tool_choice {shown(asked.tool_choice)} is not among the tools.", "tool_choice")
        asked.tools = [] if asked.tool_choice == "none" else given["tools"]  # as they are, keys in order
        limits = [each for each in (asked.max_completion_tokens, asked.max_tokens) if each is not None]
        asked.max_tokens = min(limits, default=None)
        return asked

    def text(self, body: bytes) -> TextRequest:
        """A call of /v1/completions. Raises ApiError."""
        asked, known = self._checked(parse_json(body), TextRequest), self._rules.vocab_size
        if isinstance(asked.prompt, list) and (largest := max(asked.prompt)) >= known:
            raise invalid(f"prompt holds {shown(largest)}; the model knows ids 0 to {known - 1}.", "prompt")
        return asked

    def _checked(self, body: Mapping[str, Any], shape: type[Call]) -> Call:
        """The parameters that say something, as `shape` has them. Raises ApiError."""
        given = {}
        for name, value in body.items():
            off, why = REFUSED.get(name, ((), ""))
            if value is None or value in off:
                continue
            if why:
                raise invalid(f"{name}={shown(value)} is refused: {why}.", name)
            if name in IGNORED:
                self._log_once(name, f"calls give `{name}`, which changes nothing of what is sampled")
            else:
                given[name] = value
        try:
            asked = shape.model_validate(given)
        except ValidationError as error:
            raise refused(error) from None
        for name in ("temperature", "top_p"):
            value, fixed = getattr(asked, name), getattr(self._rules, name)
            if value in (None, fixed):
                continue
            if self._rules.on_sampling_override == "refuse":
                why = f"training samples at {name}={fixed}. Leave it out, or set gateway.on_sampling_override"
                raise invalid(f"{name}={value} is refused: {why} to use_config.", name)
            self._log_once(name, f"a call asks for {name}={value} and gets {name}={fixed}, as every one will")
        return asked

    def _log_once(self, name: str, text: str) -> None:
        if name not in self._logged:
            self._logged.add(name)
            log.warning("gateway: %s", text)


def parse_json(body: bytes) -> dict[str, Any]:
    """The body as an object. The parser bounds its depth and refuses lone surrogates. Raises ApiError."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"The body is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise invalid(f"The body must be a JSON object, not {shown(value)}.")
    return value


def refused(error: ValidationError, kinds: Collection[str] = ROLES) -> ApiError:
    """The first thing that is wrong, where it stands in the body, and what stands there. `kinds`: of the
    entries of lists, which pydantic names, too.
    """
    first = error.errors(include_url=False)[0]
    given_at, before = first["loc"], [None, *first["loc"]]
    loc = [
        part
        for part, last in zip(given_at, before, strict=False)
        if not (part in kinds and isinstance(last, int))
    ]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")[:200]
    given = "" if first["type"] in ("missing", "wrong") else f", not {shown(first['input'])}"
    code = "unknown_parameter" if first["type"] == "extra_forbidden" else None
    return invalid(f"{param}: {first['msg']}{given}.", param, code=code)
