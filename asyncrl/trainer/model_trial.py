"""Build a run's model without weights, so that `asyncrl check` refuses what trainer and
engine would.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from asyncrl.config import RunConfig
from asyncrl.models.loading import loading, text_config
from asyncrl.models.rope_lengths import refuse_lengths
from asyncrl.trainer.random_init import (
    ARCHITECTURE,
    CORRECT,
    make_character_tokenizer,
    scratch_config,
)


def try_model(config: RunConfig, folder: Path) -> None:
    """Build the model on `meta`. Raises ConfigError. `folder`: holds config.json,
    unless the model is made from scratch.
    """
    scratch = config.model.scratch
    lora = config.trainer.lora
    if scratch is None:
        source = str(folder / "config.json")
        way_out = "correct that file, or fetch it again."
    else:
        source = ARCHITECTURE
        way_out = CORRECT
    with loading(source, way_out), torch.device("meta"):
        if scratch is None:
            architecture = text_config(folder)
        else:
            architecture = scratch_config(
                scratch.architecture, make_character_tokenizer(scratch.characters)
            )
        model = AutoModelForCausalLM.from_config(architecture)
    if lora is not None:
        from asyncrl.trainer.lora import find_targets

        find_targets(model, lora)
    if config.algorithm.router_replay:
        from asyncrl.trainer.build_model import RouterReplay

        RouterReplay(model)
    if config.rollout.engine == "embedded":
        refuse_lengths(model.config, config.rollout.max_length)
