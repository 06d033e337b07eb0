"""The harness `tries`."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from asyncrl.agents import Session
from asyncrl.agents.harness import AnyTask
from asyncrl.base.errors import ConfigError, first_fault
from asyncrl.config import GeneratorConfig, RunConfig
from asyncrl_tries.settings import TRIES, TriesArgs


class TriesHarness:
    """Ask for an answer several times in one conversation."""

    def __init__(self, config: GeneratorConfig, *, is_worker: bool = False) -> None:
        self._tries = TRIES.of(config) or 1
        try:
            self._args = TriesArgs.model_validate(config.args)
        except ValidationError as error:
            raise ConfigError(
                f"generator.args does not fit generator.tries: {first_fault(error)}",
                way_out="its only key is again.",
            ) from error

    async def run(self, task: AnyTask, session: Session) -> None:
        """Sample the tries. None: the task scores the last one."""
        messages = [dict(message) for message in task.messages]
        again = self._args.again or messages[-1]["content"]
        for number in range(self._tries):
            if number:
                messages.append({"role": "user", "content": again})
            answer = await session.client.chat.completions.create(
                model=session.model,
                messages=messages,  # type: ignore[arg-type]
            )
            content = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": content})


def check_limits(config: RunConfig, tasks: object) -> Iterator[str]:
    """Yield a line of `asyncrl check`. Raises ConfigError."""
    limit = config.gateway.max_calls
    for generator in config.harnesses:
        tries = TRIES.of(generator)
        if tries is None:
            continue
        if tries > limit:
            raise ConfigError(
                f"generator.tries={tries} is more than gateway.max_calls={limit}",
                way_out="raise gateway.max_calls.",
            )
        yield f"tries: {tries} answers to each prompt"
