"""Models with experts, which transformers stacks at load: what is exported and loaded goes by the names of
the checkpoint, whichever way it takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_in_process import answered, publish, running_engine
from rank_processes import running
from safetensors.torch import load_file
from test_engine_sleep import sleep, wake
from test_weights_export import chunks_of
from tiny_model import MOE, make_tiny_moe
from trainer_cases import batch_of, changed, make_batch, make_spec
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from vllm_house import CANARY_LIMIT, House
from vllm_process import vllm_process

from asyncrl.engines.vllm_server import VllmServer
from asyncrl.messages.calls import (
    BatchArrays,
    BatchHeader,
    CommitRequest,
    LoadChunkRequest,
    PrepareRequest,
)
from asyncrl.trainer.step import TrainStep
from asyncrl.weights.export import LazyWeights, export_weights, named_weights
from asyncrl.weights.tensor_files import digest_tensors, pieces_of, stored_pieces
from asyncrl.weights.transport import Exported, TrainerEnd, make_transport
from asyncrl_servers.embedded.decode_loop import Engine

DEEPSEEK = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
DEEPSEEK |= {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
STACKED = {
    "qwen3_moe": MOE,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": DEEPSEEK | {"moe_intermediate_size": 16, "first_k_dense_replace": 1},
}
"""Models whose experts transformers stacks at load; Mixtral's it also renames."""


@pytest.mark.parametrize("model_type", STACKED)
def test_what_transformers_stacks_is_exported_by_the_names_of_the_checkpoint(
    tmp_path: Path, model_type: str
) -> None:
    folder = make_tiny_moe(tmp_path / "model", model_type, **STACKED[model_type])
    stored = load_file(folder / "model.safetensors")
    for model in (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32),
    ):
        model.load_state_dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())
        named = named_weights(model)
        assert any(one.endswith(".experts.gate_up_proj") for one in named), "stacked in the model"
        weights = LazyWeights(named, None, stored_pieces(model, named))
        loaded = load_file(export_weights(weights, tmp_path / "w.safetensors", 0).path)
        assert loaded.keys() == stored.keys()
        assert any(".experts.3." in one for one in loaded)
        assert all(torch.equal(loaded[name], one) for name, one in stored.items())
        pieces = pieces_of(named, weights.pieces)
        begins = {one.untyped_storage().data_ptr() for one in named.values()}
        assert {one.untyped_storage().data_ptr() for one in pieces.values()} == begins, "a cut copies nothing"


def test_chunks_saved_folders_broadcasts_and_files_name_experts_alike(tmp_path: Path) -> None:
    folder = make_tiny_moe(tmp_path / "model")
    step = make_step(folder, tmp_path)
    step.train(*make_batch())
    answer = step.export(tmp_path / "v1.safetensors")
    whole, chunks = load_file(answer.path), chunks_of(step)
    assert whole.keys() == load_file(folder / "model.safetensors").keys()
    assert (answer.num_tensors, answer.digest) == (len(whole), digest_tensors(whole))
    assert len(chunks) > 2
    assert sum(told.num_tensors for told, _ in chunks) == len(whole)
    assert all(told.digest == digest_tensors(tensors) for told, tensors in chunks)
    in_chunks = {name: tensor for _, tensors in chunks for name, tensor in tensors.items()}
    step.save(tmp_path / "saved")
    for found in (in_chunks, load_file(tmp_path / "saved" / "model.safetensors")):
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], one) for name, one in whole.items())
    assert chunks[-1][0].whole_digest == answer.digest
    broadcast = make_transport("nccl", TrainerEnd(torch.device("cpu"), torch.float32, 10_000))
    held = broadcast.begin(Exported(1, step._lazy_weights), tmp_path).result()
    assert (held.digest, held.num_tensors, held.num_bytes) == (
        answer.digest,
        answer.num_tensors,
        answer.num_bytes,
    )
    again = make_step(folder, tmp_path)  # the last chunk alone: what has no digest yet is hashed
    vars(again).update(policy_version=1)
    again.policy.load_state_dict(step.policy.state_dict())
    names = again.chunk_names(1, len(chunks) - 1)
    assert len(names) == len(named_weights(step.policy.model))
    assert again.export_chunk(len(chunks) - 1).whole_digest == answer.digest


def make_step(folder: Path, scratch: Path, **values: Any) -> TrainStep:
    (scratch / "staging").mkdir(exist_ok=True)
    return TrainStep(make_spec(folder, scratch, **{"chunk_bytes": 10_000, **values}))


