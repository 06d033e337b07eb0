"""The weights of an embedded engine: staged beside the serving ones, or loaded into their memory chunk by
chunk; verified, served, put to sleep and read again.

The rule of what a set of weights is, the same on both ends: `dict(model.named_parameters())`, tied ones once.
Adapters (asyncrl/weights/adapters.py) change some of the weights that the server started with, which are kept
for it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.http import Refused
from asyncrl.messages.calls import LoadChunkRequest, PrepareRequest
from asyncrl.weights.adapters import linear_parameters, read_adapters
from asyncrl.weights.ipc import TrainerMemory
from asyncrl.weights.tensor_files import digest_of_tensor, digest_tensors, read_or_refuse
from asyncrl_servers.embedded.decoder import READ_ERRORS, LoadedModel, read_parameters
from asyncrl_servers.embedded.kv_memory import EmbeddedSpec
from asyncrl_servers.weight_state import Staged, WeightState, check_arrived


class Weights(WeightState):
    """The serving weights of a model, or their memory without content, or neither.

    Waits: none. stage() and load_chunk() run in any thread, all else in the thread that runs the model; what
        takes, fills or frees memory holds `_lock`.
    Invariant: until other weights are swapped in whole, `_base` holds those of the start, and nothing writes
        to them.
    """

    def __init__(self, loaded: LoadedModel, spec: EmbeddedSpec) -> None:
        self._parameters = dict(loaded.model.named_parameters())
        super().__init__(spec.start_version, self._parameters.keys())
        self._loaded, self._spec, self._has_adapters = loaded, spec, spec.has_adapters
        self._lock = threading.Lock()
        self._kinds = {name: (one.shape, one.dtype) for name, one in self._parameters.items()}
        self.num_bytes: int = sum(parameter.nbytes for parameter in self._parameters.values())
        self._linear = linear_parameters(loaded.model)
        self._base: dict[str, Tensor] | None = {name: one.data for name, one in self._parameters.items()}
        self._memory = TrainerMemory(loaded.device)

    @property
    def digest(self) -> str:
        """Of the serving weights; that of the start is computed when first asked for."""
        if not self._digest:
            self._digest = digest_tensors(self._parameters)
        return self._digest

    def stage(self, request: PrepareRequest) -> None:
        """Read and verify a set of weights or adapters; replaces the staged one. Raises Refused (400,
        409).
        """
        with self._lock:
            self.check_awake(f"policy_version {request.version} cannot be staged")
            self.staged, path = None, request.path
            tensors = self._read_file(path)
            if request.kind == "weights":
                self._check_parameters(tensors, path)
            digests = {name: digest_of_tensor(name, tensor) for name, tensor in tensors.items()}
            check_arrived(path, digests, sum(tensor.nbytes for tensor in tensors.values()), request)
            if request.kind == "lora":
                tensors = self._merge(tensors, path)
            self.staged = Staged(request, tensors)

    def swap(self, staged: Staged) -> None:
        """Make the staged weights the serving ones."""
        self._put(staged.tensors)
        if staged.request.kind == "lora":
            self._has_adapters = True
        else:
            self._base = None
        self.settle(staged.request.version, staged.request.digest, staged.request.path)

    def load_chunk(self, request: LoadChunkRequest) -> str:
        """Copy the tensors of a chunk into the weights; returns the digest of what is there. Raises Refused
        (400, 409), after which no chunk is.
        """
        with self._lock:
            self.check_may_load(request.version)
            with self.push.receiving(request, self.version):
                digests, num_bytes = {}, 0
                with self._chunk(request) as tensors:
                    self._check_parameters(tensors, request.place, is_part=True)
                    for name, tensor in tensors.items():
                        loaded = self._parameters[name].data.copy_(tensor)
                        digests[name] = digest_of_tensor(name, loaded)
                        num_bytes += tensor.nbytes
                return self.push.add(request, digests, num_bytes)

    def _chunk(self, request: LoadChunkRequest) -> AbstractContextManager[Mapping[str, Tensor]]:
        """The tensors of a chunk, wherever the trainer has put them. Raises Refused (400)."""
        if request.memory is not None:
            return self._memory.tensors(request.memory)
        return nullcontext({name: raw.as_torch() for name, raw in read_or_refuse(request.path).items()})

    def check_may_sleep(self) -> None:
        """Raise Refused (409) if these weights could not be restored after a sleep."""
        if self._has_adapters:
            raise Refused(
                409,
                "weights under adapters cannot sleep",
                rule="with weight_sync.transport=lora the weights of the start are kept",
                way_out="let the KV cache sleep alone, or set another weight_sync.transport.",
            )

    def free(self) -> int:
        """Free all weights, the staged ones included; returns their bytes."""
        with self._lock:
            _ = self.digest  # to compare with once they are restored
            held = [*self._parameters.values(), *(self._base or {}).values()]
            held += self.staged.tensors.values() if self.staged else []
            num_bytes = sum({tensor.data_ptr(): int(tensor.nbytes) for tensor in held}.values())
            self._base = None
            for name, (_, dtype) in self._kinds.items():
                self._parameters[name].data = torch.empty(0, dtype=dtype, device=self._loaded.device)
            self.set_asleep("weights")
            return num_bytes

    def take(self, *, must_restore: bool) -> int:
        """Take memory for all weights, filled with what served if they must be restored; returns the bytes
        that were not there. Raises Refused (400, 409) with nothing changed.
        """
        with self._lock:
            was_asleep = "weights" in self.asleep
            if must_restore:
                self._put(self._read_source())
                self.settle(self.version, self.digest, self.source)
            elif was_asleep:
                kinds, device = self._kinds.items(), self._loaded.device
                self._put(
                    {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in kinds}
                )
            self.set_awake("weights")
            return self.num_bytes if was_asleep else 0

    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.data = tensors[name]

    def _read_file(self, path: str) -> dict[str, Tensor]:
        """Copies, as the file may be replaced by the next export while these weights serve."""
        device, files = self._loaded.device, read_or_refuse(path)
        return {name: raw.as_torch().to(device, copy=True) for name, raw in files.items()}

    def _read_source(self) -> dict[str, Tensor]:
        """What served, read again. Raises Refused (400, 409)."""
        path, loaded, name = self.source or self._spec.model_path, self._loaded, self._spec.name
        if self.source:
            tensors = self._read_file(path)
        else:
            try:
                tensors = read_parameters(Path(path), loaded.dtype, loaded.device)
            except READ_ERRORS as error:
                what = f"{name}: cannot restore the weights of the start from {path}: {error}"
                raise Refused(409, what, way_out="put the folder back, or push.") from error
        self.check_restored(digest_tensors(tensors), path)
        if not self.source:
            self._base = dict(tensors)
        return tensors

    def _check_parameters(self, tensors: Mapping[str, Tensor], path: str, *, is_part: bool = False) -> None:
        """Raise Refused (409) if the tensors of a file are not the parameters; `is_part`: some of them."""
        missing = [] if is_part else sorted(self._kinds.keys() - tensors.keys())
        unknown = sorted(tensors.keys() - self._kinds.keys())
        if missing or unknown:
            raise Refused(
                409,
                f"{path} lacks {len(missing)} parameters {missing[:3]} and has {len(unknown)} unknown ones "
                f"{unknown[:3]}",
                rule="a set of weights is dict(model.named_parameters()), tied ones once",
                way_out="use the same model in trainer and engine.",
            )
        for name, tensor in tensors.items():
            shape, dtype = self._kinds[name]
            if tensor.shape != shape or tensor.dtype != dtype:
                raise Refused(
                    409,
                    f"{name} in {path} is {tensor.dtype} {tuple(tensor.shape)}, the model has {dtype} "
                    f"{tuple(shape)}",
                    rule="trainer and engine hold the same model in the same dtype",
                    way_out="set model.dtype to the same for both.",
                )

    def _merge(self, tensors: dict[str, Tensor], path: str) -> dict[str, Tensor]:
        """All parameters, adapters merged over the weights of the start. Raises Refused (409)."""
        base = self._base
        if base is None:
            raise Refused(
                409,
                f"{path} holds adapters, and this server no longer has the weights that it started with",
                rule="adapters are merged over the weights of the start, which a publish of whole weights "
                "replaces",
                way_out="start the server again, or publish whole weights.",
            )
        adapters = read_adapters(tensors, self._parameters, self._linear, path)
        return base | {one.parameter: one.merged(base[one.parameter]) for one in adapters}
