"""What the dialects share: their interface, answers in blocks, and answers kept for later calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from asyncrl.agents.endpoint.answers import Answer, ApiError, shown

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.gateway_call import GatewayCall
    from asyncrl.agents.endpoint.requests import AnyRequest, RequestReader

NOT_KEPT = "previous_response_not_found"


class Writer(Protocol):
    """The output of one call: whole(), or events from news(), end() and failed()."""

    def whole(self) -> bytes: ...

    def news(self) -> bytes:
        """Return new text that may be shown; possibly nothing."""

    def end(self) -> bytes:
        """Return the last text and the closing events."""

    def failed(self, error: ApiError) -> bytes:
        """Report a failure after the first event."""

    def keep(self, kept: KeptAnswers) -> None:
        """Keep the delivered answer for later calls."""


class Dialect(Protocol):
    name: str
    """Prefix of its answers' ids."""
    splits_thoughts: bool | None
    """None: as gateway.thoughts says."""

    def read(self, reader: RequestReader, body: dict[str, Any], kept: KeptAnswers) -> tuple[AnyRequest, Any]:
        """Return the call, and data for its writer. Raises ApiError."""

    def writer(self, call: GatewayCall, model: str, asked: AnyRequest, data: Any) -> Writer: ...


# ---- answers in blocks

Block = Literal["thought", "text"]


class BlockWriter(ABC):
    """Events of one answer, in blocks: thought, text, tool calls."""

    def __init__(self, call: GatewayCall, model: str) -> None:
        (self.choice,) = call.choices
        self.call = call
        self.model = model
        self.index = 0
        """Number of the current block."""
        self._open: Block | None = None
        self._has_begun = False
        self._takes: dict[Block, Callable[[int], str]] = {
            "thought": self.choice.take_thought,
            "text": self.choice.take,
        }
        self._num_written: dict[Block, int] = {"thought": 0, "text": 0}

    def news(self) -> bytes:
        events: list[bytes] = []
        for block, take in self._takes.items():
            if text := take(self._num_written[block]):
                self._num_written[block] += len(text)
                events += [self._begin_once(), self._opened(block), self.delta(block, text)]
        return b"".join(events)

    def end(self) -> bytes:
        events = [self._begin_once(), self.news(), self._closed()]
        for number, call in enumerate(self.choice.tool_calls):
            events.append(self.tool_call(number, call))
            self.index += 1
        if not self.index:
            events += [self._opened("text"), self._closed()]
        return b"".join([*events, self.finish()])

    def _begin_once(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return self.begin()

    def _opened(self, block: Block) -> bytes:
        if self._open == block:
            return b""
        events = self._closed()
        self._open = block
        return events + self.open(block)

    def _closed(self) -> bytes:
        if self._open is None:
            return b""
        events = self.close(self._open)
        self._open = None
        self.index += 1
        return events

    @abstractmethod
    def begin(self) -> bytes: ...

    @abstractmethod
    def open(self, block: Block) -> bytes: ...

    @abstractmethod
    def delta(self, block: Block, text: str) -> bytes: ...

    @abstractmethod
    def close(self, block: Block) -> bytes: ...

    @abstractmethod
    def tool_call(self, number: int, call: Mapping[str, Any]) -> bytes: ...

    @abstractmethod
    def finish(self) -> bytes: ...


# ---- answers that later calls continue


@dataclass(frozen=True, slots=True, eq=False)
class KeptAnswer:
    """A delivered answer, the messages before it since its predecessor, and their tools."""

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
    """The newest `most` answers of a session that later calls may continue, by id."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._answers: dict[str, KeptAnswer] = {}

    def add(self, name: str, answer: KeptAnswer) -> None:
        self._answers[name] = answer
        if len(self._answers) > self._most:
            del self._answers[next(iter(self._answers))]

    def get(self, name: str, param: str) -> KeptAnswer:
        """Return the answer that `param` names. Raises ApiError: 404."""
        if (answer := self._answers.get(name)) is not None:
            return answer
        why = f"{shown(name)} is not kept: it had store=false or no thread, belongs to another session, or "
        raise ApiError(404, f"{why}is older than the newest {self._most}.", code=NOT_KEPT, param=param)
