"""Streamed text does not depend on the pieces of an answer and never changes later."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from text_tokenizers import END, PYTHON, START, byte_fallback, byte_level, save
from token_cases import completion_of
from transformers import AutoTokenizer

from asyncrl.agents.endpoint.answers import Answer, AnswerText
from asyncrl.agents.endpoint.tool_formats import ToolFormat
from asyncrl.messages.sampling import LeadingThought, StopWatch
from asyncrl.rollouts.tokenizer import HFChatTokenizer

MARKER = "<tool_call>"
MAKERS = {make.__name__: make for make in (byte_level, byte_fallback)}
TEXTS = [
    "\U0001f600",
    "\u20ac",
    "\ufffd",
    "the",
    " fox",
    "\n",
    " ",
    "  ",
    "ab",
    MARKER,
    END,
    START,
    PYTHON,
]
_saved: dict[str, HFChatTokenizer] = {}


@pytest.fixture(scope="module", autouse=True)
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> None:
    for name, make in MAKERS.items():
        _saved[name] = save(
            make(), tmp_path_factory.mktemp("tokenizer") / name, markers=(MARKER,)
        )


def pieces(
    answer: AnswerText,
    ids: Sequence[int],
    cuts: Sequence[int],
    *,
    is_stopped: bool = True,
) -> list[str]:
    """Feed `ids` in pieces of lengths `cuts`, then the rest; return the texts."""
    out, at = [], 0
    for length in cuts:
        out.append(answer.feed(ids[at : at + length]))
        at += length
    return [*out, answer.feed(ids[at:]), answer.finish(is_stopped=is_stopped)]


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Cut the text at the first stop string, or at the longest if several end there."""
    for end in range(len(text) + 1):
        if found := [entry for entry in stop if text[:end].endswith(entry)]:
            return text[: end - max(map(len, found))]
    return text


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Any ids, and some that the vocabulary does not have; often the single bytes of
    characters, whole or broken off.
    """
    tokenizer = _saved[name]
    texts, cut = st.sampled_from(TEXTS), st.sampled_from([None, 1, 2, 3])
    encoded = st.builds(
        lambda text, length: list(tokenizer.encode(text))[:length], texts, cut
    )
    ids = st.lists(st.integers(0, max(tokenizer.text_ids) + 5), max_size=3)
    return st.lists(encoded | ids, max_size=25).map(lambda each: sum(each, []))


@pytest.mark.parametrize("shows_special", [True, False])
@pytest.mark.parametrize("name", [*MAKERS])
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), cuts=st.lists(st.integers(0, 6), max_size=60))
def test_text_does_not_depend_on_its_pieces(
    name: str, shows_special: bool, data: st.DataObject, cuts: list[int]
) -> None:
    tokenizer = _saved[name]
    ids = data.draw(ids_of(name))
    names = [
        tokenizer.decode([token], skip_special_tokens=False)
        for token in sorted(tokenizer.special_ids)
    ]
    whole = tokenizer.decode(ids, skip_special_tokens=not shows_special)
    inside = st.integers(0, len(whole)).map(lambda at: whole[at : at + 1 + at % 5])
    more = st.sampled_from(["zz", "fox ", "\ufffd", "e", *names])
    stop = data.draw(st.lists((inside | more).filter(bool), max_size=3))
    answer, at_once = (
        AnswerText(tokenizer, stop, shows_special=shows_special) for _ in range(2)
    )
    shown, expected = (
        "".join(pieces(*each)) for each in ((answer, ids, cuts), (at_once, ids, []))
    )
    assert (shown, answer.stopped_by) == (expected, at_once.stopped_by)
    if answer.stopped_by is None:
        kept = [token for token in ids if token not in tokenizer.end_ids]
        assert shown == tokenizer.decode(kept, skip_special_tokens=not shows_special)


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    parts=st.lists(
        st.sampled_from(["the", " fox", "ab", START, PYTHON, "|", "<"]), max_size=12
    ),
    stop=st.lists(
        st.sampled_from(["|", "<", "python", "xa", "foxab", PYTHON, START, "e f"]),
        max_size=3,
    ),
    cuts=st.lists(st.integers(0, 4), max_size=12),
)
def test_client_and_engine_stop_at_the_same_text(
    parts: list[str], stop: list[str], cuts: list[int]
) -> None:
    tokenizer = _saved["byte_level"]
    engine_tokenizer = AutoTokenizer.from_pretrained(tokenizer.model_path)
    added = engine_tokenizer.added_tokens_decoder.items()
    stop_ids = [index for index, token in added if token.special and str(token) in stop]
    watch = StopWatch(
        stop,
        partial(engine_tokenizer.decode, skip_special_tokens=True),
        stop_ids=stop_ids,
    )
    sampled: list[int] = []
    is_stopped = False
    for token in tokenizer.encode("".join(parts)):
        sampled.append(token)
        if is_stopped := bool(stop) and watch.is_complete(token):
            break
    answer = AnswerText(tokenizer, stop, shows_special=False)
    shown = "".join(pieces(answer, sampled, cuts, is_stopped=is_stopped))
    assert (answer.stopped_by is not None) == is_stopped
    plain = tokenizer.decode(sampled)
    assert shown == (
        plain if answer.stopped_by in (START, PYTHON) else cut_at_stop(plain, stop)
    )


@pytest.mark.parametrize("name", [*MAKERS])
def test_logprobs_of_parts_of_characters_read_the_vocabulary_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = _saved[name]
    reads = iter([tokenizer.vocabulary])
    monkeypatch.setattr(HFChatTokenizer, "vocabulary", property(lambda _: next(reads)))
    ids = tokenizer.encode("\U0001f600")
    text = AnswerText(tokenizer)
    answer = Answer(
        tokenizer=tokenizer, tool_format=ToolFormat(), text=text, options={}
    )
    answer.finish(completion_of(ids, finish="stop"))
    answer.build_logprobs()
    given = b"".join(bytes(entry["bytes"]) for entry in answer.logprobs or ())
    assert given.endswith("\U0001f600".encode())


def cut_after_thought(text: str, stop: Sequence[str], thinking: tuple[str, str]) -> str:
    """Cut the text at the first stop string after its leading thought."""
    opening, closing = thinking
    bare = text.lstrip()
    if not bare.startswith(opening):
        return text if opening.startswith(bare) else cut_at_stop(text, stop)
    _, found, after = bare.removeprefix(opening).partition(closing)
    return text.removesuffix(after) + cut_at_stop(after, stop) if found else text


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    parts=st.lists(
        st.sampled_from(
            ["the", " fox", "ab", " ", "\U0001f600", "<", "[", "[ab]", "[/ab]", "]the"]
        ),
        max_size=12,
    ),
    stop=st.lists(
        st.sampled_from(["]", "[", "the", " fox", "e f", "ab", "\U0001f600"]),
        min_size=1,
        max_size=3,
    ),
    thinking=st.sampled_from(
        [("[ab]", "[/ab]"), ("", "[/ab]"), ("the", "\U0001f600ab"), (START, PYTHON)]
    ),
    cuts=st.lists(st.integers(0, 4), max_size=12),
    data=st.data(),
)
def test_stop_text_counts_only_after_the_thought(
    parts: list[str],
    stop: list[str],
    thinking: tuple[str, str],
    cuts: list[int],
    data: st.DataObject,
) -> None:
    tokenizer = _saved["byte_level"]
    if START in thinking:
        named = {"[ab]": START, "[/ab]": PYTHON}
        parts = [named.get(part, part) for part in parts]
        # no special token is spanned
        stop = [text for text in stop if text in (" fox", "ab")] or ["the"]
    sampled: list[int] = []
    watch = StopWatch(stop, tokenizer.decode, thinking=thinking)
    is_stopped = False
    for token in tokenizer.encode("".join(parts)):
        if data.draw(st.booleans()):  # the engine was interrupted
            watch = StopWatch(stop, tokenizer.decode, sampled, thinking=thinking)
        sampled.append(token)
        shown = tokenizer.decode(sampled, skip_special_tokens=False)
        whole = shown.rstrip("\ufffd")
        is_stopped = cut_after_thought(whole, stop, thinking) != whole
        assert watch.is_complete(token) == is_stopped
        if is_stopped:
            break
    answer = AnswerText(
        tokenizer, stop, keep_special=thinking, shows_special=False, thinking=thinking
    )
    text = tokenizer.decode(sampled, skip_special_tokens=False)
    shown = "".join(pieces(answer, sampled, cuts, is_stopped=is_stopped))
    assert shown == cut_after_thought(text, stop, thinking)
    assert (answer.stopped_by is not None) == is_stopped


def test_run_of_bytes_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = _saved["byte_fallback"]
    ids = list(tokenizer.encode("語" * 400))
    assert tokenizer.byte_ids >= {*ids[1:]}
    num_decoded = 0
    decode = type(tokenizer).decode

    def counted(self: Any, token_ids: Sequence[int], **options: Any) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return decode(self, token_ids, **options)

    monkeypatch.setattr(type(tokenizer), "decode", counted)
    answer = AnswerText(tokenizer)
    assert "".join(pieces(answer, ids, [1] * len(ids))).endswith("語" * 400)
    assert num_decoded < 2 * len(ids)


def test_white_space_before_a_thought_is_decoded_once() -> None:
    num_decoded = 0

    def decode(token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return "".join(map(chr, token_ids))

    thought = LeadingThought(("<t>", "</t>"), decode)
    for _ in range(2000):
        assert thought.add(ord(" ")) is None
    assert (num_decoded, thought.state) == (2000, "unsure")
    after = [thought.add(ord(letter)) for letter in "<t>a</t> b"]
    assert (after[-3:], thought.state) == (["", None, None], "text")
