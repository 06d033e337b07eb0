"""`asyncrl serve`: engine servers, and the gateway over them, for as long as somebody wants them. Trains
nothing, journals nothing.

Who waits for what: the command for Ctrl-C, or for the rollouts that it was asked for; those for the engines
and the workers. An engine server that is lost ends the command; workers are started again. Ctrl-C (or
SIGTERM) is how something that is served is ended, with exit code 0; before it is ready, and while rollouts
are to be done, it interrupts: 130 or 143.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from asyncrl.agents.command import passed_env
from asyncrl.agents.endpoint.capture import GatewayStats
from asyncrl.agents.process_group import hide_memory
from asyncrl.agents.verifiers import taskset_loader
from asyncrl.config import RunConfig
from asyncrl.engines.pool import EnginePool
from asyncrl.observe.text import outliving
from asyncrl.placement.choices import settle_dtype
from asyncrl.placement.processes import KEY_ENV
from asyncrl.rollouts.generators import HarnessGenerator, SingleTurn
from asyncrl.rollouts.recording import Recorder, RecordFile
from asyncrl.rollouts.rollout import Generator
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.run import start as startup
from asyncrl.run.agents import Harnessing, make_gateway, make_harnessing, model_name, num_rollouts
from asyncrl.run.build import tell_where
from asyncrl.run.check import look
from asyncrl.run.model_folder import in_daemon_thread, make_model_folder
from asyncrl.run.replay import sampled_by
from asyncrl.run.serve_life import Door, open_folder, say, say_secret
from asyncrl.run.serve_rollouts import InOrder, PeoplesKey, Tried, result_table, try_rollouts, verdict
from asyncrl.run.start import connect
from asyncrl.tasks.feed import Feed
from asyncrl.tasks.from_config import build_task, task_name
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
        return asyncio.run(end_what_is_left(_gateway(config, folder, record, num_prompts)))


def serve_engine(config: RunConfig, run_dir: Path | None, *, name: str) -> int:
    """Serve one engine server until Ctrl-C. Returns the exit code; raises AsyncrlError."""
    config = _settled(config)
    with open_folder(run_dir, name, config) as folder:
        return asyncio.run(end_what_is_left(_engine(config, folder)))


def _settled(config: RunConfig) -> RunConfig:
    config, dtype_words = settle_dtype(config)
    if dtype_words:
        say(dtype_words)
    return config


async def _engine(config: RunConfig, folder: Path) -> int:
    door = Door(config, folder)

    async def live() -> int:
        model_path, secret = await _model(door), secrets.token_urlsafe(32)
        engines = _engine_servers(config, model_path, folder, secret)[:1]
        door.tell(f"loading the model in {engines[0].name}")
        if config.rollout.engine == "vllm":
            tokenizer = await in_daemon_thread(
                lambda: HFChatTokenizer(model_path, chat_template=config.model.chat_template)
            )
            connect(config, engines[0], model_path, tokenizer, warn=door.warn)
        await door.start(engines)
        for line in _how_to_ask(config, engines[0], folder, secret):
            say_secret(line)
        await door.wait_told_to_end()
        return 0

    return await door.run(live)


def _how_to_ask(config: RunConfig, engine: startup.Server, folder: Path, secret: str) -> list[str]:
    """Lines for a shell, to be pasted."""
    key, temperature = '-H "Authorization: Bearer $ENGINE_KEY"', config.rollout.temperature
    lines = [
        f"  export ENGINE_URL={engine.child.url} ENGINE_KEY={secret}",
        f'  curl -sS "$ENGINE_URL/health" {key}',
    ]
    if config.rollout.engine == "vllm":
        sampling = {"max_tokens": 8, "temperature": temperature, "seed": 0, "logprobs": 0}
        body: dict[str, Any] = {"token_ids": [1, 2, 3], "sampling_params": sampling}
        made_here = (
            "" if config.model.path else f" model.scratch=none model.path={(folder / 'model').absolute()}"
        )
        return [
            f"{engine.name} ready: vLLM's routes, all behind the key; logs in {folder / 'logs'}",
            *lines,
            f'  curl -sS "$ENGINE_URL/inference/v1/generate" {key} {_json_data(body)}',
            "  a run on this machine takes it with:",
            f"  {KEY_ENV}=$ENGINE_KEY asyncrl run CONFIG rollout.engine=vllm "
            f"rollout.urls=[{engine.child.url}]{made_here}",
        ]
    request = {
        "request_id": "r1",
        "prompt_ids": [1, 2, 3],
        "max_tokens": 8,
        "temperature": temperature,
        "seed": 0,
    }
    return [
        f"{engine.name} ready: its own protocol, token ids in and out; logs in {folder / 'logs'}",
        *lines,
        f'  curl -sS "$ENGINE_URL/generate" {key} {_json_data(request)}',
    ]


async def _gateway(config: RunConfig, folder: Path, record: Path | None, num_prompts: int | None) -> int:
    door = Door(config, folder)

    async def live() -> int:
        door.tell("looking at what the config names")
        found = await in_daemon_thread(lambda: look(config))
        task = found.task
        for note in found.notes:
            say(f"note: {note}")
        if task is None and num_prompts is not None:
            door.tell("reading the task")
            task = await in_daemon_thread(lambda: _read_task(config))
        model_path, secret = await _model(door), secrets.token_urlsafe(32)
        file = None
        if record is not None:
            must_be_new = num_prompts is not None
            file = await in_daemon_thread(
                lambda: RecordFile(record, sampled_by(config, model_path), must_be_new=must_be_new)
            )
        tokenizer = await in_daemon_thread(
            lambda: HFChatTokenizer(model_path, chat_template=config.model.chat_template)
        )
        recorder = Recorder(file, tokenizer, warn=door.warn)
        engines = _engine_servers(config, model_path, folder, secret)
        door.tell(f"loading the model in {', '.join(engine.name for engine in engines)}")
        clients = [connect(config, engine, model_path, tokenizer, warn=door.warn) for engine in engines]
        await door.start(engines)
        pool = EnginePool(clients, slots=config.rollout.slots)
        try:
            if num_prompts is None:
                return await _serve_people(door, pool, tokenizer, recorder, task)
            assert task is not None, "it was read"
            return await _try(door, pool, tokenizer, recorder, task, num_prompts)
        finally:
            recorder.close()
            if record is not None:
                say(f"{recorder.num_recorded} rollouts recorded in {record}")

    return await door.run(live)


async def _serve_people(
    door: Door, pool: EnginePool, tokenizer: HFChatTokenizer, recorder: Recorder, task: Task | None
) -> int:
    config = door.config
    gateway, queue = make_gateway(
        config, pool, tokenizer, worker_key=secrets.token_urlsafe(24), on_broken=door.on_broken
    )
    door.closes("work queue", queue.aclose)
    door.closes("gateway", gateway.aclose)
    url = await gateway.start()
    people = PeoplesKey(gateway, queue, recorder, say=say, on_broken=door.on_broken)
    say(
        f"gateway ready: model {model_name(config)}, temperature {config.rollout.temperature}; logs in "
        f"{door.folder / 'logs'}"
    )
    for line in _how_to_call(config, url, people, task):
        say_secret(f"  {line}")
    say("an outcome ends a rollout, and the key goes on with the next one; Ctrl-C ends the gateway")
    try:
        await door.wait_told_to_end()
    finally:
        people.close()
        say(_calls_text(gateway.stats()))
    return 0


def _how_to_call(config: RunConfig, url: str, people: PeoplesKey, task: Task | None) -> list[str]:
    """Lines for a shell, to be pasted. The outcome key is not exported: an agent that is started there does
    not inherit it.
    """
    messages: Any = [{"role": "user", "content": "Hello"}]
    if task is not None:
        messages = _feed(config, task, shuffle=False).next_nowait().messages
    headers, outcome_headers = (
        '-H "Authorization: Bearer $OPENAI_API_KEY"',
        '-H "Authorization: Bearer $OUTCOME_KEY"',
    )
    body = {"model": model_name(config), "messages": [dict(message) for message in messages]}
    return [
        f"export OPENAI_BASE_URL={url}/v1",
        f"export OPENAI_API_KEY={people.key}",
        f"OUTCOME_KEY={people.outcome_key}",
        f'curl -sS "$OPENAI_BASE_URL/chat/completions" {headers} {_json_data(body)}',
        f'curl -sS "$OPENAI_BASE_URL/outcome" {outcome_headers} {_json_data({"reward": 1.0})}',
    ]


async def _try(
    door: Door, pool: EnginePool, tokenizer: HFChatTokenizer, recorder: Recorder, task: Task, num_prompts: int
) -> int:
    """The config's own generator, on the prompts that a run would begin with."""
    config, rollout = door.config, door.config.rollout
    feed = _feed(config, task, shuffle=config.task.shuffle)
    prompts = [feed.next_nowait() for _ in range(num_prompts)]
    scorer = TaskScorer(task, config.task, seed=config.seed, warn=door.warn)
    door.closes("rewards", scorer.aclose)
    generator: Generator = SingleTurn(
        pool,
        tokenizer,
        scorer,
        run_seed=config.seed,
        max_tokens=rollout.max_tokens,
        max_prompt_tokens=rollout.max_prompt_tokens,
        temperature=rollout.temperature,
        stop=tuple(config.generator.stop),
    )
    harnessing = None
    if config.generator.is_harness:
        harnessing = await _harnessing(door, pool, tokenizer)
        generator = HarnessGenerator(harnessing.gateway, harnessing.queue, scorer)
    num_tried, num_all = 0, num_prompts * rollout.group_size
    say(f"ready: {num_all} rollouts of {num_prompts} prompts; logs in {door.folder / 'logs'}")

    def record(tried: Tried) -> None:
        if not tried.has_failed:
            recorder.record(tried.prompt, tried.attempt, tried.reward, tried.rollout)

    in_order = InOrder(rollout.group_size, record)

    def on_tried(tried: Tried) -> None:
        nonlocal num_tried
        num_tried += 1
        say(f"[{num_tried}/{num_all}] {tried.line()}")
        in_order.take(tried)

    try:
        all_tried = await try_rollouts(
            generator,
            prompts,
            group_size=rollout.group_size,
            capacity=num_rollouts(config),
            timeout_s=rollout.timeout_s,
            retries=rollout.retries,
            on_tried=on_tried,
            spawn=door.spawn,
        )
    finally:
        in_order.close()
    Console(file=outliving()).print(result_table(prompts, all_tried))
    say(verdict(all_tried))
    if harnessing is not None:
        say(_calls_text(harnessing.gateway.stats()))
    return 1 if all(tried.has_failed for tried in all_tried) else 0


