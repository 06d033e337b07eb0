"""Load the language model of a Hugging Face folder: only its text part, and never in
quantised form.

A folder of a vision-language model (Gemma 3, Qwen3.5, Mistral 3) holds the text model
under a prefix:

    language_model.model.layers.0...    becomes model.layers.0..., and language_model.lm_head becomes lm_head
    model.language_model.layers.0...    becomes model.layers.0...; lm_head has no prefix

transformers reverts the renaming when names are written, so pushes and exports have the
folder's own names. The folder's other tensors (vision tower, MTP heads) are not loaded;
carried_over() returns them for exports.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from asyncrl.base.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.core_model_loading import WeightTransform

DEQUANTIZED = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
"""Quantisation methods that transformers undoes while it loads, with their settings."""
QUANTIZATION = "quantization_config"
RESCALE = "rescale_prenorm_residual"
"""With it, transformers divides Mamba's stored weights at each load by the root of the
number of layers.
"""
CONVERSIONS = "_weight_conversions"
"""transformers' attribute: how stored tensors were renamed and stacked, to be reverted
in exports.
"""
TEXT_PARTS = ("text_config", "llm_config", "thinker_config")
PREFIX = re.compile(
    r"(.*\b(?:language_model|text_model|thinker|llm)\.(?:.*\.)?)embed_tokens\.weight"
)


@contextmanager
def loading(source: str | Path, way_out: str = "") -> Iterator[None]:
    """Turn every error of transformers into a ConfigError: it raises almost any class
    for a wrong folder.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        first_lines = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"cannot load the model {source}: {type(error).__name__}: {first_lines}",
            rule="model.path is a Hugging Face folder or hub id of a causal language model",
            way_out=way_out
            or "correct model.path; a hub id needs the network or a filled cache.",
        ) from error


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return config.json. Raises OSError and ValueError."""
    config: dict[str, Any] = json.loads(
        (Path(folder) / "config.json").read_text(encoding="utf-8")
    )
    return config


def sections_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a config.json and its text part, which both describe the language model."""
    return [
        config,
        *(config[part] for part in TEXT_PARTS if isinstance(config.get(part), dict)),
    ]


def add_old_keys(config: dict[str, Any]) -> None:
    """Add to a config.json of transformers 5 what 4 reads by other names. Without them
    it would take its defaults, without a word.
    """
    for section in sections_of(config):
        rope = section.get("rope_parameters") or {}
        # Gemma 3 has a table for each kind of layer.
        if str(section.get("model_type")).startswith("gemma3"):
            local = rope.get("sliding_attention") or {}
            if "rope_theta" in local:
                section.setdefault("rope_local_base_freq", local["rope_theta"])
            rope = rope.get("full_attention") or rope
        if "rope_theta" in rope:
            section.setdefault("rope_theta", rope["rope_theta"])
            scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
            section.setdefault(
                "rope_scaling", None if rope.get("rope_type") == "default" else scaling
            )
        if "num_local_experts" in section:
            section.setdefault("num_experts", section["num_local_experts"])


