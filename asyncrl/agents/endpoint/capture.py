"""The exact tokens of one session, as a tree of completions. Pure: no HTTP, no engine."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

import numpy as np

from asyncrl.agents.endpoint.branches import Node, make_rollout
from asyncrl.errors import RolloutFailure
from asyncrl.messages.records import Completion, Outcome, Rollout
from asyncrl.messages.work import ChatRenderer

Message = Mapping[str, Any]
Messages = Sequence[Message]

How = Literal["new", "extended", "realigned", "forked"]
"""How the prompt of a call was made. new: the session's first prompt. extended: recorded ids and then new
ones; their text is what the template writes for the whole chat. realigned: also recorded ids and then new
ones, but the template would write the history differently (reasoning stripped, white space merged, tool calls
rendered its own way). forked: the whole chat rendered again, because its history was not recorded, or was
edited.
"""


@dataclass(slots=True)
class GatewayStats:
    """`calls` were planned so far, and `extended`, `realigned` or `forked` (the rest began a session);
    `refused` counts errors by status. Tokens are of calls that were sampled to their end. `in_flight` is of
    now.
    """

    calls: int = 0
    extended: int = 0
    realigned: int = 0
    forked: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    in_flight: int = 0
    refused: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A chat that is not planned yet: `text` is to be encoded behind the ids of `parent`, or is the whole
    prompt. `asked`: all of the text that the prompt's ids spell, None if the template writes another.
    """

    text: str
    parent: Node | None
    chain: Chain
    asked: PromptText | None


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A call that may be sent: `prompt_ids` begin with the `num_reused` that are the parent's. `number`
    counts the session's calls. `draft`: None of a prompt of ids.
    """

    number: int
    how: How
    prompt_ids: tuple[int, ...]
    num_reused: int
    parent: Node | None
    draft: Draft | None


class Capture:
    """Records the ids that were sent and sampled, and finds the completion that a new call continues.

    Life: draft -> plan -> the engine samples -> record once for each choice that the harness got, or never ->
        ... -> rollout. Any number of calls may be planned before one of them is recorded.
    Memory: a node holds what its call added and sampled, 4 bytes an id and a logprob; what came before is its
        parents'.
    Invariant: a planned prompt that reuses a node's ids begins with exactly what that node's call sent and
        sampled (plan), so a branch of the rollout is at each sampled token what the engine had before it
        (make_rollout).
    """

    def __init__(self, renderer: ChatRenderer, counts: GatewayStats) -> None:
        self._renderer, self._counts = renderer, counts
        self._nodes: dict[str, Node] = {}  # by name
        self._by_chat: dict[bytes, Node] = {}
        self._num_calls = 0
        self._has_root = False
        self._gone_on_from: set[Node] = set()
        self.num_branch_tokens = 0
        """Tokens of all branches that a rollout would have now: a prefix that branches share counts in each
        of them.
        """

    @property
    def num_completions(self) -> int:
        return len(self._nodes)

    def draft(self, messages: Messages, tools: Messages | None, *, prefill: str = "") -> Draft:
        """The text of a chat, or of what is new where it goes on from a recorded answer. It changes nothing,
        and may run in a thread beside record().

        `prefill` is text after the generation prompt that the model goes on from. Raises ValueError if the
        template refuses the chat, it is no Unicode, or nested too deep.
        """
        try:
            chain = Chain(messages, tools)
            for index, key in reversed(chain.answers):
                parent = self._by_chat.get(key)
                if parent is None or index + 1 == len(messages):
                    continue
                found = self._continue(parent, chain, messages, tools, index, prefill)
                if found is not None:
                    return found
                break
            text = self._renderer.render(messages, tools=tools) + prefill
            return Draft(text, None, chain, PromptText.of(text))
        except RecursionError:
            raise ValueError("the messages or tools are nested too deep") from None

    def plan(self, draft: Draft, ids: tuple[int, ...]) -> Planned:
        """The prompt of a drafted chat; `ids` are those of the draft's text."""
        how: How = "realigned" if draft.asked is None else "extended"
        return self._planned(how, ids, draft.parent, draft)

    def plan_ids(self, prompt_ids: Sequence[int]) -> Planned:
        """A prompt of ids: it goes on from the longest recorded prompt and completion that it begins with."""
        ids = np.asarray(prompt_ids, dtype=np.int32)
        ends: dict[Node | None, int] = {None: 0}
        for node in sorted(self._nodes.values(), key=lambda node: node.order):  # parents come first
            start = ends.get(node.parent)
            if start is not None and np.array_equal(ids[start : start + len(node.ids)], node.ids):
                ends[node] = start + len(node.ids)
        parent = max(ends, key=lambda node: ends[node])  # of equal ones the first
        return self._planned("extended", tuple(prompt_ids[ends[parent] :]), parent, None)

    def record(
        self, planned: Planned, completion: Completion, message: Message, name: str, *, choice: int = 0
    ) -> None:
        """The harness got this answer: `message` is the assistant message as it got it."""
        assert name not in self._nodes, f"{name} is recorded already"
        added = planned.prompt_ids[planned.num_reused :]
        node = Node(
            name=name,
            order=(planned.number, choice),
            parent=planned.parent,
            ids=np.array(added + completion.token_ids, dtype=np.int32),
            num_added=len(added),
            logprobs=np.array(completion.behaviour_logprobs, dtype=np.float32),
            version_spans=completion.version_spans,
            is_truncated=completion.finish_reason == "length",
            num_interruptions=completion.num_interruptions,
            asked=planned.draft.asked if planned.draft else None,
        )
        self._nodes[name] = node
        self._count_branch(node)
        if planned.draft is not None:
            key = planned.draft.chain.key_with(message)
            known = self._by_chat.get(key)
            rank = (choice, node.content)  # the same answer twice: one of them, whichever came first
            if known is None or rank < (known.order[1], known.content):
                self._by_chat[key] = node

    def last_text(self) -> str:
        """Text of the completion that was asked for last. Raises RolloutFailure if there is none."""
        if not self._nodes:
            way_out = "let it call the model with its session's key, or return a reward."
            raise RolloutFailure("the harness ended without one completion or a reward", way_out=way_out)
        last = max(self._nodes.values(), key=lambda node: node.order)
        return self._renderer.decode(last.sampled_ids.tolist())

    def rollout(self, sample_index: int, outcome: Outcome, reward: float) -> Rollout:
        """Everything recorded, by branches. Raises RolloutFailure if that is nothing, or the outcome does not
        fit it.
        """
        return make_rollout(self._nodes.values(), sample_index, outcome, reward)

    def _count_branch(self, node: Node) -> None:
        """A node with sampled tokens makes a branch longer, or is the end of one more."""
        if not node.num_sampled:
            return
        self.num_branch_tokens += node.num_path_ids
        ancestor = node.parent
        while ancestor is not None and not ancestor.num_sampled:
            ancestor = ancestor.parent
        if ancestor is not None and ancestor not in self._gone_on_from:
            self._gone_on_from.add(ancestor)
            self.num_branch_tokens -= ancestor.num_path_ids

    def _planned(self, how: How, added: tuple[int, ...], parent: Node | None, draft: Draft | None) -> Planned:
        reused: list[int] = [] if parent is None else parent.all_ids().tolist()
        if parent is None:
            how, self._has_root = ("forked" if self._has_root else "new"), True
        planned = Planned(self._num_calls, how, (*reused, *added), len(reused), parent, draft)
        self._num_calls += 1
        self._counts.calls += 1
        if how != "new":
            setattr(self._counts, how, getattr(self._counts, how) + 1)
        return planned

    # Recorded ids are never made from text again: the template's text of a longer chat is cut where they end.
    # - Its text begins with what was asked and sampled, to the letter: what follows is new.
    # - It writes the history otherwise (strips reasoning, renders a tool call its own way, says the date):
    #   the answer is replaced by a sentinel, and what follows the sentinel is new.
    # - It refuses the sentinel, or swallows it: there is no place to cut.

    def _continue(
        self, parent: Node, chain: Chain, messages: Messages, tools: Messages | None, at: int, prefill: str
    ) -> Draft | None:
        """What follows the recorded answer `messages[at]`, generation prompt and prefill included;
        None: there is no place to cut.

        If the parent has no `asked`, its text never is what the template writes, so one render is saved.
        """
        renderer, asked, sampled_ids = self._renderer, parent.asked, parent.sampled_ids.tolist()
        if asked is not None:
            text = renderer.render(messages, tools=tools) + prefill
            sampled = renderer.decode(sampled_ids, skip_special_tokens=False)
            if text.startswith(sampled, asked.num_chars) and asked.begins(text):
                return Draft(text[asked.num_chars + len(sampled) :], parent, chain, PromptText.of(text))
        stand_in = {"role": "assistant", "content": SENTINEL}
        try:
            shown = [*messages[:at], stand_in, *messages[at + 1 :]]
            _, rest = renderer.render(shown, tools=tools).split(SENTINEL)
        except ValueError:
            return None
        if sampled_ids and sampled_ids[-1] in renderer.end_ids:  # the end of the turn was sampled
            end = renderer.decode(sampled_ids[-1:], skip_special_tokens=False)
            before, found, after = rest.partition(end)
            rest = after if found and not before.strip() else rest
        return Draft(rest + prefill, parent, chain, None)


