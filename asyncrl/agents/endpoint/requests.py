"""Checked requests: errors, messages and tools as chat templates get them, and parameters of calls."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, Json, ValidationError
from pydantic_core import PydanticCustomError, from_json, to_json
from typing_extensions import TypedDict

from asyncrl.messages.engine_api import MAX_TOP_LOGPROBS
from asyncrl.messages.sampling import SAMPLING_PARAMETERS, SamplingParameters

log = logging.getLogger(__name__)

# ---- errors

NO_RETRY = {"x-should-retry": "false"}
_LONGEST_SHOWN = 80
MAX_TOOLS = 128


class ApiError(Exception):
    """Error answer to one call."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.headers = dict(headers or {})
        self.error = {"message": message, "type": type, "param": param, "code": code}
        super().__init__(message)

    def body(self) -> bytes:
        return to_json({"error": self.error}, inf_nan_mode="null")


def invalid(message: str, param: str | None = None, *, code: str | None = None) -> ApiError:
    return ApiError(400, message, code=code, param=param)


TOO_LONG = "context_length_exceeded"


def too_long(size: str, most: int, param: str) -> ApiError:
    why = f"This prompt has {size}; rollout.max_prompt_tokens={most} is the most. "
    return invalid(f"{why}Shorten it, or raise the limit.", param, code=TOO_LONG)


def shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} entries"
    text = repr(value[: _LONGEST_SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."


# ---- messages and tools

# cached strings would fragment the memory of ended sessions
STRICT = ConfigDict(strict=True, extra="forbid", cache_strings="keys")


def wrong(why: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{why}", {"why": why})


TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")


def joined(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for part in content:
        match part:
            case {"type": str(kind), "text": str(text)} if kind in TEXTS:
                texts.append(text)
            case _:
                kind = shown(part.get("type") if isinstance(part, dict) else part)
                raise wrong(f"a part of type {kind} is not supported; this model reads text parts")
    return "".join(texts)


Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}\z")]


class _Open(TypedDict):
    __pydantic_config__ = ConfigDict(strict=True, extra="ignore")  # type: ignore[misc]


class _CalledFunction(_Open):
    name: Name
    arguments: Json[dict[str, Any]]


class _SentCall(_Open):
    id: Annotated[str, Field(min_length=1)]
    type: NotRequired[Literal["function"]]
    function: _CalledFunction


class _Message(_Open):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: NotRequired[str]
    content: Annotated[str, BeforeValidator(joined)]
    reasoning_content: NotRequired[Annotated[str, BeforeValidator(joined)]]
    tool_calls: NotRequired[Annotated[list[_SentCall], Field(max_length=MAX_TOOLS)]]
    tool_call_id: NotRequired[Annotated[str, Field(min_length=1)]]


def _tidy(message: Any) -> Any:
    """Keep the keys that templates get. Add empty content to tool calls for SmolLM2 and Phi 3."""
    if not isinstance(message, dict):
        return message
    # clients return unused keys empty
    kept = {key: value for key, value in message.items() if value or (key == "content" and value is not None)}
    role = kept.get("role")
    unread = {"function_call", "audio"} if role == "assistant" else {"function_call", "audio", "tool_calls"}
    for key in unread & kept.keys():
        raise wrong(f"{key} of a message of role {shown(role)} is refused: this model reads text")
    if role == "tool" and "tool_call_id" not in kept:
        raise wrong("a message of role tool needs its tool_call_id")
    if role != "assistant":
        return kept
    thought = kept.get("reasoning_content") or kept.get("reasoning")
    is_text = isinstance(thought, (str, list))
    return {"content": "", **kept} | ({"reasoning_content": thought} if is_text else {})


def present(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: given[name] for name in names if given.get(name) is not None}


ChatMessage = Annotated[_Message, BeforeValidator(_tidy)]


class _Function(_Open):
    name: Name
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any]]
    strict: NotRequired[bool | None]


class GivenTool(_Open):
    type: Literal["function"]
    function: _Function


class _JsonSchema(_Open):
    name: Name
    description: NotRequired[str | None]
    schema: NotRequired[dict[str, Any]]
    strict: NotRequired[bool | None]


class _ResponseFormat(_Open):
    type: Literal["json_object", "json_schema"]
    json_schema: NotRequired[_JsonSchema]


ResponseFormat = Annotated[
    _ResponseFormat | None, BeforeValidator(lambda value: None if value == {"type": "text"} else value)
]
"""None: any text."""


# ---- parameters

MAX_STOPS = 16
LOWEST_TEMPERATURE = 0.01
"""vLLM does not sample below this; treated as greedy."""

IGNORED = frozenset(
    (
        "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
        "prediction truncation verbosity max_tool_calls stream_options prompt_cache_options client_metadata "
        "inference_geo speed cache_control context_management diagnostics betas user_profile_id workspace_id"
    ).split()
)
"""Parameters without an effect on sampling."""

OFF: Mapping[str, Any] = {"n": 1, "repetition_penalty": 1, "top_k": -1, "best_of": 1, "modalities": ["text"]}
"""Values, other than 0, false or empty, that turn a refused parameter off."""


@dataclass(frozen=True, slots=True)
class CallRules:
    """Settings of all calls; lengths in tokens."""

    model_name: str
    max_tokens: int
    max_prompt_tokens: int
    max_length: int
    vocab_size: int
    sampling: SamplingParameters = SamplingParameters()
    on_sampling_override: Literal["use_config", "honour"] = "use_config"


def _tool_choice(value: Any) -> str:
    match value:
        case "none" | "auto" | "required":
            return str(value)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return f"function:{name}"
    raise wrong("it must be none, auto, required, or name a function")


Key = TypeVar("Key")
Value = TypeVar("Value")


class Newest(dict[Key, Value]):
    """A dict that forgets its oldest key when it has more than `most`."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        if len(self) > self.most:
            del self[next(iter(self))]


# ---- calls

Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1024)]],
    Field(max_length=MAX_STOPS),
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
]
Settings = dict[str, str | int | float | bool | None]
Count = Annotated[int, Field(ge=1)]


def chat_format(form: Any, **more: Any) -> Any:
    """Convert a format of responses or messages to that of chats."""
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    schema = more | present(form, "name", "description", "schema", "strict")
    return {"type": "json_schema", "json_schema": schema}


class CallParameters(BaseModel):
    model_config = STRICT

    model: Annotated[str, Field(min_length=1, max_length=256)] = "policy"
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool = False

    def common(self) -> dict[str, Any]:
        names = {*CallParameters.model_fields, "max_tokens", "chat_template_kwargs"}
        return self.model_dump(include=names, exclude_unset=True)


class CallRequest(CallParameters):
    """A call to sample; sampling parameters None: the run's."""

    param: ClassVar[str]

    stop: Stops = []
    max_tokens: Count | None = None
    stream_options: dict[str, Any] = {}
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0

    @property
    def sampling(self) -> dict[str, Any]:
        """Return the parameters that differ from the run's."""
        given = {name: getattr(self, name) for name in SAMPLING_PARAMETERS}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def has_one_call(self) -> bool:
        return False


class ChatRequest(CallRequest):
    """/v1/chat/completions. Once read, `tool_choice` is none, auto, required or function:NAME."""

    param = "messages"

    messages: Annotated[list[ChatMessage], Field(min_length=1), FailFast()]
    tools: Annotated[list[GivenTool], Field(max_length=MAX_TOOLS)] = []
    tool_choice: Annotated[str, BeforeValidator(_tool_choice)] = "auto"
    parallel_tool_calls: bool = True
    max_completion_tokens: Count | None = None
    response_format: ResponseFormat = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Settings = {}

    @property
    def has_one_call(self) -> bool:
        return bool(self.tools) and not self.parallel_tool_calls


def _is_one(prompt: Any) -> bool:
    """Return whether it is a list of one prompt, as some clients send it."""
    return isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list))