def quantization_of(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the quantisation of a config.json; plain weights have None."""
    found = [
        section[QUANTIZATION]
        for section in sections_of(config)
        if section.get(QUANTIZATION)
    ]
    return found[0] if found else None


def check_quantization(config: dict[str, Any], source: str) -> None:
    """Raise ConfigError unless the weights are plain, or can be dequantised exactly."""
    quantization = quantization_of(config)
    if quantization is None:
        return
    method = quantization.get("quant_method", "bitsandbytes")
    if method not in DEQUANTIZED:
        raise ConfigError(
            f"{source} is quantised: its config.json has quant_method={method}",
            rule=f"the trainer needs plain weights, and dequantises only {' and '.join(DEQUANTIZED)}",
            way_out="give the unquantised model.",
        )


def text_config(folder: str | Path) -> PreTrainedConfig:
    """Return the transformers config of the folder's language model, without
    quantisation. Raises ConfigError, and transformers' errors.
    """
    from transformers import AutoConfig

    check_quantization(read_config(folder), str(folder))
    config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config(decoder=True)
    # transformers ties head and embedding by the whole model's config, vLLM by the text
    # part's. Folders have the entry in either.
    if text is not config:
        text.tie_word_embeddings = any(
            getattr(part, "tie_word_embeddings", False) for part in (text, config)
        )
    if hasattr(text, RESCALE):
        setattr(text, RESCALE, False)
    # Otherwise transformers would build quantised layers, which cannot be trained.
    # load_language_model adds the entry again to dequantise stored weights.
    if hasattr(text, QUANTIZATION):
        del text.quantization_config
    return text


def load_language_model(
    folder: str | Path, *, needs_head: bool = True, **options: object
) -> PreTrainedModel:
    """Load the text part of `folder`, dequantised, with from_pretrained's `options`.
    Raises ConfigError if tensors are missing, unused or still quantised, and
    transformers' errors. `needs_head` False: the caller replaces the head, which may be
    a reward model's.
    """
    import torch
    import transformers

    text = text_config(folder)
    if (quantization := quantization_of(read_config(folder))) is not None:
        settings = getattr(transformers, DEQUANTIZED[quantization["quant_method"]])
        text.quantization_config = quantization
        options = {**options, QUANTIZATION: settings(dequantize=True)}
    names = stored_files(folder)
    renamed = renamed_prefix(names)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        config=text,
        key_mapping=renamed,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **options,
    )
    # Mismatched sizes are among the missing: ignore_mismatched_sizes lets transformers
    # load on, so that the error below names all of them at once.
    missing = sorted(
        [*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])]
    )
    unexpected = sorted(set(info["unexpected_keys"]) - other_parts(names))
    if not needs_head:
        body = f"{model.base_model_prefix}."
        missing = [name for name in missing if name.startswith(body)]
        unexpected = [name for name in unexpected if name.startswith(body)]
    if missing or unexpected:
        raise ConfigError(
            f"the weights of {folder} are not those of its config.json: {len(missing)} lack {missing[:1]}, "
            f"{len(unexpected)} are not used {unexpected[:1]}",
            rule="transformers would fill missing tensors with random numbers, and ignore the others",
            way_out="complete the folder; model.scratch makes a model with random weights on purpose.",
        )
    if quantization is not None:
        # transformers 5.17 dequantises mxfp4 to bfloat16 in models of any dtype
        wanted = options.get("dtype")
        for parameter in model.parameters():
            if isinstance(wanted, torch.dtype) and parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.to(wanted)
        # transformers forgets all conversions with those of the quantisation
        setattr(model, CONVERSIONS, plain_conversions(model, renamed))
    model.config.tie_word_embeddings = is_tied(model)
    packed = [name for name, one in model.named_parameters() if not one.requires_grad]
    if quantization is not None and packed:
        what = f"transformers has not dequantised {len(packed)} tensors of {folder}, like {packed[0]}"
        raise ConfigError(what, way_out="give the unquantised model.")
    return model


def plain_conversions(
    model: PreTrainedModel, renamed: dict[str, str]
) -> list[WeightTransform]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    conversions = get_model_conversion_mapping(model, renamed, add_legacy=False)
    return [
        conversion
        for conversion in conversions
        if not isinstance(conversion, PrefixChange)
    ]


# ---- tied weights


def ties_of(model: nn.Module) -> dict[str, str]:
    """Return the names of parameters that are another one, and the first name of that
    one.
    """
    firsts = dict[int, str]()
    named = model.named_parameters(remove_duplicate=False)
    first_of = {
        name: firsts.setdefault(id(parameter), name) for name, parameter in named
    }
    return {name: first for name, first in first_of.items() if name != first}


def is_tied(model: PreTrainedModel) -> bool:
    """Return whether all weights are tied that config.json may declare as tied.
    transformers does not tie two stored weights that differ.
    """
    ties = ties_of(model)
    declared = model.get_expanded_tied_weights_keys(all_submodels=True)
    pairs = [
        (ties.get(name, name), ties.get(source, source))
        for name, source in declared.items()
    ]
    return bool(pairs) and all(first == other for first, other in pairs)


# ---- stored tensors


def stored_files(folder: str | Path) -> dict[str, Path]:
    """Return the file of each safetensors tensor that transformers reads, by the
    tensor's stored name.
    """
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    paths = [path for path in [folder / "model.safetensors"] if path.is_file()]
    if not paths and index.is_file():
        paths = [
            folder / name
            for name in {*json.loads(index.read_bytes())["weight_map"].values()}
        ]
    files = dict[str, Path]()
    for path in paths:
        with safe_open(path, framework="np") as file:
            files |= dict.fromkeys(file.keys(), path)
    return files


def renamed_prefix(names: Collection[str]) -> dict[str, str]:
    """Return the pattern of a text part's prefix, and its replacement; empty for a lone
    language model.
    """
    prefixes = [match[1] for match in map(PREFIX.fullmatch, names) if match]
    if not prefixes:
        return {}
    # Several parts may have an embedding, such as an MTP head inside of the text part.
    # The outermost one is the text part's.
    prefix = min(prefixes, key=len)
    outer = prefix.removesuffix("model.")
    # The removed suffix must be a whole name: language_model. also ends with model.
    is_whole = outer != prefix and outer.endswith(".")
    return (
        {f"^{re.escape(outer)}": ""}
        if is_whole
        else {f"^{re.escape(prefix)}": "model."}
    )


def other_parts(names: Collection[str]) -> set[str]:
    """Return the stored names outside the text part, the head of a text part included."""
    patterns = [*renamed_prefix(names)]
    return {
        name
        for name in names
        if not any(re.match(pattern, name) for pattern in patterns or [""])
    }


def has_own_head(folder: str | Path) -> bool:
    """Return whether a head is stored that is not the embedding, although config.json
    ties the two.
    """
    files = stored_files(folder)
    heads, embeddings = (
        [name for name in files if name.endswith(end)]
        for end in ("lm_head.weight", "embed_tokens.weight")
    )
    declared = [
        section.get("tie_word_embeddings", True)
        for section in sections_of(read_config(folder))
    ]
    if not heads or not embeddings or not all(declared):
        return False
    with (
        safe_open(files[heads[0]], "pt") as of_head,
        safe_open(files[min(embeddings, key=len)], "pt") as other,
    ):
        head = of_head.get_tensor(heads[0])
        embedding = other.get_tensor(min(embeddings, key=len))
    return head.shape != embedding.shape or bool((head != embedding).any())


def carried_over(
    folder: Path, written: Collection[str], ignored: Collection[str]
) -> dict[str, Tensor]:
    """Return the tensors of other parts of a folder that are not `written`.

    `ignored`: patterns of names that the model's class ignores, like MTP heads. A part
    like `mtp.` or `model.visual.` is left out if it is quantised.
    """
    files = stored_files(folder)
    others = other_parts(files) | {
        name for name in files if any(re.search(one, name) for one in ignored)
    }
    carried: dict[str, Tensor] = {}
    quantised = set[str]()
    for name in sorted(others.difference(written)):
        with safe_open(files[name], framework="pt") as file:
            carried[name] = file.get_tensor(name)
        # The exported config has no quantisation, so a reader would take the bytes for
        # numbers. One such tensor makes its whole part unreadable.
        if carried[name].element_size() == 1:
            quantised.add(_part_of(name))
    return {
        name: tensor
        for name, tensor in carried.items()
        if _part_of(name) not in quantised
    }


def _part_of(name: str) -> str:
    return name.removeprefix("model.").partition(".")[0]
