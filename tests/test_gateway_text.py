"""Streamed text does not depend on the pieces of an answer and never changes later."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from gateway_cases import END as BYTES_END
from gateway_cases import ByteTokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from text_tokenizers import END, PYTHON, START, byte_fallback, byte_level, metaspace, save
from tiny_model import TINY_CHARACTERS
from transformers import AutoTokenizer

from asyncrl.agents.endpoint.answers import Answer, AnswerText
from asyncrl.agents.endpoint.requests import ChatRequest
from asyncrl.agents.endpoint.tool_formats import MAX_TOOLS, find_tool_format
from asyncrl.messages.records import Completion, VersionSpan
from asyncrl.messages.stop_strings import StopWatch
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.trainer.random_init import make_character_tokenizer

MARKER = "<tool_call>"
MAKERS = {make.__name__: make for make in (byte_level, byte_fallback, metaspace)}
TEXTS = ["\U0001f600", "\u20ac", "\ufffd", "the", " fox", "\n", " ", "  ", "ab", MARKER, END, START, PYTHON]
_saved: dict[str, HFChatTokenizer] = {}


@pytest.fixture(scope="module", autouse=True)
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> None:
    for name, make in MAKERS.items():
        _saved[name] = save(make(), tmp_path_factory.mktemp("tokenizer") / name, markers=(MARKER,))
    folder = tmp_path_factory.mktemp("characters")
    make_character_tokenizer(TINY_CHARACTERS).save_pretrained(folder)
    _saved["characters"] = HFChatTokenizer(folder)


def pieces(answer: AnswerText, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """Feed `ids` in pieces of lengths `cuts`, then the rest; return the texts."""
    out, at = [], 0
    for length in cuts:
        out.append(answer.feed(ids[at : at + length]))
        at += length
    return [*out, answer.feed(ids[at:]), answer.finish()]


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Cut the text at the first stop string, or at the longest if several end there."""
    for end in range(len(text) + 1):
        if found := [entry for entry in stop if text[:end].endswith(entry)]:
            return text[: end - max(map(len, found))]
    return text


