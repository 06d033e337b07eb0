"""Section `generator`, and the kinds of harnesses."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt

from asyncrl.base.extensions import HarnessKind, rows
from asyncrl.config.extended import extended
from asyncrl.config.fields import FrozenConfig, NotWith, OnlyWith

ENDPOINT_ENV = {
    "OPENAI_BASE_URL": "url",
    "OPENAI_API_BASE": "url",
    "OPENAI_API_KEY": "key",
    "OPENAI_MODEL": "model",
    "ANTHROPIC_BASE_URL": "host",
    "ANTHROPIC_API_KEY": "key",
    "ANTHROPIC_AUTH_TOKEN": "key",
    "ANTHROPIC_MODEL": "model",
}
"""Variables of a command's environment, and the part of the endpoint's address in each."""
Outcomes = Literal["returned", "posted", "later", "none"]
OnTimeout = Literal["fail", "score"]


HARNESSES: Mapping[str, HarnessKind] = {
    "python": HarnessKind(
        "asyncrl.agents.harness:PythonHarness", "MODULE:FUNCTION", "a function"
    ),
    "command": HarnessKind(
        "asyncrl.agents.command:CommandHarness",
        "'PROGRAM ARG...'",
        "a program",
        parse=shlex.split,
        takes_args=False,
    ),
    **rows("harnesses"),
}


def kind_of(config: GeneratorConfig) -> HarnessKind | None:
    """Return the harness kind, None without a local harness."""
    return next(
        (kind for name, kind in HARNESSES.items() if getattr(config, name)), None
    )


@extended("generator")
class GeneratorConfig(FrozenConfig):
    """Program of a rollout: one kind of harness, or `remote` (none of these = one
    completion).
    """

    free_keys: ClassVar = ("workers", "concurrency", "outcome_timeout_s")

    python: str | None = None
    """`module:function` of an agent: async (task, session) -> reward, Outcome, or None
    for the task's reward.
    """
    command: list[str] | None = None
    """Program and arguments: reads the task as JSON on stdin and the gateway in
    OPENAI_BASE_URL and OPENAI_API_KEY, prints the reward as its last line.
    """
    remote: bool = False
    """Other machines run the rollouts: `asyncrl work URL`."""
    args: dict[str, object] = {}
    """Settings of the harness, such as a verifiers environment's, or keyword arguments
    of the python function.
    """
    env: Annotated[dict[str, str], OnlyWith("command")] = {}
    """Environment variables of a command, in addition to PATH, LANG, the endpoint's
    variables, and a private HOME and TMPDIR.
    """
    pass_env: Annotated[list[str], OnlyWith("command")] = []
    """Variables of the run's environment that a command also gets; never written to a
    file. HOME: all commands share the worker's home, instead of an empty one each.
    """
    sandbox: Annotated[Literal["none", "bubblewrap"], OnlyWith("command")] = "none"
    """Isolation of a command. bubblewrap: no network except the gateway, and only
    system files, the work folder and sandbox_paths.
    """
    sandbox_paths: Annotated[list[str], OnlyWith("sandbox")] = []
    """Additional files and folders that a sandboxed command can read."""
    max_memory_mb: Annotated[PositiveInt | None, OnlyWith("sandbox")] = None
    """Memory per process of a sandboxed command, in MiB (none = no limit)."""
    outcomes: Outcomes = "returned"
    """Source of rewards. returned: the function's result, or the command's last line.
    posted: /v1/outcome, with a key per task, before the rollout ends. later: /v1/outcome,
    also hours after its end (docs/rewards.md). none: the task's reward function.
    """
    outcome_timeout_s: Annotated[
        PositiveFloat | None, OnlyWith("outcomes", ("later",))
    ] = 86_400.0
    """Timeout for a reward that is posted later, in seconds since the end of its rollout,
    or since a resume. On expiry the rollout fails (none = no limit).
    """
    on_timeout: Annotated[OnTimeout, NotWith("outcomes", ("posted",))] = "fail"
    """Applies when an agent has called the model and runs out of time: rollout.timeout_s, or
    the time limit of an agent of verifiers or Harbor. fail: fail the rollout and retry
    it. score: take the reward of verifiers or Harbor, else the task's.
    """
    give_answer: bool = False
    """Pass each prompt's `answer` to the harness. The model's tools may find it."""
    workers: PositiveInt = 1
    """Processes that run the rollouts of a harness, if not `remote`."""
    worker_python: str | None = None
    """Python of these processes, for `python` and `command`: a venv with an agent's
    packages and the base dependencies of asyncrl (none = the run's Python).
    """
    concurrency: PositiveInt | Literal["auto"] = "auto"
    """Concurrent rollouts (auto = rollout.slots * running engines, or more for slow
    harnesses).
    """
    stop: list[str] = []
    """Texts that end a completion, besides the end-of-turn token. Single-turn rollouts
    only.
    """

    @property
    def called(self) -> str:
        """Example: python my_agent:run."""
        for name in HARNESSES:
            if value := getattr(self, name):
                return f"{name} {shlex.join(value) if name == 'command' else value}"
        return "remote" if self.remote else "one completion"

    @property
    def is_harness(self) -> bool:
        return self.remote or kind_of(self) is not None

    @property
    def brings_reward(self) -> bool:
        """Return whether the harness may bring the reward itself; else the task must."""
        return self.is_harness and self.outcomes != "none"

    def conflicts(self) -> Iterator[str]:
        kinds = (*HARNESSES, "remote")
        kind, *others = self.given(*kinds) or ["a single turn"]
        if others or self.command == []:
            yield f"give at most one of .{', .'.join(kinds)}, and no empty .command"
        # A setting that this kind does not read is refused. Ignored, it would be a
        # false sense of safety: sandbox for a python function, for example, which runs
        # in the worker itself.
        for_kinds = {
            "stop": ["a single turn"],
            "args": [name for name in HARNESSES if HARNESSES[name].takes_args],
            "give_answer": kinds,
            "on_timeout": kinds,
            "outcomes": {
                "posted": ["command", "remote"],
                "later": ["python", "command", "remote"],
                "none": [
                    name
                    for name in kinds
                    if name not in HARNESSES or not HARNESSES[name].task_source
                ],
            }.get(self.outcomes, kinds),
        }
        for name in self.given(*for_kinds):
            if kind not in for_kinds[name]:
                yield f".{name} is for {' or '.join(for_kinds[name])}, not for {kind}; remove it"
        # env is written to the run directory, pass_env never is. For a secret, it must
        # not be a guess which of the two wins.
        if taken := [
            name for name in ENDPOINT_ENV if name in (*self.env, *self.pass_env)
        ]:
            yield f".env or .pass_env gives {', '.join(taken)}, which the endpoint sets; choose another name"
        if both := sorted(set(self.env) & set(self.pass_env)):
            yield f".env and .pass_env both give {', '.join(both)}; remove it from one of them"
