"""Harness `verifiers`: an environment of
https://github.com/PrimeIntellect-ai/verifiers.

API 0.4 (`verifiers.v1`): a package exports a Taskset, and optionally a Harness and an
Env.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import fmean
from typing import Any

from asyncrl.agents.harness import (
    GRACE_S,
    REQUEST_LOGGERS,
    AnyTask,
    Session,
)
from asyncrl.base.errors import (
    ConfigError,
    RewardFailure,
    RolloutFailure,
    first_fault,
    needing,
)
from asyncrl.base.failures import FailureKind, kind_of_text
from asyncrl.base.user_code import UserCalls, find_here
from asyncrl.config import GeneratorConfig
from asyncrl.extensions.verifiers.settings import ENVIRONMENT, INFO_KEY
from asyncrl.messages.records import Outcome, RewardPart

_NO_KEY_VARIABLE = "ASYNCRL_SESSION_KEY_IS_IN_THE_ADDRESS"
"""A session's key is in its address; the library wants one in the environment."""

_OF_STAGE = {
    "setup_timeout": FailureKind.RUNTIME_START,
    "finalize_timeout": FailureKind.REWARD_TIMEOUT,
    "scoring_timeout": FailureKind.REWARD_TIMEOUT,
}
"""Kinds of a trace's stop conditions that are time limits, but not the agent's."""
AGENT_TIMEOUT = "agent_timeout"
"""The stop condition of the agent's own time limit."""
_OF_ERROR = {
    "SandboxError": FailureKind.RUNTIME_START,
    "EnvError": FailureKind.ENVIRONMENT,
    "TaskError": FailureKind.ENVIRONMENT,
    "ToolsetError": FailureKind.ENVIRONMENT,
    "ProviderError": FailureKind.ENDPOINT_LOST,
    "InterceptionError": FailureKind.ENDPOINT_LOST,
    "TunnelError": FailureKind.ENDPOINT_LOST,
    "TimeoutError": FailureKind.AGENT_TIMEOUT,
}
"""Kinds of the library's errors, which name the border that a failure crossed."""

_REFUSAL = re.compile(r"\b(4\d\d)\b")
"""Status of a refusal in a ProviderError."""
_CHATTY = ("verifiers", "mcp", *REQUEST_LOGGERS)


