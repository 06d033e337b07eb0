"""Section `teacher`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from asyncrl.config.fields import (
    EngineWith,
    FrozenConfig,
    Name,
    NotWith,
    OneOrSeveral,
    OnlyWith,
)

TEACHER_SLOTS = 16
"""Sequences that a teacher reads at once."""
POLICY_SLOTS = 4
"""Sequences that a rollout engine reads at once, each with a KV cache."""
MOST_SERVED_TOP_K = 20
"""Most ids per token of vLLM's prompt_logprobs, by default."""


class TeacherConfig(FrozenConfig):
    """A second model for on-policy distillation (docs/algorithms.md), in a separate
    engine server. A list of sections gives several teachers.
    """

    free_keys: ClassVar = ("base_url", "key_variable")

    path: Annotated[str | None, NotWith("policy")] = None
    """Hugging Face folder or hub id, as for model.path, of a model with the vocabulary of
    `model`. With base_url only its tokenizer is read.
    """
    policy: bool = False
    """The policy is its own teacher, with another prompt: the rollout engines score, with
    the weights that they serve then. Needs teacher.prompt, and no path.
    """
    prompt: Annotated[str, Field(min_length=1)] | None = None
    """What the teacher reads in place of the prompt: a column of the task's rows, or a
    function of the rollout and its siblings, as module:function (none = the same prompt).
    """
    engine: Annotated[
        str, EngineWith("scores_texts"), NotWith("base_url"), NotWith("policy")
    ] = "embedded"
    """Kind of engine that serves the model, without base_url."""
    base_url: Annotated[
        Annotated[str, Field(pattern=r"^https?://")] | None, NotWith("policy")
    ] = None
    """URL of a server with the model, with its /v1; its /v1/completions must answer
    prompt_logprobs, as vLLM's (none = the run serves the model).
    """
    key_variable: Annotated[str | None, OnlyWith("base_url")] = None
    """Environment variable with the server's key (none = it needs no key)."""
    tasks: Annotated[list[Name], Field(min_length=1)] | None = None
    """Names of the tasks whose rollouts it scores (none = all)."""

    def conflicts(self) -> Iterator[str]:
        if self.path is None and not self.policy:
            yield ".path is missing; set .path to a model, or .policy=true and .prompt"
        if self.policy and self.prompt is None:
            yield (
                ".policy=true without .prompt compares the policy with itself; set .prompt, or set .path "
                "in place of .policy"
            )

    @property
    def is_served(self) -> bool:
        """Return whether the run has a server for it."""
        return self.base_url is None and not self.policy

    @property
    def is_embedded(self) -> bool:
        return self.base_url is None and self.engine == "embedded"

    def scores(self, task: str) -> bool:
        """Return whether it scores a task; the only task of a run may be ''."""
        return self.tasks is None or not task or task in self.tasks


Teachers = OneOrSeveral[TeacherConfig]
