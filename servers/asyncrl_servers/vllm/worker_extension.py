"""Mixin for vLLM's workers (--worker-extension-cls): methods for POST /collective_rpc.

Importing it patches vLLM on CPU. Methods take one JSON text and return `ok` or `error` (plus rule and
way_out). Raising would end the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

from asyncrl.base.http import Refused
from asyncrl.messages.engine_api import GroupMember, PrepareRequest
from asyncrl.weights.nccl import WeightGroup
from asyncrl.weights.tensor_files import digest_and_size
from asyncrl_servers.vllm.loader import Loader
from asyncrl_servers.vllm.monkeypatches import patch_worker
from asyncrl_servers.weight_state import Arrived, take_announced

if current_platform.is_cpu():
    patch_worker()


class WeightLoader:
    asyncrl_loader_class = Loader

    @cached_property
    def asyncrl_loader(self) -> Loader:
        return self.asyncrl_loader_class(self)

    def asyncrl_facts(self, _: str = "{}") -> dict[str, Any]:
        """`broken`: why the weights have no version."""
        worker: Any = self

        def facts() -> dict[str, Any]:
            vocab_size = worker.vllm_config.model_config.get_vocab_size()
            return {"extension": 1, "vocab_size": vocab_size, "broken": self.asyncrl_loader.broken}

        return _answer(facts, "{}")

    def asyncrl_stage(self, request: str) -> dict[str, Any]:
        """Stage a weights file; call again until the state is `staged`."""
        return _answer(self.asyncrl_loader.stage, request)

    def asyncrl_load(self, request: str) -> dict[str, Any]:
        return _answer(self.asyncrl_loader.load, request)

    def asyncrl_load_chunk(self, request: str) -> dict[str, Any]:
        return _answer(self.asyncrl_loader.load_chunk, request)

    def asyncrl_finish_chunks(self, request: str) -> dict[str, Any]:
        return _answer(self.asyncrl_loader.finish_chunks, request)

    def asyncrl_drop(self, request: str = "{}") -> dict[str, Any]:
        return _answer(self.asyncrl_loader.drop, request)


def _answer(method: Callable[..., dict[str, Any] | None], request: str) -> dict[str, Any]:
    try:
        return {"ok": True, **(method(**json.loads(request)) or {})}
    except Refused as refusal:
        return refusal.body.model_dump()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "rule": "", "way_out": "see this server's log."}


class BroadcastEngine(WeightTransferEngine[Any, Any]):  # type: ignore[misc]
    """Backend for vLLM's native weight transfer (weight_sync.transport=nccl).

    It checks digest and completeness, unlike vLLM's backends, which also need CUDA. After a failure the
    route answers 500.
    """

    init_info_cls = GroupMember
    update_info_cls = PrepareRequest
    _group: WeightGroup | None = None

    def init_transfer_engine(self, init_info: GroupMember) -> None:
        """Join a new group. `rank`: of this engine's first worker."""
        self.shutdown()
        config = self.parallel_config
        rank = init_info.rank + config.data_parallel_index * config.world_size + config.rank
        self._group = WeightGroup(init_info.model_copy(update={"rank": rank}), self.device)

    def start_weight_update(self) -> None:
        runner = SimpleNamespace(get_model=lambda: self.model, model_config=self.model_config)
        worker = SimpleNamespace(model_runner=runner, vllm_config=self.vllm_config, device=self.device)
        self._loader = Loader(worker)
        self._loader.begin(-1)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive all weights. vLLM's method would synchronize an accelerator, which fails on CPU."""
        try:
            self.receive_weights(PrepareRequest(path="the broadcast", **update_info))
        except Exception:
            self._loader.drop()  # vLLM ends the update, so the layers need tensors
            raise

    def receive_weights(self, update_info: PrepareRequest) -> None:
        assert self._group is not None, "this worker has no member: POST /init_weight_transfer_engine first"

        def take(sent: dict[str, Tensor]) -> Arrived:
            arrived = digest_and_size(sent)
            self._loader.add(sent.items())
            return arrived

        take_announced(self._group.receive(), update_info, update_info.path, take)

    def finish_weight_update(self) -> None:
        self._loader.finish()

    def shutdown(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


if "broadcast" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("broadcast", BroadcastEngine)
