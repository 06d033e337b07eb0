"""Our side of benchmarks/gateway.py, in its own process: Gateway, EnginePool and
tokenizer as in a run.

/bench/turn ends sessions, with their rollouts, and opens new ones; /bench/stats returns
the counts.
"""

from __future__ import annotations

import asyncio
import os
import signal
from itertools import count

from gateway_plain import serve
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from asyncrl.agents.endpoint.gateway import Gateway
from asyncrl.agents.endpoint.requests import CallRules
from asyncrl.agents.endpoint.session import GatewaySession
from asyncrl.agents.endpoint.tool_formats import find_tool_format
from asyncrl.base.errors import ComponentError
from asyncrl.base.http import SECRET_ENV, Caller, secret_of
from asyncrl.config import GatewayConfig
from asyncrl.engines.engine import EngineServer
from asyncrl.engines.pool import EnginePool
from asyncrl.job.lifecycle import rare_collections
from asyncrl.messages.records import Outcome
from asyncrl.rollouts.rollout import derive_seed
from asyncrl.rollouts.tokenizer import HFChatTokenizer

MAX_TOKENS, MAX_PROMPT_TOKENS, SLOTS = 256, 3072, 4096


class Turnover:
    """The open sessions of the load, by key."""

    gateway: Gateway

    def __init__(self) -> None:
        self._sessions: dict[str, GatewaySession] = {}
        self._numbers = count()

    def routes(self) -> list[Route]:
        return [
            Route("/bench/turn", self._turn, methods=["POST"]),
            Route("/bench/stats", self._stats, methods=["POST"]),
        ]

    async def _turn(self, request: Request) -> JSONResponse:
        """End the sessions of the keys `end`, open `open` new ones and return their
        keys.
        """
        asked = await request.json()
        for key in asked["end"]:
            session = self._sessions.pop(key)
            if session.num_completions:
                session.rollout(0, Outcome(reward=1.0), 1.0)
            session.end_nowait("the load ended it")
        return JSONResponse([self._open() for _ in range(asked["open"])])

    def _open(self) -> str:
        name = f"g{next(self._numbers)}/r0"
        session = self.gateway.open_nowait(
            name, prompt_id=name, sample_index=0, attempt=0, route_key=name
        )
        self._sessions[session.key] = session
        return session.key

    async def _stats(self, _: Request) -> JSONResponse:
        gauges = self.gateway.gauges()
        stats = {name.partition("/")[2]: number for name, number in gauges.items()}
        return JSONResponse(stats | {"sessions": len(self._sessions)})


def seed_of(prompt_id: str, sample_index: int, attempt: int, call_key: int) -> int:
    return derive_seed(0, prompt_id, sample_index, call_key, attempt)


def broken(error: ComponentError) -> None:
    print(f"the engine is broken: {error}", flush=True)
    os._exit(1)


async def run(model_path: str, engine_url: str, fd_port: int) -> None:
    """Serve until SIGTERM."""
    tokenizer = HFChatTokenizer(model_path)
    caller = Caller("engine-0", engine_url, secret_of(SECRET_ENV))
    rules = CallRules(
        model_name="policy",
        max_tokens=MAX_TOKENS,
        max_prompt_tokens=MAX_PROMPT_TOKENS,
        max_length=MAX_TOKENS + MAX_PROMPT_TOKENS,
        vocab_size=tokenizer.vocab_size,
    )
    turnover = Turnover()
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
    with rare_collections():
        await ended.wait()
    await gateway.aclose()
    await caller.aclose()


if __name__ == "__main__":
    serve(run)
