"""OpenAI's responses answers, and the responses kept by a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json, to_json

from asyncrl.agents.endpoint.answers import Answer, ApiError, shown
from asyncrl.agents.endpoint.reasoning import sealed

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.calls.gateway_call import GatewayCall
    from asyncrl.agents.endpoint.requests import CallRequest


NOT_KEPT = "previous_response_not_found"
MAX_BODIES = 16
"""Most responses of a session that can be read again."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredResponse:
    """A delivered response or message, and its predecessor."""

    before: StoredResponse | None
    messages: tuple[bytes, ...]
    tools: Sequence[Mapping[str, Any]] = ()

    def chain(self) -> list[bytes]:
        found, each = [self], self.before
        while each is not None:
            found.append(each)
            each = each.before
        return [message for stored in reversed(found) for message in stored.messages]


def message_to_keep(choice: Answer) -> bytes:
    message = {name: value for name, value in choice.message.items() if name != "refusal"}
    return to_json(message | {"content": message["content"] or ""})


class KeptResponses:
    """A session's responses and threaded messages. Holds each message once, and only the newest bodies."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._stored: dict[str, StoredResponse] = {}
        self._bodies: dict[str, bytes] = {}

    def add(self, name: str, stored: StoredResponse, body: bytes | None = None) -> None:
        self._stored[name] = stored
        if body is not None:
            self._bodies[name] = body
        for kept, most in ((self._stored, self._most), (self._bodies, MAX_BODIES)):
            if len(kept) > most:
                del kept[next(iter(kept))]  # oldest

    def get(self, name: str, param: str | None = None) -> StoredResponse:
        """Return the response that `param` names. Raises ApiError: 404."""
        if name not in self._stored:
            why = (
                f"{shown(name)} is not kept: it had store=false or no thread, or is not of this session, or "
            )
            why += f"is older than the newest {self._most}."
            raise ApiError(404, why, code=NOT_KEPT, param=param)
        return self._stored[name]

    def resolved(self, item: Any, param: str) -> Any:
        """Return the item, or the item that it references. Raises ApiError: 404."""
        if not isinstance(item, dict) or item.get("type") != "item_reference":
            return item
        kind, _, of = str(item.get("id")).partition("_")
        name, _, index = of.partition("_")
        answer = from_json(self.get(name, param).messages[-1])
        calls = answer.get("tool_calls", [])
        match kind:
            case "rs":
                thought = {"type": "reasoning_text", "text": answer.get("reasoning_content", "")}
                return {"type": "reasoning", "content": [thought]}
            case "msg":
                return {"type": "message", "role": "assistant", "content": answer["content"]}
            case "fc" if index in map(str, range(len(calls))):
                call = calls[int(index)]
                return {"type": "function_call", "call_id": call["id"], **call["function"]}
        raise ApiError(404, f"{param}: there is no item {shown(item.get('id'))}.", param=param)

    def body(self, name: str) -> bytes:
        """Return the body for GET. Raises ApiError: 404."""
        if name not in self._bodies:
            self.get(name)
            raise ApiError(404, f"Response {shown(name)} is not among the newest {MAX_BODIES}.")
        return self._bodies[name]


@dataclass(frozen=True, slots=True, eq=False)
class GivenResponse:
    """`spaces`: namespaced tools by their name for the model. `is_sealed`: thoughts are also returned as
    encrypted_content.
    """

    echoed: Mapping[str, Any]
    before: StoredResponse | None
    messages: tuple[bytes, ...]
    spaces: Mapping[str, Mapping[str, Any]]
    _: KW_ONLY
    is_stored: bool
    is_sealed: bool


ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
}
"""Echoed request parameters, with their defaults."""
MAX_ECHOED = 2**16
"""Most JSON bytes of an echoed parameter."""


class WrittenResponse:
    """A response, or its events: items in the order thought, text, tool calls."""

    def __init__(self, call: GatewayCall, model: str, asked: CallRequest, given: GivenResponse) -> None:
        (self._choice,), self._call, self._given = call.choices, call, given
        echo = {**ECHOED, **given.echoed}
        head = {"id": call.name, "object": "response", "created_at": call.created_s, "model": model}
        self._head = head | {"background": False, "error": None, "incomplete_details": None} | echo
        self._number = 0
        """Number of the next event."""
        self._open: str | None = None
        """Kind of the open item."""
        self._num_items = 0
        self._num_told = {"reasoning": 0, "message": 0}

    def whole(self) -> bytes:
        return to_json(self._whole(), inf_nan_mode="null")

    def news(self) -> bytes:
        events = b""
        for kind, take in (("reasoning", self._choice.take_thought), ("message", self._choice.take)):
            if text := take(self._num_told[kind]):
                begun = self._begin() + self._item_begun(kind)
                self._num_told[kind] += len(text)
                more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
                events += begun + self._of_part(f"{_TEXT_OF[kind]}.delta", delta=text, **more)
        return events

    def end(self) -> bytes:
        events = self.news() or self._begin()
        events += self._item_ended()
        for index, call in enumerate(self._choice.tool_calls):
            item = self._call_item(index, call)
            events += self._event(
                "response.output_item.added", **self._at(), item=_not_done(item, arguments="")
            )
            where = {"item_id": item["id"], **self._at()}
            arguments, kind = item["arguments"], "response.function_call_arguments"
            events += self._event(f"{kind}.delta", **where, delta=arguments)
            events += self._event(f"{kind}.done", **where, name=item["name"], arguments=arguments)
            events += self._event("response.output_item.done", **self._at(), item=item)
            self._num_items += 1
        if not self._num_items:
            events += self._item_begun("message") + self._item_ended()
        whole = self._whole()
        return events + self._event(f"response.{whole['status']}", response=whole)

    def failed(self, error: ApiError) -> bytes:
        """Report a failure. The `error` event is for OpenAI's clients, which read only it."""
        told = error.error
        return self._event(
            "error", code=told["code"], message=told["message"], param=told["param"], error=told
        )

    def keep(self, kept: KeptResponses) -> None:
        if self._given.is_stored:
            messages = (*self._given.messages, message_to_keep(self._choice))
            kept.add(self._call.name, StoredResponse(self._given.before, messages), self.whole())

    # ---- the response

    def _whole(self) -> dict[str, Any]:
        choice = self._choice
        items = [self._item("reasoning")] if choice.thought else []
        if choice.content or not (choice.thought or choice.tool_calls):
            items.append(self._item("message"))
        items += [self._call_item(index, call) for index, call in enumerate(choice.tool_calls)]
        is_cut = choice.finish_reason == "length"
        ending: dict[str, Any] = {"status": "incomplete" if is_cut else "completed", "output": items}
        if is_cut:
            ending["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._head | ending | {"usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        prompt, sampled = self._call.num_prompt_tokens, self._choice.num_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": self._choice.num_thought_tokens},
            "total_tokens": prompt + sampled,
        }

    def _item(self, kind: str) -> dict[str, Any]:
        choice = self._choice
        is_over = bool(choice.finish_reason)
        if kind == "reasoning":
            text = choice.thought if is_over else choice.take_thought(0)
            item = {"id": self._id(kind), "type": kind, "summary": [], "content": [self._part(kind, text)]}
            if self._given.is_sealed:
                item["encrypted_content"] = sealed(text)
            return item | {"status": "completed"}
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        item = {"id": self._id(kind), "type": kind, "role": "assistant", "status": status}
        return item | {"content": [self._part(kind, choice.content or "")]}

    def _part(self, kind: str, text: str) -> dict[str, Any]:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self._choice.logprobs or []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _id(self, kind: str) -> str:
        return {"reasoning": "rs_", "message": "msg_"}[kind] + self._call.name

    def _call_item(self, index: int, call: Mapping[str, Any]) -> dict[str, Any]:
        item_id = f"fc_{self._call.name}_{index}"
        item = {"id": item_id, "type": "function_call", "call_id": call["id"], "status": "completed"}
        tool = self._given.spaces.get(call["function"]["name"], {})
        names = {name: tool[name] for name in ("namespace", "name") if name in tool}
        return item | dict(call["function"]) | names

    # ---- its events

    def _begin(self) -> bytes:
        if self._number:
            return b""
        response = self._head | {"status": "in_progress", "output": [], "usage": None}
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _item_begun(self, kind: str) -> bytes:
        if self._open == kind:
            return b""
        ended, self._open = self._item_ended(), kind
        item = _not_done(self._item(kind), content=[])
        item.pop("encrypted_content", None)
        added = self._event("response.output_item.added", **self._at(), item=item)
        part = self._part(kind, "") | ({"logprobs": []} if kind == "message" else {})
        return ended + added + self._of_part("content_part.added", part=part)

    def _item_ended(self) -> bytes:
        kind = self._open
        if kind is None:
            return b""
        item = self._item(kind)
        (part,) = item["content"]
        more = {"logprobs": part["logprobs"]} if kind == "message" else {}
        events = self._of_part(f"{_TEXT_OF[kind]}.done", text=part["text"], **more)
        events += self._of_part("content_part.done", part=part)
        events += self._event("response.output_item.done", **self._at(), item=item)
        self._open, self._num_items = None, self._num_items + 1
        return events

    def _of_part(self, name: str, **told: Any) -> bytes:
        assert self._open is not None, "a part belongs to an open item"
        where = {"item_id": self._id(self._open), **self._at(), "content_index": 0}
        return self._event(f"response.{name}", **where, **told)

    def _at(self) -> dict[str, int]:
        return {"output_index": self._num_items}

    def _event(self, kind: str, **told: Any) -> bytes:
        event = to_json({"type": kind, "sequence_number": self._number, **told}, inf_nan_mode="null")
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + event + b"\n\n"


_TEXT_OF = {"reasoning": "reasoning_text", "message": "output_text"}


def _not_done(item: Mapping[str, Any], **empty: Any) -> dict[str, Any]:
    return {**item, "status": "in_progress", **empty}
