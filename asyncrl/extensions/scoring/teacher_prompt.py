"""What a teacher reads in place of the student's prompt (`teacher.prompt`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncrl.base.errors import (
    ConfigError,
    PromptUnusable,
    RewardFailure,
    RolloutFailure,
    TaskError,
)
from asyncrl.base.user_code import UserCalls, load_function
from asyncrl.base.waits import waiting, within
from asyncrl.config import RunConfig
from asyncrl.messages.records import Prompt, Rollout
from asyncrl.messages.worker_api import ChatTokenizer, answer_text
from asyncrl.rollouts.rollout import ids_of
from asyncrl.tasks.rewards import UserCodeFailed, copy_of, user_code
from asyncrl.tasks.task import as_messages

USAGE = "teacher_prompt(prompt, attempt, siblings)"
Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A finished rollout of one answer, as the function of teacher.prompt sees it. `text`
    has no end-of-turn token; special tokens are shown if the reward sees them.
    """

    sample_index: int
    text: str
    reward: float
    is_truncated: bool
    metrics: Mapping[str, float]


class TeacherPrompts:
    """Makes the token ids that a teacher reads before an answer.

    Waits: made() sleeps in the user's function, at most task.reward_timeout_s.
    """

    def __init__(
        self, source: str, config: RunConfig, tokenizer: ChatTokenizer
    ) -> None:
        """Raises ConfigError if `source` names a function that cannot be called."""
        self._source = source
        self._config = config
        self._tokenizer = tokenizer
        self._function = load_prompt_function(source)
        self._calls = UserCalls(
            f"teacher.prompt={source}",
            error=partial(TaskError, "teacher"),
            way_out="limit what the function waits for.",
        )

    @property
    def reads_groups(self) -> bool:
        """Return whether it is made of a rollout and its siblings."""
        return self._function is not None

    async def ids(
        self, rollout: Rollout, prompt: Prompt, siblings: Sequence[Rollout]
    ) -> Sequence[int] | None:
        """Return the ids of the teacher's prompt, with the beginning of the answer; None:
        the function returned None. Raises PromptUnusable or RewardFailure.
        """
        name = f"prompt {prompt.prompt_id}"
        try:
            if self._function is None:
                made = column_of(prompt.info, self._source, "its row")
            elif (made := await self._call(rollout, prompt, siblings)) is None:
                return None
            where = f"teacher.prompt={self._source}"
            messages = teacher_messages(prompt.messages, made, where)
        except ConfigError as error:
            raise PromptUnusable(
                f"{name}: {error.what}", rule=error.rule, way_out=error.way_out
            ) from error
        limit = self._config.rollout.max_prompt_tokens
        return ids_of(self._tokenizer, messages, limit, f"the teacher's {name}")

    async def _call(
        self, rollout: Rollout, prompt: Prompt, siblings: Sequence[Rollout]
    ) -> object:
        self._calls.check()
        task = self._config.tasks[prompt.task]
        limit_s = task.reward_timeout_s
        late = partial(
            UserCodeFailed, f"did not return within {limit_s} s (task.reward_timeout_s)"
        )
        limit = partial(within, limit_s, late)
        shows_special = task.special_tokens == "visible"
        attempt, *others = (
            self._attempt(one, shows_special) for one in (rollout, *siblings)
        )

        def call() -> object:
            assert self._function is not None
            with user_code():
                return self._function(copy_of(prompt), attempt, others)

        try:
            with waiting("what the teacher reads", on=self._calls.name):
                made = await self._calls.in_thread(call, limit())
                if isinstance(made, Awaitable):
                    with user_code(asyncio.CancelledError, RolloutFailure):
                        async with limit():
                            made = await self._calls.run(made)
                return made
        except UserCodeFailed as failure:
            raise RewardFailure(
                f"{self._calls.name} {failure} for prompt {prompt.prompt_id}",
                rule=f"it is called as {USAGE} and returns a text, messages or None",
                way_out="correct the function.",
                kind=failure.kind,
            ) from failure

    def _attempt(self, rollout: Rollout, shows_special: bool) -> Attempt:
        (branch,) = rollout
        ids = branch.token_ids[branch.loss_mask].tolist()
        return Attempt(
            branch.sample_index,
            answer_text(self._tokenizer, ids, shows_special=shows_special),
            branch.reward,
            branch.is_truncated,
            branch.metrics,
        )


def column_of(info: Mapping[str, object], column: str, where: str) -> object:
    """Return what a row has for the teacher. Raises ConfigError."""
    if column not in info:
        raise ConfigError(
            f"{where} has no column {column}; its columns besides prompt and answer are {[*info]}",
            rule="teacher.prompt names a column of each row, or a function as module:function",
            way_out="name one of them as teacher.prompt, or add the column.",
        )
    return info[column]


def load_prompt_function(source: str) -> Callable[..., Any] | None:
    """Import the function that `source` names; None: it names a column. Raises
    ConfigError.
    """
    if ":" not in source:
        return None
    return load_function(
        source, "teacher.prompt", usage=USAGE, arguments=(None, None, [])
    )


def teacher_messages(student: Messages, made: object, where: str) -> Messages:
    """Return the messages that the teacher reads: `made`, or for a text the student's
    with this text as the last one. Raises ConfigError.

    Example: the student reads a rule and a question. With the text "question, and its
    answer: 7" the teacher reads the rule and this text.
    """
    way_out = "correct it, or name another column or function as teacher.prompt."
    try:
        messages = as_messages(made, where)
    except ConfigError as error:
        error.way_out = way_out
        raise
    if messages[-1]["role"] == "assistant":
        raise ConfigError(
            f"{where} ends with the assistant's message {messages[-1]['content']!r:.80}",
            rule="the teacher's prompt ends where the student's answer begins",
            way_out=way_out,
        )
    return (*student[:-1], *messages) if isinstance(made, str) else messages
