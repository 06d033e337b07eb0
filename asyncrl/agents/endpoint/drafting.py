"""Finds the recorded completion that a chat continues, and the prompt text after its ids. Pure.

Recorded ids are never encoded again: the template's text of a longer chat is cut at their end.

- extended: the text begins with the completion's prompt and sampled text, verbatim.
- realigned: the messages continue a completion, but the template rewrites the history (strips thoughts,
  reformats calls). A sentinel replaces the answer; the text after it is new.
- Otherwise, or if a cut would lose a message after the answer, the whole chat is rendered.
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
"""Origin of a call's prompt.

new: the session's first prompt. extended, realigned: recorded ids up to the chat's last answer, then new ids
(see above). The others start a branch. edited: the last answer was not recorded, or was edited. uncut: it was
recorded, but the text has no place to cut.
"""

Prefill = Callable[[str], str]
"""Returns the beginning of an answer for the end of its prompt."""


def no_prefill(prompt: str) -> str:
    return ""


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A chat before planning. `text`: encoded after the ids of `parent`, or the whole prompt. `asked`: text
    of all prompt ids, None if the template writes another. `prefill`: beginning of the answer, at the end of
    the text.
    """

    text: str
    how: How
    parent: ChatNode | None
    chain: Chain
    asked: PromptText | None
    num_messages: int
    prefill: str


@dataclass(frozen=True, slots=True, eq=False)
class Chat:
    messages: Messages
    tools: Messages | None
    settings: Mapping[str, Any] | None
    prefill: Prefill
    thinking: tuple[str, str]
    chain: Chain

    def begin(self, prompt: str) -> str:
        prefill = self.prefill(prompt)
        return prefill and close_thought(prompt, self.thinking) + prefill

    def draft(self, text: str, how: How, parent: ChatNode | None, *, prompt: str, is_whole: bool) -> Draft:
        """`prompt`: at least the end of the template's text. `is_whole`: it is the text of the prompt ids."""
        asked = PromptText.of(prompt + self.begin(prompt)) if is_whole else None
        return Draft(text, how, parent, self.chain, asked, len(self.messages), self.prefill(prompt))


class Recorded:
    """A session's completions by chat and text. Reads may run in a thread in parallel with add()."""

    def __init__(self) -> None:
        self._by_chat: dict[bytes, ChatNode] = {}
        self._settled: dict[bytes, bytes] = {}
        self._by_text: dict[tuple[int, bytes], ChatNode] = {}
        self._lengths: list[int] = []  # of the texts, in order

    def add(self, node: ChatNode, chain: Chain, other_forms: Iterable[Message]) -> None:
        """Index an answer to `chain`, which may return in `other_forms`. The choice among equal completions
        does not depend on arrival; delivered forms precede others.
        """
        assert node.chat is not None, "it answers a chat"
        key = node.chat.key
        known = self._by_chat.get(key)
        if known is None or known.chat is None or known.chat.key != key or _rank(node) < _rank(known):
            self._by_chat[key], self._settled[key] = node, key
        for form in other_forms:
            other = chain.key_with(form)
            known = self._by_chat.setdefault(other, node)
            self._settled.setdefault(other, key)  # kept for the chats that continue it
            if known.chat is not None and known.chat.key != other and _rank(node) < _rank(known):
                self._by_chat[other] = node
        if (place := node.chat.text) is not None:
            same = self._by_text.get(place)
            if same is None:
                insort(self._lengths, place[0])
            if same is None or _rank(node) < _rank(same):
                self._by_text[place] = node

    def keep(self, nodes: Collection[ChatNode]) -> None:
        self._by_chat = {key: known for key, known in self._by_chat.items() if known in nodes}
        self._settled = {key: settled for key, settled in self._settled.items() if key in self._by_chat}
        self._by_text = {place: known for place, known in self._by_text.items() if known in nodes}
        self._lengths = sorted(length for length, _ in self._by_text)

    def settled(self, key: bytes) -> bytes | None:
        """Return the key of this chat with its answers as delivered."""
        return self._settled.get(key)

    def answer(self, key: bytes) -> ChatNode | None:
        return self._by_chat.get(key)

    def longest(self, text: str) -> ChatNode | None:
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
    return node.order[1], node.content


