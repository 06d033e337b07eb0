"""What the client of an engine server refuses to believe."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.engines.engine import SegmentCheck
from asyncrl.errors import EngineError
from asyncrl.messages.engine_calls import GenerateRequest, GenerateResponse, Span

REQUEST = GenerateRequest(request_id="g1/r0", prompt_ids=[5, 6], max_tokens=3)


def answer(**changes: Any) -> GenerateResponse:
    values: dict[str, Any] = {
        "request_id": "g1/r0",
        "token_ids": [7, 8, 9],
        "logprobs": [-1.0, -0.5, 0.0],
        "version_spans": [Span(start=0, end=1, version=2), Span(start=1, end=3, version=3)],
        "finish_reason": "length",
    }
    return GenerateResponse(**(values | changes))


def test_a_whole_answer_passes() -> None:
    SegmentCheck("engine-0", REQUEST, oldest=2).end(answer(), newest=3)


def test_an_abort_before_the_first_token_passes() -> None:
    empty = answer(token_ids=[], logprobs=[], version_spans=[], finish_reason="abort")
    SegmentCheck("engine-0", REQUEST, oldest=2).end(empty, newest=3)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"request_id": "g9"}, "g9"),
        ({"logprobs": [-1.0]}, "1 logprobs for 3 tokens"),
        ({"token_ids": [1, 2, 3, 4], "logprobs": [-1.0] * 4}, "4 tokens where 3 were asked for"),
        (
            {"token_ids": [1], "logprobs": [-1.0], "version_spans": [Span(start=0, end=1, version=2)]},
            "length after 1 of 3 tokens",
        ),
        (
            {"token_ids": [], "logprobs": [], "version_spans": [], "finish_reason": "stop"},
            "stop without a token",
        ),
        ({"token_ids": [7, -1, 9]}, "token id -1 at position 1"),
        ({"logprobs": [-1.0, float("nan"), -1.0]}, "logprob nan at position 1"),
        ({"logprobs": [-1.0, 0.5, -1.0]}, "logprob 0.5 at position 1"),
        ({"version_spans": []}, "spans none over 3 tokens"),
        ({"version_spans": [Span(start=0, end=2, version=2)]}, "[0, 2) v2 over 3 tokens"),
        (
            {"version_spans": [Span(start=0, end=2, version=2), Span(start=1, end=3, version=3)]},
            "cover every token once",
        ),
        (
            {"version_spans": [Span(start=0, end=0, version=2), Span(start=0, end=3, version=3)]},
            "cover every token once",
        ),
        (
            {"version_spans": [Span(start=0, end=1, version=3), Span(start=1, end=3, version=2)]},
            "never goes back",
        ),
        ({"version_spans": [Span(start=0, end=3, version=1)]}, "version 1; it had confirmed version 2"),
        ({"version_spans": [Span(start=0, end=3, version=4)]}, "offered none above 3"),
    ],
)
def test_an_answer_that_cannot_be_is_an_engine_error_with_its_values(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(EngineError) as caught:
        SegmentCheck("engine-0", REQUEST, oldest=2).end(answer(**changes), newest=3)
    assert says in str(caught.value)
    assert "engine-0" in str(caught.value)
    assert "Way out" in str(caught.value)
