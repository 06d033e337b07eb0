"""Start arguments and clients of vLLM servers."""

from __future__ import annotations

import secrets

from asyncrl.base.http import Caller
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.kinds import Body, ServerMaker, ServerOrder, model_spec
from asyncrl.extensions.vllm.settings import ARGUMENTS, TENSOR_PARALLEL
from asyncrl.extensions.vllm.vllm_process import START_FACTOR, VllmRequirements
from asyncrl.extensions.vllm.vllm_server import CANARY_TOKENS, VllmServer


def _vllm_spec(order: ServerOrder) -> Body:
    """Add the user's own arguments of `vllm serve`. An eval engine is never split over
    devices.
    """
    config = order.config
    rollout = config.rollout
    args = dict(ARGUMENTS.of(rollout)) if order.role.serves_policy else {}
    if order.share is not None:
        args["gpu_memory_utilization"] = order.share
    is_told_to_sleep = {"enable-sleep-mode", "enable_sleep_mode"} & args.keys()
    if order.moves and not is_told_to_sleep:
        # vLLM allocates weights and cache in memory that it can free only if it was
        # started so.
        args["enable_sleep_mode"] = True
    return model_spec(order) | {
        "deterministic": config.is_deterministic(order.device),
        "tensor_parallel": TENSOR_PARALLEL.of(rollout) if order.role.is_rollout else 1,
        "fits_slots": not order.role.serves_policy,
        "returns_supports": order.returns_supports,
        "args": args,
    }


def _vllm_client(order: ServerOrder, caller: Caller) -> EngineClient:
    """Return a client whose ready() checks the server's settings."""
    config = order.config
    limit = config.weight_sync.canary_limit
    lora = config.trainer.lora if order.role.serves_policy else None
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
        slots=order.role.slots,
        max_length=order.role.max_length,
        end_ids=tuple(sorted(tokenizer.end_ids)),
        special_ids={name: number for name, number in special.items() if name},
        stays=order.stays,
        adapter_rank=0 if lora is None else lora.rank,
        adapter_scale=None if lora is None else lora.scale,
        returns_routing=order.returns_routing,
        returns_supports=order.returns_supports,
        canary_limit=None if limit == "auto" else limit,
        decode=tokenizer.decode,
        # New for each client, and so for each run: an external server outlives a run,
        # and its tokens of a run before must not pass as ours.
        mark=secrets.token_hex(4),
    )
    return VllmServer(caller, needed, broadcast_group=order.group)


MAKER = ServerMaker(
    "asyncrl_servers.vllm", _vllm_spec, _vllm_client, START_FACTOR, CANARY_TOKENS
)
