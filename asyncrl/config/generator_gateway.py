"""Sections `generator` and `gateway`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from asyncrl.config.fields import FrozenConfig, Port

Outcomes = Literal["returned", "posted", "none"]
OnOverflow = Literal["truncate", "fail"]


@dataclass(frozen=True, slots=True)
class HarnessKind:
    """`place`: class in asyncrl/agents, made with (GeneratorConfig, is_worker=); raises ConfigError.
    `metavar`, `parse`: option of `asyncrl work`.
    """

    place: str
    metavar: str
    parse: Callable[[str], Any] = str


HARNESSES: Mapping[str, HarnessKind] = {
    "python": HarnessKind("harness:PythonHarness", "MODULE:FUNCTION"),
    "command": HarnessKind("command:CommandHarness", "'PROGRAM ARG...'", shlex.split),
    "verifiers": HarnessKind("verifiers:VerifiersHarness", "ID"),
}


def kind_of(config: GeneratorConfig) -> HarnessKind | None:
    """Return the harness kind, None without a local harness."""
    return next((kind for name, kind in HARNESSES.items() if getattr(config, name)), None)


class GeneratorConfig(FrozenConfig):
    """Program of a rollout: `python`, `command`, `verifiers` or `remote` (none of these = one completion)."""

    free_keys: ClassVar = ("workers", "concurrency")

    python: str | None = None
    """`module:function` of an agent: async (task, session) -> reward, Outcome, or None for the task's
    reward."""
    command: list[str] | None = None
    """Program and arguments: reads the task as JSON on stdin and the gateway in OPENAI_BASE_URL and
    OPENAI_API_KEY, prints the reward as its last line."""
    verifiers: str | None = None
    """Id of a verifiers environment, loaded with `args`; its dataset is the task (task.verifiers)."""
    remote: bool = False
    """Other machines run the rollouts: `asyncrl work URL`."""
    args: dict[str, Any] = {}
    """Settings of the verifiers environment, or keyword arguments of the python function."""
    env: dict[str, str] = {}
    """Environment variables of a command, in addition to PATH, HOME, LANG, TMPDIR and OPENAI_ variables."""
    pass_env: list[str] = []
    """Variables of the run's environment that a command also gets; never written to a file."""
    sandbox: Literal["none", "bubblewrap"] = "none"
    """Isolation of a command. bubblewrap: no network except the gateway, and only system files, the work
    folder and sandbox_paths."""
    sandbox_paths: list[str] = []
    """Additional files and folders that a sandboxed command can read."""
    max_memory_mb: PositiveInt | None = None
    """Memory per process of a sandboxed command, in MiB (none = no limit)."""
    outcomes: Outcomes = "returned"
    """Source of rewards. returned: the function's result, or the command's last line. posted: /v1/outcome,
    with a key per task. none: the task's reward function."""
    on_overflow: OnOverflow = "truncate"
    """Applies when a conversation exceeds rollout.max_prompt_tokens, gateway.max_calls or
    gateway.max_rollout_tokens. truncate: score the sampled tokens, marked as truncated. fail: fail the
    rollout and retry it."""
    give_answer: bool = False
    """Pass each prompt's `answer` to the harness. The model's tools may find it."""
    workers: PositiveInt = 1
    """Processes that run the rollouts of `python`, `command` and `verifiers`."""
    concurrency: PositiveInt | Literal["auto"] = "auto"
    """Concurrent rollouts (auto = rollout.slots * running engines, or more for slow harnesses)."""
    stop: list[str] = []
    """Texts that end a completion, besides the end-of-turn token. Single-turn rollouts only."""

    @property
    def is_harness(self) -> bool:
        return self.remote or kind_of(self) is not None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = (*HARNESSES, "remote")
        kind, *others = self.given(*kinds) or ["a single turn"]
        if others or self.command == []:
            raise ValueError(f"give at most one of {', '.join(kinds)}, and no empty command")
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
                raise ValueError(f"{name} is for {' or '.join(for_kinds[name])}, not for {kind}; remove it")
        if self.sandbox == "none" and (given := self.given("sandbox_paths", "max_memory_mb")):
            raise ValueError(f"{given[0]} needs generator.sandbox=bubblewrap")
        if both := sorted(set(self.env) & set(self.pass_env)):
            raise ValueError(f"env and pass_env both give {', '.join(both)}; remove it from either")
        return self


class GatewayConfig(FrozenConfig):
    """The OpenAI-compatible endpoint for harnesses and `asyncrl serve gateway`."""

    free_keys: ClassVar = ("host", "port", "public_url", "max_calls", "lease_timeout_s")

    host: str = "127.0.0.1"
    """Address to listen on. Any address but 127.0.0.1 admits other machines with keys."""
    port: Port | None = None
    """Port to listen on (none = any free one)."""
    public_url: str | None = None
    """URL for harnesses on other machines, e.g. http://trainer-host:8700 (none = http://host:port)."""
    on_sampling_override: Literal["auto", "use_config", "honour"] = "auto"
    """Applies to calls with another temperature or top_p than training. use_config: use the configured
    values. honour: sample as requested, but never train on the tokens (auto = honour under
    `asyncrl serve gateway`, use_config in a run)."""
    tool_format: str = "auto"
    """Format of tool calls: a format of docs/gateway.md, none, or `module:function`:
    parse(text) -> [(name, arguments), ...] or None (auto = from the chat template)."""
    thoughts: Literal["keep", "as_template"] = "keep"
    """Thoughts that the chat template strips from earlier answers. keep: prompts contain them, so a
    conversation is one branch. as_template: each prompt is the template's own, in a new branch if it
    differs."""
    thoughts_field: Literal["content", "reasoning_content"] = "content"
    """Field of a thought in /v1/chat/completions."""
    parse_special_tokens: bool = True
    """Encode the name of a special token in a message or tool as that token, like vLLM. false: as text, so
    that a web page cannot write a turn."""
    max_calls: int = Field(default=256, ge=1)
    """Calls per rollout; the next gets 429 (generator.on_overflow). A key of `asyncrl serve gateway` has no
    limit."""
    max_rollout_tokens: int | None = Field(default=2**18, ge=1)
    """Tokens of a rollout; shared context counts in each branch. The next call gets 429
    (generator.on_overflow) (none = no limit)."""
    lease_timeout_s: float = Field(default=60.0, gt=0)
    """Timeout without a heartbeat, in seconds, until a worker's rollouts fail."""
