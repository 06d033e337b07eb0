"""Sections `generator` and `gateway`: how a rollout is run; and the kinds of harness."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from asyncrl.config.fields import FrozenConfig, Port

Outcomes = Literal["returned", "posted", "none"]
OnOverflow = Literal["truncate", "fail"]


@dataclass(frozen=True, slots=True)
class HarnessKind:
    """`place`: its class in asyncrl/agents, made with (GeneratorConfig, is_worker=), which raises ConfigError
    if it cannot be run here. `checked_in`: who makes one before a run, to check the config: the controller
    (here); a short-lived child, for it loads code of the user's; None: the task loads the same.

    Its option of `asyncrl work` is shown with `metavar` and `help`; `parse` makes the config key of it.
    """

    place: str
    checked_in: Literal["here", "child"] | None
    metavar: str
    help: str
    parse: Callable[[str], Any] = str


HARNESSES: Mapping[str, HarnessKind] = {
    "python": HarnessKind(
        "harness:PythonHarness", "child", "MODULE:FUNCTION", "async (task, session) -> reward."
    ),
    "command": HarnessKind(
        "command:CommandHarness", "here", "'PROGRAM ARG...'", "a program, its task on stdin.", shlex.split
    ),
    "verifiers": HarnessKind("verifiers:VerifiersHarness", None, "ID", "a verifiers environment."),
}
"""Harness kinds by their key of `generator` and option of `asyncrl work`."""


def kind_of(config: GeneratorConfig) -> HarnessKind | None:
    """None: a single turn, or workers elsewhere."""
    return next((kind for name, kind in HARNESSES.items() if getattr(config, name)), None)


class GeneratorConfig(FrozenConfig):
    """Program of a rollout. Give one of `python`, `command`, `verifiers`, `remote`. Without any, a rollout is
    one prompt and one completion.
    """

    python: str | None = None
    """`module:function` of an agent: async (task, session) -> reward, Outcome, or None for the task's own
    reward.
    """
    command: list[str] | None = None
    """A program and its arguments: the task as JSON on its standard input, the gateway in OPENAI_BASE_URL and
    OPENAI_API_KEY, the reward on its last line."""
    verifiers: str | None = None
    """Id of a verifiers environment, loaded with `args`; its dataset is the task (task.verifiers)."""
    remote: bool = False
    """Workers elsewhere run the rollouts: `asyncrl work URL`."""
    args: dict[str, Any] = {}
    """Settings of the verifiers environment, or keyword arguments of the python function, passed as they
    are.
    """
    env: dict[str, str] = {}
    """Environment variables of a command, in addition to PATH, HOME, LANG, TMPDIR and the OPENAI_
    variables."""
    pass_env: list[str] = []
    """Variables of the run's environment that a command also gets, such as a judge's key. No file of the run
    contains their values."""
    sandbox: Literal["none", "bubblewrap"] = "none"
    """Isolation of a command. none: like any program of the worker's user. bubblewrap: no network except the
    gateway, no files except the system's, its work folder and sandbox_paths."""
    sandbox_paths: list[str] = []
    """Files and folders that a command in a sandbox can read, besides the system's and files in `command`."""
    max_memory_mb: PositiveInt | None = None
    """Memory of each process of a command in a sandbox, in MiB (none = no limit)."""
    outcomes: Outcomes = "returned"
    """Source of rewards. returned: the function's result, or the last line of the command's output. posted:
    /v1/outcome, with a key for that task only. none: the task's reward function."""
    on_overflow: OnOverflow = "truncate"
    """Applies when a conversation exceeds rollout.max_prompt_tokens, or uses up gateway.max_calls or
    gateway.max_rollout_tokens. truncate: keep and score the sampled tokens, marked as truncated, even if the
    harness fails. fail: fail the rollout and retry it."""
    give_answer: bool = False
    """Give the harness the `answer` of each prompt for its own reward. The model's tools may find the answer
    there."""
    workers: PositiveInt = 1
    """Processes that run the rollouts of `python`, `command` and `verifiers`."""
    concurrency: PositiveInt | Literal["auto"] = "auto"
    """Rollouts in flight at once (auto = rollout.slots * the engines that work; more where harnesses wait for
    other things).
    """
    stop: list[str] = []
    """Texts that end a completion, in addition to the end-of-turn token. Only for single-turn rollouts; a
    harness sends its own."""

    @property
    def is_harness(self) -> bool:
        """Rollouts are run by a harness, over the gateway."""
        return self.remote or kind_of(self) is not None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = (*HARNESSES, "remote")
        kind, *others = self.given(*kinds) or ["a single turn"]
        if others or self.command == []:
            raise ValueError(
                f"give at most one of {', '.join(kinds)}; a command is a program and its arguments"
            )
        for_kinds = {
            "stop": ["a single turn"],
            "env": ["command"],
            "pass_env": ["command"],
            "sandbox": ["command"],
            "sandbox_paths": ["command"],
            "max_memory_mb": ["command"],
            "args": ["python", "verifiers"],
            "give_answer": kinds,
            "on_overflow": kinds,
            "outcomes": ["command", "remote"] if self.outcomes == "posted" else kinds,
        }
        for name in self.given(*for_kinds):
            if kind not in for_kinds[name]:
                raise ValueError(
                    f"generator.{name}={getattr(self, name)} is for {' or '.join(for_kinds[name])}, and the "
                    f"generator is {kind}; remove it"
                )
        of_sandbox = self.given("sandbox_paths", "max_memory_mb")
        if self.sandbox == "none" and of_sandbox:
            raise ValueError(f"generator.{of_sandbox[0]} needs generator.sandbox=bubblewrap")
        if both := sorted(set(self.env) & set(self.pass_env)):
            raise ValueError(f"env and pass_env both give {', '.join(both)}; remove it from one of them")
        return self


class GatewayConfig(FrozenConfig):
    """The OpenAI-compatible endpoint that harnesses call; open where a generator needs it, and under `asyncrl
    serve gateway`.
    """

    host: str = "127.0.0.1"
    """Address to listen on. Anything but 127.0.0.1 lets other machines in; sessions and workers still need
    their keys.
    """
    port: Port | None = None
    """Port to listen on (none = any free one)."""
    public_url: str | None = None
    """Address under which harnesses on other machines reach it, e.g. http://trainer-host:8700 (none =
    http://host:port).
    """
    on_sampling_override: Literal["auto", "use_config", "honour", "refuse"] = "auto"
    """Applies to calls with another temperature or top_p than training. use_config: sample with the
    configured values (logged once). honour: sample as requested; the tokens are context and never trained.
    refuse: 400 (auto = honour under `asyncrl serve gateway`, use_config in a run)."""
    tool_format: str = "auto"
    """Format of the model's tool calls: a format of docs/gateway.md, response_template, none, or your own
    `module:function`: parse(text) -> [(name, arguments), ...], (content, [...]) or None (auto = from the chat
    template)."""
    thoughts: Literal["inline", "apart"] = "inline"
    """Place of thoughts in answers of /v1/chat/completions. inline: in `content`. apart: in
    `reasoning_content`. Responses and messages always separate them."""
    max_calls: int = Field(default=256, ge=1)
    """Calls per rollout; the next call gets 429, see generator.on_overflow. A key of `asyncrl serve gateway`
    has no limit and keeps the newest 16 * max_calls conversations."""
    max_rollout_tokens: int | None = Field(default=2**18, ge=1)
    """Tokens of all branches of a rollout together; shared context counts in each branch. At the limit the
    next call gets 429, see generator.on_overflow (none = no limit)."""
    lease_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds without a sign of life until a worker is taken for gone and its rollouts fail."""
