"""What the dialects share: writers of answers, and answers that later calls continue."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic_core import to_json

from asyncrl.agents.endpoint.requests import ApiError, shown

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.answers import Answer
    from asyncrl.agents.endpoint.requests import AnyRequest, RequestReader
    from asyncrl.agents.endpoint.sessions import GatewayCall

NOT_KEPT = "previous_response_not_found"
Block = Literal["thought", "text"]
Event = dict[str, Any]


class Writer(Protocol):
    """Output of a call, whole or as events."""

    def whole(self) -> bytes: ...

    def news(self) -> bytes: ...

    def end(self) -> bytes: ...

    def failed(self, error: ApiError) -> bytes: ...

    def keep(self, kept: KeptAnswers) -> None: ...


MakeWriter = Callable[["GatewayCall", str], Writer]
"""Writer of (call, model name)."""
Read = tuple["AnyRequest", MakeWriter]


@dataclass(frozen=True, slots=True)
class Dialect:
    """`name` begins the ids of its calls. `splits_thoughts` None: per gateway.thoughts. `read` raises
    ApiError.
    """

    name: str
    splits_thoughts: bool | None
    read: Callable[[RequestReader, dict[str, Any], KeptAnswers], Read]


class BlockWriter(ABC):
    """One answer in blocks: thought, text, tool calls."""

    def __init__(self, call: GatewayCall, model: str) -> None:
        (self.choice,) = call.choices
        self.call = call
        self.model = model
        self.blocks: list[dict[str, Any]] = []
        self._open: Block | None = None
        self._has_begun = False
        self._num_written: dict[Block, int] = {"thought": 0, "text": 0}

    def whole(self) -> bytes:
        self._rest()
        return to_json(self.answer(), inf_nan_mode="null")

    def news(self) -> bytes:
        return self.encoded(self._news())

    def end(self) -> bytes:
        return self.encoded([*self._rest(), *self.finish()])

    def encoded(self, events: Sequence[Event]) -> bytes:
        return b"".join(
            b"event: %b\ndata: %b\n\n" % (event["type"].encode(), to_json(event, inf_nan_mode="null"))
            for event in events
        )

    def _news(self) -> list[Event]:
        events: list[Event] = []
        for block, num_written in self._num_written.items():
            take = self.choice.take_thought if block == "thought" else self.choice.take
            if text := take(num_written):
                self._num_written[block] += len(text)
                events += [*self._opened(block), *self.delta(block, text)]
        return events

    def _rest(self) -> list[Event]:
        events = [*self._news(), *self._closed()]
        for number, call in enumerate(self.choice.tool_calls):
            events += [*self._begun(), *self.tool_call(number, call)]
        if not self.blocks:
            events += [*self._opened("text"), *self._closed()]
        return events

    def _begun(self) -> list[Event]:
        has_begun = self._has_begun
        self._has_begun = True
        return [] if has_begun else self.begin()

    def _opened(self, block: Block) -> list[Event]:
        if self._open == block:
            return []
        events = [*self._begun(), *self._closed()]
        self._open = block
        return events + self.open(block)

    def _closed(self) -> list[Event]:
        block = self._open
        self._open = None
        return [] if block is None else self.close(block)

    @abstractmethod
    def begin(self) -> list[Event]: ...

    @abstractmethod
    def open(self, block: Block) -> list[Event]: ...

    @abstractmethod
    def delta(self, block: Block, text: str) -> list[Event]: ...

    @abstractmethod
    def close(self, block: Block) -> list[Event]: ...

    @abstractmethod
    def tool_call(self, number: int, call: Mapping[str, Any]) -> list[Event]: ...

    @abstractmethod
    def finish(self) -> list[Event]: ...

    @abstractmethod
    def answer(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, eq=False)
class KeptAnswer:
    """A delivered answer, its messages since the predecessor, and their tools."""

    before: KeptAnswer | None
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()

    def history(self) -> list[Mapping[str, Any]]:
        answers = [self]
        while (before := answers[-1].before) is not None:
            answers.append(before)
        return [message for answer in reversed(answers) for message in answer.messages]

    def with_answer(self, choice: Answer) -> KeptAnswer:
        message = {name: value for name, value in choice.message.items() if name != "refusal"}
        message["content"] = message["content"] or ""
        return KeptAnswer(self.before, [*self.messages, message], self.tools)


class KeptAnswers:
    """The newest `most` answers of a session, by id."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._answers: dict[str, KeptAnswer] = {}

    def add(self, name: str, answer: KeptAnswer) -> None:
        self._answers[name] = answer
        if len(self._answers) > self._most:
            del self._answers[next(iter(self._answers))]

    def get(self, name: str, param: str) -> KeptAnswer:
        """Raises ApiError: 404."""
        if (answer := self._answers.get(name)) is not None:
            return answer
        why = f"{shown(name)} is not kept: it had store=false or no thread, belongs to another session, or "
        raise ApiError(404, f"{why}is older than the newest {self._most}.", code=NOT_KEPT, param=param)
