"""vLLM's arguments and environment from the spec, and failures from its log. Imports no vLLM."""

from __future__ import annotations

import getpass
import importlib.metadata
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from asyncrl.base.http import Refused
from asyncrl.messages.engine_api import MAX_TOP_LOGPROBS
from asyncrl_servers.engine_routes import EngineSpec

GRAMMARS = "asyncrl_servers.vllm.monkeypatches"
WORKER_EXTENSION = "asyncrl_servers.vllm.worker_extension.WeightLoader"


class VllmSpec(EngineSpec):
    model_path: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weight dtype; auto: bfloat16 on CUDA, float32 on CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Required build of vLLM (auto = any)."""
    threads: int = Field(default=1, ge=1)
    deterministic: bool = True
    """Batch-invariant kernels on CUDA."""
    seed: int = 0
    has_adapters: bool = False
    returns_routing: bool = False
    """Return each token's experts (algorithm.router_replay)."""
    lora_rank: int = Field(default=16, ge=1)
    tensor_parallel: int = Field(default=1, ge=1)
    args: dict[str, Any] = {}
    worker_extension: str = WORKER_EXTENSION
    """Tests replace it to inject faults."""


_BLOCK_TOKENS = 128
"""vLLM's block size on CPU."""
MIN_BYTES = 2**26


def kv_cache_bytes(folder: Path, dtype: str, slots: int, max_length: int) -> int:
    """Return the bytes for full slots plus one block; MIN_BYTES if the config lacks a value."""
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


SETTINGS = {
    "model.path": ("model", "model_tag", "tokenizer"),
    "model.dtype": ("dtype",),
    "seed": ("seed",),
    "rollout.vllm itself": ("config",),
    "rollout.temperature": ("generation_config", "override_generation_config"),
    "rollout.max_prompt_tokens and rollout.max_tokens": ("max_model_len",),
    "rollout.slots": ("max_num_seqs",),
    "rollout.ports": ("port",),
    "rollout.num_engines": ("api_server_count", "headless", "data_parallel_size"),
    "rollout.tensor_parallel": ("tensor_parallel_size",),
    "weight_sync.transport": ("weight_transfer_config", "enable_lora"),
    "trainer.lora.rank": ("max_lora_rank",),
    "algorithm.router_replay": ("enable_return_routed_experts", "aux_output_config"),
    "`vllm serve --help=all` in a shell": ("help",),
    "nothing: the run and its trainer depend on it": (
        *("served_model_name", "skip_tokenizer_init", "logprobs_mode", "worker_extension_cls", "max_loras"),
        *("enable_scale_out", "tokens_only", "api_key", "middleware", "grpc"),
        *("host", "uds", "root_path", "ssl_keyfile", "ssl_certfile"),
        *("max_logprobs", "structured_outputs_config", "reasoning_parser", "reasoning_parser_plugin"),
        *("disable_uvicorn_access_log", "disable_fastapi_docs"),
    ),
}
ELSEWHERE = {name: setting for setting, names in SETTINGS.items() for name in names}
"""Setting to use instead, by vLLM argument."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")
KV_CACHE = {"kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override"}


def build_arguments(spec: VllmSpec, *, is_cpu: bool) -> list[str]:
    """Raises Refused for arguments that the run sets itself; vLLM's parser refuses unknown ones."""
    given = {name.lstrip("-").replace("-", "_"): value for name, value in spec.args.items()}
    for name in given:
        plain = name.partition(".")[0].removesuffix("+")
        instead = ELSEWHERE.get(plain) or ELSEWHERE.get(plain.removeprefix("no_"))
        if instead is not None:
            what = f"rollout.vllm has {name}, which asyncrl sets by itself"
            raise Refused(400, what, way_out=f"remove it; use {instead}.")
    folder = Path(spec.model_path)
    ours: dict[str, Any] = {
        "model": spec.model_path,
        "served_model_name": "policy",
        "dtype": ("float32" if is_cpu else "bfloat16") if spec.dtype == "auto" else spec.dtype,
        "max_model_len": spec.max_length,
        "max_num_seqs": spec.slots,
        "seed": spec.seed,
        # else the model's file sets top_p and top_k
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        # the sampled token takes a place
        "max_logprobs": MAX_TOP_LOGPROBS + 1,
        "structured_outputs_config": {"backend": "guidance", "reasoning_parser_plugin": GRAMMARS},
        "enable_scale_out": True,
        "worker_extension_cls": spec.worker_extension,
        "tensor_parallel_size": spec.tensor_parallel,
        "middleware": "asyncrl_servers.vllm.api_server.BearerOnly",
        "disable_uvicorn_access_log": True,
        "disable_fastapi_docs": True,
    }
    if spec.has_adapters:
        rank = next((most for most in LORA_RANKS if most >= spec.lora_rank), spec.lora_rank)
        ours |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
    if spec.returns_routing:
        ours["enable_return_routed_experts"] = True
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        ours["skip_tokenizer_init"] = True
    defaults: dict[str, Any] = {}
    if is_cpu:
        executor = "asyncrl_servers.vllm.monkeypatches.CpuExecutor"
        defaults |= {"enforce_eager": True, "distributed_executor_backend": executor}
        # By default vLLM takes 92 % of the machine's memory.
        if not given.keys() & KV_CACHE:
            num_bytes = kv_cache_bytes(folder, ours["dtype"], spec.slots, spec.max_length)
            defaults["kv_cache_memory_bytes"] = num_bytes
    arguments = {**defaults, **given, **ours}
    return [part for name, value in arguments.items() for part in _words(name, value)]


