"""Answers to single messages, by the template and the sampling of the engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from asyncrl.base.http import Refused, fail
from asyncrl.messages.codec import Asked, Sampled
from asyncrl.messages.engine_api import ChatRequest, ChatResponse
from asyncrl.messages.sampling import SamplingRequest
from asyncrl_servers.embedded.embedded_engine import Engine


class Answer:
    """The tokens of one request, from the engine's thread to the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ids: list[int] = []
        self.done: asyncio.Future[tuple[list[int], str]] = self._loop.create_future()

    def sampled(self, rows: Sequence[Sampled]) -> None:
        for row in rows:
            self._ids += row.part.token_ids
            if row.then not in ("more", "interrupted"):
                self._loop.call_soon_threadsafe(
                    self.done.set_result, (self._ids, row.then)
                )

    def refused(self, number: int, refusal: Refused) -> None:
        self._loop.call_soon_threadsafe(self.done.set_exception, refusal)


class Chats:
    def __init__(self, engine: Engine) -> None:
        """Exit if the model has no chat template."""
        self._engine = engine
        self._loaded = engine.runner.loaded
        self._tokenizer: Any = self._loaded.tokenizer
        self._numbers = itertools.count()
        if self._tokenizer is None or not self._tokenizer.chat_template:
            fail(
                f"{engine.spec.name}: {engine.spec.model_path} has no chat template",
                way_out="set task.reward.judge.model to a model that answers chats.",
            )

    async def chat(self, body: ChatRequest) -> ChatResponse:
        messages = [{"role": "user", "content": body.text}]
        encoded = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        prompt_ids = list(encoded["input_ids"])
        number = next(self._numbers)
        request = SamplingRequest(
            request_id=f"chat {number}",
            prompt_ids=prompt_ids,
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            seed=body.seed,
        )
        answer = Answer()
        run = self._engine.run(Asked(number, request, False), answer)
        self._engine.submit([run])
        token_ids, then = await answer.done
        return ChatResponse(
            text=self._loaded.decode(token_ids),
            is_cut=then == "length",
            num_tokens=len(prompt_ids) + len(token_ids),
        )
