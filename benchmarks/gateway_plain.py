"""The plain side of benchmarks/gateway.py: a FastAPI server of the same engine without
anything that a gateway adds.

It parses a chat, renders and encodes it, asks the engine over our link, decodes, and
answers. It has no sessions, records no tokens, matches no prefix, reads no tool calls
and no thoughts, and streams nothing.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Awaitable, Callable
from itertools import count

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from asyncrl.base.http import (
    SECRET_ENV,
    Caller,
    child_arguments,
    die_with_parent,
    secret_of,
)
from asyncrl.base.user_code import run_loop
from asyncrl.engines.engine import EngineServer
from asyncrl.engines.pool import EnginePool
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.rollouts.tokenizer import HFChatTokenizer

MAX_TOKENS, SLOTS = 256, 4096


class Message(BaseModel):
    role: str
    content: str


class Chat(BaseModel):
    model: str
    messages: list[Message]


class Choice(BaseModel):
    index: int = 0
    message: Message
    finish_reason: str | None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(BaseModel):
    id: str
    object: str = "chat.completion"
    model: str
    choices: list[Choice]
    usage: Usage


def make_app(pool: EnginePool, tokenizer: HFChatTokenizer) -> FastAPI:
    """Return the server's routes."""
    app = FastAPI()
    numbers = count()

    @app.post("/v1/chat/completions")
    async def complete(chat: Chat) -> Completion:
        messages = [message.model_dump() for message in chat.messages]
        ids = tokenizer.encode(tokenizer.render(messages))
        number = next(numbers)
        request = SamplingRequest(
            request_id=str(number), prompt_ids=ids, max_tokens=MAX_TOKENS, seed=number
        )
        found = await pool.generate(request)
        tokens = found.token_ids
        message = Message(role="assistant", content=tokenizer.decode(tokens))
        return Completion(
            id=f"chat-{number}",
            model=chat.model,
            choices=[Choice(message=message, finish_reason=found.finish_reason)],
            usage=Usage(
                prompt_tokens=len(ids),
                completion_tokens=len(tokens),
                total_tokens=len(ids) + len(tokens),
            ),
        )

    return app


async def run(model_path: str, engine_url: str, port: int) -> None:
    """Serve until SIGTERM."""
    caller = Caller("engine-0", engine_url, secret_of(SECRET_ENV))
    pool = EnginePool([EngineServer(caller)], slots=SLOTS)
    app = make_app(pool, HFChatTokenizer(model_path))
    config = uvicorn.Config(app, log_level="warning", access_log=False)
    with socket.create_server(("127.0.0.1", port), backlog=1024) as listener:
        await uvicorn.Server(config).serve([listener])
    await caller.aclose()


def serve(run: Callable[[str, str, int], Awaitable[None]]) -> None:
    """Run a server on its core. The spec: `core`, `model`, `engine` and `port`."""
    die_with_parent()
    spec = json.loads(child_arguments()[0])
    os.sched_setaffinity(0, {spec["core"]})
    run_loop(run(spec["model"], spec["engine"], spec["port"]))


if __name__ == "__main__":
    serve(run)
