"""The gateway of benchmarks/agents.py in its own process, over an engine that knows its answers.

Routes beside the gateway's: /bench/open opens sessions, /bench/stats tells the processor seconds of the
loop's thread and of the process, and what was counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import count
from typing import Any

import numpy as np
from aiohttp import web

from asyncrl.agents.endpoint.calls.connections import collect_less
from asyncrl.agents.endpoint.gateway import Gateway
from asyncrl.agents.endpoint.requests import CallRules
from asyncrl.agents.endpoint.tool_calls import find_tool_format
from asyncrl.config import GatewayConfig
from asyncrl.errors import RoomError
from asyncrl.messages.records import Completion, SamplingRequest, VersionSpan
from asyncrl.rollouts.rollout import derive_seed
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.serving import child_arguments, die_with_parent

MAX_PROMPT_TOKENS, MAX_TOKENS = 200_000, 256
PROBE = 10
"""Every so many turns of a session its prompt is compared with what the turn before it had sent and got: it
costs time, so no turn that is measured is one of them.
"""


class ScriptedEngine:
    """In place of an EnginePool: a tool call to every prompt, at once. It counts the tokens that an engine
    which keeps a session's last prompt and answer would have to prefill.
    """

    def __init__(self, tokenizer: HFChatTokenizer, end: str) -> None:
        said = "I look into it, and then go on with what is left."
        calls = [{"name": f"tool_{number}", "arguments": {"path": f"src/{number}.py"}} for number in range(8)]
        texts = [f"{said}\n<tool_call>\n{json.dumps(call)}\n</tool_call>{end}" for call in calls]
        self._answers = [tokenizer.encode(text) for text in texts]
        self._last: dict[str, tuple[int, ...]] = {}
        self._turns: dict[str, int] = {}
        self.num_prefilled = self.num_new = 0

    async def generate(
        self, request: SamplingRequest, *, on_tokens: Callable[[Sequence[int]], None] | None = None, **_: Any
    ) -> Completion:
        """The answer of this turn."""
        name = request.request_id.partition("/a")[0]
        turn = self._turns[name] = self._turns.get(name, -1) + 1
        ids = self._answers[turn % len(self._answers)]
        last = self._last.pop(name, None)
        if last is not None:
            prompt = tuple(np.asarray(request.prompt_ids).tolist())
            kept = len(last) if prompt[: len(last)] == last else 0
            self.num_prefilled += len(prompt) - kept
            self.num_new += len(prompt) - len(last)
        if turn % PROBE == PROBE // 2:
            self._last[name] = (*np.asarray(request.prompt_ids).tolist(), *ids)
        return Completion(ids, (-1.0,) * len(ids), (VersionSpan(0, len(ids), 0, 0),), "stop")


def seed_of(prompt_id: str, sample_index: int, attempt: int, call_key: int) -> int:
    """As a run derives it."""
    return derive_seed(0, prompt_id, sample_index, call_key, attempt)


def broken(error: RoomError) -> None:
    """Called for no engine of this kind."""
    raise error


async def run(model_path: str, port: int) -> None:
    """Serve until the parent is gone."""
    tokenizer = HFChatTokenizer(model_path)
    engine: Any = ScriptedEngine(tokenizer, "<|im_end|>")
    gateway: Gateway | None = None
    numbers = count()

    def open_session() -> str:
        assert gateway is not None
        name = f"g{next(numbers)}/r0"
        about = {"prompt_id": name, "sample_index": 0, "attempt": 0, "route_key": name}
        return gateway.open_nowait(name, **about).key  # type: ignore[arg-type]

    async def opened(request: web.Request) -> web.Response:
        return web.json_response([open_session() for _ in range((await request.json())["open"])])

    async def stats(_: web.Request) -> web.Response:
        assert gateway is not None
        counted = asdict(gateway.stats()) | {"loop_s": time.thread_time(), "process_s": time.process_time()}
        return web.json_response(counted | {"prefilled": engine.num_prefilled, "new": engine.num_new})

    rules = CallRules(
        model_name="policy",
        temperature=1.0,
        top_p=1.0,
        max_tokens=MAX_TOKENS,
        max_prompt_tokens=MAX_PROMPT_TOKENS,
        max_length=MAX_TOKENS + MAX_PROMPT_TOKENS,
        vocab_size=tokenizer.vocab_size,
    )
    limits = GatewayConfig(port=port, max_calls=2000, max_rollout_tokens=None)
    gateway = Gateway(
        engine,
        tokenizer,
        find_tool_format("auto", tokenizer.template),
        rules,
        limits,
        seed_of=seed_of,
        on_broken=broken,
        extra_routes=[web.post("/bench/open", opened), web.post("/bench/stats", stats)],
    )
    await gateway.start()
    collect_less()
    await asyncio.Event().wait()


def main() -> None:
    """The spec: `core`, `model` and `port`."""
    die_with_parent()
    spec = json.loads(child_arguments()[0])
    os.sched_setaffinity(0, {spec["core"]})
    asyncio.run(run(spec["model"], spec["port"]))


if __name__ == "__main__":
    main()
