"""Bodies that are large where nobody looks: none of them is parsed, compared or written in the loop."""

from __future__ import annotations

import io
import json
import threading
from dataclasses import replace
from typing import Any

import pytest
from gateway_cases import HI, ByteTokenizer, ScriptedEngine, World, gateway_world, in_loop

from asyncrl.agents.endpoint import requests
from asyncrl.agents.endpoint.capture import Capture
from asyncrl.agents.endpoint.engine_route import LONG_BODY
from asyncrl.messages.records import Completion, Rollout, SamplingRequest

LARGE = {"metadata": {"a": ["b"] * LONG_BODY}}


async def post(world: World, path: str, body: Any) -> tuple[int, bytes]:
    data = io.BytesIO(json.dumps(body).encode())
    async with world.http.post(world.url + path, data=data, headers=world.headers) as response:
        return response.status, await response.read()


@pytest.fixture
def parsed_in_loop(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what is parsed in the thread of the event loop."""
    sizes: list[int] = []

    def from_json(data: bytes, **options: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            sizes.append(len(data))
        return real(data, **options)

    real = requests.from_json
    monkeypatch.setattr(requests, "from_json", from_json)
    return sizes


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "messages/count_tokens"])
@pytest.mark.parametrize("is_first", [True, False])
@in_loop
async def test_what_lies_around_the_messages_is_parsed_beside_the_loop_in_each_call_of_a_conversation(
    path: str, is_first: bool, parsed_in_loop: list[int]
) -> None:
    messages: list[Any] = [{"role": "user", "content": "x" * LONG_BODY}]
    async with gateway_world(max_prompt_tokens=50_000, max_length=60_000) as world:
        for _ in range(3):
            body = {"input" if path == "responses" else "messages": messages}
            body = {**LARGE, **body} if is_first else {**body, **LARGE}
            status, answer = await post(world, f"/v1/{path}", body)
            assert status == 200, answer
            messages += [{"role": "assistant", "content": "Hello there."}, *HI]
    assert max(parsed_in_loop, default=0) < LONG_BODY


@in_loop
async def test_what_a_response_repeats_of_its_call_is_bounded() -> None:
    async with gateway_world() as world:
        body = {"input": "Hi", "instructions": "Be brief.", **LARGE}
        status, answer = await post(world, "/v1/responses", body)
        assert (status, len(answer) < LONG_BODY) == (200, True)
        assert (json.loads(answer)["instructions"], json.loads(answer)["metadata"]) == ("Be brief.", {})


@pytest.mark.parametrize("prompt", [[1] * 9000, "x" * 9000])
@in_loop
async def test_far_too_many_ids_are_refused_before_they_are_compared(
    monkeypatch: pytest.MonkeyPatch, prompt: Any
) -> None:
    monkeypatch.setattr("asyncrl.agents.endpoint.engine_route.LONG_TEXT", 0)
    compared: list[int] = []
    plan_ids = Capture.plan_ids
    monkeypatch.setattr(
        Capture, "plan_ids", lambda self, ids: (compared.append(len(ids)), plan_ids(self, ids))[1]
    )
    async with gateway_world(max_prompt_tokens=2000) as world:
        status, answer = await post(world, "/v1/completions", {"prompt": prompt})
        assert (status, b"context_length_exceeded" in answer) == (400, True)
        assert not compared
        assert world.session.overflow is not None
        status, _ = await post(world, "/v1/completions", {"prompt": prompt[:10]})
        assert (status, compared) == (200, [10])


@in_loop
async def test_a_persons_conversations_that_met_a_limit_are_forgotten_as_cut_with_all_that_they_hold() -> (
    None
):
    async with gateway_world(max_calls=1, max_prompt_tokens=60) as world:
        session = world.gateway.open_nowait(
            "p0/r0", prompt_id="p0", sample_index=0, attempt=0, route_key="p0", user_key="someone"
        )
        forgotten: list[Rollout] = []
        session.on_forgotten = forgotten.append
        key = {"Authorization": f"Bearer {session.key}"}
        for number in range(40):
            first = {"role": "user", "content": f"talk {number:02}"}
            more = [
                first,
                {"role": "assistant", "content": "Hello there."},
                {"role": "user", "content": "Hm" * 20},
            ]
            assert (await world.post({"messages": [first]}, headers=key))[0] == 200
            for _ in range(3):
                assert (await world.post({"messages": more}, headers=key))[0] == 400
        assert session.num_completions <= 16
        assert 0 < len(session._overflowed) <= session.num_completions
        assert forgotten
        assert all(branch.is_truncated for rollout in forgotten for branch in rollout)


class Likeliest(ScriptedEngine):
    """Tells the likeliest tokens, too."""

    async def generate(self, request: SamplingRequest, **more: Any) -> Completion:
        done = await super().generate(request, **more)
        tops = tuple(
            tuple(((token + near) % 250, -1.0 - near) for near in range(request.top_logprobs))
            for token in done.token_ids
        )
        return replace(done, top_logprobs=tops)


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
@in_loop
async def test_many_logprobs_are_made_beside_the_loop_and_not_kept_once_they_are_written(path: str) -> None:
    threads = set[bool]()

    class Decoding(ByteTokenizer):
        def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
            if isinstance(token_ids, tuple) and len(token_ids) == 1:  # one of the logprobs
                threads.add(threading.current_thread() is threading.main_thread())
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    async with gateway_world(Likeliest(lambda _: "ab" * 100, tokenizer=Decoding())) as world:
        asked = {"input": "Hi"} if path == "responses" else {"messages": HI, "logprobs": True}
        status, answer = await post(world, f"/v1/{path}", {**asked, "top_logprobs": 20})
        assert (status, threads) == (200, {False})
        ((call,),) = world.session.calls.values()
        (choice,) = call.choices
        assert choice._told is None
        assert [len(each["top_logprobs"]) for each in choice.logprobs or ()] == [20] * 201
        assert b'"bytes":[97]' in answer
