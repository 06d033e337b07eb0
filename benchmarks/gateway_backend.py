"""The engine behind both proxies of benchmarks/gateway.py: the simulated engine's own server, with one route
more.

That route speaks OpenAI for a proxy that knows nothing else: the same server, the same engine, the same
seconds a token. Its answers are text of the same length as what the tokens of ours make.
"""

from __future__ import annotations

import json
import os
from itertools import count
from typing import Any

from aiohttp import web
from pydantic_core import from_json, to_json

from asyncrl.base.message import SECRET_ENV
from asyncrl.base.serving import child_arguments, die_with_parent, secret_of, serve
from asyncrl.messages.engine_api import GenerateRequest
from asyncrl_servers.engine_routes import OneAnswer, engine_routes
from asyncrl_servers.simulated import SimulatedEngine, SimulatedSpec

PROMPT = [1] * 256
"""Stands for the prompt, which this route does not tokenise."""


def main() -> None:
    """Serve until the parent is gone. The spec: the engine's, and `core` and `text`, the answer to every
    chat.
    """
    die_with_parent()
    text, fd = child_arguments()
    given = json.loads(text)
    os.sched_setaffinity(0, {given.pop("core")})
    answer_text = given.pop("text")
    spec = SimulatedSpec.model_validate(given)
    engine = SimulatedEngine(spec)
    app, numbers = engine_routes(engine, secret_of(SECRET_ENV)), count()

    async def chat(request: web.Request) -> web.Response:
        chat, number = from_json(await request.read()), next(numbers)
        asked = GenerateRequest(f"chat-{number}", PROMPT, max_tokens=spec.max_length // 2, seed=number)
        num_tokens = len((await OneAnswer(engine, asked).answer()).token_ids)
        body = to_json(_completion(number, chat["model"], num_tokens, answer_text))
        return web.Response(body=body, content_type="application/json")

    app.router.add_post("/v1/chat/completions", chat)
    serve(app, fd, cancels_handlers=True)


def _completion(number: int, model: str, num_tokens: int, text: str) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "logprobs": None,
        "finish_reason": "stop",
    }
    usage = {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": num_tokens,
        "total_tokens": len(PROMPT) + num_tokens,
    }
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [choice],
        "usage": usage,
    }


if __name__ == "__main__":
    main()
