"""What a task is: prompts by index, and a score for a completion. Knows no file format, no pool, no run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from asyncrl.errors import ConfigError
from asyncrl.types import Prompt

Content = str | Sequence[Mapping[str, str]]
"""A prompt as users write it: the user's text, or chat messages with `role` and `content`."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Of chat messages, as the gateway takes them too."""

Score = Callable[[Prompt, str], float | Awaitable[float]]
"""Reward of a completion's text. Pure: from the prompt and the text alone, whatever thread or process it runs in."""


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a task. `answer` and `info` reach the score alone, never the model."""

    content: Content
    answer: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Task(Protocol):
    """What `task.python: module:Class` must offer. Built as `Class(size=..., seed=..., **task.args)`."""

    def __len__(self) -> int:
        """Number of prompts; one epoch."""
        ...

    def prompt(self, index: int) -> str | Item:
        """The prompt at `index` (0 .. len - 1), the same one each time it is asked for. A text is an Item of that text."""
        ...

    def score(self, prompt: Prompt, completion: str) -> float | Awaitable[float]:
        """Reward of a completion of `prompt`; may be `async def`. An exception is a failed rollout, not a reward of 0."""
        ...


def as_messages(content: object, where: str) -> tuple[Mapping[str, str], ...]:
    """The chat messages of a prompt's content; `where` is how an error calls its place.

    Raises ConfigError if it is neither a text nor a list of messages with a known role and a text each.
    """
    if isinstance(content, str):
        if not content:
            raise _not_a_prompt(where, "an empty text")
        return ({"role": "user", "content": content},)
    if not isinstance(content, Sequence) or not content:
        raise _not_a_prompt(where, f"{content!r:.80} ({type(content).__name__})")
    messages = []
    for number, message in enumerate(content):
        if not isinstance(message, Mapping):
            raise _not_a_prompt(where, f"message {number} is {message!r:.80}")
        used = {key: value for key, value in message.items() if value is not None}
        if set(used) != {"role", "content"} or not all(isinstance(value, str) for value in used.values()):
            raise _not_a_prompt(where, f"message {number} is {used!r:.160}")
        if used["role"] not in ROLES:
            raise ConfigError(
                f"{where} is no prompt: message {number} has the role {used['role']!r:.80}", rule=f"roles are {', '.join(ROLES)}",
                way_out="correct the role: most chat templates write any word, and the model then reads one that it was never taught.",
            )  # fmt: skip
        messages.append(used)
    return tuple(messages)


def _not_a_prompt(where: str, found: str) -> ConfigError:
    return ConfigError(
        f"{where} is no prompt: {found}",
        rule="a prompt is a text that is not empty, or a list of chat messages with a text as `role` and as `content`",
        way_out="correct it, or name the right column as task.prompt_column.",
    )
