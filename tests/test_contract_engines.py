"""One contract for every engine server: the same sentences against real processes of each kind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_processes import SECRET, EngineProcess, engine_process
from safetensors.numpy import load_file, save_file

from asyncrl.calling import Caller, CallLost, CallRefused
from asyncrl.wire import (
    AbortRequest,
    AbortResponse,
    CommitRequest,
    CommitResponse,
    EngineHealth,
    GenerateRequest,
    GenerateResponse,
    PrepareRequest,
    PrepareResponse,
    find_fatal,
    weights_digest,
)

SLOTS, MAX_LENGTH = 4, 2600
LONG = 2500
"""Tokens that take either server more than a second: time for a test to interrupt them."""


@dataclass
class Server:
    """A server under test; versions and request ids go up from test to test."""

    kind: str
    child: EngineProcess
    weights: dict[str, np.ndarray]
    folder: Path
    vocab_size: int
    num_requests: int = 0

    def request(self, **fields: Any) -> GenerateRequest:
        self.num_requests += 1
        given = {"request_id": f"request {self.num_requests}", "prompt_ids": [1, 2, 3], "max_tokens": 20, "seed": 5}
        return GenerateRequest(**{**given, **fields})


@pytest.fixture(scope="module", params=["simulated", "embedded"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(request.param)
    with engine_process(request.param, spec_of(request.param, folder), folder) as child:
        yield server_of(request.param, child, folder)


def server_of(kind: str, child: EngineProcess, folder: Path) -> Server:
    if kind == "simulated":
        return Server(kind, child, {"w": np.ones((3, 2), dtype=np.float32), "b": np.zeros(5, dtype=np.float32)}, folder, 50)
    return Server(kind, child, load_file(folder / "model" / "model.safetensors"), folder, 50)


def spec_of(kind: str, folder: Path, **overrides: Any) -> dict[str, Any]:
    """A server whose requests do not end before max_tokens."""
    spec: dict[str, Any] = {"name": f"{kind}-0", "slots": SLOTS, "max_length": MAX_LENGTH}
    if kind == "simulated":
        return {**spec, "vocab_size": 50, "mean_tokens": 1e9, "sigma": 0.0, "decode_step_s": 0.001, "per_row_s": 0.0, **overrides}
    from engine_in_process import make_qwen3

    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    return {**spec, "model_path": str(make_qwen3(folder / "model", **sizes)), **overrides}


@asynccontextmanager
async def calling(server: Server) -> AsyncIterator[Caller]:
    caller = Caller(server.kind, server.child.url, SECRET)
    try:
        yield caller
    finally:
        await caller.post("/abort", AbortRequest(), AbortResponse, timeout_s=60)
        await caller.aclose()


def run(server: Server, story: Callable[[Caller], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(120), calling(server) as caller:
            await story(caller)

    asyncio.run(within())


async def generate(caller: Caller, request: GenerateRequest) -> GenerateResponse:
    return await caller.post("/generate", request, GenerateResponse, timeout_s=60)


async def health(caller: Caller) -> EngineHealth:
    return await caller.get("/health", EngineHealth, timeout_s=60)


async def until(caller: Caller, is_so: Callable[[EngineHealth], bool]) -> EngineHealth:
    """Ask /health until it says so; the story's time limit ends it otherwise."""
    while not is_so(answer := await health(caller)):
        pass
    return answer


async def until_decoding(caller: Caller, num_running: int) -> None:
    """Wait until so many requests run and decoding has gone on for a while after."""
    started_s = (await until(caller, lambda now: now.num_running == num_running)).decode_s
    await until(caller, lambda now: now.decode_s > started_s + 0.02)


async def prepare(caller: Caller, server: Server, version: int, scale: float = 1.0) -> str:
    """Stage the server's weights times `scale`; returns their digest."""
    weights = {name: (array * np.float32(scale)).astype(np.float32) for name, array in server.weights.items()}
    path = server.folder / f"staged-{version}.safetensors"
    save_file(weights, path)
    digest = weights_digest((name, "float32", array.shape, array.tobytes()) for name, array in weights.items())
    request = PrepareRequest(
        version=version,
        path=str(path),
        digest=digest,
        num_tensors=len(weights),
        num_bytes=sum(array.nbytes for array in weights.values()),
    )
    answer = await caller.post("/prepare", request, PrepareResponse, timeout_s=60)
    assert answer == PrepareResponse(version=version, digest=digest)
    return digest


async def commit(caller: Caller, version: int, digest: str, interrupt: str = "abort") -> CommitResponse:
    body = CommitRequest.model_validate({"version": version, "digest": digest, "interrupt": interrupt})
    return await caller.post("/commit", body, CommitResponse, timeout_s=60)


