"""Makes the client of each engine server: the one for our own protocol, or the one that knows vLLM's routes. Starts nothing."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.engines import EngineClient, EngineServer, VllmFacts, VllmServer
from asyncrl.placement.cuda import find_cuda_devices
from asyncrl.placement.devices import NO_DEVICE, place
from asyncrl.placement.plan import EVAL_ENGINE
from asyncrl.producers.tokenizer import HFChatTokenizer
from asyncrl.running.specs import max_length
from asyncrl.running.startup import Server

CANARY_LIMITS = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.25}
"""publisher.canary_limit=auto, in nats. A vLLM with the right weights is measured at 6e-6 in float32, 0.09 in bfloat16."""


def connect(
    config: RunConfig, server: Server, model_path: Path, tokenizer: HFChatTokenizer, *, warn: Callable[[str], None]
) -> EngineClient:
    """The client of an engine server, which is not started yet; whoever starts it asks through this whether it is ready."""
    if config.rollout.engine != "vllm":
        return EngineServer(server.caller)
    facts = vllm_facts(config, server.name, model_path, tokenizer)
    client = VllmServer(
        server.caller, facts=facts, decode=tokenizer.decode, canary_limit=canary_limit(config, facts.dtype),
        retries=config.publisher.retries, chunk_bytes=config.publisher.chunk_bytes, warn=warn,
        mark=secrets.token_hex(4),
    )  # fmt: skip
    server.asked = client
    return client


def vllm_facts(config: RunConfig, name: str, model_path: Path, tokenizer: HFChatTokenizer) -> VllmFacts:
    """What this server must be started with, as far as what it samples depends on it."""
    placement = place(config, len(find_cuda_devices()))
    is_eval = name == EVAL_ENGINE and config.eval is not None
    device = placement.evaluation if is_eval else placement.rollout[0]
    if device is None or device == NO_DEVICE:  # somebody else's, so nobody told
        device = placement.trainer[0]
    return VllmFacts(
        model_path=str(model_path),
        dtype=config.model.dtype,
        slots=config.eval.slots if is_eval and config.eval is not None else config.rollout.slots,
        max_length=max_length(config),
        end_ids=tuple(sorted(tokenizer.end_ids)),
        has_adapters=config.publisher.transport == "lora",
        device=device.partition(":")[0],
        special_ids=_special_ids(tokenizer),
        starts_fresh=is_eval or config.rollout.urls is None,
    )


def _special_ids(tokenizer: HFChatTokenizer) -> dict[str, int]:
    """Tokens that are no text, by their names."""
    special = [number for number in range(tokenizer.vocab_size) if number not in tokenizer.text_ids]
    names = {tokenizer.decode([number], skip_special_tokens=False): number for number in special}
    return {name: number for name, number in names.items() if name}  # the vocabulary may have rows that are no token


def canary_limit(config: RunConfig, dtype: str) -> float:
    """Most by which logprobs may differ from the trainer's. Without a limit no push has a canary."""
    limit = config.publisher.canary_limit
    if limit is None:
        return math.inf
    return CANARY_LIMITS[dtype] if limit == "auto" else limit
