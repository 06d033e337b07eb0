"""transport: stream, the controller's end. Before an engine loads weights its node gets them: the relays of
the nodes (asyncrl/weights/relay.py) pull them from each other, and the engine is told its own node's path.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from asyncrl.errors import EngineLost, RoomError, WeightsLost
from asyncrl.http import Caller, CallLost, CallRefused
from asyncrl.messages.base import FetchRequest, FetchResponse, RelayHealth, WeightSource
from asyncrl.messages.calls import ExportChunkResponse, ExportResponse
from asyncrl.placement.nodes import Node, Order
from asyncrl.waits import TimeLimit, waiting
from asyncrl.weights.relay import RelaySpec

Sent = TypeVar("Sent", ExportResponse, ExportChunkResponse)
ANSWER_S = 30.0
"""A relay answers every 2 seconds. One that takes so long is lost, and its engines with it."""
PING_S = 5.0
"""Limit for the question whether the trainer's relay lives."""
_UNREACHED = 502


def relay_order(number: int, node: Node, secret: str, staging_dir: Path, run_dir: Path) -> Order:
    """The relay of node `number`. `secret`: the same for all of them. `staging_dir`: where the trainer writes
    and evaluation keeps files, on the nodes that have such a folder.
    """
    spec = RelaySpec(node=node.name, roots=[str(staging_dir)]).model_dump_json()
    return Order(f"relay-{number}", "asyncrl.weights.relay", spec, run_dir, secret)


@dataclass(frozen=True, slots=True)
class NodeRelay:
    """The relay of the node that people call `node`; `caller` knows its address once it is started."""

    node: str
    caller: Caller

    @property
    def source(self) -> WeightSource:
        """As other relays reach it."""
        return WeightSource(node=self.node, url=self.caller.url)


class Spread:
    """Which node gets weights from which.

    Life: made once, over relays that may be started again; nodes may be added. Of a file of weights: locate()
        for each engine, by all engines of a push at once -> each relay pulls once, however many of its node
        ask.
    Waits: locate asks the node's relay until it has all, and ends if that does not answer for ANSWER_S; how
        long it may take in all is its caller's limit (weight_sync.timeout_s).
    Invariant: a node pulls from nodes of live engines before it, nearest first, then from the trainer's: no
        node waits for one after it, and the trainer's link carries a file once, and again for each node that
        lost those before it.
    """

    def __init__(
        self, relays: Sequence[NodeRelay], node_of: Mapping[str, int], *, trainer: int, timeout_s: float
    ) -> None:
        """`relays` of all nodes, in their order, the controller's first. `node_of`: the node of each engine.
        `trainer`: the node of its first rank, which writes. All three may change while the run goes on.
        `timeout_s` is for here().
        """
        self.relays, self.node_of, self.trainer = list(relays), dict(node_of), trainer
        self._timeout_s = timeout_s
        self._having: dict[str, set[int]] = {}
        """Of the newest two digests: the nodes that have the file."""

    async def locate(self, engine: str, sent: Sent, live: Collection[str] = ()) -> Sent:
        """The same weights as this engine reads them: on its own node. `live`: the engines that get them at
        the same time. Raises EngineLost for a node that gives no answer or reaches no other, WeightsLost if
        they are gone with the trainer's node, and RoomError for a node that cannot have them.
        """
        return await self._on_node(self.node_of[engine], engine, sent, live)

    async def here(self, sent: ExportResponse) -> ExportResponse:
        """The same weights in a file of the controller's own node. Raises RoomError."""
        relay, clock = self.relays[0].caller.name, f"weight_sync.timeout_s={self._timeout_s}"
        late = RoomError(relay, f"policy_version {sent.version} did not come within {clock}")
        with waiting(f"policy_version {sent.version} on the controller's node", on=relay):
            async with TimeLimit(self._timeout_s, or_raise=lambda: late):
                return await self._on_node(0, relay, sent, ())

    async def _on_node(self, node: int, who: str, sent: Sent, live: Collection[str]) -> Sent:
        if not sent.path or node == self.trainer == 0:
            return sent
        having = self._having_nowait(sent.digest)
        path = await self._fetched(node, who, sent, self._sources(node, live, having))
        having.add(node)
        return sent.model_copy(update={"path": path})

    def _having_nowait(self, digest: str) -> set[int]:
        nodes = self._having[digest] = self._having.pop(digest, set())  # the newest
        for old in list(self._having)[:-2]:
            del self._having[old]
        return nodes

    def _sources(self, node: int, live: Collection[str], having: Collection[int]) -> list[WeightSource]:
        """The nodes of live engines that come before it in the chain, else those that have it already."""
        getting = {self.node_of[name] for name in live} - {self.trainer}
        before = [other for other in getting if other < node] or [one for one in having if one != node]
        chain = dict.fromkeys([*sorted(before, reverse=True), self.trainer, 0])  # 0: what evaluation has kept
        chain.pop(node, None)
        relays = [self.relays[number] for number in chain]
        return [relay.source for relay in relays if relay.caller.url]  # else its node is away

    async def _fetched(self, node: int, who: str, sent: Sent, sources: Sequence[WeightSource]) -> str:
        relay = self.relays[node]
        request = FetchRequest(digest=sent.digest, path=sent.path, sources=list(sources))
        try:
            while True:
                answer = await relay.caller.post("/fetch", request, FetchResponse, timeout_s=ANSWER_S)
                if answer.path:
                    return answer.path
        except CallLost as error:
            what = f"its node {relay.node} gets no weights: {error}"
            raise EngineLost(who, what, way_out=f"see whether {relay.node} is up.") from error
        except CallRefused as refusal:
            body, kind = refusal.body, RoomError
            if refusal.status == _UNREACHED:
                kind = EngineLost if await self._trainer_answers() else WeightsLost
            raise kind(who, body.error, rule=body.rule, way_out=body.way_out) from refusal

    async def _trainer_answers(self) -> bool:
        try:
            await self.relays[self.trainer].caller.get("/health", RelayHealth, timeout_s=PING_S)
        except (CallLost, CallRefused):
            return False
        return True