def check_whole(answer: GenerateResponse, vocab_size: int) -> None:
    """One logprob a token, ids that exist, and version spans that cover every token once, in order of versions."""
    assert len(answer.logprobs) == len(answer.token_ids)
    assert all(0 <= token < vocab_size for token in answer.token_ids)
    assert all(logprob <= 0.0 and logprob == float(np.float32(logprob)) for logprob in answer.logprobs)
    covered = [token for span in answer.version_spans for token in range(span.start, span.end)]
    assert covered == list(range(len(answer.token_ids)))
    versions = [span.version for span in answer.version_spans]
    assert versions == sorted(set(versions))


def test_an_answer_has_its_budget_of_tokens_with_a_logprob_each_and_spans_that_cover_them_once(server: Server) -> None:
    async def story(caller: Caller) -> None:
        version = (await health(caller)).policy_version
        requests = [server.request(max_tokens=tokens, seed=tokens, temperature=0.8) for tokens in (1, 2, 17, 60, 3, 8)]
        answers = await asyncio.gather(*(generate(caller, request) for request in requests))
        for request, answer in zip(requests, answers, strict=True):
            check_whole(answer, server.vocab_size)
            assert (answer.request_id, len(answer.token_ids), answer.finish_reason) == (request.request_id, request.max_tokens, "length")
            assert {span.version for span in answer.version_spans} == {version}

    run(server, story)


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(server: Server) -> None:
    async def story(caller: Caller) -> None:
        first, again, other = [await generate(caller, server.request(seed=seed)) for seed in (11, 11, 12)]
        assert (first.token_ids, first.logprobs) == (again.token_ids, again.logprobs)
        assert first.token_ids != other.token_ids, "20 draws from 50 tokens"

    run(server, story)


def test_a_resumed_request_draws_what_the_uninterrupted_one_draws(server: Server) -> None:
    async def story(caller: Caller) -> None:
        whole = await generate(caller, server.request(max_tokens=30))
        head = await generate(caller, server.request(max_tokens=11))
        resumed = server.request(prompt_ids=[1, 2, 3, *head.token_ids], num_resumed=11, max_tokens=19)
        assert head.token_ids + (await generate(caller, resumed)).token_ids == whole.token_ids

    run(server, story)


def test_a_request_that_cannot_fit_is_refused_with_the_numbers(server: Server) -> None:
    async def story(caller: Caller) -> None:
        with pytest.raises(CallRefused) as refused:
            await generate(caller, server.request(prompt_ids=[1] * 10, max_tokens=MAX_LENGTH - 9))
        assert refused.value.status == 400
        for number in ("10", str(MAX_LENGTH - 9), str(MAX_LENGTH + 1), str(MAX_LENGTH)):
            assert number in refused.value.body.error
        assert refused.value.body.way_out
        fitting = server.request(prompt_ids=[1] * (MAX_LENGTH - 2), max_tokens=2)
        assert len((await generate(caller, fitting)).token_ids) == 2

    run(server, story)


@pytest.mark.parametrize("token_id", [-1, 50, 2**40])
def test_a_token_id_that_the_model_does_not_know_is_refused(server: Server, token_id: int) -> None:
    async def story(caller: Caller) -> None:
        with pytest.raises(CallRefused) as refused:
            await generate(caller, server.request(prompt_ids=[1, token_id]))
        assert refused.value.status == 400
        assert str(token_id) in refused.value.body.error
        assert "0..49" in refused.value.body.rule

    run(server, story)


def test_more_resumed_ids_than_prompt_ids_are_refused(server: Server) -> None:
    async def story(caller: Caller) -> None:
        with pytest.raises(CallRefused, match="num_resumed=4 of 3") as refused:
            await generate(caller, server.request(num_resumed=4))
        assert refused.value.status == 400

    run(server, story)


def test_an_id_that_is_running_is_refused_a_second_time(server: Server) -> None:
    async def story(caller: Caller) -> None:
        first = asyncio.create_task(generate(caller, server.request(request_id="twice", max_tokens=LONG)))
        await until(caller, lambda now: now.num_running == 1)
        with pytest.raises(CallRefused, match="here already") as refused:
            await generate(caller, server.request(request_id="twice"))
        assert refused.value.status == 409
        await caller.post("/abort", AbortRequest(request_ids=["twice"]), AbortResponse, timeout_s=60)
        assert (await first).finish_reason == "abort"

    run(server, story)


