"""Write a random model of model.scratch with a character-level tokenizer, in a process
with torch. The tokenizer needs none: the controller checks it.
"""

from __future__ import annotations

import ctypes
import difflib
import importlib.util
import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from asyncrl.base.errors import ConfigError
from asyncrl.base.files import open_as, whole_folder
from asyncrl.base.http import fail
from asyncrl.config.model_config import ScratchConfig
from asyncrl.models.loading import add_old_keys, loading, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig  # imports torch

PAD, UNK, END = "<pad>", "<unk>", "<|im_end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS = (PAD, UNK, END, *ROLES)
TOOL = "<|tool|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

CHAT_TEMPLATE_WITH_TOOLS = CHAT_TEMPLATE.replace(
    "message['content']", "(message['content'] or '')"
)
OLD_KEYS = {"rope_theta", "rope_scaling"}
ARCHITECTURE = "model.scratch.architecture"
CORRECT = f"correct {ARCHITECTURE}, which has the keys of a transformers config."


class ScratchSpec(BaseModel, frozen=True, extra="forbid"):
    out: Path
    seed: int
    scratch: ScratchConfig
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


def make_character_tokenizer(
    characters: str, *, has_tool_role: bool = False
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character."""
    tools = (TOOL,) if has_tool_role else ()
    vocabulary = {
        token: index
        for index, token in enumerate((*SPECIAL_TOKENS, *tools, *characters))
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    # llguidance cannot interpret a decoder with only Fuse
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNK,
        eos_token=END,
        additional_special_tokens=[*ROLES, *tools],
        chat_template=CHAT_TEMPLATE_WITH_TOOLS if has_tool_role else CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def scratch_config(
    architecture: Mapping[str, object], tokenizer: PreTrainedTokenizerFast
) -> PreTrainedConfig:
    """Return the transformers config of a scratch model. Raises ConfigError, and
    transformers' errors.
    """
    from transformers import AutoConfig

    given = dict(architecture)
    if (model_type := given.pop("model_type", None)) is None:
        raise ConfigError(
            f"{ARCHITECTURE} has no model_type", way_out="give one, like qwen3."
        )
    default = AutoConfig.for_model(model_type)
    known = default.to_dict().keys() | default.attribute_map.keys() | OLD_KEYS
    others = given.keys() - known
    # `getattr(config, "head_dim", None)`
    read = _model_source(default) if others else ""
    if unknown := sorted(key for key in others if f'config, "{key}"' not in read):
        closest = difflib.get_close_matches(unknown[0], known, n=1) or ["remove it"]
        what = (
            f"{ARCHITECTURE}: a {model_type} config does not know {', '.join(unknown)}"
        )
        raise ConfigError(
            what, way_out=f"write keys of a transformers config ({closest[0]}?)."
        )
    special = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    filled = {"vocab_size": len(tokenizer), **special, "bos_token_id": None}
    return AutoConfig.for_model(model_type, **{**given, **filled})


def _model_source(config: PreTrainedConfig) -> str:
    """Return the code of the config's models."""
    module = type(config).__module__.replace(".configuration_", ".modeling_")
    spec = importlib.util.find_spec(module)
    return (
        ""
        if spec is None or spec.origin is None
        else Path(spec.origin).read_text(encoding="utf-8")
    )


def make_scratch_model(spec: ScratchSpec) -> None:
    """Write the model folder. Raises ConfigError, OSError."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = make_character_tokenizer(
        spec.scratch.characters, has_tool_role=spec.scratch.has_tool_role
    )
    torch.manual_seed(spec.seed)
    dtype = torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32
    with loading(ARCHITECTURE, CORRECT):
        config = scratch_config(spec.scratch.architecture, tokenizer)
        model = AutoModelForCausalLM.from_config(config).to(dtype)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    with whole_folder(spec.out) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        described = unfinished / "tokenizer_config.json"
        # transformers 5 writes names that 4 does not know
        portable = json.loads(described.read_text()) | {
            "tokenizer_class": "PreTrainedTokenizerFast"
        }
        portable["additional_special_tokens"] = portable.pop("extra_special_tokens")
        described.write_text(json.dumps(portable, indent=2) + "\n")
        config_file = unfinished / "config.json"
        written = read_config(unfinished)
        add_old_keys(written)
        config_file.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
        open_as(unfinished, config_file)


def main() -> None:
    # PR_SET_PDEATHSIG: do not outlive a killed run
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    disable_progress_bar()
    try:
        make_scratch_model(ScratchSpec.model_validate_json(sys.argv[1]))
    except ConfigError as error:
        fail(error.what, rule=error.rule, way_out=error.way_out)
    except (OSError, SafetensorError) as error:
        fail(
            f"cannot write the model of model.scratch: {error}",
            way_out="free disk space.",
        )


if __name__ == "__main__":
    main()
