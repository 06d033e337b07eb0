"""A run keeps its first model; models made from nothing."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from job_runs import write_config
from safetensors.torch import load_file, save_file
from tiny_model import STACKED, TINY_CHARACTERS, make_tiny_model, make_tiny_moe
from torch.distributed.tensor import DTensor
from trainer_cases import make_spec, mesh_of_one
from transformers import AutoModelForCausalLM

from asyncrl.base.errors import ConfigError
from asyncrl.config import load_config
from asyncrl.launch.processes import run_module
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.trainer.model.build_model import TrainedModel, load_model
from asyncrl.trainer.model.model_folder import ModelPin, make_model_folder
from asyncrl.trainer.model.random_init import make_character_tokenizer


def begin(run_dir: Path, model: Path, *, is_free: bool = False) -> ModelPin:
    pin = ModelPin(run_dir, "base", is_free=is_free)
    pin.read(model)
    return pin


def test_run_refuses_another_model_until_it_is_accepted(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    weights = model / "model.safetensors"
    (model / "config.json").write_bytes(b"first")
    save_file({"a": torch.zeros(3, 2), "b": torch.zeros(2)}, weights)
    begin(tmp_path, model).write()
    for other in (
        {"a": torch.zeros(3, 2)},
        {"a": torch.ones(2, 3), "b": torch.ones(2)},
    ):
        save_file(other, weights)
        with pytest.raises(ConfigError, match="other names or sizes") as caught:
            begin(tmp_path, model, is_free=True)
        assert "--allow-change does not help" in caught.value.rule
    save_file({"a": torch.ones(3, 2), "b": torch.ones(2)}, weights)
    (model / "config.json").unlink()
    (model / "chat_template.jinja").write_bytes(b"new")
    accepted = begin(tmp_path, model, is_free=True)
    with pytest.raises(
        ConfigError, match="chat_template.jinja, config.json, model.safetensors;"
    ) as caught:
        begin(tmp_path, model)  # the start that accepts it may still be refused
    assert "--allow-change model.path" in caught.value.way_out
    accepted.write()
    begin(tmp_path, model)


@pytest.mark.parametrize("given", [None, "v1"])
def test_commit_of_the_hub_is_kept(
    tmp_path: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: str | None,
) -> None:
    asked: list[str | None] = []
    hub_ids = set[str]()

    def snapshot_download(hub_id: str, *, revision: str | None = None, **_: Any) -> str:
        asked.append(revision)
        hub_ids.add(hub_id)
        folder = tmp_path / "hub" / "snapshots" / (revision or f"commit{len(asked)}")
        return str(shutil.copytree(tiny_model_dir, folder, dirs_exist_ok=True))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    path = "some/model" if given is None else f"some/model@{given}"
    config = load_config(write_config(tmp_path, model={"path": path, "scratch": None}))
    for _ in range(2):
        pin = ModelPin(tmp_path, config.model.path)
        pin.read(
            asyncio.run(
                make_model_folder(config, tmp_path, run_module, commit=pin.revision)
            )
        )
        pin.write()
    assert asked == [given, given or "commit1"]
    assert pin.revision == asked[1]
    assert hub_ids == {"some/model"}
    assert ModelPin(tmp_path, "some/model@v2").revision is None, (
        "it is fetched, and its files are compared"
    )


# ---- a model from nothing


def test_tool_role_is_one_more_token(tmp_path: Path) -> None:
    tokenizer = make_character_tokenizer(TINY_CHARACTERS, has_tool_role=True)
    assert len(tokenizer) == len(make_character_tokenizer(TINY_CHARACTERS)) + 1
    tokenizer.save_pretrained(tmp_path)
    chats = HFChatTokenizer(tmp_path)
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1}'},
    }
    text = chats.render(
        [
            {"role": "user", "content": "1+2"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": "c1"},
        ]
    )
    assert (
        text
        == "<|user|>1+2<|im_end|><|assistant|><|im_end|><|tool|>3<|im_end|><|assistant|>"
    )
    assert len(chats.encode(text)) == 7 + 4, "one token a character, one a mark"


# ---- loading


@pytest.mark.parametrize(
    ("architecture", "values"),
    [
        ({}, {}),
        ({"tie_word_embeddings": False, "attention_bias": True}, {"dtype": "bfloat16"}),
        ({}, {"trainer": {"lora": {"rank": 2}}, "dtype": "bfloat16"}),
        *((kind, {}) for kind in STACKED),
    ],
)
def test_shards_are_the_stored_weights(
    tmp_path: Path, architecture: dict[str, Any] | str, values: dict[str, Any]
) -> None:
    if isinstance(architecture, str):
        folder = make_tiny_moe(
            tmp_path / "model", architecture, **STACKED[architecture]
        )
    else:
        folder = make_tiny_model(tmp_path / "model", **architecture)
    with mesh_of_one(tmp_path) as ranks:
        made = TrainedModel(
            make_spec(folder, tmp_path, **values), ranks, needs_reference=True
        )
    model = made.policy.model
    found = {
        name.replace(".base_layer.", "."): one for name, one in model.named_parameters()
    }
    dtype = torch.float32 if made.adapters is None else torch.bfloat16
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    wanted = dict(expected.named_parameters())
    assert {name for name in found if ".lora_" not in name} == wanted.keys()
    for name, tensor in wanted.items():
        assert isinstance(found[name], DTensor)
        assert torch.equal(found[name].to_local(), tensor), name
    buffers = dict(model.named_buffers())
    assert all(
        torch.equal(buffers[name], one) for name, one in expected.named_buffers()
    )
    is_tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert is_tied is model.config.tie_word_embeddings


UP = "model.layers.1.mlp.up_proj.weight"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: {UP: None}, rf"1 lack \['{UP}'\]"),
        (lambda found: {UP.replace("1", "2"): torch.zeros(3)}, "1 are not used"),
        (lambda found: {EXPERT: None}, "1 lack|cannot load the model"),
    ],
)
def test_wrong_tensor_of_a_model_is_named(
    tmp_path: Path, change: Any, words: str
) -> None:
    folder = (make_tiny_moe if "cannot" in words else make_tiny_model)(
        tmp_path / "model"
    )
    found = load_file(folder / "model.safetensors")
    tensors = {
        name: one for name, one in {**found, **change(found)}.items() if one is not None
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=words):
        load_model(make_spec(folder, tmp_path), torch.float32)
