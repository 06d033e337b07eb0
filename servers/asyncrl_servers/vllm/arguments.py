"""The spec as vLLM's own argument list: fixed arguments, those of other config keys, and those of the user.
Imports no vLLM.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from asyncrl.http import Refused
from asyncrl.messages.base import TransportName

WORKER_EXTENSION = "asyncrl_servers.vllm.worker_extension.WeightLoader"


class VllmSpec(BaseModel):
    """The spec file of `python -m asyncrl_servers.vllm`: one JSON object, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    name: str
    """Name of this server in logs and errors, like engine-0."""
    model_path: str
    """Hugging Face folder with config, weights and tokenizer. Without a tokenizer there are no stop
    strings.
    """
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights. A run writes that of its trainer; auto (bfloat16 on CUDA, float32 on a CPU) is for
    a server alone.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What vLLM must be built for (auto = whatever it is built for)."""
    max_length: int = Field(ge=2)
    """Most tokens of prompt and completion together."""
    slots: int = Field(ge=1)
    """Sequences decoded at once."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each worker; on CPU alone."""
    deterministic: bool = True
    """On CUDA: batch-invariant kernels. On CPU nothing is needed."""
    seed: int = 0
    """Seed of requests that have none."""
    has_adapters: bool = False
    """Adapters will be loaded (weight_sync.transport=lora)."""
    lora_rank: int = Field(default=16, ge=1)
    """Largest rank of an adapter."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Devices that share one model."""
    transport: TransportName = "shm"
    """How weights come: through the worker extension (shm, disk), as adapters (lora), or from the trainer's
    device: chunks (ipc), through the extension too, or a broadcast (nccl), through vLLM's own transfer."""
    args: dict[str, Any] = {}
    """vLLM's own arguments by name."""
    worker_extension: str = WORKER_EXTENSION
    """For tests, which plant faults in a subclass."""


_BLOCK_TOKENS = 128
"""vLLM's block on CPU; a sequence takes whole blocks."""
MIN_BYTES = 2**26


