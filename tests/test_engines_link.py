"""Frames and the link that carries them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from fake_engine import FakeEngineServer
from hypothesis import given
from hypothesis import strategies as st
from rollout_cases import virtual
from token_cases import sampled_tokens

from asyncrl.base.http import Caller, CallLost
from asyncrl.engines.engine import EngineServer
from asyncrl.messages import codec
from asyncrl.messages.records import VersionSpan
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import TOP_IDS, TOP_LOGPROBS, Ragged, Tokens
from asyncrl.testing.virtual_time import all_blocked

TOKENS = st.lists(
    st.tuples(st.integers(-1, 2**31 - 1), st.floats(width=32, allow_nan=False)),
    max_size=6,
)
LOGPROBS = st.floats(width=32, allow_nan=False)
TOP = st.lists(st.tuples(st.integers(-1, 2**31 - 1), LOGPROBS), max_size=3)
VERSIONS = st.lists(st.integers(0, 2), min_size=6, max_size=6)


ROWS = st.tuples(
    st.integers(0, 2**40),
    TOKENS,
    VERSIONS,
    st.sampled_from(codec.SAMPLED),
    st.lists(TOP, min_size=6, max_size=6),
)


def row_tokens(tokens: Any, versions: list[int], top: Any) -> Tokens:
    """A row is sampled whole, under up to six versions."""
    spans = [
        VersionSpan(at, at + 1, version)
        for at, version in enumerate(versions[: len(tokens)])
    ]
    columns = {}
    if top is not None:
        likeliest = top[: len(tokens)]
        columns[TOP_IDS] = Ragged.of(
            [[token for token, _ in one] for one in likeliest], "<i4"
        )
        columns[TOP_LOGPROBS] = Ragged.of(
            [[value for _, value in one] for one in likeliest], "<f4"
        )
    ids, logprobs = [token for token, _ in tokens], [logprob for _, logprob in tokens]
    return sampled_tokens(ids, logprobs, spans, **columns)


@given(st.lists(ROWS, min_size=1), st.lists(st.booleans(), min_size=1))
def test_sampled_rows_arrive_unchanged(
    given_rows: list[Any], has_top: list[bool]
) -> None:
    rows = [
        codec.Sampled(
            number,
            row_tokens(tokens, spans, top if has_top[index % len(has_top)] else None),
            then,
        )
        for index, (number, tokens, spans, then, top) in enumerate(given_rows)
    ]
    frame = codec.read_frame(codec.sampled_frame(rows))
    read = codec.read_sampled(frame, Tokens.from_arrays(frame.arrays))
    for one, other in zip(rows, read, strict=True):
        assert (one.number, one.then) == (other.number, other.then)
        expected, found = one.tokens, other.tokens
        assert expected.versions.tolist() == found.versions.tolist()
        assert expected.ids.tobytes() == found.ids.tobytes()
        for name in (TOP_IDS, TOP_LOGPROBS):
            assert expected.column(name).lists() == found.column(name).lists()
        assert (
            expected.behaviour_logprobs.tobytes() == found.behaviour_logprobs.tobytes()
        )


def test_requests_arrive_unchanged_and_send_common_values_once() -> None:
    prompt, kinds = (5, 6), 3
    settings: list[dict[str, Any]] = [
        {"temperature": 0.5, "top_logprobs": 2},
        {"grammar": "root ::= x", "stop": ("END",), "stop_ids": (7, 8)},
        {"logit_bias": {7: -1.5, 3: 2}, "thinking": ("", "</t>"), "ignore_eos": True},
    ]
    asked = [
        codec.Asked(
            place,
            SamplingRequest(
                f"r{place}", prompt, 9 - place, seed=place, **settings[place % kinds]
            ),
            place == 1,
        )
        for place in range(6)
    ]
    frame = codec.read_frame(codec.submit_frame(asked))
    read = [
        one._replace(request=replace(one.request, prompt_ids=prompt))
        for one in codec.read_submit(frame)
    ]
    assert read == asked
    assert len(frame.text[1]) == kinds


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_spans_between_two_places_cover_each_token_once(
    firsts: list[int], start: int, size: int
) -> None:
    marks = [(first, version) for version, first in enumerate(sorted(firsts))]
    found = codec.spans_between(marks, start, start + size)
    expected = {
        place - start: max(version for first, version in marks if first <= place)
        for place in range(max(start, marks[0][0]), start + size)
    }
    covered = [place for span in found for place in range(span.start, span.end)]
    assert covered == [*expected]
    for span in found:
        assert {expected[place] for place in range(span.start, span.end)} == {
            span.version
        }


@virtual
async def test_requests_share_frames_and_cancelled_ones_are_aborted() -> None:
    fake = FakeEngineServer(slots=2, decode_s=0.01)
    sent = fake.frames
    server, prompt = EngineServer(fake), tuple(range(100, 120))
    requests = [
        SamplingRequest(f"r{index}", prompt, 5 + index, seed=index)
        for index in range(300)
    ]
    tasks = [asyncio.create_task(server.generate_segment(one)) for one in requests]
    await all_blocked()
    assert [len(codec.read_submit(frame)) for frame in sent] == [256, 44]
    assert [frame.arrays["prompts"].tolist() for frame in sent] == [list(prompt)] * 2, (
        "once a frame"
    )
    for task in tasks[2:]:
        task.cancel()
    await all_blocked()
    assert [(frame.kind, len(frame.numbers)) for frame in sent[2:]] == [("abort", 298)]
    assert fake.health().num_queued == 0
    assert [len((await task).token_ids) for task in tasks[:2]] == [5, 6]


def test_broken_link_names_its_cause() -> None:
    async def send_no_frame(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        assert request.transport is not None
        request.transport.write(b"\x83\x00")  # opcode 3 is reserved
        await socket.receive()
        return socket

    async def story() -> None:
        app = web.Application()
        app.router.add_get("/link", send_no_frame)
        async with TestServer(app) as server:
            url = str(server.make_url("")).rstrip("/")
            async with aclosing(Caller("engine-0", url, "a secret")) as caller:
                socket = await caller.connect("/link")
                with pytest.raises(CallLost, match="error: .*opcode=3"):
                    await socket.receive()

    asyncio.run(story())