def test_without_the_secret_nothing_is_answered(server: Server) -> None:
    async def story(caller: Caller) -> None:
        stranger = Caller("stranger", server.child.url, "a guess")
        try:
            with pytest.raises(CallRefused) as refused:
                await generate(stranger, server.request())
            assert refused.value.status == 401
        finally:
            await stranger.aclose()

    run(server, story)


def test_abort_ends_the_named_requests_with_what_they_have_and_leaves_unknown_ids_out(server: Server) -> None:
    async def story(caller: Caller) -> None:
        requests = [server.request(max_tokens=LONG, seed=seed) for seed in range(3)]
        tasks = [asyncio.create_task(generate(caller, request)) for request in requests]
        await until_decoding(caller, 3)
        wanted = [requests[1].request_id, "nobody"]
        assert (await caller.post("/abort", AbortRequest(request_ids=wanted), AbortResponse, timeout_s=60)).aborted == wanted[:1]
        aborted = await tasks[1]
        check_whole(aborted, server.vocab_size)
        assert aborted.finish_reason == "abort"
        assert 0 < len(aborted.token_ids) < LONG
        assert not tasks[0].done()
        assert not tasks[2].done()
        assert (await health(caller)).num_running == 2
        rest = await caller.post("/abort", AbortRequest(), AbortResponse, timeout_s=60)
        assert set(rest.aborted) == {requests[0].request_id, requests[2].request_id}
        assert [(await task).finish_reason for task in (tasks[0], tasks[2])] == ["abort", "abort"]

    run(server, story)


def test_an_aborted_request_frees_its_slot_at_once_for_the_one_that_waits(server: Server) -> None:
    async def story(caller: Caller) -> None:
        requests = [server.request(max_tokens=LONG) for _ in range(SLOTS)]
        tasks = [asyncio.create_task(generate(caller, request)) for request in requests]
        await until(caller, lambda now: now.num_running == SLOTS)
        waiting = asyncio.create_task(generate(caller, server.request(max_tokens=5)))
        await until(caller, lambda now: now.num_queued == 1)
        await caller.post("/abort", AbortRequest(request_ids=[requests[0].request_id]), AbortResponse, timeout_s=60)
        assert len((await waiting).token_ids) == 5
        assert [task.done() for task in tasks] == [True, False, False, False]
        await caller.post("/abort", AbortRequest(), AbortResponse, timeout_s=60)
        await asyncio.gather(*tasks)

    run(server, story)


def test_a_queued_request_can_be_aborted_and_has_no_tokens(server: Server) -> None:
    async def story(caller: Caller) -> None:
        tasks = [asyncio.create_task(generate(caller, server.request(max_tokens=LONG))) for _ in range(SLOTS)]
        await until(caller, lambda now: now.num_running == SLOTS)
        waiting = asyncio.create_task(generate(caller, server.request(request_id="waits")))
        await until(caller, lambda now: now.num_queued == 1)
        assert (await caller.post("/abort", AbortRequest(request_ids=["waits"]), AbortResponse, timeout_s=60)).aborted == ["waits"]
        answer = await waiting
        assert (answer.token_ids, answer.logprobs, answer.version_spans, answer.finish_reason) == ([], [], [], "abort")
        await caller.post("/abort", AbortRequest(), AbortResponse, timeout_s=60)
        await asyncio.gather(*tasks)

    run(server, story)


def test_a_client_that_goes_away_frees_its_slot(server: Server) -> None:
    async def story(caller: Caller) -> None:
        leaver = Caller("leaver", server.child.url, SECRET)
        task = asyncio.create_task(generate(leaver, server.request(max_tokens=LONG)))
        await until(caller, lambda now: now.num_running == 1)
        task.cancel()
        await asyncio.wait([task])
        await leaver.aclose()
        await until(caller, lambda now: now.num_running == 0)

    run(server, story)