class VerifiersHarness:
    """Run one task of the environment per rollout.

    Its hooks and rewards must not block the worker's event loop.
    """

    def __init__(self, config: GeneratorConfig, *, is_worker: bool = False) -> None:
        self._name = ENVIRONMENT.of(config) or ""
        self._env, self._seats = _load_trainable(self._name, config.args)
        self._servers = AsyncExitStack()
        self._changing = asyncio.Lock()
        self._is_open = False
        self.num_users = 0
        self.calls = UserCalls(f"generator.verifiers={self._name}", grace_s=GRACE_S)
        for name in _CHATTY:
            # A user's own level counts.
            if logging.getLogger(name).level == logging.NOTSET:
                logging.getLogger(name).setLevel(logging.WARNING)

    async def run(self, task: AnyTask, session: Session) -> Outcome:
        played, vf = self._task(task), _library(self._name)
        address = f"{session.base_url.removesuffix('/v1')}/s/{session.api_key}/v1"
        client = vf.EvalClientConfig(base_url=address, api_key_var=_NO_KEY_VARIABLE)
        context = vf.ModelContext(model=session.model, client=client)
        for seat in self._seats if session.roles else ():
            if seat not in session.roles:
                raise ConfigError(
                    f"agent {seat} of {self._name} has no role among {', '.join(session.roles)}",
                    rule="each agent without a client plays the role of its name",
                    way_out="add it to trainer.roles, or set its `client` in generator.args.",
                )
            getattr(self._env.config, seat).model = seat
        async with self._served():
            self.calls.check()
            # Also those that a hook which raises leaves out of the episode.
            traces = list[Any]()
            episode = await self.calls.run(
                self._env.run_episode(played, context, on_trace=traces.append)
            )
        has_answer = any(trace.calls for trace in traces)
        return self._outcome(episode, session, has_answer=has_answer)

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[None]:
        """Share the taskset's tool servers among rollouts."""
        self.num_users += 1
        try:
            # The first rollout starts the servers. Rollouts that begin during the start
            # wait for it.
            async with self._changing:
                if not self._is_open:
                    await self._servers.enter_async_context(_serving(self._env))
                    self._is_open = True
            yield
        finally:
            self.num_users -= 1  # a cancelled rollout is gone, too
            async with self._changing:
                if self._is_open and self.num_users == 0:
                    self._is_open = False
                    await self._servers.aclose()

    def kill_all_nowait(self) -> None:
        from verifiers.v1.runtimes.base import cleanup_at_exit

        cleanup_at_exit()

    def _task(self, task: AnyTask) -> Any:
        task_class = type(self._env.taskset).task_type()
        data = task_class.data_type().model_validate(task.info[INFO_KEY])
        return task_class(data, self._env.config.taskset.task)

    def _outcome(self, episode: Any, session: Session, *, has_answer: bool) -> Outcome:
        said = f"verifiers environment {self._name}"
        # Other agents, such as judges and simulated users, have their own clients, and
        # no samples here.
        traces = [trace for trace in episode.traces if trace.agent.name in self._seats]
        if not self._env.complete(episode) or not traces:
            errors = [
                *(error for trace in episode.traces for error in trace.errors),
                *episode.errors,
            ]
            why = "it ran no trained agent"
            kind = FailureKind.AGENT_CRASH
            if errors:
                why = f"{errors[-1].type}: {errors[-1].message}"
                # The first is the cause: a lost sandbox is an error of the environment
                # in the end.
                kind = _kind_of(errors[0], has_answer=has_answer)
            raise RolloutFailure(
                f"{said} failed: {why.replace(session.api_key, 'KEY')}", kind=kind
            )
        # Of all agents: what a judge gives that was not ready is not a reward either.
        for trace in episode.traces:
            _refuse_late(trace, said, is_policy=trace.agent.name in self._seats)
        trained = [trace for trace in traces if trace.agent.trainable]
        for trace in trained:
            if missing := [name for name, one in trace.rewards.items() if one is None]:
                raise RewardFailure(
                    f"{said} gave no reward {', '.join(missing)} (stopped by {trace.stop_condition})"
                )
        timed_out = any(trace.stop_condition == AGENT_TIMEOUT for trace in traces)
        (first, *others) = traces
        if not others and first.agent.trainable:
            parts = {
                name: RewardPart(float(one.score), float(one.weight))
                for name, one in first.rewards.items()
            }
            metrics = _metrics_of(first, {})
            return Outcome(parts or None, metrics, timed_out=timed_out)
        if unpaid := [trace.agent.name for trace in trained if not trace.rewards]:
            raise RewardFailure(
                f"{said} gave no reward to agent {', '.join(unpaid)}",
                rule="each of several trained agents has its own reward",
            )
        # The library sends the id of an agent's trace with its calls (X-Session-ID).
        rewards = {trace.id: float(trace.reward) for trace in trained if trace.calls}
        frozen = [trace.id for trace in traces if not trace.agent.trainable]
        values = defaultdict[str, list[float]](list)
        for trace in traces:
            for name, value in _metrics_of(trace, trace.rewards).items():
                values[f"{trace.agent.name}/{name}"].append(value)
        metrics = {name: fmean(each) for name, each in values.items()}
        roles = {trace.id: trace.agent.name for trace in traces}
        return Outcome(
            None,
            metrics,
            rewards,
            roles=roles,
            untrained=tuple(frozen),
            timed_out=timed_out,
        )


def _refuse_late(trace: Any, said: str, *, is_policy: bool) -> None:
    """Raise RolloutFailure if a stage of the environment, a judge or a simulated user ran
    out of time. The library scores what is there, and a reward of half a world is not the
    policy's.
    """
    late = _OF_STAGE.get(trace.stop_condition)
    if trace.stop_condition == AGENT_TIMEOUT and not is_policy:
        late = FailureKind.REWARD_TIMEOUT
    if late is not None:
        stage = trace.stop_condition.removesuffix("_timeout")
        stage = stage.replace("agent", "rollout")
        raise RolloutFailure(
            f"{said} was not ready in time: {trace.stop_condition} of agent {trace.agent.name}",
            way_out=f"raise timeout.{stage} of the agent in generator.args.",
            kind=late,
        )


