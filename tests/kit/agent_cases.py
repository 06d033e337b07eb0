"""Servers and answers of agents for tests of harnesses."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from gateway_cases import ScriptedEngine
from harness_gateway import WORKER_KEY, TestGateway

from asyncrl.agents.worker import WorkerSpec
from asyncrl.base.http import WORKER_KEY_ENV, Caller
from asyncrl.config import GeneratorConfig
from asyncrl.launch.processes import ChildProcess, ProcessSpec
from asyncrl.messages.sampling import SamplingRequest

EXAMPLE = Path(__file__).parents[2] / "examples" / "verifiers_env"


def text_of(request: SamplingRequest) -> str:
    return ScriptedEngine().tokenizer.decode(
        list(map(int, request.prompt_ids)), skip_special_tokens=False
    )


def last_turn(prompt: str) -> tuple[str, str]:
    """Role and text of what the model answers to."""
    role, _, text = prompt.split("<|start|>")[-2].partition("\n")
    return role, text.removesuffix("<|end|>")


def tool_call(name: str, **arguments: Any) -> str:
    return f"Let me see. <tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextlib.asynccontextmanager
async def started(
    gateway: TestGateway, run_dir: Path, harness: GeneratorConfig, **more: str
) -> AsyncIterator[tuple[ChildProcess, Caller]]:
    spec = WorkerSpec(
        name="worker-0", url=gateway.url, slots=2, harnesses=[harness]
    ).model_dump_json()
    env = {"PYTHONPATH": str(Path(__file__).parent)} | more
    keys = {WORKER_KEY_ENV: WORKER_KEY}
    module = "asyncrl.agents.worker"
    process = ChildProcess(
        ProcessSpec(
            "worker-0", module, spec, run_dir, "own-secret", env=env, secrets=keys
        )
    )
    await process.start()
    caller = Caller("worker-0", process.url, "own-secret")
    try:
        yield process, caller
    finally:
        await caller.aclose()
        await process.aclose()
