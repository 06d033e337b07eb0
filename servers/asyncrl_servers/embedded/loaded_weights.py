"""New weights: staged beside the serving ones, verified, swapped in. Knows tensors and digests; knows no
request.

The rule of what a set of weights is, the same on both ends: `dict(model.named_parameters())`, tied ones once.
Adapters (lora.py) change some of the weights that the server started with, which are kept for it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from asyncrl.http import Refused
from asyncrl.messages.base import WeightKind, joint_digest
from asyncrl.messages.engine_calls import PrepareRequest
from asyncrl.weights.shared_memory import byte_digest, bytes_of, shared_digest
from asyncrl_servers.checks import RESEND, not_newer, not_staged, wrong_digest
from asyncrl_servers.embedded.adapters import linear_parameters, read_adapters
from asyncrl_servers.embedded.kv_attention import own_copy, own_empties
from asyncrl_servers.sleeping import Source, Wakefulness

# Weights in safetensors files, checked against the model that they are for. Knows files and tensors; knows no
# version.


_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


@dataclass(frozen=True, slots=True)
class Kind:
    """What a parameter is, whether or not it has memory."""

    shape: torch.Size
    dtype: torch.dtype


@contextmanager
def weights_file(path: str) -> Iterator[Any]:
    """An open safetensors file, its tensors on the CPU. Raises Refused (400) if it cannot be read."""
    if not Path(path).is_file():
        raise Refused(400, f"no weights file {path}", way_out=RESEND)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise Refused(400, f"cannot read the weights file {path}: {error}", way_out=RESEND) from error


def read_all(path: str, kinds: Mapping[str, Kind], device: torch.device) -> dict[str, Tensor]:
    """Copies of all tensors of the file, which must be the parameters `kinds`. Raises Refused (400, 409)."""
    with weights_file(path) as file:
        check_names(set(file.keys()), kinds, path)
        # A copy: the file may be replaced by the next export while these weights serve.
        return {
            name: own_copy(fitting(name, file.get_tensor(name), kinds[name], path), device) for name in kinds
        }


def read_adapter_tensors(path: str) -> dict[str, Tensor]:
    """Copies of all tensors of a file of adapters, whatever they are. Raises Refused (400)."""
    with weights_file(path) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  not a mapping


def check_names(found: set[str], kinds: Mapping[str, Kind], path: str, *, is_part: bool = False) -> None:
    """Raise Refused (409) if the names of a file are not those of the parameters; `is_part`: of some of
    them.
    """
    missing, unknown = sorted(kinds.keys() - found) if not is_part else [], sorted(found - kinds.keys())
    if missing or unknown:
        raise Refused(
            409,
            f"{path} lacks {len(missing)} parameters {missing[:3]} and has {len(unknown)} unknown ones "
            f"{unknown[:3]}",
            rule="a set of weights is dict(model.named_parameters()), tied ones once",
            way_out="use the same model in trainer and engine.",
        )


def fitting(name: str, tensor: Tensor, kind: Kind, path: str) -> Tensor:
    """The tensor, if it is of this kind. Raises Refused (409)."""
    if tensor.shape != kind.shape or tensor.dtype != kind.dtype:
        raise Refused(
            409,
            f"{name} in {path} is {tensor.dtype} {tuple(tensor.shape)}, the model has {kind.dtype} "
            f"{tuple(kind.shape)}",
            rule="trainer and engine hold the same model in the same dtype",
            way_out="set model.dtype to the same for both.",
        )
    return tensor


def write_all(path: str, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, whole or not at all, one tensor after the other (safetensors' own function
    copies all first).
    """
    header: dict[str, dict[str, object]] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = Path(f"{path}.partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(bytes_of(tensor))
    partial.replace(path)


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """`wire.weights_digest` of torch tensors."""
    return joint_digest(byte_digest(name, tensor) for name, tensor in tensors.items())


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
    settle() belong to
                Resting, which holds `lock`.
    Invariant:  a staged set has the digest that its sender named (stage guarantees it), and after swap()
    every
                parameter is what was staged, or, if it raises, what it was before. Until other weights are
                swapped in whole, `_base` holds those of the start, and nothing writes to them.
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
        self.kinds = {
            name: Kind(parameter.shape, parameter.dtype) for name, parameter in self._parameters.items()
        }
        self._device = next(iter(self._parameters.values())).device
        self._read_start, self._has_adapters = read_start, has_adapters
        self._is_start = True
        self.source: Source | None = None
        """Where the weights that serve, or served before they were dropped, can be read again; None at the
        start, until drop().
        """
        self._linear = linear_parameters(model)
        self._base: dict[str, Tensor] | None = {
            name: parameter.data for name, parameter in self._parameters.items()
        }
        self._digest: str | None = None
        self._shared_digest: str | None = None
        """Of the weights of the start, once they were dropped: the same version may come again through
        memory.
        """
        self._staged: StagedWeights | None = None

    @property
    def digest(self) -> str:
        """Digest of the serving weights; computed when first asked for."""
        if self._digest is None:
            self._digest = digest_tensors(self._parameters)
        return self._digest

    def is_digest(self, digest: str) -> bool:
        """Whether the serving weights have it, in either of the ways in which a push may say it."""
        return digest in (self.digest, self._shared_digest)

    def stage(self, request: PrepareRequest) -> StagedWeights:
        """Read, check and verify a set of weights or adapters; replaces the staged one. Raises Refused (400,
        409).
        """
        with self.lock:
            self.state.check_weights_awake(f"policy_version {request.version} cannot be staged")
            self._staged = None
            is_lora = request.kind == "lora"
            tensors = (
                read_adapter_tensors(request.path)
                if is_lora
                else read_all(request.path, self.kinds, self._device)
            )
            num_bytes = sum(tensor.nbytes for tensor in tensors.values())
            if (len(tensors), num_bytes) != (request.num_tensors, request.num_bytes):
                raise Refused(
                    409,
                    f"{request.path} holds {len(tensors)} tensors of {num_bytes} bytes, announced were "
                    f"{request.num_tensors} "
                    f"of {request.num_bytes}",
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
        """Make the staged weights the serving ones. Raises RuntimeError with the old ones back in place."""
        is_cuda = next(iter(self._parameters.values())).is_cuda
        before = {
            name: parameter.data
            for name, parameter in self._parameters.items()
            if not _is_same(parameter, staged.tensors.get(name))
        }
        if is_cuda:
            before = {name: data.clone() for name, data in before.items()}
        is_done = False
        try:
            if staged.tensors.keys() != self._parameters.keys():
                raise RuntimeError(
                    f"the staged weights of policy_version {staged.version} are not the model's parameters"
                )
            for name in before:
                parameter = self._parameters[name]
                if is_cuda:  # in place: what was captured with the old addresses stays valid
                    parameter.data.copy_(staged.tensors[name])
                else:
                    parameter.data = staged.tensors[name]
            for name, parameter in self._parameters.items():
                new = staged.tensors[name]
                if not (
                    torch.equal(parameter.data, new) if is_cuda else parameter.data_ptr() == new.data_ptr()
                ):
                    raise RuntimeError(
                        f"parameter {name} is not what was staged for policy_version {staged.version}"
                    )
            is_done = True
        finally:
            if not is_done:
                for name, data in before.items():
                    self._parameters[name].data = data
        self._has_adapters = self._has_adapters or staged.kind == "lora"
        self.settle(
            staged.version, staged.digest, Source(staged.path, staged.digest), keep_base=staged.kind == "lora"
        )

    def settle(self, version: int, digest: str, source: Source | None, *, keep_base: bool = False) -> None:
        """What lies in the weights serves from here on, as `version`."""
        self.version, self._digest, self._staged, self.source = version, digest, None, source
        self._is_start, self._shared_digest = False, None
        if not keep_base:
            self._base = None
        self.state.set_content()

    def check_may_drop(self) -> None:
        """Raise Refused (409) if nobody could bring these weights back."""
        if self._has_adapters:
            raise Refused(
                409,
                "weights under adapters cannot sleep",
                rule="adapters are merged over the weights of the start, which are kept for it "
                "(publisher.transport=lora)",
                way_out="let the KV cache sleep alone, or publish whole weights (another "
                "publisher.transport).",
            )

    def keep_at(self, path: str) -> None:
        """Write what serves to the file `path`, unless it lies somewhere else already. Raises Refused (507)
        if it cannot be written.
        """
        if self.source is None and not self._is_start and self.state.has_content:
            try:
                write_all(path, self._parameters)
            except OSError as error:
                way_out = "make room there, or start without spare_path: then weights that came in chunks cannot be restored."
                raise Refused(507, f"cannot keep the weights in {path}: {error}", way_out=way_out) from error
            self.source = Source(path, digest_tensors(self._parameters))

    def drop(self) -> int:
        """Let go of all weights, the staged ones included; returns their bytes."""
        if self._is_start and self.state.has_content:
            self.source = Source(None, self.digest)
            self._shared_digest = joint_digest(
                shared_digest(name, parameter) for name, parameter in self._parameters.items()
            )
        held = [
            *self._parameters.values(),
            *(self._base or {}).values(),
            *(self._staged.tensors if self._staged else {}).values(),
        ]
        num_bytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())
        self._staged = self._base = None
        for name, parameter in self._parameters.items():
            parameter.data = torch.empty(0, dtype=self.kinds[name].dtype, device=self._device)
        self.state.set_asleep("weights")
        return num_bytes

    def allocate(self) -> int:
        """Memory for all weights, without content; returns its bytes."""
        return self._put(
            own_empties({name: (kind.shape, kind.dtype) for name, kind in self.kinds.items()}, self._device)
        )

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
            return read_all(source.path, self.kinds, self._device)
        assert self._read_start is not None, "nobody said how the weights of the start are read again"
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
        if self._base is None:
            raise Refused(
                409,
                f"{path} holds adapters, and this server no longer has the weights that it started with",
                rule="adapters are merged over the weights of the start, which a publish of whole weights "
                "replaces",
                way_out="start the server again, or publish whole weights.",
            )
        adapters = read_adapters(tensors, self._parameters, self._linear, path)
        for name in (adapter.parameter for adapter in adapters):
            if self._parameters[name].is_cuda and _is_same(self._parameters[name], self._base[name]):
                self._base[name] = self._base[name].clone()  # a swap writes over the parameter
        return {
            **self._base,
            **{adapter.parameter: adapter.merged(self._base[adapter.parameter]) for adapter in adapters},
        }


def _is_same(parameter: Tensor, other: Tensor | None) -> bool:
    return other is not None and parameter.data_ptr() == other.data_ptr()
