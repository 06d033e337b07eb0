"""New weights: staged beside the serving ones, verified, swapped in. Knows tensors and digests; knows no
request.

The rule of what a set of weights is, the same on both ends: `dict(model.named_parameters())`, tied ones once.
Adapters (asyncrl/weights/adapters.py) change some of the weights that the server started with, which are kept
for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asyncrl.http import Refused
from asyncrl.messages.base import WeightKind
from asyncrl.messages.engine_calls import PrepareRequest
from asyncrl.weights.adapters import linear_parameters, read_adapters
from asyncrl.weights.tensor_files import RESEND, digest_tensors, read_or_refuse
from asyncrl_servers.checks import not_newer, not_staged, wrong_digest
from asyncrl_servers.embedded.kv_attention import own_copy, own_empties
from asyncrl_servers.sleeping import Source, Wakefulness


@dataclass(frozen=True, slots=True)
class ParameterKind:
    """What a parameter is, whether or not it has memory."""

    shape: torch.Size
    dtype: torch.dtype


def check_parameters(
    tensors: Mapping[str, Tensor], kinds: Mapping[str, ParameterKind], path: str, *, is_part: bool = False
) -> None:
    """Raise Refused (409) if the tensors of a file are not the parameters; `is_part`: some of them."""
    missing = [] if is_part else sorted(kinds.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - kinds.keys())
    if missing or unknown:
        raise Refused(
            409,
            f"{path} lacks {len(missing)} parameters {missing[:3]} and has {len(unknown)} unknown ones "
            f"{unknown[:3]}",
            rule="a set of weights is dict(model.named_parameters()), tied ones once",
            way_out="use the same model in trainer and engine.",
        )
    for name, tensor in tensors.items():
        kind = kinds[name]
        if tensor.shape != kind.shape or tensor.dtype != kind.dtype:
            raise Refused(
                409,
                f"{name} in {path} is {tensor.dtype} {tuple(tensor.shape)}, the model has {kind.dtype} "
                f"{tuple(kind.shape)}",
                rule="trainer and engine hold the same model in the same dtype",
                way_out="set model.dtype to the same for both.",
            )


def read_parameters_of(
    path: str, kinds: Mapping[str, ParameterKind], device: torch.device
) -> dict[str, Tensor]:
    """Copies of all tensors of the file, which must be the parameters. Raises Refused (400, 409)."""
    tensors = {name: raw.as_torch() for name, raw in read_or_refuse(path).items()}
    check_parameters(tensors, kinds, path)
    return {name: own_copy(tensors[name], device) for name in kinds}


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Verified weights, ready to be swapped in: one tensor a parameter, those that stay included.

    `digest` is that of the tensors that were sent: of kind lora, the adapters, which are merged by now.
    """

    version: int
    digest: str
    tensors: dict[str, Tensor]
    kind: WeightKind = "weights"
    path: str = ""


