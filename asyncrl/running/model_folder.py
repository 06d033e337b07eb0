"""The Hugging Face folder that everybody starts from: made from scratch, given, or fetched from the hub. Loads no model."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from asyncrl.config import ModelConfig, RunConfig
from asyncrl.errors import ConfigError
from asyncrl.running.off_loop import in_daemon_thread
from asyncrl.running.startup import START_TIMEOUT_S
from asyncrl.wire import find_fatal


async def make_model_folder(config: RunConfig, run_dir: Path, *, revision: str | None = None) -> Path:
    """The Hugging Face folder that trainer and engines start from: made from scratch, given, or fetched from the hub.

    `revision`: the hub's commit, none for the newest.
    """
    if config.model.scratch is None:
        return await in_daemon_thread(lambda: _find_model(config.model, revision))
    folder = run_dir / "model"
    spec = run_dir / "specs" / "scratch.json"
    if folder.exists() and spec.exists():  # a run that goes on: what was made by this spec is there as a whole or not at all
        return folder
    spec.parent.mkdir(parents=True, exist_ok=True)
    values = {"out": str(folder), "seed": config.seed, "scratch": config.model.scratch.model_dump(), "dtype": config.model.dtype}
    spec.write_text(json.dumps(values), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "asyncrl.trainer.scratch", "--spec", str(spec),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), START_TIMEOUT_S)
    except TimeoutError:
        raise ConfigError(
            f"model.scratch was not made within {START_TIMEOUT_S} s", rule="a start has that long a step",
            way_out="take a smaller model.scratch.architecture, or a faster machine.",
        ) from None  # fmt: skip
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode != 0:
        text = output.decode(errors="replace")
        fatal = find_fatal(text)
        what = fatal.error if fatal else f"exit code {process.returncode}: {text[-500:]}"
        raise ConfigError(
            f"model.scratch cannot be made: {what}", way_out=(fatal and fatal.way_out) or "correct model.scratch.architecture."
        )
    return folder


def find_on_disk(model: ModelConfig) -> Path | None:
    """The folder of model.path, given or in the hub's cache; None if it is a hub id that has to be fetched.

    Raises ConfigError if it is neither, or lacks what is needed to read the model.
    """
    return _find_given(model) or _find_in_cache(str(model.path))


def is_hub_id(model: ModelConfig) -> bool:
    """Whether model.path is no folder here. It may be one in the hub's cache."""
    return model.path is not None and not Path(model.path).expanduser().is_dir()


def check_model_type(model_type: Any, source: str) -> None:
    """Raise ConfigError if transformers knows no such architecture. `source` is where it is named."""
    with contextlib.suppress(ImportError):  # most of the names, and it needs no torch
        from transformers.models.auto import auto_mappings

        if model_type in auto_mappings.CONFIG_MAPPING_NAMES:
            return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if model_type in CONFIG_MAPPING_NAMES:
        return
    close = difflib.get_close_matches(str(model_type), CONFIG_MAPPING_NAMES, n=1)
    raise ConfigError(
        f"{source} has model_type={model_type}, and transformers {metadata.version('transformers')} knows no such architecture",
        rule="it says how the model is built", way_out=f"did you mean {close[0]}?" if close else "name one that it knows, like qwen3.",
    )  # fmt: skip


def _find_given(model: ModelConfig) -> Path | None:
    """The folder that model.path names; None if that is a hub id."""
    path = Path(model.path or "").expanduser()
    if path.is_dir():
        _refuse_incomplete(path, f"model.path={model.path}")
        return path.resolve()
    if path.is_absolute() or len(path.parts) != 2 or path.parts[0] in (".", "..", "models") or Path(path.parts[0]).is_dir():
        raise ConfigError(
            f"model.path={model.path}: there is no such folder",
            rule="it must be a Hugging Face folder or a hub id, owner/name, where no folder here is named like the owner",
            way_out="correct model.path; models/smollm2-135m-instruct is made by `python examples/smollm2.py` in asyncrl's checkout.",
        )  # fmt: skip
    return None


def _refuse_incomplete(folder: Path, name: str) -> None:
    try:
        architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{name} has no config.json", rule="it must be a Hugging Face model folder",
            way_out="give the folder that save_pretrained wrote, or a hub id.",
        ) from error  # fmt: skip
    except (OSError, ValueError) as error:
        raise ConfigError(f"config.json of {name} cannot be read: {error}", way_out="restore that file.") from error
    if not isinstance(architecture, dict) or "model_type" not in architecture:
        raise ConfigError(
            f"config.json of {name} names no model_type", rule="it says which architecture the weights are of",
            way_out="give the folder that save_pretrained wrote, or a hub id.",
        )  # fmt: skip
    check_model_type(architecture["model_type"], f"config.json of {name}")
    if not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin")):
        raise ConfigError(f"{name} has no weights (*.safetensors)", way_out="complete the folder; save_pretrained writes both.")


def _find_in_cache(hub_id: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(hub_id, local_files_only=True))
        _refuse_incomplete(folder, hub_id)
    except (OSError, ValueError, ConfigError):  # not there, or not all of it: it is fetched when the run starts
        return None
    return folder


def _find_model(model: ModelConfig, revision: str | None) -> Path:
    return _find_given(model) or _download(str(model.path), revision)


def _download(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the hub's own errors are all OSErrors or ValueErrors
        raise ConfigError(
            f"model.path={hub_id} is no local folder and cannot be fetched from the hub: {type(error).__name__}: {str(error)[:300]}",
            way_out="check the spelling and the network, or give the path of a local folder.",
        ) from error
