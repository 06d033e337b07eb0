"""Ranks of a trainer start with their own rows of a folder's tensors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_model import STACKED, make_tiny_model, make_tiny_moe
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer_cases import make_spec
from transformers import AutoModelForCausalLM

from asyncrl.base.errors import ConfigError
from asyncrl.trainer.model import loading
from asyncrl.trainer.model.build_model import TrainedModel
from asyncrl.trainer.model.loading import meta_model, stored_weights
from asyncrl.trainer.ranks import Ranks

CPU = torch.device("cpu")
WHOLE = "each rank loads the whole"


@contextlib.contextmanager
def place_of(rank: int, size: int) -> Iterator[Ranks]:
    """Give the place of one rank in a group without its other ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield Ranks(rank, size, init_device_mesh("cpu", (size,)))
    finally:
        dist.destroy_process_group()


def whole_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def assert_shards(model: Any, expected: Any, rank: int, size: int) -> None:
    """Each parameter has the bytes of its rows, each buffer is whole, and tied weights are tied."""
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


@pytest.mark.parametrize("rank", [2, 4])
@pytest.mark.parametrize(
    ("architecture", "change", "values"),
    [
        ({}, split_files, {}),
        ({"tie_word_embeddings": False, "attention_bias": True}, None, {"dtype": "bfloat16"}),
        ({}, None, {"trainer": {"lora": {"rank": 2}}, "dtype": "bfloat16"}),
        ({}, bin_file, {}),
    ],
    ids=["tied, many files", "untied, biases", "adapters", "converted by transformers"],
)
def test_rank_has_its_rows_of_each_tensor(
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


class NotedFile:
    """A safetensors file that notes which tensors are read."""

    def __init__(self, file: Any, names: set[str]) -> None:
        self._file, self._names, self.keys = file, names, file.keys

    def get_tensor(self, name: str) -> torch.Tensor:
        self._names.add(name)
        return self._file.get_tensor(name)

    def get_slice(self, name: str) -> NotedRows:
        return NotedRows(self._file.get_slice(name), lambda: self._names.add(name))


class NotedRows:
    def __init__(self, rows: Any, note: Callable[[], None]) -> None:
        self._rows, self._note, self.get_shape = rows, note, rows.get_shape

    def __getitem__(self, key: slice) -> torch.Tensor:
        self._note()
        return self._rows[key]


def many_files(folder: Path, tensors: dict[str, Any]) -> None:
    """Split one file into three; the experts of a layer are in different files."""
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(tensors)}
    for file in {*weight_map.values()}:
        save_file(
            {name: one for name, one in tensors.items() if weight_map[name] == file},
            folder / file,
            metadata={"format": "pt"},
        )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


