"""Each worker of a real vLLM with two is asked whether its parameters hold what was sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_house import House, vllm_house

from asyncrl.base.errors import EngineError
from asyncrl.engines.vllm_server import VllmServer

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]
LOADER = "faulty_vllm_worker.FaultyWeightLoader"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A server with two workers, whose linear layers keep their weights as on CUDA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLAIN_LINEAR", "1")
        folder: Path = tmp_path_factory.mktemp("pair")
        with vllm_house(folder, worker_extension=LOADER, tensor_parallel=2) as house:
            yield house


async def push(server: VllmServer, house: House, seed: int) -> None:
    manifest = house.stage(server.policy_version + 1, house.weights(seed))
    await server.commit(manifest.version, await server.prepare(manifest), "abort")


def test_every_tensor_of_both_workers_is_compared(pair: House) -> None:
    async def story(server: VllmServer) -> None:
        pair.process.rpc("asyncrl_plant", fault="", pins=True)
        await push(server, pair, 1)
        await push(server, pair, 2)

    pair.run(story)
    assert pair.process.rpc("asyncrl_known")["names"] == sorted(pair.base)


@pytest.mark.parametrize(
    ("seed", "module"),
    [(3, "self_attn.v_proj"), (4, "self_attn.o_proj"), (5, "self_attn.k_norm"), (6, "mlp.up_proj")],
)
def test_worker_that_keeps_an_old_part_is_named(pair: House, seed: int, module: str) -> None:
    stale = f"model.layers.3.{module}.weight"

    async def story(server: VllmServer) -> None:
        pair.process.rpc("asyncrl_plant", fault="stale_part", stale=stale)
        with pytest.raises(EngineError, match=f"worker 1 does not hold 1 tensors of version .*{stale}"):
            await push(server, pair, seed)

    pair.run(story, canary_limit=1e9)
