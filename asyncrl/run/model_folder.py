"""The Hugging Face folder that everybody starts from: made from scratch, given, or fetched from the hub.
Loads no model.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import json
import tempfile
import threading
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from pydantic import BaseModel, ValidationError

from asyncrl.config import ModelConfig, RunConfig
from asyncrl.errors import ConfigError
from asyncrl.files import write_whole
from asyncrl.messages.base import find_fatal
from asyncrl.placement.processes import start_process
from asyncrl.run.start import START_TIMEOUT_S

# Blocking work beside the event loop. Knows no process and no room.


Result = TypeVar("Result")


async def in_daemon_thread(work: Callable[[], Result]) -> Result:
    """Run blocking work of the start-up off the loop. Raises what it raises; a sys.exit() in it becomes a
    RuntimeError.

    Not asyncio.to_thread: its threads are joined when the loop closes, and again when the interpreter ends,
    so that Ctrl-C would take as long as the slowest download or constructor.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Callable[[], None]) -> None:
        if not done.done():  # else nobody waits any more
            result()

    def body() -> None:
        try:
            result = work()
        except (Exception, SystemExit) as raised:  # carried over to the task that waits, not handled
            error = (
                raised
                if isinstance(raised, Exception)
                else RuntimeError(f"sys.exit({raised.code}) was called")
            )
            answer = functools.partial(done.set_exception, error)
        else:
            answer = functools.partial(done.set_result, result)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
            loop.call_soon_threadsafe(settle, answer)

    threading.Thread(target=body, name="start-up", daemon=True).start()
    return await done


async def make_model_folder(config: RunConfig, run_dir: Path, *, revision: str | None = None) -> Path:
    """The Hugging Face folder that trainer and engines start from: made from scratch, given, or fetched from
    the hub.

    `revision`: the hub's commit, none for the newest.
    """
    if config.model.scratch is None:
        return await in_daemon_thread(
            lambda: _find_given(config.model) or _download(str(config.model.path), revision)
        )
    folder = run_dir / "model"
    spec = run_dir / "specs" / "scratch.json"
    if (
        folder.exists() and spec.exists()
    ):  # a run that goes on: what was made by this spec is there as a whole or not at all
        return folder
    spec.parent.mkdir(parents=True, exist_ok=True)
    values = {
        "out": str(folder),
        "seed": config.seed,
        "scratch": config.model.scratch.model_dump(),
        "dtype": config.model.dtype,
    }
    spec.write_text(json.dumps(values), encoding="utf-8")
    with tempfile.TemporaryFile() as output:
        process = await start_process(
            "asyncrl.trainer.model.scratch",
            ["--spec", str(spec)],
            files=[output.fileno(), output.fileno(), output.fileno()],
        )
        try:
            await asyncio.wait_for(process.wait(), START_TIMEOUT_S)
        except TimeoutError:
            raise ConfigError(
                f"model.scratch was not made within {START_TIMEOUT_S} s",
                rule="a start has that long a step",
                way_out="take a smaller model.scratch.architecture, or a faster machine.",
            ) from None
        finally:
            if process.returncode is None:
                process.kill()
        output.seek(0)
        text = output.read().decode(errors="replace")
    if process.returncode != 0:
        fatal = find_fatal(text)
        what = fatal.error if fatal else f"exit code {process.returncode}: {text[-500:]}"
        raise ConfigError(
            f"model.scratch cannot be made: {what}",
            way_out=(fatal and fatal.way_out) or "correct model.scratch.architecture.",
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
        f"{source} has model_type={model_type}, and transformers {metadata.version('transformers')} knows no "
        f"such architecture",
        rule="it says how the model is built",
        way_out=f"did you mean {close[0]}?" if close else "name one that it knows, like qwen3.",
    )


def _find_given(model: ModelConfig) -> Path | None:
    """The folder that model.path names; None if that is a hub id."""
    path = Path(model.path or "").expanduser()
    if path.is_dir():
        _refuse_incomplete(path, f"model.path={model.path}")
        return path.resolve()
    if (
        path.is_absolute()
        or len(path.parts) != 2
        or path.parts[0] in (".", "..", "models")
        or Path(path.parts[0]).is_dir()
    ):
        raise ConfigError(
            f"model.path={model.path}: there is no such folder",
            rule="it must be a Hugging Face folder or a hub id, owner/name, where no folder here is named "
            "like the owner",
            way_out="correct model.path; models/smollm2-135m-instruct is made by `python "
            "examples/smollm2.py` in asyncrl's checkout.",
        )
    return None


def _refuse_incomplete(folder: Path, name: str) -> None:
    try:
        architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{name} has no config.json",
            rule="it must be a Hugging Face model folder",
            way_out="give the folder that save_pretrained wrote, or a hub id.",
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"config.json of {name} cannot be read: {error}", way_out="restore that file."
        ) from error
    if not isinstance(architecture, dict) or "model_type" not in architecture:
        raise ConfigError(
            f"config.json of {name} names no model_type",
            rule="it says which architecture the weights are of",
            way_out="give the folder that save_pretrained wrote, or a hub id.",
        )
    check_model_type(architecture["model_type"], f"config.json of {name}")
    if not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin")):
        raise ConfigError(
            f"{name} has no weights (*.safetensors)",
            way_out="complete the folder; save_pretrained writes both.",
        )


