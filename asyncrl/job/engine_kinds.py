"""Engine kinds of rollout.engine: one class each, and a line in KINDS.

EngineCapabilities (asyncrl/config/generation.py) has their settings, devices and memory; clients are in
asyncrl/engines, servers in asyncrl_servers.KIND.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from asyncrl.config import RunConfig
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.engine import EngineClient, EngineServer
from asyncrl.engines.vllm_process import VllmRequirements
from asyncrl.engines.vllm_server import VllmServer
from asyncrl.launch.choice import NO_DEVICE
from asyncrl.launch.fit import find_python, find_version
from asyncrl.launch.fork_server import KEY_ENV
from asyncrl.launch.plan import EVAL_ENGINE, engine_threads
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.trainer.model_folder import load_limit_s

if TYPE_CHECKING:
    from asyncrl.job.servers.server_maker import ServerMaker
    from asyncrl.job.start import Server

Body: TypeAlias = dict[str, Any]
CANARY_LIMITS = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.25}
"""weight_sync.canary_limit=auto, in nats. Measured for vLLM with correct weights: 6e-6 in float32, 0.09 in
bfloat16.
"""
CANARY_TOKENS = 160
"""Longer than vLLM's block on the CPU, so that its prefix cache takes part."""
VLLM_STARTS = 3
"""Multiple of supervision.start_timeout_s: vLLM compiles kernels at its first start."""


class Embedded:
    """Embedded engine, base of the other kinds."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.rollout = config, config.rollout

    def canary_tokens(self) -> int:
        """Return the length of the text whose logprobs each push compares; 0 for none."""
        return 0

    def slots(self, name: str) -> int:
        return self.config.eval_slots if name == EVAL_ENGINE else self.rollout.slots

    def spec(
        self,
        model_path: Path,
        name: str,
        device: str = "auto",
        *,
        takes_turns: bool = False,
        stays: bool = False,
        share: float | None = None,
        cores: int | None = None,
    ) -> Body:
        """Return the start arguments. The server sees only its own devices, so `device` needs no number.
        `stays`: keep memory when colocated. `share`: fraction of device memory. `cores`: of its node
        (None: this machine).
        """
        is_replayed = self.config.algorithm.router_replay and name != EVAL_ENGINE
        sync = self.config.weight_sync
        is_sent = sync.facts.is_collective and self.rollout.facts.stages_weights and name != EVAL_ENGINE
        return {
            "name": name,
            "slots": self.slots(name),
            "max_length": self.rollout.max_length,
            "model_path": str(model_path),
            "dtype": self.config.model.dtype,
            "device": device.partition(":")[0],
            "threads": engine_threads(self.config, cores),
            "deterministic": self.config.rollout.deterministic,
            "has_adapters": sync.facts.sends_adapters,
            **({"keeps_turns": True} if self.config.keeps_turns else {}),
            **({"takes_turns": True} if takes_turns else {}),
            **({"stays": True} if stays else {}),
            **({} if share is None else {"share": share}),
            **({"returns_routing": True} if is_replayed else {}),
            **({"receives_bytes": sync.chunk_bytes} if is_sent else {}),
        }

    def python(self) -> Callable[[], Path] | None:
        """Return a function that finds the server's Python on its node; None: this Python."""
        return None

    def package(self) -> Callable[[], dict[str, str]] | None:
        """Return a function that finds the required package and version on its node, if any."""
        return None

    def client(
        self, server: Server, maker: ServerMaker, broadcast_group: BroadcastGroup | None
    ) -> EngineClient:
        """Return the client of a server before its start. `broadcast_group`: broadcast group."""
        return EngineServer(server.caller, broadcast_group=broadcast_group)

    def request(self, sampling: Body) -> tuple[str, Body]:
        """Return (path, body) of a sampling call to show users."""
        return "/generate", {"request_id": "r1", "prompt_ids": [1, 2, 3], **sampling}

    def how_to_use(self, url: str, model_path: Path) -> str:
        return "  it speaks the messages of asyncrl/messages/engine_api.py and frames.py"


class Simulated(Embedded):
    """Latency model that draws tokens from the model's vocabulary."""

    def spec(self, model_path: Path, name: str, device: str = "auto", **turns: Any) -> Body:
        model = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
        vocab_size = model.get("vocab_size") or model["text_config"]["vocab_size"]
        common = {"name": name, "slots": self.slots(name), "max_length": self.rollout.max_length}
        return common | {"vocab_size": vocab_size} | self.rollout.simulated.model_dump(mode="json")