class Drafting:
    def __init__(self, renderer: ChatRenderer, recorded: Recorded, thinking: tuple[str, str]) -> None:
        self._renderer, self._recorded, self._thinking = renderer, recorded, thinking

    def draft(self, chat: Chat) -> Draft:
        """Continue the last recorded answer in the messages, or a later one in the text. Raises ValueError if
        the template refuses the chat or omits a message.
        """
        known_at, known = self._known(chat)
        text = self._render_if_taken(chat, known is not None)
        by_text = None if text is None else self._recorded.longest(text + chat.begin(text))
        if known is not None and (by_text is None or by_text.num_messages <= known_at + 1):
            found = self._from_known(chat, known_at, known, text)
            if found is not None:
                return found
        if text is None:
            text = self._render(chat.messages, chat)  # raises the template's error
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
        for index, key in reversed(chat.chain.answers):
            node = self._recorded.answer(key)
            if node is not None:
                return index, node
        return -1, None

    def _from_known(self, chat: Chat, at: int, node: ChatNode, text: str | None) -> Draft | None:
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
        said = [message for message in messages if message["role"] != "assistant"]
        return left_out(said, text, self._thinking) is None

    def _render_if_taken(self, chat: Chat, is_known: bool) -> str | None:
        """Return None if the template refuses the chat but a known answer may be continued."""
        try:
            return self._render(chat.messages, chat)
        except ValueError:
            if not is_known:
                raise
            return None

    def _render(self, messages: Messages, chat: Chat) -> str:
        return self._renderer.render(messages, tools=chat.tools, settings=chat.settings)

    def _cuts(self, chat: Chat, at: int, node: ChatNode) -> Iterator[str]:
        """Yield candidates for the text after the recorded answer messages[at], generation prompt included,
        best first.

        The answer's calls stay, since a template may use them to write results. The text that closes the last
        call is found at the end of the sampled text, unless the call was written in another form.
        """
        ids, end = node.sampled_ids.tolist(), ""
        if ids and ids[-1] in self._renderer.end_ids:  # the end of the turn was sampled
            end = self._renderer.decode(ids[-1:], skip_special_tokens=False)
        if calls := chat.messages[at].get("tool_calls"):
            _, found, behind = self._swapped(chat, at, stand_in(calls)).rpartition(str(NUMBER))
            sampled = self._renderer.decode(ids, skip_special_tokens=False).removesuffix(end)
            closed = behind[_closing(sampled, behind) :] if found else ""
            if self._is_special(closed):  # all of the closing text was found
                yield _after_end(closed, end)
            if found and end and end in behind:
                yield behind.partition(end)[2]
        _, found, after = self._swapped(chat, at, stand_in()).partition(SENTINEL)
        if found and SENTINEL not in after:
            yield _after_end(after, end)
        if calls and len(closed) < len(behind):
            yield _after_end(closed, end)

    def _is_special(self, text: str) -> bool:
        ids = self._renderer.encode(text.lstrip()[:MAX_CLOSING])
        return bool(ids) and not self._renderer.decode(ids[:1])

    def _swapped(self, chat: Chat, at: int, answer: Message) -> str:
        """Render the chat with another answer at messages[at], if needed with one call per answer; "" if the
        template refuses.
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
    """Return `how` if the recorded ids contain the chat's last answer, else the reason. `num_covered`:
    messages in those ids; `known_at`: index of the last recorded answer.
    """
    last = chat.chain.answers[-1][0] if chat.chain.answers else -1
    if last < num_covered > 0:
        return how
    return "uncut" if known_at >= num_covered else "edited"


MAX_CLOSING = 200


def _closing(sampled: str, behind: str) -> int:
    """Return the length of the longest prefix of `behind` that `sampled` ends with, up to white space."""
    squeezed = "".join(sampled[-2 * MAX_CLOSING :].split())
    for sampled_end, squeeze in ((sampled.rstrip(), str), (squeezed, lambda text: "".join(text.split()))):
        for length in range(min(len(behind), MAX_CLOSING), 0, -1):
            head = behind[:length]
            if not head[-1].isspace() and sampled_end.endswith(squeeze(head)):
                return length
    return 0


def _after_end(text: str, end: str) -> str:
    """Strip the end of the turn, already sampled."""
    between, found, after = text.partition(end) if end else ("", "", "")
    return after if found and not between.strip() else text
