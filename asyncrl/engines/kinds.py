"""Describe servers in any role, and make engine servers of every kind: start arguments
and client. ENGINES (config/engine_kinds.py) has the settings, devices and memory of each
kind.

A new kind is an extension with a row of `engines`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncrl.base.errors import EngineLost
from asyncrl.base.extensions import extensions, load_place, rows
from asyncrl.base.http import Caller
from asyncrl.config import ModelConfig, RunConfig
from asyncrl.config.device_forms import ServerDevices
from asyncrl.config.engine_kinds import EngineKind
from asyncrl.config.trainer_config import PROFILE_FOLDER
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.engine import EngineServer, ServerClient
from asyncrl.messages.worker_api import ChatTokenizer

Body = dict[str, object]
ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class ServerMaker:
    """`module`: of the server, as for `python -m`; it reads the spec. Another Python gets
    links to asyncrl and to the module's own package. `start_factor`: multiple of
    supervision.start_timeout_s until it serves. `canary_tokens`: longest text whose
    logprobs a push compares with the trainer's; 0: none.
    """

    module: str
    spec: Callable[[ServerOrder], Body]
    client: Callable[[ServerOrder, Caller], ServerClient]
    start_factor: int = 1
    canary_tokens: int = 0


@dataclass(frozen=True, slots=True)
class OwnModel:
    """A model in addition to the trained model. `key`: the setting with its path."""

    model: ModelConfig
    key: str
    reads_token_ids: bool = True
    """It needs the vocabulary of the run's."""
    is_remote: bool = False
    """Others serve it: only its tokenizer is read."""
    num_sampled: int = 0
    """Tokens that it samples behind each text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A server of a run: its maker, its memory, and its demands on the placement."""

    name: str
    """Of its process; rollout engines add their number."""
    maker: ServerMaker
    engine: EngineKind | None = None
    """Kind of engine that holds its model; None: a server without a KV cache."""
    model: OwnModel | None = None
    """None: the run's model."""
    slots: int = 0
    """Sequences in its KV cache."""
    max_length: int = 0
    """Tokens of each."""
    score_slots: int = 0
    """Texts that it scores at once besides, each with a KV cache."""
    batch_tokens: int = 0
    """Tokens of a forward pass, without `engine`."""
    is_rollout: bool = False
    """It samples for training."""
    key: str = ""
    """placement.KEY has its device."""
    device: ServerDevices = "auto"
    """The value of that key; of a copy, its device."""
    copy_of: str = ""
    """Role that has several servers, all with this value; they share its calls."""
    is_optional: bool = False
    """Without a free device there is no such server; else it shares an engine's."""
    way_out: str = ""
    """A setting without this server."""
    may_leave: bool = False
    """It can be on a device of the trainer that it leaves in the trainer's time slice."""
    serves_evals: bool = False
    """Evaluations call it."""
    url: str = ""
    """Others have started it: it takes no device."""
    secret: str = ""
    """Its key, with `url`."""

    @property
    def shared_name(self) -> str:
        """Return the name that copies have in common."""
        return self.copy_of or self.name

    @property
    def serves_policy(self) -> bool:
        """Return whether the trainer's weights are sent to it."""
        return self.engine is not None and self.model is None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOrder:
    """What a run asks of one server: makers read the parts that they need."""

    config: RunConfig
    role: Role
    run_dir: Path
    name: str
    model_path: Path
    device: str
    """cpu or cuda:N of its first device, or none."""
    threads: int
    tokenizer: ChatTokenizer
    stays: bool = False
    """Colocated, and it keeps its memory during the trainer's time slice."""
    moves: bool = False
    """Colocated, and it frees its memory for the trainer's time slice."""
    share: float | None = None
    """Fraction of its device's memory; None: no limit."""
    group: BroadcastGroup | None = None
    """Of transport nccl."""
    on_lost: Callable[[EngineLost], None] | None = None

    @property
    def returns_routing(self) -> bool:
        return self.config.algorithm.router_replay and self.role.is_rollout

    @property
    def returns_supports(self) -> bool:
        return self.config.uses_supports and self.role.is_rollout


def num_caches(config: RunConfig, role: Role) -> int:
    """Return the number of KV caches per slot: an agent's next turn finds the cache of
    its last one.
    """
    return 2 if config.keeps_turns and role.serves_policy else 1


def _adapters(order: ServerOrder) -> dict[str, Body]:
    """Return the form of each adapter that pushes bring, by role; "" is the only one."""
    if not order.role.serves_policy:
        return {}
    return {
        role: {"rank": lora.rank, "scale": lora.scale, "targets": lora.targets}
        for role, lora in order.config.trainer.adapters.items()
    }


def model_spec(order: ServerOrder) -> Body:
    """Return the start arguments of every engine with a model. It sees only its own
    devices.
    """
    return {
        "name": order.name,
        "adapters": _adapters(order).get(""),
        "slots": order.role.slots,
        "max_length": order.role.max_length,
        "model_path": str(order.model_path),
        "dtype": order.config.model.dtype,
        "device": order.device.partition(":")[0],
        "threads": order.threads,
        "returns_routing": order.returns_routing,
    }


def embedded_spec(order: ServerOrder) -> Body:
    config = order.config
    role = order.role
    is_rollout = role.is_rollout
    gets_all = role.serves_policy and not config.trainer.adapters
    return model_spec(order) | {
        "roles": {} if config.trainer.roles is None else _adapters(order),
        "deterministic": config.rollout.deterministic,
        "num_kept": (num_caches(config, role) - 1) * role.slots,
        "score_slots": role.score_slots,
        "stays": order.stays,
        "moves": order.moves,
        "share": order.share,
        "fused_decode": config.rollout.fused_decode and is_rollout,
        "profile_steps": config.trainer.profile_steps if is_rollout else (),
        "profile_dir": str(order.run_dir / PROFILE_FOLDER),
        # A sleep keeps the weights that no push brings.
        "aside_dir": None if gets_all else str(order.run_dir),
    }


def our_client(order: ServerOrder, caller: Caller) -> EngineServer:
    has_supports = order.config.rollout.facts.reports_supports
    return EngineServer(caller, broadcast_group=order.group, has_supports=has_supports)


CORE: Mapping[str, ServerMaker] = {
    "embedded": ServerMaker("asyncrl_servers.embedded", embedded_spec, our_client),
}


def maker_of(kind: EngineKind) -> ServerMaker:
    """Return the maker of a kind, which an extension imports on its first use."""
    return CORE.get(kind) or load_place(rows("engines")[kind].maker)


def engine_role(config: RunConfig) -> Role:
    """Return the role of the rollout engines, with what extensions change of it."""
    role = sampling_role(config)
    for extension in extensions().values():
        if extension.engine_role:
            role = load_place(extension.engine_role)(config, role)
    return role


def sampling_role(config: RunConfig) -> Role:
    """Return the role of an engine that only samples."""
    rollout = config.rollout
    return Role(
        name=ENGINE,
        maker=maker_of(rollout.engine),
        engine=rollout.engine,
        slots=rollout.num_slots,
        max_length=rollout.max_length,
        is_rollout=True,
    )
