"""Checked requests: errors, messages and tools as chat templates get them, and
parameters of calls.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError, from_json, to_json
from typing_extensions import TypedDict

from asyncrl.messages.codec import bias_fault
from asyncrl.messages.engine_api import MAX_TOP_LOGPROBS
from asyncrl.messages.json_values import as_object
from asyncrl.messages.sampling import (
    SAMPLING_PARAMETERS,
    LogitBias,
    Penalty,
    RepetitionPenalty,
    SamplingParameters,
)
from asyncrl.messages.worker_api import ChatTokenizer

log = logging.getLogger(__name__)

# ---- errors

NO_RETRY = {"x-should-retry": "false"}
_LONGEST_SHOWN = 80


_LINE_ENDS = {each.encode(): b"\\u%04x" % ord(each) for each in "\x85\u2028\u2029"}


def dumped(value: object) -> bytes:
    """Return JSON without the characters at which line readers of some clients split a
    stream.
    """
    text = to_json(value, inf_nan_mode="null")
    for line_end, escaped in _LINE_ENDS.items():
        text = text.replace(line_end, escaped)
    return text


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
        self.anthropics = message
        """The message in Anthropic's words."""
        self.headers = dict(headers or {})
        self.error = {"message": message, "type": type, "param": param, "code": code}
        super().__init__(message)

    def rename(self, names: Mapping[str, str]) -> None:
        """Name a parameter of a chat as the client's dialect does. Its place in a list
        may differ, and is dropped.
        """
        root = re.split(r"\W", self.error["param"] or "")[0]
        if name := names.get(root):
            pattern = rf"\b{root}\b(?:\[\d+\])?"
            message = re.sub(pattern, name, str(self))
            self.error |= {"param": name, "message": message}
            self.anthropics = re.sub(pattern, name, self.anthropics)

    def body(self) -> bytes:
        return dumped({"error": self.error})


def invalid(
    message: str, param: str | None = None, *, code: str | None = None
) -> ApiError:
    return ApiError(400, message, code=code, param=param)


TOO_LONG = "context_length_exceeded"


def too_long(size: str, most: int, param: str) -> ApiError:
    """Return the error in each vendor's words: clients that read them condense the
    chat.

    `size`: of the prompt, such as `2001 tokens`.
    """
    error = invalid(
        f"This model's maximum context length is {most} tokens. However, your {param} resulted in {size}. "
        "Your prompt is too long. "
        f"Please reduce the length of the {param}, or raise rollout.max_prompt_tokens={most}.",
        param,
        code=TOO_LONG,
    )
    error.anthropics = f"prompt is too long: {size} > {most} maximum"
    return error


def too_large(most: int) -> ApiError:
    """Return the error for a body. Clients that read its words condense the chat."""
    error = ApiError(
        413,
        f"The body is larger than {most} bytes, so it exceeds the maximum context length. "
        "Your prompt is too long. Please reduce the length of the messages.",
        code=TOO_LONG,
    )
    error.anthropics = f"prompt is too long: its body exceeds {most} bytes maximum"
    return error


def shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} entries"
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."


# ---- messages and tools

# Clients of other languages write 2.0 or "2" for 2. OpenAI's clients and vLLM read
# these, too. Cached strings would fragment the memory of ended sessions.
CLOSED = ConfigDict(extra="forbid", cache_strings="keys")


