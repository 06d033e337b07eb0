"""A real trainer that sends its weights, and the clients of the servers that receive them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from engine_processes import SECRET
from rank_processes import Group
from trainer_cases import changed, make_batch

from asyncrl.base.http import Caller
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.messages.trainer_api import TrainResponse, pack_batch
from asyncrl.trainer.trainer_client import TrainerClient


@dataclass
class BroadcastHouse:
    """One trainer, which holds what it sends and writes it too, and two servers. The version goes on from
    story to story.
    """

    trainer: Group
    servers: list[Any]
    model_path: Path
    version: int = 0

    def train(self, vocab_size: int = 40) -> None:
        header, arrays = make_batch(version=self.version)
        arrays = changed(arrays, token_ids=np.minimum(arrays.token_ids, vocab_size - 1))
        body = pack_batch(header, arrays)
        answer = self.trainer.ask(lambda caller: caller.post("/train", body, TrainResponse, timeout_s=120))
        self.version = answer.policy_version

    async def client_of(self, server: Any, caller: Caller, broadcast_group: BroadcastGroup) -> Any:
        """An engine, ready to receive."""
        raise NotImplementedError

    def tell(self, story: Any, servers: Mapping[str, Any]) -> None:
        """Run `story(trainer, engines)` with clients of these servers, by name."""

        async def within() -> None:
            async with AsyncExitStack() as stack, asyncio.timeout(300):
                caller = Caller("trainer", self.trainer.urls[0], "s3cret")
                trainer = TrainerClient(await stack.enter_async_context(aclosing(caller)), timeout_s=100.0)
                broadcast_group = BroadcastGroup(trainer.broadcast, self.trainer.folder, timeout_s=60.0)
                engines = []
                for name, server in servers.items():
                    caller = await stack.enter_async_context(aclosing(Caller(name, server.url, SECRET)))
                    engines.append(await self.client_of(server, caller, broadcast_group))
                await story(trainer, engines)

        asyncio.run(within())