def kv_cache_bytes(folder: Path, dtype: str, slots: int, max_length: int) -> int:
    """Memory in which all slots hold sequences of full length, one block over, from the model's config file
    alone; MIN_BYTES where that does not tell.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        floats = 2 * config["num_hidden_layers"] * kv_heads * head_dim
    except (OSError, ValueError, KeyError, TypeError):
        return MIN_BYTES
    blocks = slots * -(-max_length // _BLOCK_TOKENS) + 1
    return max(MIN_BYTES, int(blocks * _BLOCK_TOKENS * floats * (4 if dtype == "float32" else 2)))


SERVED_NAME = "policy"

ELSEWHERE = {
    "model": "model.path",
    "model_tag": "model.path",
    "served_model_name": "nothing: it is always policy",
    "tokenizer": "model.path",
    "skip_tokenizer_init": "nothing: it follows from model.path",
    "config": "rollout.vllm itself",
    "generation_config": "rollout.temperature",
    "override_generation_config": "rollout.temperature",
    "host": "nothing: it is always 127.0.0.1",
    "port": "rollout.ports",
    "uds": "nothing: servers listen on a port",
    "ssl_keyfile": "nothing: servers listen on 127.0.0.1",
    "ssl_certfile": "nothing: servers listen on 127.0.0.1",
    "api_key": "nothing: the run makes a secret for every server",
    "middleware": "nothing: ours guards every route",
    "api_server_count": "rollout.num_engines",
    "headless": "rollout.num_engines",
    "data_parallel_size": "rollout.num_engines",
    "grpc": "nothing: the run speaks HTTP",
    "dtype": "model.dtype",
    "max_model_len": "rollout.max_prompt_tokens and rollout.max_tokens",
    "max_num_seqs": "rollout.slots",
    "seed": "seed",
    "logprobs_mode": "nothing: the trainer needs processed_logprobs",
    "worker_extension_cls": "nothing: ours loads the weights",
    "weight_transfer_config": "weight_sync.transport",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "enable_lora": "weight_sync.transport=lora",
    "max_lora_rank": "trainer.lora.rank",
    "max_loras": "nothing: one set of adapters serves",
    "disable_uvicorn_access_log": "nothing: it is always on",
    "disable_fastapi_docs": "nothing: it is always on",
    "help": "`vllm serve --help=all` in a shell",
    "enable_scale_out": "nothing: it is always on",
    "tokens_only": "nothing: /inference/v1/generate is always on",
    "enable_prompt_tokens_details": "nothing: it is always on",
    "root_path": "nothing: routes are where they are",
}
"""vLLM arguments that this server sets, and the setting to use instead."""


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The maxima that vLLM knows."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")
KV_CACHE = {"kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override"}
"""Arguments with which the user says how large the KV cache is."""


def build_arguments(spec: VllmSpec, known: Collection[str], *, is_cpu: bool) -> list[str]:
    """The argument list. `known`: the names of its parser's options, with underscores. Raises Refused for an
    argument of the user's.
    """
    given = {name.lstrip("-").replace("-", "_"): value for name, value in spec.args.items()}
    for name in given:
        check_name(name, known)
    if len(given) < len(spec.args):
        what = f"rollout.vllm gives an argument twice: {', '.join(spec.args)}"
        rule = "a name may be written with - or _, and is one argument"
        raise Refused(400, what, rule=rule, way_out="remove one of the two.")
    folder = Path(spec.model_path)
    ours: dict[str, Any] = {
        "model": spec.model_path,
        "served_model_name": SERVED_NAME,
        "dtype": ("float32" if is_cpu else "bfloat16") if spec.dtype == "auto" else spec.dtype,
        "max_model_len": spec.max_length,
        "max_num_seqs": spec.slots,
        "seed": spec.seed,
        # else the model's own file changes top_p and top_k where a request is silent
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_scale_out": True,
        "enable_prompt_tokens_details": True,
        "worker_extension_cls": spec.worker_extension,
        "tensor_parallel_size": spec.tensor_parallel,
        "middleware": "asyncrl_servers.vllm.api_server.BearerOnly",
        "disable_uvicorn_access_log": True,
        "disable_fastapi_docs": True,
    }
    if spec.has_adapters or spec.transport == "lora":
        rank = next((most for most in LORA_RANKS if most >= spec.lora_rank), spec.lora_rank)
        ours |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
    if spec.transport == "nccl":
        ours["weight_transfer_config"] = {"backend": "broadcast"}
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        ours["skip_tokenizer_init"] = True
    defaults: dict[str, Any] = {}
    if is_cpu:
        defaults["enforce_eager"] = True
        defaults["distributed_executor_backend"] = "asyncrl_servers.vllm.monkeypatches.CpuExecutor"
        # Else vLLM takes 92 % of the machine's memory, and refuses to start if some is in use.
        if not given.keys() & KV_CACHE:
            num_bytes = kv_cache_bytes(folder, ours["dtype"], spec.slots, spec.max_length)
            defaults["kv_cache_memory_bytes"] = num_bytes
    arguments = {**defaults, **given, **ours}
    return [part for name, value in arguments.items() for part in _words(name, value, known)]


def check_name(name: str, known: Collection[str]) -> None:
    """Raise Refused if the user may not give this argument, or vLLM has none of that name."""
    plain = name.partition(".")[0].removesuffix("+")
    instead = ELSEWHERE.get(plain) or ELSEWHERE.get(plain.removeprefix("no_"))
    if instead is not None:
        what = f"rollout.vllm has {name}, which asyncrl sets by itself"
        raise Refused(400, what, way_out=f"remove it; use {instead}.")
    if plain not in known:
        near = difflib.get_close_matches(plain, known, n=3, cutoff=0.6)
        what = f"rollout.vllm has {name}, and vLLM has no argument of that name"
        way_out = f"did you mean {' or '.join(near)}?" if near else "see `vllm serve --help=all`."
        raise Refused(400, what, rule="names are those of `vllm serve`, with - or _", way_out=way_out)


def _words(name: str, value: Any, known: Collection[str]) -> list[str]:
    """One argument as words: true and false as switches, lists as several words, dicts as JSON, none as not
    given.
    """
    option = f"--{name.replace('_', '-')}"
    if value is None:
        return []
    if value is True:
        return [option]
    if value is False:
        return [f"--no-{option[2:]}"] if f"no_{name}" in known else []
    if isinstance(value, dict):
        return [option, json.dumps(value)]
    if isinstance(value, list):
        return [option, *map(str, value)]
    return [f"{option}={value}"]