def wrong(why: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{why}", {"why": why})


_READ_PARTS = (
    "text input_text output_text reasoning_text summary_text refusal thinking reasoning tool_reference "
    "document content search_result"
).split()
_HELD = (
    "text",
    "refusal",
    "thinking",
    "reasoning",
    "tool_name",
    "name",
    "data",
    "content",
    "source",
)
"""Keys of a part's content, which is a text, a part or a list of parts."""
_MEDIA = "image image_url input_image audio input_audio video file input_file document".split()


def text_of(part: Any) -> str:
    """Return the text of a content part. Raises PydanticCustomError for an image, a
    sound or a file.

    Example: the text of `{"type": "document", "source": {"type": "text", "data": "x"}}`
        is x.
    """
    match part:
        case str():
            return part
        case list():
            return "\n".join(filter(None, map(text_of, part)))
        case {"type": "redacted_thinking"}:  # nobody can read it
            return ""
        case {"type": str(kind)} if kind in _READ_PARTS:
            held = [part[key] for key in _HELD if part.get(key) is not None]
            if held or "text" in part:
                about = [part.get(key) or "" for key in ("title", "context")]
                return text_of([*about, *held[:1]])
    kind = shown(part.get("type") if isinstance(part, dict) else part)
    raise wrong(f"a part of type {kind} is not supported: this model reads text")


@dataclass(slots=True)
class Reading:
    """`joint`: what the template writes between two texts."""

    joint: str
    has_notes: bool = False
    """A tool has returned an image or a file."""

    def result(self, part: object, tools: Sequence[GivenTool]) -> str:
        """Return the text of a part of a tool result.

        A tool's name becomes its definition, as Claude Code's ToolSearch announces it.
        An image becomes a note: no agent takes a result back, so a refusal would end
        the rollout.
        """
        match part:
            case {"type": "tool_reference", "tool_name": name}:
                for tool in reversed(tools):
                    if tool["function"]["name"] == name:
                        return _definition(tool["function"])
            case {"type": str(kind)} if kind in _MEDIA:
                with contextlib.suppress(PydanticCustomError):
                    return text_of(part)
                self.has_notes = True
                return f"[{kind.removeprefix('input_').removesuffix('_url')}: this model reads text only]"
        return text_of(part)


def _definition(function: Function) -> str:
    shown_fields = present(function, "description", "name", "parameters")
    definition = json.dumps(shown_fields, ensure_ascii=False)
    return f"<functions>\n<function>{definition}</function>\n</functions>"


def joined(content: object) -> object:
    return text_of(content) if isinstance(content, list) else content


Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_./:-]{1,128}$")]
"""Of a tool's definition. A model may have called a tool of any other name."""


class OpenDict(TypedDict):
    __pydantic_config__ = ConfigDict(extra="ignore")  # type: ignore[misc]


class _CalledFunction(OpenDict):
    name: str
    arguments: NotRequired[
        Annotated[
            dict[str, object],
            BeforeValidator(as_object, json_schema_input_type=str | dict[str, object]),
        ]
    ]


class _SentCall(OpenDict):
    id: NotRequired[str | None]
    function: _CalledFunction


_CONTENT = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]
}


class _Message(OpenDict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: NotRequired[str]
    content: Annotated[str, WithJsonSchema(_CONTENT)]
    unjoined_content: NotRequired[Annotated[str, SkipJsonSchema()]]
    reasoning_content: NotRequired[Annotated[str, BeforeValidator(joined)]]
    tool_calls: NotRequired[Annotated[list[_SentCall], FailFast()]]
    tool_call_id: NotRequired[str]


_UNREAD = ("function_call", "audio", "prefix", "partial", "tool_calls")
"""Keys of messages that no template reads; tool_calls only of answers."""


def _tidy(message: object, info: ValidationInfo[Reading]) -> object:
    """Keep the keys that templates get, with all text parts in one `content`. The
    context is a Reading.

    An answer's parts are also kept as `unjoined_content`: the client may have cut a
    recorded answer.
    """
    if not isinstance(message, dict):
        return message
    # Most messages, of which each call sends all again: 0.4 us instead of 1.5.
    is_plain = message.keys() == {"role", "content"} and message["role"]
    if is_plain and isinstance(message["content"], str):
        return message
    # clients return unused keys empty, but 0 and false are contents of a wrong type
    kept = {
        key: value
        for key, value in message.items()
        if value or isinstance(value, (int, float))
    }
    kept.pop("unjoined_content", None)
    role = kept.get("role")
    for key in filter(kept.__contains__, _UNREAD):
        if kept[key] and (key != "tool_calls" or role != "assistant"):
            raise wrong(
                f"{key} of a message of role {shown(role)} is refused: this model reads text "
                "and begins each answer itself"
            )
    content = kept.setdefault("content", "")
    reading = info.context
    thought = kept.pop("reasoning_content", None) or kept.get("reasoning")
    if isinstance(content, list) and role == "tool":
        results = [reading.result(part, info.data.get("tools", ())) for part in content]
        text = "\n".join(filter(None, results))
        # one block of definitions
        kept["content"] = text.replace("\n</functions>\n<functions>\n", "\n")
    elif isinstance(content, list):
        if role == "assistant":
            thoughts = [
                part
                for part in content
                if isinstance(part, dict)
                and part.get("type") in ("thinking", "reasoning")
            ]
            thought = thought or thoughts
            content = [part for part in content if part not in thoughts]
        texts = list(filter(None, map(text_of, content)))
        kept["content"] = reading.joint.join(texts)
        if role == "assistant":
            kept["unjoined_content"] = "".join(texts)
    if role == "tool" and kept.get("is_error"):
        kept["content"] = f"Error: {kept['content']}"
    if role == "assistant" and thought and isinstance(thought, (str, list)):
        kept["reasoning_content"] = thought
    return kept


def name_calls(messages: Sequence[_Message]) -> None:
    """Give ids to calls without one, as Ollama's clients send them: templates write or
    demand them.
    """
    for message in messages:
        for number, call in enumerate(message.get("tool_calls", ())):
            call["id"] = call.get("id") or f"call{number:05}"


def present(given: Mapping[str, object], *names: str) -> dict[str, object]:
    return {name: given[name] for name in names if given.get(name) is not None}


ChatMessage = Annotated[_Message, BeforeValidator(_tidy)]


class Function(OpenDict):
    name: Name
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, object] | None]
    strict: NotRequired[bool | None]


