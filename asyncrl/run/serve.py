"""`asyncrl serve`: engine servers, and the gateway over them, for as long as they are wanted. Trains nothing,
journals nothing.

The command waits for Ctrl-C, or for the rollouts that it was asked for; those for the engines and the
workers. An engine server that is lost ends the command; workers are started again. Ctrl-C (or SIGTERM) is how
something that is served is ended, with exit code 0; before it is ready, and while rollouts are to be done, it
interrupts: 130 or 143.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
import shutil
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from asyncrl.agents.command import passed_env
from asyncrl.agents.endpoint.gateway import Gateway
from asyncrl.agents.process_group import hide_memory
from asyncrl.config import RunConfig, run_config_yaml
from asyncrl.engines.pool import EnginePool
from asyncrl.errors import ConfigError
from asyncrl.files import RunLock, write_whole
from asyncrl.observe.console import outliving
from asyncrl.placement.choices import settle_dtype
from asyncrl.placement.devices import find_cuda_devices, place
from asyncrl.placement.fork_server import KEY_ENV
from asyncrl.rollouts.recording import RecordFile, RolloutRecorder
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.run import start as startup
from asyncrl.run.agents import make_gateway, make_harnessing, model_name, num_rollouts
from asyncrl.run.build import make_feed, make_generator, read_task, say_where
from asyncrl.run.check import look
from asyncrl.run.life import Life, logging_to, make_run_dir, say
from asyncrl.run.model_folder import in_daemon_thread, make_model_folder
from asyncrl.run.replay import sampled_by
from asyncrl.run.serve_rollouts import InOrder, PeoplesKey, Tried, result_table, try_rollouts, verdict
from asyncrl.run.supervise import heartbeat
from asyncrl.tasks.scorer import TaskScorer
from asyncrl.tasks.task import Task
from asyncrl.user_code import end_what_is_left


def serve_gateway(
    config: RunConfig,
    run_dir: Path | None,
    *,
    name: str,
    record: Path | None = None,
    num_prompts: int | None = None,
) -> int:
    """Serve until Ctrl-C; with `num_prompts`, run the config's generator on so many prompts instead. Returns
    the exit code.

    Raises AsyncrlError; whatever happens, no process is left.
    """
    hide_memory()  # keys of all rollouts: an agent that is tried runs as the same user
    config = _settled(config)
    passed_env(config.generator.pass_env)
    with open_folder(run_dir, name, config) as folder:
        return asyncio.run(end_what_is_left(ServedGateway(config, folder, record, num_prompts).run()))


def serve_engine(config: RunConfig, run_dir: Path | None, *, name: str) -> int:
    """Serve one engine server until Ctrl-C. Returns the exit code; raises AsyncrlError."""
    config = _settled(config)
    with open_folder(run_dir, name, config) as folder:
        return asyncio.run(end_what_is_left(ServedEngine(config, folder).run()))


def _settled(config: RunConfig) -> RunConfig:
    config, dtype_words = settle_dtype(config)
    if dtype_words:
        say(dtype_words)
    return config


@contextmanager
def open_folder(run_dir: Path | None, name: str, config: RunConfig) -> Iterator[Path]:
    """The directory for logs and a model from scratch, held by this process alone. Raises ConfigError if it
    holds something else.
    """
    folder = run_dir or Path("runs") / f"serve-{name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
    own = folder / "serve.yaml"
    if folder.is_dir() and not own.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} holds what no `asyncrl serve` has written",
            rule="a model and logs are written there",
            way_out="choose another --run-dir, or leave it out.",
        )
    make_run_dir(folder, config.observe.dir_mode)
    lock = RunLock(folder / "run.lock").acquire()
    try:
        shutil.rmtree(folder / "model", ignore_errors=True)  # of the last time, and of another config perhaps
        write_whole(own, run_config_yaml(config))
        with logging_to(folder):
            yield folder
    finally:
        lock.release()


class Serving(Life):
    """The life of one `asyncrl serve`."""

    @abstractmethod
    async def serve(self, model_path: Path, secret: str, servers: list[startup.Server]) -> int:
        """With the model found and the engine servers made, which are not started yet."""

    async def live(self) -> int:
        """Find the model, make the engine servers, and serve."""
        config = self.config
        self.tell("making the model" if config.model.scratch else "finding the model")
        model_path, secret = await make_model_folder(config, self.run_dir), secrets.token_urlsafe(32)
        _, servers = startup.make_servers(config, model_path, self.run_dir, self.run_dir, secret)
        return await self.serve(model_path, secret, servers)

    async def read_tokenizer(self, model_path: Path) -> HFChatTokenizer:
        """Of the model."""
        template = self.config.model.chat_template
        return await in_daemon_thread(lambda: HFChatTokenizer(model_path, chat_template=template))

    async def start(self, servers: Sequence[startup.Server]) -> None:
        """Start processes; returns when they answer, and are watched from then on."""
        self.tell(f"loading the model in {', '.join(server.name for server in servers)}")
        self.servers = servers
        for server in servers:
            self.closes(server.name, server.aclose)
            await startup.start(server)
        await startup.wait_all_ready(servers)
        for server in servers:
            self.spawn(server.watch(), name=f"watch {server.name}")
            beats = heartbeat(server, self.config.observe.heartbeat_s)
            self.spawn(beats, name=f"heartbeat {server.name}")

    async def wait_stopped(self) -> None:
        """Sleep until Ctrl-C, which is no interruption from here on."""
        self.can_stop = True
        await self.stop.wait()


class ServedEngine(Serving):
    """`asyncrl serve engine`."""

    async def serve(self, model_path: Path, secret: str, servers: list[startup.Server]) -> int:
        """Until Ctrl-C, or until the rollouts are done."""
        engine, config = servers[0], self.config
        if config.rollout.engine == "vllm":
            startup.connect(config, engine, model_path, await self.read_tokenizer(model_path), warn=self.warn)
        await self.start([engine])
        for line in self._how_to_ask(engine, secret):
            self.say_secret(line)
        await self.wait_stopped()
        return 0

    def _how_to_ask(self, engine: startup.Server, secret: str) -> list[str]:
        """Lines for a shell, to be pasted."""
        key, config = '-H "Authorization: Bearer $ENGINE_KEY"', self.config
        sampling: dict[str, Any] = {"max_tokens": 8, "temperature": config.rollout.temperature, "seed": 0}
        is_vllm = config.rollout.engine == "vllm"
        if is_vllm:
            what, path = "vLLM's routes, all behind the key", "/inference/v1/generate"
            body: dict[str, Any] = {"token_ids": [1, 2, 3], "sampling_params": {**sampling, "logprobs": 0}}
        else:
            what, path = "its own protocol, token ids in and out", "/generate"
            body = {"request_id": "r1", "prompt_ids": [1, 2, 3], **sampling}
        lines = [
            f"{engine.name} ready: {what}; logs in {self.run_dir / 'logs'}",
            f"  export ENGINE_URL={engine.child.url} ENGINE_KEY={secret}",
            f'  curl -sS "$ENGINE_URL/health" {key}',
            f'  curl -sS "$ENGINE_URL{path}" {key} {_json_data(body)}',
        ]
        if is_vllm:
            folder = (self.run_dir / "model").absolute()
            made_here = "" if config.model.path else f" model.scratch=none model.path={folder}"
            lines += [
                "  a run on this machine takes it with:",
                f"  {KEY_ENV}=$ENGINE_KEY asyncrl run CONFIG rollout.engine=vllm "
                f"rollout.urls=[{engine.child.url}]{made_here}",
            ]
        return lines


class ServedGateway(Serving):
    """`asyncrl serve gateway`: for people, or for `num_prompts` prompts."""

    def __init__(
        self, config: RunConfig, run_dir: Path, record: Path | None, num_prompts: int | None
    ) -> None:
        super().__init__(config, run_dir)
        self._record, self._num_prompts = record, num_prompts
        self._task: Task | None = None

    async def live(self) -> int:
        """Find the model, make the engine servers, and serve."""
        self.tell("looking at what the config names")
        found = await in_daemon_thread(lambda: look(self.config))
        for note in found.notes:
            self.say(f"note: {note}")
        self._task = found.task
        if self._task is None and self._num_prompts is not None:
            self.tell("reading the task")
            self._task = await in_daemon_thread(lambda: read_task(self.config))
        return await super().live()

    async def serve(self, model_path: Path, secret: str, servers: list[startup.Server]) -> int:
        """Until Ctrl-C, or until the rollouts are done."""
        config, record, file = self.config, self._record, None
        if record is not None:
            placement, must_be_new = place(config, len(find_cuda_devices())), self._num_prompts is not None
            file = await in_daemon_thread(
                lambda: RecordFile(record, sampled_by(config, model_path, placement), must_be_new=must_be_new)
            )
        tokenizer = await self.read_tokenizer(model_path)
        recorder = RolloutRecorder(file, tokenizer, warn=self.warn)
        clients = [
            startup.connect(config, engine, model_path, tokenizer, warn=self.warn) for engine in servers
        ]
        await self.start(servers)
        self.spawn(self.wait_broken(), name="watch gateway")
        pool = EnginePool(clients, slots=config.rollout.slots)
        try:
            if self._num_prompts is None:
                return await self._serve_people(pool, tokenizer, recorder)
            return await self._try(pool, tokenizer, recorder, self._num_prompts)
        finally:
            recorder.close()
            if record is not None:
                self.say(f"{recorder.num_recorded} rollouts recorded in {record}")

    async def _serve_people(
        self, pool: EnginePool, tokenizer: HFChatTokenizer, recorder: RolloutRecorder
    ) -> int:
        config, worker_key = self.config, secrets.token_urlsafe(24)
        gateway, queue = make_gateway(
            config, pool, tokenizer, worker_key=worker_key, on_broken=self.on_broken
        )
        self.closes("work queue", queue.aclose)
        self.closes("gateway", gateway.aclose)
        url = await gateway.start()
        people = PeoplesKey(gateway, queue, recorder, self)
        self.say(
            f"gateway ready: model {model_name(config)}, temperature {config.rollout.temperature}; logs in "
            f"{self.run_dir / 'logs'}"
        )
        for line in self._how_to_call(url, people):
            self.say_secret(f"  {line}")
        self.say("an outcome ends a rollout, and the key goes on with the next one; Ctrl-C ends the gateway")
        try:
            await self.wait_stopped()
        finally:
            people.close()
            self._say_calls(gateway)
        return 0

    def _how_to_call(self, url: str, people: PeoplesKey) -> list[str]:
        """Lines for a shell, to be pasted. The outcome key is not exported: an agent that is started there
        does not inherit it.
        """
        messages: Any = [{"role": "user", "content": "Hello"}]
        if self._task is not None:
            messages = make_feed(self.config, self._task, shuffle=False).next_nowait().messages
        body = {"model": model_name(self.config), "messages": [dict(message) for message in messages]}
        key, outcome_key = (
            f'-H "Authorization: Bearer ${name}"' for name in ("OPENAI_API_KEY", "OUTCOME_KEY")
        )
        return [
            f"export OPENAI_BASE_URL={url}/v1",
            f"export OPENAI_API_KEY={people.key}",
            f"OUTCOME_KEY={people.outcome_key}",
            f'curl -sS "$OPENAI_BASE_URL/chat/completions" {key} {_json_data(body)}',
            f'curl -sS "$OPENAI_BASE_URL/outcome" {outcome_key} {_json_data({"reward": 1.0})}',
        ]

    async def _try(
        self, pool: EnginePool, tokenizer: HFChatTokenizer, recorder: RolloutRecorder, num_prompts: int
    ) -> int:
        """The config's own generator, on the prompts that a run would begin with."""
        config, rollout = self.config, self.config.rollout
        assert self._task is not None, "it was read"
        feed = make_feed(config, self._task, shuffle=config.task.shuffle)
        prompts = [feed.next_nowait() for _ in range(num_prompts)]
        scorer = TaskScorer(self._task, config.task, seed=config.seed, warn=self.warn)
        self.closes("rewards", scorer.aclose)
        harnessing = None
        if config.generator.is_harness:
            harnessing = make_harnessing(
                config,
                pool,
                tokenizer,
                self.run_dir,
                on_broken=self.on_broken,
                warn=self.warn,
                on_event=lambda _what, _detail: None,  # there is no journal
            )
            self.closes("gateway", harnessing.aclose)
            self.tell("starting the gateway and its workers")
            await harnessing.start()
            for supervisor in harnessing.supervisors:
                self.spawn(supervisor.run(), name=f"watch {supervisor.name}")
            say_where(config, harnessing, self.say_secret)
        num_all = num_prompts * rollout.group_size
        self.say(f"ready: {num_all} rollouts of {num_prompts} prompts; logs in {self.run_dir / 'logs'}")
        in_order, num_tried = InOrder(rollout.group_size, recorder), 0

        def on_tried(tried: Tried) -> None:
            nonlocal num_tried
            num_tried += 1
            self.say(f"[{num_tried}/{num_all}] {tried.line()}")
            in_order.take(tried)

        try:
            all_tried = await try_rollouts(
                make_generator(config, pool, tokenizer, scorer, harnessing),
                prompts,
                group_size=rollout.group_size,
                capacity=num_rollouts(config),
                timeout_s=rollout.timeout_s,
                retries=rollout.retries,
                on_tried=on_tried,
                spawn=self.spawn,
            )
        finally:
            in_order.close()
        Console(file=outliving()).print(result_table(prompts, all_tried))
        self.say(verdict(all_tried))
        if harnessing is not None:
            self._say_calls(harnessing.gateway)
        return 1 if all(tried.has_failed for tried in all_tried) else 0

    def _say_calls(self, gateway: Gateway) -> None:
        stats = gateway.stats()
        tokens = f"{stats.prompt_tokens} prompt and {stats.completion_tokens} sampled tokens"
        self.say(
            f"{stats.calls} calls, {tokens}; "
            f"{stats.extended + stats.realigned} went on from recorded tokens ({stats.realigned} realigned), "
            f"{stats.forked} forked, {sum(stats.refused.values())} refused"
        )


def _json_data(body: Mapping[str, Any]) -> str:
    return f'-H "Content-Type: application/json" -d {shlex.quote(json.dumps(body, ensure_ascii=False))}'
