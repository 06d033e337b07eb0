"""How weights that the trainer has exported get into vLLM: a file through our worker extension, chunks, an
adapter, a broadcast. Knows no pause and no version's end.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import struct
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from asyncrl.engines.vllm.vllm_routes import Routes
from asyncrl.errors import EngineError
from asyncrl.messages.base import GroupSeat, weights_digest
from asyncrl.messages.trainer_calls import ExportResponse
from asyncrl.weights.tensor_files import RESEND, RawTensor, read_tensors, safetensors_head

ADAPTER = "policy-adapter"
SCALE = "scale"
_ASK_AGAIN_S, _ASK_AGAIN_MAX_S = 0.01, 0.5
_LOADED_RULE = "a version is served only when what was loaded is what was sent"
_SUFFIXES = (".lora_A.weight", ".lora_B.weight")
_ADAPTER_RULE = (
    "adapters are <module>.lora_A.weight and <module>.lora_B.weight of one rank, and one float32 scale"
)


class Load:
    """Weights of one version on their way into one process: staged, beside the serving ones and while
    generation goes on; then loaded, while nothing runs. Both raise CallRefused, CallLost or EngineError.

    stage() returns the digest of what was read. `can_repeat`: both can be done once more; `model`: what
    requests are to name once they are loaded.
    """

    can_repeat = False
    model: str | None = None

    def __init__(self, name: str, manifest: ExportResponse) -> None:
        self.name, self.manifest = name, manifest
        self.version, self.digest, self.canary = manifest.version, manifest.digest, manifest.canary

    async def stage(self, routes: Routes) -> str:
        raise NotImplementedError

    async def load(self, routes: Routes) -> None:
        raise NotImplementedError


class FileLoad(Load):
    """A whole set of weights in one file."""

    can_repeat = True

    def __init__(self, name: str, manifest: ExportResponse, chunk_bytes: int) -> None:
        super().__init__(name, manifest)
        self._chunk_bytes = chunk_bytes

    async def stage(self, routes: Routes) -> str:
        """The workers hash in a thread, and are asked until they are done: an answer that waited would hold
        up generation.
        """
        wait_s = _ASK_AGAIN_S
        names = {"version", "path", "digest", "num_tensors", "num_bytes", "kind"}
        asked = self.manifest.model_dump(include=names)
        await routes.rpc("asyncrl_drop", {})  # else a file that was staged before is not read again
        while True:
            workers = await routes.rpc("asyncrl_stage", asked)
            if all(worker.get("state") == "staged" for worker in workers):
                return str(workers[0]["digest"])  # each worker has compared it with the announced one
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _ASK_AGAIN_MAX_S)

    async def load(self, routes: Routes) -> None:
        """One load call a chunk, in each worker, which refuses what is not whole."""
        asked = {"version": self.version, "digest": self.digest, "chunk_bytes": self._chunk_bytes}
        await routes.rpc("asyncrl_load", asked)


class ChunkLoad(Load):
    """What came chunk by chunk into weights that are awake and not served: nothing is to be staged."""

    async def load(self, routes: Routes) -> None:
        """Close the update; the workers refuse it if it is not whole."""
        await routes.rpc("asyncrl_finish_chunks", {"version": self.version, "digest": self.digest})


class Meeting(Protocol):
    """Where engines wait until all of them are there and the trainer sends: sync.broadcast.Broadcasts."""

    def expect_nowait(self, name: str, version: int, num_workers: int) -> None: ...
    def leave_nowait(self, name: str) -> None: ...
    async def receive(
        self, name: str, version: int, take: Callable[[GroupSeat], Awaitable[None]]
    ) -> None: ...


class BroadcastLoad(Load):
    """A whole set of weights that the trainer sends once, to all engines, through vLLM's own weight-transfer
    routes. If the canary fails, it cannot be loaded again for one of them.
    """

    def __init__(self, name: str, manifest: ExportResponse, meeting: Meeting) -> None:
        super().__init__(name, manifest)
        self._meeting = meeting

    async def stage(self, routes: Routes) -> str:
        """Nothing is brought yet: this engine, with its workers, will take part. They compare the digest as
        they load.
        """
        workers = await routes.rpc("asyncrl_facts", {})
        self._meeting.expect_nowait(self.name, self.version, len(workers))
        return self.digest

    async def load(self, routes: Routes) -> None:
        """Wait for all others, then receive; a worker that gets something else refuses it."""
        expected = self.manifest.model_dump(include={"version", "digest", "num_tensors", "num_bytes"})

        async def take(seat: GroupSeat) -> None:
            if seat.is_new:
                await routes.tell("/init_weight_transfer_engine", {"init_info": seat.model_dump()})
            await routes.tell("/start_weight_update")
            await routes.tell("/update_weights", {"update_info": expected})
            await routes.tell("/finish_weight_update", {})

        await self._meeting.receive(self.name, self.version, take)


class AdapterLoad(Load):
    """Adapters for the weights that vLLM started with, as a folder of peft made of the trainer's file
    (asyncrl/weights/adapters.py). `before`: the folder of the adapter that serves now, which is not needed
    once this one does.
    """

    can_repeat = True
    model = ADAPTER

    def __init__(self, name: str, manifest: ExportResponse, before: Path | None) -> None:
        super().__init__(name, manifest)
        self._before = before
        self.folder = Path(manifest.path).with_name(f"{name}-adapter-{manifest.version}")
        """One for each version: vLLM's prefix cache tells adapters apart by it."""

    async def stage(self, routes: Routes) -> str:
        return await asyncio.to_thread(write_adapter_folder, self.name, self.manifest, self.folder)

    async def load(self, routes: Routes) -> None:
        """Under the name of the one before, in its place."""
        adapter = {"lora_name": ADAPTER, "lora_path": str(self.folder), "load_inplace": True}
        await routes.tell("/v1/load_lora_adapter", adapter)
        if self._before is not None and self._before != self.folder:
            await asyncio.to_thread(shutil.rmtree, self._before, ignore_errors=True)


