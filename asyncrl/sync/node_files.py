"""Transport stream: an engine's node fetches the file from the trainer's node."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Literal, TypeVar

from asyncrl.base.errors import EngineLost, NodeLost, RoomError, WeightsLost
from asyncrl.base.http import Caller, CallLost, CallRefused
from asyncrl.messages.engine_api import FileRequest
from asyncrl.messages.trainer_api import ExportChunkResponse, ExportResponse, TrainerHealth

Sent = TypeVar("Sent", ExportResponse, ExportChunkResponse)
Fetch = Callable[[int, FileRequest, float], Awaitable[str]]
"""Download a file to a node within a limit in seconds. Raises RoomError."""
Purpose = Literal["rollout", "evaluation"]


class NodeFiles:
    """Paths of the exported weights on each node of a run."""

    def __init__(
        self,
        fetch: Fetch,
        trainer: Caller,
        node_of: Mapping[str, int],
        *,
        trainer_node: int,
        timeout_s: float,
    ) -> None:
        """`trainer` calls rank 0. `node_of`: the node of each engine."""
        self._fetch = fetch
        self._trainer = trainer
        self._node_of = node_of
        self._trainer_node = trainer_node
        self._timeout_s = timeout_s

    async def locate(self, engine: str, sent: Sent) -> Sent:
        """Return `sent` with the path on the engine's node. Raises EngineLost, WeightsLost or RoomError."""
        if not sent.path or self._node_of[engine] == self._trainer_node:
            return sent
        return await self._fetch_to(engine, sent, "rollout")

    async def for_evaluation(self, engine: str, sent: ExportResponse) -> ExportResponse:
        """Keep a file apart from those of the rollout engines."""
        return await self._fetch_to(engine, sent, "evaluation")

    async def _fetch_to(self, engine: str, sent: Sent, purpose: Purpose) -> Sent:
        url = f"{self._trainer.url}/staged/{Path(sent.path).name}"
        request = FileRequest(url=url, secret=self._trainer.secret, key=sent.digest, purpose=purpose)
        try:
            path = await self._fetch(self._node_of[engine], request, self._timeout_s)
        except NodeLost as error:
            raise EngineLost(engine, error.fault, rule=error.rule, way_out=error.way_out) from error
        except RoomError as error:
            kind = RoomError if await self._trainer_answers() else WeightsLost
            raise kind(engine, error.fault, rule=error.rule, way_out=error.way_out) from error
        return sent.model_copy(update={"path": path})

    async def _trainer_answers(self) -> bool:
        try:
            await self._trainer.get("/health", TrainerHealth, timeout_s=5.0)
        except (CallLost, CallRefused):
            return False
        return True
