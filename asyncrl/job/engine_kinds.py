"""Engine kinds of rollout.engine. EngineCapabilities (config/generation.py) has their settings, devices and
memory; asyncrl_servers.KIND their servers.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from asyncrl.config import RunConfig
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.engine import EngineClient, EngineServer
from asyncrl.engines.vllm_process import VllmRequirements
from asyncrl.engines.vllm_server import VllmServer
from asyncrl.launch.devices import NO_DEVICE, Placement
from asyncrl.launch.engine_python import find_python, find_version
from asyncrl.launch.fork_server import KEY_ENV
from asyncrl.launch.plan import EVAL_ENGINE, engine_threads
from asyncrl.launch.server import Server
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.trainer.model_folder import load_limit_s

Body: TypeAlias = dict[str, Any]
CANARY_LIMITS = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.25}
"""weight_sync.canary_limit=auto, in nats. vLLM with correct weights: 6e-6 in float32, 0.09 in bfloat16."""
CANARY_TOKENS = 160
"""Longer than vLLM's CPU block, so that its prefix cache takes part."""
VLLM_STARTS = 3
"""Multiple of supervision.start_timeout_s: vLLM first compiles kernels."""


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """Devices of an engine process, which sees only its own. `memory_fraction` is of its device, `cores` of
    its node (None: this machine).
    """

    device: str = "auto"
    is_colocated: bool = False
    is_resident: bool = False
    memory_fraction: float | None = None
    cores: int | None = None


class Embedded:
    """Embedded engine, base of the other kinds."""

    python: Callable[[], Path] | None = None
    package: Callable[[], dict[str, str]] | None = None
    canary_tokens = 0
    """Tokens whose logprobs each push compares; 0: none."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.rollout = config.rollout

    def slots(self, name: str) -> int:
        return self.config.eval_slots if name == EVAL_ENGINE else self.rollout.slots

    def spec(self, model_path: Path, name: str, place: EnginePlace) -> Body:
        is_rollout = name != EVAL_ENGINE
        sync = self.config.weight_sync
        spec: Body = {
            "name": name,
            "slots": self.slots(name),
            "max_length": self.rollout.max_length,
            "model_path": str(model_path),
            "dtype": self.config.model.dtype,
            "device": place.device.partition(":")[0],
            "threads": engine_threads(self.config, place.cores),
            "deterministic": self.rollout.deterministic,
            "has_adapters": sync.facts.sends_adapters,
        }
        optional: Body = {
            "keeps_turns": self.config.keeps_turns,
            "takes_turns": place.is_colocated,
            "stays": place.is_resident,
            "share": place.memory_fraction,
            "returns_routing": self.config.algorithm.router_replay and is_rollout,
        }
        if sync.facts.is_collective and self.rollout.facts.stages_weights and is_rollout:
            optional["receives_bytes"] = sync.chunk_bytes
        return spec | {name: value for name, value in optional.items() if value}

    def client(
        self,
        server: Server,
        placement: Placement,
        model_path: Path,
        tokenizer: HFChatTokenizer,
        broadcast_group: BroadcastGroup | None,
    ) -> EngineClient:
        return EngineServer(server.caller, broadcast_group=broadcast_group)

    def usage(self, sampling: Body, url: str, model_path: Path) -> tuple[str, Body, str]:
        """Return (path, body) of a sampling call, and a hint."""
        body = {"request_id": "r1", "prompt_ids": [1, 2, 3], **sampling}
        return "/generate", body, "  its messages are described in asyncrl/messages/engine_api.py"


class Simulated(Embedded):
    """Latency model that draws tokens from the model's vocabulary."""

    def spec(self, model_path: Path, name: str, place: EnginePlace) -> Body:
        model = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
        vocab_size = model.get("vocab_size") or model["text_config"]["vocab_size"]
        common = {"name": name, "slots": self.slots(name), "max_length": self.rollout.max_length}
        return common | {"vocab_size": vocab_size} | self.rollout.simulated.model_dump(mode="json")


