"""The exact tokens of one session, as a tree of completions. Pure: knows no HTTP, no engine, no torch, and
never waits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from asyncrl.agents.endpoint.chat_messages import encode_bounded
from asyncrl.agents.endpoint.tree import Asked, Chat, Node, Rest, find_rest, make_rollout
from asyncrl.errors import RolloutFailure
from asyncrl.messages.protocols import ChatRenderer
from asyncrl.messages.records import Completion, Outcome, Rollout

How = Literal["new", "extended", "realigned", "forked"]
"""What a call's prompt is. new: the session's first. extended: recorded ids and what is new, and their text
is what the template writes for the whole chat. realigned: the same, but the template writes the history
otherwise (reasoning stripped, white space merged, tool calls rendered its own way). forked: written anew,
because the history is nobody's, or was edited."""


@dataclass(slots=True)
class CaptureCounts:
    """Calls of all sessions so far, and what their prompts were; the rest of them were the first of their
    session.
    """

    calls: int = 0
    extended: int = 0
    realigned: int = 0
    forked: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A call that may be sent: `prompt_ids` begin with the `num_reused` that are the parent's. `number`
    counts the session's calls.
    """

    number: int
    how: How
    prompt_ids: tuple[int, ...]
    num_reused: int
    parent: Node | None
    chain: Chain | None
    asked: Asked | None


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A call that is not planned yet: `text` is to be encoded behind the ids of `parent`, or is the whole
    prompt.
    """

    text: str
    parent: Node | None
    chain: Chain
    asked: Asked | None


class Capture:
    """Which ids were sent, which were sampled, and what a call goes on from.

    Life:       plan -> the engine samples -> record once for each choice that the harness got, or never ->
    ... -> rollout.
                Any number of calls may be planned before one of them is recorded.
    Memory:     a node holds what its call added and sampled, 4 bytes an id and a logprob; what came before is
    its parents'. Invariant:  a planned prompt that reuses a node's ids begins with exactly what that node's
    call sent and sampled (plan), so
                a branch of the rollout is at each sampled token what the engine had before it (make_rollout).
    """

    def __init__(self, renderer: ChatRenderer, counts: CaptureCounts) -> None:
        self._renderer, self._counts = renderer, counts
        self._nodes: dict[str, Node] = {}  # by completion_id
        self._by_chat: dict[bytes, Node] = {}
        self._num_calls = self._num_roots = 0
        self._gone_on_from: set[Node] = set()
        self.num_branch_tokens = 0
        """Tokens of all branches that a rollout would have now: a prefix that branches share counts in each
        of them.
        """

    def __repr__(self) -> str:
        return f"<Capture {self.num_completions} completions of {self._num_calls} calls, {self.num_tokens} tokens>"

    @property
    def num_completions(self) -> int:
        """Recorded so far."""
        return len(self._nodes)

    @property
    def num_tokens(self) -> int:
        """Ids that are held: those of a prefix that calls share count once."""
        return sum(len(node.ids) for node in self._nodes.values())

    def plan(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        prefill: str = "",
        max_tokens: int | None = None,
    ) -> Planned:
        """The prompt of a chat, over recorded ids where it goes on from a recorded answer.

        `prefill` is text after the generation prompt that the model goes on from. Raises ValueError if the
        template refuses the chat, it is no Unicode, or nested too deep; FarTooLong once it is clear that what
        is new has more than `max_tokens` tokens.
        """
        draft = self.draft(messages, tools, prefill=prefill)
        return self.plan_draft(draft, encode_bounded(draft.text, self._renderer, max_tokens))

    def draft(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        prefill: str = "",
    ) -> Draft:
        """The first half of plan(): all but the ids of what is new. It changes nothing, and may run in a
        thread beside record().
        """
        try:
            chain = Chain(messages, tools)
            found = self._longest(chain, len(messages))
            if found is not None:
                index, parent = found
                rest = self._rest((messages, tools), index, parent, prefill)
                if rest is not None:
                    return Draft(rest.text, parent, chain, rest.asked)
            text = self._renderer.render(messages, tools=tools) + prefill
            return Draft(text, None, chain, Asked.of(text))
        except RecursionError:
            raise ValueError("the messages or tools are nested too deep") from None

    def plan_draft(self, draft: Draft, ids: tuple[int, ...]) -> Planned:
        """The second half: `ids` are those of the draft's text."""
        how: How = (
            self._root() if draft.parent is None else "realigned" if draft.asked is None else "extended"
        )
        return self._planned(how, ids, draft.parent, draft.chain, draft.asked)

    def plan_ids(self, prompt_ids: Sequence[int]) -> Planned:
        """A prompt of ids: it goes on from the longest recorded prompt and completion that it begins with."""
        ids = np.asarray(prompt_ids, dtype=np.int32)
        ends: dict[Node | None, int] = {None: 0}
        for node in sorted(
            self._nodes.values(), key=lambda node: node.order
        ):  # parents first: a child is planned after them
            start = ends.get(node.parent)
            if start is not None and np.array_equal(ids[start : start + len(node.ids)], node.ids):
                ends[node] = start + len(node.ids)
        parent = max(ends, key=lambda node: ends[node])  # of equal ones the first
        return self._planned(
            "extended" if parent else self._root(), tuple(prompt_ids[ends[parent] :]), parent, None, None
        )

    def record(
        self,
        planned: Planned,
        completion: Completion,
        message: Mapping[str, Any] | None,
        completion_id: str,
        *,
        choice: int = 0,
    ) -> None:
        """The harness got this answer: `message` is the assistant message as it got it (None: it asked for
        text, not a chat).
        """
        if completion_id in self._nodes:
            raise ValueError(f"{completion_id} is recorded already")
        added = planned.prompt_ids[planned.num_reused :]
        node = Node(
            completion_id=completion_id,
            order=(planned.number, choice),
            parent=planned.parent,
            ids=np.array(added + completion.token_ids, dtype=np.int32),
            num_added=len(added),
            logprobs=np.array(completion.behaviour_logprobs, dtype=np.float32),
            version_spans=completion.version_spans,
            is_truncated=completion.finish_reason == "length",
            num_interruptions=completion.num_interruptions,
            asked=planned.asked,
        )
        self._nodes[completion_id] = node
        self._count_branch(node)
        if planned.chain is not None and message is not None:
            key = planned.chain.key_with(message)
            known = self._by_chat.get(key)
            rank = (choice, node.content)  # the same answer twice: one of them, whichever came first
            if known is None or rank < (known.order[1], known.content):
                self._by_chat[key] = node

    def last_text_ids(self) -> tuple[int, ...]:
        """What was sampled for the call that was planned last, of those recorded. Raises RolloutFailure if
        there is none.
        """
        if not self._nodes:
            raise RolloutFailure(
                "the harness ended without one completion",
                rule="without a reward of its own, the task scores the text of the last completion",
                way_out="let it call /v1/chat/completions with its session's key, or return a reward.",
            )
        last = max(self._nodes.values(), key=lambda node: node.order)
        return tuple(last.sampled_ids.tolist())

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

    def _longest(self, chain: Chain, num_messages: int) -> tuple[int, Node] | None:
        """The last answer in the chat that is a recorded one with something after it."""
        for index, key in reversed(chain.answers):
            if index + 1 < num_messages and (node := self._by_chat.get(key)) is not None:
                return index, node
        return None

    def _rest(self, chat: Chat, answer_index: int, parent: Node, prefill: str) -> Rest | None:
        sampled_ids = parent.sampled_ids.tolist()
        return find_rest(
            self._renderer,
            chat,
            answer_index=answer_index,
            asked=parent.asked,
            sampled_ids=sampled_ids,
            prefill=prefill,
        )

    def _planned(
        self, how: How, added: tuple[int, ...], parent: Node | None, chain: Chain | None, asked: Asked | None
    ) -> Planned:
        reused = parent.all_ids() if parent is not None else np.empty(0, dtype=np.int32)
        planned = Planned(self._num_calls, how, (*_ints(reused), *added), len(reused), parent, chain, asked)
        self._num_calls += 1
        self._counts.calls += 1
        if how != "new":
            setattr(self._counts, how, getattr(self._counts, how) + 1)
        return planned

    def _root(self) -> How:
        self._num_roots += 1
        return "new" if self._num_roots == 1 else "forked"


