"""Build a run's model without weights, so that `asyncrl check` refuses what trainer and
engine would.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils.logging import disable_progress_bar

from asyncrl.base.errors import ConfigError, find_fatal
from asyncrl.config import ModelConfig, RunConfig
from asyncrl.models.loading import loading, text_config
from asyncrl.models.rope_lengths import refuse_lengths
from asyncrl.models.support import has_experts
from asyncrl.trainer.attention.forward_plan import probe_model
from asyncrl.trainer.model.policy import BalanceLoss
from asyncrl.trainer.model.random_init import (
    ARCHITECTURE,
    CORRECT,
    make_character_tokenizer,
    scratch_config,
)

TRIAL_S = 300.0
"""Limit of an engine's trial. A start on a slow core takes 10 s."""


def try_model(config: RunConfig, folder: Path) -> float | None:
    """Build the model on `meta`; return the weight of its load-balancing loss, or None
    without experts. Raises ConfigError. `folder`: holds config.json, unless the model is
    made from scratch.
    """
    with _architecture(config.model, folder) as architecture, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture)
    if adapters := config.trainer.adapters.values():
        from asyncrl.trainer.model.lora import targets_of

        for lora in adapters:
            targets_of(model, lora)
    if config.algorithm.router_replay:
        from asyncrl.trainer.model.build_model import RouterReplay

        RouterReplay(model)
    if config.rollout.engine == "embedded":
        refuse_lengths(model.config, config.rollout.max_length)
    balance = BalanceLoss(model, config.trainer.router_aux_loss)
    text = model.config.get_text_config()
    return balance.weight if has_experts(text.to_dict()) else None


@contextmanager
def _architecture(model: ModelConfig, folder: Path) -> Iterator[PreTrainedConfig]:
    """Yield the language model's config, and turn errors of transformers into a
    ConfigError.
    """
    scratch = model.scratch
    if scratch is None:
        with loading(folder / "config.json", "correct that file, or fetch it again."):
            yield text_config(folder)
    else:
        with loading(ARCHITECTURE, CORRECT):
            tokenizer = make_character_tokenizer(scratch.characters)
            yield scratch_config(scratch.architecture, tokenizer)


def try_engine(key: str, model: ModelConfig, folder: Path, max_length: int) -> None:
    """Start an embedded engine on a small random model with each kind of layer, up to
    its first request. Raises ConfigError if it refuses. `key`: setting of the engine.
    """
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="asyncrl-trial-") as made:
        with _architecture(model, folder) as architecture:
            probe_model(architecture, torch.device("cpu")).save_pretrained(made)
        spec = {
            "name": key.rpartition(".")[0],
            "model_path": made,
            "dtype": "float32",
            "device": "cpu",
            # Bits depend on the machine, not on the family.
            "deterministic": False,
            "slots": 1,
            "max_length": max_length,
        }
        # The engine's own process and code. It changes transformers' attention, and
        # ends its process to refuse.
        child = subprocess.run(
            [sys.executable, "-m", "asyncrl_servers.embedded.trial"],
            input=json.dumps(spec),
            capture_output=True,
            text=True,
            timeout=TRIAL_S,
        )
    if child.returncode == 0:
        return
    fatal = find_fatal(child.stderr)
    last_line = (child.stderr.splitlines() or [f"exit code {child.returncode}"])[-1]
    raise ConfigError(
        f"the embedded engine refuses {architecture.model_type} models: "
        f"{last_line if fatal is None else fatal.error.replace(made, 'the trial')}",
        way_out=f"set {key}=vllm.",
    )
