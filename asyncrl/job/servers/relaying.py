"""The relays of a run on several nodes: processes, supervisors, and who gets weights from whom; and the nodes
that come and go with the engines on them.
"""

from __future__ import annotations

from pathlib import Path

from asyncrl.config.weight_sync import has_relays
from asyncrl.http import Caller
from asyncrl.job.servers.server_maker import ServerMaker
from asyncrl.job.start import Server
from asyncrl.job.supervision.supervise import Supervision, Supervisor
from asyncrl.messages.base import RelayHealth
from asyncrl.placement.plan import EVAL_ENGINE
from asyncrl.sync.spread import NodeRelay, Spread, relay_order


class RelaySupervisor(Supervisor):
    """Restart the relay of a node. A new relay has no file until an engine asks for it."""

    kind = "relay"

    def _goes_on(self) -> bool:
        """Who needs it is on the same node, and says whether the run can go on."""
        return True


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
