"""`asyncrl serve`: run engine servers, and the gateway, until Ctrl-C or for a number of rollouts. Trains and
journals nothing.

A lost engine server ends the command; workers restart. Ctrl-C (or SIGTERM) ends a running service with exit
code 0; during startup and rollouts the code is 130 or 143.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.agents.command import passed_env
from asyncrl.base.errors import ConfigError
from asyncrl.base.files import RunLock, write_whole
from asyncrl.base.host import hide_memory
from asyncrl.base.user_code import cancel_remaining
from asyncrl.config import RunConfig, run_config_yaml
from asyncrl.engines.pool import EnginePool
from asyncrl.job.agent_runtime import (
    AgentRuntime,
    UserKey,
    make_gateway,
    make_generator,
    model_name,
    try_rollouts,
)
from asyncrl.job.build import find_tasks
from asyncrl.job.engine_kinds import engine_kind
from asyncrl.job.life import Life, Voice, logging_to, make_run_dir, new_run_dir, removed_if_refused
from asyncrl.job.servers.server_maker import ServerMaker
from asyncrl.job.start import Server, start_all
from asyncrl.job.supervision.supervise import Supervision, heartbeat
from asyncrl.launch.devices import place
from asyncrl.launch.fit import settle
from asyncrl.launch.launchers import opened
from asyncrl.launch.nodes import Launcher
from asyncrl.observe.run_numbers import several
from asyncrl.rollouts.recording import RolloutRecorder
from asyncrl.tasks.from_config import make_prompt_source
from asyncrl.tasks.scorer import Scorers
from asyncrl.trainer.model_folder import make_model_folder

if TYPE_CHECKING:  # which import FastAPI
    from asyncrl.agents.endpoint.gateway import Gateway


def serve_gateway(
    config: RunConfig,
    run_dir: Path | None,
    *,
    name: str,
    record: Path | None = None,
    num_rollouts: int | None = None,
) -> int:
    """Serve until Ctrl-C, or run `num_rollouts` rollouts; return the exit code. Raises AsyncrlError. No
    process remains.
    """
    hide_memory()  # protect keys of all rollouts: a tried agent runs as the same user
    passed_env(config.generator.pass_env)
    with open_folder(run_dir, name, config) as (folder, settled, launcher):
        served = GatewayServing(settled, folder, launcher, record, num_rollouts)
        return asyncio.run(cancel_remaining(served.run()))


def serve_engine(config: RunConfig, run_dir: Path | None, *, name: str) -> int:
    """Serve one engine until Ctrl-C; return the exit code. Raises AsyncrlError."""
    with open_folder(run_dir, name, config) as (folder, settled, launcher):
        serving = EngineServing(settled, folder, launcher=launcher)
        return asyncio.run(cancel_remaining(serving.run()))


@contextmanager
def open_folder(
    run_dir: Path | None, name: str, config: RunConfig
) -> Iterator[tuple[Path, RunConfig, Launcher]]:
    """Lock the directory; yield it, the config settled for this machine, and its launcher. Raises
    ConfigError if the directory holds something else.
    """
    with ExitStack() as stack:
        launcher = stack.enter_context(opened(config.launcher))
        rollout, num = config.rollout, config.rollout.engine_range.min  # serve never scales
        config = config.model_copy(update={"rollout": rollout.model_copy(update={"num_engines": num})})
        config, settled = settle(config, launcher.nodes)
        for words in settled:
            Voice().say(words)
        folder = run_dir or new_run_dir(f"serve-{name}")
        own = folder / "serve.yaml"
        if folder.is_dir() and not own.exists() and any(folder.iterdir()):
            raise ConfigError(
                f"{folder} holds what no `asyncrl serve` has written",
                rule="a model and logs are written there",
                way_out="choose another --run-dir, or leave it out.",
            )
        stack.enter_context(removed_if_refused(folder))
        make_run_dir(folder, config.observe.dir_mode)
        lock = RunLock(folder / "run.lock").acquire()
        try:
            shutil.rmtree(folder / "model", ignore_errors=True)  # perhaps of another config
            write_whole(own, run_config_yaml(config))
            with logging_to(folder):
                yield folder, config, launcher
        finally:
            lock.release()


class Serving(Life):
    async def launch(self) -> ServerMaker:
        config = self.config
        self.tell("making the model" if config.model.scratch else "finding the model")
        model_path = await make_model_folder(config, self.run_dir)
        placement = place(config, self.launcher.nodes)
        maker = ServerMaker(config, placement, model_path, self.run_dir, self.warn, self.launcher)
        await asyncio.to_thread(lambda: maker.tokenizer)
        await maker.hold()
        return maker

    async def start(self, servers: Sequence[Server]) -> None:
        """Start processes and wait until they answer; from then on watch them."""
        self.tell(f"loading the model in {', '.join(server.name for server in servers)}")
        self.servers = servers
        for server in servers:
            self.closes(server.name, server.aclose)
        await start_all(servers)
        for server in servers:
            self.spawn(server.watch(), name=f"watch {server.name}")
            beats = heartbeat(server, self.config.observe.heartbeat_s)
            self.spawn(beats, name=f"heartbeat {server.name}")

    async def wait_stopped(self) -> None:
        """Sleep until Ctrl-C, from here a normal end."""
        self.can_stop = True
        await self.stop.wait()


class EngineServing(Serving):
    async def live(self) -> int:
        maker = await self.launch()
        (engine, *_), kind = maker.engines(), engine_kind(self.config)
        maker.client(engine)
        await self.start([engine])
        header = '-H "Authorization: Bearer $ENGINE_KEY"'
        sampling = {"max_tokens": 8, "temperature": self.config.rollout.temperature, "seed": 0}
        path, body = kind.request(sampling)
        for line in (
            f"{engine.name} ready; logs in {self.run_dir / 'logs'}",
            f"  export ENGINE_URL={engine.child.url} ENGINE_KEY={maker.secret}",
            f'  curl -sS "$ENGINE_URL/health" {header}',
            f'  curl -sS "$ENGINE_URL{path}" {header} {_json_data(body)}',
            kind.how_to_use(engine.child.url, maker.model_path),
        ):
            self.say_secret(line)
        await self.wait_stopped()
        return 0


class GatewayServing(Serving):
    """Gateway for users, or for `num_rollouts` rollouts."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        launcher: Launcher,
        path: Path | None,
        num_rollouts: int | None,
    ) -> None:
        super().__init__(config, run_dir, launcher=launcher)
        self._path, self._num_rollouts = path, num_rollouts

    async def live(self) -> int:
        config, path = self.config, self._path
        self._prompt_tasks = (await find_tasks(self, is_needed=self._num_rollouts is not None)).tasks
        maker = await self.launch()
        self._tokenizer, engines = maker.tokenizer, maker.engines()
        self._recorder = RolloutRecorder(self._tokenizer)
        if path is not None:
            self._recorder.open(path)
        clients = [maker.client(engine) for engine in engines]
        self._pool = EnginePool(clients, slots=config.rollout.slots)
        await self.start(engines)
        self.spawn(self.wait_broken(), name="watch gateway")
        try:
            return await (
                self._serve_people() if self._num_rollouts is None else self._try(self._num_rollouts)
            )
        finally:
            self._recorder.close()
            if path is not None:
                self.say(f"{self._recorder.num_recorded} rollouts recorded in {path}")

    async def _serve_people(self) -> int:
        config, name = self.config, model_name(self.config)
        gateway, queue = make_gateway(
            self, self._pool, self._tokenizer, secrets.token_hex(24), is_for_users=True
        )
        self.closes("work queue", queue.aclose)
        self.closes("gateway", gateway.aclose)
        url, people = await gateway.start(), UserKey(gateway, queue, self._recorder, self)
        messages: Any = [{"role": "user", "content": "Hello"}]
        if len(self._prompt_tasks) == len(config.tasks):
            first = make_prompt_source(config, self._prompt_tasks, in_order=True).next_nowait()
            messages = [dict(message) for message in first.messages]
        call, header = _json_data({"model": name, "messages": messages}), "Authorization: Bearer"
        logs = self.run_dir / "logs"
        self.say(f"gateway ready: model {name}, temperature {config.rollout.temperature}; logs in {logs}")
        # the outcome key is not exported, so that an agent started there does not inherit it
        for line in (
            f"export OPENAI_BASE_URL={url}/v1",
            f"export OPENAI_API_KEY={people.key}",
            f"OUTCOME_KEY={people.outcome_key}",
            f'curl -sS "$OPENAI_BASE_URL/chat/completions" -H "{header} $OPENAI_API_KEY" {call}',
            f'curl -sS "$OPENAI_BASE_URL/outcome" -H "{header} $OUTCOME_KEY" {_json_data({"reward": 1.0})}',
        ):
            self.say_secret(f"  {line}")
        self.say("an outcome ends a rollout, and the key goes on with the next one; Ctrl-C ends the gateway")
        try:
            await self.wait_stopped()
        finally:
            people.close()
            self._say_calls(gateway)
        return 0

    async def _try(self, num_rollouts: int) -> int:
        config, harnessing = self.config, None
        feed = make_prompt_source(config, self._prompt_tasks)
        prompts = [feed.next_nowait() for _ in range(-(-num_rollouts // config.rollout.group_size))]
        scorer = Scorers(self._prompt_tasks, config.tasks, seed=config.seed, warn=self.warn)
        self.closes("rewards", scorer.aclose)
        if config.generator.is_harness:
            heartbeat_s = config.observe.heartbeat_s
            supervision = Supervision(config.supervision, heartbeat_s, self.warn, lambda *_: None)
            harnessing = AgentRuntime(self, self._pool, self._tokenizer, supervision)
            await harnessing.open(self)
            for supervisor in harnessing.supervisors:
                self.spawn(supervisor.run(), name=f"watch {supervisor.name}")
        self.say(
            f"ready: {several(num_rollouts, 'rollout')} of {several(len(prompts), 'prompt')}; "
            f"logs in {self.run_dir / 'logs'}"
        )
        generator = make_generator(config, self._pool, self._tokenizer, scorer, harnessing)
        is_any_done = await try_rollouts(
            self, generator, prompts, num_rollouts, recorder=self._recorder, tokenizer=self._tokenizer
        )
        if harnessing is not None:
            self._say_calls(harnessing.gateway)
        return 0 if is_any_done else 1

    def _say_calls(self, gateway: Gateway) -> None:
        stats = gateway.stats()
        went_on, refused = stats.extended + stats.realigned, sum(stats.refused.values())
        tokens = f"{stats.prompt_tokens} prompt and {stats.completion_tokens} sampled tokens"
        began = stats.edited + stats.uncut
        rest = f"{went_on} went on from recorded tokens, {began} began a branch, {refused} refused"
        self.say(f"{stats.calls} calls, {tokens}; {rest}")


def _json_data(body: Mapping[str, Any]) -> str:
    return f'-H "Content-Type: application/json" -d {shlex.quote(json.dumps(body, ensure_ascii=False))}'
