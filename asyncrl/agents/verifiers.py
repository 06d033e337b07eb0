"""The harness `verifiers`: one environment of that library, as it is.

https://github.com/PrimeIntellect-ai/verifiers, the API of 0.4 (`verifiers.v1`): a package that exports a
Taskset, and if it likes a Harness (the program that talks to the model) and an Env (how agents play one
task). The library catches the program's calls in a server of its own, here in the worker, and passes them on
to the session.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from pydantic import ValidationError

from asyncrl.agents.harness import GRACE_S, AnyTask, Session, first_fault
from asyncrl.config import GeneratorConfig
from asyncrl.errors import ConfigError, RewardFailure, RolloutFailure, install_extra
from asyncrl.messages.records import Outcome
from asyncrl.messages.work import VERIFIERS_KEY
from asyncrl.user_code import UserCalls, find_here

_NO_KEY_VARIABLE = "ASYNCRL_SESSION_KEY_IS_IN_THE_ADDRESS"
"""The library reads keys from the environment, one for the whole process; a session's key is in the address
instead.
"""

_CHATTY = ("verifiers", "httpx", "aiohttp.access", "mcp")
"""They log each call or rollout; httpx would log addresses, and with them keys."""


class VerifiersHarness:
    """Runs one task of the environment for each rollout, as many at once as the worker has slots.

    The environment is loaded once. Its hooks and rewards run on the worker's event loop: what blocks that
    loop stops all its rollouts.
    """

    def __init__(self, config: GeneratorConfig, *, is_worker: bool = False) -> None:
        """Raises ConfigError if there is no such environment, or it cannot be trained here."""
        self._name = config.verifiers or ""
        self._env, self._seat = _load_trainable(self._name, config.args)
        self._servers, self._changing, self._is_open = AsyncExitStack(), asyncio.Lock(), False
        self.num_users = 0
        self.calls = UserCalls(f"generator.verifiers={self._name}", error=ConfigError, grace_s=GRACE_S)
        for name in _CHATTY:
            if logging.getLogger(name).level == logging.NOTSET:
                logging.getLogger(name).setLevel(logging.WARNING)

    async def run(self, task: AnyTask, session: Session) -> Outcome:
        """The environment's reward and metrics. Raises RolloutFailure for whatever fails in it, ConfigError
        for what can never be.
        """
        played, vf = self._task(task), _library(self._name)
        address = f"{session.base_url.removesuffix('/v1')}/s/{session.api_key}/v1"
        client = vf.EvalClientConfig(base_url=address, api_key_var=_NO_KEY_VARIABLE)
        context = vf.ModelContext(model=session.model, client=client)
        async with self._served():
            self.calls.check()
            episode = await self.calls.run(self._env.run_episode(played, context))
        return self._outcome(episode, session)

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[None]:
        """With what rollouts share: the tool servers of the taskset, and what its start() builds. The first
        rollout opens it and the last one to leave closes it; others sleep meanwhile.
        """
        async with self._changing:
            if not self._is_open:
                await self._servers.enter_async_context(_serving(self._env))
                self._is_open = True
            self.num_users += 1
        try:
            yield
        finally:
            self.num_users -= 1  # before the wait: one that is cancelled in it has left all the same
            async with self._changing:
                if self._is_open and self.num_users == 0:
                    self._is_open = False
                    await self._servers.aclose()

    def kill_all_nowait(self) -> None:
        """Free the runtimes that still live: their servers, sandboxes and folders."""
        from verifiers.v1.runtimes.base import cleanup_at_exit

        cleanup_at_exit()

    def _task(self, task: AnyTask) -> Any:
        """The environment's own task again, built as the library's own servers build it from their clients'
        data.
        """
        data = task.info.get(VERIFIERS_KEY)
        if data is None:
            what = f"prompt {task.prompt_id} is none of the verifiers environment {self._name}"
            raise ConfigError(what, way_out="set task.verifiers=true in the run's config.")
        task_class = type(self._env.taskset).task_type()
        return task_class(task_class.data_type().model_validate(data), self._env.config.taskset.task)

    def _outcome(self, episode: Any, session: Session) -> Outcome:
        traces = [trace for trace in episode.traces if trace.agent.name == self._seat]
        if not self._env.complete(episode) or not traces:
            raise self._failure(episode, session)
        trace = traces[0]
        if len(traces) > 1 or not trace.agent.trainable:
            what = f"ran its agent {self._seat} {len(traces)} times, trainable={trace.agent.trainable}"
            rule = "an episode is one rollout of the one agent that is trained"
            way_out = "use rollout.group_size for several attempts; give other agents a client."
            raise ConfigError(f"{self._name}: an episode {what}", rule=rule, way_out=way_out)
        if missing := [name for name, reward in trace.rewards.items() if reward is None]:
            what = f"did not come to its rewards {', '.join(missing)} (stopped by {trace.stop_condition})"
            way_out = "raise the timeouts in generator.args, or correct the environment."
            raise RewardFailure(f"verifiers environment {self._name} {what}", way_out=way_out)
        metrics = {f"reward/{name}": float(reward.score) for name, reward in trace.rewards.items()}
        metrics |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
        return Outcome(float(trace.reward) if trace.rewards else None, metrics)

    def _failure(self, episode: Any, session: Session) -> RolloutFailure:
        errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
        said = f"{errors[-1].type}: {errors[-1].message}" if errors else "it ran no agent that is trained"
        way_out = "correct the environment, or its settings in generator.args."
        what = f"verifiers environment {self._name} failed: {said.replace(session.api_key, 'KEY')}"
        return RolloutFailure(what, way_out=way_out)


@asynccontextmanager
async def _serving(env: Any) -> AsyncIterator[None]:
    """As Env.serving(), but each rollout has an interception server of its own, which ends with it.

    verifiers 0.4.0: an interception server keeps one HTTP client for each address until it is stopped, and
    each session has its own address. Use Env.serving() once InterceptionServer.unregister closes the unused
    clients.
    """
    async with env.shared_tools() as shared:
        env._shared_tools = shared
        try:
            await env.start()
            yield
        finally:
            env._shared_tools = {}
            await env.stop()


def load_environment(identifier: str, args: Mapping[str, Any]) -> Any:
    """The environment whose taskset is `identifier`; `args` are the fields of its config. Modules of the
    working directory are found.

    Raises ConfigError if the library, the environment or a setting is not there, or is wrong.
    """
    vf = _library(identifier)
    shown, taskset = f"generator.verifiers={identifier}", args.get("taskset", {})
    if not isinstance(taskset, Mapping) or "id" in taskset:
        rule = "it holds the taskset's own settings; generator.verifiers is its id"
        raise ConfigError(f"{shown}: generator.args.taskset is {taskset!r:.80}", rule=rule)
    here = find_here()
    settings = copy.deepcopy({**args, "taskset": {**taskset, "id": identifier}})
    try:
        return vf.load_environment(vf.resolve_env_config(settings))
    except ValidationError as error:
        what = f"generator.args: {first_fault(error)} (given: {error.errors()[0]['input']!r:.80})"
        way_out = f"`vf-eval {identifier} --help` shows the fields of {error.title} as --env.NAME."
        raise ConfigError(f"{shown}: {what}", way_out=way_out) from error
    except ModuleNotFoundError as error:
        what = f"{shown} is not in {here} and not installed: {error.__cause__ or error}"
        raise ConfigError(what, way_out="start asyncrl in its folder, or install it.") from error
    except Exception as error:  # the environment's own code
        what = f"cannot be loaded with generator.args={dict(args)}: {type(error).__name__}: {error}"
        rule = "verifiers 0.4 loads a package that exports a Taskset in __all__"
        way_out = f"correct generator.args, or the environment; `vf-eval {identifier}` runs it by itself."
        raise ConfigError(f"{shown} {what}", rule=rule, way_out=way_out) from error


def taskset_loader(generator: GeneratorConfig) -> Callable[[], Any]:
    """load_taskset of the environment that the config's generator names."""
    return partial(load_taskset, generator.verifiers or "", generator.args)


