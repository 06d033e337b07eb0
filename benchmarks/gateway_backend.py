"""The engine behind both proxies of benchmarks/gateway.py: the simulated engine with
one OpenAI route for LiteLLM. Chats of that route are as long as ours.
"""

from __future__ import annotations

import asyncio
import json
import os
from itertools import count

from aiohttp import web
from engine_replies import ask
from pydantic_core import from_json

from asyncrl.base.http import (
    SECRET_ENV,
    child_arguments,
    die_with_parent,
    secret_of,
    serve,
)
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import SegmentPart
from asyncrl_servers.engine_routes import engine_routes
from asyncrl_servers.simulated import SimulatedEngine, SimulatedSpec

PROMPT = [1] * 256


def main() -> None:
    """Serve the spec: the engine's, `core`, and `text`, the completion of each chat."""
    die_with_parent()
    text, fd = child_arguments()
    values = json.loads(text)
    os.sched_setaffinity(0, {values.pop("core")})
    completion = values.pop("text")
    spec = SimulatedSpec.model_validate(values)
    engine = SimulatedEngine(spec)
    app = engine_routes(engine, secret_of(SECRET_ENV))
    numbers = count()

    async def answered(asked: SamplingRequest) -> SegmentPart:
        return await asyncio.wrap_future(ask(engine, [asked])[0])

    async def generate(request: web.Request) -> web.Response:
        asked = SamplingRequest(**from_json(await request.read()))
        part = await answered(asked)
        return web.json_response({"token_ids": part.token_ids})

    async def chat(request: web.Request) -> web.Response:
        model = from_json(await request.read())["model"]
        number = next(numbers)
        asked = SamplingRequest(
            f"chat-{number}", PROMPT, max_tokens=spec.max_length // 2, seed=number
        )
        num_tokens = len((await answered(asked)).token_ids)
        message = {"role": "assistant", "content": completion}
        total = len(PROMPT) + num_tokens
        usage = {
            "prompt_tokens": len(PROMPT),
            "completion_tokens": num_tokens,
            "total_tokens": total,
        }
        return web.json_response(
            {
                "id": f"chatcmpl-{number}",
                "object": "chat.completion",
                "created": 0,
                "model": model,
                "choices": [
                    {
                        "index": 0,
                        "message": message,
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": usage,
            }
        )

    app.router.add_post("/generate", generate)
    app.router.add_post("/v1/chat/completions", chat)
    serve(app, fd)


if __name__ == "__main__":
    main()
