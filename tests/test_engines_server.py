"""The client of one engine server as the publisher uses it."""

from __future__ import annotations

import pytest

from asyncrl.calling import CallRefused
from asyncrl.engines import EngineServer
from asyncrl.errors import EngineError
from asyncrl.testing.fakes import FakeEngineServer
from asyncrl.testing.virtual_time import run_virtual
from asyncrl.types import WeightManifest
from asyncrl.wire import ErrorBody, GenerateRequest

MANIFEST = WeightManifest(4, "/dev/shm/w", "d4", 2, 100)


def test_prepare_and_commit_bring_a_version() -> None:
    async def story() -> None:
        fake = FakeEngineServer(swap_s=0.25)
        server = EngineServer(fake)
        assert await server.prepare(MANIFEST) == "d4"
        assert (await server.health()).policy_version == server.policy_version == 0
        report = await server.commit(4, "d4", "abort")
        assert (report.version, report.digest, report.pause_s, report.num_interrupted) == (4, "d4", 0.25, 0)
        assert (await server.health()).policy_version == server.policy_version == 4
        assert repr(server) == "<EngineServer engine-0 fake://engine-0 v4>"

    run_virtual(story())


def test_a_commit_of_what_was_not_prepared_is_an_engine_error_with_the_servers_words() -> None:
    async def story() -> None:
        server = EngineServer(FakeEngineServer())
        with pytest.raises(EngineError, match="answered 409 to /commit: staged is None, not 4"):
            await server.commit(4, "d4", "abort")
        assert server.policy_version == 0

    run_virtual(story())


def test_a_status_that_is_not_about_the_request_ends_the_run() -> None:
    async def story() -> None:
        fake = FakeEngineServer()

        def broken(_: GenerateRequest) -> str:
            raise CallRefused("engine-0", "/generate", 500, ErrorBody(error="out of memory", way_out="lower rollout.slots."))

        fake.refuse = broken
        with pytest.raises(EngineError, match=r"answered 500 to /generate: out of memory.\n  Way out: lower rollout.slots."):
            await EngineServer(fake).generate_segment(GenerateRequest(request_id="a", prompt_ids=[1], max_tokens=1))

    run_virtual(story())
