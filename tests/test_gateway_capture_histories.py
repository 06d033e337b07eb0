"""Random trees of calls: each sampled token is trained once after its prompt, in any
order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import pytest
from costly_cases import slow
from gateway_capture_cases import (
    END,
    CharRenderer,
    Habit,
    Message,
    assistant,
    plan,
    user,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from token_cases import completion_of

from asyncrl.agents.endpoint.capture import Capture, PromptPlan
from asyncrl.agents.endpoint.tool_formats import THINKING, split_thought
from asyncrl.base.errors import RolloutFailure
from asyncrl.messages.records import Completion, Outcome, Rollout, VersionSpan
from asyncrl.messages.tokens import ROUTING
from asyncrl.messages.turn_rewards import with_turn_rewards

Call = dict[str, Any]
"""The next call of a harness: continue from an answer, repeat its question, or edit the
history.
"""

CHOICES = st.lists(
    st.fixed_dictionaries(
        {
            "text": st.text(alphabet="ab| ", max_size=4),
            "is_ended": st.booleans(),
            "is_delivered": st.integers(0, 4).map(bool),
            "sent_back_as": st.sampled_from(
                ["same", "nones", "spaced", "apart", "left out"]
            ),
        }
    ),
    min_size=1,
    max_size=3,
)
"""Answers of a call, cut, equal or empty. If one is not delivered, its client has
disconnected.
"""
CALL = st.fixed_dictionaries(
    {
        "basis": st.integers(0, 20),
        "kind": st.sampled_from(
            ["on", "on", "on", "again", "edit_answer", "edit_front", "drop_front"]
        ),
        "texts": st.lists(st.text(alphabet="xy", max_size=2), min_size=1, max_size=2),
        "choices": CHOICES,
        "prefill": st.sampled_from(["", "", "p"]),
    }
)
STORY = st.lists(st.lists(CALL, min_size=1, max_size=3), min_size=1, max_size=6)
"""Rounds of calls; those of one round are planned together and answered in any order.
"""
ORDER = st.randoms(use_true_random=False)


@dataclass
class History:
    """Play a story. The logprob of each sampled token is unique and identifies it in
    the rollout.
    """

    habit: Habit
    order: Random
    chats: dict[str, list[Message]] = field(default_factory=dict)
    """Histories of the harness that end with an answer, by completion."""
    sampled: dict[str, tuple[list[int], Completion]] = field(default_factory=dict)
    """Completion id -> (prompt ids, delivered completion)."""

    def __post_init__(self) -> None:
        self.renderer = CharRenderer(self.habit)
        self.thinking = ("<", "|") if self.habit == "strips" else THINKING
        self.capture = Capture(self.renderer, self.thinking)

    def round(self, number: int, calls: list[Call]) -> None:
        """Plan all, then answer each; the answers are known to the calls of the next
        round.
        """
        known = [self.chats[name] for name in sorted(self.chats)]
        answered = []
        for at, call in self.order.sample([*enumerate(calls)], len(calls)):
            messages = self._messages(call, known)
            planned = plan(self.capture, messages, None, prefill=call["prefill"])
            self._check_prompt(planned, messages, call["prefill"])
            places = [
                ((number * 3 + at) * 3 + index, index)
                for index in range(len(call["choices"]))
            ]
            answered += [(planned, messages, call, *place) for place in places]
        self.order.shuffle(answered)
        for each in answered:
            self._answer(*each)

    def _messages(self, call: Call, known: list[list[Message]]) -> list[Message]:
        new = [user(text) for text in call["texts"]]
        if not known:
            return new
        chat = list(known[call["basis"] % len(known)])
        if call["kind"] == "again":
            return chat[:-1]
        if call["kind"] == "edit_answer":
            chat[-1] = assistant("edited")
        if call["kind"] == "edit_front":
            chat[0] = user("edited")
        return (chat[1:] if call["kind"] == "drop_front" else chat) + new

    def _check_prompt(
        self, planned: PromptPlan, messages: list[Message], prefill: str
    ) -> None:
        prompt = planned.prompt_ids.tolist()
        if planned.parent is not None:
            before, sampled = self.sampled[planned.parent.name]
            assert prompt == [*before, *sampled.token_ids, *planned.added.tolist()]
        if planned.match is not None and planned.match.whole is not None:
            assert planned.how != "realigned"
            text = self.renderer.decode(prompt, skip_special_tokens=False)
            assert text == self.renderer.render(messages) + prefill

    def _answer(
        self,
        planned: PromptPlan,
        messages: list[Message],
        call: Call,
        place: int,
        index: int,
    ) -> None:
        choice = call["choices"][index]
        ids = self.renderer.encode(choice["text"] + END * choice["is_ended"])
        middle = len(ids) // 2
        cuts = [(0, middle), (middle, len(ids))]
        num_read = len(planned.prompt_ids) + len(ids)
        completion = completion_of(
            ids,
            [-float(1 + place * 10 + at) for at in range(len(ids))],
            [
                VersionSpan(start, end, place + start)
                for start, end in cuts
                if start < end
            ],
            "stop" if choice["is_ended"] else "length",
            num_interruptions=len(ids) % 3,
            prompt=planned.prompt_ids,
        )
        if choice["is_ended"]:
            routing = np.array([(place, at) for at in range(num_read)], "<u2").reshape(
                -1, 2
            )
            completion = replace(
                completion, tokens=completion.tokens.with_columns({ROUTING: routing})
            )
        if not choice["is_delivered"]:
            return
        name = f"chatcmpl-{place:03}"
        content = call["prefill"] + choice["text"]
        self.capture.record(planned, completion, assistant(content), name)
        self.sampled[name] = (planned.prompt_ids.tolist(), completion)
        thought, answer = split_thought(assistant(content), self.thinking)
        sent_back = {
            "same": assistant(content),
            "nones": {
                "tool_calls": None,
                "content": content,
                "role": "assistant",
                "refusal": None,
            },
            "spaced": assistant(f" {content.strip()}\n"),
            "apart": assistant(answer, reasoning_content=thought),
            "left out": assistant(answer),
        }
        self.chats[name] = [*messages, sent_back[choice["sent_back_as"]]]

    def rollout(self) -> Rollout:
        """Check that each run of trained tokens is one completion, after the prompt
        that its call was sent with.
        """
        rewards = {
            name: float(int(name[-3:]))
            for name, (_, one) in self.sampled.items()
            if one.token_ids
        }
        outcome = Outcome(turn_rewards=rewards)
        rollout = self.capture.rollout(3, outcome, 0.0)
        for by_turn in (False, True):
            known = self.capture.rollout(3, outcome, 0.0, by_turn=by_turn)
            first, *others = self.capture.rollout(3, Outcome(), 0.0, by_turn=by_turn)
            unpaid = (replace(first, untrained=self.capture.untrained), *others)
            later = with_turn_rewards(unpaid, outcome)
            assert credits_of(later, by_turn) == credits_of(known, by_turn)
        by_logprob = {
            self.sampled[name][1].behaviour_logprobs[0]: name for name in rewards
        }
        seen: list[str] = []
        interruptions = 0
        for number, branch in enumerate(rollout):
            assert (branch.branch, branch.sample_index) == (number, 3)
            spans, credits = [], []
            edges = np.flatnonzero(np.diff([False, *branch.loss_mask, False])).reshape(
                -1, 2
            )
            for start, end in edges.tolist():
                name = by_logprob[float(branch.tokens.behaviour_logprobs[start])]
                prompt_ids, sampled = self.sampled[name]
                assert branch.token_ids[:end].tolist() == [
                    *prompt_ids,
                    *sampled.token_ids,
                ]
                assert (
                    tuple(branch.tokens.behaviour_logprobs[start:end].tolist())
                    == sampled.behaviour_logprobs
                )
                for span in sampled.sampled.spans:
                    spans.append(
                        VersionSpan(start + span.start, start + span.end, span.version)
                    )
                credits.append((start, end, rewards[name]))
                interruptions += sampled.num_interruptions
                seen.append(name)
            # The branch ends with this call, which has read all of it.
            if ROUTING in sampled.tokens.columns:
                read = sampled.tokens.columns[ROUTING]
                assert np.array_equal(branch.tokens.columns[ROUTING], read)
            assert branch.tokens.spans == tuple(spans)
            assert [
                (credit.start, credit.end, credit.reward) for credit in branch.credits
            ] == credits
            assert not branch.tokens.behaviour_logprobs[~branch.loss_mask].any()
        assert sum(branch.num_interruptions for branch in rollout) == interruptions
        assert sorted(seen) == sorted(by_logprob.values()), (
            "each sampled token is trained once"
        )
        units = [credit.unit for branch in rollout for credit in branch.credits]
        assert len(set(units)) == len(units), "each completion is a unit"
        return rollout


def credits_of(rollout: Rollout, by_turn: bool) -> list[Any]:
    """Of parallel answers with equal tokens, the order of the branches says nothing."""
    return sorted(
        (
            branch.token_ids.tolist(),
            credit.start,
            credit.end,
            credit.reward,
            credit.unit if by_turn else 0,
            credit.state,
        )
        for branch in rollout
        for credit in branch.credits
    )


def values(rollout: Rollout) -> Iterator[Any]:
    for branch in rollout:
        yield (
            branch.token_ids.tolist(),
            branch.loss_mask.tolist(),
            branch.tokens.behaviour_logprobs.tolist(),
        )
        yield (
            branch.tokens.spans,
            branch.credits,
            branch.num_interruptions,
            branch.is_truncated,
        )


@pytest.mark.parametrize(
    "habit",
    ["plain", "strips"] + [slow(one) for one in ("shouts", "refuses")],
)
@settings(deadline=None, max_examples=120)
@given(story=STORY, orders=st.tuples(ORDER, ORDER))
def test_each_token_is_trained_once_after_its_prompt_in_any_order(
    habit: Habit, story: list[list[Call]], orders: tuple[Random, Random]
) -> None:
    found = []
    for order in orders:
        history = History(habit, order)
        for number, calls in enumerate(story):
            history.round(number, calls)
        if not any(one.token_ids for _, one in history.sampled.values()):
            with pytest.raises(RolloutFailure, match="not one sampled token"):
                history.rollout()
            return
        found.append(list(values(history.rollout())))
    assert found[0] == found[1]
