"""Capture: the sampled ids of a session as a tree, the prompts of new calls, and the rollout's branches."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.agents.endpoint.prefix_match import (
    Chain,
    ChatMatcher,
    How,
    Message,
    Messages,
    Prefill,
    PromptMatch,
    Recorded,
    TextHash,
    answer_forms,
    no_prefill,
)
from asyncrl.agents.endpoint.reasoning import THINKING, Marks
from asyncrl.base.errors import RolloutFailure
from asyncrl.messages.records import (
    Completion,
    Credit,
    GrammarSpan,
    Outcome,
    Rollout,
    Trajectory,
    VersionSpan,
)
from asyncrl.messages.work import ChatRenderer, answer_text, new_hash

Path = list["ChatNode"]


@dataclass(frozen=True, slots=True, eq=False)
class ChatNode:
    """A recorded completion. `ids` follow the parent's: A prompt ids, then N sampled ids.

    ids int32 [A + N]; logprobs float32 [N] in nats; version_spans count from the first sampled token.
    `order`: (number of the call, choice). `path_hash`: of all_ids(). Not `is_trained`: context. Of a chat:
    `num_messages` with the answer, `key` in a Chain, and `text`, the hash of the text of all ids or None.
    """

    name: str
    order: tuple[int, int]
    parent: ChatNode | None
    ids: npt.NDArray[np.int32]
    num_added: int
    logprobs: npt.NDArray[np.float32]
    version_spans: tuple[VersionSpan, ...]
    is_truncated: bool
    num_interruptions: int
    num_path_ids: int
    path_hash: blake2b
    num_messages: int
    key: bytes
    text: TextHash | None
    is_trained: bool = True
    grammar: str | None = None

    @property
    def num_sampled(self) -> int:
        return len(self.logprobs)

    @property
    def sampled_ids(self) -> npt.NDArray[np.int32]:
        return self.ids[self.num_added :]

    @property
    def num_trained(self) -> int:
        return self.num_sampled if self.is_trained else 0

    @property
    def content(self) -> tuple[bytes, int, bytes, tuple[tuple[int, int, int], ...], bool, int]:
        """Return a sort key independent of arrival and engine."""
        spans = tuple((span.start, span.end, span.version) for span in self.version_spans)
        ids = self.ids.astype(">i4").tobytes()  # big-endian, so that bytes sort like ids
        return ids, self.num_added, self.logprobs.tobytes(), spans, self.is_truncated, self.num_interruptions

    def path(self) -> Path:
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        nodes.reverse()
        return nodes

    def all_ids(self) -> npt.NDArray[np.int32]:
        return np.concatenate([node.ids for node in self.path()])


@dataclass(slots=True)
class GatewayStats:
    calls: int = 0
    extended: int = 0
    realigned: int = 0
    edited: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
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
        sampled = np.array(completion.token_ids, dtype=np.int32)
        match = planned.match
        text = None if match is None else match.text_hash
        if text is not None:
            text = text.then(self._renderer.decode(completion.token_ids, skip_special_tokens=False))
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
            num_path_ids=planned.num_prompt + len(sampled),
            path_hash=_hash_on(planned.prompt_hash, sampled),
            num_messages=match.num_messages + 1 if match else 0,
            key=match.chain.key_with(message) if match else b"",
            text=text,
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


# ---- branches


def make_rollout(nodes: Iterable[ChatNode], sample_index: int, outcome: Outcome, reward: float) -> Rollout:
    """Return the branches, ordered by ids. A sampled token has its loss in the first branch that contains it.

    Concurrent calls arrive in any order, so results depend only on contents. Raises RolloutFailure.
    """
    nodes = _in_order(list(nodes), outcome)
    paths = _paths([node for node in nodes if node.num_trained])
    if not paths:
        what = f"the harness ended with {len(nodes)} completions and not one sampled token to train on"
        rule = "calls that set temperature or top_p are not trained"
        raise RolloutFailure(what, rule=rule, way_out="let it call the model with its session's key.")
    owners: dict[ChatNode, int] = {}
    for branch, path in enumerate(paths):
        for node in path:
            owners.setdefault(node, branch)
    credited = _credited(nodes, paths, owners, outcome)
    rollout = []
    for branch, path in enumerate(paths):
        own = {node for node in path if owners[node] == branch}
        head = {"sample_index": sample_index, "branch": branch, "reward": reward}
        rollout.append(_trajectory(path, own, credited, metrics=dict(outcome.metrics), **head))
    return tuple(rollout)


def _in_order(nodes: Sequence[ChatNode], outcome: Outcome) -> list[ChatNode]:
    parents = {node.parent for node in nodes}
    reward = {**outcome.branch_rewards, **outcome.turn_rewards}
    own = {}
    for node in nodes:
        engines = tuple(span.engine for span in node.version_spans)
        own[node] = (*node.content, reward.get(node.name, 0.0), node in parents, engines)
    return sorted(nodes, key=lambda node: [own[each] for each in node.path()])


def _paths(nodes: Sequence[ChatNode]) -> list[Path]:
    inner: set[ChatNode] = set()
    for node in nodes:
        inner.update(node.path()[:-1])
    return [node.path() for node in nodes if node not in inner]


def _trajectory(
    path: Path, own: set[ChatNode], credited: Mapping[ChatNode, tuple[float, int]], **fields: Any
) -> Trajectory:
    token_ids = np.concatenate([node.ids for node in path])
    loss_mask = np.zeros(len(token_ids), dtype=np.bool_)
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    spans: list[VersionSpan] = []
    credits: list[Credit] = []
    grammars: list[GrammarSpan] = []
    end = 0
    for node in path:
        start, end = end + node.num_added, end + len(node.ids)
        if node in own and node.is_trained and start < end:
            loss_mask[start:end] = True
            logprobs[start:end] = node.logprobs
            for span in node.version_spans:
                spans.append(replace(span, start=start + span.start, end=start + span.end))
            if node.grammar is not None:
                grammars.append(GrammarSpan(start, end, node.grammar))
            if node in credited:
                credits.append(Credit(start, end, *credited[node]))
    return Trajectory(
        token_ids=token_ids,
        loss_mask=loss_mask,
        behaviour_logprobs=logprobs,
        version_spans=tuple(spans),
        is_truncated=path[-1].is_truncated,
        num_interruptions=sum(node.num_interruptions for node in own),
        credits=tuple(credits),
        grammars=tuple(grammars),
        **fields,
    )


def _credited(
    nodes: Sequence[ChatNode], paths: Sequence[Path], owners: Mapping[ChatNode, int], outcome: Outcome
) -> dict[ChatNode, tuple[float, int]]:
    """Return (reward, unit) of each completion. Raises RolloutFailure."""
    by_turn = outcome.turn_rewards
    by_branch = outcome.branch_rewards
    known = {node.name for node in nodes}
    needed = {node.name for node in nodes if node.num_trained}
    named = [[node.name for node in path if node.name in by_branch] for path in paths]
    rewards = [{by_branch[name] for name in names} for names in named]
    fits = needed <= by_turn.keys() <= known if by_turn else True
    if by_branch:
        is_each_once = sorted(itertools.chain(*named)) == sorted(by_branch)
        fits = is_each_once and all(len(each) == 1 for each in rewards)
    if not fits:
        raise RolloutFailure(
            f"its rewards name {_listed({*by_turn, *by_branch})}; this rollout has {_listed(known)}",
            rule="turn_rewards names every completion, branch_rewards a completion of only one branch",
            way_out="name every answer by its `id`; 0.0 is a reward too.",
        )
    if by_branch:
        return {node: (next(iter(rewards[branch])), branch) for node, branch in owners.items()}
    return {node: (by_turn[node.name], unit) for unit, node in enumerate(nodes) if node.name in by_turn}


def _listed(names: Collection[str], most: int = 5) -> str:
    shown = ", ".join(name[:80] for name in sorted(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