def _find_in_cache(hub_id: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(hub_id, local_files_only=True))
        _refuse_incomplete(folder, hub_id)
    except (
        OSError,
        ValueError,
        ConfigError,
    ):  # not there, or not all of it: it is fetched when the run starts
        return None
    return folder


def _download(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the hub's own errors are all OSErrors or ValueErrors
        raise ConfigError(
            f"model.path={hub_id} is no local folder and cannot be fetched from the hub: "
            f"{type(error).__name__}: {str(error)[:300]}",
            way_out="check the spelling and the network, or give the path of a local folder.",
        ) from error


# The model that a run began with, by the content of its files: a run that goes on from another one is
# refused.
#
# With trainer.lora a checkpoint holds the adapters alone, so nothing else would notice. Blocks on the disk:
# call it in a thread.


MODEL_PIN = "model.json"
"""In the run directory: the model that the run began with."""
PATTERNS = (
    "*.safetensors *.safetensors.index.json *.bin *.bin.index.json config.json generation_config.json "
    "tokenizer*.json tokenizer.model vocab.* merges.txt added_tokens.json special_tokens_map.json "
    "chat_template.*"
).split()
"""What weights, architecture and tokenizer are read from."""
_CHUNK_BYTES = 8 * 2**20


class PinnedFile(BaseModel, frozen=True, extra="forbid"):
    """One file. With the size and time that it had, it is not read again."""

    size: int
    mtime_ns: int
    xxh3: str


class PinnedModel(BaseModel, frozen=True, extra="forbid"):
    """Files by name. `given`: model.path; `revision`: of a hub id, the commit that it was fetched at."""

    given: str | None
    revision: str | None
    files: dict[str, PinnedFile]


class ModelPin:
    """The pin of one run. Life: made (reads what the first start has written) -> check() -> read() -> write()
    once nothing can refuse.
    """

    def __init__(self, run_dir: Path, given: str | None, *, is_free: bool = False) -> None:
        """`given`: model.path, None for a model that is made from scratch. `is_free`: any model will do, and
        becomes the run's.

        Raises ConfigError if what was written cannot be read.
        """
        self.path, self._given = run_dir / MODEL_PIN, given
        self._pinned: PinnedModel | None = None
        self._found: PinnedModel | None = None
        try:
            if not is_free and self.path.exists():
                self._pinned = PinnedModel.model_validate_json(self.path.read_bytes())
        except (OSError, ValidationError) as error:
            raise ConfigError(
                f"{self.path} cannot be read: {str(error).splitlines()[0]}",
                rule="it says which model the run began with",
                way_out="put it back as it was, or accept the model as it is with --allow-change model.path.",
            ) from error

    @property
    def revision(self) -> str | None:
        """The commit of the hub that the run began with; None for a new run, another model.path, or a
        folder.
        """
        return (
            self._pinned.revision if self._pinned is not None and self._pinned.given == self._given else None
        )

    def check(self, folder: Path) -> None:
        """Raise ConfigError that names the files if `folder` is not what the run began with.

        Reads those alone whose time differs; writes nothing.
        """
        if self._pinned is None:
            return
        before, now = self._pinned.files, _hash_all(folder, self._pinned.files)
        differing = []
        for name in sorted(before.keys() | now.keys()):
            if name not in now or name not in before:
                differing.append(f"{name} is {'missing' if name in before else 'new'}")
            elif before[name].xxh3 != now[name].xxh3:
                differing.append(f"{name} has other content")
        if differing:
            back = "put the model's files back as they were"
            if self._given is None:
                back = f"remove {folder}: it is made again from the seed"
            raise ConfigError(
                f"the model in {folder} is not the one that this run began with: {', '.join(differing)}",
                rule="a run goes on from the base weights and the tokenizer that it was started with",
                way_out=f"{back}, or accept these with --allow-change model.path.",
            )
        self._found = self._model(folder, now)

    def read(self, folder: Path) -> None:
        """Read a model that nothing is known of yet, all of it. May take as long as loading it."""
        if self._found is None:
            self._found = self._model(folder, _hash_all(folder, {}))

    def write(self) -> None:
        """Remember the model: the run begins, or goes on, with it. Raises OSError."""
        if self._found is not None and self._found != self._pinned:
            self._pinned = self._found
            write_whole(self.path, json.dumps(self._found.model_dump(), indent=1) + "\n")

    def _model(self, folder: Path, files: dict[str, PinnedFile]) -> PinnedModel:
        revision = (
            folder.name if folder.parent.name == "snapshots" else None
        )  # as the hub's cache lays it out
        return PinnedModel(given=self._given, revision=revision, files=files)


def _hash_all(folder: Path, known: Mapping[str, PinnedFile]) -> dict[str, PinnedFile]:
    paths = sorted({path for pattern in PATTERNS for path in folder.glob(pattern) if path.is_file()})
    try:
        return {path.name: _hash(path, known.get(path.name)) for path in paths}
    except OSError as error:
        raise ConfigError(
            f"cannot read the model in {folder}: {error}", way_out="restore its files."
        ) from error


def _hash(path: Path, known: PinnedFile | None) -> PinnedFile:
    stat = path.stat()
    if known is not None and (known.size, known.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
        return known
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return PinnedFile(size=stat.st_size, mtime_ns=stat.st_mtime_ns, xxh3=digest.hexdigest())