class GivenTool(OpenDict):
    type: NotRequired[Literal["function"]]
    function: Function
    defer_loading: NotRequired[bool | None]


class _JsonSchema(OpenDict):
    name: Name
    description: NotRequired[str | None]
    schema: dict[str, object]
    strict: NotRequired[bool | None]


# A schema at another place would be lost, and any object would be an answer.
class _AnyObject(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Literal["json_object"]


class _SchemaFormat(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Literal["json_schema"]
    json_schema: _JsonSchema


MOST_KEYS = 1024


def _few_keys(value: object) -> object:
    if isinstance(value, dict) and len(value) > MOST_KEYS:  # each would be an error
        raise wrong(f"{len(value)} keys are more than {MOST_KEYS}")
    return value


ResponseFormat = Annotated[
    Annotated[_AnyObject | _SchemaFormat, Field(discriminator="type")] | None,
    BeforeValidator(lambda value: None if value == {"type": "text"} else value),
]
"""None: any text."""


# ---- parameters

MAX_STOPS = 16
LOWEST_TEMPERATURE = 0.01
"""vLLM does not sample below this; treated as greedy."""

IGNORED = frozenset(
    (
        "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
        "truncation verbosity max_tool_calls stream_options client_metadata cache_control diagnostics betas "
        "context_management cache_salt priority request_id session_id spaces_between_special_tokens"
    ).split()
)
"""Parameters without an effect on sampling, as agents and frameworks send them."""

NEUTRAL: Mapping[str, object] = from_json("""{
    "n": 1, "best_of": 1, "min_tokens": 0, "length_penalty": 1, "ignore_eos": false,
    "use_beam_search": false, "echo": false, "include_stop_str_in_output": false,
    "include_reasoning": true, "add_generation_prompt": true, "background": false,
    "continue_final_message": false, "add_special_tokens": false, "bad_words": [],
    "stop_token_ids": [], "modalities": ["text"], "function_call": "auto",
    "mcp_servers": []
}""")
"""Values without an effect that clients send, by parameter. Other values are refused."""


KNOWN_KEYS = tomllib.loads(
    Path(__file__).with_name("known_keys.toml").read_text(encoding="utf-8")
)


@dataclass(frozen=True, slots=True)
class CallRules:
    """Settings of all calls; lengths in tokens."""

    model_name: str
    max_tokens: int
    max_prompt_tokens: int
    max_length: int
    vocab_size: int
    sampling: SamplingParameters = SamplingParameters()
    replayed: frozenset[str] = frozenset()
    """Sampling parameters of calls that the trainer replays."""
    on_sampling_override: Literal["use_config", "honour"] = "use_config"
    roles: tuple[str, ...] = ()
    """Policies that `model` of a call may name; (): all calls have the same."""

    @property
    def models(self) -> tuple[str, ...]:
        """Return the names of models that clients see."""
        return self.roles or (self.model_name,)

    def role_of(self, model: str) -> str:
        """Return the role of a call. Raises ApiError (404)."""
        if not self.roles:
            return ""
        if model not in self.roles:
            known = ", ".join(self.roles)
            why = f"model={shown(model)} is no role of trainer.roles; the roles are {known}."
            raise ApiError(404, why, code="model_not_found", param="model")
        return model


_ToolChoice = Literal["none", "auto", "required"] | dict[str, object]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: Literal["none", "auto", "required"] = "auto"
    names: frozenset[str] | None = None
    """Of the tools that an answer may call; None: all."""


def _tool_choice(value: object) -> ToolChoice:
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": ("none" | "auto") as mode}:
            return ToolChoice(mode)
        case {"type": "any"}:
            return ToolChoice("required")
        # Chats nest what responses do not.
        case {"type": "allowed_tools", "allowed_tools": allowed} | (
            {"type": "allowed_tools"} as allowed
        ):
            return _allowed(allowed)
    return ToolChoice("required", frozenset([_tool_name(value)]))


def _allowed(value: object) -> ToolChoice:
    match value:
        case {"mode": ("auto" | "required") as mode, "tools": [_, *_] as tools}:
            return ToolChoice(mode, frozenset(map(_tool_name, tools)))
    raise wrong(
        "allowed_tools needs mode (auto or required) and tools, a list of functions"
    )


def _tool_name(chosen: object) -> str:
    match chosen:
        case {"type": "function", "function": {"name": str(name)}} | {
            "name": str(name)
        }:
            return name
    raise wrong(
        "it must be none, auto, required, name a function, or be allowed_tools with a mode and functions"
    )


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
Settings = Annotated[dict[str, str | int | float | bool | None], FailFast()]
NumTops = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Count = Annotated[int, Field(ge=1)]


def chat_format(form: object, **more: object) -> object:
    """Convert a format of responses or messages to the format of chats."""
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    schema = more | present(form, "name", "description", "schema", "strict")
    return {"type": "json_schema", "json_schema": schema}


class CallParameters(BaseModel):
    model_config = CLOSED

    model: Annotated[str, Field(max_length=256)] = "policy"
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """-1 and 0: all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    logit_bias: Annotated[LogitBias | None, BeforeValidator(_few_keys)] = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stream: bool = False
    skip_special_tokens: bool | None = None
    """None: per task.special_tokens."""

    def common(self) -> dict[str, object]:
        """Return the parameters that a chat has too, but for its messages and tools."""
        names = ChatRequest.model_fields.keys() - {"messages", "tools"}
        return self.model_dump(include=set(names), exclude_unset=True)


class CallRequest(CallParameters):
    """A call to sample; sampling parameters None: the run's."""

    param: ClassVar[str]

    stop: Stops = Field(default_factory=list)
    max_tokens: Count | None = None
    stream_options: dict[str, object] = Field(default_factory=dict)

    @property
    def sampling(self) -> dict[str, object]:
        """Return the parameters that differ from the run's."""
        given = self.model_fields_set.intersection(SAMPLING_PARAMETERS)
        return {
            name: value
            for name in sorted(given)
            if (value := getattr(self, name)) is not None
        }


class ChatRequest(CallRequest):
    """/v1/chat/completions."""

    param = "messages"

    # Before `messages`, in which tool results may name them.
    tools: Annotated[list[GivenTool], FailFast()] = Field(default_factory=list)
    messages: Annotated[list[ChatMessage], Field(min_length=1), FailFast()]
    tool_choice: Annotated[
        ToolChoice, BeforeValidator(_tool_choice, json_schema_input_type=_ToolChoice)
    ] = ToolChoice()
    parallel_tool_calls: bool = True
    max_completion_tokens: Count | None = None
    response_format: ResponseFormat = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Settings = Field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: NumTops = 0

    @property
    def callable_tools(self) -> list[GivenTool]:
        """Return the tools that an answer may call."""
        mode, names = self.tool_choice.mode, self.tool_choice.names
        return [
            tool
            for tool in self.tools
            if mode != "none" and (names is None or tool["function"]["name"] in names)
        ]

    @property
    def forced_name(self) -> str | None:
        """Return the tool that a forced call must name; None: any of several."""
        names = self.tool_choice.names or ()
        return next(iter(names)) if len(names) == 1 else None

    @property
    def shown_tools(self) -> list[GivenTool]:
        """Return the tools of the prompt. A deferred one is described by a tool result
        that names it.
        """
        return [tool for tool in self.tools if not tool.get("defer_loading")]

    @property
    def has_one_call(self) -> bool:
        return bool(self.callable_tools) and not self.parallel_tool_calls


def _one_prompt(prompt: object) -> object:
    """Return the prompt of a list of one, as some clients send it."""
    if (
        not isinstance(prompt, list)
        or not prompt
        or not isinstance(prompt[0], (str, list))
    ):
        return prompt
    if len(prompt) > 1:
        raise wrong("a call has one answer: send one prompt a call")
    return prompt[0]


class TextRequest(CallRequest):
    """/v1/completions."""

    param = "prompt"

    prompt: Annotated[
        str | Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)],
        Field(min_length=1),
        BeforeValidator(_one_prompt),
    ]
    max_tokens: Count | None = 16  # OpenAI's default
    add_special_tokens: Literal[True] = True
    logprobs: ClassVar[bool] = False
    top_logprobs: ClassVar[int] = 0
    tools: ClassVar[list[GivenTool]] = []
    has_one_call: ClassVar[bool] = False

    @property
    def messages(self) -> list[dict[str, object]]:
        return [
            {
                "role": "user",
                "content": self.prompt if isinstance(self.prompt, str) else "",
            }
        ]


