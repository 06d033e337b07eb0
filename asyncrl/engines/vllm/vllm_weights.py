"""The ways in which weights get into vLLM: a file through our worker extension, chunks, an adapter. Knows no
pause and no version's end.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import shutil
import struct
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from asyncrl.engines.vllm.routes import Routes
from asyncrl.errors import EngineError
from asyncrl.messages.base import GroupSeat, weights_digest
from asyncrl.messages.records import WeightManifest
from asyncrl.messages.trainer_calls import Canary

# Adapters as vLLM takes them: a peft folder made of the trainer's file. Knows files and raw bytes; knows no
# torch and no server.
#
# The trainer's file holds `<module>.lora_A.weight` [rank, in] and `<module>.lora_B.weight` [out, rank] of
# each layer that has one, and
# the scalar `scale`, which is alpha / rank.


ADAPTER = "policy-adapter"
SCALE = "scale"
_SUFFIXES = (".lora_A.weight", ".lora_B.weight")
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
_RULE = "adapters are <module>.lora_A.weight and <module>.lora_B.weight of one rank, and one float32 scale"
_RESEND = "export and prepare again; if it repeats, look for what else writes the staging file."


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as it lies in its file."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def write_adapter_folder(name: str, manifest: WeightManifest) -> tuple[Path, str]:
    """Write the adapters of the manifest as a folder beside its file, for server `name`; (folder, digest of
    what was read).

    A folder of its own for each version: vLLM's prefix cache tells adapters apart by it. Raises EngineError.
    """
    folder = Path(manifest.path).with_name(f"{name}-adapter-{manifest.version}")
    try:
        with _open_tensors(Path(manifest.path)) as tensors:
            digest = weights_digest(
                (key, _DTYPES.get(one.dtype, one.dtype), one.shape, one.data) for key, one in tensors.items()
            )
            _check(name, manifest, tensors, digest)
            config = json.dumps(_config(name, manifest, tensors))
            remove_folder(folder)
            folder.mkdir()
            (folder / "adapter_config.json").write_text(config, encoding="utf-8")
            _write(
                folder / "adapter_model.safetensors",
                {f"base_model.model.{key}": one for key, one in tensors.items() if key != SCALE},
            )
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise EngineError(
            name, f"cannot make an adapter of {manifest.path}: {error}", rule=_RULE, way_out=_RESEND
        ) from error
    return folder, digest


def remove_folder(folder: Path) -> None:
    """Whether or not it is there."""
    shutil.rmtree(folder, ignore_errors=True)


def _check(name: str, manifest: WeightManifest, tensors: Mapping[str, Tensor], digest: str) -> None:
    found = (len(tensors), sum(len(one.data) for one in tensors.values()))
    if found != (manifest.num_tensors, manifest.num_bytes) or digest != manifest.digest:
        raise EngineError(
            name,
            f"{manifest.path} has {found[0]} tensors of {found[1]} bytes with digest {digest}, announced for "
            f"policy_version "
            f"{manifest.version} were {manifest.num_tensors} of {manifest.num_bytes} with {manifest.digest}",
            rule="a version is served only when what was loaded is what was sent",
            way_out=_RESEND,
        )


def _config(name: str, manifest: WeightManifest, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    modules = sorted(
        {key.removesuffix(suffix) for key in tensors for suffix in _SUFFIXES if key.endswith(suffix)}
    )
    ranks = {tensors[f"{module}.lora_A.weight"].shape[0] for module in modules}
    ranks |= {tensors[f"{module}.lora_B.weight"].shape[1] for module in modules}
    if len(tensors) != 2 * len(modules) + 1 or len(ranks) != 1 or tensors[SCALE].dtype != "F32":
        raise EngineError(
            name,
            f"{manifest.path} has {len(tensors)} tensors for adapters of {len(modules)} layers, of "
            f"ranks {sorted(ranks)}",
            rule=_RULE,
            way_out=_RESEND,
        )
    (rank,) = ranks
    (scale,) = struct.unpack("<f", tensors[SCALE].data)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "r": rank,
        "lora_alpha": scale * rank,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
    }


@contextmanager
def _open_tensors(path: Path) -> Iterator[dict[str, Tensor]]:
    """All tensors of a safetensors file, lying in it: 8 bytes length, a JSON header, the data."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        with memoryview(mapped) as view:
            (length,) = struct.unpack("<Q", view[:8])
            header = json.loads(bytes(view[8 : 8 + length]))
            header.pop("__metadata__", None)
            data = view[8 + length :]
            tensors = {
                key: Tensor(entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])])
                for key, entry in header.items()
            }
            try:
                yield tensors
            finally:
                for one in tensors.values():
                    one.data.release()
                data.release()


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for key, one in tensors.items():
        header[key] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [at, at + len(one.data)]}
        at += len(one.data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data is aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for one in tensors.values():
            file.write(one.data)


_ASK_AGAIN_S, _ASK_AGAIN_MAX_S = 0.01, 0.5


class Load(Protocol):
    """Weights of one version, staged, on their way into one process. All raise CallRefused, CallLost or
    EngineError.
    """

    version: int
    digest: str
    canary: Canary | None
    can_repeat: bool
    """Whether they can be staged and loaded once more."""
    model: str | None
    """What requests are to name once it is loaded."""

    async def stage(self, routes: Routes) -> str:
        """Bring them beside the serving ones, while generation goes on; the digest of what was read."""
        ...

    async def load(self, routes: Routes) -> None:
        """Make them the serving ones; nothing runs meanwhile."""
        ...


@dataclass
class FileLoad:
    """A whole set of weights in one file."""

    name: str
    manifest: WeightManifest
    chunk_bytes: int
    can_repeat: bool = field(default=True, init=False)
    model: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.version, self.digest, self.canary = (
            self.manifest.version,
            self.manifest.digest,
            self.manifest.canary,
        )

    async def stage(self, routes: Routes) -> str:
        """The workers hash in a thread, and are asked until they are done: an answer that waited would hold
        up generation.
        """
        manifest, wait_s = self.manifest, _ASK_AGAIN_S
        asked = {
            "version": manifest.version,
            "path": manifest.path,
            "digest": manifest.digest,
            "num_tensors": manifest.num_tensors,
            "num_bytes": manifest.num_bytes,
            "kind": manifest.kind,
        }
        await routes.rpc(
            "asyncrl_drop", {}
        )  # else a file that was staged before is not read again, whatever has become of it
        while True:
            workers = await routes.rpc("asyncrl_stage", asked)
            if all(worker.get("state") == "staged" for worker in workers):
                return one_digest(self.name, workers)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _ASK_AGAIN_MAX_S)

    async def load(self, routes: Routes) -> None:
        """One load call a chunk, in each worker."""
        asked = {"version": self.version, "digest": self.digest, "chunk_bytes": self.chunk_bytes}
        for worker in await routes.rpc("asyncrl_load", asked):
            found = worker.get("num_tensors"), worker.get("num_bytes")
            if found != (self.manifest.num_tensors, self.manifest.num_bytes):
                raise EngineError(
                    self.name,
                    f"loaded {found[0]} tensors of {found[1]} bytes for policy_version {self.version}, "
                    f"sent were {self.manifest.num_tensors} of {self.manifest.num_bytes}",
                    rule="a version is served only when all of it was loaded",
                )


