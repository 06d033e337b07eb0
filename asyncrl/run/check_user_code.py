"""`python -m asyncrl.run.check_user_code`: loads what only the trainer and the workers of a run load, and
says whether it can be called.

A process of its own, because the controller loads no torch and none of the code that runs elsewhere. It ends
with a fatal line, or with exit code FINE, which no module ends a process with by accident. check.py
starts it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import yaml

from asyncrl.agents.harness import PythonHarness
from asyncrl.config import LoraConfig, ModelConfig, RunConfig
from asyncrl.errors import ConfigError
from asyncrl.http import die_with_parent, fail, secret_of
from asyncrl.user_code import load_advantage, load_loss

CONFIG = "config"
"""What the parent calls the config in the first line of standard input, which may hold secrets as well."""
FINE = 64
"""Exit code of a process that has loaded everything."""


def check(config: RunConfig) -> None:
    """Raises ConfigError with the first that cannot be loaded. model.path is a folder on disk, or is not
    looked at.
    """
    if ":" in config.algorithm.loss:
        load_loss(config.algorithm.loss)
    if ":" in config.algorithm.advantage:
        load_advantage(config.algorithm.advantage)
    if config.generator.python is not None:
        PythonHarness(config.generator.python, config.generator.args)
    if config.trainer.lora is not None and (
        config.model.scratch is not None or Path(config.model.path or "").is_dir()
    ):
        _check_targets(config.model, config.trainer.lora)


def _check_targets(model: ModelConfig, lora: LoraConfig) -> None:
    """The layers of a model that has names and shapes, and no weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from asyncrl.trainer.model.lora import find_targets

    try:
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(_architecture(model))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
        source = f"model.path={model.path}" if model.scratch is None else "model.scratch"
        raise ConfigError(
            f"{source}: a model of this architecture cannot be made: {type(error).__name__}: "
            f"{str(error)[:500]}",
            rule="it is a causal language model that transformers knows",
            way_out="correct the architecture, or choose another model.",
        ) from error
    find_targets(whole, lora)


def _architecture(model: ModelConfig) -> Any:
    from transformers import AutoConfig

    from asyncrl.trainer.model.scratch import make_character_tokenizer, scratch_config

    if model.scratch is None:
        return AutoConfig.from_pretrained(model.path)
    return scratch_config(model.scratch.architecture, make_character_tokenizer(model.scratch.characters))


def main() -> None:
    """Read the config from standard input, check, and end at once: a thread that a module has started is not
    waited for.
    """
    die_with_parent()
    code = 1
    try:
        check(RunConfig.model_validate(yaml.safe_load(secret_of(CONFIG))))
        code = FINE
    except ConfigError as error:
        with contextlib.suppress(SystemExit):
            fail(error.what, rule=error.rule, way_out=error.way_out)
    except BaseException:  # it ends here, whatever it was
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
