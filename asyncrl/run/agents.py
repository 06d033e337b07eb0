"""What harness rollouts need beside the engines: the gateway, the queue of work, and the worker processes.
Builds and closes them.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl.agents.endpoint.engine_route import fewest_message_tokens
from asyncrl.agents.endpoint.gateway import Gateway, collect_less
from asyncrl.agents.endpoint.requests import CallRules
from asyncrl.agents.endpoint.tool_calls import find_tool_format
from asyncrl.agents.endpoint.work_routes import RolloutQueue
from asyncrl.agents.harness import HarnessSpec
from asyncrl.checkpoints.folder import Checkpoints
from asyncrl.config import EvalConfig, RunConfig
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.pool import EnginePool
from asyncrl.errors import RoomError
from asyncrl.files import write_whole
from asyncrl.http import Caller
from asyncrl.messages.protocols import SamplingEngine
from asyncrl.messages.records import Prompt, Work
from asyncrl.messages.work import WORKER_KEY_ENV
from asyncrl.observe.run_files import read_evaluations
from asyncrl.placement.processes import ChildProcess
from asyncrl.rollouts.evaluation import Evaluation, Schedule
from asyncrl.rollouts.evaluator import EvalResult, Evaluator
from asyncrl.rollouts.generators import HarnessGenerator, SingleTurn
from asyncrl.rollouts.rollout import Generator, derive_seed
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.run import start as startup
from asyncrl.run.supervise import WorkerSupervisor
from asyncrl.tasks.scorer import TaskScorer

NO_WORKER_S = 30.0
"""So long a run may be without a worker before it says so."""

TASK_SEED_TURN = -1
"""Stands where the number of a turn stands, in the seed that a harness is given for its own draws."""


@dataclass(frozen=True, slots=True)
class Harnessing:
    """The gateway, the queue of work, and the run's own `workers` (none with generator.remote)."""

    gateway: Gateway
    queue: RolloutQueue
    workers: tuple[startup.Server, ...]
    supervisors: tuple[WorkerSupervisor, ...]
    url: str
    worker_key: str

    async def start(self) -> None:
        """Open the gateway and start the workers; returns when they answer. Raises ConfigError or
        RoomError.
        """
        await self.gateway.start()
        for worker in self.workers:
            await startup.start(worker)
        await startup.wait_all_ready(self.workers)
        collect_less()

    def missing_workers(self) -> str | None:
        """What to do if rollouts wait and no worker runs them; None while one does, or did a moment ago."""
        work = self.queue.gauges()
        if work["harness/workers"] or not work["harness/queued"] or work["harness/unseen_s"] < NO_WORKER_S:
            return None
        missing = (
            f"{work['harness/queued']:.0f} rollouts wait and no worker has been seen for "
            f"{work['harness/unseen_s']:.0f} s; "
        )
        if self.workers:
            return (
                missing
                + "the run starts its own again; logs/worker-0.log of the run directory says what they do"
            )
        return (
            f"{missing}start one with: {WORKER_KEY_ENV}=KEY asyncrl work {self.url} --python MODULE:FUNCTION "
            "(the key is in gateway.json of the run directory)"
        )

    async def aclose(self) -> None:
        """Nobody is given work any more, the workers end, every session ends."""
        await self.queue.aclose()
        for worker in self.workers:
            await worker.aclose()
        await self.gateway.aclose()


def call_rules(config: RunConfig, tokenizer: HFChatTokenizer) -> CallRules:
    """What the config fixes for every call."""
    rollout = config.rollout
    return CallRules(
        model_name=model_name(config),
        temperature=rollout.temperature,
        top_p=1.0,
        max_tokens=rollout.max_tokens,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_length=rollout.max_prompt_tokens + rollout.max_tokens,
        vocab_size=tokenizer.vocab_size,
        message_tokens=fewest_message_tokens(tokenizer),
        on_sampling_override=config.gateway.on_sampling_override,
    )


def model_name(config: RunConfig) -> str:
    """The policy's name in /v1/models."""
    return config.gateway.model_name or (Path(config.model.path).name if config.model.path else "policy")


def make_gateway(
    config: RunConfig,
    engines: SamplingEngine,
    tokenizer: HFChatTokenizer,
    *,
    worker_key: str,
    on_broken: Callable[[RoomError], None],
) -> tuple[Gateway, RolloutQueue]:
    """The gateway with the queue of work on the same port; not open yet. Raises ConfigError for a tool format
    that is not known.
    """

    def task_seed(work: Work) -> int:
        return derive_seed(config.seed, work.prompt.seed_id, work.sample_index, TASK_SEED_TURN, work.attempt)

    def seed_of(prompt_id: str, sample_index: int, attempt: int, call_key: int) -> int:
        return derive_seed(config.seed, prompt_id, sample_index, call_key, attempt)

    queue = RolloutQueue(
        worker_key=worker_key,
        model=model_name(config),
        lease_timeout_s=config.gateway.lease_timeout_s,
        task_seed=task_seed,
        outcomes=config.generator.outcomes,
        give_answer=config.generator.give_answer,
    )
    gateway = Gateway(
        engines,
        tokenizer,
        find_tool_format(config.gateway.tool_format, tokenizer.template),
        call_rules(config, tokenizer),
        config.gateway,
        seed_of=seed_of,
        on_broken=on_broken,
        extra_routes=queue.routes(),
    )
    return gateway, queue