@dataclass
class AdapterLoad:
    """Adapters for the weights that vLLM started with."""

    name: str
    manifest: WeightManifest
    before: Path | None
    """Folder of the adapter that serves now: not needed once this one does."""
    folder: Path | None = field(default=None, init=False)
    can_repeat: bool = field(default=True, init=False)
    model: str | None = field(default=ADAPTER, init=False)

    def __post_init__(self) -> None:
        self.version, self.digest, self.canary = (
            self.manifest.version,
            self.manifest.digest,
            self.manifest.canary,
        )

    async def stage(self, routes: Routes) -> str:
        """Written as a folder of peft, which vLLM reads."""
        self.folder, digest = await asyncio.to_thread(write_adapter_folder, self.name, self.manifest)
        return digest

    async def load(self, routes: Routes) -> None:
        """Under the name of the one before, in its place."""
        assert self.folder is not None, "stage() comes before load()"
        await routes.load_adapter(ADAPTER, str(self.folder))
        if self.before is not None and self.before != self.folder:
            await asyncio.to_thread(remove_folder, self.before)


@dataclass
class ChunkLoad:
    """What came chunk by chunk into weights that are awake and served by nobody."""

    name: str
    version: int
    digest: str
    canary: Canary | None
    can_repeat: bool = field(default=False, init=False)
    model: str | None = field(default=None, init=False)

    async def stage(self, routes: Routes) -> str:
        """There is nothing to stage: the chunks lie in the weights."""
        return self.digest

    async def load(self, routes: Routes) -> None:
        """Close the update; the workers say what came in all."""
        found = one_digest(self.name, await routes.rpc("asyncrl_finish_chunks", {"version": self.version}))
        if found != self.digest:
            raise EngineError(
                self.name,
                f"has chunks of policy_version {self.version} with digest {found}, the trainer sent "
                f"{self.digest}",
                rule="a version is served only when what was loaded is what was sent",
            )