AnyRequest = ChatRequest | TextRequest
Shape = TypeVar("Shape", bound=CallParameters)


@dataclass(eq=False)
class RequestReader:
    """Parser of JSON bodies. Logs each ignored name once."""

    rules: CallRules
    joint: str = "\n"
    """Text that the chat template writes between two texts of a message."""
    variables: Collection[str] = ()
    """Names that the template reads."""
    num_with_notes: int = field(default=0, init=False)
    """Calls with a note in place of an image or a file."""
    _logged: set[str] = field(default_factory=set, init=False)

    def chat(self, body: dict[str, Any]) -> ChatRequest:
        """Check the body of a chat. Raises ApiError."""
        reading = Reading(self.joint)
        asked = self.checked(body, ChatRequest, reading)
        if reading.has_notes:
            self.num_with_notes += 1
            self.log_once(
                "notes",
                "a tool returned an image or a file; the model reads a note instead",
            )
        name_calls(asked.messages)
        self._settle_sampling(asked)
        if asked.top_logprobs and not asked.logprobs:
            raise invalid("top_logprobs needs logprobs=true.", "top_logprobs")
        names = {tool["function"]["name"] for tool in asked.tools}
        if asked.tool_choice == ToolChoice() and not names:
            asked.tool_choice = ToolChoice("none")
        choice = asked.tool_choice
        missing = sorted((choice.names or set()) - names)
        if missing or (choice.mode != "none" and not names):
            chosen = missing[0] if missing else choice.mode
            raise invalid(
                f"tool_choice {shown(chosen)} is not among the tools.", "tool_choice"
            )
        # The template writes tools as text. After validation they may lack unknown
        # keys, and a server would send another prompt.
        asked.tools = body.get("tools") or []  # unchanged, keys in order
        readable = ", ".join(sorted(self.variables)) or "no variable"
        for name, value in asked.chat_template_kwargs.items():
            if name not in self.variables and value is not None:
                why = f"the chat template of this model reads {readable}"
                self._check_unread(name, value, "chat_template_kwargs", (), why)
        limits = filter(None, (asked.max_completion_tokens, asked.max_tokens))
        asked.max_tokens = min(limits, default=None)
        if (effort := asked.reasoning_effort) is not None:  # like vLLM
            settings: Settings = {
                "reasoning_effort": effort,
                "enable_thinking": effort != "none",
            }
            asked.chat_template_kwargs = settings | asked.chat_template_kwargs
        return asked

    def text(self, body: Mapping[str, object]) -> TextRequest:
        asked = self.checked(body, TextRequest)
        self._settle_sampling(asked)
        last = self.rules.vocab_size - 1
        if isinstance(asked.prompt, list) and (largest := max(asked.prompt)) > last:
            raise invalid(
                f"prompt contains {shown(largest)}; the model has ids 0 to {last}.",
                "prompt",
            )
        return asked

    def checked(
        self,
        body: Mapping[str, object],
        shape: type[Shape],
        reading: Reading | None = None,
    ) -> Shape:
        given = {}
        fields = shape.model_fields
        for name, value in body.items():
            # Clients send null for parameters that nobody has set.
            if value is None:
                continue
            if name in fields:
                given[name] = value
            else:
                self._check_unread(name, value)
        try:
            return shape.model_validate(given, context=reading)
        except ValidationError as error:
            raise refusal_of(error) from None

    def _check_unread(
        self,
        name: str,
        value: object,
        where: str = "",
        ignored: Collection[str] = IGNORED,
        why: str = "there is no such parameter here",
    ) -> None:
        """Raise ApiError for a parameter with an effect. A falsy value can have one,
        too. `where`: the object that contains it.
        """
        param = f"{where}.{name}".lstrip(".")[:200]
        if name in ignored:
            self.log_once(name, f"calls give `{name}`, which has no effect")
            return
        if name in NEUTRAL and not where:
            if value == NEUTRAL[name]:
                return
            why = f"only {name}={shown(NEUTRAL[name])} is possible here"
        elif name in self.variables and not where:
            why = "send it in `chat_template_kwargs`"
        elif name in ChatRequest.model_fields and not where:
            why = "use /v1/chat/completions"
        raise invalid(
            f"{param}={shown(value)} is refused: {why}.",
            param,
            code="unknown_parameter",
        )

    def check_nested(self, dialect: str, body: Mapping[str, object]) -> None:
        """Raise ApiError for an unknown key in an object of the body."""
        for name, value in body.items():
            self._check_inner(KNOWN_KEYS[dialect], name, name, value)

    def _check_inner(
        self,
        places: Mapping[str, Sequence[str]],
        place: str,
        param: str,
        value: object,
    ) -> None:
        """`place`: `param` without the numbers in lists."""
        if isinstance(value, list) and f"{place}[]" in places:
            for number, each in enumerate(value):
                self._check_inner(places, f"{place}[]", f"{param}[{number}]", each)
        # A client gets another error for an object of another type, or a note.
        if (
            not isinstance(value, dict)
            or place not in places
            or value.get("type", "text") not in KNOWN_KEYS["types"]
        ):
            return
        known = places[place]
        for name, inner in value.items():
            if name in known and isinstance(inner, (dict, list)):
                self._check_inner(places, f"{place}.{name}", f"{param}.{name}", inner)
            elif name not in known and inner is not None:
                self._check_unread(name, inner, param, KNOWN_KEYS["ignored"])

    def _settle_sampling(self, asked: CallRequest) -> None:
        """Settle the sampling parameters (None: the run's)."""
        if asked.temperature is not None and asked.temperature < LOWEST_TEMPERATURE:
            # Greedy: nothing to cut.
            asked.temperature = 0.0
            asked.top_p = asked.top_k = asked.min_p = None
        if asked.top_k == -1:
            asked.top_k = 0
        if fault := bias_fault(asked.logit_bias or {}, self.rules.vocab_size):
            raise invalid(f"{fault.error}; {fault.rule}.", "logit_bias")
        for name, value in asked.sampling.items():
            fixed = getattr(self.rules.sampling, name)
            if value != fixed:
                if self.rules.on_sampling_override == "honour":
                    continue
                # A client forbids or forces tokens with it, and could not read other
                # answers.
                if name == "logit_bias":
                    raise invalid(
                        f"logit_bias={shown(value)} is refused: training samples without one; set "
                        "gateway.on_sampling_override: honour to sample with it, without training.",
                        name,
                        code="unsupported_parameter",
                    )
                self.log_once(
                    name, f"calls ask for {name}={value} and get {name}={fixed}"
                )
            # None is the run's value. A call without any other is trained.
            setattr(asked, name, None)

    def log_once(self, name: str, text: str) -> None:
        if name not in self._logged:
            self._logged.add(name)
            log.warning("gateway: %s", text)


