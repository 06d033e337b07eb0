"""Capture: the sampled ids of a session as a tree, the prompts of new calls, and the
rollout's branches.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from asyncrl.agents.endpoint.chat_node import ChatNode, Prefix
from asyncrl.agents.endpoint.prefix_match import (
    Chain,
    ChatMatcher,
    Frame,
    How,
    Message,
    Messages,
    PromptMatch,
    Recorded,
    Roles,
    answer_forms,
    end_of,
)
from asyncrl.agents.endpoint.tool_formats import THINKING, Marks
from asyncrl.base.errors import OutcomeUnusable, RolloutFailure
from asyncrl.base.failures import WAYS_OUT, FailureKind
from asyncrl.messages.records import (
    MAIN_AGENT,
    Completion,
    Credit,
    Outcome,
    PolicyCall,
    Reward,
    Rollout,
    Trajectory,
    total,
)
from asyncrl.messages.tokens import EMPTY, Tokens, in_journal
from asyncrl.messages.turn_rewards import check_names
from asyncrl.messages.worker_api import CONTEXT_TOKENS, ChatTokenizer, decode_after

Earned = tuple[Reward, int, str]
"""Reward, unit and state of a Credit."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptPlan:
    """The parent's ids, then `added`. `whole`: of both."""

    number: int
    how: How
    added: npt.NDArray[np.int32]
    parent: ChatNode | None
    match: PromptMatch | None
    whole: Prefix
    prompt_ids: npt.NDArray[np.int32]
    changed: int | None = None
    """The message whose change began a branch."""
    role: str = ""

    @property
    def text(self) -> str:
        """The text of a chat, as far as it is encoded; else ""."""
        return self.match.text if self.match else ""

    @property
    def prefill(self) -> str:
        return self.match.prefill if self.match else ""

    @property
    def tail(self) -> list[int]:
        """The last prompt ids, which the text of the answer may depend on."""
        ids: list[int] = self.prompt_ids[-CONTEXT_TOKENS:].tolist()
        return ids