def drawn_batch(engine: Engine, version: int) -> tuple[BatchHeader, BatchArrays]:
    """A group that the engine has sampled, with rewards that differ."""
    prompts = [(7, 8, 9), (10, 11, 12, 13), (14,), (15, 16)]
    answers = [answered(engine, prompt_ids=one, seed=seed) for seed, one in enumerate(prompts)]
    rows, logprobs = [], list[float]()
    for prompt, answer in zip(prompts, answers, strict=True):
        rows.append(([*prompt, *answer.token_ids], [False] * len(prompt) + [True] * len(answer.token_ids)))
        logprobs += [0.0] * len(prompt) + answer.logprobs
    header, arrays = batch_of([rows])
    entries = [
        one.model_copy(update={"reward": float(index % 2)}) for index, one in enumerate(header.trajectories)
    ]
    versions = np.where(arrays.loss_mask, version, -1).astype(np.int32)
    update = {"version": version, "min_version": version, "trajectories": entries}
    return header.model_copy(update=update), changed(
        arrays, behaviour_logprobs=np.array(logprobs, np.float32), versions=versions
    )


@pytest.mark.parametrize("chunks", ["file", "memory"])
def test_an_embedded_engine_computes_with_the_experts_that_it_was_pushed(tmp_path: Path, chunks: str) -> None:
    """As one file, and in turns chunk by chunk; after each push logprobs are the trainer's."""
    folder = make_tiny_moe(tmp_path / "model")
    step, gaps = make_step(folder, tmp_path, chunks=chunks), list[float]()
    with running_engine(folder, deterministic=False) as engine:  # products of experts have few rows
        assert engine.weights.digest == digest_tensors(load_file(folder / "model.safetensors"))
        for version in range(3):
            gaps.append(step.train(*drawn_batch(engine, version))["policy/logprob_gap_max"])
            if version < 2:
                answer = step.export(tmp_path / f"v{version + 1}.safetensors")
                publish(engine, PrepareRequest(**answer.model_dump(include=set(PrepareRequest.model_fields))))
        assert engine.weights.digest == answer.digest
        sleep(engine)
        wake(engine)  # restored from the file
        sleep(engine)
        wake(engine, restore=False)
        told, index = None, 0
        while told is None or not told.is_last:
            step.chunk_names(3, index)
            told, index = step.export_chunk(index), index + 1
            request = told.model_dump(include=set(LoadChunkRequest.model_fields))
            assert engine.weights.load_chunk(LoadChunkRequest(**request)).digest == told.digest
        commit = CommitRequest(version=3, digest=told.whole_digest)
        assert engine.commit(commit).result(timeout=60).digest == engine.weights.digest
        gaps.append(step.train(*drawn_batch(engine, 3))["policy/logprob_gap_max"])
    assert max(gaps) < 1e-4, gaps


def test_ranks_export_experts_by_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    folder = make_tiny_moe(tmp_path / "model")
    alone = make_step(folder, tmp_path)
    alone.train(*make_batch())
    expected = load_file(alone.export(tmp_path / "alone.safetensors").path)
    with running(folder, tmp_path / "ranks", 2, chunk_bytes=10_000) as group:
        group.train(*make_batch())
        export = group.export()
        found = load_file(export.path)
        group.save(tmp_path / "saved")
    assert export.digest == digest_tensors(found)
    for loaded in (found, load_file(tmp_path / "saved" / "model.safetensors")):
        assert loaded.keys() == expected.keys()
        for name, one in expected.items():
            torch.testing.assert_close(loaded[name], one, atol=1e-5, rtol=0, msg=name)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_vllm_computes_with_the_experts_that_it_was_pushed(tmp_path: Path, model_type: str) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "initializer_range": 0.1}
    wide |= {"moe_intermediate_size": 32}  # vLLM's kernels for the CPU know no smaller heads and experts
    folder = make_tiny_moe(tmp_path / "model", model_type, **STACKED[model_type] | wide)
    step = make_step(folder, tmp_path, canary_tokens=160)
    given = {"name": "engine-0", "model_path": str(folder), "dtype": "float32", "device": "cpu"}
    given |= {"max_length": 256, "slots": 4}
    tokenizer = AutoTokenizer.from_pretrained(folder)

    async def story(server: VllmServer) -> None:
        for version in (1, 2):
            step.train(*make_batch(version=version - 1))
            manifest = step.export(tmp_path / f"v{version}.safetensors")
            assert manifest.canary is not None
            assert await server.prepare(manifest) == manifest.digest
            await server.commit(version, manifest.digest, "abort")  # the canary agrees, or it is refused
            assert (server.policy_version, house.warnings) == (version, [])

    with vllm_process(given, tmp_path / "server") as process:
        process.wait_ready(800)
        house = House(process, folder, tmp_path, {}, tokenizer, step.policy.model)
        house.run(story, CANARY_LIMIT, {"max_length": 256, "slots": 4})
