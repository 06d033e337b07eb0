"""Random trees of calls: each sampled token is trained once after its prompt, in any order of arrival."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import Any

import numpy as np
import pytest
from gateway_capture_cases import END, CharRenderer, Habit, Message, assistant, plan, user
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.agents.endpoint.capture import Capture, GatewayStats, PromptPlan
from asyncrl.agents.endpoint.reasoning import THINKING, split_thought
from asyncrl.base.errors import RolloutFailure
from asyncrl.messages.records import Completion, Outcome, Rollout, VersionSpan

ANSWER = st.tuples(st.text(alphabet="ab| ", max_size=4), st.booleans())
"""Sampled text, and whether its turn was ended. Answers may be cut, equal or empty."""


@dataclass(frozen=True)
class Choice:
    """One answer of a call; if not `is_delivered`, its client has disconnected and it is not recorded."""

    raw: tuple[str, bool]
    is_delivered: bool
    sent_back_as: str


@dataclass(frozen=True)
class Call:
    """The next call of a harness: continue from an answer, repeat its question, or edit the history."""

    basis: int
    kind: str
    texts: tuple[str, ...]
    choices: tuple[Choice, ...]
    prefill: str


CHOICE = st.builds(
    Choice,
    raw=ANSWER,
    is_delivered=st.integers(0, 4).map(bool),
    sent_back_as=st.sampled_from(["same", "nones", "spaced", "apart", "left out"]),
)
CALL = st.builds(
    Call,
    basis=st.integers(0, 20),
    kind=st.sampled_from(["on", "on", "on", "again", "edit_answer", "edit_front", "drop_front"]),
    texts=st.lists(st.text(alphabet="xy", max_size=2), min_size=1, max_size=2).map(tuple),
    choices=st.lists(CHOICE, min_size=1, max_size=3).map(tuple),
    prefill=st.sampled_from(["", "", "p"]),
)
ORDER = st.randoms(use_true_random=False)
STORY = st.lists(st.tuples(st.lists(CALL, min_size=1, max_size=3), ORDER), min_size=1, max_size=6)
"""Rounds of calls; those of one round are planned together and answered in any order."""


@dataclass
class ModelEngine:
    """Sample the given ids. The logprob of each token is unique and identifies it in the rollout."""

    num_tokens: int = 0
    sampled: dict[str, tuple[tuple[int, ...], Completion]] = field(default_factory=dict)
    """Completion id -> (prompt ids, delivered completion)."""

    def sample(self, ids: tuple[int, ...]) -> Completion:
        logprobs = tuple(-float(self.num_tokens + index + 1) for index in range(len(ids)))
        self.num_tokens += len(ids)
        middle = len(ids) // 2
        cuts = [(0, middle), (middle, len(ids))]
        spans = tuple(VersionSpan(start, end, self.num_tokens + start) for start, end in cuts if start < end)
        reason: Any = "stop" if ids and ids[-1] == ord(END) else "length"
        return Completion(ids, logprobs, spans, reason, num_interruptions=len(ids) % 3)


class History:
    """Play a story; `chats` are the histories of the harness that end with an answer."""

    def __init__(self, habit: Habit) -> None:
        self.renderer, self.counts, self.engine = CharRenderer(habit), GatewayStats(), ModelEngine()
        self.thinking = ("<", "|") if habit == "strips" else THINKING
        self.capture = Capture(self.renderer, self.counts, self.thinking)
        self.chats: list[list[Message]] = []
        self.planned: list[PromptPlan] = []

    def round(self, calls: list[Call], order: Any) -> None:
        """Plan all, then answer each; the answers are known to the calls of the next round."""
        answered = []
        for call in calls:
            messages = self._messages(call)
            planned = plan(self.capture, messages, None, prefill=call.prefill)
            self._check_prompt(planned, messages, call.prefill)
            self.planned.append(planned)
            answered += [(planned, messages, call, index) for index in range(len(call.choices))]
        order.shuffle(answered)
        for planned, messages, call, index in answered:
            self._answer(planned, messages, call, index)

    def _messages(self, call: Call) -> list[Message]:
        new = [user(text) for text in call.texts]
        if not self.chats:
            return new
        chat = list(self.chats[call.basis % len(self.chats)])
        if call.kind == "again":
            return chat[:-1]
        if call.kind == "edit_answer":
            chat[-1] = assistant("edited")
        if call.kind == "edit_front":
            chat[0] = user("edited")
        return (chat[1:] if call.kind == "drop_front" else chat) + new

    def _check_prompt(self, planned: PromptPlan, messages: list[Message], prefill: str) -> None:
        parent = planned.parent
        if parent is not None:
            prompt_ids, sampled = self.engine.sampled[parent.name]
            assert tuple(planned.prompt_ids.tolist())[: planned.num_reused] == prompt_ids + sampled.token_ids
        if planned.match is not None and planned.match.text_hash is not None:
            assert planned.how != "realigned"
            text = self.renderer.decode(tuple(planned.prompt_ids.tolist()), skip_special_tokens=False)
            assert text == self.renderer.render(messages) + prefill

    def _answer(self, planned: PromptPlan, messages: list[Message], call: Call, index: int) -> None:
        choice = call.choices[index]
        text, is_ended = choice.raw
        completion = self.engine.sample(self.renderer.encode(text + END * is_ended))
        if not choice.is_delivered:
            return
        completion_id = f"chatcmpl-{planned.number}/{index}"
        content = call.prefill + text
        self.capture.record(planned, completion, assistant(content), completion_id, choice=index)
        self.engine.sampled[completion_id] = (tuple(planned.prompt_ids.tolist()), completion)
        thought, answer = split_thought(assistant(content), self.thinking)
        sent_back = {
            "same": assistant(content),
            "nones": {"tool_calls": None, "content": content, "role": "assistant", "refusal": None},
            "spaced": assistant(f" {content.strip()}\n"),
            "apart": assistant(answer, reasoning_content=thought),
            "left out": assistant(answer),
        }
        self.chats.append([*messages, sent_back[choice.sent_back_as]])

    def check(self) -> None:
        """Each run of trained tokens is one completion, after the prompt that its call was sent with."""
        completions = self.engine.sampled.items()
        by_logprob = {each.behaviour_logprobs[0]: name for name, (_, each) in completions if each.token_ids}
        rewards = {name: float(number) for number, name in enumerate(self.engine.sampled)}
        outcome = Outcome(turn_rewards=rewards)
        if not by_logprob:
            with pytest.raises(RolloutFailure, match="not one sampled token"):
                self.capture.rollout(3, outcome, 0.0)
            return
        rollout = self.capture.rollout(3, outcome, 0.0)
        seen: list[str] = []
        interruptions = 0
        for number, branch in enumerate(rollout):
            assert (branch.branch, branch.sample_index) == (number, 3)
            spans, credits = [], []
            for start, end in runs(branch.loss_mask):
                name = by_logprob[float(branch.behaviour_logprobs[start])]
                prompt_ids, sampled = self.engine.sampled[name]
                assert tuple(branch.token_ids[:start].tolist()) == prompt_ids
                assert tuple(branch.token_ids[start:end].tolist()) == sampled.token_ids
                assert tuple(branch.behaviour_logprobs[start:end].tolist()) == sampled.behaviour_logprobs
                for span in sampled.version_spans:
                    spans.append(VersionSpan(start + span.start, start + span.end, span.version))
                credits.append((start, end, rewards[name]))
                interruptions += sampled.num_interruptions
                seen.append(name)
            assert branch.version_spans == tuple(spans)
            assert [(credit.start, credit.end, credit.reward) for credit in branch.credits] == credits
            assert not branch.behaviour_logprobs[~branch.loss_mask].any()
        assert sum(branch.num_interruptions for branch in rollout) == interruptions
        assert sorted(seen) == sorted(by_logprob.values()), "each sampled token is trained once"
        units = [credit.unit for branch in rollout for credit in branch.credits]
        assert len(set(units)) == len(units), "each completion is a unit"


def runs(mask: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """[start, end) of each stretch of trues."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