@dataclass(eq=False, repr=False)
class Capture:
    """Record sent and sampled ids of a session; find the completion that a new call
    continues.

    Invariant: a prompt that reuses a node's ids begins with exactly the ids that its
    call sent and sampled. Calls may overlap.

    Example: sampled ids in brackets.
        call 0  sends 1 2 3           samples [7 8]   node 0: 1 2 3 [7 8], without a parent
        call 1  its messages are call 0's, its answer and a question: the engine gets 1 2 3 7 8 4 5
                                      samples [9]     node 1: 4 5 [9], after node 0
        call 2  the harness has rewritten the first answer: nothing can be reused
                sends 1 2 3 6 4 5     samples [9]     node 2: 1 2 3 6 4 5 [9], without a parent
        rollout: the branches 1 2 3 [7 8] 4 5 [9] and 1 2 3 6 4 5 [9]; each sampled id has loss once.
    """

    tokenizer: ChatTokenizer
    thinking: Marks = THINKING
    _: KW_ONLY
    counts: Counter[str] = field(default_factory=Counter)
    """Of the gateway, by the names of its metrics."""
    keeps_thoughts: bool = True
    """False: prompts are the template's own renders, in new branches if needed."""
    frames: dict[Roles, Frame] = field(default_factory=dict)
    """Of the chat template, shared by sessions."""

    def __post_init__(self) -> None:
        self._nodes: dict[str, ChatNode] = {}
        self._ends: set[ChatNode] = set()
        """The last sampled node of each branch."""
        self._read: dict[ChatNode, Tokens] = {}
        """How the last trained call of each branch read the tokens before its own."""
        self._recorded = defaultdict[str, Recorded](lambda: Recorded(self.frames))
        """By role: a policy never continues what another one has computed."""
        self._num_calls = 0
        self._last_forms: Sequence[int] = ()

    @property
    def agents(self) -> dict[str, str]:
        """Return the agent of each completion, by name."""
        return {name: node.call.agent for name, node in self._nodes.items()}

    @property
    def num_branch_tokens(self) -> int:
        """Count the tokens of all branches, shared prefixes in each."""
        return sum(node.whole.length for node in self._ends)

    def match(
        self,
        messages: Messages,
        tools: Messages | None,
        *,
        prefill: str = "",
        settings: Mapping[str, object] | None = None,
        role: str = "",
    ) -> PromptMatch:
        """Find the completion that a chat continues, and the text to encode after its
        ids. May run in a thread in parallel with record(). Raises ValueError if the
        template refuses the chat or omits a message.

        `prefill`: beginning of the answer, after an open thought.
        """
        render = partial(self.tokenizer.render, tools=tools, settings=settings)
        recorded = self._recorded[role]
        try:
            chain = Chain(messages, tools, settings, self.thinking, recorded)
            matcher = ChatMatcher(
                self.tokenizer,
                render,
                recorded,
                messages,
                prefill,
                chain,
                self.keeps_thoughts,
            )
            return matcher.match()
        except RecursionError:
            # The client chose the nesting, so this is its error (400), not a bug of the
            # gateway.
            raise ValueError("the messages or tools are nested too deep") from None

    def plan(
        self, ids: Sequence[int], match: PromptMatch | None = None, role: str = ""
    ) -> PromptPlan:
        """Return the prompt with the ids of the match's text, or without a match of
        these ids.
        """
        added = np.array(ids, dtype=np.int32)
        # A prompt of /v1/completions has no messages. Only its ids say which completion
        # it continues.
        parent = match.parent if match else self._recorded[role].longest(added)
        if match is None and parent is not None:
            added = added[parent.whole.length :]
        how: How = match.how if match else ("extended" if parent else "edited")
        # Nothing is recorded yet, so the harness cannot have edited anything.
        if parent is None and not self._nodes:
            how = "new"
        changed = None
        if match is not None:
            if how == "edited":
                changed = match.chain.changed_since(self._last_forms)
            self._last_forms = match.chain.forms
        deviations = match.deviations if match is not None else ()
        for name in ("calls", how, *(f"kept_{each}" for each in deviations)):
            self.counts[name] += 1
        whole = (parent.whole if parent else Prefix()).then(added)
        # Calls get numbers when they are planned. Parallel answers end in any order,
        # and a call that is never delivered leaves a gap.
        self._num_calls += 1
        prompt_ids = added
        if parent is not None:
            prompt_ids = np.concatenate([parent.all_ids(), added])
        return PromptPlan(
            self._num_calls - 1,
            how,
            added,
            parent,
            match,
            whole,
            prompt_ids,
            changed,
            role,
        )

    def record(
        self,
        planned: PromptPlan,
        completion: Completion,
        message: Message,
        name: str,
        *,
        is_trained: bool = True,
        begun_s: float | None = None,
        agent: str = "",
    ) -> None:
        """Record a completion. Not `is_trained`: not sampled from the run's
        distribution. `begun_s`: time of the request, in seconds since the epoch.
        `agent`: who made the call.
        """
        # The engine answers with the whole prompt. The parents already hold its first
        # `num_known` tokens. The likeliest tokens were for the client's answer only.
        num_added = len(planned.added)
        num_known = completion.num_prompt - num_added
        added = completion.tokens.kept(in_journal).slice(num_known)
        # A slice holds the arrays of the whole prompt, so a session of n calls would
        # hold n prompts.
        tokens = added.copy()
        now_s = time.time()
        tools = tuple(
            (tool["id"], tool["function"]["name"])
            for tool in message.get("tool_calls") or ()
        )
        call = PolicyCall(
            num_added,
            len(tokens),
            name,
            now_s if begun_s is None else begun_s,
            now_s,
            "tool_calls" if tools else completion.finish_reason or "",
            tools,
            agent,
        )
        of_chat: dict[str, Any] = {}
        keys: list[bytes] = []
        if match := planned.match:
            # Decoded behind the prompt, because the text of a token depends on its
            # neighbors, and with special tokens, since they may enclose a thought that
            # answer_forms must find. Later renders are compared with this text.
            sampled = completion.token_ids
            text = decode_after(self.tokenizer, planned.tail, sampled)
            said = text.removesuffix(end_of(self.tokenizer, sampled))
            forms = answer_forms(message, said, self.thinking)
            keys = [match.chain.key_with(form) for form in forms]
            of_chat = {
                "num_messages": len(match.chain.forms) + 1,
                "key": keys[0],
                "text": match.whole and match.whole.then(text),
                "deviations": match.deviations,
                "shown": match.shown,
            }
        node = ChatNode(
            name=name,
            order=planned.number,
            parent=planned.parent,
            tokens=tokens,
            num_added=num_added,
            is_truncated=completion.finish_reason == "length",
            num_interruptions=completion.num_interruptions,
            whole=planned.whole.then(tokens.ids[num_added:]),
            call=call,
            is_trained=is_trained,
            role=planned.role,
            **of_chat,
        )
        self._nodes[name] = node
        # The parent ended a branch until now; its continuation does from here on. An
        # empty answer adds no tokens to train, so it ends no branch.
        if node.num_sampled:
            self._ends.difference_update(node.path())
            self._ends.add(node)
        # Most engines report nothing of the context, and then nothing is cut.
        context = completion.tokens.as_context()
        if node.has_loss and context.columns:
            # After a push, the next call reads the conversation again under newer
            # weights, with other experts. A branch is trained with the reading of its
            # last call, so older readings are dropped.
            for earlier in node.path()[:-1]:
                self._read.pop(earlier, None)
            self._read[node] = context.slice(0, num_known)
        self._recorded[planned.role].add(node, keys)

    @property
    def untrained(self) -> tuple[tuple[str, str], ...]:
        """Return (completion, agent) of each completion without a loss, in the order of
        their credits.
        """
        nodes = _in_order(self._nodes.values(), Outcome())
        return tuple(
            (node.name, node.call.agent) for node in nodes if not node.has_loss
        )

    def last_completion(self) -> Completion:
        """Return the completion of the call that was planned last. Raises
        RolloutFailure.
        """
        if not self._nodes:
            raise _no_call("the agent ended without a completion or a reward")
        # Not the last recorded one: the order in which parallel answers end depends on
        # the engines' speed, and the task may score this text.
        last = max(self._nodes.values(), key=lambda node: node.order)
        finish: Literal["stop", "length"] = "length" if last.is_truncated else "stop"
        return Completion(last.tokens, last.num_added, finish, last.num_interruptions)

    def rollout(
        self,
        sample_index: int,
        outcome: Outcome,
        reward: float,
        *,
        by_turn: bool = False,
    ) -> Rollout:
        """Return the branches, ordered by ids. A sampled token has its loss in the
        first branch that contains it.

        Concurrent calls arrive in any order, so results depend only on contents.
        `by_turn`: each completion has a credit, in the order of the calls; without
        turn_rewards, the last one earns `reward`. Raises RolloutFailure.
        """
        if not self._nodes:
            raise _no_call(
                "the agent ended with 0 completions and not one sampled token to train on"
            )
        nodes = _in_order(self._nodes.values(), outcome)
        trained = {node: None for node in nodes if _has_loss(node, outcome)}
        # A branch ends at its last trained answer. Untrained answers behind it would
        # cost time in the trainer, and nothing in them has a loss.
        inner = {node for end in trained for node in end.path()[:-1]}
        paths = [node.path() for node in trained if node not in inner]
        if not paths:
            what = f"the harness ended with {len(nodes)} completions and not one sampled token to train on"
            rule = (
                "calls at another temperature are not trained, nor those of untrained agents, nor those "
                "with another top_p, top_k or min_p on engines that do not report supports"
            )
            raise RolloutFailure(
                what,
                rule=rule,
                way_out="let it call the model with its session's key.",
            )
        rewards = outcome.earned
        if rewards:
            names = [node.name for node in nodes]
            check_names(rewards, {node.name for node in trained}, names)
        credited: dict[ChatNode, Earned] = {
            node: (rewards[node.name], unit, outcome.roles.get(node.name, ""))
            for unit, node in enumerate(nodes)
            if node.name in rewards
        }
        untrained: list[Credit] = []
        if by_turn:
            credited = _turns(nodes, outcome, reward)
            # None of their tokens has a loss, but earlier turns earn their rewards too.
            untrained = [
                _credit(0, 0, credited[node]) for node in nodes if node not in trained
            ]
        rollout = list[Trajectory]()
        seen = set[ChatNode]()
        for path in paths:
            # An answer that several calls continued is in several branches. It has its
            # loss in the first; in the others it is context, or its gradient would
            # count twice.
            own = set(path) - seen
            seen |= own
            tokens, credits, calls = _branch(path, own, own & trained.keys(), credited)
            tokens = tokens.read_again(self._read.get(path[-1], EMPTY))
            trajectory = Trajectory(
                sample_index=sample_index,
                branch=len(rollout),
                tokens=tokens,
                reward=reward,
                is_truncated=path[-1].is_truncated,
                num_interruptions=sum(node.num_interruptions for node in own),
                credits=tuple(credits if rollout else credits + untrained),
                calls=tuple(calls),
                role=path[-1].role,
                metrics=dict(outcome.metrics),
            )
            rollout.append(trajectory)
        return tuple(rollout)


