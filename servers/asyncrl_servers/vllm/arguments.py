"""vLLM's arguments and environment from the spec, and failures from its log. Imports no
vLLM.
"""

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
from asyncrl.models.loading import has_own_head, read_config, sections_of
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
    returns_routing: bool = False
    """Return each token's experts (algorithm.router_replay)."""
    returns_supports: bool = False
    """Return each token's support (rollout.top_p, top_k and min_p)."""
    max_adapters: int = Field(default=0, ge=0)
    """Adapters that may be opened besides the run's own, which `adapters` makes."""
    max_rank: int = Field(default=0, ge=0)
    """Largest rank of them, if it is larger than that of the run's own."""
    tensor_parallel: int = Field(default=1, ge=1)
    fits_slots: bool = False
    """On CUDA too, the KV cache holds `slots` sequences, not the rest of the memory."""
    args: dict[str, Any] = {}
    worker_extension: str = WORKER_EXTENSION
    """Tests replace it to inject faults."""


_BLOCK_TOKENS = 128
"""vLLM's block size on CPU."""
MIN_BYTES = 2**26
_PREFILL_TOKENS = 8192
"""Per step, on CPU."""
SIZES = (
    ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    ("hidden_size", "n_embd", "d_model"),
)
"""Names of heads, layers and width in a config.json. Mamba has no heads."""
WIDER = ("cohere2", "cohere2_moe")
"""Types whose tokens see one token more in vLLM than `sliding_window` has."""
STATE = re.compile(r"mamba|ssm|linear_att|conv_L_cache")
"""In a config.json: layers with a state per sequence, not per token."""


def kv_cache_bytes(folder: Path, dtype: str, slots: int, max_length: int) -> int:
    """Return the bytes for full slots plus one block."""
    config = sections_of(read_config(folder))[-1]
    heads, layers, width = (
        next((config[name] for name in names if name in config), 1) for names in SIZES
    )
    head_dim = config.get("head_dim") or width // heads
    kv_heads = config.get("num_key_value_heads") or heads
    floats = 2 * layers * kv_heads * head_dim
    blocks = slots * -(-max_length // _BLOCK_TOKENS) + 1
    return max(
        MIN_BYTES,
        int(blocks * _BLOCK_TOKENS * floats * (4 if dtype == "float32" else 2)),
    )


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "tekken.json",
)
KV_CACHE = {
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "num_gpu_blocks_override",
}


def build_arguments(spec: VllmSpec, *, is_cpu: bool) -> list[str]:
    """Return vLLM's command line: defaults, the user's arguments, then ours. The config
    has refused arguments that the run sets itself; vLLM's parser refuses unknown ones.
    """
    given = {
        name.lstrip("-").replace("-", "_"): value for name, value in spec.args.items()
    }
    folder = Path(spec.model_path)
    ours: dict[str, object] = {
        "model": spec.model_path,
        "served_model_name": "policy",
        "dtype": ("float32" if is_cpu else "bfloat16")
        if spec.dtype == "auto"
        else spec.dtype,
        "max_model_len": spec.max_length,
        "max_num_seqs": spec.slots,
        "seed": spec.seed,
        # else the model's file sets top_p and top_k
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        # the sampled token takes a place
        "max_logprobs": MAX_TOP_LOGPROBS + 1,
        "structured_outputs_config": {
            "backend": "guidance",
            "reasoning_parser_plugin": GRAMMARS,
        },
        "enable_scale_out": True,
        "worker_extension_cls": spec.worker_extension,
        "tensor_parallel_size": spec.tensor_parallel,
        "middleware": "asyncrl_servers.vllm.monkeypatches.BearerOnly",
        "disable_uvicorn_access_log": True,
        "disable_fastapi_docs": True,
    }
    if spec.adapters is not None:
        needed = max(spec.adapters.rank, spec.max_rank)
        rank = next((most for most in LORA_RANKS if most >= needed), needed)
        # All in one step. As many stay in host memory (max_cpu_loras).
        num_adapters = 1 + spec.max_adapters
        ours |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": num_adapters}
    config = read_config(folder)
    if overrides := _overrides(folder, config):
        given["hf_overrides"] = {**overrides, **given.get("hf_overrides", {})}
    ours |= _query_scaling(sections_of(config)[-1])
    if len(sections_of(config)) > 1:  # the trainer pushes the text part
        ours["language_model_only"] = True
    if spec.returns_routing:
        ours["enable_return_routed_experts"] = True
    if spec.returns_supports:
        ours["return_sampling_mask"] = True
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        ours["skip_tokenizer_init"] = True
    defaults: dict[str, object] = {}
    if is_cpu:
        if STATE.search(json.dumps(config)):
            # vLLM caches prefixes of states only with chunked prefill.
            defaults["enable_prefix_caching"] = False
        executor = "asyncrl_servers.vllm.monkeypatches.CpuExecutor"
        defaults |= {"enforce_eager": True, "distributed_executor_backend": executor}
        # vLLM 0.32's engine dies if a seeded prompt is split: CPU generators have no
        # offset.
        most = max(_PREFILL_TOKENS, spec.max_length)
        defaults |= {"enable_chunked_prefill": False, "max_num_batched_tokens": most}
    # By default vLLM takes 92 % of the machine's or device's memory.
    if (is_cpu or spec.fits_slots) and not given.keys() & KV_CACHE:
        num_bytes = kv_cache_bytes(
            folder, str(ours["dtype"]), spec.slots, spec.max_length
        )
        defaults["kv_cache_memory_bytes"] = num_bytes
    # The user may change our defaults, not what correctness depends on.
    arguments = {**defaults, **given, **ours}
    return [part for name, value in arguments.items() for part in _words(name, value)]


