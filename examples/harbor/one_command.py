"""An agent of Harbor, by import path, for models too small for terminus-2: one answer, put
into one command.

    agent: examples.harbor.one_command:OneCommand
    agent_args: {command: "echo {} >answer.txt"}
"""

from __future__ import annotations

import shlex
from typing import Any

from openai import AsyncOpenAI

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext


class OneCommand(BaseAgent):
    """`command` has {} for the answer, which is quoted; the default runs the answer
    itself.
    """

    def __init__(self, *args: Any, command: str = "bash -c {}", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._command = command

    @staticmethod
    def name() -> str:
        return "one-command"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing is installed."""

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        key, url = self._get_env("OPENAI_API_KEY"), self._get_env("OPENAI_BASE_URL")
        model = (self.model_name or "").removeprefix("openai/")
        async with AsyncOpenAI(api_key=key, base_url=url, timeout=None) as client:
            completion = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": instruction.strip()}],
            )
        answer = completion.choices[0].message.content or ""
        await environment.exec(self._command.format(shlex.quote(answer)))
