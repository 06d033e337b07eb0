"""The client of one engine server as the publisher uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from asyncrl.engines.own_server import EngineServer
from asyncrl.errors import EngineError, EngineLost
from asyncrl.http import CallGarbled, CallRefused
from asyncrl.messages.base import ErrorBody
from asyncrl.messages.engine_calls import GenerateRequest
from asyncrl.messages.trainer_calls import ExportResponse
from asyncrl.testing.fake_engine import FakeEngineServer
from asyncrl.testing.virtual_time import all_blocked, run_virtual

BROKEN = CallRefused("engine-0", "/generate", 500, ErrorBody(error="no memory", way_out="lower it."))
GARBLED = CallGarbled("engine-0", "/generate", "status 200 with a body that is no GenerateResponse: <html>")


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (BROKEN, r"answered 500 to /generate: no memory.\n  Way out: lower it."),
        (GARBLED, "answered /generate with what is no answer: status 200"),
    ],
)
def test_a_bad_answer_is_an_error_and_no_loss(failure: Exception, says: str) -> None:
    async def story() -> None:
        fake = FakeEngineServer()

        def broken(_: GenerateRequest) -> str:
            raise failure

        fake.refuse = broken
        request = GenerateRequest(request_id="a", prompt_ids=[1], max_tokens=1)
        with pytest.raises(EngineError, match=says) as caught:
            await EngineServer(fake).generate_segment(request)
        assert not isinstance(caught.value, EngineLost)

    run_virtual(story())


def test_a_server_that_is_given_up_ends_every_call_and_its_successor_takes_them_again() -> None:
    async def story() -> None:
        fake = FakeEngineServer(decode_s=0.01)
        server = EngineServer(fake)
        await server.prepare(
            ExportResponse(version=3, path="fake/w3", digest="w3", num_tensors=1, num_bytes=1)
        )
        await server.commit(3, "w3", "abort")
        fake.freeze()
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(_lost(server.abort(None, timeout_s=None))) for _ in range(3)]
            await all_blocked()
            assert not any(call.done() for call in calls)
            server.cut_nowait()
            server.cut_nowait()
        errors = [call.result() for call in calls] + [await _lost(server.abort(None))]
        assert [error.is_told for error in errors] == [True] * 4
        assert "engine-0: was given up" in str(errors[0])
        fake.restart()
        server.renew_nowait()
        assert (server.policy_version, await server.abort(None)) == (0, [])
        fake.die()
        assert not (await _lost(server.abort(None))).is_told

    run_virtual(story())


async def _lost(call: Coroutine[Any, Any, object]) -> EngineLost:
    with pytest.raises(EngineLost) as caught:
        await call
    return caught.value
