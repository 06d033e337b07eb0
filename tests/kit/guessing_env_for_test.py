"""A verifiers environment of several turns: the environment is the user, and answers
each guess. Its tasks have no end.

`secret` of the task decides what else happens: see GuessingEnv and GuessingTask.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any, Literal

import verifiers.v1 as vf
from anthropic import AsyncAnthropic
from faulty_agents_for_test import plant
from openai import AsyncOpenAI

__all__ = ["ChatHarness", "GuessingEnv", "GuessingTaskset"]

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
started: list[str] = []
"""Calls of the environment's start() and stop()."""


class GuessingData(vf.TaskData):
    secret: int
    bounds: tuple[int, int] = (0, 9)


class GuessingTask(vf.Task[GuessingData]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        if self.data.secret == 8:
            raise ZeroDivisionError("no reward for 8")
        if trace.last_reply == "nan":
            return float("nan")
        if self.data.secret == 9:
            await asyncio.Event().wait()
        return float(trace.last_reply == str(self.data.secret))

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class GuessingConfig(vf.TasksetConfig):
    fail_at: int | None = None
    has_images: bool = False


class GuessingTaskset(vf.Taskset[GuessingTask, GuessingConfig]):
    INFINITE = True

    def load(self) -> Iterator[GuessingTask]:
        for number in itertools.count():
            if number == self.config.fail_at:
                raise LookupError("no more rows")
            seen = [{"role": "user", "content": [IMAGE]}]
            prompt: Any = seen if self.config.has_images else None
            yield GuessingTask(
                GuessingData(system_prompt="Guess.", secret=number % 10, prompt=prompt),
                self.config.task,
            )


class GuessingEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())
    judge: vf.AgentConfig = agent.model_copy(
        update={"client": vf.EvalClientConfig(base_url="http://x/v1")}
    )
    freeze: bool = False


class GuessingEnv(vf.Env[GuessingEnvConfig]):
    async def start(self) -> None:
        started.append("start")

    async def stop(self) -> None:
        started.append("stop")

    async def setup(self, agents: Any) -> None:
        agents.agent.trainable = not self.config.freeze

    async def run(self, task: vf.Task, agents: Any) -> None:
        if task.data.secret == 7:
            raise RuntimeError("seven is out of order")
        secret = task.data.secret
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn("Which number from 0 to 9?")
            while not segment.terminated and segment.last_reply not in (
                str(secret),
                "nan",
                "off",
            ):
                plant(segment.last_reply)
                guess = int(segment.last_reply)
                segment = await talk.turn("higher" if guess < secret else "lower")
        if segment.last_reply == "off":
            raise ValueError("this guess is no number")


class ChatHarnessConfig(vf.HarnessConfig):
    dialect: Literal["chat", "messages", "responses"] = "chat"
    hangs: bool = False
    """After its call."""
    stream: bool = False


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    """Makes one call, in the chosen dialect of the library's interception server."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        if isinstance(prompt, str):
            prompt = [vf.UserMessage(content=prompt)]
        messages: Any = [
            {"role": message.role, "content": message.content}
            for message in prompt or []
        ]
        given: dict[str, Any] = {"api_key": secret, "max_retries": 0, "timeout": None}
        call: dict[str, Any] = {"model": ctx.model, "stream": self.config.stream}
        if self.config.dialect == "messages":
            address = endpoint.removesuffix("/v1")
            async with AsyncAnthropic(base_url=address, **given) as anthropic:
                answer: Any = await anthropic.messages.create(
                    max_tokens=100, system=system or "", messages=messages, **call
                )
                await _read(answer, self.config.stream)
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")
        async with AsyncOpenAI(base_url=endpoint, **given) as client:
            if self.config.dialect == "responses":
                answer = await client.responses.create(
                    instructions=system, input=messages, **call
                )
            else:
                first = [{"role": "system", "content": system}] if system else []
                answer = await client.chat.completions.create(
                    messages=[*first, *messages], **call
                )
            await _read(answer, self.config.stream)
            if self.config.hangs:
                await asyncio.Event().wait()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _read(answer: Any, is_stream: bool) -> None:
    if is_stream:
        async for _ in answer:
            pass