def visible(
    tokenizer: HFChatTokenizer, ids: Sequence[int], stop: Sequence[str], *, shows_special: bool
) -> tuple[str, bool]:
    """Return the text of the whole answer, and whether a stop string ended it.

    Stop strings are looked for between the special tokens that are shown; the name of one is another.
    """

    def decode(tokens: Sequence[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=False)

    text, before, segment = "", list[int](), list[int]()
    for token in [*ids, None]:
        name = "" if token is None else decode([token])
        is_special = token in tokenizer.special_ids
        if token is not None and not is_special:
            segment.append(token)
            continue
        if is_special and name not in stop and (not shows_special or token in tokenizer.end_ids):
            continue
        plain = decode([*before, *segment])[len(decode(before)) :]
        text += cut_at_stop(plain, stop)
        if any(entry in plain for entry in stop):
            return text, True
        if token is None or name in stop:
            return text, token is not None
        text += name
        before, segment = [*before, *segment, token], []
    raise AssertionError


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Any ids, and some that the vocabulary does not have; often the single bytes of characters, whole or
    broken off.
    """
    tokenizer = _saved[name]
    texts, cut = st.sampled_from(TEXTS), st.sampled_from([None, 1, 2, 3])
    encoded = st.builds(lambda text, length: list(tokenizer.encode(text))[:length], texts, cut)
    ids = st.lists(st.integers(0, max(tokenizer.text_ids) + 5), max_size=3)
    return st.lists(encoded | ids, max_size=25).map(lambda each: sum(each, []))


@pytest.mark.parametrize("shows_special", [True, False])
@pytest.mark.parametrize("name", [*MAKERS, "characters"])
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), cuts=st.lists(st.integers(0, 6), max_size=60))
def test_pieces_are_the_text_up_to_the_first_stop(
    name: str, shows_special: bool, data: st.DataObject, cuts: list[int]
) -> None:
    tokenizer = _saved[name]
    ids = data.draw(ids_of(name))
    names = [tokenizer.decode([token], skip_special_tokens=False) for token in sorted(tokenizer.special_ids)]
    whole = tokenizer.decode(ids, skip_special_tokens=not shows_special)
    inside = st.integers(0, len(whole)).map(lambda at: whole[at : at + 1 + at % 5])
    more = st.sampled_from(["zz", "fox ", "\ufffd", "e", *names])
    stop = data.draw(st.lists((inside | more).filter(bool), max_size=3))
    answer = AnswerText(tokenizer, stop, shows_special=shows_special)
    expected, is_stopped = visible(tokenizer, ids, stop, shows_special=shows_special)
    out = pieces(answer, ids, cuts)
    assert ("".join(out), answer.stopped_by is not None) == (expected, is_stopped)
    so_far = ""
    for piece in out:
        so_far += piece
        assert expected.startswith(so_far), "what was handed out stays"


# ---- what a client is told of a completion


PIECES = ['{"name": "f", "arguments": {"x": 1}}', '{"name": "f", "parameters": {}}', MARKER, "</tool_call>"]
PIECES += [" ", "\n", "ü", "🙂", "<tool", "</", "STOP", "ST", "x", "<|python_tag|>", "{", "</think>"]


def finished(ids: Sequence[int], reason: Any = "stop") -> Completion:
    return Completion(tuple(ids), (-1.0,) * len(ids), (VersionSpan(0, len(ids), 0),), reason)


def make_choice(format_name: str, stop: tuple[str, ...] = (), prefill: str = "") -> Answer:
    asked = ChatRequest(messages=[{"role": "user", "content": ""}], stop=list(stop), logprobs=True)
    tool_format = find_tool_format(format_name, "")
    return Answer(0, ByteTokenizer(), tool_format, asked, prefill=prefill, name="call_0")


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    settings=st.sampled_from([("hermes", ""), ("hermes", "<tool_call>\n"), ("llama", ""), ("none", "")]),
    stop=st.sampled_from([(), ("STOP",)]),
    ends=st.booleans(),
)
def test_stream_shows_the_content_of_the_whole_answer(
    pieces: list[str], cuts: list[int], settings: tuple[str, str], stop: tuple[str, ...], ends: bool
) -> None:
    ids = ByteTokenizer().encode("".join(pieces))
    ids = (*ids, BYTES_END) if ends or not ids else ids
    completion = finished(ids, "stop" if ends else "length")
    whole, streamed = (make_choice(settings[0], stop, settings[1]) for _ in range(2))
    whole.finish(completion)
    shown, at = "", 0
    for cut in cuts:
        streamed.feed(ids[at : at + cut])
        at += cut
        assert streamed.shown.startswith(shown), "what was shown stays"
        shown = streamed.shown
    streamed.finish(completion)
    assert streamed.shown.startswith(shown)
    assert streamed.shown == (whole.content or "")
    assert (streamed.message, streamed.finish_reason) == (whole.message, whole.finish_reason)
    assert streamed.num_tokens == whole.num_tokens == len(ids)
    assert bool(whole.tool_calls) <= (whole.finish_reason in ("tool_calls", "length"))


def test_answer_with_too_many_calls_is_text() -> None:
    """The harness sends its history back, and would get a 400 for it."""
    for num_calls, num_read in ((MAX_TOOLS, MAX_TOOLS), (MAX_TOOLS + 1, 0)):
        text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * num_calls
        choice = make_choice("hermes")
        choice.finish(finished(ByteTokenizer().encode(text)))
        assert len(choice.tool_calls) == num_read
        assert choice.content == (None if num_read else text)


def test_logprobs_have_the_bytes_of_whole_characters() -> None:
    choice = make_choice("none")
    choice.finish(finished(ByteTokenizer().encode("aü")))
    choice.build_logprobs()
    found = [(each["token"], each["bytes"]) for each in choice.logprobs or ()]
    assert found == [("a", [97]), ("�", None), ("�", None)]


# ---- stop strings, and the engine's


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(st.sampled_from(["the", " fox", "ab", START, PYTHON, "|", "<"]), max_size=12),
    stop=st.lists(st.sampled_from(["|", "<", "python", "xa", "foxab", PYTHON, START, "e f"]), max_size=3),
    cuts=st.lists(st.integers(0, 4), max_size=12),
)
def test_client_and_engine_stop_at_the_same_text(parts: list[str], stop: list[str], cuts: list[int]) -> None:
    tokenizer = _saved["byte_level"]
    engine_tokenizer = AutoTokenizer.from_pretrained(tokenizer.model_path)
    added = engine_tokenizer.added_tokens_decoder.items()
    stop_ids = [index for index, token in added if token.special and str(token) in stop]
    watch = StopWatch(stop, partial(engine_tokenizer.decode, skip_special_tokens=True), stop_ids=stop_ids)
    sampled: list[int] = []
    is_stopped = False
    for token in tokenizer.encode("".join(parts)):
        sampled.append(token)
        if is_stopped := bool(stop) and watch.is_complete(token):
            break
    answer = AnswerText(tokenizer, stop, shows_special=False)
    shown = "".join(pieces(answer, sampled, cuts))
    assert (answer.stopped_by is not None) == is_stopped
    plain = tokenizer.decode(sampled)
    assert shown == (plain if answer.stopped_by in (START, PYTHON) else cut_at_stop(plain, stop))
