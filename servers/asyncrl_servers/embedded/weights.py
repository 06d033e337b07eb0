"""New weights: staged beside the serving ones, verified, swapped in. Knows tensors and digests; knows no request.

The rule of what a set of weights is, the same on both ends: `dict(model.named_parameters())`, tied ones once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from asyncrl.serving import Refused
from asyncrl.wire import PrepareRequest, weights_digest
from asyncrl_servers.checks import RESEND, not_newer, not_staged, wrong_digest


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Verified weights, ready to be swapped in."""

    version: int
    digest: str
    tensors: dict[str, Tensor]


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """`wire.weights_digest` of torch tensors."""

    def parts() -> Iterable[tuple[str, str, tuple[int, ...], memoryview]]:
        for name, tensor in tensors.items():
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            yield name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data.data

    return weights_digest(parts())


class Weights:
    """The serving weights of a model and at most one staged set.

    Waits:      nobody. stage() runs in any thread, swap() in the thread that runs the model.
    Invariant:  a staged set has the digest that its sender named (stage guarantees it), and after swap() every
                parameter is what was staged, or, if it raises, what it was before.
    """

    def __init__(self, model: nn.Module, version: int) -> None:
        self.version = version
        self._parameters = dict(model.named_parameters())
        self._digest: str | None = None
        self._staged: StagedWeights | None = None
        self._staging = threading.Lock()

    @property
    def digest(self) -> str:
        """Digest of the serving weights; computed when first asked for."""
        if self._digest is None:
            self._digest = digest_tensors(self._parameters)
        return self._digest

    def stage(self, request: PrepareRequest) -> StagedWeights:
        """Read, check and verify a set of weights; replaces the staged one. Raises Refused (400, 409)."""
        with self._staging:
            self._staged = None
            tensors = self._read(request.path)
            num_bytes = sum(tensor.nbytes for tensor in tensors.values())
            if (len(tensors), num_bytes) != (request.num_tensors, request.num_bytes):
                raise Refused(
                    409,
                    f"{request.path} holds {len(tensors)} tensors of {num_bytes} bytes, announced were {request.num_tensors} "
                    f"of {request.num_bytes}",
                    way_out=RESEND,
                )
            digest = digest_tensors(tensors)
            if digest != request.digest:
                raise wrong_digest(request.version, request.path, digest, request.digest)
            self._staged = StagedWeights(request.version, digest, tensors)
            return self._staged

    def staged_for(self, version: int, digest: str) -> StagedWeights:
        """The staged set, if it is this one and may follow the serving version. Raises Refused (409)."""
        staged = self._staged
        if version <= self.version:
            raise not_newer(version, self.version)
        if staged is None or (staged.version, staged.digest) != (version, digest):
            raise not_staged(version, digest, (staged.version, staged.digest) if staged else None)
        return staged

    def swap(self, staged: StagedWeights) -> None:
        """Make the staged weights the serving ones. Raises RuntimeError with the old ones back in place."""
        is_cuda = next(iter(self._parameters.values())).is_cuda
        before = {name: parameter.data for name, parameter in self._parameters.items()}
        if is_cuda:
            before = {name: data.clone() for name, data in before.items()}
        is_done = False
        try:
            if staged.tensors.keys() != self._parameters.keys():
                raise RuntimeError(f"the staged weights of policy_version {staged.version} are not the model's parameters")
            for name, parameter in self._parameters.items():
                if is_cuda:  # in place: what was captured with the old addresses stays valid
                    parameter.data.copy_(staged.tensors[name])
                else:
                    parameter.data = staged.tensors[name]
            for name, parameter in self._parameters.items():
                new = staged.tensors[name]
                if not (torch.equal(parameter.data, new) if is_cuda else parameter.data_ptr() == new.data_ptr()):
                    raise RuntimeError(f"parameter {name} is not what was staged for policy_version {staged.version}")
            is_done = True
        finally:
            if not is_done:
                for name, data in before.items():
                    self._parameters[name].data = data
        self.version, self._digest, self._staged = staged.version, staged.digest, None

    def _read(self, path: str) -> dict[str, Tensor]:
        """Copies of all tensors of a safetensors file, on the model's device, checked against its parameters."""
        if not Path(path).is_file():
            raise Refused(400, f"no weights file {path}", way_out=RESEND)
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                self._check_names(set(file.keys()), path)
                return {name: self._copy(name, file.get_tensor(name), path) for name in file.keys()}  # noqa: SIM118  not a mapping
        except (SafetensorError, OSError) as error:
            raise Refused(400, f"cannot read the weights file {path}: {error}", way_out=RESEND) from error

    def _check_names(self, found: set[str], path: str) -> None:
        missing, unknown = sorted(self._parameters.keys() - found), sorted(found - self._parameters.keys())
        if missing or unknown:
            raise Refused(
                409,
                f"{path} lacks {len(missing)} parameters {missing[:3]} and has {len(unknown)} unknown ones {unknown[:3]}",
                rule="a set of weights is dict(model.named_parameters()), tied ones once",
                way_out="use the same model in trainer and engine.",
            )

    def _copy(self, name: str, tensor: Tensor, path: str) -> Tensor:
        parameter = self._parameters[name]
        if tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
            raise Refused(
                409,
                f"{name} in {path} is {tensor.dtype} {tuple(tensor.shape)}, the model has {parameter.dtype} {tuple(parameter.shape)}",
                rule="trainer and engine hold the same model in the same dtype",
                way_out="set model.dtype to the same for both.",
            )
        # A copy: the file may be replaced by the next export while these weights serve.
        return tensor.clone() if not parameter.is_cuda else tensor.to(parameter.device)
