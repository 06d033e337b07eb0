"""Find, fetch or make the model's folder, and pin its files for resumed runs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open

from asyncrl.base.errors import ConfigError, find_fatal
from asyncrl.base.files import settle_folder, write_whole
from asyncrl.base.progress import told_if_long
from asyncrl.config import ModelConfig, RunConfig
from asyncrl.config.model_config import split_hub_id
from asyncrl.models.loading import (
    check_quantization,
    other_parts,
    quantization_of,
    stored_files,
)
from asyncrl.models.support import find_support

MAKE_TIMEOUT_S = 300.0
MODEL_PIN = "model.json"
MODEL_KEY = "model.path"
WEIGHTS = ("*.safetensors", "*.bin")
SLOWEST_BYTES_S = 50e6
HUB_TIMEOUT_S = 5.0
TOKENIZER = (
    "tokenizer*.json",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.*",
)
GENERATION = ("generation_config.json", "*processor_config.json")
PINNED = (*WEIGHTS, "*.index.json", "config.json", "generation_config.json", *TOKENIZER)
LICENCE = ("README.md", "LICENSE*")
"""Files that the model card of an export reads."""
DOWNLOADED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja")

RunModule = Callable[[str, Sequence[str], float], Awaitable[tuple[int | None, str]]]
"""Runs `python -m` with a timeout; returns exit code (None: killed) and output."""


async def make_model_folder(
    config: RunConfig, run_dir: Path, run: RunModule, *, commit: str | None = None
) -> Path:
    """Return the model's folder. Raises ConfigError."""
    if config.model.scratch is None:
        path = str(config.model.path)
        return await asyncio.to_thread(find_model, path, commit=commit)
    folder = run_dir / "model"
    if folder.exists():  # a resumed run
        return folder
    scratch = config.model.scratch.model_dump()
    values = {
        "out": str(folder),
        "seed": config.seed,
        "scratch": scratch,
        "dtype": config.model.dtype,
    }
    try:
        returncode, text = await run(
            "asyncrl.trainer.model.random_init", [json.dumps(values)], MAKE_TIMEOUT_S
        )
    finally:
        settle_folder(folder)  # remove what a killed process leaves
    if returncode != 0:
        fatal = find_fatal(text)
        raise ConfigError(
            f"model.scratch cannot be made: {fatal.error if fatal else text[-500:]}",
            way_out=fatal.way_out
            if fatal
            else "correct model.scratch.architecture, or use a smaller one.",
        )
    return folder


def find_model(
    path: str,
    key: str = MODEL_KEY,
    *,
    commit: str | None = None,
    needs_weights: bool = True,
) -> Path:
    """Return the folder of a model, fetched if necessary. Raises ConfigError."""
    if (given := _find_given(path, key, needs_weights=needs_weights)) is not None:
        return given
    from huggingface_hub import snapshot_download

    # A branch on the hub moves. A resumed run fetches the commit that it began with.
    hub_id, revision = split_hub_id(path)
    fetched = commit or revision
    try:
        patterns = (
            [*DOWNLOADED, *LICENCE] if needs_weights else [*TOKENIZER, "config.json"]
        )
        folder = Path(
            snapshot_download(hub_id, revision=fetched, allow_patterns=patterns)
        )
    except (OSError, ValueError) as error:
        at = f" at {commit}" if commit else ""
        what = f"{key}={path}{at} cannot be fetched from the hub: {type(error).__name__}: {error!s:.300}"
        way_out = (
            "check the spelling and the network, or give the path of a local folder."
        )
        raise ConfigError(what, way_out=way_out) from error
    _check_folder(folder, f"{key}={path}", needs_weights=needs_weights)
    return folder


def find_on_disk(
    path: str,
    key: str = MODEL_KEY,
    *,
    needs_weights: bool = True,
) -> Path | None:
    """Return a model folder, or None to fetch it. Raises ConfigError."""
    if (given := _find_given(path, key, needs_weights=needs_weights)) is not None:
        return given
    from huggingface_hub import snapshot_download

    try:
        hub_id, revision = split_hub_id(path)
        folder = Path(
            snapshot_download(hub_id, revision=revision, local_files_only=True)
        )
        _check_folder(folder, path)
    except (OSError, ValueError, ConfigError):
        return None
    return folder if any(folder.glob("tokenizer*")) else None


