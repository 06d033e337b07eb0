"""The config of a model folder against its weights: ties, text parts, quantised
weights, tokenizers.
"""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from costly_cases import slow
from engine_in_process import make_spec as engine_spec
from engine_in_process import publish, running_engine
from job_runs import write_config
from made_runs import MadeRun
from model_zoo import make_config, random_model
from safetensors.torch import load_file, save_file
from tiny_model import make_tiny_model, make_tiny_moe
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from trainer_cases import make_spec, mesh_of_one, train_versions
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)
from weight_cases import prepare_request

from asyncrl.base.errors import ConfigError
from asyncrl.config import load_config
from asyncrl.models.loading import check_quantization, load_language_model
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.trainer.loss.packing import pack_texts
from asyncrl.trainer.model.build_model import load_model
from asyncrl.trainer.model.model_folder import TOKENIZER, check_plain
from asyncrl.trainer.model.policy import ForwardPlan, Policy
from asyncrl.trainer.ranks.rank import TrainerRank
from asyncrl.trainer.ranks.state import copy_files
from asyncrl.weights.export import whole_tensors
from asyncrl.weights.tensor_files import adapted_modules
from asyncrl_servers.embedded.decoder import LoadedModel

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
IDS = torch.arange(6, 26)[None]


def change_weights(folder: Path, **changes: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **changes}, path, metadata={"format": "pt"})


def change_config(folder: Path, **changes: Any) -> dict[str, Any]:
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(config))
    return config


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


def own_head(folder: Path) -> Path:
    """A folder whose config.json declares a tie, with another head in its file."""
    make_tiny_model(folder, tie_word_embeddings=True)
    random = torch.Generator().manual_seed(1)
    change_weights(folder, **{HEAD: 0.3 * torch.randn(52, 32, generator=random)})
    return folder


# ---- ties


@pytest.mark.parametrize("is_sharded", [False, True])
def test_head_of_the_file_is_trained_pushed_and_written(
    tmp_path: Path, is_sharded: bool
) -> None:
    folder = own_head(tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    with mesh_of_one(tmp_path) if is_sharded else nullcontext() as ranks:
        step = TrainerRank(make_spec(folder, tmp_path), *([ranks] if ranks else []))
        pushed = dict(whole_tensors(step.exports.pushed()))
        assert torch.equal(pushed[HEAD], stored[HEAD])
        assert torch.equal(pushed[EMBEDDING], stored[EMBEDDING])
        made = MadeRun(tmp_path, folder)
        train_versions(step, 0, 2)
        made.checkpoint(step)
        made.end(step)
        exported = made.export(tmp_path / "out", step="2")
    for written in (made.path / "final", exported):
        tensors = load_file(written / "model.safetensors")
        assert (
            json.loads((written / "config.json").read_text())["tie_word_embeddings"]
            is False
        )
        assert tensors.keys() == stored.keys()
        assert not torch.equal(tensors[HEAD], stored[HEAD])
        assert not torch.equal(tensors[HEAD], tensors[EMBEDDING])
    assert (
        pushed.keys()
        == dict(LoadedModel(engine_spec(folder)).model.named_parameters()).keys()
    )


def test_equal_head_of_a_declared_tie_is_written_once(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", tie_word_embeddings=True)
    change_weights(
        folder, **{HEAD: load_file(folder / "model.safetensors")[EMBEDDING].clone()}
    )
    step = TrainerRank(make_spec(folder, tmp_path))
    step.save(tmp_path / "final")
    assert HEAD not in load_file(tmp_path / "final" / "model.safetensors")
    assert (
        json.loads((tmp_path / "final" / "config.json").read_text())[
            "tie_word_embeddings"
        ]
        is True
    )


def test_stored_mamba_weights_are_not_scaled_by_a_load(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    random_model(make_config("mamba rescaled")).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    step = TrainerRank(make_spec(folder, tmp_path))
    pushed = dict(whole_tensors(step.exports.pushed()))
    assert all(torch.equal(stored[name], tensor) for name, tensor in pushed.items())
    step.save(tmp_path / "final")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert all(torch.equal(stored[name], one) for name, one in plain.named_parameters())


def test_transformers_4_reads_the_rotary_base_of_a_written_folder(
    tmp_path: Path,
) -> None:
    folder = make_tiny_model(tmp_path / "model", rope_theta=1e6)
    step = TrainerRank(make_spec(folder, tmp_path))
    step.save(tmp_path / "final")
    config = json.loads((tmp_path / "final" / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]) == (1e6, None)
    assert torch.equal(
        logits(load_language_model(tmp_path / "final")),
        logits(load_language_model(folder)),
    )


# ---- text parts of larger models

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
}
TEXT |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
TEXT |= {"sliding_window": 16, "pad_token_id": 0}
EYES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "image_size": 28,
}
EYES |= {
    "num_attention_heads": 2,
    "patch_size": 14,
    "num_heads": 2,
    "depth": 1,
    "out_hidden_size": 32,
}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
}
DELTA |= {"linear_value_head_dim": 8}
GEMMA4: dict[str, Any] = {
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
}
SCOUT: dict[str, Any] = {
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
LARGER: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": (TEXT | DELTA, EYES | {"num_position_embeddings": 16}, {}),
    "gemma3": (TEXT, EYES, {"mm_tokens_per_image": 4}),
    "gemma4": (
        TEXT | GEMMA4 | {"vocab_size_per_layer_input": 64},
        EYES | {"head_dim": 8},
        {},
    ),
    "mistral3": (
        TEXT | {"model_type": "mistral"},
        EYES | {"model_type": "pixtral"},
        {},
    ),
    "llama4": (
        TEXT | {"num_local_experts": 2},
        EYES | SCOUT | {"pixel_shuffle_ratio": 0.5},
        {},
    ),
}