async def _harnessing(door: Door, pool: EnginePool, tokenizer: HFChatTokenizer) -> Harnessing:
    def on_event(_what: str, _detail: Mapping[str, Any]) -> None:
        """There is no journal; what matters is told by warn."""

    harnessing = make_harnessing(
        door.config, pool, tokenizer, door.folder, on_broken=door.on_broken, warn=door.warn, on_event=on_event
    )
    door.closes("gateway", harnessing.aclose)
    door.tell("starting the gateway and its workers")
    await harnessing.start()
    for supervisor in harnessing.supervisors:
        door.spawn(supervisor.run(), name=f"watch {supervisor.name}")
    tell_where(door.config, harnessing, say_secret)
    return harnessing


async def _model(door: Door) -> Path:
    door.tell("making the model" if door.config.model.scratch else "finding the model")
    return await make_model_folder(door.config, door.folder)


def _engine_servers(config: RunConfig, model_path: Path, folder: Path, secret: str) -> list[startup.Server]:
    """Of a run, without its trainer, which is made and never started."""
    return startup.make_servers(config, model_path, folder, folder, secret)[1]


def _read_task(config: RunConfig) -> Task:
    return build_task(config.task, config.seed, load_taskset=taskset_loader(config.generator))


def _feed(config: RunConfig, task: Task, *, shuffle: bool) -> Feed:
    return Feed(
        task,
        seed=config.seed,
        shuffle=shuffle,
        system_prompt=config.task.system_prompt,
        name=task_name(config.task),
    )


def _calls_text(stats: GatewayStats) -> str:
    refused = sum(stats.refused.values())
    return (
        f"{stats.calls} calls, {stats.prompt_tokens} prompt and {stats.completion_tokens} sampled tokens; "
        f"{stats.extended + stats.realigned} went on from recorded tokens ({stats.realigned} realigned), "
        f"{stats.forked} forked, "
        f"{refused} refused"
    )


def _json_data(body: Mapping[str, Any]) -> str:
    return f'-H "Content-Type: application/json" -d {shlex.quote(json.dumps(body, ensure_ascii=False))}'