class Weights:
    """The serving weights of a model and at most one staged set; or no weights, while they are asleep.

    Waits:      nobody. stage() runs in any thread, swap() in the thread that runs the model. From drop() to
                settle() belong to SleepMode, which holds `lock`.
    Invariant:  a staged set has the digest that its sender named (stage guarantees it), and after swap()
                every parameter is what was staged, or, if it raises, what it was before. Until other weights
                are swapped in whole, `_base` holds those of the start, and nothing writes to them.
    """

    def __init__(
        self,
        model: nn.Module,
        version: int,
        *,
        read_start: Callable[[], dict[str, Tensor]] | None = None,
        has_adapters: bool = False,
    ) -> None:
        """`read_start` reads the weights of the start again."""
        self.version = version
        self.state = Wakefulness()
        self.lock = threading.Lock()
        """Held while weights are staged, dropped, taken or filled."""
        self._parameters = dict(model.named_parameters())
        self.kinds = {name: ParameterKind(one.shape, one.dtype) for name, one in self._parameters.items()}
        self._device = next(iter(self._parameters.values())).device
        self._read_start, self._has_adapters = read_start, has_adapters
        self._is_start = True
        self.source: Source | None = None
        """Where the weights that serve, or served before they were dropped, can be read again; None at the
        start, until drop().
        """
        self._linear = linear_parameters(model)
        self._base: dict[str, Tensor] | None = {name: one.data for name, one in self._parameters.items()}
        self._digest: str | None = None
        self._staged: StagedWeights | None = None

    @property
    def digest(self) -> str:
        """Digest of the serving weights; computed when first asked for."""
        if self._digest is None:
            self._digest = digest_tensors(self._parameters)
        return self._digest

    def stage(self, request: PrepareRequest) -> StagedWeights:
        """Read, check and verify a set of weights or adapters; replaces the staged one. Raises Refused (400,
        409).
        """
        with self.lock:
            self.state.check_weights_awake(f"policy_version {request.version} cannot be staged")
            self._staged = None
            is_lora = request.kind == "lora"
            if is_lora:
                tensors = {name: one.as_torch().clone() for name, one in read_or_refuse(request.path).items()}
            else:  # a copy: the file may be replaced by the next export while these weights serve
                tensors = read_parameters_of(request.path, self.kinds, self._device)
            found = len(tensors), sum(tensor.nbytes for tensor in tensors.values())
            if found != (request.num_tensors, request.num_bytes):
                raise Refused(
                    409,
                    f"{request.path} holds {found[0]} tensors of {found[1]} bytes, announced were "
                    f"{request.num_tensors} of {request.num_bytes}",
                    way_out=RESEND,
                )
            digest = digest_tensors(tensors)
            if digest != request.digest:
                raise wrong_digest(request.version, request.path, digest, request.digest)
            if is_lora:
                tensors = self._merge(tensors, request.path)
            self._staged = StagedWeights(request.version, digest, tensors, request.kind, request.path)
            return self._staged

    def staged_for(self, version: int, digest: str) -> StagedWeights:
        """The staged set, if it is this one and may follow the serving version. Raises Refused (409)."""
        staged = self._staged
        is_again = version == self.version and digest == self.digest and not self.state.has_content
        if version <= self.version and not is_again:
            raise not_newer(version, self.version)
        if staged is None or (staged.version, staged.digest) != (version, digest):
            raise not_staged(version, digest, (staged.version, staged.digest) if staged else None)
        return staged

    def swap(self, staged: StagedWeights) -> None:
        """Make the staged weights the serving ones: on the CPU by their place, on a device by a copy, so that
        what was captured with the old addresses stays valid. Raises RuntimeError with the old ones back.
        """
        is_cuda = self._device.type == "cuda"
        changed = {
            name: parameter.data.clone() if is_cuda else parameter.data
            for name, parameter in self._parameters.items()
            if not _is_same(parameter, staged.tensors.get(name))
        }
        is_done = False
        try:
            if staged.tensors.keys() != self._parameters.keys():
                raise RuntimeError(
                    f"the staged weights of policy_version {staged.version} are not the model's parameters"
                )
            for name, parameter in self._parameters.items():
                new = staged.tensors[name]
                if name in changed and is_cuda:
                    parameter.data.copy_(new)
                elif name in changed:
                    parameter.data = new
                is_new = torch.equal(parameter.data, new) if is_cuda else _is_same(parameter, new)
                if not is_new:
                    raise RuntimeError(
                        f"parameter {name} is not what was staged for policy_version {staged.version}"
                    )
            is_done = True
        finally:
            if not is_done:
                for name, data in changed.items():
                    self._parameters[name].data = data
        is_lora = staged.kind == "lora"
        self._has_adapters = self._has_adapters or is_lora
        source = Source(staged.path, staged.digest)
        self.settle(staged.version, staged.digest, source, keep_base=is_lora)

    def settle(self, version: int, digest: str, source: Source | None, *, keep_base: bool = False) -> None:
        """What lies in the weights serves from here on, as `version`."""
        self.version, self._digest, self._staged, self.source = version, digest, None, source
        self._is_start = False
        if not keep_base:
            self._base = None
        self.state.set_content()

    def check_may_drop(self) -> None:
        """Raise Refused (409) if nothing could bring these weights back."""
        if self._has_adapters:
            raise Refused(
                409,
                "weights under adapters cannot sleep",
                rule="adapters are merged over the weights of the start, which are kept for it "
                "(weight_sync.transport=lora)",
                way_out="let the KV cache sleep alone, or publish whole weights (another "
                "weight_sync.transport).",
            )

    def drop(self) -> int:
        """Let go of all weights, the staged ones included; returns their bytes."""
        if self._is_start and self.state.has_content:
            self.source = Source(None, self.digest)
        held = [*self._parameters.values(), *(self._base or {}).values()]
        held += self._staged.tensors.values() if self._staged else []
        num_bytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())
        self._staged = self._base = None
        for name, parameter in self._parameters.items():
            parameter.data = torch.empty(0, dtype=self.kinds[name].dtype, device=self._device)
        self.state.set_asleep("weights")
        return num_bytes

    def allocate(self) -> int:
        """Memory for all weights, without content; returns its bytes."""
        empties = own_empties(
            {name: (one.shape, one.dtype) for name, one in self.kinds.items()}, self._device
        )
        return self._put(empties)

    def num_bytes(self) -> int:
        """What allocate takes."""
        return sum(kind.shape.numel() * kind.dtype.itemsize for kind in self.kinds.values())

    def adopt(self, tensors: dict[str, Tensor], source: Source) -> int:
        """Serve these tensors, which are what served before; returns their bytes."""
        num_bytes = self._put(tensors)
        if source.path is None:
            self._base = dict(tensors)
        self.state.set_content()
        return num_bytes

    def read(self, source: Source) -> dict[str, Tensor]:
        """The weights that lie there, on this device. Raises Refused (400, 409)."""
        if source.path is not None:
            return read_parameters_of(source.path, self.kinds, self._device)
        assert self._read_start is not None, "nothing says how the weights of the start are read again"
        return self._read_start()

    @torch.no_grad()
    def fill(self, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor into a parameter; returns what lies there then."""
        return self._parameters[name].data.copy_(tensor)

    def _put(self, tensors: dict[str, Tensor]) -> int:
        for name, parameter in self._parameters.items():
            parameter.data = tensors[name]
        self.state.set_awake("weights")
        return sum(tensor.nbytes for tensor in tensors.values())

    def _merge(self, tensors: dict[str, Tensor], path: str) -> dict[str, Tensor]:
        """All parameters, adapters merged over the weights of the start. Raises Refused (409) with nothing
        changed.
        """
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
        for name in (adapter.parameter for adapter in adapters):
            if self._parameters[name].is_cuda and _is_same(self._parameters[name], base[name]):
                base[name] = base[name].clone()  # a swap writes over the parameter
        return base | {one.parameter: one.merged(base[one.parameter]) for one in adapters}


def _is_same(parameter: Tensor, other: Tensor | None) -> bool:
    return other is not None and parameter.data_ptr() == other.data_ptr()
