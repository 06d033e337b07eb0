"""Adapters in vLLM equal merged weights, and their folders hold the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_lora import adapters, merged
from torch import Tensor
from vllm_house import House, vllm_house

from asyncrl.base.errors import EngineError
from asyncrl.engines.vllm_server import VllmServer
from asyncrl.messages.engine_api import Interrupt
from asyncrl.messages.trainer_api import ExportResponse
from asyncrl.weights.export import export_weights

RANK, SCALE = 4, 0.5
Q_PROJ = "model.layers.1.self_attn.q_proj"
DOWN_PROJ = "model.layers.3.mlp.down_proj"
UP_PROJ = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with vllm_house(
        tmp_path_factory.mktemp("vllm"), has_adapters=True, lora_rank=RANK
    ) as house:
        yield house


def stage(
    tensors: dict[str, Tensor], version: int, folder: Path, **changes: Any
) -> ExportResponse:
    answer = export_weights(
        tensors, folder / f"adapters-{version}.safetensors", version
    )
    return answer.model_copy(update={"kind": "lora", **changes})


@pytest.mark.slow
@pytest.mark.vllm
def test_adapters_give_what_merged_weights_give(house: House) -> None:
    async def story(server: VllmServer) -> None:
        modules_of: dict[Interrupt, tuple[str, ...]] = {
            "abort": (Q_PROJ, DOWN_PROJ),
            "keep": (UP_PROJ,),
            "keep_kv": (Q_PROJ,),
        }
        before = await server.generate_segment(house.request(max_tokens=40))
        assert (
            house.gap(house.base, [10, 11, 12], before.token_ids, before.logprobs)
            <= 1e-4
        )
        for interrupt, modules in modules_of.items():
            version = server.policy_version + 1
            tensors = adapters(house.model_path, modules, seed=version)
            weights = merged(house.model_path, tensors, torch.float32)
            manifest = stage(
                tensors, version, house.scratch, canary=house.canary(weights)
            )
            assert await server.prepare(manifest) == manifest.digest
            await server.commit(version, manifest.digest, interrupt)
            answer = await server.generate_segment(house.request(max_tokens=40))
            assert [span.version for span in answer.version_spans] == [version]
            assert (
                house.gap(weights, [10, 11, 12], answer.token_ids, answer.logprobs)
                <= 1e-4
            )
            assert (
                house.gap(house.base, [10, 11, 12], answer.token_ids, answer.logprobs)
                > 0.01
            )
        folders = sorted(
            path.name[:9] for path in house.process.scratch().glob("adapter-*")
        )
        assert folders == ["adapter-2", "adapter-3"]
        # vLLM leaves layers out that it does not know.
        version = server.policy_version + 1
        unknown = {
            name.replace("model.", "model.text."): one for name, one in tensors.items()
        }
        manifest = stage(unknown, version, house.scratch)
        assert await server.prepare(manifest) == manifest.digest
        with pytest.raises(EngineError, match="uses no adapters of 1 layers"):
            await server.commit(version, manifest.digest, "abort")

    house.run(story)