def _no_call(what: str) -> RolloutFailure:
    return RolloutFailure(
        what,
        rule="an answer that a framework took from its cache cannot be trained",
        way_out=WAYS_OUT[FailureKind.NO_CALL],
        kind=FailureKind.NO_CALL,
    )


# ---- branches


def _has_loss(node: ChatNode, outcome: Outcome) -> bool:
    agent = node.call.agent or MAIN_AGENT
    return node.has_loss and agent not in outcome.untrained


def _in_order(nodes: Collection[ChatNode], outcome: Outcome) -> list[ChatNode]:
    # A conversation without branches has one order, and most have none.
    if all(after.parent is before for before, after in pairwise(nodes)):
        return [*nodes]
    parents = {node.parent for node in nodes}
    own = {}
    for node in nodes:
        engines = tuple(span.engine for span in node.tokens.spans)
        # Equal parallel calls may sample equal tokens. Then their rewards decide, then
        # whether a later call continued them. The engine comes last, so that it decides
        # only between answers that are equal in everything else.
        own[node] = (
            *node.content,
            total(outcome.earned.get(node.name, 0.0)),
            node in parents,
            node.role,
            engines,
        )
    # By the whole path: a parent comes before its answers, and equal answers to
    # different prompts do not mix.
    return sorted(nodes, key=lambda node: [own[each] for each in node.path()])


