"""Make engine servers of every kind: start arguments and client. ENGINES
(config/engine_kinds.py) has the settings, devices and memory of each kind.

A new kind is a row in ENGINES, a row in KINDS, its client beside vllm_server.py, and
its server in servers/asyncrl_servers.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncrl.base.errors import EngineLost
from asyncrl.base.http import Caller
from asyncrl.config import RunConfig
from asyncrl.config.engine_kinds import EngineKind
from asyncrl.config.trainer_config import PROFILE_FOLDER
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.engine import EngineClient, EngineServer
from asyncrl.engines.vllm_process import START_FACTOR, VllmRequirements
from asyncrl.engines.vllm_server import CANARY_TOKENS, VllmServer
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
    """`start_factor`: multiple of supervision.start_timeout_s until it serves.
    `canary_tokens`: longest text whose logprobs a push compares with the trainer's; 0:
    none.
    """

    spec: Callable[[ServerOrder], Body]
    client: Callable[[ServerOrder, Caller], EngineClient]
    start_factor: int = 1
    canary_tokens: int = 0


def _size_spec(order: ServerOrder) -> Body:
    return {
        "name": order.name,
        "slots": order.slots,
        "max_length": order.max_length,
    }


def _model_spec(order: ServerOrder) -> Body:
    """Return the start arguments of every engine with a model. It sees only its own
    devices.
    """
    return _size_spec(order) | {
        "model_path": str(order.model_path),
        "dtype": order.config.model.dtype,
        "device": order.device.partition(":")[0],
        "threads": order.threads,
        "returns_routing": order.returns_routing,
    }


def embedded_spec(order: ServerOrder) -> Body:
    rollout = order.config.rollout
    return _model_spec(order) | {
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


def _simulated_spec(order: ServerOrder) -> Body:
    """A latency model that draws tokens from the model's vocabulary."""
    model = json.loads((order.model_path / "config.json").read_text(encoding="utf-8"))
    vocab_size = model.get("vocab_size") or model["text_config"]["vocab_size"]
    latencies = order.config.rollout.simulated.model_dump(mode="json")
    return _size_spec(order) | {"vocab_size": vocab_size} | latencies


def _embedded_client(order: ServerOrder, caller: Caller) -> EngineClient:
    has_supports = order.config.rollout.facts.reports_supports
    return EngineServer(caller, broadcast_group=order.group, has_supports=has_supports)


def _vllm_spec(order: ServerOrder) -> Body:
    """Add the user's own arguments of `vllm serve`. An eval engine is never split over
    devices.
    """
    config = order.config
    rollout = config.rollout
    lora = config.trainer.lora
    args = dict(rollout.vllm) if order.serves_policy else {}
    if order.share is not None:
        args["gpu_memory_utilization"] = order.share
    is_told_to_sleep = {"enable-sleep-mode", "enable_sleep_mode"} & args.keys()
    if order.moves and order.is_rollout and not is_told_to_sleep:
        # vLLM allocates weights and cache in memory that it can free only if it was
        # started so.
        args["enable_sleep_mode"] = True
    return _model_spec(order) | {
        "deterministic": config.is_deterministic(order.device),
        "tensor_parallel": rollout.tensor_parallel if order.is_rollout else 1,
        "has_adapters": config.weight_sync.facts.sends_adapters and order.serves_policy,
        "fits_slots": not order.serves_policy,
        "returns_supports": order.returns_supports,
        "lora_rank": 1 if lora is None else lora.rank,
        "args": args,
    }


def _vllm_client(order: ServerOrder, caller: Caller) -> EngineClient:
    """Return a client whose ready() checks the server's settings."""
    config = order.config
    limit = config.weight_sync.canary_limit
    tokenizer = order.tokenizer
    # vLLM finds stop strings in text, where special tokens have none. Those are passed
    # as stop ids.
    special = {
        tokenizer.decode([number], skip_special_tokens=False): number
        for number in sorted(tokenizer.special_ids)
    }
    needed = VllmRequirements(
        model_path=str(order.model_path),
        dtype=config.model.dtype,
        slots=order.slots,
        max_length=order.max_length,
        end_ids=tuple(sorted(tokenizer.end_ids)),
        special_ids={name: number for name, number in special.items() if name},
        stays=order.stays,
        returns_routing=order.returns_routing,
        returns_supports=order.returns_supports,
        canary_limit=None if limit == "auto" else limit,
        decode=tokenizer.decode,
        # New for each client, and so for each run: an external server outlives a run,
        # and its tokens of a run before must not pass as ours.
        mark=secrets.token_hex(4),
    )
    return VllmServer(caller, needed, broadcast_group=order.group)


KINDS: Mapping[EngineKind, EngineMaker] = {
    "embedded": EngineMaker(embedded_spec, _embedded_client),
    "simulated": EngineMaker(_simulated_spec, _embedded_client),
    "vllm": EngineMaker(_vllm_spec, _vllm_client, START_FACTOR, CANARY_TOKENS),
}
