"""VllmServer with weight_sync.transport=nccl, on a scripted vLLM and the virtual clock."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fake_vllm import FakeVllm
from rollout_cases import virtual
from test_sync_broadcast import FakeSender

from asyncrl.engines.vllm.facts import VllmFacts
from asyncrl.engines.vllm.vllm_server import VllmServer
from asyncrl.messages.calls import ExportResponse
from asyncrl.sync.broadcast import Broadcasts


class ReceivingVllm(FakeVllm):
    """The fake, with vLLM's own weight-transfer routes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.infos: list[dict[str, Any]] = []

    async def _control(self, route: str, sent: dict[str, Any], query: dict[str, str]) -> Any:
        if route in ("/init_weight_transfer_engine", "/update_weights"):
            self.infos.append(sent)
        if route == "/finish_weight_update":
            assert self.pause is not None, "a load while something may run"
            self.weights = float(self.infos[-1]["update_info"]["version"])
        return await super()._control(route, sent, query)


UPDATE = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
UPDATE += ["/update_weight_version", "/resume"]
JOIN = "/init_weight_transfer_engine"


@virtual
async def test_a_commit_goes_through_vllms_own_routes_in_their_order_and_joins_once() -> None:
    broadcasts, servers = Broadcasts(FakeSender(), Path("/staging"), timeout_s=5.0), []
    fakes = [ReceivingVllm("engine-0"), ReceivingVllm("engine-1")]
    for fake in fakes:
        facts = VllmFacts("/model", "float32", fake.slots, 1000, (), False, "cpu")
        servers.append(VllmServer(fake, facts=facts, canary_limit=1e-3, retries=1))
        servers[-1].meeting = broadcasts
        await servers[-1].ready(10.0)
        fake.calls.clear()
    for version in (1, 2):
        sent = {"version": version, "digest": f"d{version}", "num_tensors": 2, "num_bytes": 8}
        manifest = ExportResponse(path="", is_held=True, **sent)
        await asyncio.gather(*(server.prepare(manifest) for server in servers))
        await asyncio.gather(*(server.commit(version, f"d{version}", "abort") for server in servers))
    assert [server.policy_version for server in servers] == [2, 2]
    for fake in fakes:
        routes = [call.partition("?")[0] for call in fake.calls]
        ours = [route for route in routes if route in (*UPDATE, JOIN, "/pause")]
        assert ours == ["/pause", JOIN, *UPDATE, "/pause", *UPDATE]
        assert fake.infos[1]["update_info"] == sent | {"version": 1, "digest": "d1"}
