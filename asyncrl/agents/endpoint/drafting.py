"""Which recorded completion a chat goes on from, and what its prompt has behind that one's ids. Pure.

Recorded ids are never made from text again: the template's text of a longer chat is cut where they end.
- It begins with what a completion was asked and sampled, to the letter: what follows is new (extended).
- The messages say that it goes on from a completion, but the template writes the history otherwise (strips
  thoughts, renders a tool call its own way, says the date): the answer is replaced by a sentinel, and what
  follows the sentinel is new (realigned).
- No completion is found, or there is no place to cut: the chat is rendered as a whole.
None of these ways is taken if a text that came after the answer would not be in the prompt.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.agents.endpoint.branches import ChatNode
from asyncrl.agents.endpoint.chats import (
    NUMBER,
    SENTINEL,
    Chain,
    Message,
    Messages,
    PromptText,
    close_thought,
    left_out,
    stand_in,
)
from asyncrl.messages.work import ChatRenderer, new_hash

How = Literal["new", "extended", "realigned", "edited", "uncut"]
"""How the prompt of a call was made. new: the session's first prompt. extended: recorded ids up to the chat's
last answer, and then new ones; their text is what the template writes for the whole chat. realigned: the
same, but the template would write the history differently (thoughts left out, white space merged, tool calls
rendered its own way).

A branch begins with the other two. edited: the chat's last answer was not recorded, or was edited. uncut: it
was recorded, but the template offers no place to go on from it.
"""

Prefill = Callable[[str], str]
"""What an answer is begun with, by the end of the prompt before it."""


def no_prefill(prompt: str) -> str:
    return ""


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A chat before planning: `text` is encoded after the ids of `parent`, or is the whole prompt. `asked`:
    the whole text of the prompt's ids, None if the template writes another. `prefill`: the end of the text,
    with which the answer begins.
    """

    text: str
    how: How
    parent: ChatNode | None
    chain: Chain
    asked: PromptText | None
    messages: Messages
    prefill: str


@dataclass(frozen=True, slots=True, eq=False)
class Chat:
    """A chat to draft."""

    messages: Messages
    tools: Messages | None
    settings: Mapping[str, Any] | None
    prefill: Prefill
    thinking: tuple[str, str]
    chain: Chain

    def begin(self, prompt: str) -> str:
        """What is written behind the prompt, for the model to go on from: the prefill, which is no part of a
        thought.
        """
        prefill = self.prefill(prompt)
        return prefill and close_thought(prompt, self.thinking) + prefill

    def draft(self, text: str, how: How, parent: ChatNode | None, *, prompt: str, is_whole: bool) -> Draft:
        """Return the draft. `prompt`: what the template wrote, its end at least. `is_whole`: `prompt` is all
        of it, and the ids of the prompt spell it.
        """
        asked = PromptText.of(prompt + self.begin(prompt)) if is_whole else None
        return Draft(text, how, parent, self.chain, asked, self.messages, self.prefill(prompt))


class Recorded:
    """The completions of a session, by what a later chat may have in common with them. Reading may run in a
    thread beside add().
    """

    def __init__(self) -> None:
        self._by_chat: dict[bytes, ChatNode] = {}
        self._settled: dict[bytes, bytes] = {}
        self._by_text: dict[tuple[int, bytes], ChatNode] = {}
        self._lengths: list[int] = []  # of the texts, in order

    def add(self, node: ChatNode, chain: Chain, other_forms: Iterable[Message]) -> None:
        """It answers the chat with this chain, and may come back in `other_forms`. The same chat or text
        twice: one of them, whichever came first; the one that was given as it comes back before all others.
        """
        assert node.chat is not None, "it answers a chat"
        key = node.chat.key
        known = self._by_chat.get(key)
        if known is None or known.chat is None or known.chat.key != key or _rank(node) < _rank(known):
            self._by_chat[key], self._settled[key] = node, key
        for form in other_forms:
            other = chain.key_with(form)
            known = self._by_chat.setdefault(other, node)
            self._settled.setdefault(other, key)  # stays, for the chats that have gone on from it
            if known.chat is not None and known.chat.key != other and _rank(node) < _rank(known):
                self._by_chat[other] = node
        if (place := node.chat.text) is not None:
            same = self._by_text.get(place)
            if same is None:
                insort(self._lengths, place[0])
            if same is None or _rank(node) < _rank(same):
                self._by_text[place] = node

    def keep(self, nodes: Collection[ChatNode]) -> None:
        """Forget all others."""
        self._by_chat = {key: known for key, known in self._by_chat.items() if known in nodes}
        self._settled = {key: settled for key, settled in self._settled.items() if key in self._by_chat}
        self._by_text = {place: known for place, known in self._by_text.items() if known in nodes}
        self._lengths = sorted(length for length, _ in self._by_text)

    def settled(self, key: bytes) -> bytes | None:
        """Key of the chat with this key, in the form that the harness got its answers in. Of two answers that
        come back as one it is that of the first.
        """
        return self._settled.get(key)

    def answer(self, key: bytes) -> ChatNode | None:
        """The completion that a chat with this key ends with."""
        return self._by_chat.get(key)

    def longest(self, text: str) -> ChatNode | None:
        """Return the completion with the longest text that `text` begins with."""
        hashed = new_hash()
        found: ChatNode | None = None
        at = 0
        lengths = tuple(self._lengths)
        for length in lengths[: bisect_right(lengths, len(text))]:
            hashed.update(text[at:length].encode())
            at = length
            found = self._by_text.get((length, hashed.digest()), found)
        return found