def parse_json(body: bytes) -> dict[str, object]:
    """Return the JSON object of a body. Raises ApiError."""
    try:
        encoding = json.detect_encoding(body)
        if encoding != "utf-8":  # a byte order mark, or UTF-16 of Windows clients
            body = body.decode(encoding).encode()
        value = from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise invalid(f"The body is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise invalid(f"The body must be a JSON object, not {shown(value)}.")
    return value


def refusal_of(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    # "str": a member of a union
    place = ".".join(str(part) for part in first["loc"] if part != "str")
    param = re.sub(r"\.(\d+)", r"[\1]", place)[:200]
    not_given = (
        ""
        if first["type"] in ("missing", "wrong")
        else f", not {shown(first['input'])}"
    )
    return invalid(f"{param}: {first['msg']}{not_given}.", param)


def text_joint(tokenizer: ChatTokenizer) -> str:
    """Return what the chat template writes between two texts of a message. If it reads
    one text only, vLLM writes a newline.
    """
    parts = [{"type": "text", "text": "former"}, {"type": "text", "text": "latter"}]
    found = None
    with contextlib.suppress(ValueError):
        found = re.search(
            r"former([^{}]*)latter",
            tokenizer.render([{"role": "user", "content": parts}]),
        )
    return found[1] if found else "\n"
