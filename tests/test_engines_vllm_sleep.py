"""A real vLLM that sleeps, is given weights chunk by chunk, and wakes: what waited meanwhile is sampled with
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import pytest
from safetensors.torch import save_file
from torch import Tensor
from vllm_house import House

from asyncrl.engines.vllm.vllm_server import VllmServer
from asyncrl.errors import EngineError
from asyncrl.messages.base import weights_digest
from asyncrl.messages.trainer_calls import ExportChunkResponse

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


def digest_of(weights: Mapping[str, Tensor]) -> str:
    return weights_digest(
        (name, "float32", tuple(one.shape), one.numpy().tobytes()) for name, one in weights.items()
    )


def chunks(
    house: House, version: int, weights: dict[str, Tensor], canary_of: dict[str, Tensor]
) -> Iterator[ExportChunkResponse]:
    """In one file, each over the one before."""
    names, path = sorted(weights), house.scratch / "chunk.safetensors"
    for index, part in enumerate((names[:20], names[20:])):
        chunk = {name: weights[name].contiguous() for name in part}
        save_file(chunk, path)
        is_last = index == 1
        yield ExportChunkResponse(
            version=version,
            index=index,
            path=str(path),
            digest=digest_of(chunk),
            num_tensors=len(chunk),
            num_bytes=sum(one.nbytes for one in chunk.values()),
            is_last=is_last,
            whole_digest=digest_of(weights) if is_last else "",
            canary=house.canary(canary_of) if is_last else None,
        )


async def turn(
    server: VllmServer, house: House, weights: dict[str, Tensor], canary_of: dict[str, Tensor]
) -> None:
    await server.sleep(["kv", "weights"])
    await server.wake(["weights"])
    version = server.policy_version + 1
    for chunk in chunks(house, version, weights, canary_of):
        assert await server.load_chunk(chunk) == chunk.digest
    assert (await server.commit(version, digest_of(weights), "abort")).version == version
    await server.wake(["kv"])


def test_a_turn_of_sleep_chunks_and_wake_brings_a_version_and_its_canary_is_heard_at_the_end(
    house: House,
) -> None:
    async def story(server: VllmServer) -> None:
        weights = house.weights(5)
        async with asyncio.TaskGroup() as tasks:
            begun = asyncio.Event()
            running = tasks.create_task(
                server.generate_segment(house.request(max_tokens=700), on_chunk=lambda _: begun.set())
            )
            await begun.wait()
            await server.sleep(["kv", "weights"])
            assert running.result().finish_reason == "abort"
            waits = tasks.create_task(server.generate_segment(house.request()))
            await turn(server, house, weights, weights)
        answer = waits.result()
        assert [span.version for span in answer.version_spans] == [server.policy_version]
        assert house.gap(weights, [10, 11, 12], answer.token_ids, answer.logprobs) <= 1e-4
        with pytest.raises(EngineError, match="does not compute with the weights of policy_version"):
            await turn(server, house, house.weights(6), house.weights(7))

    house.run(story)
