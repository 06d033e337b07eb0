"""Real engine servers for benchmarks: the embedded one and vLLM, each as a process with its client."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from asyncrl.base.errors import ConfigError
from asyncrl.base.http import Caller
from asyncrl.config import RolloutConfig
from asyncrl.engines.engine import EngineClient, EngineServer
from asyncrl.engines.vllm_process import VllmRequirements
from asyncrl.engines.vllm_server import VllmServer
from asyncrl.launch.engine_python import find_python
from asyncrl.launch.processes import ChildProcess, ProcessSpec
from asyncrl.messages.engine_api import EngineHealth

START_S = 600.0


def has_vllm() -> bool:
    """Whether `make setup-vllm`, or the extra vllm, was installed."""
    try:
        find_python(RolloutConfig(engine="vllm"))
    except ConfigError:
        return False
    return True


@asynccontextmanager
async def engine_server(
    kind: str,
    model: Path,
    folder: Path,
    *,
    slots: int,
    max_length: int,
    keeps_turns: bool = False,
    **of_embedded: object,
) -> AsyncIterator[tuple[EngineClient, Caller]]:
    """A running server of `kind` (embedded, vllm) on the CPU in float32, its client, and the caller below
    that. No end token. keeps_turns: the embedded one keeps what has ended in its cache; vLLM always does.
    `of_embedded`: more fields of its spec, or others, like device.
    """
    secret = secrets.token_hex(16)
    spec = {
        "name": "engine-0",
        "model_path": str(model),
        "slots": slots,
        "max_length": max_length,
        "device": "cpu",
    }
    if kind == "vllm":
        spec |= {"dtype": "float32"}
        module = "asyncrl_servers.vllm"
        python = partial(find_python, RolloutConfig(engine="vllm"))
    else:
        spec |= {"keeps_turns": keeps_turns, **of_embedded}
        module = "asyncrl_servers.embedded"
        python = None
    child = ChildProcess(ProcessSpec("engine-0", module, json.dumps(spec), folder, secret, python=python))
    await child.start()
    caller = Caller("engine-0", child.url, secret)
    try:
        yield await _client(kind, caller, model, slots, max_length), caller
    finally:
        await caller.aclose()
        await child.aclose()


async def _client(kind: str, caller: Caller, model: Path, slots: int, max_length: int) -> EngineClient:
    if kind != "vllm":
        await caller.get("/health", EngineHealth, timeout_s=START_S)
        return EngineServer(caller)
    facts = VllmRequirements(
        model_path=str(model),
        dtype="float32",
        slots=slots,
        max_length=max_length,
        end_ids=(),
        device="cpu",
    )
    client = VllmServer(caller, facts)
    await client.ready(START_S)
    return client
