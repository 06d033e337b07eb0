"""Find the recorded completion that a chat continues. Pure.

A prompt that begins with recorded text keeps the recorded ids (extended). An edited
history starts a branch.

Many templates strip thoughts or reformat calls. Then the text after the last recorded
answer is taken from a trial render with a placeholder for the answer (realigned). It
must contain every later message.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic_core import to_json

from asyncrl.agents.endpoint.chat_node import ChatNode, Deviation, Prefix
from asyncrl.agents.endpoint.tool_formats import (
    Marks,
    close_thought,
    drop_marks,
    split_thought,
)
from asyncrl.messages.json_values import as_object
from asyncrl.messages.worker_api import ChatTokenizer, new_hash

Message = Mapping[str, Any]
Messages = Sequence[Message]

How = Literal["new", "extended", "realigned", "edited"]
"""Origin of a prompt. edited starts a branch: the last answer was edited, or the text
cannot be cut after it.
"""

NEIGHBOR_TOKENS = 4


@dataclass(frozen=True, slots=True, eq=False)
class PromptMatch:
    """The ids of `parent`, then `text`, which ends with `prefill`. `whole`: of all
    text.
    """

    text: str
    how: How
    parent: ChatNode | None
    chain: Chain
    prefill: str
    whole: Prefix | None = None
    neighbor: str = ""
    """Text before `text`, for the tokenizer."""
    deviations: Sequence[Deviation] = ()
    shown: Prefix | None = None
    """Of the prompt with placeholders for answers, if it was rendered; without the
    prefill.
    """


# ---- chats as hashes

Defaults = Mapping[str, Mapping[str, str]]
"""JSON of the default of each parameter that has one, by the tool's name."""
_to_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


class Chain:
    """Hash of a chat, message by message. `recorded`: answers count as they were
    delivered.

    Example: call 0 delivered a thought and "4". The chat of turn 2 has "4" without the
        thought, the chat of turn 3 has both. Both forms are recorded for call 0, and
        both chats continue from the delivered form. So turn 3 finds the answer of
        turn 2.
    """

    def __init__(
        self,
        messages: Messages,
        tools: Messages | None,
        settings: object,
        marks: Marks,
        recorded: Recorded,
    ) -> None:
        """A chat with other tools or other template variables (`settings`) is another
        chat.
        """
        self.marks = marks
        self._defaults = {
            each["function"]["name"]: _defaults(each["function"])
            for each in tools or ()
        }
        about = _to_json([tools, settings]).encode() if tools or settings else b""
        self._state = new_hash(about)
        self.answers: list[tuple[int, bytes]] = []
        """(index of an answer, key of the chat through it)."""
        self.forms: list[int] = []
        """Hashes of the single messages."""
        for index, message in enumerate(messages):
            form = _canonical(message, marks, self._defaults)
            self.forms.append(hash(form))
            key = self._key_with(form)
            # An answer may come back in another form, for example without its thought.
            # The chat continues from the delivered form. Otherwise the next answer
            # would not be found.
            if message.get("role") == "assistant":
                self.answers.append((index, key))
                key = recorded.delivered_key(key)
            self._state = new_hash(key)

    def key_with(self, message: Message) -> bytes:
        return self._key_with(_canonical(message, self.marks, self._defaults))

    def _key_with(self, form: bytes) -> bytes:
        state = self._state.copy()
        state.update(form)
        return state.digest()

    def changed_since(self, before: Sequence[int]) -> int | None:
        """Return the first message that differs from an earlier chat's, given its
        `forms`, if the next message is the same: another agent has another chat.
        """
        pairs = zip(before, self.forms, strict=False)
        same = [old == new for old, new in pairs]
        at = same.index(False) if False in same else len(same)
        return at if True in same[at + 1 : at + 2] else None


def _canonical(message: Message, marks: Marks, defaults: Defaults) -> bytes:
    """Serialize a message without None fields, key order, JSON spacing, outer white
    space, and an answer's name and place of the thought: harnesses change them.
    """
    fields = {name: value for name, value in message.items() if value is not None}
    if fields.get("role") == "assistant":
        # A client may return an answer in parts. The template's joint between them
        # would change its text, and so its key.
        answer = {
            **message,
            "content": fields.pop("unjoined_content", message.get("content")),
        }
        fields["reasoning_content"], fields["content"] = split_thought(answer, marks)
        fields.pop("name", None)
    if calls := fields.get("tool_calls"):
        fields["tool_calls"] = [_tool_call(call, defaults) for call in calls]
    return to_json(sorted(fields.items()))


