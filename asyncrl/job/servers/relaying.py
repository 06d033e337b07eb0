"""The relays of a run on several nodes: processes, supervisors, and who gets weights from whom."""

from __future__ import annotations

from pathlib import Path

from asyncrl.http import Caller
from asyncrl.job.servers.server_maker import ServerMaker
from asyncrl.job.start import Server
from asyncrl.job.supervision.supervise import Supervision, Supervisor
from asyncrl.messages.base import RelayHealth
from asyncrl.placement.plan import EVAL_ENGINE
from asyncrl.sync.spread import NodeRelay, Spread, relay_order


class RelaySupervisor(Supervisor):
    """Keeps the relay of a node going. A new one has nothing, and is asked for it by the next engine."""

    kind = "relay"

    def _goes_on(self) -> bool:
        """Who needs it is on the same node, and says whether the run can go on."""
        return True


class Relaying:
    """One relay on each node that weights are on, the controller's first; not started yet."""

    def __init__(self, maker: ServerMaker, staging_dir: Path, supervision: Supervision) -> None:
        placement = maker.placement
        of_engines = {f"engine-{at}": placement.engine_node(at) for at in range(len(placement.engines))}
        of_engines[EVAL_ENGINE] = placement.beside_node
        nodes = sorted({0, placement.rank_node(0), *of_engines.values()})
        self.servers = list[Server]()
        for number in nodes:
            order = relay_order(number, placement.nodes[number], maker.secret, staging_dir, maker.run_dir)
            child, caller = maker.launcher.process(number, order), Caller(order.name, "", maker.secret)
            self.servers.append(Server(child, caller, RelayHealth))
        self.supervisors = [RelaySupervisor([server], supervision) for server in self.servers]
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
    if maker.placement.num_nodes == 1 or not maker.config.weight_sync.facts.is_relayed:
        return None
    return Relaying(maker, staging_dir, supervision)