def write_adapter_folder(name: str, manifest: ExportResponse, folder: Path) -> str:
    """Write the adapters of the manifest as a folder of peft, for server `name`; returns the digest of what
    was read. Raises EngineError.
    """
    try:
        tensors = read_tensors(Path(manifest.path))
        digest = weights_digest((key, one.dtype, one.shape, one.data) for key, one in tensors.items())
        if digest != manifest.digest:
            raise EngineError(
                name,
                f"{manifest.path} has digest {digest}, announced for policy_version {manifest.version} was "
                f"{manifest.digest}",
                rule=_LOADED_RULE,
                way_out=RESEND,
            )
        config = json.dumps(_peft_config(tensors))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "adapter_config.json").write_text(config, encoding="utf-8")
        weights = {f"base_model.model.{key}": one for key, one in tensors.items() if key != SCALE}
        with (folder / "adapter_model.safetensors").open("wb") as file:
            file.write(safetensors_head((key, one.dtype, one.shape) for key, one in weights.items()))
            for one in weights.values():
                file.write(one.data)
    except (OSError, ValueError, KeyError, struct.error) as error:
        what = f"cannot make an adapter of {manifest.path}: {error}"
        raise EngineError(name, what, rule=_ADAPTER_RULE, way_out=RESEND) from error
    return digest


def _peft_config(tensors: Mapping[str, RawTensor]) -> dict[str, Any]:
    """Raises ValueError or KeyError for what are no adapters."""
    modules = sorted({key.removesuffix(end) for key in tensors for end in _SUFFIXES if key.endswith(end)})
    ranks = {tensors[f"{module}.lora_A.weight"].shape[0] for module in modules}
    ranks |= {tensors[f"{module}.lora_B.weight"].shape[1] for module in modules}
    if len(tensors) != 2 * len(modules) + 1 or len(ranks) != 1 or tensors[SCALE].dtype != "float32":
        raise ValueError(f"{len(tensors)} tensors for adapters of {len(modules)} layers, of ranks {ranks}")
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
