"""Mixin for vLLM's workers (--worker-extension-cls): methods for POST /collective_rpc.

Importing it patches vLLM. Methods take one JSON text and return `ok` or `error`
(plus rule and way_out). Raising would end the engine.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    get_layerwise_info,
    make_online_process_loader,
)
from vllm.model_executor.model_loader.reload.meta import (
    SKIP_LOAD_TENSORS,
    CopyCounter,
)
from vllm.model_executor.model_loader.reload.utils import get_layer_size
from vllm.platforms import current_platform

from asyncrl.base.host import available_memory
from asyncrl.base.http import Refused
from asyncrl.messages.engine_api import LoadChunkRequest, PrepareRequest
from asyncrl.weights.export import write_peft
from asyncrl.weights.host_memory import HostMemory
from asyncrl.weights.ipc import TrainerMemory, lay_out, views
from asyncrl.weights.nccl import WeightGroup
from asyncrl.weights.tensor_files import digest_and_size, dtype_name
from asyncrl_servers.vllm.loaded_parts import Expected, LoadedParts
from asyncrl_servers.vllm.monkeypatches import (
    patch_adapters,
    patch_device_penalties,
    patch_gemma3n,
    patch_penalties,
    patch_reload,
    patch_worker,
)
from asyncrl_servers.weight_state import (
    PUSH_AGAIN,
    Arrived,
    ChunkedPush,
    Staged,
    check_arrived,
    require_staged,
    take_announced,
)

patch_penalties()
patch_gemma3n()
patch_adapters()
patch_reload()
if current_platform.is_cpu():
    patch_worker()
    # vLLM's bfloat16 attention uses AMX where the CPU has it, and Linux admits only
    # processes that have asked. Without this the worker dies of SIGILL.
    torch.cpu._init_amx()
else:
    patch_device_penalties()


class Loader:
    """Weights of one worker, by vLLM's layerwise reload: it restores a layer, buffers
    its tensors, and packs it when complete. Plain `model.load_weights` fails after
    packing.

    Life: idle -> staging (checked in a thread) -> staged -> load -> idle; or idle -> open (chunks) ->
        finished -> idle; or a whole broadcast. The model cannot compute while an update is open.
    Invariant: a load succeeds only if every parameter received all its elements, and holds this worker's part
        of the sent tensors (LoadedParts).
    """

    pins: bool | None = None
    """Stage weights in pinned host memory: 4B load in an estimated 0.3 s instead of 1.6
    s. Set at the first stage: on CUDA, if the memory of all workers is at most half of
    the available host memory.
    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self._memory = TrainerMemory(worker.device)
        self._host = HostMemory(worker.device)
        workers = (
            get_tensor_model_parallel_rank(),
            get_tensor_model_parallel_world_size(),
        )
        self.parts = LoadedParts(self.model, *workers)
        self._expected: Expected = {}
        """Parts that this worker must hold when the open update ends."""
        self._push = ChunkedPush()
        self._group: WeightGroup | None = None
        # One thread: /collective_rpc holds up the engine's loop, so staging runs here,
        # and the client asks for its state.
        self._staging = ThreadPoolExecutor(1, "stage weights")
        self._checked: Future[tuple[dict[str, str], Mapping[str, Tensor], Expected]] = (
            Future()
        )
        self._scales: dict[str, float] = {}
        """Scales by adapter. Not empty: pushes are of adapters."""
        self._folders: dict[str, list[str]] = {}
        """Of the last two versions, by adapter."""
        self._adapter: dict[str, Tensor] = {}
        """Of a push that is not whole yet."""
        self._staged: Staged | None = None
        self._open_version: int | None = None
        self._owners: set[str] = set()
        """Layers with parameters of their own, while an update is open."""
        self._cpu_experts: dict[Any, object] = {}
        """Kernels of expert layers, while an update is open."""

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self.worker.model_runner.get_model()
        return model

    # ---- calls of the client

    def facts(self, scales: dict[str, float]) -> dict[str, int]:
        """`scales`: of all open adapters. Folders of others are removed."""
        self._scales = scales
        for adapter in self._folders.keys() - scales.keys():
            for folder in self._folders.pop(adapter):
                shutil.rmtree(folder, ignore_errors=True)
        return {"vocab_size": self.worker.vllm_config.model_config.get_vocab_size()}

    def stage(self, *, is_new: bool, **fields: Any) -> dict[str, str]:
        """Begin to stage a PrepareRequest's file or memory, or report progress; call
        again until the state is `staged`. Raises Refused.
        """
        if is_new:
            self._staged = None
            request = PrepareRequest(**fields)
            self._staged = Staged(request, self._memory.tensors(request))
            self._checked = self._staging.submit(self._check, self._staged)
        # No wait here: no token is sampled during a call.
        if not self._checked.done():
            return {"state": "staging"}
        return {"state": "staged", **self._checked.result()[0]}

    def _check(
        self, staged: Staged
    ) -> tuple[dict[str, str], Mapping[str, Tensor], Expected]:
        """Return the answer, and the tensors to load with what the parameters must hold
        then.
        """
        request, tensors = staged.request, staged.tensors
        is_adapter = bool(self._scales)
        # Memory of the trainer is on this device already.
        if request.memory is None and not is_adapter:
            tensors = self._pinned(tensors)
        # After the copy, so that the digest is of the bytes that will be loaded.
        arrived = digest_and_size(tensors)
        digest = check_arrived(request.place, arrived, request)
        if is_adapter:
            written = self._written(tensors, request.adapter)
            return {"digest": digest, **written}, tensors, {}
        return {"digest": digest}, tensors, self.parts.expected(tensors, arrived[0])

    def _written(self, tensors: Mapping[str, Tensor], adapter: str) -> dict[str, str]:
        """Write a peft folder."""
        folders = self._folders.setdefault(adapter, [])
        folders.append(tempfile.mkdtemp(prefix="adapter-"))
        write_peft(tensors, self._scales[adapter], Path(folders[-1]))
        # Two stay: the serving version and the staged version.
        for old in folders[:-2]:
            shutil.rmtree(old, ignore_errors=True)
        del folders[:-2]
        return {"folder": folders[-1]}

    def _pinned(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Copy the tensors to host memory that later pushes use again. A device reads
        it at full speed; from a file's pages the driver first copies to pinned memory
        of its own, while no token is sampled.
        """
        entries = [
            (name, dtype_name(one.dtype), list(one.shape))
            for name, one in tensors.items()
        ]
        placed, num_bytes = lay_out(entries)
        if self.pins is None:
            num_workers = self.worker.vllm_config.parallel_config.world_size
            self.pins = self.worker.device.type == "cuda"
            # Every worker pins all weights, and pinned memory cannot be swapped out.
            self.pins &= 2 * num_bytes * num_workers <= available_memory()
        if not self.pins:
            return tensors
        try:
            memory = self._host.of(num_bytes)
        except (MemoryError, RuntimeError):
            self.pins = False  # the host refuses: only slower
            return tensors
        copies = views(placed, memory)
        for name, tensor in tensors.items():
            copies[name].copy_(tensor)
        return copies

    def load(self, version: int, digest: str) -> None:
        # Before the update is opened: a refusal here leaves the old weights in place.
        require_staged(self._staged, version, digest)
        # Done: the client commits only what every worker has reported as staged.
        _, tensors, expected = self._checked.result()
        self._begin(version)
        self._expected = expected
        with self._changing():
            self.add(tensors)
            self._finish()
        # Loaded once. `_checked` holds the tensors, and so the file, until the next stage.
        self._staged = None

    def load_chunk(self, **fields: Any) -> dict[str, str]:
        """Load from a file or shared memory; chunk 0 opens an update. Raises Refused."""
        request = LoadChunkRequest(**fields)
        # A failure has closed the update. ChunkedPush then refuses this chunk, which
        # has no update to go into.
        if request.index and self._open_version is None:
            self._push.clear()
        tensors: dict[str, Tensor] = {}
        digests: dict[str, bytes] = {}

        def read(request: LoadChunkRequest) -> Arrived:
            # Copy: vLLM keeps tensors until their layer is complete, and the next chunk
            # may overwrite them.
            with self._memory.opened(request) as found:
                tensors.update({name: view.clone() for name, view in found.items()})
            arrived = digest_and_size(tensors)
            digests.update(arrived[0])
            return arrived

        digest = self._push.load(request, read)
        # Only now: a corrupt first chunk does not touch the model.
        if request.index == 0:
            self._begin(request.version)
        with self._changing():
            self._take(tensors, digests)
        return {"digest": digest}

    def finish_chunks(self, version: int, digest: str, adapter: str) -> dict[str, str]:
        """Close the update, which must be the whole push. Raises Refused."""
        if self._open_version != version:
            rule = "chunk 0 opens an update"
            raise Refused(
                409,
                f"no update of version {version} is open",
                rule=rule,
                way_out=PUSH_AGAIN,
            )
        with self._changing():
            self._push.take(version, digest)
            return self._finish(adapter)

    def receive(self, **fields: Any) -> dict[str, str]:
        """Receive a broadcast and load it. Raises Refused or GroupBroken."""
        request = PrepareRequest(**fields)
        member = request.member
        assert member is not None, "a broadcast has members"
        if member.is_new:
            if self._group is not None:
                self._group.close()
            config = self.worker.vllm_config.parallel_config
            # The member's rank is the rank of this engine's first worker.
            rank = (
                member.rank
                + config.data_parallel_index * config.world_size
                + config.rank
            )
            self._group = WeightGroup(
                member.model_copy(update={"rank": rank}), self.worker.device
            )
        assert self._group is not None, "the first broadcast forms the group"

        def take(sent: dict[str, Tensor]) -> Arrived:
            arrived = digest_and_size(sent)
            self._take(sent, arrived[0])
            return arrived

        self._begin(request.version)
        with self._changing():
            take_announced(self._group.receive(), request, "the broadcast", take)
            return self._finish(request.adapter)

    def check_adapter(self, adapter: str) -> None:
        """Raise Refused if vLLM ignores layers of the adapter that was just loaded, as
        it does without a word.
        """
        manager = self.worker.model_runner.lora_manager._adapter_manager
        # vLLM's numbers do not tell which of them is new. The others have passed this.
        for number, loaded in manager.list_adapters().items():
            if unused := sorted(loaded.loras.keys() - manager.modules.keys()):
                manager.remove_adapter(number)
                what = f"vLLM uses no adapters of {len(unused)} layers, like {unused[0]} of {adapter!r}"
                rule = "an engine computes with all adapters that are trained"
                way_out = "name other layers in trainer.lora.targets, or set rollout.engine=embedded."
                raise Refused(409, what, rule=rule, way_out=way_out)

    # ---- updates

    def _begin(self, version: int) -> None:
        """Open an update; close an open one."""
        if self._open_version is not None:
            self._close()
        self._open_version = version
        self._expected = {}
        self._adapter = {}
        if self._scales:
            return  # vLLM itself swaps adapters
        # A tied parameter is listed once. Layers without parameters compute their
        # buffers.
        self._owners = {
            name.rpartition(".")[0] for name, _ in self.model.named_parameters()
        }
        for parameter in self.model.parameters():
            loader = getattr(parameter, "weight_loader", None)
            if isinstance(loader, partial):
                loader.__name__ = "partial"  # type: ignore[attr-defined]  # the reload asks for it
        with self._changing(), self._loading():
            initialize_layerwise_reload(self.model)
            for layer in self.model.modules() if current_platform.is_cpu() else ():
                method = getattr(layer, "quant_method", None)
                if kernel := getattr(method, "moe_kernel", None):
                    # vLLM packs experts on CPU only at the first load.
                    self._cpu_experts[method] = kernel
                    method.moe_kernel = None  # type: ignore[union-attr]
            for parameter in self._uncounted().values():
                parameter.fill_(torch.nan)

    def _take(
        self, tensors: Mapping[str, Tensor], digests: Mapping[str, bytes]
    ) -> None:
        """Take a part of the open update, in memory that may be overwritten later."""
        if self._scales:
            self._adapter |= {name: one.clone() for name, one in tensors.items()}
            return
        self._expected |= self.parts.expected(tensors, digests)
        self.add(tensors)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        with self._loading(), DirectCopies(self.model):
            self.model.load_weights(iter(tensors.items()))  # type: ignore[operator]  # every vLLM model defines it

    def _finish(self, adapter: str = "") -> dict[str, str]:
        """Return the folder of an adapter. Raise Refused if a parameter is incomplete, or
        holds other bytes than were sent.
        """
        version = self._open_version
        if self._scales:
            self._close()
            return self._written(self._adapter, adapter)
        rule = "the weights of this server are of no version until a load succeeds"
        way_out = "load a whole set again, or restart it."
        # vLLM's load_weights does not object to missing tensors.
        if missing := self.incomplete():
            what = f"version {version} lacks {len(missing)} parameters: {missing[:5]}"
            raise Refused(409, what, rule=rule, way_out=way_out)
        self._close()
        # After _close: only then have parameters their computing form.
        if wrong := self.parts.wrong(self._expected):
            what = f"worker {self.worker.rank} does not hold {len(wrong)} tensors of version {version} "
            what += f"as they were sent: {wrong[:5]}"
            raise Refused(409, what, rule=rule, way_out=way_out)
        return {}

    def _uncounted(self) -> dict[str, nn.Parameter]:
        """Return parameters that vLLM loads in place, without counting elements."""
        return {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if name.rpartition(".")[2] in SKIP_LOAD_TENSORS
        }

    def incomplete(self) -> list[str]:
        missing = [
            name
            for name, parameter in self._uncounted().items()
            if parameter.isnan().any()
        ]
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            if (
                name not in self._owners
                or not info.can_load()
                or info.load_numel >= num_loadable(layer)
                or is_deferred_attention_layer(layer)
            ):
                continue  # nothing to load, or complete (then it is packed already)
            # Vocabulary padding is in no file.
            is_padded = hasattr(layer, "num_embeddings_padded")
            if info.load_numel == 0 or not is_padded:
                missing.append(
                    f"{name} ({info.load_numel} of {info.load_numel_total} elements)"
                )
        return missing

    def repack_tied(self) -> None:
        """Repack an output layer that shares the embedding's weight: the load packs
        only the embedding.
        """
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for name, layer in self.model.named_modules():
            if name in self._owners:
                continue
            weight = getattr(layer, "weight", None)
            is_matrix = (
                isinstance(weight, Tensor) and weight.numel() > 0 and weight.dim() == 2
            )
            if hasattr(layer, "cpu_linear") and is_matrix:
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)

    def _close(self) -> None:
        """Restore the computing form, complete or not."""
        self._open_version = None
        if self._scales:
            return
        with self._loading():
            # Also for an incomplete update: a layer without tensors would end the
            # engine at the next request.
            finalize_layerwise_reload(self.model, self.worker.model_runner.model_config)
            for method, kernel in self._cpu_experts.items():
                method.moe_kernel = kernel
            self._cpu_experts.clear()
            if current_platform.is_cpu():
                self.repack_tied()
            else:
                torch.cuda.synchronize()

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        worker = self.worker
        with (
            torch.no_grad(),
            set_current_vllm_config(worker.vllm_config),
            torch.device(worker.device),
        ):
            yield

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Close the open update on failure: the next request would end the engine."""
        try:
            yield
        except Exception:
            self._close()
            raise


class DirectCopies(TorchFunctionMode):
    """Make `parameter.copy_(tensor)` of a model's load_weights a load, as GPT-OSS does
    it.

    The layerwise reload takes parameters' memory away, and knows what goes through
    their loaders.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._places = {
            id(parameter): (parameter, layer, name)
            for layer in model.modules()
            for name, parameter in layer.named_parameters(recurse=False)
        }
        self._latest: tuple[object, object] = (None, None)
        """`parameter.data` and the parameter, of the latest access."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # A loader may copy into memory that does not exist: its copies are counted.
        is_loader = isinstance(_get_current_dispatch_mode(), CopyCounter)
        if func == Tensor.copy_ and args[0].is_meta and not is_loader:
            data, owner = self._latest
            target = owner if args[0] is data else args[0]
            if (place := self._places.get(id(target))) is not None:
                parameter, layer, name = place
                parameter.weight_loader = copy_whole  # type: ignore[attr-defined]
                make_online_process_loader(layer, name)(parameter, args[1])
                return args[0]
        result = func(*args, **(kwargs or {}))
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            self._latest = (result, args[0])
        return result


def copy_whole(param: Tensor, loaded_weight: Tensor) -> None:
    """Load a parameter. The reload replaces the argument `param`."""
    param.data.copy_(loaded_weight)


def num_loadable(layer: nn.Module) -> int:
    """Return the number of elements that weights have for a layer. Buffers outside of
    its state are computed.
    """
    computed = layer._non_persistent_buffers_set - SKIP_LOAD_TENSORS
    buffers = [layer._buffers.get(name) for name in computed]
    num_computed = sum(one.numel() for one in buffers if one is not None)
    num_elements: int = get_layer_size(layer)
    return num_elements - num_computed


def _rpc(name: str) -> Callable[..., dict[str, object]]:
    """Return a worker's method that calls a method of its Loader with the fields of a
    JSON text.
    """

    def call(worker: WeightLoader, request: str) -> dict[str, object]:
        try:
            return {
                "ok": True,
                **(getattr(worker.asyncrl_loader, name)(**json.loads(request)) or {}),
            }
        except Refused as refusal:
            # As an answer: an exception in a worker ends vLLM's engine, and the other
            # workers wait for it.
            return refusal.body.model_dump()
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            return {"error": what, "rule": "", "way_out": "see this server's log."}

    return call


class WeightLoader:
    asyncrl_loader_class = Loader
    asyncrl_facts = _rpc("facts")
    asyncrl_stage = _rpc("stage")
    asyncrl_load = _rpc("load")
    asyncrl_load_chunk = _rpc("load_chunk")
    asyncrl_finish_chunks = _rpc("finish_chunks")
    asyncrl_receive = _rpc("receive")
    asyncrl_check_adapter = _rpc("check_adapter")

    @cached_property
    def asyncrl_loader(self) -> Loader:
        return self.asyncrl_loader_class(self)
