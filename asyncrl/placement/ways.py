"""How weights travel from the trainer to the engines, in words with the reason. Knows a placement; computes nothing."""

from __future__ import annotations

from asyncrl.config import RunConfig
from asyncrl.placement.chunk_way import chunk_way
from asyncrl.placement.devices import NO_DEVICE, Placement
from asyncrl.placement.memory import size_text


def transport_text(config: RunConfig, placement: Placement) -> str:
    """Mode and transport in one line, with the reason."""
    if placement.mode == "colocated":
        return f"colocated on {placement.shared}, in turns: {_in_turns(config, placement)}"
    engines = "elsewhere" if config.rollout.urls is not None else f"on {', '.join(dict.fromkeys(_all_devices(placement)))}"
    sides = f"trainer on {', '.join(dict.fromkeys(placement.trainer))}, engines {engines}"
    return f"apart ({sides}): {_apart(config, placement)}"


def verified_text(config: RunConfig) -> str:
    """How a push is verified and in what order engines swap, in one line."""
    checks = "the digest of what was loaded"
    if config.rollout.engine == "vllm" and config.publisher.canary_limit is not None:
        limit = config.publisher.canary_limit
        words = "0.001 nats in float32, 0.25 in bfloat16" if limit == "auto" else f"{limit} nats"
        checks += f", and the logprobs of a fixed text (canary: within {words} of the trainer's)"
    order = "one engine after the other" if config.publisher.rolling and config.rollout.num_engines > 1 else "all engines at once"
    return f"{checks}; running requests: {config.publisher.interrupt}; {order}"


def _in_turns(config: RunConfig, placement: Placement) -> str:
    loads = "an engine that has just woken has room for one set of weights, and chunks are loaded straight into it"
    way = chunk_way(config, placement)
    return f"weights go {way.how} in chunks of {size_text(config.publisher.chunk_bytes)}, because {way.why}, and {loads}"


def _apart(config: RunConfig, placement: Placement) -> str:
    match config.publisher.transport:
        case "nccl":
            how = "NCCL" if placement.is_on_cuda else "gloo"
            return f"all weights go by {how}, in one broadcast from a copy that the trainer holds on its device, to all engines at once"
        case "disk":
            return f"all weights go as one file in {config.publisher.disk_dir}, because engines on other machines can read it there"
        case transport:
            what = "the adapters alone" if transport == "lora" else "all weights"
            return f"{what} go as one file in shared memory, because engines read it while they go on with the old ones"


def _all_devices(placement: Placement) -> list[str]:
    devices = [device for group in placement.parallel for device in group] or list(placement.rollout)
    return devices if devices else [NO_DEVICE]