def _query_scaling(config: dict[str, Any]) -> dict[str, object]:
    """Return the argument from which vLLM takes Llama 4's scaling of late queries; else
    it scales them only with a maximum length above 32,768.
    """
    if config.get("model_type") != "llama4_text":
        return {}
    is_on = bool(config.get("attn_temperature_tuning", True))
    return {"override_generation_config": {"attn_temperature_tuning": is_on}}


def _overrides(folder: Path, config: dict[str, Any]) -> dict[str, object]:
    """Return the entries of config.json that vLLM reads unlike transformers."""
    overrides: dict[str, object] = {}
    if has_own_head(folder):  # vLLM would tie it by config.json
        overrides["tie_word_embeddings"] = False
    if config.get("model_type") in WIDER and config.get("sliding_window"):
        overrides["sliding_window"] = config["sliding_window"] - 1
    rope = config.get("rope_parameters") or {}
    if beta := rope.get("llama_4_scaling_beta"):  # vLLM knows another entry
        longest = rope["original_max_position_embeddings"]
        scaling = {"original_max_position_embeddings": longest, "beta": beta}
        overrides["llama_4_scaling"] = scaling
    return overrides


def _words(name: str, value: object) -> list[str]:
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
    if spec.adapters is not None:
        os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if is_cpu_build():
        # "auto" would bind every server to the same first core.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ["OMP_NUM_THREADS"] = str(spec.threads)
    elif spec.deterministic:
        # on CPU the first request would end the engine
        os.environ["VLLM_BATCH_INVARIANT"] = "1"


def can_fork(spec: VllmSpec) -> bool:
    """Return true on CPU with one unbound thread: OpenMP threads do not survive a fork.
    Call it after set_environment.
    """
    is_bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind"
    is_bound |= not spec.args.keys().isdisjoint({"numa-bind", "numa_bind"})
    return is_cpu_build() and spec.threads == 1 and not is_bound


_ERROR_LINE = re.compile(
    r"\b((?:\w+\.)*\w*(?:Error|Exception): .+|Worker proc \S+ died unexpectedly.*)"
)


def failure(what: str, said: str) -> Refused:
    """Name the first error of this process's log: `said` often only points there."""
    said = (
        first_error(_own_log())
        or said
        or "SIGKILL perhaps, often by the kernel when memory runs out"
    )
    way_out = "read this server's log, correct the cause, and start the run again."
    if "memory" in said.lower():
        way_out = (
            "lower rollout.slots or rollout.vllm.kv_cache_memory_bytes, or free memory."
        )
    return Refused(500, f"{what}: {' '.join(said.split())[:1500]}", way_out=way_out)


def first_error(log: str) -> str:
    found = (
        _ERROR_LINE.search(line) for line in log.splitlines() if " WARNING " not in line
    )
    return next((line[1] for line in found if line), "")


def _own_log() -> str:
    try:
        log = Path("/proc/self/fd/2").readlink()
        return (
            log.read_bytes()[-(2**20) :].decode("utf-8", errors="replace")
            if log.is_file()
            else ""
        )
    except OSError:
        return ""