def make_larger(folder: Path, kind: str) -> Any:
    make_tiny_model(folder)
    text, eyes, more = LARGER[kind]
    config = AutoConfig.for_model(kind, text_config=text, vision_config=eyes, **more)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    return model


SLOW = [slow(kind) for kind in ("gemma3", "mistral3", "gemma4", "llama4")]
"""Kinds of models, each with its own names; the last two take the longest to make."""


@pytest.mark.parametrize("kind", ["qwen3_5", *SLOW])
def test_text_part_is_trained_under_the_names_of_its_folder(
    tmp_path: Path, kind: str
) -> None:
    whole = make_larger(tmp_path / "model", kind)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    with mesh_of_one(tmp_path) as ranks:
        step = TrainerRank(make_spec(tmp_path / "model", tmp_path), ranks)
        pushed = dict(whole_tensors(step.exports.pushed()))
        assert all(torch.equal(stored[name], tensor) for name, tensor in pushed.items())
        train_versions(step, 0, 1)
        step.save(tmp_path / "final")
    written = load_file(tmp_path / "final" / "model.safetensors")
    assert written.keys() == stored.keys()
    changed = {
        name
        for name, tensor in written.items()
        if not torch.equal(stored[name], tensor)
    }
    assert changed
    assert changed <= pushed.keys()
    again, info = type(whole).from_pretrained(
        tmp_path / "final", output_loading_info=True
    )
    assert not any(info.values())
    text = load_language_model(tmp_path / "final")
    assert all(
        torch.equal(written[name], one)
        for name, one in again.state_dict().items()
        if name in written
    )
    if kind != "llama4":  # transformers' own whole class fails without an image
        assert torch.equal(logits(again), logits(text))


# peft 0.21 asks transformers 5.23 by an old name
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("kind", ["qwen3_5", *SLOW[:3]])
def test_adapters_of_a_text_part_have_its_folders_names(
    tmp_path: Path, kind: str
) -> None:
    import peft  # costs seconds

    folder, lora = tmp_path / "model", {"lora": {"rank": 2, "alpha": 16.0}}
    whole = make_larger(folder, kind)
    stored = load_file(folder / "model.safetensors")
    with mesh_of_one(tmp_path) as ranks:
        step = TrainerRank(make_spec(folder, tmp_path, trainer=lora), ranks)
        made = MadeRun(tmp_path, folder, trainer=lora)
        train_versions(step, 0, 2)
        made.checkpoint(step)
        pushed = step.begin_export(tmp_path / "adapters.safetensors")()
        expected = {
            name: tensor.clone() for name, tensor in step.exports.pushed().items()
        }
    names = {f"{module}.weight" for module in adapted_modules(load_file(pushed.path))}
    assert names
    assert names <= stored.keys()
    if kind in ("gemma3", "mistral3"):
        adapters = {"rank": 2, "scale": 8.0}
        with running_engine(folder, dtype="float32", adapters=adapters) as engine:
            publish(engine, prepare_request(pushed))
            assert all(
                torch.equal(expected[name], one)
                for name, one in engine.weights._parameters.items()
            )
    merged = logits(
        AutoModelForImageTextToText.from_pretrained(made.export(tmp_path / "merged"))
    )
    adapter = made.export(tmp_path / "adapter", adapter=True)
    with_peft = peft.PeftModel.from_pretrained(
        type(whole).from_pretrained(folder), str(adapter)
    )
    assert (logits(with_peft) - merged).abs().max() <= 1e-5 * merged.abs().max()
    assert (merged - logits(whole)).abs().max() > 1e-3


