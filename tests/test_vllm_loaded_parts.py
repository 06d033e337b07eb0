"""Tensor-parallel workers compare their parameters with the sent tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm_house import World, vllm_house

from asyncrl.base.errors import EngineError
from asyncrl.extensions.vllm.vllm_server import VllmServer
from asyncrl.weights.tensor_files import digests_of
from asyncrl_servers.vllm.loaded_parts import LoadedParts

pytestmark = pytest.mark.extension("vllm")

LOADER = "faulty_vllm_worker.FaultyWeightLoader"


def of_vllm(test: Any) -> Any:
    return pytest.mark.slow(pytest.mark.vllm(pytest.mark.timeout(600)(test)))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A server with two workers, whose linear layers keep their weights as on CUDA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLAIN_LINEAR", "1")
        folder: Path = tmp_path_factory.mktemp("pair")
        with vllm_house(folder, worker_extension=LOADER, tensor_parallel=2) as world:
            yield world


class Layer(nn.Module):
    def __init__(self, weight: Tensor, sizes: list[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.output_partition_sizes = sizes


class Qwen3ForCausalLM(nn.Module):
    """vLLM's layers, joined and cut by torch.chunk."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(
        self, sent: dict[str, Tensor], rank: int, num_workers: int, num_kv_heads: int
    ) -> None:
        super().__init__()
        q, k, v, out, embedding = sent.values()
        head = rank * num_kv_heads // num_workers
        num_parts = min(num_workers, num_kv_heads)
        parts = [q.chunk(num_workers)[rank]] + [
            one.chunk(num_parts)[head % num_parts] for one in (k, v)
        ]
        padded = torch.cat(
            [embedding, torch.zeros(128 - len(embedding), embedding.shape[1])]
        )
        self.qkv_proj = Layer(torch.cat(parts), [len(part) for part in parts])
        self.o_proj = Layer(out.chunk(num_workers, 1)[rank].clone(), [len(out)])
        self.embed_tokens = Layer(padded.chunk(num_workers)[rank].clone(), [])


@pytest.mark.parametrize(
    ("num_workers", "num_kv_heads"), [(1, 2), (2, 2), (4, 2), (4, 1)]
)
def test_parts_belong_to_joined_and_cut_layers(
    num_workers: int, num_kv_heads: int
) -> None:
    kv = (8 * num_kv_heads, 16)
    shapes = {
        "q_proj": (32, 16),
        "k_proj": kv,
        "v_proj": kv,
        "o_proj": (16, 32),
        "embed_tokens": (97, 16),
    }
    sent = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    for rank in range(num_workers):
        model = Qwen3ForCausalLM(sent, rank, num_workers, num_kv_heads)
        parts = LoadedParts(model, rank, num_workers)
        expected = parts.expected(sent, digests_of(sent))
        assert expected.keys() == sent.keys()
        assert parts.wrong(expected) == []
        model.qkv_proj.weight[-1] += 1
        assert parts.wrong(expected) == ["v_proj.weight"]


async def push(server: VllmServer, world: World, seed: int) -> None:
    manifest = world.stage(server.policy_version + 1, world.weights(seed))
    await server.commit(manifest.version, await server.prepare(manifest), "abort")


@of_vllm
def test_every_tensor_of_both_workers_is_compared(pair: World) -> None:
    async def story(server: VllmServer) -> None:
        pair.process.rpc("asyncrl_plant", fault="", pins=True)
        await push(server, pair, 1)
        await push(server, pair, 2)

    pair.run(story)
    assert pair.process.rpc("asyncrl_known")["names"] == sorted(pair.base)


@of_vllm
@pytest.mark.parametrize(
    ("seed", "module"),
    [
        (3, "self_attn.v_proj"),
        (4, "self_attn.o_proj"),
        (5, "self_attn.k_norm"),
        (6, "mlp.up_proj"),
    ],
)
def test_worker_that_keeps_an_old_part_is_named(
    pair: World, seed: int, module: str
) -> None:
    stale = f"model.layers.3.{module}.weight"

    async def story(server: VllmServer) -> None:
        pair.process.rpc("asyncrl_plant", fault="stale_part", stale=stale)
        with pytest.raises(
            EngineError, match=f"worker 1 does not hold 1 tensors of version .*{stale}"
        ):
            await push(server, pair, seed)

    pair.run(story, canary_limit=1e9)