def _words(name: str, value: Any) -> list[str]:
    """Booleans become switches, dicts JSON, None nothing."""
    option = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    if isinstance(value, dict):
        return [f"--{option}", json.dumps(value)]
    if isinstance(value, list):
        return [f"--{option}", *map(str, value)]
    return [f"--{option}={value}"]


def check_start(spec: VllmSpec) -> None:
    """Raise Refused for the wrong build, before the slow import."""
    built_for = "cpu" if is_cpu_build() else "cuda"
    if spec.device not in ("auto", built_for):
        what = f"{spec.name} is to run on {spec.device}, the vLLM of {sys.executable} is for {built_for}"
        way_out = "install the other build (`make setup-vllm`: CPU), or name it in rollout.vllm_python."
        raise Refused(400, what, way_out=way_out)


def is_cpu_build() -> bool:
    return importlib.metadata.version("vllm").endswith("cpu")


def set_environment(spec: VllmSpec, scratch: Path) -> None:
    """`scratch` holds sockets and temporary files."""
    # A scratch folder would recompile torch's kernels at each start.
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    os.environ |= {
        "VLLM_SERVER_DEV_MODE": "1",  # enables /pause, /resume, /collective_rpc
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # avoids 20 s of retries for a mistyped path
        # 5 s breaks pooled clients' next POST
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TMPDIR": str(scratch),
    }
    tempfile.tempdir = None  # read TMPDIR again
    if spec.has_adapters:
        os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if is_cpu_build():
        # "auto" would bind every server to the same first core.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ["OMP_NUM_THREADS"] = str(spec.threads)
    elif spec.deterministic:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"  # on CPU the first request would end the engine


def can_fork(spec: VllmSpec) -> bool:
    """Return true on CPU with one unbound thread: OpenMP threads do not survive a fork. Call it after
    set_environment.
    """
    is_bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind"
    is_bound |= not spec.args.keys().isdisjoint({"numa-bind", "numa_bind"})
    return is_cpu_build() and spec.threads == 1 and not is_bound


_ERROR_LINE = re.compile(r"\b((?:\w+\.)*\w*(?:Error|Exception): .+|Worker proc \S+ died unexpectedly.*)")
_POINTERS = (
    "Engine core initialization failed",
    "Failed core proc",
    "WorkerProc initialization failed",
    "See root cause",
    "See stack trace",
    "EngineDeadError",
    "EngineCore encountered",
    "Executor failed",
    "RuntimeError: cancelled",  # it waited for a lost worker
    "died unexpectedly (exit code: 0)",  # it was ended after reporting the cause
)
"""Messages that point to a cause in another log."""


def failure(what: str, said: str) -> Refused:
    """Use `said`, or the log's last error if `said` only points there."""
    if not said or any(pointer in said for pointer in _POINTERS):
        said = last_error(_own_log()) or said or "SIGKILL perhaps, often by the kernel when memory runs out"
    way_out = "read this server's log, correct the cause, and start the run again."
    if "memory" in said.lower():
        way_out = "lower rollout.slots or rollout.vllm.kv_cache_memory_bytes, or free memory."
    return Refused(500, f"{what}: {' '.join(said.split())[:1500]}", way_out=way_out)


def last_error(log: str) -> str:
    for line in reversed(log.splitlines()):
        found = _ERROR_LINE.search(line)
        if found and " WARNING " not in line and not any(pointer in line for pointer in _POINTERS):
            return found[1]
    return ""


def _own_log() -> str:
    try:
        log = Path("/proc/self/fd/2").readlink()
        return log.read_bytes()[-(2**20) :].decode("utf-8", errors="replace") if log.is_file() else ""
    except OSError:
        return ""
