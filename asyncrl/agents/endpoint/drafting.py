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
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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
from asyncrl.messages.work import ChatRenderer, Rendered

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
    """A chat that is not planned yet: `text` is to be encoded behind the ids of `parent`, or is the whole
    prompt. `asked`: all of the text that the prompt's ids spell, None if the template writes another.
    `prefill`: the end of the text, with which the answer begins.

    The rest is for a later chat that begins with these `messages`: what the template writes for them, unless
    that was of no use, and the tools and settings as they were given.
    """

    text: str
    how: How
    parent: ChatNode | None
    chain: Chain
    asked: PromptText | None
    messages: Messages
    rendered: Rendered | None
    given: bytes
    prefill: str

    def to_go_on_from(self) -> Draft:
        """The same, for a later chat alone: without the texts that it would not read."""
        rendered = self.rendered
        if rendered is not None and rendered.state is None:
            rendered = Rendered("")
        return replace(self, text="", rendered=rendered)


@dataclass(frozen=True, slots=True, eq=False)
class Chat:
    """What is drafted. `before`: the draft of a chat whose messages these begin with, the very same ones,
    with the same tools and settings.
    """

    messages: Messages
    tools: Messages | None
    settings: Mapping[str, Any] | None
    given: bytes
    prefill: Prefill
    thinking: tuple[str, str]
    chain: Chain
    before: Draft | None

    @property
    def rendered_before(self) -> Rendered | None:
        return self.before.rendered if self.before else None

    def begin(self, prompt: str) -> str:
        """What is written behind the prompt, for the model to go on from: the prefill, which is no part of a
        thought.
        """
        prefill = self.prefill(prompt)
        return prefill and close_thought(prompt, self.thinking) + prefill

    def draft(
        self,
        text: str,
        how: How,
        parent: ChatNode | None,
        rendered: Rendered | None,
        *,
        prompt: str,
        is_whole: bool,
    ) -> Draft:
        """`prompt`: what the template wrote, its end at least. `is_whole`: the ids of the prompt spell what
        was rendered.
        """
        asked = PromptText.of(rendered, self.begin(prompt)) if is_whole and rendered else None
        prefill = self.prefill(prompt)
        return Draft(text, how, parent, self.chain, asked, self.messages, rendered, self.given, prefill)


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

    def longest(self, rendered: Rendered, begin: str) -> ChatNode | None:
        """The one with the longest text that the chat's begins with, `begin` behind it, and that is not
        shorter than rendered.num_before.
        """
        text, start = rendered.text + begin, rendered.num_before
        hashed, at = rendered.before.copy(), start
        found: ChatNode | None = None
        lengths = tuple(self._lengths)
        most = bisect_right(lengths, start + len(text))
        for length in lengths[bisect_left(lengths, start) : most]:
            hashed.update(text[at - start : length - start].encode())
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

        If the known completion is the chat's last answer and has no text, its ids never spell what the
        template writes: where the next chat could not go on from this one's text either, that render is
        saved. After an earlier one the text may go on from a later answer, to the same chat with other tools.
        """
        (known_at, known), rendered, by_text = self._known(chat), None, None
        before = chat.rendered_before
        can_go_on = chat.before is not None and (before is None or before.state is not None)
        if known is None or known.text is not None or can_go_on or known_at < chat.chain.answers[-1][0]:
            rendered = self._render_if_taken(chat, known is not None)
            by_text = None if rendered is None else self._longest(chat, rendered)
        is_later = known is not None and known_at < chat.chain.answers[-1][0]
        if by_text is None and rendered is not None and rendered.num_before and is_later:
            rendered = self._render(chat.messages, chat)  # the later answer's text may end before what is new
            by_text = self._longest(chat, rendered)
        if known is not None and (by_text is None or by_text.num_messages <= known_at + 1):
            found = self._from_known(chat, known_at, known, rendered)
            if found is not None:
                return found
        if rendered is None or (by_text is None and rendered.num_before):
            rendered = self._render(chat.messages, chat)
            by_text = self._longest(chat, rendered)
        if by_text is not None:
            found = self._from_text(chat, by_text, by_text.num_messages, rendered, known_at)
            if found is not None:
                return found
        whole = self._render(chat.messages, chat) if rendered.num_before else rendered
        index = left_out(chat.messages, whole.text, self._thinking)
        if index is not None:
            what = f"the chat template leaves out what messages[{index}] says"
            rule = f"it has no place there for role {chat.messages[index]['role']}"
            way_out = "send no such message, or set model.chat_template to one that writes it"
            raise ValueError(f"{what}: {rule}; {way_out}")
        how = _how("extended", chat, 0, known_at)
        text = whole.text + chat.begin(whole.text)
        return chat.draft(text, how, None, whole, prompt=whole.text, is_whole=True)

    def _longest(self, chat: Chat, rendered: Rendered) -> ChatNode | None:
        return self._recorded.longest(rendered, chat.begin(rendered.text))

    def _known(self, chat: Chat) -> tuple[int, ChatNode | None]:
        """The last answer that was recorded, by the messages: its index and its completion, or -1."""
        for index, key in reversed(chat.chain.answers):
            node = self._recorded.answer(key)
            if node is not None:
                return index, node
        return -1, None

    def _from_known(self, chat: Chat, at: int, node: ChatNode, rendered: Rendered | None) -> Draft | None:
        """What follows the recorded answer `messages[at]`. None: there is no place to cut."""
        if node.text is not None and rendered is not None:
            if rendered.num_before > node.text[0]:
                rendered = self._render(chat.messages, chat)
            found = self._from_text(chat, node, at + 1, rendered, at)
            if found is not None:
                return found
        for rest in self._cuts(chat, at, node):
            if self._has_all(chat.messages[at + 1 :], rest):
                how = _how("realigned", chat, at + 1, at)
                kept = rendered or chat.rendered_before
                text = rest + chat.begin(rest)
                return chat.draft(text, how, node, kept, prompt=rest, is_whole=False)
        return None

    def _from_text(
        self, chat: Chat, node: ChatNode, num_covered: int, rendered: Rendered, known_at: int
    ) -> Draft | None:
        """What follows the text of this completion, if the chat's text begins with it."""
        assert node.text is not None, "it was found by its text"
        (num_chars, digest), whole = node.text, rendered.text + chat.begin(rendered.text)
        end = num_chars - rendered.num_before
        hashed = rendered.before.copy()
        hashed.update(whole[:end].encode())
        if not 0 <= end <= len(whole) or hashed.digest() != digest:
            return None
        if not self._has_all(chat.messages[num_covered:], whole[end:]):
            return None
        how = _how("extended", chat, num_covered, known_at)
        return chat.draft(whole[end:], how, node, rendered, prompt=rendered.text, is_whole=True)

    def _has_all(self, messages: Messages, text: str) -> bool:
        """Whether the text holds what tools, users and the system say; a template may leave out answers."""
        said = [message for message in messages if message["role"] != "assistant"]
        return left_out(said, text, self._thinking) is None

    def _render_if_taken(self, chat: Chat, is_known: bool) -> Rendered | None:
        """The chat. None if its template refuses it, and it may still go on from a known answer: what the
        model has said, such as several calls, is not for the template to refuse.
        """
        try:
            return self._render(chat.messages, chat, chat.rendered_before)
        except ValueError:
            if not is_known:
                raise
            return None

    def _render(self, messages: Messages, chat: Chat, after: Rendered | None = None) -> Rendered:
        return self._renderer.render_on(messages, tools=chat.tools, settings=chat.settings, after=after)

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
        is_new = chat.before is not None and at >= len(chat.before.messages)
        with contextlib.suppress(ValueError):
            return self._render(shown, chat, chat.rendered_before if is_new else None).text
        single = [
            {**each, "tool_calls": each["tool_calls"][:1]} if each.get("tool_calls") else each
            for each in shown
        ]
        with contextlib.suppress(ValueError):
            return self._render(single, chat).text if single != shown else ""
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