@pytest.mark.parametrize("interrupt", ["abort", "keep", "keep_kv", "wait"])
def test_a_commit_changes_the_version_between_two_tokens(server: Server, interrupt: str) -> None:
    async def story(caller: Caller) -> None:
        old = (await health(caller)).policy_version
        max_tokens = 600 if interrupt == "wait" else LONG
        tasks = [asyncio.create_task(generate(caller, server.request(max_tokens=max_tokens, seed=seed))) for seed in range(SLOTS)]
        await until_decoding(caller, SLOTS)
        queued = asyncio.create_task(generate(caller, server.request(max_tokens=5)))
        await until(caller, lambda now: now.num_queued == 1)
        digest = await prepare(caller, server, old + 1, scale=1.25)
        swapped = await commit(caller, old + 1, digest, interrupt)
        assert (swapped.version, swapped.digest) == (old + 1, digest)
        assert swapped.pause_s >= 0.0
        assert (await health(caller)).policy_version == old + 1
        expected = {"abort": SLOTS + 1, "keep": SLOTS, "keep_kv": SLOTS, "wait": 0}
        assert swapped.num_interrupted == expected[interrupt]
        answers = await asyncio.gather(*tasks)
        for answer in answers:
            check_whole(answer, server.vocab_size)
            versions = [span.version for span in answer.version_spans]
            assert versions == ([old, old + 1] if interrupt.startswith("keep") else [old])
            assert answer.finish_reason == ("abort" if interrupt == "abort" else "length")
            assert (len(answer.token_ids) == max_tokens) == (interrupt != "abort")
        late = await queued
        assert [span.version for span in late.version_spans] == ([] if interrupt == "abort" else [old + 1])
        fresh = await generate(caller, server.request())
        assert [span.version for span in fresh.version_spans] == [old + 1]

    run(server, story)


def test_a_commit_of_another_digest_is_refused_and_the_old_weights_serve_on(server: Server) -> None:
    async def story(caller: Caller) -> None:
        old = (await health(caller)).policy_version
        before = await generate(caller, server.request())
        await prepare(caller, server, old + 1, scale=2.0)
        with pytest.raises(CallRefused, match="0123abcd") as refused:
            await commit(caller, old + 1, "0123abcd")
        assert refused.value.status == 409
        assert refused.value.body.way_out
        after = await generate(caller, server.request())
        assert (after.token_ids, after.logprobs, after.version_spans) == (before.token_ids, before.logprobs, before.version_spans)

    run(server, story)


def test_a_commit_of_what_was_never_prepared_or_of_an_older_version_is_refused(server: Server) -> None:
    async def story(caller: Caller) -> None:
        old = (await health(caller)).policy_version
        digest = await prepare(caller, server, old + 1)
        await commit(caller, old + 1, digest)
        assert (await commit(caller, old + 1, digest)).num_interrupted == 0, "the same again is no error"
        for version, wrong in ((old + 1, "other"), (old, digest), (old + 2, digest)):
            with pytest.raises(CallRefused) as refused:
                await commit(caller, version, wrong)
            assert refused.value.status == 409
        assert (await health(caller)).policy_version == old + 1

    run(server, story)


def test_weights_that_are_not_what_was_announced_are_refused_with_both_digests(server: Server) -> None:
    async def story(caller: Caller) -> None:
        old = (await health(caller)).policy_version
        digest = await prepare(caller, server, old + 1)
        path = server.folder / f"staged-{old + 1}.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        size = sum(array.nbytes for array in server.weights.values())
        request = PrepareRequest(version=old + 1, path=str(path), digest=digest, num_tensors=len(server.weights), num_bytes=size)
        with pytest.raises(CallRefused, match=digest) as refused:
            await caller.post("/prepare", request, PrepareResponse, timeout_s=60)
        assert refused.value.status == 409
        with pytest.raises(CallRefused, match="nothing"):
            await commit(caller, old + 1, digest)
        missing = request.model_copy(update={"path": str(server.folder / "nowhere.safetensors")})
        with pytest.raises(CallRefused, match="nowhere") as refused:
            await caller.post("/prepare", missing, PrepareResponse, timeout_s=60)
        assert refused.value.status == 400

    run(server, story)


@pytest.mark.parametrize("kind", ["simulated", "embedded"])
def test_the_server_ends_when_its_parent_is_gone_whatever_runs(kind: str, tmp_path: Path) -> None:
    with engine_process(kind, spec_of(kind, tmp_path), tmp_path) as child:
        server = server_of(kind, child, tmp_path)

        async def story() -> None:
            caller = Caller(kind, child.url, SECRET)
            try:
                task = asyncio.create_task(generate(caller, server.request(max_tokens=LONG)))
                await until(caller, lambda now: now.num_running == 1)
                assert child.process.stdin is not None
                child.process.stdin.close()
                with pytest.raises(CallLost):
                    await task
            finally:
                await caller.aclose()

        asyncio.run(story())
        assert child.process.wait(timeout=60) == 3


@pytest.mark.parametrize("kind", ["simulated", "embedded"])
def test_an_unknown_key_in_the_spec_ends_the_server_with_its_name(kind: str, tmp_path: Path) -> None:
    with engine_process(kind, spec_of(kind, tmp_path, sluts=3), tmp_path) as child:
        assert child.process.wait(timeout=60) == 1
        fatal = find_fatal(child.read_log())
        assert fatal is not None
        assert "sluts" in fatal.error
        assert json.loads((tmp_path / "spec.json").read_text())["sluts"] == 3
