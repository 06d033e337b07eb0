"""Ranks of a trainer start with their own rows of a folder's tensors, and with what no file has."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import running
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_model import TINY_ARCHITECTURE, make_tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer_cases import make_spec
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.errors import ConfigError
from asyncrl.trainer.model.loading import load_model, meta_model, stored_weights
from asyncrl.trainer.model.parts import TrainedModel
from asyncrl.trainer.ranks import Ranks
from asyncrl.trainer.step import TrainStep

CPU = torch.device("cpu")
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@contextlib.contextmanager
def place_of(rank: int, size: int) -> Iterator[Ranks]:
    """The place of one rank in a group whose others are not there: for what needs no word of them."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield Ranks(rank, size, init_device_mesh("cpu", (size,)))
    finally:
        dist.destroy_process_group()


def whole_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def assert_shards(model: Any, expected: Any, rank: int, size: int) -> None:
    """Each parameter has the bytes of its rows, each buffer its own; what was tied is."""
    wanted = dict(expected.named_parameters())
    found = {name.replace(".base_layer.", "."): one for name, one in model.named_parameters()}
    assert {name for name in found if ".lora_" not in name} == wanted.keys()
    for name, tensor in wanted.items():
        rows = [*tensor.chunk(size), *[tensor[:0]] * size][rank]
        assert isinstance(found[name], DTensor)
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].to_local(), rows), name
    buffers = dict(model.named_buffers())
    for name, tensor in expected.named_buffers():
        assert torch.equal(buffers[name], tensor), name


def split_files(folder: Path) -> None:
    whole_model(folder).save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert len([*folder.glob("*.safetensors")]) > 2


def bin_file(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def experts(folder: Path) -> None:
    shape = {name: value for name, value in TINY_ARCHITECTURE.items() if name != "model_type"}
    config = AutoConfig.for_model("qwen3_moe", **shape, **MOE, vocab_size=52)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert any(".experts.0." in name for name in file.keys()), "one by one, and stacked in the model"  # noqa: SIM118


@pytest.mark.parametrize("rank", [0, 2, 4])
@pytest.mark.parametrize(
    ("architecture", "change", "values"),
    [
        ({}, split_files, {}),
        ({"tie_word_embeddings": False, "attention_bias": True}, None, {"dtype": "bfloat16"}),
        ({}, None, {"trainer": {"lora": {"rank": 2}}, "dtype": "bfloat16"}),
        ({}, bin_file, {}),
        ({}, experts, {}),
    ],
    ids=["tied, many files", "untied, biases", "adapters", "converted by transformers", "experts"],
)
def test_a_rank_has_its_rows_of_each_tensor_and_all_buffers(
    tmp_path: Path, architecture: dict[str, Any], change: Any, values: dict[str, Any], rank: int
) -> None:
    folder = make_tiny_model(tmp_path / "model", **architecture)
    if change is not None:
        change(folder)
    trainer = {"world_size": 5, **values.pop("trainer", {})}
    spec, is_adapted = make_spec(folder, tmp_path, trainer=trainer, **values), "lora" in trainer
    with place_of(rank, 5) as ranks:
        made = TrainedModel(spec, ranks, needs_reference=True)
        base = torch.bfloat16 if is_adapted else torch.float32
        assert_shards(made.policy.model, whole_model(folder, base), rank, 5)
        assert all(one.dtype == torch.float32 for one in made.masters.named.values() if one.requires_grad)
        if is_adapted:
            assert made.reference is None
        else:
            assert made.reference is not None
            assert_shards(made.reference.model, whole_model(folder, made.dtype), rank, 5)
        model = made.policy.model
        is_tied = model.lm_head.weight is model.get_input_embeddings().weight
        assert is_tied is model.config.tie_word_embeddings


def test_a_rank_never_holds_more_than_its_shard_and_one_tensor(tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 20}
    folder = make_tiny_model(tmp_path / "model", **shape)
    sizes = [4 * parameter.numel() for parameter in whole_model(folder).parameters()]
    spec = make_spec(folder, tmp_path, trainer={"world_size": 8})
    with (
        place_of(3, 8) as ranks,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
    ):
        made = TrainedModel(spec, ranks, needs_reference=False)
    assert made.policy.plan.is_packed
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    events = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    held = most = 0
    for event in events:
        # The file is mapped: its pages are the kernel's, to drop when it likes.
        if abs(event.nbytes()) < sum(sizes):
            held += event.nbytes()
            most = max(most, held)
    assert most >= sum(sizes) / 8, "or nothing was measured"
    assert most <= sum(sizes) / 8 + max(sizes), "the plan's two layers are gone before"


def missing(folder: Path, tensors: dict[str, Any]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def extra(folder: Path, tensors: dict[str, Any]) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(3)


def misshapen(folder: Path, tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"] = torch.zeros(7)


def ignored(folder: Path, tensors: dict[str, Any]) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def untied(folder: Path, tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


@pytest.mark.parametrize(
    ("change", "words", "is_for_ranks_alone"),
    [
        (missing, "lack 1 tensors, e.g. model.layers.1.mlp.up_proj.weight", False),
        (extra, "1 tensors that its config.json has no place for, e.g. model.layers.2.mlp.up", False),
        (misshapen, r"model.norm.weight", False),
        (misshapen, r"model.norm.weight of .* has shape \[7\], and the model's is \[32\]", True),
        (untied, "model.embed_tokens.weight and lm_head.weight of .* differ, and its config.json ties", True),
        (ignored, "", False),
    ],
)
def test_a_tensor_that_is_missing_too_many_or_of_another_shape_is_named(
    tmp_path: Path, change: Any, words: str, is_for_ranks_alone: bool
) -> None:
    folder = make_tiny_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    change(folder, tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    spec = make_spec(folder, tmp_path)

    def as_a_rank() -> None:
        assert stored_weights(meta_model(spec, CPU, torch.float32), spec) is not None

    def as_one() -> None:
        load_model(spec, CPU, torch.float32, is_sharded=False)

    for load in (as_a_rank,) if is_for_ranks_alone else (as_a_rank, as_one):
        with pytest.raises(ConfigError, match=words) if words else contextlib.nullcontext():
            load()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b"no such head"),
        ("model.safetensors.index.json", b"{"),
        ("model.safetensors.index.json", json.dumps({"weight_map": {"a": "not_there"}}).encode()),
    ],
)
def test_a_broken_file_is_an_error_of_the_model(tmp_path: Path, name: str, content: bytes) -> None:
    folder = make_tiny_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    spec = make_spec(folder, tmp_path)
    with pytest.raises(ConfigError, match="cannot load the model"):
        stored_weights(meta_model(spec, CPU, torch.float32), spec)


@pytest.mark.slow
@pytest.mark.parametrize("values", [{}, {"trainer": {"lora": {"rank": 2}}, "dtype": "bfloat16"}])
def test_two_ranks_start_with_the_bytes_of_one_process(
    tiny_model_dir: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    (tmp_path / "alone").mkdir()
    alone = TrainStep(make_spec(tiny_model_dir, tmp_path / "alone", **values))
    expected = alone.export(tmp_path / "alone.safetensors")
    with running(tiny_model_dir, tmp_path / "ranks", **values) as group:
        assert group.export().digest == expected.digest
        if values:
            group.save(tmp_path / "adapter", merged=False)
            alone.save(tmp_path / "alone-adapter", merged=False)
            name = "adapter_model.safetensors"
            found, wanted = (
                load_file(tmp_path / "adapter" / name),
                load_file(tmp_path / "alone-adapter" / name),
            )
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[key], wanted[key]) for key in wanted)