def _tool_call(call: Message, defaults: Defaults) -> list[str]:
    """Return a call without the arguments that are its tool's defaults: Claude Code
    adds them.
    """
    name = call["function"]["name"]
    known = defaults.get(name, {})
    # a call that was cut while it was streamed comes back repaired
    given = _plain(_to_json(as_object(call["function"].get("arguments"))))
    arguments = {
        key: value
        for key, value in given.items()
        if key not in known or known[key] != _to_json(value)
    }
    return [call["id"], name, _to_json(arguments)]


def _defaults(function: Message) -> dict[str, str]:
    """Return the JSON of the default of each parameter that has one."""
    parameters = (function.get("parameters") or {}).get("properties")
    if not isinstance(parameters, Mapping):
        return {}
    # A default is a value, not a text of JSON: "1" is another default than 1.
    return {
        name: _to_json(_plain(_to_json(schema["default"])))
        for name, schema in parameters.items()
        if isinstance(schema, Mapping) and "default" in schema
    }


def _number(text: str) -> float | None:
    # -0.0 + 0.0 is 0.0. Large integers lose digits here as they do in JavaScript.
    number = float(text) + 0.0
    return number if math.isfinite(number) else None


_plain = json.JSONDecoder(
    parse_int=_number, parse_float=_number, parse_constant=_number
).decode
"""Return the value of a JSON text with the numbers that a JavaScript client would send
back: 1 for 1.0, 0 for -0.0, 9007199254740992 for 2**53 + 1, null for 1e999.
"""


def text_of_ids(tokenizer: ChatTokenizer, token_ids: Sequence[int]) -> str:
    """Return the text of ids with all special tokens."""
    return tokenizer.decode(token_ids, skip_special_tokens=False)


def end_of(tokenizer: ChatTokenizer, sampled: Sequence[int]) -> str:
    """Return the text of the token that ends an answer, empty if it was cut."""
    last = [token for token in sampled[-1:] if token in tokenizer.end_ids]
    return text_of_ids(tokenizer, last)


def answer_forms(message: Message, sampled: str, marks: Marks) -> Iterator[Message]:
    """Yield the forms that may return: as delivered, with the hidden stop text, each
    without its thought.
    """
    forms = [message]
    if (
        not message.get("tool_calls")
        and sampled.strip() != str(message.get("content") or "").strip()
    ):
        forms.append({**message, "content": sampled, "reasoning_content": None})
    for form in forms:
        yield form
        thought, rest = split_thought(form, marks)
        if thought:
            yield {**form, "content": rest, "reasoning_content": None}


Roles = tuple[str, ...]
"""Of the message before some messages, and theirs."""
Frame = Sequence[str]
"""The template's own text before, between and after the contents of messages. Example,
for a tool result and a user's text: `<tool>`, `</tool><user>`, `</user><assistant>`.
"""


class Recorded:
    """A session's completions by chat, text and ids. Reads may run in a thread in
    parallel with add().
    """

    def __init__(self, frames: dict[Roles, Frame]) -> None:
        """`frames`: of the chat template."""
        self.frames = frames
        self._nodes: dict[Hashable, ChatNode] = {}
        self._lengths: dict[type, set[int]] = {str: set(), np.ndarray: set()}

    def add(self, node: ChatNode, keys: Iterable[bytes]) -> None:
        """`keys`: forms of its chat."""
        places: list[Hashable] = [*keys, node.whole.place]
        self._lengths[np.ndarray].add(node.whole.length)
        if node.text is not None:
            places.append(node.text.place)
            self._lengths[str].add(node.text.length)
        # Equal answers to parallel calls may claim one place. Their rank decides, so
        # that the winner does not depend on the order of arrival.
        for place in places:
            known = self._nodes.get(place)
            if known is None or (
                known is not node and _rank(node, place) < _rank(known, place)
            ):
                self._nodes[place] = node

    def delivered_key(self, key: bytes) -> bytes:
        return self._nodes[key].key if key in self._nodes else key

    def last_answer(self, chain: Chain) -> tuple[int, ChatNode | None]:
        """Return (index, completion), or (-1, None)."""
        for index, key in reversed(chain.answers):
            if key in self._nodes:
                return index, self._nodes[key]
        return -1, None

    def longest(self, whole: str | npt.NDArray[np.int32]) -> ChatNode | None:
        prefix = Prefix()
        found: ChatNode | None = None
        # One pass over the text tries all lengths, since the hash of a prefix continues
        # the hash of a shorter prefix. tuple() copies the set in one step of the
        # interpreter, so that add() may run in the loop's thread at the same time.
        for length in sorted(
            length
            for length in tuple(self._lengths[type(whole)])
            if length <= len(whole)
        ):
            prefix = prefix.then(whole[prefix.length : length])
            found = self._nodes.get(prefix.place, found)
        return found


