"""What an embedded engine refuses before it serves: with what failed, the numbers, and the way out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from engine_in_process import make_qwen3, make_request, make_spec
from engine_processes import engine_process
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from asyncrl.http import Refused
from asyncrl.messages.base import ErrorBody, find_fatal
from asyncrl_servers.embedded.build_engine import build_engine, check_same_model
from asyncrl_servers.embedded.kv_attention import CacheShape
from asyncrl_servers.embedded.kv_memory import EmbeddedSpec, check_memory
from asyncrl_servers.embedded.runner import MODEL_TYPES

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def refusal_of(spec: EmbeddedSpec, capfd: pytest.CaptureFixture[str]) -> ErrorBody:
    with pytest.raises(SystemExit) as end:
        build_engine(spec)
    assert end.value.code == 1
    fatal = find_fatal(capfd.readouterr().err)
    assert fatal is not None
    assert fatal.way_out
    return fatal


def test_a_missing_model_ends_the_server_and_the_message_names_the_folder(tmp_path: Path) -> None:
    spec = make_spec(tmp_path / "no model here")
    with engine_process("embedded", spec.model_dump(), tmp_path / "server") as child:
        assert child.process.wait(timeout=60) == 1
        fatal = find_fatal(child.read_log())
    assert fatal is not None
    assert "no model here" in fatal.error
    assert "model.path" in fatal.way_out


def test_a_folder_whose_weights_are_damaged_or_lack_a_parameter_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_qwen3(tmp_path / "model", num_hidden_layers=1)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.norm.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    assert "model.norm.weight" in refusal_of(make_spec(folder), capfd).error
    weights.write_bytes(weights.read_bytes()[:2000])
    assert "cannot load the model" in refusal_of(make_spec(folder), capfd).error


def test_slots_that_cannot_fit_are_refused_with_the_numbers_and_the_setting_that_fits(
    capfd: pytest.CaptureFixture[str],
) -> None:
    spec = make_spec(Path("model"), slots=10_000, max_length=2048)
    sizes = {"slot_bytes": 2**20, "vocab_size": 1000, "staged_bytes": 2**28}
    with pytest.raises(SystemExit):
        check_memory(spec, **sizes, free=2**30)
    fatal = find_fatal(capfd.readouterr().err)
    assert fatal is not None
    assert "10000 slots of 2048 tokens need" in fatal.error
    assert "1.00 GiB are free" in fatal.error
    fitting = int(fatal.way_out.split("rollout.slots=")[1].split()[0])
    check_memory(spec.model_copy(update={"slots": fitting}), **sizes, free=2**30)
    with pytest.raises(SystemExit):
        check_memory(spec.model_copy(update={"slots": fitting + 1}), **sizes, free=2**30)


def test_a_length_beyond_the_models_positions_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_qwen3(tmp_path / "model", num_hidden_layers=1, max_position_embeddings=128)
    fatal = refusal_of(make_spec(folder, max_length=129), capfd)
    assert "129" in fatal.error
    assert "128" in fatal.error


def test_a_sliding_window_shorter_than_a_slot_is_refused_and_a_longer_one_is_served(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = MistralConfig(**SIZES, sliding_window=64, max_position_embeddings=512, eos_token_id=None)
    MistralForCausalLM(config).save_pretrained(tmp_path / "model")
    assert "sliding window of 64" in refusal_of(make_spec(tmp_path / "model", max_length=65), capfd).error
    build_engine(make_spec(tmp_path / "model", max_length=64))


def test_a_model_without_plain_attention_layers_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = {**SIZES, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    config = GptOssConfig(**sizes, sliding_window=512, eos_token_id=None, pad_token_id=0)
    GptOssForCausalLM(config).save_pretrained(tmp_path / "model")
    assert "s_aux" in refusal_of(make_spec(tmp_path / "model"), capfd).error


@pytest.mark.parametrize("kind", ["llama", "qwen2", "granite", "olmo2", "gemma"])
def test_other_common_models_are_served_and_pass_the_checks_at_start(tmp_path: Path, kind: str) -> None:
    sizes = {**SIZES, "hidden_size": 48, "num_attention_heads": 6, "head_dim": 8}
    config = AutoConfig.for_model(kind, **sizes, max_position_embeddings=512, eos_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    engine = build_engine(make_spec(tmp_path / "model", slots=20))
    build_engine(make_spec(tmp_path / "model", dtype="bfloat16", deterministic=False))
    assert engine.runner.loaded.shape == CacheShape(num_layers=2, kv_heads=2, head_dim=8)
    assert (engine.runner._plain is not None) == (kind in MODEL_TYPES)


def test_the_check_at_start_finds_a_model_whose_answers_the_slot_cache_does_not_reproduce(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = build_engine(make_spec(make_qwen3(tmp_path / "model", num_hidden_layers=1)))
    engine.runner.loaded.reference_logits = engine.runner.loaded.reference_logits.roll(1, dims=0)
    with pytest.raises(SystemExit):
        check_same_model(engine.runner, "engine-0")
    assert "differ from" in capfd.readouterr().err


def test_stop_strings_need_a_tokenizer(tmp_path: Path, tiny_model_dir: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    engine = build_engine(make_spec(folder))
    with pytest.raises(Refused, match="no tokenizer"):
        engine.submit(make_request(stop=["a"]))
