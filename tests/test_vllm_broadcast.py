"""VllmServer with weight_sync.transport=nccl, on a scripted vLLM and the virtual clock."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fake_vllm import FakeVllm
from test_sync_broadcast import FakeSender

from asyncrl.engines.vllm.facts import VllmFacts
from asyncrl.engines.vllm.vllm_server import VllmServer
from asyncrl.messages.trainer_calls import ExportResponse
from asyncrl.sync.broadcast import Broadcasts
from asyncrl.testing.virtual_time import run_virtual


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


def server_over(fake: FakeVllm, broadcasts: Broadcasts) -> VllmServer:
    facts = VllmFacts("/model", "float32", fake.slots, 1000, (), False, "cpu")
    server = VllmServer(fake, facts=facts, canary_limit=1e-3, retries=1)
    server.meeting = broadcasts
    return server


async def two_ready(sender: FakeSender) -> tuple[list[ReceivingVllm], list[VllmServer]]:
    """Two servers that are to receive from it, and their clients."""
    fakes = [ReceivingVllm("engine-0"), ReceivingVllm("engine-1")]
    broadcasts = Broadcasts(sender, Path("/staging"), timeout_s=5.0)
    servers = [server_over(fake, broadcasts) for fake in fakes]
    for server in servers:
        await server.ready(10.0)
    return fakes, servers


def manifest(version: int) -> ExportResponse:
    return ExportResponse(
        version=version, path="", digest=f"d{version}", num_tensors=2, num_bytes=8, is_held=True
    )


UPDATE = (
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/resume",
)


def routes_of(fake: FakeVllm) -> list[str]:
    names = {*UPDATE, "/init_weight_transfer_engine", "/pause"}
    return [route for call in fake.calls if (route := call.partition("?")[0]) in names]


def test_a_commit_goes_through_vllms_own_routes_in_their_order_and_joins_once() -> None:
    async def story() -> None:
        fakes, servers = await two_ready(FakeSender())
        for fake in fakes:
            fake.calls.clear()
        for version in (1, 2):
            await asyncio.gather(*(server.prepare(manifest(version)) for server in servers))
            await asyncio.gather(*(server.commit(version, f"d{version}", "abort") for server in servers))
        assert [server.policy_version for server in servers] == [2, 2]
        for fake in fakes:
            join = "/init_weight_transfer_engine"
            assert routes_of(fake) == ["/pause", join, *UPDATE, "/pause", *UPDATE]
            expected = {"version": 1, "digest": "d1", "num_tensors": 2, "num_bytes": 8}
            assert fake.infos[1]["update_info"] == expected

    run_virtual(story())
