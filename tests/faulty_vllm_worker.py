"""A worker extension for vLLM that fails in silence, as real weight loading has been seen to. Runs in vLLM's
Python.

Spec key worker_extension="faulty_vllm_worker.FaultyWeightLoader", with a folder on PYTHONPATH that has this
file. POST /collective_rpc {"method": "asyncrl_plant", "args": ["{\"fault\": NAME}"]} names the fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from asyncrl_servers.vllm.worker_extension import Loader, WeightLoader

FAULTS = ("stale_head", "swap_names", "")


class FaultyLoader(Loader):
    """stale_head: the tied output layer keeps its packed copy, as after vLLM's own reload. swap_names: two
    tensors of one shape change places after they were hashed.
    """

    fault = ""

    def repack_tied(self) -> None:
        if self.fault != "stale_head":
            super().repack_tied()

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        given = dict(tensors)
        if self.fault == "swap_names":
            first = next(name for name, one in given.items() if one.dim() == 2 and ".layers.0." in name)
            second = first.replace(".layers.0.", ".layers.1.")
            given[first], given[second] = given[second], given[first]
        super().add(given.items())


class FaultyWeightLoader(WeightLoader):
    asyncrl_loader_class = FaultyLoader

    def asyncrl_plant(self, request: str) -> dict[str, Any]:
        fault = json.loads(request)["fault"]
        assert fault in FAULTS, fault
        FaultyLoader.fault = fault
        return {"ok": True}
