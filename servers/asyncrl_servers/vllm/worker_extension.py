"""What vLLM mixes into each of its workers (--worker-extension-cls): methods for POST /collective_rpc.
Importing it mends two things.

A method gets one JSON text and answers with a dict that has `ok` or `error` (with rule and way_out); it never
raises, as an exception in one worker would end the engine or leave the others waiting.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import vllm
from vllm.platforms import current_platform

from asyncrl.http import Refused
from asyncrl_servers.vllm.loader import Loader
from asyncrl_servers.vllm.mending import mend_cpu
from asyncrl_servers.vllm.transfer import register_backend

register_backend()
if current_platform.is_cpu():
    mend_cpu()


class WeightLoader:
    """Mixed into vLLM's worker class, so it has no state of its own but what `_asyncrl_loader` makes at the
    first call.
    """

    asyncrl_loader_class = Loader

    def asyncrl_facts(self, _: str = "{}") -> dict[str, Any]:
        """What this worker is; `broken`: why its weights are those of no version, if so."""
        worker: Any = self

        def facts(**_: Any) -> dict[str, Any]:
            config = worker.vllm_config
            return {
                "extension": 1,
                "vllm": vllm.__version__,
                "device": str(worker.device),
                "dtype": str(config.model_config.dtype).removeprefix("torch."),
                "num_workers": config.parallel_config.world_size,
                "rank": worker.rank,
                "vocab_size": config.model_config.get_vocab_size(),
                "broken": self._asyncrl_loader().broken,
            }

        return _answer(facts, "{}")

    def asyncrl_stage(self, request: str) -> dict[str, Any]:
        """Stage a weights file while generation goes on; ask again until the state is `staged`."""
        return _answer(self._asyncrl_loader().stage, request)

    def asyncrl_load(self, request: str) -> dict[str, Any]:
        """Load what is staged."""
        return _answer(self._asyncrl_loader().load, request)

    def asyncrl_load_chunk(self, request: str) -> dict[str, Any]:
        """Load one chunk of an update."""
        return _answer(self._asyncrl_loader().load_chunk, request)

    def asyncrl_finish_chunks(self, request: str) -> dict[str, Any]:
        """End an update that came in chunks."""
        return _answer(self._asyncrl_loader().finish_chunks, request)

    def asyncrl_drop(self, request: str = "{}") -> dict[str, Any]:
        """Forget what is staged, and an update that is open."""
        return _answer(self._asyncrl_loader().drop, request)

    def _asyncrl_loader(self) -> Loader:
        worker: Any = self
        if "asyncrl_loader" not in worker.__dict__:
            worker.asyncrl_loader = self.asyncrl_loader_class(worker)
        loader: Loader = worker.asyncrl_loader
        return loader


def _answer(method: Callable[..., dict[str, Any] | None], request: str) -> dict[str, Any]:
    try:
        return {"ok": True, **(method(**json.loads(request)) or {})}
    except Refused as refusal:
        return refusal.body.model_dump()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "rule": "", "way_out": "see this server's log."}
