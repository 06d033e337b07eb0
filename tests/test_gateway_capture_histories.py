"""Random trees of calls against a model engine: what is trained is what was sampled, each token once, after
what was sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from gateway_capture_cases import END, CharRenderer, Habit, Message, assistant, plan, user
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.agents.endpoint.capture import Capture, GatewayStats, Planned
from asyncrl.errors import RolloutFailure
from asyncrl.messages.records import Completion, Outcome, Rollout, VersionSpan

ANSWER = st.tuples(st.text(alphabet="ab| ", max_size=4), st.booleans())
"""What is sampled, and whether its turn was ended: cut ones, equal ones and ones of no token included."""


@dataclass(frozen=True)
class Choice:
    """One answer of a call. Not `is_delivered`: its client went away, and nobody records it."""

    raw: tuple[str, bool]
    is_delivered: bool
    sent_back_as: str


@dataclass(frozen=True)
class Call:
    """What a harness does next: go on from some answer it has, ask that one's question again, or edit the
    history.
    """

    basis: int
    kind: str
    texts: tuple[str, ...]
    choices: tuple[Choice, ...]
    prefill: str


CHOICE = st.builds(
    Choice,
    raw=ANSWER,
    is_delivered=st.integers(0, 4).map(bool),
    sent_back_as=st.sampled_from(["same", "nones", "spaced"]),
)
CALL = st.builds(
    Call,
    basis=st.integers(0, 20),
    kind=st.sampled_from(["on", "on", "on", "again", "edit_answer", "edit_front", "drop_front"]),
    texts=st.lists(st.text(alphabet="xy", max_size=2), min_size=1, max_size=2).map(tuple),
    choices=st.lists(CHOICE, min_size=1, max_size=3).map(tuple),
    prefill=st.sampled_from(["", "", "p"]),
)
STORY = st.lists(
    st.tuples(st.lists(CALL, min_size=1, max_size=3), st.randoms(use_true_random=False)),
    min_size=1,
    max_size=6,
)
"""Rounds of calls; those of one round are planned together and answered in any order."""


@dataclass
class ModelEngine:
    """Samples what it is told to. Logprobs are all different, so that a token of the rollout tells which one
    it is.
    """

    num_tokens: int = 0
    sampled: dict[str, tuple[tuple[int, ...], Completion]] = field(default_factory=dict)
    """What was delivered, by completion: (the prompt that was sent, what was sampled)."""

    def sample(self, ids: tuple[int, ...]) -> Completion:
        logprobs = tuple(-float(self.num_tokens + index + 1) for index in range(len(ids)))
        self.num_tokens += len(ids)
        middle = len(ids) // 2
        cuts = [(0, middle), (middle, len(ids))]
        spans = tuple(VersionSpan(start, end, self.num_tokens + start) for start, end in cuts if start < end)
        return Completion(
            ids,
            logprobs,
            spans,
            "stop" if ids and ids[-1] == ord(END) else "length",
            num_interruptions=len(ids) % 3,
        )


class History:
    """Plays a story; `chats` are the histories, as the harness has them, that end with an answer."""

    def __init__(self, habit: Habit) -> None:
        self.renderer, self.counts, self.engine = CharRenderer(habit), GatewayStats(), ModelEngine()
        self.capture = Capture(self.renderer, self.counts)
        self.chats: list[list[Message]] = []
        self.planned: list[Planned] = []

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

    def _check_prompt(self, planned: Planned, messages: list[Message], prefill: str) -> None:
        parent = planned.parent
        if parent is not None:
            prompt_ids, sampled = self.engine.sampled[parent.completion_id]
            assert planned.prompt_ids[: planned.num_reused] == prompt_ids + sampled.token_ids
        if planned.how != "realigned":
            assert (
                self.renderer.decode(planned.prompt_ids, skip_special_tokens=False)
                == self.renderer.render(messages) + prefill
            )

    def _answer(self, planned: Planned, messages: list[Message], call: Call, index: int) -> None:
        choice = call.choices[index]
        text, is_ended = choice.raw
        completion = self.engine.sample(self.renderer.encode(text + END * is_ended))
        if not choice.is_delivered:
            return
        completion_id = f"chatcmpl-{planned.number}/{index}"
        content = call.prefill + text
        self.capture.record(planned, completion, assistant(content), completion_id, choice=index)
        self.engine.sampled[completion_id] = (planned.prompt_ids, completion)
        sent_back = {
            "same": assistant(content),
            "nones": {"tool_calls": None, "content": content, "role": "assistant", "refusal": None},
            "spaced": assistant(f" {content.strip()}\n"),
        }
        self.chats.append([*messages, sent_back[choice.sent_back_as]])

    def rollout(self) -> Rollout | None:
        """None where it is refused, because there is nothing to train on."""
        has_tokens = any(completion.token_ids for _, completion in self.engine.sampled.values())
        rewards = {completion_id: float(number) for number, completion_id in enumerate(self.engine.sampled)}
        if has_tokens:
            return self.capture.rollout(3, Outcome(turn_rewards=rewards), 0.0)
        with pytest.raises(RolloutFailure, match="not one sampled token"):
            self.capture.rollout(3, Outcome(turn_rewards=rewards), 0.0)
        return None

    def check(self, rollout: Rollout) -> None:
        """Each run of trained tokens is one completion, after the prompt that its call was sent with."""
        by_logprob = {
            sampled.behaviour_logprobs[0]: name
            for name, (_, sampled) in self.engine.sampled.items()
            if sampled.token_ids
        }
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
                spans += [
                    VersionSpan(start + span.start, start + span.end, span.version)
                    for span in sampled.version_spans
                ]
                credits.append((start, end, float(list(self.engine.sampled).index(name))))
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
def test_what_is_trained_is_what_was_sampled_after_what_was_sent(
    habit: Habit, story: list[tuple[list[Call], Any]]
) -> None:
    history = History(habit)
    for calls, order in story:
        history.round(calls, order)
    counts, planned = history.counts, history.planned
    assert counts.calls == len(planned) == counts.extended + counts.realigned + counts.forked + 1
    assert [plan.number for plan in planned if plan.how == "new"] == [0]
    rollout = history.rollout()
    if rollout is not None:
        history.check(rollout)
