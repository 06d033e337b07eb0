"""Make engine servers of every kind: start arguments and client. ENGINES
(config/engine_kinds.py) has the settings, devices and memory of each kind.

A new kind is an extension with a row of `engines`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncrl.base.errors import EngineLost
from asyncrl.base.extensions import load_place, rows
from asyncrl.base.http import Caller
from asyncrl.config import RunConfig
from asyncrl.config.engine_kinds import EngineKind
from asyncrl.config.trainer_config import PROFILE_FOLDER
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.engine import EngineClient, EngineServer
from asyncrl.messages.worker_api import ChatTokenizer

Body = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOrder:
    """What a run asks of one server: roles and kinds read the parts that they need."""

    config: RunConfig
    run_dir: Path
    name: str
    model_path: Path
    device: str
    """cpu or cuda:N of its first device, or none."""
    threads: int
    slots: int
    max_length: int
    tokenizer: ChatTokenizer
    is_rollout: bool = True
    """False: not one of the engines that sample for training."""
    serves_policy: bool = True
    """False: a model of its own, so settings of `rollout` and pushes do not apply."""
    resident: bool = False
    """Colocated, and it keeps its memory during the trainer's time slice."""
    moves: bool = False
    """Colocated, and engines free their memory for the trainer's time slice."""
    share: float | None = None
    """Fraction of its device's memory; None: no limit."""
    group: BroadcastGroup | None = None
    """Of transport nccl."""
    on_lost: Callable[[EngineLost], None] | None = None

    @property
    def stays(self) -> bool:
        return self.resident and self.is_rollout

    @property
    def returns_routing(self) -> bool:
        return self.config.algorithm.router_replay and self.is_rollout

    @property
    def returns_supports(self) -> bool:
        return self.config.uses_supports and self.is_rollout


@dataclass(frozen=True, slots=True)
class EngineMaker:
    """`module`: of the server, as for `python -m`; it reads the spec. Another Python gets
    links to asyncrl and to the module's own package. `start_factor`: multiple of
    supervision.start_timeout_s until it serves. `canary_tokens`: longest text whose
    logprobs a push compares with the trainer's; 0: none.
    """

    module: str
    spec: Callable[[ServerOrder], Body]
    client: Callable[[ServerOrder, Caller], EngineClient]
    start_factor: int = 1
    canary_tokens: int = 0


def model_spec(order: ServerOrder) -> Body:
    """Return the start arguments of every engine with a model. It sees only its own
    devices.
    """
    return {
        "name": order.name,
        "slots": order.slots,
        "max_length": order.max_length,
        "model_path": str(order.model_path),
        "dtype": order.config.model.dtype,
        "device": order.device.partition(":")[0],
        "threads": order.threads,
        "returns_routing": order.returns_routing,
    }


def embedded_spec(order: ServerOrder) -> Body:
    rollout = order.config.rollout
    return model_spec(order) | {
        "deterministic": rollout.deterministic,
        # A conversation comes back for its next turn, a single-turn prompt does not.
        "num_kept": order.slots
        if order.config.keeps_turns and order.serves_policy
        else 0,
        "stays": order.stays,
        "moves": order.moves and order.is_rollout,
        "share": order.share,
        "fused_decode": rollout.fused_decode and order.is_rollout,
        "profile_steps": order.config.trainer.profile_steps if order.is_rollout else (),
        "profile_dir": str(order.run_dir / PROFILE_FOLDER),
        "aside_dir": None if order.serves_policy else str(order.run_dir),
    }


def our_client(order: ServerOrder, caller: Caller) -> EngineClient:
    has_supports = order.config.rollout.facts.reports_supports
    return EngineServer(caller, broadcast_group=order.group, has_supports=has_supports)


CORE: Mapping[str, EngineMaker] = {
    "embedded": EngineMaker("asyncrl_servers.embedded", embedded_spec, our_client),
}


def maker_of(kind: EngineKind) -> EngineMaker:
    """Return the maker of a kind, which an extension imports on its first use."""
    return CORE.get(kind) or load_place(rows("engines")[kind].maker)