@pytest.mark.parametrize(("model_type", "size"), [(kind, 2 + at % 2) for at, kind in enumerate(STACKED)])
def test_rank_reads_and_stacks_its_own_experts(
    tmp_path: Path,
    model_type: str,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """4 experts leave nothing for the last of 3 ranks."""
    folder = make_tiny_moe(tmp_path / "model", model_type, **STACKED[model_type])
    stored = load_file(folder / "model.safetensors")
    many_files(folder, stored)
    whole, spec = whole_model(folder), make_spec(folder, tmp_path, trainer={"world_size": size})
    per_rank = -(-4 // size)
    for rank in range(size):
        names = set[str]()

        def opened(*args: Any, names: set[str] = names, **options: Any) -> NotedFile:
            return NotedFile(safe_open(*args, **options), names)

        monkeypatch.setattr(loading, "safe_open", opened)
        with place_of(rank, size) as ranks:
            made = TrainedModel(spec, ranks, needs_reference=False)
            assert_shards(made.policy.model, whole, rank, size)
        own = {f".experts.{number}." for number in range(rank * per_rank, min(4, (rank + 1) * per_rank))}
        read = {name for name in names if ".experts." in name}
        assert read == {name for name in stored if any(one in name for one in own)}
    assert WHOLE not in caplog.text


def test_stacked_experts_of_bfloat16_load_as_transformers_loads_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Experts that were saved stacked load alike."""
    folder = make_tiny_moe(tmp_path / "model")
    whole_model(folder, torch.bfloat16).save_pretrained(folder)
    stacked = tmp_path / "stacked"
    whole_model(folder, torch.bfloat16).save_pretrained(stacked, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(stacked / "model.safetensors")
    for path in (folder, stacked):
        with place_of(1, 3) as ranks:
            spec = make_spec(path, tmp_path, trainer={"world_size": 3})
            made = TrainedModel(spec, ranks, needs_reference=False)
            assert_shards(made.policy.model, whole_model(path), 1, 3)
    assert WHOLE not in caplog.text


def test_unknown_names_are_left_to_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_tiny_moe(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    other = {name.replace(".experts.3.", ".experts.other."): one for name, one in tensors.items()}
    save_file(other, folder / "model.safetensors", metadata={"format": "pt"})
    spec = make_spec(folder, tmp_path)
    assert stored_weights(meta_model(spec, CPU, torch.float32), spec) is None
    assert WHOLE in caplog.text


def test_rank_holds_its_shard_and_one_tensor_at_most(tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 20}
    folder = make_tiny_model(tmp_path / "model", **shape)
    sizes = [4 * parameter.numel() for parameter in whole_model(folder).parameters()]
    spec = make_spec(folder, tmp_path, trainer={"world_size": 8})
    with (
        place_of(3, 8) as ranks,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled,
    ):
        made = TrainedModel(spec, ranks, needs_reference=False)
    assert made.policy.plan.is_packed
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    events = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    held = most = 0
    for event in events:
        # The kernel may drop pages of the mapped file.
        if abs(event.nbytes()) < sum(sizes):
            held += event.nbytes()
            most = max(most, held)
    assert most >= sum(sizes) / 8, "or nothing was measured"
    assert most <= sum(sizes) / 8 + max(sizes), "the plan's two layers are gone before"


UP, EXPERT = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.experts.2.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
IGNORED = "model.layers.0.self_attn.rotary_emb.inv_freq"
EXTRA = EXPERT.replace(".2.", ".4.")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: {UP: None}, f"lack 1 tensors, e.g. {UP}"),
        (lambda found: {UP.replace("1", "2"): torch.zeros(3)}, "1 tensors that its config.json has no place"),
        (lambda found: {"model.norm.weight": torch.zeros(7)}, r"shape \[7\], and the model's is \[32\]"),
        (lambda found: {"lm_head.weight": found[EMBEDDING] + 1}, "differ, and its config.json ties"),
        (lambda found: {"lm_head.weight": found[EMBEDDING] * 1, IGNORED: torch.zeros(4)}, ""),
        (lambda found: {EXPERT: None}, f"lack 1 tensors, e.g. {EXPERT}"),
        (lambda found: {EXPERT: torch.zeros(7, 32)}, rf"{EXPERT} of .* has shape \[7, 32\]"),
        (lambda found: {EXTRA: found[EXPERT] * 1}, f"has no place for, e.g. {EXTRA}"),
    ],
)
def test_wrong_tensor_of_a_checkpoint_is_named(tmp_path: Path, change: Any, words: str) -> None:
    folder = (make_tiny_moe if "experts" in words else make_tiny_model)(tmp_path / "model")
    found = load_file(folder / "model.safetensors")
    tensors = {name: one for name, one in {**found, **change(found)}.items() if one is not None}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    spec = make_spec(folder, tmp_path)
    with pytest.raises(ConfigError, match=words) if words else contextlib.nullcontext():
        assert stored_weights(meta_model(spec, CPU, torch.float32), spec) is not None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b"no such head"),
        ("model.safetensors.index.json", b"{"),
        ("model.safetensors.index.json", json.dumps({"weight_map": {"a": "not_there"}}).encode()),
    ],
)
def test_broken_file_is_an_error_of_the_model(tmp_path: Path, name: str, content: bytes) -> None:
    folder = make_tiny_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    spec = make_spec(folder, tmp_path)
    with pytest.raises(ConfigError, match="cannot load the model"):
        stored_weights(meta_model(spec, CPU, torch.float32), spec)