def _metrics_of(trace: Any, rewards: Mapping[str, Any]) -> dict[str, float]:
    metrics = {
        f"reward/{name}": float(reward.score)
        for name, reward in rewards.items()
        if reward is not None
    }
    return metrics | {
        name: float(value) for name, value in trace.metrics.items() if value is not None
    }


def _kind_of(error: Any, *, has_answer: bool) -> FailureKind:
    kind = _OF_ERROR.get(error.type, FailureKind.AGENT_CRASH)
    if error.type == "TaskError" and "scoring" in error.message:
        kind = FailureKind.REWARD_CRASH
    # A hook that raises on the policy's text, such as float("four").
    if error.type in ("EnvError", "TaskError") and has_answer:
        kind = FailureKind.AGENT_CRASH
    status = _REFUSAL.search(error.message)
    if error.type == "ProviderError" and status is not None:
        kind = FailureKind.QUOTA if status[1] == "429" else FailureKind.REFUSED
    return kind_of_text(error.message, kind)


@asynccontextmanager
async def _serving(env: Any) -> AsyncIterator[None]:
    """Like Env.serving(), but with one interception server per rollout.

    verifiers 0.4.0: an interception server keeps one HTTP client per address until it
    stops, and each session has its own address. Remove once
    InterceptionServer.unregister closes unused clients.
    """
    async with env.shared_tools() as shared:
        env._shared_tools = shared
        try:
            await env.start()
            yield
        finally:
            env._shared_tools = {}
            await env.stop()


def load_taskset(
    identifier: str, args: Mapping[str, Any], fields: Mapping[str, Any]
) -> Any:
    """Return the taskset with `fields` over those in `args`. Raises ConfigError."""
    taskset = {**args.get("taskset", {}), **fields}
    return _load_trainable(identifier, {**args, "taskset": taskset})[0].taskset


def _load_trainable(identifier: str, args: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return the environment whose taskset is `identifier`, with `args` as its config,
    and the names of its agents that call the session. Raises ConfigError.
    """
    vf = _library(identifier)
    shown = f"generator.verifiers={identifier}"
    here = find_here()
    taskset = args.get("taskset", {})
    try:
        settings = copy.deepcopy({**args, "taskset": {**taskset, "id": identifier}})
        env = vf.load_environment(vf.resolve_env_config(settings))
    except Exception as error:  # user code of the environment
        why = (
            first_fault(error)
            if isinstance(error, ValueError)
            else error.__cause__ or error
        )
        raise ConfigError(
            f"{shown} cannot be loaded with generator.args={dict(args)}: {why}",
            rule=f"an installed package, or one in {here}, exports a Taskset in __all__",
            way_out=f"install or correct it; `vf-eval {identifier} --help` shows the fields as --env.NAME.",
        ) from error
    agents = {
        name: value for name, value in env.config if isinstance(value, vf.AgentConfig)
    }
    trained = {name: agent for name, agent in agents.items() if agent.client is None}
    if not trained or any(agent.model is not None for agent in trained.values()):
        found = (
            ", ".join(
                f"{name} (model={agent.model})" for name, agent in trained.items()
            )
            or "none"
        )
        what = f"of its agents {', '.join(agents)} these have no client of their own: {found}"
        raise ConfigError(
            f"{shown}: {what}",
            rule="agents without client and model are trained, at least one; others need a client",
            way_out="set `client` in generator.args.",
        )
    places = {"": env.config.retries}
    places |= {f"{seat}.": agent.retries for seat, agent in trained.items()}
    for place, retries in places.items():
        if retries.max_retries or any(rule.max_retries for rule in retries.rules):
            raise ConfigError(
                f"{shown}: generator.args has {place}retries",
                rule="its retries would be trained, too; rollout.retries retries failed rollouts",
            )
    return env, [*trained]


def _library(identifier: str) -> Any:
    with needing("verifiers", f"generator.verifiers={identifier}"):
        import verifiers.v1
    return verifiers.v1
