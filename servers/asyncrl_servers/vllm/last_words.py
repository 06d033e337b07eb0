"""Why vLLM could not start, in words a run can show: vLLM itself says "see root cause above" and has it in the log of another process."""

from __future__ import annotations

import os
import re
from pathlib import Path

from asyncrl.serving import Refused
from asyncrl_servers.vllm.spec import VllmSpec

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
    "died unexpectedly (exit code: 0)",  # it was ended, after it had said why
)


def start_failure(spec: VllmSpec, error: Exception) -> Refused:
    """The refusal that names the cause: the error itself, or where that only points elsewhere, the last one in this server's log."""
    said = f"{type(error).__name__}: {error}"
    if any(pointer in said for pointer in _POINTERS):
        said = last_error(_own_log()) or said
    return Refused(
        500,
        f"{spec.name}: vLLM cannot start with {spec.model_path}: {' '.join(said.split())[:1500]}",
        rule="vLLM loads the model, takes its KV cache and only then answers",
        way_out=_way_out(said),
    )


def engine_death(spec: VllmSpec) -> Refused:
    """The refusal of a server whose engine ended while it served."""
    said = last_error(_own_log()) or "its log names no error (SIGKILL from outside is often the kernel short of memory)"
    return Refused(500, f"{spec.name}: vLLM's engine died: {' '.join(said.split())[:1500]}", way_out="read this server's log.")


def last_error(log: str) -> str:
    """The last line of a log that names an error and does not merely point to another."""
    for line in reversed(log.splitlines()):
        found = _ERROR_LINE.search(line)
        if found and " WARNING " not in line and not any(pointer in line for pointer in _POINTERS):
            return found[1]
    return ""


def _own_log() -> str:
    """What this server has written, where its standard error is a file."""
    try:
        with Path("/proc/self/fd/2").readlink().open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2**20))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def _way_out(said: str) -> str:
    if "memory" in said.lower():
        return "lower rollout.slots or the token limits, give rollout.vllm.kv_cache_memory_bytes, or free memory."
    return "read this server's log, mend the cause, and start the run again."
