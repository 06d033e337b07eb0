"""Adapters in vLLM equal merged weights, and their folders hold the same bits."""

from __future__ import annotations

import asyncio
import copy
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import SCALE, adapters, merged
from torch import Tensor
from vllm_house import World, vllm_house
from vllm_process import ROOT, vllm_python

from asyncrl.base.errors import EngineError
from asyncrl.extensions.vllm.vllm_server import VllmServer
from asyncrl.messages.engine_api import Interrupt
from asyncrl.messages.tokens import SegmentPart
from asyncrl.messages.trainer_api import ExportResponse
from asyncrl.weights.export import export_weights

pytestmark = pytest.mark.extension("vllm")

RANK = 4
Q_PROJ = "model.layers.1.self_attn.q_proj"
DOWN_PROJ = "model.layers.3.mlp.down_proj"
UP_PROJ = "model.layers.0.mlp.up_proj"
FACTS = {"adapter_rank": RANK, "adapter_scale": SCALE}
HEAD = "lm_head"
"""Tied to the embedding, which has no adapter."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with vllm_house(
        tmp_path_factory.mktemp("vllm"), adapters={"rank": RANK, "scale": SCALE}
    ) as world:
        yield world


def stage(
    tensors: dict[str, Tensor], version: int, folder: Path, **changes: Any
) -> ExportResponse:
    answer = export_weights(
        tensors, folder / f"adapters-{version}.safetensors", version
    )
    return answer.model_copy(update=changes)


@pytest.mark.slow
@pytest.mark.vllm
def test_adapters_give_what_merged_weights_give(world: World) -> None:
    # The first push finds requests without an adapter, which cannot continue with one.
    pushes: list[tuple[Interrupt, tuple[str, ...], bool]] = [
        ("keep", (Q_PROJ, DOWN_PROJ), False),
        ("keep", (UP_PROJ,), True),
        ("keep", (Q_PROJ,), True),
        ("keep_kv", (DOWN_PROJ,), True),
        ("abort", (Q_PROJ, UP_PROJ), False),
    ]

    async def story(server: VllmServer) -> None:
        weights = world.base

        def gap(answer: SegmentPart, of: dict[str, Tensor], start: int = 0) -> float:
            given = (of, [10, 11, 12], answer.token_ids, answer.logprobs)
            return world.gap(*given, start=start)

        for version, (interrupt, modules, is_kept) in enumerate(pushes, 1):
            tensors = adapters(world.model_path, modules, seed=version)
            old = weights
            weights = merged(world.model_path, tensors, torch.float32)
            manifest = stage(
                tensors, version, world.scratch, canary=world.canary(weights)
            )
            assert await server.prepare(manifest) == manifest.digest
            chunks = asyncio.Queue[SegmentPart]()
            unstreamed, streamed = (
                server.generate_segment(world.request(max_tokens=300), on_chunk=one)
                for one in (None, chunks.put_nowait)
            )
            running = asyncio.gather(unstreamed, streamed)
            await chunks.get()
            await server.commit(version, manifest.digest, interrupt)
            fresh = await server.generate_segment(world.request(max_tokens=40))
            assert [span.version for span in fresh.sampled.spans] == [version]
            assert gap(fresh, weights) <= 1e-4
            kept, _ = await running
            assert (kept.finish_reason == "length") == is_kept
            if interrupt == "keep" and is_kept:
                last = kept.sampled.spans[-1]
                assert last.version == version
                assert gap(kept, weights, last.start) <= 1e-4
            assert gap(fresh, old) > 0.01, "the adapter changes the logprobs"
        folders = sorted(
            path.name for path in world.process.scratch().glob("adapter-*")
        )
        assert len(folders) == 2
        # vLLM leaves layers out that it does not know.
        version = server.policy_version + 1
        unknown = {
            name.replace("model.", "model.text."): one for name, one in tensors.items()
        }
        manifest = stage(unknown, version, world.scratch)
        assert await server.prepare(manifest) == manifest.digest
        with pytest.raises(EngineError, match="uses no adapters of 2 layers"):
            await server.commit(version, manifest.digest, "abort")

    world.run(story, facts=FACTS)


@pytest.mark.slow
@pytest.mark.vllm
def test_an_adapter_of_a_tied_head_changes_the_head_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = adapters(world.model_path, (Q_PROJ, HEAD), seed=7)
    embedding = world.base["model.embed_tokens.weight"]
    lora_A, lora_B = (tensors.pop(f"{HEAD}.lora_{kind}.weight") for kind in "AB")
    weights = merged(world.model_path, tensors, torch.float32)
    weights["lm_head.weight"] = embedding + SCALE * lora_B @ lora_A
    untied = copy.deepcopy(world.model)
    untied.lm_head.weight = torch.nn.Parameter(embedding.clone())
    monkeypatch.setattr(world, "model", untied)
    tensors |= {f"{HEAD}.lora_A.weight": lora_A, f"{HEAD}.lora_B.weight": lora_B}

    async def story(server: VllmServer) -> None:
        version = server.policy_version + 1
        canary = world.canary(weights)
        manifest = stage(tensors, version, world.scratch, canary=canary)
        assert await server.prepare(manifest) == manifest.digest
        await server.commit(version, manifest.digest, "abort")
        # Among others, so that a call has rows of several requests.
        answers = await asyncio.gather(
            *(
                server.generate_segment(world.request(max_tokens=40, seed=seed))
                for seed in range(3)
            )
        )
        for answer in answers:
            given = ([10, 11, 12], answer.token_ids, answer.logprobs)
            assert world.gap(weights, *given) <= 1e-4

    world.run(story, facts=FACTS)


PRODUCTS = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from asyncrl_servers.vllm.monkeypatches import patch_adapter_products

ROWS, WIDTHS, RANK, SCALE = 3000, (48, 32, 16), 8, 0.5

class Largest(TorchDispatchMode):
    size = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.size = max(self.size, result.numel())
        return result

patch_adapter_products()
rows = torch.randn(ROWS, WIDTHS[0])
pairs = [(torch.randn(2, 1, RANK, WIDTHS[0]), torch.randn(2, 1, width, RANK)) for width in WIDTHS[1:]]
base = torch.randn(ROWS, sum(WIDTHS[1:]))
for ids in ((7,), (9, 0, 7)):
    # Number 0 has no adapter; 9 is in the first place, and 7 in the second.
    numbers = tuple(number for number in ids for _ in range(ROWS // len(ids)))
    wrapper = PunicaWrapperCPU(ROWS, 4, "cpu")
    wrapper.update_metadata(LoRAMapping(numbers, ids, True), [9, 7], 2, 100)
    found = base.clone()
    with Largest() as largest:
        wrapper.add_lora_linear(found, rows, *zip(*pairs), SCALE, WIDTHS[1:])
    assert largest.size <= ROWS * max(WIDTHS), largest.size
    expected = base.clone()
    for at, number in enumerate((9, 7)):
        chosen = torch.tensor(numbers) == number
        changes = [SCALE * (rows[chosen] @ A[at, 0].T) @ B[at, 0].T for A, B in pairs]
        expected[chosen] += torch.cat(changes, 1)
    assert torch.allclose(found, expected, atol=1e-4)
    assert torch.equal(found[torch.tensor(numbers) == 0], base[torch.tensor(numbers) == 0])
"""


@pytest.mark.vllm
def test_adapters_are_not_copied_for_each_row() -> None:
    """vLLM's CPU kernels do, and then a push of 64 prompts samples no token for a
    minute.
    """
    path = os.pathsep.join([str(ROOT), str(ROOT / "servers")])
    subprocess.run(
        [vllm_python(), "-c", PRODUCTS],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
    )