@pytest.mark.parametrize("habit", ["plain", "strips", "shouts", "refuses"])
@settings(deadline=None, max_examples=120)
@given(story=STORY)
def test_each_sampled_token_is_trained_after_its_prompt(
    habit: Habit, story: list[tuple[list[Call], Any]]
) -> None:
    history = History(habit)
    for calls, order in story:
        history.round(calls, order)
    counts, planned = history.counts, history.planned
    assert counts.calls == len(planned) == 1 + counts.extended + counts.realigned + counts.edited
    assert [plan.number for plan in planned if plan.how == "new"] == [0]
    history.check()


# ---- one tree of calls in two orders


Tree = list[tuple[str, bool, Any]]
"""Each call: its text, whether it begins a new history, and the calls made with its answer."""

TREES: st.SearchStrategy[Tree] = st.recursive(
    st.just([]),
    lambda then: st.lists(st.tuples(st.sampled_from("xy"), st.booleans(), then), min_size=1, max_size=3),
    max_leaves=12,
)


def digest(ids: tuple[int, ...]) -> bytes:
    return blake2b(np.array(ids).tobytes(), digest_size=4).digest()


def sample(prompt_ids: tuple[int, ...], engine: int) -> Completion:
    """Sample from a deterministic model: equal prompts have equal answers on every engine."""
    said = digest(prompt_ids)
    ids = (*map(ord, "ab|c"[said[0] % 4] * (said[1] % 3)), ord(END))
    logprobs = tuple(-1.0 - said[2] - index for index in range(len(ids)))
    span = VersionSpan(0, len(ids), said[3] % 3, engine)
    return Completion(ids, logprobs, (span,), "stop", num_interruptions=said[3] % 2)


