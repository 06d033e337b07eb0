"""Streamed text does not depend on the pieces of an answer and never changes later."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from text_tokenizers import END, PYTHON, START, byte_fallback, byte_level, save
from transformers import AutoTokenizer

from asyncrl.agents.endpoint.answers import AnswerText
from asyncrl.messages.sampling import StopWatch, ThoughtGate
from asyncrl.rollouts.tokenizer import HFChatTokenizer

MARKER = "<tool_call>"
MAKERS = {make.__name__: make for make in (byte_level, byte_fallback)}
TEXTS = ["\U0001f600", "\u20ac", "\ufffd", "the", " fox", "\n", " ", "  ", "ab", MARKER, END, START, PYTHON]
_saved: dict[str, HFChatTokenizer] = {}


@pytest.fixture(scope="module", autouse=True)
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> None:
    for name, make in MAKERS.items():
        _saved[name] = save(make(), tmp_path_factory.mktemp("tokenizer") / name, markers=(MARKER,))


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


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Any ids, and some that the vocabulary does not have; often the single bytes of characters, whole or
    broken off.
    """
    tokenizer = _saved[name]
    texts, cut = st.sampled_from(TEXTS), st.sampled_from([None, 1, 2, 3])
    encoded = st.builds(lambda text, length: list(tokenizer.encode(text))[:length], texts, cut)
    ids = st.lists(st.integers(0, max(tokenizer.text_ids) + 5), max_size=3)
    return st.lists(encoded | ids, max_size=25).map(lambda each: sum(each, []))


def thought_of(text: str, marks: tuple[str, str] | None, *, is_open: bool) -> str:
    """The beginning of an answer through the end of its thought."""
    if marks is None or not (is_open or text.lstrip().startswith(marks[0])):
        return ""
    before, end, _ = text.partition(marks[1])
    return before + end


@pytest.mark.parametrize("shows_special", [True, False])
@pytest.mark.parametrize("name", [*MAKERS])
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), cuts=st.lists(st.integers(0, 6), max_size=60))
def test_text_does_not_depend_on_its_pieces(
    name: str, shows_special: bool, data: st.DataObject, cuts: list[int]
) -> None:
    tokenizer = _saved[name]
    ids = data.draw(ids_of(name))
    names = [tokenizer.decode([token], skip_special_tokens=False) for token in sorted(tokenizer.special_ids)]
    whole = tokenizer.decode(ids, skip_special_tokens=not shows_special)
    inside = st.integers(0, len(whole)).map(lambda at: whole[at : at + 1 + at % 5])
    more = st.sampled_from(["zz", "fox ", "\ufffd", "e", *names])
    stop = data.draw(st.lists((inside | more).filter(bool), max_size=3))
    answer, at_once = (AnswerText(tokenizer, stop, shows_special=shows_special) for _ in range(2))
    shown, expected = ("".join(pieces(*each)) for each in ((answer, ids, cuts), (at_once, ids, [])))
    assert (shown, answer.stopped_by) == (expected, at_once.stopped_by)
    if answer.stopped_by is None:
        kept = [token for token in ids if token not in tokenizer.end_ids]
        assert shown == tokenizer.decode(kept, skip_special_tokens=not shows_special)


MARKS = [(START, PYTHON), ("the", "fox"), ("the" + START, "ab")]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(st.sampled_from(["the", " fox", "fox", "ab", START, PYTHON, "|", "<"]), max_size=12),
    stop=st.lists(st.sampled_from(["|", "<", "python", "xa", "foxab", PYTHON, START, "e f"]), max_size=3),
    cuts=st.lists(st.integers(0, 4), max_size=12),
    marks=st.none() | st.sampled_from(MARKS),
    is_open=st.booleans(),
    num_resumed=st.integers(0, 12),
)
def test_client_and_engine_stop_at_the_same_text(
    parts: list[str],
    stop: list[str],
    cuts: list[int],
    marks: tuple[str, str] | None,
    is_open: bool,
    num_resumed: int,
) -> None:
    """Marks: no stop text counts before the thought at the beginning has ended."""
    tokenizer = _saved["byte_level"]
    engine_tokenizer = AutoTokenizer.from_pretrained(tokenizer.model_path)
    added = engine_tokenizer.added_tokens_decoder.items()
    stop_ids = [index for index, token in added if token.special and str(token) in stop]

    def decode(ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return str(engine_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def gate() -> ThoughtGate | None:
        return None if marks is None else ThoughtGate(marks, is_open=is_open)

    ids = tokenizer.encode("".join(parts))
    thought = thought_of("".join(parts), marks, is_open=is_open)
    sampled: list[int] = []
    is_stopped = False
    watch = StopWatch(stop, decode, stop_ids=stop_ids, gate=gate())
    for token in ids:
        if len(sampled) == num_resumed:  # another engine continues
            watch = StopWatch(stop, decode, sampled, stop_ids, gate())
        sampled.append(token)
        if is_stopped := bool(stop) and watch.is_complete(token):
            break
    kept = marks or ()
    answer = AnswerText(tokenizer, stop, keep_special=kept, shows_special=False, gate=gate())
    shown = "".join(pieces(answer, sampled, cuts))
    assert (answer.stopped_by is not None) == is_stopped
    if marks is None:
        plain = tokenizer.decode(sampled)
        assert shown == (plain if answer.stopped_by in (START, PYTHON) else cut_at_stop(plain, stop))
    after = tokenizer.decode(sampled, skip_special_tokens=False)[len(thought) :]
    visible = after.replace(START, "").replace(PYTHON, "")
    expected = any(text in (after if text in (START, PYTHON) else visible) for text in stop)
    assert marks is None or is_stopped == expected