class Vllm(Embedded):
    """vLLM's own server, under a separate Python."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.python = partial(find_python, self.rollout)
        self.package = partial(find_version, self.rollout)
        if config.weight_sync.canary_limit is not None:
            self.canary_tokens = max(2, min(CANARY_TOKENS, self.rollout.max_length - 1))

    def spec(self, model_path: Path, name: str, place: EnginePlace) -> Body:
        """Add the user's own arguments of `vllm serve`. An eval engine is never split over devices."""
        args = dict(self.rollout.vllm)
        if place.memory_fraction is not None:
            args["gpu_memory_utilization"] = place.memory_fraction
        sleeps = place.is_colocated and not place.is_resident
        if sleeps and not {"enable-sleep-mode", "enable_sleep_mode"} & args.keys():
            args["enable_sleep_mode"] = True
        lora = self.config.trainer.lora
        return super().spec(model_path, name, EnginePlace(place.device, cores=place.cores)) | {
            "deterministic": self.config.is_deterministic(place.device),
            "tensor_parallel": 1 if name == EVAL_ENGINE else self.rollout.tensor_parallel,
            "transport": self.config.weight_sync.settled,
            "lora_rank": 1 if lora is None else lora.rank,
            "args": args,
        }

    def client(
        self,
        server: Server,
        placement: Placement,
        model_path: Path,
        tokenizer: HFChatTokenizer,
        broadcast_group: BroadcastGroup | None,
    ) -> EngineClient:
        """Return a client whose readiness includes a check of the server's settings."""
        config = self.config
        is_eval = server.name == EVAL_ENGINE
        device = placement.evaluation if is_eval else placement.engines[0][0]
        if device is None or device.name == NO_DEVICE:  # rollout.urls: the run places no engine server
            device = placement.trainer[0]
        limit = config.weight_sync.canary_limit
        if limit is None:
            limit = math.inf
        elif limit == "auto":
            limit = CANARY_LIMITS[config.model.dtype]
        needed = VllmRequirements(
            model_path=str(model_path),
            dtype=config.model.dtype,
            slots=self.slots(server.name),
            max_length=self.rollout.max_length,
            end_ids=tuple(sorted(tokenizer.end_ids)),
            device=device.name.partition(":")[0],
            special_ids=_special_ids(tokenizer),
            starts_fresh=is_eval or self.rollout.urls is None,
            stays=placement.resident and not is_eval,
            returns_routing=config.algorithm.router_replay and not is_eval,
            canary_limit=limit,
        )
        client = VllmServer(
            server.caller,
            needed,
            decode=tokenizer.decode,
            mark=secrets.token_hex(4),
            broadcast_group=broadcast_group,
        )
        limit_s = VLLM_STARTS * config.supervision.start_timeout_s + load_limit_s(model_path)
        server.ready = partial(client.ready, limit_s)
        return client

    def usage(self, sampling: Body, url: str, model_path: Path) -> tuple[str, Body, str]:
        body = {"token_ids": [1, 2, 3], "sampling_params": sampling | {"logprobs": 0}}
        model = "" if self.config.model.path else f" model.scratch=none model.path={model_path.absolute()}"
        command = f"{KEY_ENV}=$ENGINE_KEY asyncrl run CONFIG rollout.engine=vllm rollout.urls=[{url}]{model}"
        return "/inference/v1/generate", body, f"  use it in a run on this machine: {command}"


def _special_ids(tokenizer: HFChatTokenizer) -> dict[str, int]:
    special = [number for number in range(tokenizer.vocab_size) if number not in tokenizer.text_ids]
    names = {tokenizer.decode([number], skip_special_tokens=False): number for number in special}
    return {name: number for name, number in names.items() if name}


KINDS: dict[str, type[Embedded]] = {"embedded": Embedded, "vllm": Vllm, "simulated": Simulated}


def engine_kind(config: RunConfig) -> Embedded:
    return KINDS[config.rollout.engine](config)
