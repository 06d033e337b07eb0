"""A character-level ChatTokenizer for tests of the gateway's capture, and a small
harness that plays calls against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from token_cases import completion_of

from asyncrl.agents.endpoint.capture import Capture, PromptPlan
from asyncrl.agents.endpoint.tool_formats import THINKING, Marks
from asyncrl.messages.records import Completion, Rollout

START, END = "\ue000", "\ue001"
"""The special tokens: every token is one character, its id the code point."""

Habit = Literal["plain", "strips", "shouts", "refuses"]
"""plain: ChatML. strips: text before a `|` is omitted from all earlier answers. shouts:
answers in capitals. refuses: an answer of more than 20 characters is refused, as a
sentinel is.
"""

Message = dict[str, Any]


class CharRenderer:
    """Tokenize by the character."""

    end_ids = frozenset({ord(END)})
    special_ids = frozenset({ord(START), ord(END)})
    closing = call_closing = END

    def __init__(self, habit: Habit = "plain") -> None:
        self.habit = habit

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        settings: Any = None,
        is_open: bool = True,
    ) -> str:
        text = f"{START}tools\n{len(tools)}{END}\n" if tools else ""
        for message in messages:
            text += f"{START}{message['role']}\n{self._content(message)}{END}\n"
        return text + f"{START}assistant\n" * is_open

    def _content(self, message: Mapping[str, Any]) -> str:
        content = message.get("content") or ""
        content += "".join(
            f"<{call['function']['name']}>" for call in message.get("tool_calls") or []
        )
        if message["role"] != "assistant" or self.habit == "plain":
            return str(content)
        if self.habit == "refuses" and len(content) > 20:
            raise ValueError("the answer is too long")
        if self.habit == "strips":
            content = content.split("|")[-1]
        return str(content.upper() if self.habit == "shouts" else content)

    def encode(
        self, text: str, *, after: str = "", adds_special: bool = False
    ) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        text = "".join(map(chr, token_ids))
        return text.replace(START, "").replace(END, "") if skip_special_tokens else text


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str | None, **fields: Any) -> Message:
    return {"role": "assistant", "content": text, **fields}


def completion(
    planned: PromptPlan, ids: Sequence[int], first_logprob: float = -1.0
) -> Completion:
    """Logprobs fall by 1/1024 from token to token."""
    logprobs = [first_logprob - index / 1024 for index in range(len(ids))]
    return completion_of(ids, logprobs, finish="stop", prompt=planned.prompt_ids)


def plan(
    capture: Capture,
    messages: Sequence[Message],
    tools: Any = None,
    *,
    prefill: str = "",
) -> PromptPlan:
    """The prompt of a chat."""
    match = capture.match(messages, tools, prefill=prefill)
    return capture.plan(
        capture.tokenizer.encode(match.text, after=match.neighbor), match
    )


class Play:
    """A session: asks, and records answers as chatcmpl-0, chatcmpl-1, ... in the order
    of recording.
    """

    def __init__(
        self,
        renderer: Any = None,
        thinking: Marks = THINKING,
        *,
        keeps_thoughts: bool = True,
    ) -> None:
        self.renderer = renderer if renderer is not None else CharRenderer()
        self.capture = Capture(self.renderer, thinking, keeps_thoughts=keeps_thoughts)
        self.num_recorded = 0

    def answer(
        self,
        planned: PromptPlan,
        raw: str | Sequence[int],
        message: Message | None = None,
        *,
        is_trained: bool = True,
    ) -> None:
        """Record that `raw` was sampled; the harness got `message`, or the text without
        special tokens.
        """
        ids = self.renderer.encode(raw) if isinstance(raw, str) else raw
        name = f"chatcmpl-{self.num_recorded}"
        self.num_recorded += 1
        got = message or assistant(self.renderer.decode(ids, skip_special_tokens=True))
        sampled = completion(planned, ids, -float(self.num_recorded))
        self.capture.record(planned, sampled, got, name, is_trained=is_trained)

    def ask(
        self, messages: Sequence[Message], raw: str, message: Message | None = None
    ) -> None:
        """A whole call."""
        self.answer(plan(self.capture, messages), raw, message)


def check_trained(
    branches: Rollout, sampled: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> None:
    """Each completion, number n of (prompt, sampled ids), is trained once, after the
    prompt it was sampled with. Its logprobs are -n and fall by 1/1024 from token to
    token.
    """
    trained = []
    for branch in branches:
        edges = np.flatnonzero(np.diff([False, *branch.loss_mask, False]))
        for start, end in edges.reshape(-1, 2).tolist():
            logprobs = branch.tokens.behaviour_logprobs[start:end].tolist()
            assert logprobs == [
                logprobs[0] - place / 1024 for place in range(end - start)
            ]
            ids = branch.token_ids
            trained.append(
                (-logprobs[0], ids[:start].tolist(), ids[start:end].tolist())
            )
    assert sorted(trained) == [
        (n, list(prompt), list(ids)) for n, (prompt, ids) in enumerate(sampled, 1)
    ]


def conversation(*are_trained: bool) -> Play:
    """Answers 1, 2 and 3 to a, b and c, as chatcmpl-0 to chatcmpl-2."""
    play = Play()
    chat: list[Message] = []
    for question, answer, is_trained in zip("abc", "123", are_trained, strict=False):
        chat = [*chat, user(question)]
        play.answer(plan(play.capture, chat), f"{answer}{END}", is_trained=is_trained)
        chat = [*chat, assistant(answer)]
    return play
