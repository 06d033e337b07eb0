"""A worker extension for vLLM that fails in silence, as real weight loading has been
seen to. Runs in vLLM's Python.

Spec key worker_extension="faulty_vllm_worker.FaultyWeightLoader", with a folder on
PYTHONPATH that has this file. POST /collective_rpc {"method": "asyncrl_plant", "args":
["{\"fault\": NAME}"]} names the fault.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import vllm._custom_ops
from torch import Tensor

from asyncrl_servers.vllm.worker_extension import Loader, WeightLoader

FAULTS = ("stale_head", "swap_names", "stale_part", "")
if os.environ.get("PLAIN_LINEAR"):
    # As on CUDA, linear layers keep their weights: oneDNN would replace them by packed
    # ones.
    vllm._custom_ops._supports_onednn = False


class FaultyLoader(Loader):
    """stale_head: the tied output layer keeps its packed copy, as after vLLM's own
    reload. swap_names: two tensors of one shape change places after they were hashed.
    stale_part: the last worker keeps its part of the tensor `stale`.
    """

    fault = ""
    stale = ""
    kept: Tensor | None = None

    def repack_tied(self) -> None:
        if self.fault != "stale_head":
            super().repack_tied()

    def _begin(self, version: int) -> None:
        if (
            self.fault == "stale_part"
            and self.worker.rank == self.parts._num_workers - 1
        ):
            self.kept = self.parts.held(self.stale).detach().clone()
        super()._begin(version)

    def _close(self) -> None:
        super()._close()
        if self.kept is not None:
            self.parts.held(self.stale).detach().copy_(self.kept)
            self.kept = None

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        given = dict(tensors)
        if self.fault == "swap_names":
            first = next(
                name
                for name, one in given.items()
                if one.dim() == 2 and ".layers.0." in name
            )
            second = first.replace(".layers.0.", ".layers.1.")
            given[first], given[second] = given[second], given[first]
        super().add(given)


class FaultyWeightLoader(WeightLoader):
    asyncrl_loader_class = FaultyLoader

    def asyncrl_plant(self, request: str) -> dict[str, Any]:
        """Fields: `fault`, and others of FaultyLoader to set."""
        fields = json.loads(request)
        assert fields["fault"] in FAULTS, fields
        for name, value in fields.items():
            setattr(FaultyLoader, name, value)
        return {"ok": True}

    def asyncrl_known(self, request: str) -> dict[str, Any]:
        """Return the names of the tensors that the last load compared."""
        loader = self.asyncrl_loader
        held = (name for name in loader._expected if loader.parts.held(name).numel())
        return {"ok": True, "names": sorted(held)}
