"""The ways in which weights get into vLLM: a file through our worker extension, chunks, an adapter. Knows no pause and no version's end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from asyncrl.engines.vllm.adapters import ADAPTER, remove_folder, write_adapter_folder
from asyncrl.engines.vllm.routes import Routes
from asyncrl.errors import EngineError
from asyncrl.types import WeightManifest
from asyncrl.wire import Canary

_ASK_AGAIN_S, _ASK_AGAIN_MAX_S = 0.01, 0.5


class Load(Protocol):
    """Weights of one version, staged, on their way into one process. All raise CallRefused, CallLost or EngineError."""

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
        self.version, self.digest, self.canary = self.manifest.version, self.manifest.digest, self.manifest.canary

    async def stage(self, routes: Routes) -> str:
        """The workers hash in a thread, and are asked until they are done: an answer that waited would hold up generation."""
        manifest, wait_s = self.manifest, _ASK_AGAIN_S
        asked = {
            "version": manifest.version, "path": manifest.path, "digest": manifest.digest,
            "num_tensors": manifest.num_tensors, "num_bytes": manifest.num_bytes, "kind": manifest.kind,
        }  # fmt: skip
        await routes.rpc("asyncrl_drop", {})  # else a file that was staged before is not read again, whatever has become of it
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
        self.version, self.digest, self.canary = self.manifest.version, self.manifest.digest, self.manifest.canary

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
                f"has chunks of policy_version {self.version} with digest {found}, the trainer sent {self.digest}",
                rule="a version is served only when what was loaded is what was sent",
            )


def one_digest(name: str, workers: Sequence[Mapping[str, Any]]) -> str:
    """The digest on which all workers agree. Raises EngineError."""
    digests = {str(worker.get("digest", "")) for worker in workers}
    if len(digests) != 1 or "" in digests:
        raise EngineError(
            name, f"its workers say digests {sorted(digests)}", rule="all workers read the same bytes", way_out=f"read {name}'s log."
        )
    return digests.pop()