def play(tree: Tree, habit: Habit, order: Random) -> Rollout:
    """Plan and answer calls one at a time, in a random order."""
    renderer = CharRenderer(habit)
    capture = Capture(renderer, GatewayStats())
    rewards: dict[str, float] = {}
    ready: list[tuple[list[Message], Tree]] = [([user(text)], then) for text, _, then in tree]
    asked: list[tuple[list[Message], Tree, PromptPlan]] = []
    while ready or asked:
        if ready and (not asked or order.random() < 0.5):
            messages, then = ready.pop(order.randrange(len(ready)))
            asked.append((messages, then, plan(capture, messages)))
            continue
        messages, then, planned = asked.pop(order.randrange(len(asked)))
        completion, name = (
            sample(tuple(planned.prompt_ids.tolist()), order.randrange(2)),
            f"chatcmpl-{planned.number}",
        )
        text = renderer.decode(completion.token_ids)
        capture.record(planned, completion, assistant(text), name)
        rewards[name] = digest((*tuple(planned.prompt_ids.tolist()), *completion.token_ids))[0] / 256
        for new, is_anew, after in then:
            begin = [user(text)] if is_anew else [*messages, assistant(text)]
            ready.append(([*begin, user(new)], after))
    return capture.rollout(0, Outcome(turn_rewards=rewards), 0.0)


def values(rollout: Rollout) -> Iterator[Any]:
    for branch in rollout:
        yield branch.token_ids.tolist(), branch.loss_mask.tolist(), branch.behaviour_logprobs.tolist()
        yield [(span.start, span.end, span.version) for span in branch.version_spans]
        yield branch.credits, branch.num_interruptions, branch.is_truncated, branch.branch


@pytest.mark.parametrize("habit", ["plain", "strips"])
@settings(deadline=None, max_examples=100)
@given(tree=TREES.filter(bool), orders=st.tuples(ORDER, ORDER))
def test_order_of_calls_changes_nothing(habit: Habit, tree: Tree, orders: tuple[Random, Random]) -> None:
    one, other = (list(values(play(tree, habit, order))) for order in orders)
    assert one == other