def load_taskset(identifier: str, args: Mapping[str, Any]) -> Any:
    """The taskset of an environment that can be trained. Raises ConfigError."""
    return _load_trainable(identifier, args)[0].taskset


def _load_trainable(identifier: str, args: Mapping[str, Any]) -> tuple[Any, str]:
    """The environment, and the name of the one agent that calls the session. Raises ConfigError if there is
    none, or more than one.

    An agent without a client of its own gets that of the run. What another agent says there would be trained
    as the policy's.
    """
    env, vf = load_environment(identifier, args), _library(identifier)
    agents = {name: value for name, value in env.config if isinstance(value, vf.AgentConfig)}
    trained = {name: agent for name, agent in agents.items() if agent.client is None}
    shown = f"generator.verifiers={identifier}"
    if [agent.model for agent in trained.values()] != [None]:
        found = ", ".join(f"{name} (model={agent.model})" for name, agent in trained.items()) or "none"
        what = f"of its agents {', '.join(agents)} these have no client of their own: {found}"
        rule = "the one without a client and a model is trained; each other, a judge say, needs a `client`"
        raise ConfigError(f"{shown}: {what}", rule=rule, way_out="give them one in generator.args.")
    ((seat, agent),) = trained.items()
    for place, retries in (("", env.config.retries), (f"{seat}.", agent.retries)):
        if retries.max_retries or any(rule.max_retries for rule in retries.rules):
            rule = "a retry inside the environment samples into the same rollout, which is trained"
            way_out = "remove them: asyncrl runs a failed rollout again (rollout.retries)."
            raise ConfigError(f"{shown}: generator.args has {place}retries", rule=rule, way_out=way_out)
    return env, seat


def _library(identifier: str) -> Any:
    try:
        import verifiers.v1
    except ModuleNotFoundError as error:
        what = f"generator.verifiers={identifier} needs the package verifiers, of version 0.4: {error}"
        way_out = f"{install_extra('verifiers')}, where the run is started and where its workers run."
        raise ConfigError(what, way_out=way_out) from error
    return verifiers.v1