def _rank(
    node: ChatNode, place: Hashable
) -> tuple[bool, tuple[bytes, int, bytes, tuple[tuple[int, int, int], ...], bool, int]]:
    """Rank completions of one place; the order of arrival does not count."""
    return node.key != place, node.content


# ---- the match

# Random: a message that contained it would move the border between recorded and new
# text.
SENTINEL = f"asyncrl{secrets.token_hex(16)}"
"""Replaces an answer in a trial render; not guessable."""
PLACEHOLDER = "answer"


class Trial(NamedTuple):
    """A render with a placeholder for an answer. Texts are empty if the template
    refuses it.
    """

    chat: Messages = ()
    before: str = ""
    after: str = ""
    """The text from the answer on."""
    shown: Prefix | None = None
    """Of the render with PLACEHOLDER for the answer, if no later text stands in for the
    chat's own.
    """


class Joint(NamedTuple):
    """Where the template continues after an answer."""

    trial: Trial
    rest: str
    """The text after the sampled ids."""
    neighbor: str = ""
    """The end that the template writes before `rest`; empty if the sampled ids have
    none.
    """
    is_other_end: bool = False
    """The sampled ids end with another token."""


@dataclass(frozen=True, slots=True, eq=False)
class ChatMatcher:
    """Find the ids that a chat continues.

    Example, Qwen3 (`<|im_end|>` shown as `]`). Turn 1 sent `[user 1+2][assistant ` and sampled
    `<think>hm</think>3]`. The chat of turn 2 is [1+2, 3, sure?]. The template drops the thought:
        whole render:  [user 1+2][assistant 3][user sure?][assistant
        trial render:  [user 1+2][assistant SENTINEL][user sure?][assistant
    The text before the sentinel is the prompt of turn 1, so its ids and the sampled ids stay, and the text
    after `SENTINEL]` is appended. A template that moves text (Mistral writes its tools before the last user
    message) changes the text before the sentinel; then the prompt is the whole render, in its own branch.
    """

    tokenizer: ChatTokenizer
    render: Callable[..., str]
    recorded: Recorded
    messages: Messages
    prefill: str
    chain: Chain
    keeps_thoughts: bool = True
    """False: a prompt is always the template's own render of the chat."""

    def match(self) -> PromptMatch:
        """Find the recorded answer that the chat continues, and the text to encode
        after its ids. Raises ValueError if the template refuses the chat or omits a
        message.

        Example: the recorded call sampled "<think>2+2</think>4" after "user: 2+2?". The
            chat renders as "user: 2+2?|<think>2+2</think>4|user: why?|": its text
            begins with the recorded text, so this call is extended, and only "|user:
            why?|" is encoded. The template drops old thoughts, "user: 2+2?|4|user:
            why?|": the text differs, but the message has the recorded meaning. This
            call is realigned: the sampled ids stay, thought included. The harness
            changed the answer to "5": nothing matches; the whole text is encoded
            (edited).
        """
        at, answer = self.recorded.last_answer(self.chain)
        try:
            whole = self.render(self.messages)
        except ValueError:
            # Templates may refuse two calls in one answer. The trial render retries
            # with one call.
            joined = self._joined(at, answer, None)
            if joined is None:
                raise
            return joined
        text = self._begun(whole)
        node = self.recorded.longest(text)
        extended = None
        if node is not None and node.text is not None:
            rest = text[node.text.length :]
            with contextlib.suppress(ValueError):
                extended = self._match(
                    "extended",
                    node,
                    node.num_messages,
                    rest,
                    whole=node.text.then(rest),
                    neighbor=self._neighbor(node),
                )
            # The recorded text reaches the last answer that the messages name. If it
            # ends earlier, the answer that they name has more ids to keep.
            if extended is not None and node.num_messages > at:
                return extended
        joined = self._joined(at, answer, whole)
        # A chat without answers needs no placeholder.
        shown = None if self.chain.answers else Prefix().then(whole)
        text_prefix = Prefix().then(text)
        return (
            joined
            or extended
            or self._match("edited", None, at + 1, text, whole=text_prefix, shown=shown)
        )

    def _match(
        self,
        how: How,
        parent: ChatNode | None,
        num_covered: int,
        text: str,
        chat: Messages | None = None,
        **fields: Any,
    ) -> PromptMatch:
        """Return the match of a text, the end of the render of `chat`. Raises
        ValueError if the text lacks a message after the first `num_covered`.
        """
        # A frame describes a text that begins right after the covered messages. A whole
        # render of a chat with covered messages does not.
        is_tail = parent is not None or num_covered == 0
        frames = self.recorded.frames if is_tail else {}
        messages = chat or self.messages
        index = left_out(self.render, messages, text, num_covered, frames)
        if index is not None:
            raise ValueError(
                f"the chat template drops messages[{index}]: it does not support role "
                f"{messages[index]['role']} at that position; send no such message, or set another "
                "model.chat_template"
            )
        # A later answer was not recorded, or the harness has changed it.
        if self.chain.answers and self.chain.answers[-1][0] >= num_covered:
            how = "edited"
        return PromptMatch(text, how, parent, self.chain, self.prefill, **fields)

    def _neighbor(self, parent: ChatNode) -> str:
        """Return the text before the new text: tokenizers encode a text depending on
        it.
        """
        last = parent.last_ids(NEIGHBOR_TOKENS)
        if last[-1] in self.tokenizer.special_ids:
            last = last[-1:]
        return text_of_ids(self.tokenizer, last)

    def _begun(self, prompt: str) -> str:
        return (
            prompt + close_thought(prompt, self.chain.marks) + self.prefill
            if self.prefill
            else prompt
        )

    def _joined(
        self, at: int, answer: ChatNode | None, whole: str | None
    ) -> PromptMatch | None:
        """Return the match that keeps the answer's ids although the template writes it
        differently.

        `whole`: the template's render of the chat; None if it refuses.
        """
        if answer is None or not self.keeps_thoughts:
            return None
        for joint in self._joints(at, answer):
            lacks_opening = self._lacks_opening(at, answer, joint.trial.before)
            # The template has changed earlier text, for example moved the tools. A
            # server would send the whole render, so the recorded ids are given up.
            # Without a render there is nothing to send instead.
            if lacks_opening is None and whole is not None:
                return None
            try:
                found = self._match(
                    "realigned",
                    answer,
                    at + 1,
                    self._begun(joint.rest),
                    joint.trial.chat,
                    neighbor=joint.neighbor or self._neighbor(answer),
                    shown=joint.trial.shown,
                )
            except ValueError:
                continue
            deviations = self._deviations(
                found, joint, whole, lacks_opening=bool(lacks_opening)
            )
            # the text is the template's own
            is_exact = whole is not None and not deviations
            prompt = Prefix().then(self._begun(whole or "")) if is_exact else None
            return replace(found, deviations=deviations, whole=prompt)
        return None

    def _lacks_opening(self, at: int, answer: ChatNode, before: str) -> bool | None:
        """Return whether the history lacks text that generation prompts wrote, such as
        `<think>`.

        None: the template changed other text since messages[at] was sampled.
        """
        shown = answer.shown
        if (
            shown is not None
            and Prefix().then(before[: shown.length]).place == shown.place
        ):
            return False
        sent = self._earlier(at)
        try:
            prompt = self.render(sent)
            if before.startswith(prompt):
                return False
            closed = self.render(sent, is_open=False)
        except ValueError:
            return None
        before, prompt, closed = (
            drop_marks(text, self.chain.marks) for text in (before, prompt, closed)
        )
        # `opening` is the prompt up to its generation prompt. A history that agrees
        # with it so far lacks only text of the generation prompt. Any earlier
        # difference is another prompt.
        common = os.path.commonprefix([before, prompt])
        opening = os.path.commonprefix([closed, prompt]).rstrip()
        return True if len(common) >= len(opening) else None

    def _deviations(
        self,
        found: PromptMatch,
        joint: Joint,
        whole: str | None,
        *,
        lacks_opening: bool,
    ) -> tuple[Deviation, ...]:
        """Name the deviations of all answers in a prompt."""
        answer = found.parent
        assert answer is not None
        names: list[Deviation] = [*answer.deviations]
        if not names and whole is not None:
            # the same ids may decode to another text: sentencepiece, tokens that take
            # white space
            ids = [
                *answer.all_ids().tolist(),
                *self.tokenizer.encode(found.text, after=found.neighbor),
            ]
            own = list(self.tokenizer.encode(self._begun(whole)))
            decode = partial(text_of_ids, self.tokenizer)
            if ids == own or decode(ids) == decode(own):
                return ()
        if joint.is_other_end:
            names.append("end_token")
        # sentencepiece decodes a space after a mark
        begin, end = map(_squeezed, self.chain.marks)
        sampled = text_of_ids(self.tokenizer, answer.sampled_ids.tolist())
        before, is_closed, _ = _squeezed(sampled).partition(end)
        thought = before.rpartition(begin)[2]
        if is_closed and thought not in _squeezed(whole or ""):
            names.append("thought")
        if lacks_opening:
            names.append("opening")
        return tuple(dict.fromkeys(names or ["form"]))

    def _joints(self, at: int, answer: ChatNode) -> Iterator[Joint]:
        """Yield the joints after the recorded answer messages[at], best first.

        The answer's calls stay, since a template may need them for results.
        """
        end = end_of(self.tokenizer, answer.sampled_ids.tolist())
        if self.messages[at].get("tool_calls"):
            trial = self._around(at, keeps_calls=True)
            # the rest of a call's text is unknown, but not what ends it
            ends = (end, self.tokenizer.call_closing)
            marks = [mark for mark in ends if mark and mark in trial.after]
            if marks:
                _, mark, rest = trial.after.partition(min(marks, key=trial.after.find))
                if end:
                    yield Joint(trial, rest, mark, is_other_end=mark != end)
                else:
                    yield Joint(trial, mark + rest)
        trial = self._around(at, keeps_calls=False)
        if not trial.after:
            return
        # the answer was cut: the template's own end follows the sampled ids
        if not end:
            yield Joint(trial, trial.after)
            return
        begun = trial.after.lstrip()
        space = trial.after.removesuffix(begun)
        ends = (self.tokenizer.closing.lstrip(), end)
        mark = next((mark for mark in ends if mark and begun.startswith(mark)), "")
        said = text_of_ids(self.tokenizer, answer.last_ids(NEIGHBOR_TOKENS + 1)[:-1])
        # without the template's end, white space that was sampled is not written again
        rest = begun.removeprefix(mark) if mark or said.endswith(space) else trial.after
        yield Joint(trial, rest, mark or said, is_other_end=not mark.endswith(end))

    def _around(self, at: int, keeps_calls: bool) -> Trial:
        """Render with a placeholder for messages[at]."""
        stand_in = self._stand_in(self.messages[at], SENTINEL, keeps_calls=keeps_calls)
        shown = [*self._earlier(at), stand_in, *self.messages[at + 1 :]]
        # All calls first. A template that refuses two calls in one answer still shows
        # where to continue after one call.
        for chat in (shown, [_with_one_call(each) for each in shown]):
            with contextlib.suppress(ValueError):
                text = self.render(chat)
                # Every call of the answer contains the sentinel: the text before is
                # that before the first, and the text after follows the last.
                before, _, _ = text.partition(SENTINEL)
                _, found, after = text.rpartition(SENTINEL)
                if not found:
                    break
                # A render without some of the calls says nothing about later renders of
                # the chat.
                is_whole = chat is shown and (
                    keeps_calls or not self.messages[at].get("tool_calls")
                )
                whole = (
                    Prefix().then(text.replace(SENTINEL, PLACEHOLDER))
                    if is_whole
                    else None
                )
                return Trial(chat, before, after, whole)
        return Trial()

    def _earlier(self, at: int) -> list[Message]:
        """Return the messages before messages[at], with placeholders for answers."""
        return [self._stand_in(message) for message in self.messages[:at]]

    def _stand_in(
        self, message: Message, text: str = PLACEHOLDER, *, keeps_calls: bool = True
    ) -> Message:
        """Return a placeholder for an answer; other messages stay.

        An answer with calls has no content, which a template may write after them or
        their results.
        """
        if message.get("role") != "assistant":
            return message
        calls = message.get("tool_calls")
        if not (calls and keeps_calls):
            return {"role": "assistant", "content": text}
        arguments = {"x": text}
        swapped = [
            {**call, "function": {**call["function"], "arguments": arguments}}
            for call in calls
        ]
        return {"role": "assistant", "content": "", "tool_calls": swapped}


