from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.agents.endpoint.branches import ChatNode, RecordedChat, make_rollout
from asyncrl.agents.endpoint.prefix_match import (
    Chain,
    ChatMatcher,
    How,
    Message,
    Messages,
    Prefill,
    PromptMatch,
    Recorded,
    answer_forms,
    no_prefill,
)
from asyncrl.agents.endpoint.reasoning import THINKING, Marks
from asyncrl.base.errors import RolloutFailure
from asyncrl.messages.records import Completion, Outcome, Rollout
from asyncrl.messages.work import ChatRenderer, answer_text, new_hash


@dataclass(slots=True)
class GatewayStats:
    calls: int = 0
    extended: int = 0
    realigned: int = 0
    edited: int = 0
    uncut: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    in_flight: int = 0
    refused: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class PromptPlan:
    """The parent's `num_reused` ids, then `added`."""

    number: int
    how: How
    added: npt.NDArray[np.int32]
    num_reused: int
    parent: ChatNode | None
    match: PromptMatch | None
    prompt_hash: blake2b

    @property
    def num_prompt(self) -> int:
        return self.num_reused + len(self.added)

    @property
    def prompt_ids(self) -> npt.NDArray[np.int32]:
        before = [] if self.parent is None else [self.parent.all_ids()]
        return np.concatenate([*before, self.added])


