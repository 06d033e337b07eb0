"""`asyncrl serve`: run engines, and the gateway, until Ctrl-C (exit code 0) or for a number of rollouts. A
lost engine ends the command; workers restart.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.agents.command import passed_env
from asyncrl.base.errors import ConfigError
from asyncrl.base.files import write_whole
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
from asyncrl.job.build import load_tokenizer
from asyncrl.job.check import check_everything
from asyncrl.job.lifecycle import Lifecycle, RunLog, locked_run_dir, logging_to, new_run_dir, refuse_few_files
from asyncrl.job.servers import Servers
from asyncrl.launch.devices import place
from asyncrl.launch.launchers import opened
from asyncrl.launch.plan import resolve_auto
from asyncrl.launch.processes import run_module
from asyncrl.launch.server import Server, start_all
from asyncrl.launch.supervise import Supervision, heartbeat
from asyncrl.observe.run_numbers import several
from asyncrl.rollouts.rollout import RolloutRecorder
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.tasks.scorer import Scorers
from asyncrl.tasks.sources import make_prompt_source
from asyncrl.tasks.task import PromptTask
from asyncrl.trainer.model_folder import make_model_folder

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.gateway import Gateway


def serve_gateway(
    config: RunConfig,
    run_dir: Path | None,
    *,
    name: str,
    record: Path | None = None,
    num_rollouts: int | None = None,
) -> int:
    """Serve until Ctrl-C, or run `num_rollouts` rollouts; return the exit code."""
    hide_memory()  # a tried agent runs as the same user
    passed_env(config.generator.pass_env)
    with _opened_lifecycle(config, run_dir, name) as life:
        live = partial(_live_gateway, life, record, num_rollouts)
        return asyncio.run(cancel_remaining(life.run(live)))


def serve_engine(config: RunConfig, run_dir: Path | None, *, name: str) -> int:
    with _opened_lifecycle(config, run_dir, name) as life:
        return asyncio.run(cancel_remaining(life.run(partial(_live_engine, life))))


@contextmanager
def _opened_lifecycle(config: RunConfig, run_dir: Path | None, name: str) -> Iterator[Lifecycle]:
    refuse_few_files(config)
    with opened(config.launcher) as launcher:
        num_engines = config.rollout.engine_range.min
        rollout = config.rollout.model_copy(update={"num_engines": num_engines})
        config, settled = resolve_auto(config.model_copy(update={"rollout": rollout}), launcher.nodes)
        log = RunLog()
        for text in settled:
            log.info(text)
        folder = run_dir or new_run_dir(f"serve-{name}")
        own = folder / "serve.yaml"
        if folder.is_dir() and not own.exists() and any(folder.iterdir()):
            raise ConfigError(
                f"{folder} contains files that no `asyncrl serve` has written",
                rule="the model and logs are written there",
                way_out="choose another --run-dir, or omit it.",
            )
        with locked_run_dir(folder, config.observe.dir_mode):
            shutil.rmtree(folder / "model", ignore_errors=True)
            write_whole(own, run_config_yaml(config))
            with logging_to(folder):
                yield Lifecycle(config, folder, log, launcher)


async def _make_servers(life: Lifecycle) -> tuple[Servers, HFChatTokenizer]:
    config = life.config
    life.log.activity("making the model" if config.model.scratch else "finding the model")
    model_path = await make_model_folder(config, life.run_dir, run_module)
    placement = place(config, life.launcher.nodes)
    servers = Servers(config, placement, model_path, life.run_dir, life.launcher)
    tokenizer = await asyncio.to_thread(load_tokenizer, config, model_path)
    await servers.hold()
    return servers, tokenizer


async def _start(life: Lifecycle, servers: Sequence[Server]) -> None:
    life.log.activity(f"loading the model in {', '.join(server.name for server in servers)}")
    life.servers = servers
    for server in servers:
        life.closes(server.name, server.aclose)
    await start_all(servers)
    for server in servers:
        life.spawn(server.watch(), name=f"watch {server.name}")
        beats = heartbeat(server, life.config.observe.heartbeat_s)
        life.spawn(beats, name=f"heartbeat {server.name}")


async def _live_engine(life: Lifecycle) -> int:
    servers, tokenizer = await _make_servers(life)
    engine = servers.engines()[0]
    servers.client(engine, tokenizer)
    await _start(life, [engine])
    header = '-H "Authorization: Bearer $ENGINE_KEY"'
    sampling = {"max_tokens": 8, "temperature": life.config.rollout.temperature, "seed": 0}
    path, body, hint = servers.kind.usage(sampling, engine.child.url, servers.model_path)
    for line in (
        f"{engine.name} ready; logs in {life.run_dir / 'logs'}",
        f"  export ENGINE_URL={engine.child.url} ENGINE_KEY={servers.secret}",
        f'  curl -sS "$ENGINE_URL/health" {header}',
        f'  curl -sS "$ENGINE_URL{path}" {header} {_json_data(body)}',
        hint,
    ):
        life.log.print_secret(line)
    life.can_stop = True  # Ctrl-C is a normal end
    await life.stop.wait()
    return 0


async def _live_gateway(life: Lifecycle, path: Path | None, num_rollouts: int | None) -> int:
    tasks = (await check_everything(life, is_needed=num_rollouts is not None)).tasks
    servers, tokenizer = await _make_servers(life)
    engines = servers.engines()
    recorder = RolloutRecorder(tokenizer)
    if path is not None:
        recorder.open(path)
    clients = [servers.client(engine, tokenizer) for engine in engines]
    pool = EnginePool(clients, slots=life.config.rollout.slots)
    await _start(life, engines)
    life.spawn(life.wait_broken(), name="watch gateway")
    try:
        if num_rollouts is None:
            return await _serve_users(life, pool, tokenizer, tasks, recorder)
        return await _try_agent(life, pool, tokenizer, tasks, recorder, num_rollouts)
    finally:
        recorder.close()
        if path is not None:
            life.log.info(f"{recorder.num_recorded} rollouts recorded in {path}")


async def _serve_users(
    life: Lifecycle,
    pool: EnginePool,
    tokenizer: HFChatTokenizer,
    tasks: Mapping[str, PromptTask],
    recorder: RolloutRecorder,
) -> int:
    config = life.config
    name = model_name(config)
    gateway, queue = make_gateway(life, pool, tokenizer, secrets.token_hex(24), is_for_users=True)
    life.closes("work queue", queue.aclose)
    life.closes("gateway", gateway.aclose)
    url = await gateway.start()
    user = UserKey(gateway, queue, recorder, life)
    messages: Any = [{"role": "user", "content": "Hello"}]
    if len(tasks) == len(config.tasks):
        first = make_prompt_source(config, tasks, in_order=True).next_nowait()
        messages = [dict(message) for message in first.messages]
    call = _json_data({"model": name, "messages": messages})
    header = "Authorization: Bearer"
    logs = life.run_dir / "logs"
    life.log.info(f"gateway ready: model {name}, temperature {config.rollout.temperature}; logs in {logs}")
    # not exported: an agent started there must not inherit the outcome key
    for line in (
        f"export OPENAI_BASE_URL={url}/v1",
        f"export OPENAI_API_KEY={user.key}",
        f"OUTCOME_KEY={user.outcome_key}",
        f'curl -sS "$OPENAI_BASE_URL/chat/completions" -H "{header} $OPENAI_API_KEY" {call}',
        f'curl -sS "$OPENAI_BASE_URL/outcome" -H "{header} $OUTCOME_KEY" {_json_data({"reward": 1.0})}',
    ):
        life.log.print_secret(f"  {line}")
    life.log.info("each posted outcome ends a rollout and starts the next; press Ctrl-C to stop the gateway")
    try:
        life.can_stop = True  # Ctrl-C is a normal end
        await life.stop.wait()
    finally:
        user.close()
        _log_calls(life.log, gateway)
    return 0


async def _try_agent(
    life: Lifecycle,
    pool: EnginePool,
    tokenizer: HFChatTokenizer,
    tasks: Mapping[str, PromptTask],
    recorder: RolloutRecorder,
    num_rollouts: int,
) -> int:
    config = life.config
    feed = make_prompt_source(config, tasks)
    prompts = [feed.next_nowait() for _ in range(-(-num_rollouts // config.rollout.group_size))]
    scorer = Scorers(tasks, config.tasks, seed=config.seed, warn=life.log.warn)
    life.closes("rewards", scorer.aclose)
    harnessing = None
    if config.generator.is_harness:
        heartbeat_s = config.observe.heartbeat_s
        supervision = Supervision(config.supervision, heartbeat_s, life.log.warn, lambda *_: None)
        harnessing = AgentRuntime(life, pool, tokenizer, supervision)
        await harnessing.open(life)
        for supervisor in harnessing.supervisors:
            life.spawn(supervisor.run(), name=f"watch {supervisor.name}")
    num = f"{several(num_rollouts, 'rollout')} of {several(len(prompts), 'prompt')}"
    life.log.info(f"ready: {num}; logs in {life.run_dir / 'logs'}")
    generator = make_generator(config, pool, tokenizer, scorer, harnessing)
    is_any_done = await try_rollouts(
        life, generator, prompts, num_rollouts, recorder=recorder, tokenizer=tokenizer
    )
    if harnessing is not None:
        _log_calls(life.log, harnessing.gateway)
    return 0 if is_any_done else 1


def _log_calls(log: RunLog, gateway: Gateway) -> None:
    stats = gateway.stats()
    tokens = f"{stats.prompt_tokens} prompt and {stats.completion_tokens} sampled tokens"
    continued = f"{stats.extended + stats.realigned} continued recorded tokens"
    branches = f"{stats.edited + stats.uncut} started a branch"
    log.info(f"{stats.calls} calls, {tokens}; {continued}, {branches}, {sum(stats.refused.values())} refused")


def _json_data(body: Mapping[str, Any]) -> str:
    return f'-H "Content-Type: application/json" -d {shlex.quote(json.dumps(body, ensure_ascii=False))}'
