"""The Hugging Face folder that everybody starts from: made from scratch, given, or fetched from the hub. Loads no model."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from asyncrl.config import ModelConfig, RunConfig
from asyncrl.errors import ConfigError
from asyncrl.running.off_loop import in_daemon_thread
from asyncrl.running.startup import START_TIMEOUT_S
from asyncrl.wire import find_fatal


async def make_model_folder(config: RunConfig, run_dir: Path) -> Path:
    """The Hugging Face folder that trainer and engines start from: made from scratch, given, or fetched from the hub."""
    if config.model.scratch is None:
        return await in_daemon_thread(lambda: _find_model(config.model))
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


def _find_model(model: ModelConfig) -> Path:
    path = Path(model.path or "").expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"model.path={model.path} has no config.json", rule="it must be a Hugging Face model folder",
                way_out="give the folder that save_pretrained wrote, or a hub id.",
            )  # fmt: skip
        return path.resolve()
    if path.is_absolute() or len(path.parts) != 2 or path.parts[0] in (".", "..", "models"):
        raise ConfigError(
            f"model.path={model.path}: there is no such folder", rule="it must be a Hugging Face folder or a hub id",
            way_out="correct model.path; for configs/smollm2.yaml run `python examples/smollm2.py` first.",
        )  # fmt: skip
    return _download(str(model.path))


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except (OSError, ValueError) as error:  # the hub's own errors are all OSErrors or ValueErrors
        raise ConfigError(
            f"model.path={hub_id} is no local folder and cannot be fetched from the hub: {type(error).__name__}: {str(error)[:300]}",
            way_out="check the spelling and the network, or give the path of a local folder.",
        ) from error