@told_if_long("finding the model's config.json")
def fetch_architectures(*models: ModelConfig) -> None:
    """Fetch config.json of hub models for memory plans, if the hub answers one call.
    Ignores failures.
    """
    with contextlib.suppress(Exception):  # of any HTTP library
        wanted = {
            split_hub_id(model.path)
            for model in models
            if model.path and _is_on_hub(model.path)
        }
        if wanted:
            from huggingface_hub import constants, get_session, hf_hub_download

            # downloads repeat failed calls
            get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
        for hub_id, revision in wanted:
            hf_hub_download(hub_id, "config.json", revision=revision)


def _is_on_hub(path: str) -> bool:
    with contextlib.suppress(ConfigError):
        return _find_given(path, MODEL_KEY) is None
    return False


def check_plain(config: RunConfig, architecture: dict[str, Any]) -> None:
    """Raise ConfigError for quantised weights that trainer and engines cannot hold
    alike.
    """
    source = f"{MODEL_KEY}={config.model.path}"
    check_quantization(architecture, source)
    facts = config.rollout.facts
    if quantization_of(architecture) is not None and facts.keeps_quantized:
        raise ConfigError(
            f"{source} is quantised, and rollout.engine={config.rollout.engine}",
            rule=f"{facts.title} would keep its layers quantised, and cannot take the trainer's plain "
            "weights",
            way_out="give the unquantised model, or set rollout.engine=embedded, which dequantises too.",
        )


def load_limit_s(folder: Path) -> float:
    paths = [
        path for pattern in WEIGHTS for path in folder.glob(pattern) if path.is_file()
    ]
    return sum(path.stat().st_size for path in paths) / SLOWEST_BYTES_S


def check_model_type(model_type: object, source: str) -> None:
    """Raise ConfigError for an unknown architecture."""
    # The import below reads the folders of all models, for half a second. The table also
    # has types of newer releases of transformers.
    package = find_spec("transformers")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
    known = Path(package.origin).parent / "models" / str(model_type)
    if find_support(str(model_type)) and known.is_dir():
        return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING_NAMES:
        what = f"{source} has model_type={model_type}, which transformers does not know"
        raise ConfigError(what, way_out="name a known one, like qwen3.")


def _find_given(name: str, key: str, *, needs_weights: bool = True) -> Path | None:
    # Functions of os.path never raise, as for a name too long or an unknown ~user.
    path = Path(os.path.expanduser(name))  # noqa: PTH111
    if os.path.isdir(path):  # noqa: PTH112
        _check_folder(path, f"{key}={name}", needs_weights=needs_weights)
        return path.resolve()
    owner = name.partition("/")[0]
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", name)
    if is_id and owner not in (".", "..", "models") and not os.path.isdir(owner):  # noqa: PTH112
        return None
    rule = "it must be a Hugging Face folder, or a hub id owner/name where no folder here is named owner"
    made = (
        "; `python examples/smollm2.py` makes models/smollm2-135m-instruct"
        if key == MODEL_KEY
        else ""
    )
    raise ConfigError(
        f"{key}={name}: there is no such folder",
        rule=rule,
        way_out=f"correct {key}{made}.",
    )


