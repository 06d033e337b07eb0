"""What each child process is told at its start: JSON made from the config. Starts nothing."""

from __future__ import annotations

import json
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.placement.plan import engine_threads, trainer_threads

CANARY_TOKENS = 160
"""Longer than vLLM's block on the CPU, so that its prefix cache takes part."""


def trainer_spec(
    config: RunConfig,
    model_path: Path,
    run_dir: Path,
    staging_dir: Path,
    rank: int = 0,
    *,
    device: str = "auto",
    chunks: str = "file",
) -> str:
    """JSON that a trainer worker is started with. It sees the devices of all ranks and no others, so `device`
    has no number.

    `chunks`: what placement.chunk_device says.
    """
    return json.dumps(
        {
            "model_path": str(model_path),
            "dtype": config.model.dtype,
            "device": device.partition(":")[0],
            "seed": config.seed,
            "threads": trainer_threads(config),
            "rank": rank,
            "trainer": config.trainer.model_dump(mode="json"),
            "algorithm": config.algorithm.model_dump(mode="json"),
            "temperature": config.rollout.temperature,
            "max_tokens": config.rollout.max_tokens,
            "transport": config.weight_sync.transport,
            "is_file_wanted": config.eval is not None,
            "chunk_bytes": config.weight_sync.chunk_bytes,
            "chunks": chunks,
            "canary_tokens": canary_tokens(config),
            "measures_gap": config.rollout.engine != "simulated",
            "staging_dir": str(staging_dir),
            "record_path": str(run_dir / "trained.jsonl"),
            "failed_dir": str(run_dir / "failed_batches"),
            "chat_template": config.model.chat_template,
        }
    )


def canary_tokens(config: RunConfig) -> int:
    """Length of the text whose logprobs go with each push, 0 where nobody compares them."""
    if config.rollout.engine != "vllm" or config.weight_sync.canary_limit is None:
        return 0
    return max(2, min(CANARY_TOKENS, max_length(config) - 1))


def max_length(config: RunConfig) -> int:
    """Most tokens of prompt and completion together."""
    return config.rollout.max_prompt_tokens + config.rollout.max_tokens


def _vocab_size(model_path: Path) -> int:
    """Ids that the model knows: what a simulated engine draws is trained on, and read as text."""
    architecture = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    return int(architecture.get("vocab_size") or architecture["text_config"]["vocab_size"])


def engine_spec(
    config: RunConfig,
    model_path: Path,
    name: str,
    *,
    slots: int | None = None,
    device: str = "auto",
    takes_turns: bool = False,
) -> str:
    """JSON that an engine server is started with; `slots` where they are not those of a rollout engine. It
    sees its devices alone.
    """
    rollout = config.rollout
    common = {"name": name, "slots": slots or rollout.slots, "max_length": max_length(config)}
    if rollout.engine == "simulated":
        return json.dumps(
            common | {"vocab_size": _vocab_size(model_path)} | rollout.simulated.model_dump(mode="json")
        )
    common |= {
        "model_path": str(model_path),
        "dtype": config.model.dtype,
        "device": device.partition(":")[0],
        "threads": engine_threads(config),
        "deterministic": rollout.deterministic,
        "has_adapters": config.weight_sync.way.sends_adapters,
    }
    if rollout.engine == "embedded":
        return json.dumps(common)
    args = dict(rollout.vllm)
    if takes_turns and not {"enable-sleep-mode", "enable_sleep_mode"} & args.keys():
        args["enable_sleep_mode"] = True
    return json.dumps(
        common
        | {
            "tensor_parallel": 1 if slots is not None else rollout.tensor_parallel,
            "transport": config.weight_sync.transport,
            "lora_rank": config.trainer.lora.rank if config.trainer.lora is not None else 1,
            "args": args,
        }
    )