def _with_one_call(message: Message) -> Message:
    """Return a message with its first call only."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": calls[:1]} if calls else message


_MARK = re.compile(rf"{SENTINEL}\d+[be]")
WAYS: Sequence[Callable[[str], str]] = (
    str,
    str.strip,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
)
"""Ways in which templates write a content."""
# A session can invent any sequence of roles, and all sessions share the table.
MAX_FRAMES = 256


def left_out(
    render: Callable[[Messages], str],
    messages: Messages,
    text: str,
    start: int,
    frames: dict[Roles, Frame],
) -> int | None:
    """Return the index of the first message from `start` on that is missing from the
    text, answers aside.

    `text`: the end of what `render` writes. A render with marks around the contents
    decides, since a search would not: "18" is in "2018", and SmolLM3 removes the switch
    `/no_think` from a text. It also gives the frame of these messages. A later text
    that is exactly their contents in the same frame needs no render. `frames`: known
    ones, if `text` begins behind messages[start - 1].

    Example: Phi-3's template omits tool results. The chat is the question "In 2018?"
        and the result "18". The marked render has the marks of message 0 only, so the
        result is 1, although the text contains 18.
    """
    roles = [each["role"] for each in messages]
    contents = {
        index: str(message.get("content") or "")
        for index, message in enumerate(messages)
        if index >= start and roles[index] != "assistant"
    }
    if not contents:
        return None
    key = (roles[start - 1] if start else "", *roles[start:])
    texts = contents.values()
    frame = frames.get(key)
    if frame and any(text == _framed(map(way, texts), frame) for way in WAYS):
        return None
    marked = list(messages)
    for index, content in contents.items():
        between_marks = f"{SENTINEL}{index}b{content}{SENTINEL}{index}e"
        marked[index] = {**messages[index], "content": between_marks}
    try:
        written = render(marked)
    except ValueError:  # the template refuses the chat; the text is of a similar one
        squeezed = _squeezed(text)
        for index, content in contents.items():
            if not any(_squeezed(way(content)) in squeezed for way in WAYS):
                return index
        return None
    # A template may write its text in capitals.
    shown = written.casefold()
    num_folded = len(text.casefold())
    for index in contents:
        before, _, after = shown.rpartition(f"{SENTINEL}{index}e")
        num_after = len(_MARK.sub("", after))
        # `text` is the end. Both lengths are of folded text, which is longer for ß.
        if f"{SENTINEL}{index}b" not in before or num_after >= num_folded:
            return index
    whole, *others = _MARK.split(written)
    has_answers = len(contents) < len(messages) - start
    is_once = len(others) == 2 * len(contents)
    if is_once and not has_answers and len(frames) < MAX_FRAMES:
        # `whole` may begin with covered messages. Only its end belongs to `text`.
        num_head = len(text) - len("".join(others))
        frames[key] = (whole[max(0, len(whole) - num_head) :], *others[1::2])
    return None


def _framed(contents: Iterable[str], frame: Frame) -> str:
    head, *others = frame
    return head + "".join(
        content + after for content, after in zip(contents, others, strict=True)
    )


def _squeezed(text: str) -> str:
    return "".join(text.split()).casefold()
