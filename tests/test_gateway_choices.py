"""What a client is told of a completion, however its tokens come."""

from __future__ import annotations

from collections.abc import Sequence

from gateway_cases import END, ByteTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.agents.endpoint.answer_text import Choice, TokenNames
from asyncrl.agents.endpoint.chat_messages import MAX_TOOLS
from asyncrl.agents.endpoint.tool_calls import find_tool_format
from asyncrl.messages.records import Completion, VersionSpan

PIECES = [
    "<tool_call>",
    '{"name": "f", "arguments": {"x": 1}}',
    '{"name": "f", "parameters": {}}',
    "</tool_call>",
    " ",
    "\n",
    "ü",
    "🙂",
]
PIECES += ["<tool", "</", "STOP", "ST", "x", "<|python_tag|>", "{", "</think>"]


def make_choice(format_name: str, stop: Sequence[str], prefill: str) -> Choice:
    return Choice(
        0,
        ByteTokenizer(),
        stop=stop,
        tool_format=find_tool_format(format_name, ""),
        prefill=prefill,
        name="call_0-0",
        has_logprobs=True,
        token_names={},
    )


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    format_name=st.sampled_from(["hermes", "llama", "none"]),
    stop=st.sampled_from([(), ("STOP",)]),
    prefill=st.sampled_from(["", "<tool_call>\n"]),
    ends=st.booleans(),
)
def test_a_stream_shows_exactly_the_content_of_the_whole_answer(
    pieces: list[str], cuts: list[int], format_name: str, stop: tuple[str, ...], prefill: str, ends: bool
) -> None:
    ids = ByteTokenizer().encode("".join(pieces))
    ids = (*ids, END) if ends or not ids else ids
    completion = Completion(
        ids, (-1.0,) * len(ids), (VersionSpan(0, len(ids), 0),), "stop" if ends else "length"
    )
    whole = make_choice(format_name, stop, prefill if format_name != "none" else "")
    whole.finish(completion)
    streamed = make_choice(format_name, stop, prefill if format_name != "none" else "")
    shown, at = "", 0
    for cut in cuts:
        streamed.feed(ids[at : at + cut])
        at += cut
        shown += streamed.take()
    streamed.finish(completion)
    shown += streamed.take()
    assert streamed.take() == ""
    assert shown == (whole.content or "")
    assert streamed.message == whole.message
    assert streamed.finish_reason == whole.finish_reason
    assert streamed.num_tokens == whole.num_tokens == len(ids)
    assert bool(whole.tool_calls) <= (whole.finish_reason in ("tool_calls", "length"))
    assert streamed.logprobs == whole.logprobs


def test_an_answer_of_more_calls_than_a_message_may_hold_is_text() -> None:
    """The harness sends its history back, and would get a 400 for it."""
    for num_calls in (MAX_TOOLS, MAX_TOOLS + 1):
        ids = ByteTokenizer().encode('<tool_call>{"name": "f", "arguments": {}}</tool_call>' * num_calls)
        choice = make_choice("hermes", (), "")
        choice.finish(Completion(ids, (-1.0,) * len(ids), (VersionSpan(0, len(ids), 0),), "stop"))
        assert len(choice.tool_calls) == (num_calls if num_calls <= MAX_TOOLS else 0)
        assert choice.content == (None if num_calls <= MAX_TOOLS else ByteTokenizer().decode(ids))


def test_logprobs_name_each_token_and_decode_it_once_however_often_it_comes() -> None:
    class Counting(ByteTokenizer):
        num_single = 0

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            self.num_single += len(token_ids) == 1 and not skip_special_tokens
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    tokenizer = Counting()
    names: TokenNames = {}
    ids = (*tokenizer.encode("aü" * 1000), END)
    for _ in range(2):
        choice = Choice(
            0,
            tokenizer,
            tool_format=find_tool_format("none", ""),
            name="call_0-0",
            has_logprobs=True,
            token_names=names,
        )
        choice.feed(ids)
        choice.finish(Completion(ids, (-1.0,) * len(ids), (VersionSpan(0, len(ids), 0),), "stop"))
        assert choice.logprobs is not None
        assert [each["bytes"] for each in choice.logprobs[:3]] == [[97], None, None]
        assert len(choice.logprobs) == len(ids)
    assert tokenizer.num_single < 10
