"""Loads a Hugging Face causal model and makes sure that the slot cache reproduces it. Knows no request."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from asyncrl.http import fail
from asyncrl_servers.embedded.kv_attention import (
    NAME,
    CacheShape,
    ProbePass,
    UnsupportedAttentionError,
    in_force,
    owned,
)
from asyncrl_servers.embedded.kv_memory import EmbeddedSpec, check_load

WAY_OUT_UNSUPPORTED = (
    "use a decoder-only model with plain causal attention (Llama, Qwen2, Qwen3, Mistral "
    "without a window, SmolLM2, ...)."
)


@dataclass(slots=True)
class LoadedModel:
    """A model ready to be run over slots."""

    model: Any
    tokenizer: Any | None
    shape: CacheShape
    num_heads: int
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    eos_ids: frozenset[int]
    spare_rows: int
    """Rows of padding that an exact call needs at its end. Elementwise kernels compute what is left over
    behind their last whole vector pair (32 floats) by another formula (measured for silu and gelu); an odd
    width leaves something over."""
    reference_logits: Tensor
    """Logits of the model's own attention for `probe_ids`, float32."""
    probe_ids: list[int]


def load_model(spec: EmbeddedSpec) -> LoadedModel:
    """Load and probe; ends the process with the reason and the way out if the model is missing or of an
    unsupported kind.
    """
    path = Path(spec.model_path)
    if not (path / "config.json").is_file():
        fail(
            f"{spec.name}: no model in {path}",
            rule="an engine server reads a Hugging Face folder with config.json and weights",
            way_out="check model.path: an existing folder, or a hub id that was downloaded into one.",
        )
    device = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if spec.device == "auto" else spec.device
    )
    if device.type == "cuda" and not torch.cuda.is_available():
        fail(
            f"{spec.name}: device=cuda, but torch {torch.__version__} sees no CUDA device",
            way_out="set placement.rollout=cpu, or auto.",
        )
    name = ("bfloat16" if device.type == "cuda" else "float32") if spec.dtype == "auto" else spec.dtype
    dtype: torch.dtype = getattr(torch, name)
    check_load(spec, path, device)
    try:
        model, loading = _read_model(path, dtype)
    except READ_ERRORS as error:
        fail(
            f"{spec.name}: cannot load the model in {path}: {error}",
            way_out="check the folder, and that transformers knows the model type.",
        )
    if missing := sorted(loading["missing_keys"]):
        fail(
            f"{spec.name}: the weights in {path} lack {len(missing)} parameters: {missing[:3]}",
            rule="a parameter without weights would be served with random ones",
            way_out="save the model again with save_pretrained.",
        )
    model = model.to(device).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = owned(parameter.data)
    _check_length(spec, model)
    vocab_size = model.get_input_embeddings().num_embeddings
    probe_ids = [(7 * i + 3) % vocab_size for i in range(min(24, spec.max_length))]
    try:
        with torch.inference_mode():
            reference = _probe_logits(model, probe_ids, device)
            shape = _probe_shape(model, spec.max_length, device)
    except UnsupportedAttentionError as error:
        fail(
            f"{spec.name}: the model in {path} ({type(model).__name__}) is not supported: {error}",
            way_out=WAY_OUT_UNSUPPORTED,
        )
    tokenizer = _load_tokenizer(path)
    return LoadedModel(
        model,
        tokenizer,
        shape,
        model.config.num_attention_heads,
        dtype,
        device,
        vocab_size,
        _eos_ids(model, tokenizer),
        _spare_rows(model),
        reference,
        probe_ids,
    )


READ_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError)


def _read_model(path: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    return cast(
        "tuple[Any, dict[str, Any]]",
        AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="eager", local_files_only=True, output_loading_info=True
        ),
    )


def read_parameters(path: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """The parameters of the model in a folder, tied ones once, as load_model reads them. Raises one of
    READ_ERRORS.
    """
    model, _ = _read_model(path, dtype)
    return {
        name: owned(parameter.data)
        for name, parameter in model.to(device).requires_grad_(False).named_parameters()
    }


def _check_length(spec: EmbeddedSpec, model: Any) -> None:
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and spec.max_length > positions:
        fail(
            f"{spec.name}: prompt plus completion may take {spec.max_length} tokens, the model knows "
            f"{positions} positions",
            rule="rollout.max_prompt_tokens + rollout.max_tokens must fit the model's "
            "max_position_embeddings",
            way_out=f"lower rollout.max_tokens or rollout.max_prompt_tokens so that both add up to "
            f"{positions} or less.",
        )
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        fail(
            f"{spec.name}: {type(model).__name__}.forward takes no logits_to_keep",
            way_out=WAY_OUT_UNSUPPORTED,
        )


def _probe_logits(model: Any, ids: list[int], device: torch.device) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0].float()
    return logits


def _probe_shape(model: Any, max_length: int, device: torch.device) -> CacheShape:
    """Switch the model to our attention and see what each layer asks for."""
    model.set_attn_implementation(NAME)
    probe = ProbePass()
    ids = torch.zeros(4, 1, dtype=torch.long, device=device)
    with in_force(probe, max_length):
        model(input_ids=ids, position_ids=torch.arange(4, device=device)[:, None], use_cache=False)
    num_layers = model.config.num_hidden_layers
    if sorted(probe.shapes) != list(range(num_layers)):
        raise UnsupportedAttentionError(
            f"only layers {sorted(probe.shapes)} of {num_layers} use plain attention"
        )
    if len(set(probe.shapes.values())) != 1:
        raise UnsupportedAttentionError(
            f"layers differ in (kv_heads, head_dim): {sorted(set(probe.shapes.values()))}"
        )
    kv_heads, head_dim = probe.shapes[0]
    return CacheShape(num_layers, kv_heads, head_dim)


def _spare_rows(model: Any) -> int:
    widths = {module.out_features for module in model.modules() if isinstance(module, nn.Linear)}
    return 1 if any(width % 2 for width in widths) else 0


def _load_tokenizer(path: Path) -> Any | None:
    if not ((path / "tokenizer.json").is_file() or (path / "tokenizer_config.json").is_file()):
        return None
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def _eos_ids(model: Any, tokenizer: Any | None) -> frozenset[int]:
    """Every end-of-sequence id that the generation config, the config or the tokenizer names."""
    generation = model.generation_config or GenerationConfig()
    found: set[int] = set()
    for value in (
        generation.eos_token_id,
        getattr(model.config, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ):
        if value is not None:
            found.update(value if isinstance(value, list | tuple) else [int(value)])
    return frozenset(found)
