"""A backend for vLLM's native weight transfer: what the trainer sends to all workers at once
(weight_sync.transport=nccl).

POST /init_weight_transfer_engine {"init_info": {}}, /start_weight_update, /update_weights {"update_info":
..}, /finish_weight_update. It loads as our extension does (loader.py): the digest is compared, and every
parameter must have got its elements. A failure here is vLLM's: the route answers 500. vLLM's own backends,
nccl and ipc, do neither, and work on CUDA alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from asyncrl.http import Refused
from asyncrl.messages.base import GroupSeat, joint_digest
from asyncrl.weights.nccl import WeightGroup
from asyncrl.weights.tensor_files import digest_of_tensor
from asyncrl_servers.checks import wrong_digest
from asyncrl_servers.vllm.loader import Loader, check_counts

BROADCAST = "broadcast"


@dataclass
class BroadcastInit(WeightTransferInitInfo):  # type: ignore[misc]
    """A messages.base.GroupSeat; `rank` is that of this engine's first worker."""

    path: str
    size: int
    rank: int
    is_new: bool
    timeout_s: float


@dataclass
class BroadcastUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What is to come, and what it must be."""

    version: int
    digest: str
    num_tensors: int
    num_bytes: int


class BroadcastEngine(WeightTransferEngine[Any, Any]):  # type: ignore[misc]
    """Every worker receives all that the trainer sends, and loads its part."""

    init_info_cls = BroadcastInit
    update_info_cls = BroadcastUpdate
    _group: WeightGroup | None = None

    def init_transfer_engine(self, init_info: BroadcastInit) -> None:
        """Take this worker's seat in a new group; returns when all have taken theirs."""
        self.shutdown()
        config = self.parallel_config
        rank = init_info.rank + config.data_parallel_index * config.world_size + config.rank
        seat = GroupSeat(
            path=init_info.path, size=init_info.size, rank=rank, is_new=True, timeout_s=init_info.timeout_s
        )
        self._group = WeightGroup(seat, self.device)

    def start_weight_update(self) -> None:
        """Open an update."""
        runner = SimpleNamespace(get_model=lambda: self.model, model_config=self.model_config)
        self._loader = Loader(
            SimpleNamespace(model_runner=runner, vllm_config=self.vllm_config, device=self.device)
        )
        self._loader.begin(-1)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """One call. vLLM's own method synchronizes an accelerator afterwards, which a CPU is not; the loader
        does where there is one.
        """
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except Exception:
            self._loader.drop()  # vLLM counts the update as ended, so the layers need tensors again
            raise

    def receive_weights(self, update_info: BroadcastUpdate) -> None:
        """Load buffer after buffer, then compare what came with what was announced."""
        if self._group is None:
            raise RuntimeError("this worker has no seat: POST /init_weight_transfer_engine first")
        digests: list[bytes] = []
        shapes: dict[str, Tensor] = {}
        for version, tensors in self._group.receive():
            if version != update_info.version:
                raise Refused(
                    409,
                    f"policy_version {version} came, announced was {update_info.version}",
                    rule="the trainer sends one version",
                )
            digests += [digest_of_tensor(name, tensor) for name, tensor in tensors.items()]
            shapes.update((name, tensor.to("meta")) for name, tensor in tensors.items())
            self._loader.add(tensors.items())
        check_counts(shapes, "the broadcast", update_info.num_tensors, update_info.num_bytes)
        digest = joint_digest(digests)
        if digest != update_info.digest:
            raise wrong_digest(update_info.version, "the broadcast", digest, update_info.digest)

    def finish_weight_update(self) -> None:
        """Close the update; fails if a parameter got nothing."""
        self._loader.finish()

    def shutdown(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            group.close()


def register_backend() -> None:
    """Make it known in this process; a second time does nothing."""
    if BROADCAST not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BROADCAST, BroadcastEngine)
