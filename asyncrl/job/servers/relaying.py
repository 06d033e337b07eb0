"""The relays of a run on several nodes: processes, supervisors, and who gets weights from whom; and the nodes
that come and go with the engines on them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from asyncrl.config.weight_sync import has_relays
from asyncrl.errors import ConfigError, NodeLost, RoomError
from asyncrl.http import Caller
from asyncrl.job.scale import EngineScale, until_left
from asyncrl.job.servers.server_maker import ServerMaker
from asyncrl.job.start import Server
from asyncrl.job.supervision.supervise import NO_LOSS, NODE_PERIOD_S, Supervision, Supervisor
from asyncrl.messages.base import RelayHealth
from asyncrl.placement.nodes import Launcher
from asyncrl.placement.plan import EVAL_ENGINE
from asyncrl.sync.spread import NodeRelay, Spread, relay_order


class RelaySupervisor(Supervisor):
    """Keeps the relay of a node going. A new one has nothing, and is asked for it by the next engine.
    `on_up`: called when one has come up.
    """

    kind = "relay"
    on_up: Callable[[], None] | None = None

    async def park(self) -> None:
        """It is not wanted for now, and no node pulls from it."""
        (server,) = self._processes
        self.is_up, server.caller.url = False, ""
        await self._end()
        self._restarts.rests_nowait()

    async def _works_again(self) -> None:
        if self.on_up is not None:
            self.on_up()

    def _goes_on(self) -> bool:
        """Who needs it is on the same node, and says whether the run can go on."""
        return True


class ElasticNode:
    """A node that has engines of a scaled run and nothing else: the run has it while one of them is wanted.

    Life: away: nothing is reserved -> one of its engines is wanted: the launcher looks for a node, its relay
        starts -> there: engines start, work and are parked -> all of them are: the relay ends, and the
        node is given back -> away.
    Waits: for a node supervision.node_wait_s, then only the engines before it are wanted.
    Invariant: no engine starts before the relay is up, which brings it weights; none is left when it ends.
    """

    def __init__(
        self, node: int, scale: EngineScale, launcher: Launcher, relay: RelaySupervisor | None, wait_s: float
    ) -> None:
        """`relay`: of this node, where it has one. `wait_s`: supervision.node_wait_s."""
        self.name, self._node, self._scale = f"node {node}", node, scale
        self._launcher, self._relay, self._wait_s = launcher, relay, wait_s
        self._is_ours = node not in scale.away
        if relay is not None:
            relay.on_up = lambda: scale.node_comes_nowait(node)
            if node in scale.away:
                relay.is_up = False
                scale.parked.add(relay.name)

    async def run(self) -> None:
        """Have it there and away, until cancelled. Raises the RoomError that ends the run."""
        while True:
            await self._scale.wait_node_wanted(self._node)
            left = self._scale.wait_node_left(self._node)
            try:
                await until_left(self._be_there(), left, self.name)
            except (RoomError, ConfigError) as error:
                if self._node not in self._scale.away or isinstance(error, NO_LOSS):
                    raise
                for name in self._scale.engines_of(self._node, is_wanted=True)[:1]:
                    self._scale.gives_up_nowait(name, error)
            if self._relay is not None:
                await self._relay.park()
                self._scale.parked.add(self._relay.name)
            await self._launcher.rest(self._node)
            if self._is_ours:
                self._scale.say(f"{self._launcher.nodes[self._node].name} is given back")
            self._is_ours = False

    async def _be_there(self) -> None:
        if not self._is_ours:
            await self._come()
        if self._relay is not None:
            self._scale.parked.discard(self._relay.name)
            await self._relay.run()
        self._scale.node_comes_nowait(self._node)
        await asyncio.Event().wait()

    async def _come(self) -> None:
        engines, clock = ", ".join(self._scale.engines_of(self._node)), asyncio.get_running_loop().time
        self._scale.say(f"looking for a node for {engines}, {self._wait_s:g} s at most")
        until_s = clock() + self._wait_s
        while not self._is_ours:
            try:
                await self._launcher.come(self._node)
                self._is_ours = True
            except NodeLost as error:
                if clock() > until_s:
                    limit = f"supervision.node_wait_s={self._wait_s:g} is the limit"
                    what = f"no node has come for {engines} within {self._wait_s:g} s: {error.fault}"
                    raise RoomError("launcher", what, rule=limit, way_out=error.way_out) from error
                await asyncio.sleep(NODE_PERIOD_S)
        node = self._launcher.nodes[self._node]
        self._scale.say(f"{node.name} ({node.address}) is there for {engines}")


class Relaying:
    """One relay on each node that weights are on, the controller's first; not started yet."""

    def __init__(self, maker: ServerMaker, staging_dir: Path, supervision: Supervision) -> None:
        placement = maker.placement
        of_engines = {f"engine-{at}": placement.engine_node(at) for at in range(len(placement.engines))}
        if placement.evaluation is not None:
            of_engines[EVAL_ENGINE] = placement.beside_node
        nodes = sorted({0, placement.rank_node(0), *of_engines.values()})
        self.servers, start_s = list[Server](), maker.config.supervision.start_timeout_s
        for number in nodes:
            order = relay_order(number, placement.nodes[number], maker.secret, staging_dir, maker.run_dir)
            child, caller = maker.launcher.process(number, order), Caller(order.name, "", maker.secret)
            self.servers.append(Server(child, caller, RelayHealth, start_s))
        self.supervisors = {
            number: RelaySupervisor([server], supervision)
            for number, server in zip(nodes, self.servers, strict=True)
        }
        self.spread = Spread(
            [
                NodeRelay(placement.nodes[number].name, server.caller)
                for number, server in zip(nodes, self.servers, strict=True)
            ],
            {name: nodes.index(node) for name, node in of_engines.items()},
            trainer=nodes.index(placement.rank_node(0)),
            timeout_s=maker.config.weight_sync.timeout_s,
        )


def make_relaying(maker: ServerMaker, staging_dir: Path, supervision: Supervision) -> Relaying | None:
    """None where all nodes read the weights where the trainer writes them."""
    has_eval_engine = maker.placement.evaluation is not None
    if maker.placement.num_nodes == 1 or not has_relays(maker.config, has_eval_engine=has_eval_engine):
        return None
    return Relaying(maker, staging_dir, supervision)
