"""Thoughts are split from a streamed answer, whatever its pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from gateway_cases import HI, ByteTokenizer, ScriptedEngine, gateway_world, in_loop, num_forked, talking
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.agents.endpoint.reasoning import ReasoningSplitter, sealed, signature_of, unsealed
from asyncrl.config import GatewayConfig
from asyncrl.messages.records import Outcome

MARKS = ("<think>", "</think>")


def cut(text: str, lengths: Sequence[int] = (), *, is_open: bool = False) -> tuple[str, str]:
    """(thought, text) when it comes in pieces of these lengths, and the rest at once."""
    cutter, at, found = ReasoningSplitter(MARKS, is_open=is_open), 0, []
    for length in lengths:
        found.append(cutter.feed(text[at : at + length]))
        at += length
    found += [cutter.feed(text[at:]), cutter.finish()]
    return "".join(thought for thought, _ in found), "".join(shown for _, shown in found)


@pytest.mark.parametrize(
    ("text", "is_open", "thought", "shown"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes."),
        ("Hm.\n</think>\n\nYes.", True, "Hm.", "Yes."),
        ("<think>Hm.</think>Yes.", True, "Hm.", "Yes."),
        ("\n <think>a  b</think>  ", False, "a  b", ""),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("<think>\nHm, and", False, "Hm, and", ""),
        ("Hm, and", True, "Hm, and", ""),
        ("<think>Hm </thi", False, "Hm </thi", ""),
        ("<thi", False, "", "<thi"),
        ("", True, "", ""),
        ("  Yes. <think>no</think>", False, "", "  Yes. <think>no</think>"),
        ("Yes.</think>", False, "", "Yes.</think>"),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("<think>a <think> b</think>c", False, "a <think> b", "c"),
    ],
)
def test_leading_thought_is_split_from_the_text(text: str, is_open: bool, thought: str, shown: str) -> None:
    assert cut(text, is_open=is_open) == (thought, shown)
    assert cut(text, [1] * len(text), is_open=is_open) == (thought, shown)


TEXTS = st.lists(st.sampled_from([*MARKS, "<th", "</", "ink>", " ", "\n", "a", "é", "<"]), max_size=9).map(
    "".join
)


@given(TEXTS, st.booleans(), st.lists(st.integers(0, 5), max_size=30))
def test_split_does_not_depend_on_the_pieces(text: str, is_open: bool, lengths: list[int]) -> None:
    assert cut(text, lengths, is_open=is_open) == cut(text, is_open=is_open)


@given(st.text())
def test_sealed_thought_opens_and_a_changed_one_is_detected(thought: str) -> None:
    assert unsealed(sealed(thought)) == thought
    assert signature_of(thought) != signature_of(thought + " ")
    for other in (thought, sealed(thought)[:-1] + "!"):
        with pytest.raises(ValueError, match=r"does not come from|base64|Invalid|padded|characters"):
            unsealed(other)


class Opening(ByteTokenizer):
    """Its template opens the thought."""

    def render(self, messages: Any, *, tools: Any = None, settings: Any = None) -> str:
        return super().render(messages, tools=tools) + "<think>\n"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("opens", [False, True])
@in_loop
async def test_separate_thoughts_return_to_one_branch(opens: bool, streamed: bool) -> None:
    text = "Hm.\n</think>\n\nYes." if opens else "<think>\nHm.\n</think>\n\nYes."
    tokenizer = Opening() if opens else ByteTokenizer()
    engine = ScriptedEngine(lambda _: text, tokenizer=tokenizer)
    async with talking(engine=engine, thoughts="apart") as talk:
        messages: list[Any] = list(HI)
        for _ in range(2):
            told = {"reasoning_content": "", "content": ""}
            answer: Any = await talk.chat(messages, stream=streamed)
            if streamed:
                async for chunk in answer:
                    for name, before in told.items():
                        told[name] = before + (getattr(chunk.choices[0].delta, name, None) or "")
            else:
                told = {name: getattr(answer.choices[0].message, name) for name in told}
            assert told == {"reasoning_content": "Hm.", "content": "Yes."}
            messages += [{"role": "assistant", **told}, {"role": "user", "content": "Sure?"}]
        assert talk.is_one_branch_of(*[text] * 2)


@in_loop
async def test_inline_answers_and_text_completions_are_never_split() -> None:
    text = "<think>\nHm.\n</think>\n\nYes."
    assert GatewayConfig().thoughts == "inline"
    async with gateway_world(ScriptedEngine(lambda _: text)) as world:
        _, answer = await world.ask()
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
    async with gateway_world(ScriptedEngine(lambda _: text), thoughts="apart") as world:
        _, answer = await world.post({"prompt": "x", "max_tokens": 99}, path="/v1/completions")
        assert answer["choices"][0]["text"] == text


@in_loop
async def test_unclosed_thought_is_no_answer_and_hides_calls() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "f"}}]
    for text, content, num_calls in (
        (f"<think>\nI could {call}", "", 0),
        (f"<think>{call}</think>No.", "No.", 0),
        (f"<think>Yes.</think>{call}", None, 1),
    ):
        async with gateway_world(ScriptedEngine(lambda _, text=text: text), thoughts="apart") as world:  # type: ignore[misc]
            _, answer = await world.ask(tools=tools)
            message = answer["choices"][0]["message"]
            assert (message["content"], len(message.get("tool_calls", []))) == (content, num_calls)
            assert "<think>" not in message["reasoning_content"]


def thinking_by_seed(request: Any) -> str:
    return f"<think>{request.seed % 9973}</think>42"


SURE = [{"role": "assistant", "content": "42"}, {"role": "user", "content": "Sure?"}]


@in_loop
async def test_order_of_equal_answers_changes_nothing() -> None:
    found = []
    for order in ((1, 2), (2, 1)):
        async with gateway_world(ScriptedEngine(thinking_by_seed)) as world:
            for seed in order:
                assert (await world.post({"messages": HI, "seed": seed}))[0] == 200
            for number in (1, 2):
                assert (await world.post({"messages": [*HI, *SURE * number], "seed": 7}))[0] == 200
            rollout = world.session.rollout(0, Outcome(), 1.0)
            found.append([(each.token_ids.tolist(), each.loss_mask.tolist()) for each in rollout])
            assert num_forked(world) == 1, "the second of the two"
    assert found[0] == found[1]