def _branch(
    path: list[ChatNode],
    own: set[ChatNode],
    trained: set[ChatNode],
    credited: Mapping[ChatNode, Earned],
) -> tuple[Tokens, list[Credit], list[PolicyCall]]:
    """Return the tokens of a branch; and the credits of its `trained` answers and the
    calls of its `own`.
    """
    parts = list[Tokens]()
    credits = list[Credit]()
    calls = list[PolicyCall]()
    end = 0
    for node in path:
        start, end = end + node.num_added, end + len(node.tokens)
        if node in own:
            calls.append(replace(node.call, start=start, end=end))
        is_trained = node in trained
        # as_context() keeps values that a read token has too, such as its experts.
        parts.append(node.tokens if is_trained else node.tokens.as_context())
        if is_trained and node in credited:
            credits.append(_credit(start, end, credited[node]))
    return Tokens.join(parts), credits, calls


def _credit(start: int, end: int, earned: Earned) -> Credit:
    reward, unit, state = earned
    return Credit(start, end, 0.0, unit, state).paid(reward)


def _turns(
    nodes: Sequence[ChatNode], outcome: Outcome, reward: float
) -> dict[ChatNode, Earned]:
    """Return the credit of each completion as a turn. Raises RolloutFailure."""
    last = max(nodes, key=lambda node: node.order)
    rewards = outcome.earned or {last.name: reward}
    states = outcome.turn_states
    if unknown := states.keys() - {node.name for node in nodes}:
        raise OutcomeUnusable(
            f"its turn_states name {sorted(unknown)[:5]}, which it does not have",
            rule="turn_states names completions",
            way_out="name answers by their `id`.",
        )
    turns = dict[ChatNode, Earned]()
    for node in nodes:
        # Hashed only if the harness gave no state.
        state = states.get(node.name) or _prompt_digest(node)
        turns[node] = (rewards.get(node.name, 0.0), node.order, state)
    return turns


def _prompt_digest(node: ChatNode) -> str:
    read = Prefix() if node.parent is None else node.parent.whole
    _, digest = read.then(node.ids[: node.num_added]).place
    return digest.hex()