# ---- quantised weights

BLOCK = 8


def quantise(folder: Path) -> dict[str, torch.Tensor]:
    """Store projections as fp8 with scales of blocks, and return their values."""
    plain = load_file(folder / "model.safetensors")
    stored = dict(plain)
    for name, tensor in plain.items():
        if name.endswith("_proj.weight"):
            rows, columns = (size // BLOCK for size in tensor.shape)
            blocks = tensor.reshape(rows, BLOCK, columns, BLOCK)
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            packed = (blocks / scale).to(torch.float8_e4m3fn)
            stored[name] = packed.reshape(tensor.shape)
            stored[f"{name}_scale_inv"] = scale[:, 0, :, 0].clone()
            plain[name] = (packed.float() * scale).reshape(tensor.shape)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    described = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    change_config(folder, quantization_config=described)
    return plain


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "gemma3"])
def test_fp8_weights_are_trained_and_written_as_plain_ones(
    tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "model"
    if kind == "gemma3":
        make_larger(folder, kind)
    else:
        (make_tiny_model if kind == "qwen3" else make_tiny_moe)(folder)
    plain = quantise(folder)
    step = TrainerRank(make_spec(folder, tmp_path))
    step.save(tmp_path / "final")
    written = load_file(tmp_path / "final" / "model.safetensors")
    assert written.keys() == {
        name for name in plain if not name.startswith("vision_tower.")
    }
    assert all(torch.equal(plain[name], tensor) for name, tensor in written.items())
    assert "quantization_config" not in json.loads(
        (tmp_path / "final" / "config.json").read_text()
    )
    # Engine and trainer dequantise alike.
    engine = load_language_model(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    assert torch.equal(engine.lm_head.weight, step.policy.model.lm_head.weight)


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4 = torch.cat((FP4, -FP4))
"""Values of four bits, by the OCP specification of microscaling formats."""
FP4_BLOCK = 32


def quantise_experts(folder: Path) -> dict[str, torch.Tensor]:
    """Store random experts as mxfp4, and return their values."""
    plain = load_file(folder / "model.safetensors")
    stored = dict(plain)
    random = torch.Generator().manual_seed(2)
    for name in [name for name in plain if re.search(r"experts\.\w+_proj$", name)]:
        num_experts, num_in, num_out = plain[name].shape
        shape = (num_experts, num_out, num_in // FP4_BLOCK)
        codes = torch.randint(0, 16, (*shape, FP4_BLOCK), generator=random)
        scales = torch.randint(122, 126, shape, generator=random)
        # the first value of a pair is in the lower bits
        packed = codes[..., ::2] | codes[..., 1::2] << 4
        stored[f"{name}_blocks"] = packed.to(torch.uint8)
        stored[f"{name}_scales"] = scales.to(torch.uint8)
        del stored[name]
        values = FP4[codes] * torch.exp2(scales - 127.0)[..., None]
        plain[name] = values.flatten(2).transpose(1, 2).contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    described = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    change_config(folder, quantization_config=described)
    return plain


def test_mxfp4_experts_are_trained_and_written_as_plain_ones(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    config = make_config("gpt_oss")
    config.intermediate_size = FP4_BLOCK
    random_model(config).save_pretrained(folder)
    plain = quantise_experts(folder)
    step = TrainerRank(make_spec(folder, tmp_path))
    step.save(tmp_path / "final")
    written = load_file(tmp_path / "final" / "model.safetensors")
    assert written.keys() == plain.keys()
    assert all(torch.equal(plain[name], tensor) for name, tensor in written.items())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    of_engine = load_language_model(folder, dtype=torch.float32)
    assert torch.equal(logits(again), logits(of_engine))
    train_versions(step, 0, 1)
    step.save(tmp_path / "trained")
    trained = load_file(tmp_path / "trained" / "model.safetensors")
    assert not any(
        torch.equal(plain[name], trained[name]) for name in plain if "experts" in name
    )


@pytest.mark.parametrize(
    "method",
    ["bitsandbytes", "gptq", "awq", "compressed-tensors", "torchao", "modelopt"],
)
def test_other_quantisations_are_refused_by_name(tmp_path: Path, method: str) -> None:
    folder = make_tiny_model(tmp_path / "model")
    architecture = change_config(folder, quantization_config={"quant_method": method})
    with pytest.raises(ConfigError, match=f"quant_method={method}"):
        load_model(make_spec(folder, tmp_path), None)
    with pytest.raises(ConfigError, match=f"quant_method={method}"):
        check_quantization({"text_config": architecture}, "owner/name")


@pytest.mark.extension("vllm")
def test_dequantised_folder_is_refused_where_vllm_keeps_it_packed(
    tmp_path: Path,
) -> None:
    architecture = {"quantization_config": {"quant_method": "mxfp4"}}
    values = {"model": {"path": "owner/name", "scratch": None}}
    check_plain(load_config(write_config(tmp_path, **values)), architecture)
    config = load_config(write_config(tmp_path, **values, rollout={"engine": "vllm"}))
    with pytest.raises(ConfigError, match=r"rollout\.engine=vllm"):
        check_plain(config, architecture)


def test_wrong_layer_types_are_a_config_error(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    change_config(folder, layer_types=["full_attention"] * 3)
    with pytest.raises(ConfigError, match="cannot load the model"):
        load_model(make_spec(folder, tmp_path), None)


# ---- tokenizers

TEXTS = (
    "12345678 and 3.14159",
    "naïve café, Straße",
    "日本語の文字",
    "  two  spaces\t\ttab\n\n\nlines  ",
    "<|begin|>hi<|end|>",
    "🙂👩‍👩‍👧 ok",
    "def f(x):\n    return x**2  # code",
    "I'm, you'RE, it's",
    "e\u0301",
    "",
)
CLASSES = sorted(
    name
    for name in dir(transformers)
    if name.endswith(("Tokenizer", "TokenizerFast"))
    and isinstance(kind := getattr(transformers, name), type)
    and issubclass(kind, PreTrainedTokenizerFast)
)


@pytest.fixture(scope="module")
def threes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that splits numbers by three, which no class of transformers does."""
    tokenizer = Tokenizer(models.BPE())
    numbers = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [numbers, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([*TEXTS, "123 456 789 def return"] * 9, trainer)
    folder = tmp_path_factory.mktemp("threes")
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>"
    )
    made.chat_template = "{{ messages }}"
    made.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", CLASSES)
def test_run_and_written_folders_split_texts_alike(
    threes: Path, tmp_path: Path, name: str
) -> None:
    base = Path(shutil.copytree(threes, tmp_path / "base"))
    path = base / "tokenizer_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name})
    )
    (tmp_path / "final").mkdir()
    copy_files(base, tmp_path / "final", None, TOKENIZER)
    assert {path.name for path in (tmp_path / "final").iterdir()} == {
        path.name for path in base.iterdir()
    }
    of_run = HFChatTokenizer(base)
    of_engine = PreTrainedTokenizerFast.from_pretrained(base)
    stored = Tokenizer.from_file(str(tmp_path / "final" / "tokenizer.json"))
    for text in TEXTS:
        ids = stored.encode(text, add_special_tokens=False).ids
        assert list(of_run.encode(text)) == ids
        assert of_engine.encode(text, add_special_tokens=False) == ids
        assert of_engine.decode(ids) == of_run.decode(ids, skip_special_tokens=False)


# ---- dropout

RANDOM = re.compile("drop|jitter")
DROPPING = (
    "qwen3",
    "gpt2",
    "opt",
    "mixtral",
    "falcon",
    "bloom",
    "gpt_neox",
    "persimmon",
    "biogpt",
    "xglm",
)


@pytest.mark.parametrize("name", DROPPING)
def test_nothing_is_dropped_in_checkpointed_layers(name: str) -> None:
    config = make_config(name)
    rates = {
        key
        for key, value in config.to_dict().items()
        if RANDOM.search(key) and isinstance(value, float)
    }
    assert rates
    for key in rates:
        setattr(config, key, 0.5)
    policy = Policy(random_model(config), ForwardPlan(False, False))
    micro = pack_texts([IDS[0].numpy()], torch.device("cpu"))

    def scored() -> tuple[torch.Tensor, list[torch.Tensor]]:
        logprob_M = policy(micro).logprob_M
        gradients = torch.autograd.grad(
            logprob_M.sum(), [*policy.parameters()], allow_unused=True
        )
        return logprob_M, [one for one in gradients if one is not None]

    plain = scored()
    policy.enable_gradient_checkpointing()
    checkpointed = scored()
    assert torch.equal(plain[0], checkpointed[0])
    assert all(map(torch.equal, plain[1], checkpointed[1]))
