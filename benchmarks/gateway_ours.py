"""Our side of benchmarks/gateway.py: the Gateway as a run has it, EnginePool, EngineServer and tokenizer with
it, in its own process.

Routes beside the gateway's, for the load: /bench/turn ends sessions and opens new ones, /bench/stats tells
what the gateway counted. A session that ends gives its rollout first, as one does in a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
from dataclasses import asdict
from itertools import count

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from asyncrl.agents.endpoint.gateway import Gateway
from asyncrl.agents.endpoint.listener import collect_less
from asyncrl.agents.endpoint.requests import CallRules
from asyncrl.agents.endpoint.sessions import GatewaySession
from asyncrl.agents.endpoint.tool_families import find_tool_format
from asyncrl.base.errors import RoomError
from asyncrl.base.http import Caller
from asyncrl.base.message import SECRET_ENV
from asyncrl.base.serving import child_arguments, die_with_parent, secret_of
from asyncrl.config import GatewayConfig
from asyncrl.engines.engine import EngineServer
from asyncrl.engines.pool import EnginePool
from asyncrl.messages.records import Outcome
from asyncrl.rollouts.rollout import derive_seed
from asyncrl.rollouts.tokenizer import HFChatTokenizer

MAX_TOKENS, MAX_PROMPT_TOKENS, SLOTS = 256, 3072, 4096


class Turnover:
    """The sessions of the load, by key: opened, and ended with their rollout, as the load asks."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.gateway: Gateway | None = None
        self._sessions: dict[str, GatewaySession] = {}
        self._numbers = count()
        self.num_trajectories = 0

    def routes(self) -> list[Route]:
        """For Gateway(extra_routes=)."""
        return [
            Route("/bench/turn", self._turn, methods=["POST"]),
            Route("/bench/stats", self._stats, methods=["POST"]),
        ]

    async def _turn(self, request: Request) -> JSONResponse:
        """`end`: keys, `open`: a number; answers the new keys."""
        asked = await request.json()
        for key in asked["end"]:
            session = self._sessions.pop(key)
            if session.capture.num_completions:
                self.num_trajectories += len(session.rollout(0, Outcome(reward=1.0), 1.0))
            session.end_nowait("the load has ended it")
        return JSONResponse([self._open() for _ in range(asked["open"])])

    def _open(self) -> str:
        assert self.gateway is not None
        name = f"g{next(self._numbers)}/r0"
        session = self.gateway.open_nowait(name, prompt_id=name, sample_index=0, attempt=0, route_key=name)
        self._sessions[session.key] = session
        return session.key

    async def _stats(self, _: Request) -> JSONResponse:
        assert self.gateway is not None
        stats = asdict(self.gateway.stats())
        if not self._sessions:
            await (
                self._caller.aclose()
            )  # its idle connections are as many as calls were in flight, for half a minute
        gc.collect()
        return JSONResponse(
            stats
            | {"sessions": len(self._sessions), "trajectories": self.num_trajectories}
            | {"objects": len(gc.get_objects())}
        )


def seed_of(prompt_id: str, sample_index: int, attempt: int, call_key: int) -> int:
    """As a run derives it."""
    return derive_seed(0, prompt_id, sample_index, call_key, attempt)


def broken(error: RoomError) -> None:
    """The benchmark is over."""
    print(f"the engine is broken: {error}", flush=True)
    os._exit(1)


async def run(model_path: str, engine_url: str, fd_port: int) -> None:
    """Serve until SIGTERM."""
    tokenizer = HFChatTokenizer(model_path)
    caller = Caller("engine-0", engine_url, secret_of(SECRET_ENV))
    rules = CallRules(
        model_name="policy",
        temperature=1.0,
        top_p=1.0,
        max_tokens=MAX_TOKENS,
        max_prompt_tokens=MAX_PROMPT_TOKENS,
        max_length=MAX_TOKENS + MAX_PROMPT_TOKENS,
        vocab_size=tokenizer.vocab_size,
    )
    turnover = Turnover(caller)
    gateway = turnover.gateway = Gateway(
        EnginePool([EngineServer(caller)], slots=SLOTS),
        tokenizer,
        find_tool_format("auto", tokenizer.template),
        rules,
        GatewayConfig(port=fd_port),
        seed_of=seed_of,
        on_broken=broken,
        extra_routes=turnover.routes(),
    )
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await gateway.start()
    collect_less()
    await ended.wait()
    await gateway.aclose()
    await caller.aclose()


def main() -> None:
    """The spec: `core`, `model`, `engine`, `port`, and `profile`, a file for cProfile's figures or ""."""
    die_with_parent()
    spec = json.loads(child_arguments()[0])
    os.sched_setaffinity(0, {spec["core"]})
    with contextlib.ExitStack() as stack:
        if spec["profile"]:
            import cProfile

            profile = stack.enter_context(cProfile.Profile())
            stack.callback(lambda: profile.dump_stats(spec["profile"]))
        asyncio.run(run(spec["model"], spec["engine"], spec["port"]))


if __name__ == "__main__":
    main()
