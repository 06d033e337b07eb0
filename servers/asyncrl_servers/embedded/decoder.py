"""Loads a Hugging Face causal model and finds out what the slot cache needs of it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.http import fail
from asyncrl_servers.embedded.kv_attention import (
    NAME,
    CacheShape,
    ProbePass,
    UnsupportedAttentionError,
    in_force,
)
from asyncrl_servers.embedded.kv_memory import EmbeddedSpec

READ_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError)


@dataclass(slots=True)
class LoadedModel:
    """A model ready to be run over slots."""

    model: Any
    tokenizer: Any | None
    shape: CacheShape
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
        rule = "an engine server reads a Hugging Face folder with config.json and weights"
        fail(f"{spec.name}: no model in {path}", rule=rule, way_out="check model.path.")
    has_cuda = torch.cuda.is_available()
    if spec.device == "cuda" and not has_cuda:
        what = f"{spec.name}: device=cuda, but torch {torch.__version__} sees no CUDA device"
        fail(what, way_out="set placement.rollout=cpu, or auto.")
    device = torch.device(("cuda" if has_cuda else "cpu") if spec.device == "auto" else spec.device)
    name = ("bfloat16" if device.type == "cuda" else "float32") if spec.dtype == "auto" else spec.dtype
    dtype: torch.dtype = getattr(torch, name)
    try:
        model, loading = _read_model(path, dtype)
    except READ_ERRORS as error:
        way_out = "check the folder, and that transformers knows the model type."
        fail(f"{spec.name}: cannot load the model in {path}: {error}", way_out=way_out)
    if missing := sorted(loading["missing_keys"]):
        fail(
            f"{spec.name}: the weights in {path} lack {len(missing)} parameters: {missing[:3]}",
            rule="a parameter without weights would be served with random ones",
            way_out="save the model again with save_pretrained.",
        )
    model = model.to(device).eval().requires_grad_(False)
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and spec.max_length > positions:
        fail(
            f"{spec.name}: prompt plus completion may take {spec.max_length} tokens, the model knows "
            f"{positions} positions",
            rule="rollout.max_prompt_tokens + rollout.max_tokens must fit max_position_embeddings",
            way_out=f"lower them, so that both add up to {positions} or less.",
        )
    vocab_size = model.get_input_embeddings().num_embeddings
    probe_ids = [(7 * i + 3) % vocab_size for i in range(min(24, spec.max_length))]
    try:
        with torch.inference_mode():
            ids = torch.tensor([probe_ids], device=device)
            reference = model(input_ids=ids, use_cache=False).logits[0].float()
            shape = _probe_shape(model, spec.max_length, device)
    except UnsupportedAttentionError as error:
        fail(
            f"{spec.name}: the model in {path} ({type(model).__name__}) is not supported: {error}",
            way_out="use a decoder-only model with plain causal attention (Llama, Qwen2, Qwen3, Mistral "
            "without a window, SmolLM2, ...).",
        )
    has_tokenizer = (path / "tokenizer.json").is_file() or (path / "tokenizer_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True) if has_tokenizer else None
    return LoadedModel(
        model,
        tokenizer,
        shape,
        dtype,
        device,
        vocab_size,
        _eos_ids(model, tokenizer),
        int(any(one.out_features % 2 for one in model.modules() if isinstance(one, nn.Linear))),
        reference,
        probe_ids,
    )


def _read_model(path: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    model, loading = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", local_files_only=True, output_loading_info=True
    )
    return model, loading


def read_parameters(path: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """The parameters of the model in a folder, tied ones once, as load_model reads them. Raises one of
    READ_ERRORS.
    """
    model, _ = _read_model(path, dtype)
    return {name: parameter.data for name, parameter in model.to(device).named_parameters()}


def _probe_shape(model: Any, max_length: int, device: torch.device) -> CacheShape:
    """Switch the model to our attention and record what each layer needs."""
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UnsupportedAttentionError("its forward takes no logits_to_keep")
    model.set_attn_implementation(NAME)
    probe = ProbePass()
    ids = torch.zeros(4, 1, dtype=torch.long, device=device)
    with in_force(probe, max_length):
        model(input_ids=ids, position_ids=torch.arange(4, device=device)[:, None], use_cache=False)
    num_layers, shapes = model.config.num_hidden_layers, set(probe.shapes.values())
    if sorted(probe.shapes) != list(range(num_layers)):
        what = f"only layers {sorted(probe.shapes)} of {num_layers} use plain attention"
        raise UnsupportedAttentionError(what)
    if len(shapes) != 1:
        raise UnsupportedAttentionError(f"layers differ in (kv_heads, head_dim): {sorted(shapes)}")
    return CacheShape(num_layers, *shapes.pop())


def _eos_ids(model: Any, tokenizer: Any | None) -> frozenset[int]:
    """Every end-of-sequence id that the generation config, the config or the tokenizer names."""
    found: set[int] = set()
    for source in (model.generation_config, model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update(value if isinstance(value, list | tuple) else [int(value)])
    return frozenset(found)