class Vllm(Embedded):
    """vLLM's own server, under a separate Python."""

    def canary_tokens(self) -> int:
        if self.config.weight_sync.canary_limit is None:
            return 0
        return max(2, min(CANARY_TOKENS, self.rollout.max_length - 1))

    def spec(
        self,
        model_path: Path,
        name: str,
        device: str = "auto",
        *,
        takes_turns: bool = False,
        stays: bool = False,
        share: float | None = None,
        cores: int | None = None,
    ) -> Body:
        """Add the user's own arguments of `vllm serve`. An eval engine is never split over devices."""
        args, lora = dict(self.rollout.vllm), self.config.trainer.lora
        if share is not None:
            args["gpu_memory_utilization"] = share
        if takes_turns and not stays and not {"enable-sleep-mode", "enable_sleep_mode"} & args.keys():
            args["enable_sleep_mode"] = True
        return super().spec(model_path, name, device, cores=cores) | {
            "deterministic": self.config.is_deterministic(device),
            "tensor_parallel": 1 if name == EVAL_ENGINE else self.rollout.tensor_parallel,
            "transport": self.config.weight_sync.settled,
            "lora_rank": 1 if lora is None else lora.rank,
            "args": args,
        }

    def python(self) -> Callable[[], Path]:
        return partial(find_python, self.rollout)

    def package(self) -> Callable[[], dict[str, str]]:
        return partial(find_version, self.rollout)

    def client(
        self, server: Server, maker: ServerMaker, broadcast_group: BroadcastGroup | None
    ) -> EngineClient:
        """Return a client whose readiness includes a check of the server's settings."""
        config, placement, tokenizer = self.config, maker.placement, maker.tokenizer
        is_eval = server.name == EVAL_ENGINE
        device = placement.evaluation if is_eval else placement.rollout[0]
        if device is None or device == NO_DEVICE:  # rollout.urls: the run places no engine server
            device = placement.trainer[0]
        limit = config.weight_sync.canary_limit
        if limit is None:
            limit = math.inf
        elif limit == "auto":
            limit = CANARY_LIMITS[config.model.dtype]
        needed = VllmRequirements(
            model_path=str(maker.model_path),
            dtype=config.model.dtype,
            slots=self.slots(server.name),
            max_length=self.rollout.max_length,
            end_ids=tuple(sorted(tokenizer.end_ids)),
            device=device.partition(":")[0],
            special_ids=_special_ids(tokenizer),
            starts_fresh=is_eval or self.rollout.urls is None,
            stays=placement.stays and not is_eval,
            returns_routing=config.algorithm.router_replay and not is_eval,
            canary_limit=limit,
            chunk_bytes=config.weight_sync.chunk_bytes,
        )
        client = VllmServer(
            server.caller,
            needed,
            decode=tokenizer.decode,
            mark=secrets.token_hex(4),
            broadcast_group=broadcast_group,
        )
        limit_s = VLLM_STARTS * maker.config.supervision.start_timeout_s + load_limit_s(maker.model_path)
        server.ready = partial(client.ready, limit_s)
        return client

    def request(self, sampling: Body) -> tuple[str, Body]:
        return "/inference/v1/generate", {
            "token_ids": [1, 2, 3],
            "sampling_params": sampling | {"logprobs": 0},
        }

    def how_to_use(self, url: str, model_path: Path) -> str:
        model = "" if self.config.model.path else f" model.scratch=none model.path={model_path.absolute()}"
        command = f"{KEY_ENV}=$ENGINE_KEY asyncrl run CONFIG rollout.engine=vllm rollout.urls=[{url}]{model}"
        return f"  a run on this machine takes it with: {command}"


def _special_ids(tokenizer: HFChatTokenizer) -> dict[str, int]:
    """Return ids of non-text tokens by name. The vocabulary may have rows without a token."""
    special = [number for number in range(tokenizer.vocab_size) if number not in tokenizer.text_ids]
    names = {tokenizer.decode([number], skip_special_tokens=False): number for number in special}
    return {name: number for name, number in names.items() if name}


KINDS: dict[str, type[Embedded]] = {"embedded": Embedded, "vllm": Vllm, "simulated": Simulated}


def engine_kind(config: RunConfig) -> Embedded:
    return KINDS[config.rollout.engine](config)
