"""Weights of an embedded engine, under checkpoint names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from asyncrl.base.http import Refused
from asyncrl.messages.engine_api import (
    EnginePart,
    GroupMember,
    LoadChunkRequest,
    Loaded,
    OpenAdapterRequest,
    PrepareRequest,
)
from asyncrl.weights.aside import Aside
from asyncrl.weights.ipc import TrainerMemory
from asyncrl.weights.nccl import GroupBroken, WeightGroup
from asyncrl.weights.tensor_files import (
    digest_and_size,
    digest_tensors,
    of_role,
    pieces_of,
    rename_adapters,
    stored_names,
    weights_of,
)
from asyncrl_servers.embedded.decoder import EmbeddedSpec, LoadedModel
from asyncrl_servers.embedded.fixed_memory import FixedTensors
from asyncrl_servers.weight_state import (
    Arrived,
    WeightState,
    check_arrived,
    take_announced,
)


class Weights(WeightState):
    """Serving weights: the tensors that pushes bring, which are all weights or an
    adapter. Those of the run's own adapter also hold the initial weights, which no push
    brings.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        spec: EmbeddedSpec,
        opened: OpenAdapterRequest | None = None,
        asleep: Iterable[EnginePart] = (),
    ) -> None:
        """`opened`: None for the run's own. Others have no content before their first
        push. Raises ConfigError for unknown targets.
        """
        self.name = "" if opened is None else opened.adapter
        self.adapters = loaded.adapters
        """By role; "" is the only one."""
        if opened is not None:
            self.adapters = {"": loaded.make_adapter(opened)}
        self._initial = weights_of(loaded.model)
        self._pieces = loaded.pieces
        self._parameters = self._initial
        self._has_adapters = bool(self.adapters)
        if self._has_adapters:
            names = stored_names(self._pieces)
            self._parameters = {}
            for role, one in self.adapters.items():
                tensors = rename_adapters(one.tensors, names)
                self._parameters |= of_role(role, tensors)
        self._kinds = _kinds(self._parameters)
        self._stored_kinds = _kinds(pieces_of(self._parameters, self._pieces))
        super().__init__(self._stored_kinds.keys(), asleep)
        self.has_content = opened is None
        self._device = loaded.device
        self._aside: Aside | None = None
        """Of initial weights that no push brings."""
        if spec.aside_dir is not None and opened is None:
            self._aside = Aside(loaded.device, spec.aside_dir)
        # The tensors of adapters are views of padded ones.
        self._stays = spec.stays or (self._has_adapters and self._aside is None)
        self.num_bytes: int = sum(
            parameter.nbytes for parameter in self._parameters.values()
        )
        self.fixed: FixedTensors | None = None
        """Sleeps keep these addresses."""
        self._memory = TrainerMemory(loaded.device)
        self._group: WeightGroup | None = None
        self.keeps_place = loaded.device.type == "cuda"
        """Swap by copying: decode graphs read this memory."""

    @property
    def digest(self) -> str:
        """The initial digest is computed on first use and lost by a sleep."""
        if not self._digest and self.has_content:
            self._digest = digest_tensors(pieces_of(self._parameters, self._pieces))
        return self._digest

    def non_finite(self) -> Refused:
        """Return the refusal of a request whose logits are not finite. Raises
        FloatingPointError for the run's own adapter.
        """
        what = f"policy_version {self.version} gives non-finite logits"
        # This ends the process: its tokens would be trained on, and an error as the
        # answer would leave the same weights in place.
        if not self.name:
            raise FloatingPointError(what)
        return Refused(
            422,
            f"adapter {self.name!r}: {what}",
            way_out="push another version of the adapter.",
        )

    @torch.inference_mode(False)  # other threads write into these tensors
    def fix(self) -> None:
        """Move the weights to addresses that sleeps keep. Raises MemoryError, OSError
        and RuntimeError; then nothing has moved.
        """
        self.fixed = FixedTensors(self._parameters.values(), self._device)

    def prepare(self, request: PrepareRequest) -> Loaded:
        """Stage weights. A new group replaces a previous group that failed elsewhere."""
        group = self._group
        if (
            request.member is not None
            and group is not None
            and group.path != request.member.path
        ):
            # On CUDA this ends the collective in which an earlier prepare() may still
            # wait, with the lock that this call needs.
            group.close()
        return super().prepare(request)

    def read(self, request: PrepareRequest) -> dict[str, Tensor]:
        if request.member is not None:
            return self._received(request, request.member)
        with self._memory.opened(request) as sent:
            self._check_parameters(sent, request.place)
            tensors = self._empty()
            # Copied, because the next export may replace the file, and overwrites the
            # trainer's memory.
            places = pieces_of(tensors, self._pieces)
            check_arrived(request.place, _copied(sent, places), request)
        return tensors

    def load(self, request: LoadChunkRequest) -> Arrived:
        with self._memory.opened(request) as tensors:
            self._check_parameters(tensors, request.place, is_part=True)
            parameters = {
                name: parameter.data for name, parameter in self._parameters.items()
            }
            return _copied(tensors, pieces_of(parameters, self._pieces))

    def swap(self) -> None:
        assert self.swapping is not None
        request, tensors = self.swapping[1].request, self.swapping[1].tensors
        for name, parameter in self._parameters.items():
            is_there = parameter.shape == tensors[name].shape
            # The pause grows by this copy, but decode graphs stay valid.
            if is_there and (self.keeps_place or self._has_adapters):
                parameter.data.copy_(tensors[name])
            else:
                parameter.data = tensors[name]
        self.settle(request.version, request.digest)

    def settle(self, version: int, digest: str) -> None:
        super().settle(version, digest)
        # Copies that were joined before have the previous numbers.
        self.adapters = {role: replace(one) for role, one in self.adapters.items()}

    def free(self) -> int:
        """Free all weights and return the parameters' bytes. With `stays` the memory
        remains. Raises Refused (507) for weights that are kept.
        """
        num_bytes = 0
        # A prepare() or a chunk in another thread ends before the memory goes.
        with self.lock:
            if self._aside is not None:
                moved = None
                if not self._stays:
                    moved = self._aside.send_away(self._initial.values())
                self.set_asleep()
                return 0 if moved is None else moved.num_bytes
            is_awake = "weights" not in self.asleep
            self.set_asleep()
            if self.fixed is not None:
                self.fixed.unmap()
                return self.num_bytes if is_awake else 0
            for parameter in () if self._stays else self._parameters.values():
                num_bytes += parameter.nbytes
                parameter.data = torch.empty(
                    0, dtype=parameter.dtype, device=self._device
                )
        return num_bytes

    def take(self) -> int:
        """Allocate the memory of all weights and return its bytes. Raises OSError and
        RuntimeError.
        """
        with self.lock:
            if self._aside is not None:
                moved = None if self._stays else self._aside.bring_back()
                self.set_awake("weights")
                # Adapters come with the next push.
                self.has_content = not self._has_adapters
                return 0 if moved is None else moved.num_bytes
            if self.fixed is not None:
                self.fixed.memory.map()
            elif not self._stays:
                for name, tensor in self._empty().items():
                    self._parameters[name].data = tensor
            self.set_awake("weights")
            return 0 if self._stays else self.num_bytes

    def _received(
        self, request: PrepareRequest, member: GroupMember
    ) -> dict[str, Tensor]:
        """Receive a broadcast. Raises Refused (409)."""
        tensors = self._empty()
        place = f"the broadcast of policy_version {request.version}"
        places = pieces_of(tensors, self._pieces)

        def take(sent: Mapping[str, Tensor]) -> Arrived:
            self._check_parameters(sent, place, is_part=True)
            return _copied(sent, places)

        try:
            digests = take_announced(
                self._joined(member).receive(), request, place, take
            )
            # Each buffer was checked as it came. This finds parameters that were in no
            # buffer.
            self._check_parameters({name: places[name] for name in digests}, place)
        except BaseException as error:
            self._leave()  # other members may still be in it
            if not isinstance(error, GroupBroken):
                raise
            raise Refused(
                409, f"policy_version {request.version} was not received: {error}"
            ) from error
        return tensors

    def _joined(self, member: GroupMember) -> WeightGroup:
        """Return the member's group; join it if it is new. Raises GroupBroken."""
        if member.is_new:
            self._leave()
            self._group = WeightGroup(member, self._device)
        if self._group is None or self._group.path != member.path:
            raise GroupBroken(f"this engine is not in the group {member.path}")
        return self._group

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _empty(self) -> dict[str, Tensor]:
        kinds, device = self._kinds.items(), self._device
        return {
            name: torch.empty(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in kinds
        }

    def _check_parameters(
        self, tensors: Mapping[str, Tensor], place: str, *, is_part: bool = False
    ) -> None:
        """Raise Refused (409) for wrong tensors; `is_part`: some suffice."""
        found, kinds = _kinds(tensors), self._stored_kinds
        missing = set() if is_part else kinds.keys() - found.keys()
        wrong = sorted(
            missing | {name for name, kind in found.items() if kinds.get(name) != kind}
        )
        if wrong:
            what = f"{place} does not fit the model in {len(wrong)} tensors, like {wrong[0]}, which is "
            what += f"{found.get(wrong[0], 'missing')}; the model has {kinds.get(wrong[0], 'none')}"
            raise Refused(
                409,
                what,
                rule="trainer and engine hold the same model in the same dtype",
            )


def _copied(sent: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> Arrived:
    """Copy tensors to their places. The digests are of the copies, which will serve:
    those of the sent ones would not notice a fault on the way into memory.
    """
    return digest_and_size(
        {name: places[name].copy_(one) for name, one in sent.items()}
    )


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