def make_harnessing(
    config: RunConfig,
    engines: SamplingEngine,
    tokenizer: HFChatTokenizer,
    run_dir: Path,
    *,
    on_broken: Callable[[RoomError], None],
    warn: Callable[[str], None],
    on_event: Callable[[str, Mapping[str, Any]], None],
) -> Harnessing:
    """Everything, with the port taken and nothing started. RUN_DIR/gateway.json says where it is, and to
    workers elsewhere their key.

    The key of our own workers stands nowhere: what a model runs under our user could take it, lease rollouts,
    and reward them.
    """
    is_remote = config.generator.remote
    worker_key = _worker_key(run_dir) if is_remote else secrets.token_urlsafe(24)
    gateway, queue = make_gateway(config, engines, tokenizer, worker_key=worker_key, on_broken=on_broken)
    url = gateway.bind()
    where = {"url": url, "worker_key": worker_key} if is_remote else {"url": url}
    write_whole(run_dir / "gateway.json", json.dumps(where) + "\n", is_private=True)
    workers = [] if is_remote else _workers(config, url, worker_key, run_dir)
    supervisors = [
        WorkerSupervisor(
            worker,
            config.supervision,
            heartbeat_s=config.observe.heartbeat_s,
            lease_timeout_s=config.gateway.lease_timeout_s,
            gone=queue.worker_gone_nowait,
            warn=warn,
            on_event=on_event,
        )
        for worker in workers
    ]
    return Harnessing(gateway, queue, tuple(workers), tuple(supervisors), url, worker_key)


def num_rollouts(config: RunConfig) -> int:
    """Rollouts in flight at once."""
    concurrency = config.generator.concurrency
    return config.rollout.slots * config.rollout.num_engines if concurrency == "auto" else concurrency


def _workers(config: RunConfig, url: str, worker_key: str, run_dir: Path) -> list[startup.Server]:
    """Each has a secret of its own: the run's opens engines and trainer, and what a harness runs is not to
    find it.
    """
    generator = config.generator
    harness = {name: getattr(generator, name) for name in HarnessSpec.model_fields}
    num_slots = num_rollouts(config) + (
        config.eval.slots if config.eval is not None and config.evaluates_agent else 0
    )
    workers = []
    for index in range(generator.workers):
        name = f"worker-{index}"
        spec = {"name": name, "url": url, "slots": -(-num_slots // generator.workers), "harness": harness}
        secret = secrets.token_urlsafe(24)
        child = ChildProcess(
            name,
            "asyncrl.agents.worker",
            json.dumps(spec),
            run_dir=run_dir,
            secret=secret,
            secrets={WORKER_KEY_ENV: worker_key},
        )
        workers.append(startup.Server(child, Caller(name, "", secret)))
    return workers


def _worker_key(run_dir: Path) -> str:
    """From the environment, else the run's own: it stays when the run is gone on with, so that workers
    elsewhere find it again.
    """
    given = os.environ.get(WORKER_KEY_ENV)
    if given:
        return given
    path = run_dir / "gateway.json"
    written = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return str(written.get("worker_key") or secrets.token_urlsafe(24))


# Builds the evaluation of a run over its eval engine: single completions, or rollouts of the run's own agent.
# Starts nothing.


def wire_evaluation(
    config: RunConfig,
    settings: EvalConfig,
    target: EngineClient,
    prompts: tuple[Prompt, ...],
    scorer: TaskScorer,
    tokenizer: HFChatTokenizer,
    staging_dir: Path,
    run_dir: Path,
    checkpoints: Checkpoints,
    *,
    harnessing: Harnessing | None,
    on_result: Callable[[EvalResult], None],
    warn: Callable[[str], None],
) -> Evaluation:
    """The evaluation, told of what was evaluated before the run was gone on with. `checkpoints` hear of each
    result, too.
    """
    rollout = config.rollout
    engine, broken = EnginePool([target], slots=settings.slots), list[RoomError]()
    generator: Generator
    if harnessing is None or not config.evaluates_agent:
        generator = SingleTurn(
            engine,
            tokenizer,
            scorer,
            run_seed=settings.seed,
            max_tokens=rollout.max_tokens,
            max_prompt_tokens=rollout.max_prompt_tokens,
            temperature=settings.temperature,
            stop=tuple(config.generator.stop),
        )
    else:  # the run's own harness, in its own workers, with calls that go to the eval engine
        host = harnessing.gateway.add_route(
            engine,
            temperature=settings.temperature,
            seed_of=lambda prompt_id, sample, attempt, call: derive_seed(
                settings.seed, prompt_id, sample, call, attempt
            ),
            on_broken=broken.append,
        )
        generator = HarnessGenerator(host, harnessing.queue, scorer)
    evaluator = Evaluator(
        generator,
        prompts,
        samples=settings.samples,
        slots=settings.slots,
        timeout_s=rollout.timeout_s,
        broken=broken,
    )
    before = read_evaluations(run_dir, [])
    for line in before:
        checkpoints.evaluated(line["policy_version"], line.get("eval/reward_mean", -math.inf))
    newest = max((line["policy_version"] for line in before), default=None)

    def evaluated(result: EvalResult) -> None:
        checkpoints.evaluated(result.version, result.metrics().get("eval/reward_mean", -math.inf))
        on_result(replace(result, num_abandoned_calls=scorer.num_abandoned))

    schedule = Schedule(
        every=settings.every, last=config.trainer.num_steps, at_start=settings.at_start, evaluated=newest
    )
    return Evaluation(
        evaluator,
        target,
        schedule,
        staging_dir,
        timeout_s=settings.timeout_s,
        on_result=evaluated,
        on_trouble=warn,
    )