def _rank(node: ChatNode) -> tuple[Any, ...]:
    """Of equal completions the first is taken, whichever came first."""
    return node.order[1], node.content


class Drafting:
    """Drafts the chats of one session."""

    def __init__(self, renderer: ChatRenderer, recorded: Recorded, thinking: tuple[str, str]) -> None:
        self._renderer, self._recorded, self._thinking = renderer, recorded, thinking

    def draft(self, chat: Chat) -> Draft:
        """What the messages go on from, unless the text goes on from a later answer. Raises ValueError if the
        template refuses the chat, or leaves out what a message says.
        """
        known_at, known = self._known(chat)
        text = self._render_if_taken(chat, known is not None)
        by_text = None if text is None else self._recorded.longest(text + chat.begin(text))
        if known is not None and (by_text is None or by_text.num_messages <= known_at + 1):
            found = self._from_known(chat, known_at, known, text)
            if found is not None:
                return found
        if text is None:
            text = self._render(chat.messages, chat)  # raises what the template says
        if by_text is not None:
            found = self._from_text(chat, by_text, by_text.num_messages, text, known_at)
            if found is not None:
                return found
        index = left_out(chat.messages, text, self._thinking)
        if index is not None:
            what = f"the chat template leaves out what messages[{index}] says"
            rule = f"it has no place there for role {chat.messages[index]['role']}"
            way_out = "send no such message, or set model.chat_template to one that writes it"
            raise ValueError(f"{what}: {rule}; {way_out}")
        how = _how("extended", chat, 0, known_at)
        return chat.draft(text + chat.begin(text), how, None, prompt=text, is_whole=True)

    def _known(self, chat: Chat) -> tuple[int, ChatNode | None]:
        """The last answer that was recorded, by the messages: its index and its completion, or -1."""
        for index, key in reversed(chat.chain.answers):
            node = self._recorded.answer(key)
            if node is not None:
                return index, node
        return -1, None

    def _from_known(self, chat: Chat, at: int, node: ChatNode, text: str | None) -> Draft | None:
        """Return what follows the recorded answer `messages[at]`; None if there is no place to cut."""
        if node.text is not None and text is not None:
            found = self._from_text(chat, node, at + 1, text, at)
            if found is not None:
                return found
        for rest in self._cuts(chat, at, node):
            if self._has_all(chat.messages[at + 1 :], rest):
                how = _how("realigned", chat, at + 1, at)
                return chat.draft(rest + chat.begin(rest), how, node, prompt=rest, is_whole=False)
        return None

    def _from_text(
        self, chat: Chat, node: ChatNode, num_covered: int, text: str, known_at: int
    ) -> Draft | None:
        """Return what follows the text of this completion; None if the chat's text does not begin with it."""
        assert node.text is not None, "it was found by its text"
        num_chars, digest = node.text
        whole = text + chat.begin(text)
        if num_chars > len(whole) or new_hash(whole[:num_chars].encode()).digest() != digest:
            return None
        if not self._has_all(chat.messages[num_covered:], whole[num_chars:]):
            return None
        how = _how("extended", chat, num_covered, known_at)
        return chat.draft(whole[num_chars:], how, node, prompt=text, is_whole=True)

    def _has_all(self, messages: Messages, text: str) -> bool:
        """Whether the text holds what tools, users and the system say; a template may leave out answers."""
        said = [message for message in messages if message["role"] != "assistant"]
        return left_out(said, text, self._thinking) is None

    def _render_if_taken(self, chat: Chat, is_known: bool) -> str | None:
        """Return the chat's text. None if its template refuses it and the chat may still continue a known
        answer: the template cannot refuse what the model has said, such as several calls.
        """
        try:
            return self._render(chat.messages, chat)
        except ValueError:
            if not is_known:
                raise
            return None

    def _render(self, messages: Messages, chat: Chat) -> str:
        return self._renderer.render(messages, tools=chat.tools, settings=chat.settings)

    def _cuts(self, chat: Chat, at: int, node: ChatNode) -> Iterator[str]:
        """What may follow the recorded answer messages[at], generation prompt included; the best first.

        An answer's calls stay, since a template may write their results by them. What then stands between the
        last argument and the end of the answer closes the call: it is found at the end of what was sampled,
        unless the call was written in another form.
        """
        ids, end = node.sampled_ids.tolist(), ""
        if ids and ids[-1] in self._renderer.end_ids:  # the end of the turn was sampled
            end = self._renderer.decode(ids[-1:], skip_special_tokens=False)
        if calls := chat.messages[at].get("tool_calls"):
            _, found, behind = self._swapped(chat, at, stand_in(calls)).rpartition(str(NUMBER))
            sampled = self._renderer.decode(ids, skip_special_tokens=False).removesuffix(end)
            closed = behind[_closing(sampled, behind) :] if found else ""
            if self._is_special(closed):  # all of what closes the call was found
                yield _after_end(closed, end)
            if found and end and end in behind:
                yield behind.partition(end)[2]
        _, found, after = self._swapped(chat, at, stand_in()).partition(SENTINEL)
        if found and SENTINEL not in after:
            yield _after_end(after, end)
        if calls and len(closed) < len(behind):
            yield _after_end(closed, end)

    def _is_special(self, text: str) -> bool:
        """Whether it begins with a special token, as the end of a turn does, and not that of a call."""
        ids = self._renderer.encode(text.lstrip()[:MAX_CLOSING])
        return bool(ids) and not self._renderer.decode(ids[:1])

    def _swapped(self, chat: Chat, at: int, answer: Message) -> str:
        """The chat's text with another answer in place of messages[at], "" if the template refuses it; with
        one call an answer, if it takes no more.
        """
        shown = [*chat.messages[:at], answer, *chat.messages[at + 1 :]]
        with contextlib.suppress(ValueError):
            return self._render(shown, chat)
        single = [
            {**each, "tool_calls": each["tool_calls"][:1]} if each.get("tool_calls") else each
            for each in shown
        ]
        with contextlib.suppress(ValueError):
            return self._render(single, chat) if single != shown else ""
        return ""


def _how(how: How, chat: Chat, num_covered: int, known_at: int) -> How:
    """`how`, if the recorded ids hold the chat's last answer; else why they do not. `num_covered`: messages
    that they hold; `known_at`: index of the last answer that was recorded.
    """
    last = chat.chain.answers[-1][0] if chat.chain.answers else -1
    if last < num_covered > 0:
        return how
    return "uncut" if known_at >= num_covered else "edited"


MAX_CLOSING = 200
"""Characters that close a tool call, at most."""


def _closing(sampled: str, behind: str) -> int:
    """Number of characters at the beginning of `behind` that `sampled` ends with; white space does not count
    if it differs.
    """
    squeezed = "".join(sampled[-2 * MAX_CLOSING :].split())
    for sampled_end, squeeze in ((sampled.rstrip(), str), (squeezed, lambda text: "".join(text.split()))):
        for length in range(min(len(behind), MAX_CLOSING), 0, -1):
            head = behind[:length]
            if not head[-1].isspace() and sampled_end.endswith(squeeze(head)):
                return length
    return 0


def _after_end(text: str, end: str) -> str:
    """Without the end of the turn, which the template writes though it was sampled."""
    between, found, after = text.partition(end) if end else ("", "", "")
    return after if found and not between.strip() else text
