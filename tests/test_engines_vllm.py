"""VllmServer on a real vLLM with a tiny model: exact tokens, logprobs of what was sampled, stops, aborts,
commits in flight, sleep.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest
from vllm_house import MAX_LENGTH, SLOTS, House, until

from asyncrl.engines.pool import EnginePool
from asyncrl.engines.vllm.vllm_server import VllmServer
from asyncrl.errors import ConfigError, EngineError, RequestRefused
from asyncrl.messages.base import Interrupt
from asyncrl.messages.engine_calls import GenerateChunk, GenerateResponse
from asyncrl.messages.records import Completion, SamplingRequest
from asyncrl.messages.trainer_calls import ExportResponse

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
NUM_SPECIAL = 6
"""Ids below it have no text."""


async def publish(server: VllmServer, house: House, seed: int, interrupt: Interrupt = "abort") -> int:
    return await push(server, house.stage(server.policy_version + 1, house.weights(seed)), interrupt)


async def push(server: VllmServer, manifest: ExportResponse, interrupt: Interrupt) -> int:
    assert await server.prepare(manifest) == manifest.digest
    report = await server.commit(manifest.version, manifest.digest, interrupt)
    assert (report.version, report.digest, server.policy_version) == (
        manifest.version,
        manifest.digest,
        manifest.version,
    )
    return report.num_interrupted


def versions(answer: GenerateResponse) -> list[int]:
    return [span.version for span in answer.version_spans]


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (0.7, 1.0), (1.3, 1.0)])
def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(
    house: House, temperature: float, top_p: float
) -> None:
    async def story(server: VllmServer) -> None:
        requests = [
            house.request(max_tokens=60, temperature=temperature, seed=seed, prompt_ids=[10, 20 + seed])
            for seed in range(4)
        ]
        answers = await asyncio.gather(*(server.generate_segment(request) for request in requests))
        for request, answer in zip(requests, answers, strict=True):
            assert (len(answer.token_ids), answer.finish_reason, versions(answer)) == (
                60,
                "length",
                [server.policy_version],
            )
            weights = house.pushed[server.policy_version]
            assert (
                house.gap(weights, request.prompt_ids, answer.token_ids, answer.logprobs, temperature or 1.0)
                <= 1e-4
            )
        assert len({tuple(answer.token_ids) for answer in answers}) == 4

    house.run(story)


def test_a_stream_tells_the_same_tokens_as_the_whole_answer_and_a_seed_says_which(house: House) -> None:
    async def story(server: VllmServer) -> None:
        chunks: list[GenerateChunk] = []
        whole = await server.generate_segment(house.request(max_tokens=50))
        rest = await server.generate_segment(house.request(max_tokens=50), on_chunk=chunks.append)
        told = [token for chunk in chunks for token in chunk.token_ids]
        assert len(chunks) > 5
        assert rest.token_ids, "the last token comes with the end"
        assert told + rest.token_ids == whole.token_ids
        assert [logprob for chunk in chunks for logprob in chunk.logprobs] + rest.logprobs == whole.logprobs
        assert {chunk.version for chunk in chunks} == {server.policy_version}
        other = await server.generate_segment(house.request(max_tokens=50, seed=6))
        assert other.token_ids != whole.token_ids

    house.run(story)


def test_what_cannot_be_served_is_refused_with_the_numbers_and_the_server_goes_on(house: House) -> None:
    async def story(server: VllmServer) -> None:
        with pytest.raises(
            RequestRefused,
            match=f"3 prompt tokens \\+ {MAX_LENGTH} new ones = {MAX_LENGTH + 3}, a slot holds {MAX_LENGTH}",
        ):
            await server.generate_segment(house.request(max_tokens=MAX_LENGTH))
        with pytest.raises(RequestRefused, match="it has token id 4711; the model knows ids 0"):
            await server.generate_segment(house.request(prompt_ids=[4711]))
        with pytest.raises(RequestRefused, match="temperature 0.001"):
            await server.generate_segment(house.request(temperature=0.001))
        assert (
            len((await server.generate_segment(house.request(max_tokens=MAX_LENGTH - 3))).token_ids)
            == MAX_LENGTH - 3
        )

    house.run(story)


def test_the_token_that_ends_a_completion_is_its_last_be_it_an_end_id_or_the_end_of_a_stop_string(
    house: House,
) -> None:
    async def story(server: VllmServer) -> None:
        whole = (await server.generate_segment(house.request(max_tokens=100))).token_ids
        at = next(at for at in range(40, 90) if min(whole[at : at + 2]) >= NUM_SPECIAL)
        text = house.decode(whole[at : at + 2])
        end = next(index for index in range(len(whole)) if text in house.decode(whole[: index + 1]))
        stopped = await server.generate_segment(house.request(max_tokens=100, stop=["never", text]))
        assert (stopped.token_ids, stopped.finish_reason) == (whole[: end + 1], "stop")
        told: list[int] = []
        rest = await server.generate_segment(
            house.request(max_tokens=100, stop=[text]), on_chunk=lambda chunk: told.extend(chunk.token_ids)
        )
        assert told + rest.token_ids == whole[: end + 1]

        ends.extend([whole[70], whole[40]])

    async def with_ends(server: VllmServer) -> None:
        answer = await server.generate_segment(house.request(max_tokens=100))
        assert (answer.token_ids[-1], answer.finish_reason) == (ends[0], "stop")
        assert ends[0] not in answer.token_ids[:-1]
        named = await server.generate_segment(house.request(max_tokens=100, stop=["<the end>"]))
        assert named.token_ids[-1] in ends
        assert not set(ends) & set(named.token_ids[:-1])

    ends: list[int] = []
    house.run(story)
    house.run(with_ends, facts={"end_ids": (ends[0],), "special_ids": {"<the end>": ends[1]}})


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stop_string_over_the_joint_of_two_segments_ends_the_second_one(
    house: House, is_streamed: bool
) -> None:
    async def story(server: VllmServer) -> None:
        whole = await server.generate_segment(house.request(max_tokens=60))
        for length in (
            length for length in range(5, 60) if min(whole.token_ids[length - 2 : length]) >= NUM_SPECIAL
        ):
            first = whole.token_ids[:length]
            prompt = [10, 11, 12, *first]
            on = await server.generate_segment(
                house.request(prompt_ids=prompt, num_resumed=length, max_tokens=40)
            )
            if min(on.token_ids[:2]) >= NUM_SPECIAL:
                break
        joint = house.decode([*first[-2:], *on.token_ids[:2]])
        assert len(joint) == 4
        told: list[int] = []
        again = house.request(prompt_ids=prompt, num_resumed=length, max_tokens=40, stop=[joint])
        rest = await server.generate_segment(
            again, on_chunk=(lambda chunk: told.extend(chunk.token_ids)) if is_streamed else None
        )
        assert (told + rest.token_ids, rest.finish_reason) == (on.token_ids[:2], "stop")
        assert rest.logprobs == on.logprobs[len(told) : 2]
        assert (await until(server, lambda now: now.num_running == 0)).num_queued == 0

    house.run(story)


def test_abort_of_one_request_frees_its_slot_at_once_and_gives_what_it_had(house: House) -> None:
    async def story(server: VllmServer) -> None:
        requests = [house.request(max_tokens=700, seed=seed) for seed in range(SLOTS)]
        begun = [asyncio.Event() for _ in requests]
        told: list[int] = []

        def on_chunk(index: int, chunk: GenerateChunk) -> None:
            begun[index].set()
            told.extend(chunk.token_ids if index == 3 else [])

        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(server.generate_segment(request, on_chunk=partial(on_chunk, index)))
                for index, request in enumerate(requests)
            ]
            for event in begun:
                await event.wait()
            waiting = tasks.create_task(server.generate_segment(house.request(max_tokens=5)))
            assert await server.abort([requests[3].request_id, "unknown"]) == [requests[3].request_id]
            assert len((await waiting).token_ids) == 5
            assert not any(task.done() for task in running[:3])
            assert running[3].result().finish_reason == "abort"
            assert 0 < len(told) + len(running[3].result().token_ids) < 700
            assert len(await server.abort(None)) == SLOTS - 1

    house.run(story)


def test_an_abort_that_overtakes_its_request_ends_it_all_the_same(house: House) -> None:
    async def story(server: VllmServer) -> None:
        async with asyncio.TaskGroup() as tasks:
            requests = [house.request(max_tokens=700, seed=seed) for seed in range(SLOTS)]
            running = [tasks.create_task(server.generate_segment(request)) for request in requests]
            await asyncio.sleep(0)  # each of them has taken its first step: nothing is on the wire yet
            assert len(await server.abort(None)) == SLOTS
            assert [task.result().finish_reason for task in running] == ["abort"] * SLOTS
        assert (await until(server, lambda now: now.num_running == 0)).num_queued == 0

    house.run(story)


def test_a_caller_that_is_cancelled_leaves_no_slot_taken(house: House) -> None:
    async def story(server: VllmServer) -> None:
        pool = EnginePool([server], slots=SLOTS)
        request = SamplingRequest("left", (10, 11), 700, 1.0)
        begun = asyncio.Event()
        task = asyncio.ensure_future(pool.generate(request, on_tokens=lambda _: begun.set()))
        await begun.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert (await until(server, lambda now: now.num_running == 0)).num_queued == 0

    house.run(story)


@pytest.mark.parametrize("interrupt", ["abort", "keep", "keep_kv", "wait"])
def test_sixteen_requests_through_three_publishes_have_the_right_version_on_every_token(
    house: House, interrupt: Interrupt
) -> None:
    """Sixteen are in flight until the last publish is done, one after the other in each place; those of eight
    places are streamed.
    """
    max_tokens, step = 200, 8 * 15
    done: dict[tuple[int, int], Completion] = {}
    told: dict[tuple[int, int], list[int]] = {}

    async def story(server: VllmServer) -> None:
        pool, first = EnginePool([server], slots=SLOTS), server.policy_version
        staged = [house.stage(first + number, house.weights(100 + number)) for number in (1, 2, 3)]
        more, over = asyncio.Event(), False

        async def place(seed: int) -> None:
            turn = 0
            while not over:
                tokens = told.setdefault((seed, turn), [])

                def on_tokens(token_ids: Sequence[int], tokens: list[int] = tokens) -> None:
                    tokens.extend(token_ids)
                    more.set()

                request = SamplingRequest(
                    f"{interrupt} {seed} {turn}", (10, 11, 12 + seed), max_tokens, 1.0, seed=100 * turn + seed
                )
                done[seed, turn] = await pool.generate(request, on_tokens=on_tokens if seed % 2 else None)
                turn += 1

        async def until_sampled(num_tokens: int) -> None:
            end = sum(map(len, told.values())) + num_tokens
            while sum(map(len, told.values())) < end:
                more.clear()
                await more.wait()

        async with asyncio.TaskGroup() as tasks:
            for seed in range(SLOTS):
                tasks.create_task(place(seed))
            for manifest in staged:
                await until_sampled(step)
                await push(server, manifest, interrupt)
            await until_sampled(step)
            over = True
        spans_seen, num_crossing = set(), 0
        for (seed, turn), completion in done.items():
            assert (len(completion.token_ids), completion.finish_reason) == (max_tokens, "length")
            assert len(completion.behaviour_logprobs) == max_tokens
            is_streamed = bool(seed % 2)
            assert not is_streamed or tuple(told[seed, turn]) == completion.token_ids
            spans = completion.version_spans
            assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
            assert spans[-1].end == max_tokens
            num_crossing += len(spans) > 1
            for span in spans:
                spans_seen.add(span.version)
                gap = house.gap(
                    house.pushed[span.version],
                    (10, 11, 12 + seed),
                    completion.token_ids,
                    completion.behaviour_logprobs,
                    start=span.start,
                    end=span.end,
                )
                if interrupt != "keep_kv" or is_streamed or span.version == spans[0].version:
                    assert gap <= 1e-3, (
                        f"tokens [{span.start}, {span.end}) are not those of version {span.version}"
                    )
                else:
                    assert gap > 1e-3, "the old KV cache under new weights"
        assert spans_seen == {first, first + 1, first + 2, first + 3}
        assert bool(num_crossing) == (interrupt != "wait")
        assert server.policy_version == first + 3
        assert (await server.health()).num_running == 0

    house.run(story)


def test_a_prompt_that_a_group_shares_is_computed_once_under_a_version_and_anew_under_the_next(
    house: House,
) -> None:
    prompt = [4 + position % 40 for position in range(300)]

    async def story(server: VllmServer) -> None:
        for _ in range(2):
            for seed in range(2):
                answer = await server.generate_segment(house.request(prompt_ids=prompt, seed=seed))
                assert (
                    house.gap(house.pushed[server.policy_version], prompt, answer.token_ids, answer.logprobs)
                    <= 1e-4
                )
            await publish(server, house, 110 + server.policy_version, "keep_kv")  # which clears no cache

    house.run(story)


def test_a_commit_of_what_was_not_prepared_is_refused_and_the_old_weights_serve_on(house: House) -> None:
    async def story(server: VllmServer) -> None:
        before = (await server.generate_segment(house.request())).logprobs
        with pytest.raises(EngineError, match="staged is nothing"):
            await server.commit(server.policy_version + 1, "0123", "abort")
        manifest = house.stage(server.policy_version + 1, house.weights(7))
        await server.prepare(manifest)
        with pytest.raises(
            EngineError,
            match=f"digest 0123; staged is policy_version {manifest.version} with digest {manifest.digest}",
        ):
            await server.commit(manifest.version, "0123", "abort")
        wrong = house.stage(server.policy_version + 1, house.weights(7), digest="0" * 32)
        with pytest.raises(EngineError, match="announced was 0000"):
            await server.prepare(wrong)
        with pytest.raises(EngineError, match="staged is nothing"):
            await server.commit(manifest.version, manifest.digest, "abort")
        assert (await server.generate_segment(house.request())).logprobs == before
        await publish(server, house, 8)
        again = await server.commit(server.policy_version, house_digest(house, server), "abort")
        assert again.num_interrupted == 0, "the same again is no error"

    house.run(story)


def house_digest(house: House, server: VllmServer) -> str:
    return house.stage(server.policy_version, house.pushed[server.policy_version]).digest


def test_a_server_with_other_settings_than_the_run_counts_on_is_refused_with_the_flag(house: House) -> None:
    async def story(_: VllmServer) -> None:
        raise AssertionError("not reached")

    for facts, flag in (
        ({"dtype": "bfloat16"}, "--dtype bfloat16"),
        ({"max_length": MAX_LENGTH + 1}, f"--max-model-len {MAX_LENGTH + 1}"),
        ({"slots": SLOTS + 1}, f"--max-num-seqs {SLOTS + 1}"),
        ({"model_path": "/nowhere"}, "vllm serve /nowhere"),
        ({"has_adapters": True}, "--enable-lora"),
    ):
        with pytest.raises(ConfigError, match=flag):
            house.run(story, facts=facts)


def test_a_server_with_the_weights_of_another_run_is_refused(house: House) -> None:
    house.process.post("/update_weight_version", {"new_version": "4711"})

    async def story(_: VllmServer) -> None:
        raise AssertionError("not reached")

    try:
        with pytest.raises(ConfigError, match="weights that another run pushed, under the label 4711"):
            house.run(story)
    finally:
        house.process.post("/update_weight_version", {"new_version": str(house.version)})