class Capture:
    """Record sent and sampled ids of a session; find the completion that a new call continues.

    Invariant: a prompt that reuses a node's ids begins with exactly the ids that its call sent and sampled.
    Calls may overlap.
    """

    def __init__(self, renderer: ChatRenderer, counts: GatewayStats, thinking: Marks = THINKING) -> None:
        self._renderer = renderer
        self._counts = counts
        self._thinking = thinking
        self._nodes: dict[str, ChatNode] = {}
        self._recorded = Recorded()
        self._num_calls = 0
        self._has_root = False
        self._gone_on_from: set[ChatNode] = set()
        self.num_branch_tokens = 0
        """Tokens of all branches, shared prefixes in each."""

    @property
    def num_completions(self) -> int:
        return len(self._nodes)

    def match(
        self,
        messages: Messages,
        tools: Messages | None,
        *,
        prefill: Prefill = no_prefill,
        settings: Mapping[str, Any] | None = None,
    ) -> PromptMatch:
        """Raises ValueError if the template refuses the chat or omits a message. May run in a thread in
        parallel with record().

        `prefill`: beginning of the answer, after an open thought.
        """
        try:
            chain = Chain(messages, tools, self._thinking, self._recorded.settled)
            renderer, recorded, marks = self._renderer, self._recorded, self._thinking
            return ChatMatcher(renderer, recorded, marks, messages, tools, settings, prefill, chain).match()
        except RecursionError:
            raise ValueError("the messages or tools are nested too deep") from None

    def plan(self, match: PromptMatch, ids: Sequence[int]) -> PromptPlan:
        return self._planned(match.how, np.array(ids, dtype=np.int32), match.parent, match)

    def plan_ids(self, prompt_ids: Sequence[int]) -> PromptPlan:
        ids = np.asarray(prompt_ids, dtype=np.int32)
        ends: dict[ChatNode | None, int] = {None: 0}
        for node in sorted(self._nodes.values(), key=lambda node: node.order):
            start = ends.get(node.parent)
            if start is not None and np.array_equal(ids[start : start + len(node.ids)], node.ids):
                ends[node] = start + len(node.ids)
        parent = max(ends, key=lambda node: ends[node])  # the first of equal ones
        return self._planned("extended" if parent else "edited", ids[ends[parent] :], parent, None)

    def withdraw(self, planned: PromptPlan) -> None:
        if planned.how == "new":
            self._has_root = False

    def record(
        self,
        planned: PromptPlan,
        completion: Completion,
        message: Message,
        name: str,
        *,
        choice: int = 0,
        is_trained: bool = True,
        grammar: str | None = None,
    ) -> None:
        """Not `is_trained`: not sampled from the run's distribution."""
        assert name not in self._nodes, f"{name} is recorded already"
        if planned.parent is not None and planned.parent.name not in self._nodes:  # forgotten since planning
            planned = replace(planned, added=planned.prompt_ids, num_reused=0, parent=None)
        sampled = np.array(completion.token_ids, dtype=np.int32)
        chat: RecordedChat | None = None
        if (match := planned.match) is not None:
            text = match.text_hash
            if text is not None:
                text = text.then(self._renderer.decode(completion.token_ids, skip_special_tokens=False))
            chat = RecordedChat(match.num_messages + 1, match.chain.key_with(message), text)
        node = ChatNode(
            name=name,
            order=(planned.number, choice),
            parent=planned.parent,
            ids=np.concatenate([planned.added, sampled]),
            num_added=len(planned.added),
            logprobs=np.array(completion.behaviour_logprobs, dtype=np.float32),
            version_spans=completion.version_spans,
            is_truncated=completion.finish_reason == "length",
            num_interruptions=completion.num_interruptions,
            chat=chat,
            num_path_ids=planned.num_prompt + len(sampled),
            path_hash=_hash_on(planned.prompt_hash, sampled),
            is_trained=is_trained,
            grammar=grammar,
        )
        self._nodes[name] = node
        self._count_branch(node)
        if match is not None:
            # special tokens may enclose a thought
            shown = answer_text(self._renderer, sampled.tolist(), shows_special=True)
            forms = answer_forms(message, shown, self._thinking)
            self._recorded.add(node, map(match.chain.key_with, forms))

    def forget_oldest(self, num_completions: int, num_tokens: float) -> tuple[ChatNode, ...]:
        """Keep the latest conversations; return the completions of the others."""
        trees, root_of = dict[ChatNode, list[ChatNode]](), dict[ChatNode, ChatNode]()
        for node in sorted(self._nodes.values(), key=lambda node: node.order):
            root_of[node] = node if node.parent is None else root_of[node.parent]
            trees.setdefault(root_of[node], []).append(node)
        kept: list[ChatNode] = []
        self._count_anew(kept)
        for tree in sorted(trees.values(), key=lambda tree: tree[-1].order, reverse=True):
            for node in tree:
                self._count_branch(node)
            if len(kept) + len(tree) > num_completions or self.num_branch_tokens > num_tokens:
                break
            kept += tree
        self._count_anew(kept)
        found = set(kept)
        forgotten = tuple(node for node in self._nodes.values() if node not in found)
        self._nodes = {node.name: node for node in kept}
        self._recorded.keep(found)
        return forgotten

    def _count_anew(self, nodes: Sequence[ChatNode]) -> None:
        self.num_branch_tokens, self._gone_on_from = 0, set()
        for node in nodes:
            self._count_branch(node)

    def last_text(self, *, shows_special: bool) -> str:
        if not self._nodes:
            way_out = "let it call the model with its session's key, or return a reward."
            raise RolloutFailure("the harness ended without a completion or a reward", way_out=way_out)
        last = max(self._nodes.values(), key=lambda node: node.order)
        return answer_text(self._renderer, last.sampled_ids.tolist(), shows_special=shows_special)

    def rollout(self, sample_index: int, outcome: Outcome, reward: float) -> Rollout:
        return make_rollout(self._nodes.values(), sample_index, outcome, reward)

    def _count_branch(self, node: ChatNode) -> None:
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
        self, how: How, added: npt.NDArray[np.int32], parent: ChatNode | None, match: PromptMatch | None
    ) -> PromptPlan:
        if parent is None and not self._has_root:
            how, self._has_root = "new", True
        num_reused, path_hash = (0, new_hash()) if parent is None else (parent.num_path_ids, parent.path_hash)
        prompt_hash = _hash_on(path_hash, added)
        planned = PromptPlan(self._num_calls, how, added, num_reused, parent, match, prompt_hash)
        self._num_calls += 1
        self._counts.calls += 1
        if how != "new":
            setattr(self._counts, how, getattr(self._counts, how) + 1)
        return planned


def _hash_on(before: blake2b, ids: npt.NDArray[np.int32]) -> blake2b:
    found = before.copy()
    found.update(ids.astype("<i4").tobytes())
    return found