SENTINEL = f"asyncrl{secrets.token_hex(16)}"
"""Replaces an answer in a trial render: letters and digits that no template treats specially and no harness
can guess.
"""


@dataclass(frozen=True, slots=True)
class PromptText:
    """The text that a prompt's ids spell, as its length and hash: a session holds many that begin alike."""

    num_chars: int
    digest: bytes

    @classmethod
    def of(cls, text: str) -> PromptText:
        """Raises ValueError if the text is no Unicode."""
        return cls(len(text), blake2b(text.encode(), digest_size=16).digest())

    def begins(self, text: str) -> bool:
        """Whether `text` begins with this one."""
        return len(text) >= self.num_chars and PromptText.of(text[: self.num_chars]) == self


class Chain:
    """The hash of a chat, message after message: equal for two chats if and only if they are the same in
    canonical form.
    """

    def __init__(self, messages: Messages, tools: Messages | None) -> None:
        self._state = blake2b(_to_json(tools or None).encode(), digest_size=16)
        self.answers: list[tuple[int, bytes]] = []
        """(index of an assistant message, key of the chat up to and with it), in order."""
        for index, message in enumerate(messages):
            self._state.update(canonical(message))
            if message.get("role") == "assistant":
                self.answers.append((index, self._state.digest()))

    def key_with(self, answer: Message) -> bytes:
        """Key of this chat with one more message."""
        state = self._state.copy()
        state.update(canonical(answer))
        return state.digest()


_to_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def canonical(message: Message) -> bytes:
    """The message, as requests.py reads one or as an answer was given, as one JSON object. A harness sends
    its history back as its own library wrote it, so these do not count: fields that are None, the order of
    keys, the JSON spacing of tool arguments, white space around an assistant's content.
    """
    fields = {name: value for name, value in message.items() if value is not None}
    if fields.get("role") == "assistant":
        fields["content"] = fields.get("content", "").strip()
    if calls := fields.get("tool_calls"):
        fields["tool_calls"] = [_tool_call(call) for call in calls]
    return _to_json(fields).encode()


def _tool_call(call: Mapping[str, Any]) -> list[Any]:
    """A function call by id, name and arguments, which are text in an answer."""
    arguments = call["function"]["arguments"]
    parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    return [call["id"], call["function"]["name"], parsed]
