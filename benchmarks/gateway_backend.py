"""The engine behind both proxies of benchmarks/gateway.py: the simulated engine's own server, with one route
more.

That route speaks OpenAI for a proxy that knows nothing else: the same server, the same engine, the same
seconds a token. Its answers are text of the same length as what the tokens of ours make.
"""

from __future__ import annotations

import asyncio
import json
import os
from itertools import count
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic_core import from_json, to_json

from asyncrl.messages.calls import GenerateRequest
from asyncrl.serving import child_arguments, die_with_parent, serve
from asyncrl_servers.engine_app import engine_app
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
    app, numbers = engine_app(engine), count()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        asked = from_json(await request.body())
        number = next(numbers)
        future = engine.submit(
            GenerateRequest(
                request_id=f"chat-{number}", prompt_ids=PROMPT, max_tokens=spec.max_length // 2, seed=number
            )
        )
        await asyncio.wait((future,))
        return Response(
            to_json(_completion(number, asked["model"], len(future.result().token_ids), answer_text)),
            media_type="application/json",
        )

    serve(app, fd)


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