def one_digest(name: str, workers: Sequence[Mapping[str, Any]]) -> str:
    """The digest on which all workers agree. Raises EngineError."""
    digests = {str(worker.get("digest", "")) for worker in workers}
    if len(digests) != 1 or "" in digests:
        raise EngineError(
            name,
            f"its workers say digests {sorted(digests)}",
            rule="all workers read the same bytes",
            way_out=f"read {name}'s log.",
        )
    return digests.pop()


# Weights that the trainer sends to all engines at once, through vLLM's own weight-transfer routes. Knows no
# device and no group.


class Meeting(Protocol):
    """Where engines wait until all of them are there and the trainer sends; publisher.Broadcasts is it."""

    def expect_nowait(self, name: str, version: int, num_workers: int) -> None:
        """The engine will receive the version."""
        ...

    def leave_nowait(self, name: str) -> None:
        """It will not. Idempotent."""
        ...

    async def receive(self, name: str, version: int, take: Callable[[GroupSeat], Awaitable[None]]) -> None:
        """Returns when it has the weights; `take` has its workers receive them. Raises EngineError."""
        ...


@dataclass
class BroadcastLoad:
    """A whole set of weights that nobody writes into a file.

    It comes once, for all engines: if the canary fails, it cannot be loaded again for one of them.
    """

    name: str
    manifest: WeightManifest
    meeting: Meeting
    can_repeat: bool = field(default=False, init=False)
    model: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.version, self.digest, self.canary = (
            self.manifest.version,
            self.manifest.digest,
            self.manifest.canary,
        )

    async def stage(self, routes: Routes) -> str:
        """Nothing is brought yet: it is said that this engine, with its workers, takes part. They compare the
        digest as they load.
        """
        workers = await routes.rpc("asyncrl_facts", {})
        self.meeting.expect_nowait(self.name, self.version, len(workers))
        return self.digest

    async def load(self, routes: Routes) -> None:
        """Wait for all others, then receive; a worker that gets something else refuses it."""
        expected = {
            "version": self.version,
            "digest": self.manifest.held_digest,
            "num_tensors": self.manifest.num_tensors,
            "num_bytes": self.manifest.num_bytes,
        }

        async def take(seat: GroupSeat) -> None:
            if seat.is_new:
                await routes.join_group(seat.model_dump())
            await routes.start_update()
            await routes.update_weights(expected)
            await routes.finish_update()

        await self.meeting.receive(self.name, self.version, take)
