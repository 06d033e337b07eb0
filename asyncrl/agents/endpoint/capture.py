"""The exact tokens of one session, as a tree of completions. Pure: no HTTP, no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic_core import to_json

from asyncrl.agents.endpoint.branches import Node, make_rollout
from asyncrl.agents.endpoint.chats import SENTINEL, Chain, Message, Messages, PromptText
from asyncrl.errors import RolloutFailure
from asyncrl.messages.records import Completion, Outcome, Rollout
from asyncrl.messages.work import ChatRenderer, Rendered, new_hash

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

    The rest is for a later chat that begins with these `messages`: what the template writes for them, unless
    that was of no use, and the tools as they were given.
    """

    text: str
    parent: Node | None
    chain: Chain
    asked: PromptText | None
    messages: Messages
    rendered: Rendered | None
    tools_json: bytes

    def to_go_on_from(self) -> Draft:
        """The same, for a later chat alone: without the texts that it would not read."""
        rendered = self.rendered
        if rendered is not None and rendered.state is None:
            rendered = Rendered("")
        return replace(self, text="", rendered=rendered)


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A call that may be sent: its prompt is the `num_reused` ids of the parent, then `added`; `prompt_hash`
    is their new_hash(). `number` counts the session's calls. `draft`: None of a prompt of ids.
    """

    number: int
    how: How
    added: npt.NDArray[np.int32]
    num_reused: int
    parent: Node | None
    draft: Draft | None
    prompt_hash: blake2b

    @property
    def num_prompt(self) -> int:
        """Ids of the prompt."""
        return self.num_reused + len(self.added)

    @property
    def prompt_ids(self) -> npt.NDArray[np.int32]:
        """All of them, int32 [num_prompt], made anew each time it is asked for."""
        before = [] if self.parent is None else [self.parent.all_ids()]
        return np.concatenate([*before, self.added])


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

    def draft(
        self, messages: Messages, tools: Messages | None, *, prefill: str = "", before: Draft | None = None
    ) -> Draft:
        """The text of a chat, or of what is new where it goes on from a recorded answer. It changes nothing,
        and may run in a thread beside record().

        `prefill` is text after the generation prompt that the model goes on from. `before`: the draft of a
        chat whose messages these begin with, the very same ones; it costs what is new then. Raises
        ValueError if the template refuses the chat, it is no Unicode, or nested too deep.
        """
        try:
            tools_json = to_json(tools)
            if before is not None and before.tools_json != tools_json:
                before = None
            chain = (
                Chain(messages, tools) if before is None else before.chain.after(before.messages, messages)
            )
            return self._draft(_Chat(messages, tools, tools_json, prefill, chain, before))
        except RecursionError:
            raise ValueError("the messages or tools are nested too deep") from None

    def plan(self, draft: Draft, ids: Sequence[int]) -> Planned:
        """The prompt of a drafted chat; `ids` are those of the draft's text."""
        how: How = "realigned" if draft.asked is None else "extended"
        return self._planned(how, np.array(ids, dtype=np.int32), draft.parent, draft)

    def plan_ids(self, prompt_ids: Sequence[int]) -> Planned:
        """A prompt of ids: it goes on from the longest recorded prompt and completion that it begins with."""
        ids = np.asarray(prompt_ids, dtype=np.int32)
        ends: dict[Node | None, int] = {None: 0}
        for node in sorted(self._nodes.values(), key=lambda node: node.order):  # parents come first
            start = ends.get(node.parent)
            if start is not None and np.array_equal(ids[start : start + len(node.ids)], node.ids):
                ends[node] = start + len(node.ids)
        parent = max(ends, key=lambda node: ends[node])  # of equal ones the first
        return self._planned("extended", ids[ends[parent] :], parent, None)

    def record(
        self,
        planned: Planned,
        completion: Completion,
        message: Message,
        name: str,
        *,
        choice: int = 0,
        is_trained: bool = True,
    ) -> None:
        """The harness got this answer: `message` is the assistant message as it got it."""
        assert name not in self._nodes, f"{name} is recorded already"
        if planned.parent is not None and planned.parent.name not in self._nodes:  # forgotten meanwhile
            planned = replace(planned, added=planned.prompt_ids, num_reused=0, parent=None)
        sampled = np.array(completion.token_ids, dtype=np.int32)
        path_hash = _hash_on(planned.prompt_hash, sampled)
        node = Node(
            name=name,
            order=(planned.number, choice),
            parent=planned.parent,
            ids=np.concatenate([planned.added, sampled]),
            num_added=len(planned.added),
            logprobs=np.array(completion.behaviour_logprobs, dtype=np.float32),
            version_spans=completion.version_spans,
            is_truncated=completion.finish_reason == "length",
            num_interruptions=completion.num_interruptions,
            asked=planned.draft.asked if planned.draft else None,
            num_path_ids=planned.num_prompt + len(sampled),
            path_hash=path_hash,
            is_trained=is_trained,
        )
        self._nodes[name] = node
        self._count_branch(node)
        if planned.draft is not None:
            key = planned.draft.chain.key_with(message)
            known = self._by_chat.get(key)
            rank = (choice, node.content)  # the same answer twice: one of them, whichever came first
            if known is None or rank < (known.order[1], known.content):
                self._by_chat[key] = node

    def forget_oldest(self, num_completions: int, num_tokens: float) -> tuple[Node, ...]:
        """Keep the conversations that were gone on with last, with at most so many completions and tokens in
        their branches. Returns the completions of the others.
        """
        trees, root_of = dict[Node, list[Node]](), dict[Node, Node]()
        for node in sorted(self._nodes.values(), key=lambda node: node.order):  # parents come first
            root_of[node] = node if node.parent is None else root_of[node.parent]
            trees.setdefault(root_of[node], []).append(node)
        kept: list[Node] = []
        for tree in sorted(trees.values(), key=lambda tree: tree[-1].order, reverse=True):
            self._count_anew([*kept, *tree])
            if len(kept) + len(tree) > num_completions or self.num_branch_tokens > num_tokens:
                break
            kept += tree
        self._count_anew(kept)
        found = set(kept)
        forgotten = tuple(node for node in self._nodes.values() if node not in found)
        self._nodes = {node.name: node for node in kept}
        self._by_chat = {key: node for key, node in self._by_chat.items() if node in found}
        return forgotten

    def _count_anew(self, nodes: Sequence[Node]) -> None:
        self.num_branch_tokens, self._gone_on_from = 0, set()
        for node in nodes:
            self._count_branch(node)

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

    def _planned(
        self, how: How, added: npt.NDArray[np.int32], parent: Node | None, draft: Draft | None
    ) -> Planned:
        if parent is None:
            how, self._has_root = ("forked" if self._has_root else "new"), True
        num_reused, path_hash = (0, new_hash()) if parent is None else (parent.num_path_ids, parent.path_hash)
        prompt_hash = _hash_on(path_hash, added)
        planned = Planned(self._num_calls, how, added, num_reused, parent, draft, prompt_hash)
        self._num_calls += 1
        self._counts.calls += 1
        if how != "new":
            setattr(self._counts, how, getattr(self._counts, how) + 1)
        return planned

    def _draft(self, chat: _Chat) -> Draft:
        for index, key in reversed(chat.chain.answers):
            parent = self._by_chat.get(key)
            if parent is None or index + 1 == len(chat.messages):
                continue
            found = self._continue(parent, chat, index)
            if found is not None:
                return found
            break
        whole = self._rendered_anew(chat)
        return chat.draft(whole.text + chat.prefill, None, PromptText.of(whole, chat.prefill), whole)

    def _rendered_anew(self, chat: _Chat) -> Rendered:
        """All of its text, for what begins or is compared earlier than what the last chat has in store."""
        return self._renderer.render_on(chat.messages, tools=chat.tools)

    def _rendered(self, chat: _Chat) -> Rendered:
        return self._renderer.render_on(chat.messages, tools=chat.tools, after=chat.rendered_before)

    # Recorded ids are never made from text again: the template's text of a longer chat is cut where they end.
    # - Its text begins with what was asked and sampled, to the letter: what follows is new.
    # - It writes the history otherwise (strips reasoning, renders a tool call its own way, says the date):
    #   the answer is replaced by a sentinel, and what follows the sentinel is new.
    # - It refuses the sentinel, or swallows it: there is no place to cut.

    def _continue(self, parent: Node, chat: _Chat, at: int) -> Draft | None:
        """What follows the recorded answer `messages[at]`, generation prompt and prefill included;
        None: there is no place to cut.

        If the parent has no `asked`, its text never is what the template writes: where the next chat could
        not go on from this one's text either, that render is saved.
        """
        renderer, asked, sampled_ids = self._renderer, parent.asked, parent.sampled_ids.tolist()
        before = chat.rendered_before
        rendered = before
        if asked is not None or (chat.before is not None and (before is None or before.state is not None)):
            rendered = self._rendered(chat)
        if asked is not None:
            assert rendered is not None, "it was rendered just now"
            if rendered.num_before > asked.num_chars:
                rendered = self._rendered_anew(chat)
            sampled = renderer.decode(sampled_ids, skip_special_tokens=False)
            text, end = rendered.text + chat.prefill, asked.num_chars - rendered.num_before
            if text.startswith(sampled, end) and asked.begins(rendered, chat.prefill):
                rest = text[end + len(sampled) :]
                return chat.draft(rest, parent, PromptText.of(rendered, chat.prefill), rendered)
        stand_in = {"role": "assistant", "content": SENTINEL}
        shown = [*chat.messages[:at], stand_in, *chat.messages[at + 1 :]]
        is_new = chat.before is not None and at >= len(chat.before.messages)
        try:
            swapped = renderer.render_on(shown, tools=chat.tools, after=before if is_new else None)
            _, rest = swapped.text.split(SENTINEL)
        except ValueError:
            return None
        if sampled_ids and sampled_ids[-1] in renderer.end_ids:  # the end of the turn was sampled
            turn_end = renderer.decode(sampled_ids[-1:], skip_special_tokens=False)
            between, found, after = rest.partition(turn_end)
            rest = after if found and not between.strip() else rest
        return chat.draft(rest + chat.prefill, parent, None, rendered)


@dataclass(frozen=True, slots=True, eq=False)
class _Chat:
    """What draft() is asked for."""

    messages: Messages
    tools: Messages | None
    tools_json: bytes
    prefill: str
    chain: Chain
    before: Draft | None

    @property
    def rendered_before(self) -> Rendered | None:
        return self.before.rendered if self.before else None

    def draft(
        self, text: str, parent: Node | None, asked: PromptText | None, rendered: Rendered | None
    ) -> Draft:
        return Draft(text, parent, self.chain, asked, self.messages, rendered, self.tools_json)


def _hash_on(before: blake2b, ids: npt.NDArray[np.int32]) -> blake2b:
    """Of the ids whose hash is `before`, and then these."""
    found = before.copy()
    found.update(ids.astype("<i4").tobytes())
    return found
