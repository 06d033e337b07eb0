"""Exports that another reader understands, whose digest is that of what lies in the file."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_model import make_tiny_model
from trainer_cases import make_batch, make_spec
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.trainer.step import TrainStep
from asyncrl.weights.export import digest_of, export_weights, in_export_dtype, named_weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_holds_every_weight_once_by_the_models_names_and_its_digest_is_the_files(
    tiny_model_dir: Path, tmp_path: Path, dtype: str
) -> None:
    step = TrainStep(make_spec(tiny_model_dir, tmp_path, dtype=dtype))
    step.train(*make_batch())
    answer = step.export(tmp_path / "v1.safetensors")
    loaded = load_file(answer.path)
    assert set(loaded) == {name for name, _ in step.policy.model.named_parameters()}
    assert "lm_head.weight" not in loaded, "tied to the embedding, which is there"
    for name, parameter in step.policy.model.named_parameters():
        assert torch.equal(loaded[name], parameter.detach().to(getattr(torch, dtype)))
    assert answer.digest == digest_of(loaded)
    assert (answer.version, answer.num_tensors) == (1, len(loaded))
    assert answer.num_bytes == sum(tensor.nbytes for tensor in loaded.values())
    assert [path.name for path in tmp_path.glob("*safetensors*")] == ["v1.safetensors"]


def test_a_persistent_buffer_is_exported_and_a_passing_one_is_not(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False), torch.nn.BatchNorm1d(2))
    model.register_buffer("passing", torch.ones(2), persistent=False)
    weights = in_export_dtype(named_weights(model), torch.bfloat16)
    answer = export_weights(weights, tmp_path / "w.safetensors", 0)
    loaded = load_file(answer.path)
    assert set(loaded) == {
        "0.weight",
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    assert loaded["1.num_batches_tracked"].dtype == torch.int64, (
        "only floating point weights change their dtype"
    )
    assert answer.digest == digest_of(loaded)
    with safe_open(answer.path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_an_export_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "v0.safetensors").mkdir()
    with pytest.raises(OSError, match="v0"):
        export_weights({"w": torch.zeros(4)}, tmp_path / "v0.safetensors", 0)
    assert [path.name for path in tmp_path.iterdir()] == ["v0.safetensors"]


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
def test_a_saved_folder_opens_with_the_auto_classes_and_has_the_trained_weights(
    tmp_path: Path, tie_word_embeddings: bool
) -> None:
    folder = make_tiny_model(tmp_path / "model", tie_word_embeddings=tie_word_embeddings)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0]['content'] }}", encoding="utf-8")
    step = TrainStep(make_spec(folder, tmp_path, dtype="bfloat16", chat_template=str(template)))
    step.train(*make_batch())
    step.save(tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert model.dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, step.policy.model.get_parameter(name).to(torch.bfloat16))
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == template.read_text()
    assert not list(tmp_path.glob(".saved*"))


@pytest.mark.parametrize("merged", [True, False])
def test_weights_that_were_saved_before_go_once_the_new_ones_are_whole(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merged: bool
) -> None:
    step = TrainStep(make_spec(tiny_model_dir, tmp_path, trainer={"lora": {"rank": 4}}))
    folder = tmp_path / "saved"

    def content() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    step.save(folder, merged=merged)
    before = content()
    step.train(*make_batch())

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:  # in the middle: some files of the new folder are there
        patch.setattr("asyncrl.trainer.step.load_tokenizer", lambda _: SimpleNamespace(save_pretrained=full))
        patch.setattr("asyncrl.trainer.model.lora.save_file", full)
        with pytest.raises(OSError, match="No space left"):
            step.save(folder, merged=merged)
    assert content() == before
    assert not list(tmp_path.glob(".saved*"))
    step.save(folder, merged=merged)
    assert content().keys() == before.keys()
    assert content() != before