def _ints(ids: npt.NDArray[np.int32]) -> list[int]:
    values: list[int] = ids.tolist()
    return values


# When two chats are the same: a canonical form of messages and tools, and a hash chain over them. Knows no
# tokens, no template.
#
# A harness sends its history back as its own library wrote it. These do not count: fields that are None or an
# empty list, the
# order of keys, the JSON spacing of tool arguments, text content in parts, white space around an assistant's
# content.


_to_json = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode


class Chain:
    """The hash of a chat, message after message: equal for two chats if and only if they are the same in
    canonical form.
    """

    __slots__ = ("_state", "answers")

    def __init__(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> None:
        self._state = blake2b(_to_json(tools or None).encode(), digest_size=16)
        self.answers: list[tuple[int, bytes]] = []
        """(index of an assistant message, key of the chat up to and with it), in order."""
        for index, message in enumerate(messages):
            self._state.update(canonical(message))
            if message.get("role") == "assistant":
                self.answers.append((index, self._state.digest()))

    def key_with(self, answer: Mapping[str, Any]) -> bytes:
        """Key of this chat with one more message."""
        state = self._state.copy()
        state.update(canonical(answer))
        return state.digest()


def canonical(message: Mapping[str, Any]) -> bytes:
    """The message as one JSON object. Any message has one: what is no Unicode, or no JSON, stays as it is
    written.
    """
    fields = {name: value for name, value in message.items() if value is not None and value != []}
    is_answer = fields.get("role") == "assistant"
    if "content" in fields:
        content = _joined(fields["content"])
        if is_answer and isinstance(content, str):
            content = content.strip()
        fields["content"] = content
        if is_answer and content == "":
            del fields["content"]
    if isinstance(calls := fields.get("tool_calls"), list):
        fields["tool_calls"] = [_tool_call(call) for call in calls]
    return _to_json(fields).encode()


def _joined(content: Any) -> Any:
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        return "".join(str(part.get("text") or "") for part in content)
    return content


def _tool_call(call: Any) -> Any:
    """A function call by id, name and arguments: `type` goes without saying, and `index` is of a stream's
    deltas alone.
    """
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    return [call.get("id"), function.get("name"), _arguments(function.get("arguments"))]


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