def _check_folder(folder: Path, name: str, *, needs_weights: bool = True) -> None:
    """Raise ConfigError unless config.json and all weights can be read."""
    path = folder / "config.json"
    index = folder / "model.safetensors.index.json"
    rule = "it must be the folder of a model as save_pretrained writes it"
    try:
        check_model_type(
            json.loads(path.read_text())["model_type"], f"config.json of {name}"
        )
        files = [file for pattern in WEIGHTS for file in folder.glob(pattern)]
        if index.is_file() and not (folder / "model.safetensors").is_file():
            path = index
            files = [
                folder / file
                for file in {*json.loads(path.read_text())["weight_map"].values()}
            ]
        # Opening reads the header, whose offsets must end where the file does. This
        # finds a download that broke off.
        for path in files:
            if path.suffix == ".safetensors":
                safe_open(path, framework="np")
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        SafetensorError,
    ) as error:
        what = f"{name}: cannot read {path}: {type(error).__name__}: {error!s:.200}"
        way_out = (
            f"remove {path.resolve()} and copy or fetch it again, or give a hub id."
        )
        raise ConfigError(what, rule=rule, way_out=way_out) from error
    if not files and needs_weights:
        raise ConfigError(
            f"{name} has no weights (*.safetensors)",
            rule=rule,
            way_out="give a hub id.",
        )


class PinnedModel(BaseModel, frozen=True, extra="forbid"):
    """`files`: digests by name; `shapes`: digest of the weights' names and sizes, '' if
    they are not in safetensors, or version 0.1 pinned them.
    """

    given: str | None
    revision: str | None
    files: dict[str, str]
    shapes: str = ""


class ModelPin:
    """File digests of the run's first model. Blocks."""

    def __init__(
        self, run_dir: Path, given: str | None, *, is_free: bool = False
    ) -> None:
        """`is_free`: accept other files of the same architecture."""
        self.path = run_dir / MODEL_PIN
        self._given = given
        self._is_free = is_free
        self._found: PinnedModel | None = None
        self._pinned = (
            PinnedModel.model_validate_json(self.path.read_bytes())
            if self.path.exists()
            else None
        )

    @property
    def revision(self) -> str | None:
        pinned = self._pinned
        if pinned is None or pinned.given != self._given or self._is_free:
            return None
        return pinned.revision

    def read(self, folder: Path) -> None:
        """Hash the files. Raises ConfigError that lists changed ones."""
        paths = sorted(
            {
                path
                for pattern in PINNED
                for path in folder.glob(pattern)
                if path.is_file()
            }
        )
        files = {path.name: _hash(path) for path in paths}
        revision = folder.name if folder.parent.name == "snapshots" else None
        self._found = PinnedModel(
            given=self._given,
            revision=revision,
            files=files,
            shapes=_shapes_digest(folder),
        )
        # Other weights would be another initial policy and reference, and another
        # tokenizer would give other ids to the same text. Neither has to raise an error
        # later.
        if self._pinned is None or self._pinned.files == files:
            return
        shapes = {self._pinned.shapes, self._found.shapes} - {""}
        if len(shapes) > 1:
            raise ConfigError(
                f"the model in {folder} has weights of other names or sizes than the one that this run "
                "began with",
                rule="checkpoints hold weights of that architecture, so that --allow-change does not help",
                way_out="restore model.path, or start a new run in another --run-dir.",
            )
        if self._is_free:
            return
        differing = sorted(
            {name for name, _ in self._pinned.files.items() ^ files.items()}
        )
        back = (
            "restore the files"
            if self._given
            else f"remove {folder}: it is made again from the seed"
        )
        raise ConfigError(
            f"the model in {folder} is not the one that this run began with: {', '.join(differing)}",
            rule="a run keeps the base weights and the tokenizer that it was started with",
            way_out=f"{back}, or accept these with --allow-change model.path.",
        )

    def write(self) -> None:
        if self._found is not None and self._found != self._pinned:
            self._pinned = self._found
            write_whole(
                self.path, json.dumps(self._found.model_dump(), indent=1) + "\n"
            )


def _shapes_digest(folder: Path) -> str:
    """Return a digest of the names and sizes of the language model's weights."""
    files = stored_files(folder)
    others = other_parts(files)
    shapes = list[tuple[str, list[int]]]()
    for path in {*files.values()}:
        with safe_open(path, framework="np") as file:
            shapes += [
                (name, file.get_slice(name).get_shape())
                for name in file.keys()  # noqa: SIM118  it is no mapping
                if name not in others
            ]
    return (
        xxhash.xxh3_128(json.dumps(sorted(shapes)).encode()).hexdigest()
        if shapes
        else ""
    )


def _hash(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