class TextRequest(CallRequest):
    """/v1/completions."""

    param = "prompt"

    prompt: Annotated[
        str | list[Annotated[int, Field(ge=0)]],
        Field(min_length=1),
        BeforeValidator(lambda prompt: prompt[0] if _is_one(prompt) else prompt),
    ]
    logprobs: Literal[False] = False
    top_logprobs: Literal[0] = 0
    max_tokens: Count | None = 16  # OpenAI's default

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.prompt if isinstance(self.prompt, str) else ""}]


AnyRequest = ChatRequest | TextRequest
Shape = TypeVar("Shape", bound=CallParameters)


class RequestReader:
    """Parser of JSON bodies. Logs each ignored name once."""

    def __init__(self, rules: CallRules) -> None:
        self._rules = rules
        self._logged: set[str] = set()

    def chat(self, body: dict[str, Any]) -> ChatRequest:
        """Raises ApiError."""
        asked = self.checked(body, ChatRequest)
        self._settle_sampling(asked)
        asked.logprobs |= asked.top_logprobs > 0
        names = [f"function:{tool['function']['name']}" for tool in asked.tools]
        if asked.tool_choice == "auto" and not names:
            asked.tool_choice = "none"
        if asked.tool_choice not in (("none", "auto", "required", *names) if names else ("none",)):
            raise invalid(f"tool_choice {shown(asked.tool_choice)} is not among the tools.", "tool_choice")
        asked.tools = [] if asked.tool_choice == "none" else body["tools"]  # unchanged, keys in order
        limits = [each for each in (asked.max_completion_tokens, asked.max_tokens) if each is not None]
        asked.max_tokens = min(limits, default=None)
        if asked.reasoning_effort is not None:
            asked.chat_template_kwargs = {
                "reasoning_effort": asked.reasoning_effort,
                **asked.chat_template_kwargs,
            }
        return asked

    def text(self, body: Mapping[str, Any]) -> TextRequest:
        asked = self.checked(body, TextRequest)
        self._settle_sampling(asked)
        last = self._rules.vocab_size - 1
        if isinstance(asked.prompt, list) and (largest := max(asked.prompt)) > last:
            raise invalid(f"prompt contains {shown(largest)}; the model has ids 0 to {last}.", "prompt")
        return asked

    def checked(self, body: Mapping[str, Any], shape: type[Shape]) -> Shape:
        given = {}
        for name, value in body.items():
            is_field = name in shape.model_fields
            if name in IGNORED and not is_field:
                self.log_once(name, f"calls give `{name}`, which has no effect")
            elif value is not None and (is_field or (value and value != OFF.get(name))):
                given[name] = value
        try:
            return shape.model_validate(given)
        except ValidationError as error:
            raise refused(error) from None

    def _settle_sampling(self, asked: CallRequest) -> None:
        """Settle the sampling parameters (None: the run's)."""
        if asked.temperature == 0 or asked.top_p == 0 or (asked.temperature or 1) < LOWEST_TEMPERATURE:
            asked.temperature = 0.0  # greedy
            asked.top_p = None
        for name, fixed in self._rules.sampling.parameters.items():
            value = getattr(asked, name)
            if value in (None, fixed) or self._rules.on_sampling_override == "use_config":
                setattr(asked, name, None)
            if value not in (None, fixed, getattr(asked, name)):
                self.log_once(name, f"calls ask for {name}={value} and get {name}={fixed}")

    def log_once(self, name: str, text: str) -> None:
        if name not in self._logged:
            self._logged.add(name)
            log.warning("gateway: %s", text)


def parse_json(body: bytes) -> dict[str, Any]:
    """Raises ApiError."""
    try:
        value = from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise invalid(f"The body is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise invalid(f"The body must be a JSON object, not {shown(value)}.")
    return value


def refused(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    parts = [part for part in first["loc"] if part != "str"]  # member of a union
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    param = param.removeprefix(".")[:200]
    given = shown(first["input"])
    if first["type"] == "extra_forbidden":
        why = f"{param}={given} is refused: there is no such parameter here."
        return invalid(why, param, code="unknown_parameter")
    not_given = "" if first["type"] in ("missing", "wrong") else f", not {given}"
    return invalid(f"{param}: {first['msg']}{not_given}.", param)
