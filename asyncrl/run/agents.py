"""Builds what runs rollouts: a harness (gateway, work queue, worker processes) or a single turn; and the
evaluation on the eval engine.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from asyncrl.agents.endpoint.gateway import Gateway, collect_less
from asyncrl.agents.endpoint.requests import CallRules
from asyncrl.agents.endpoint.tool_calls import find_tool_format
from asyncrl.agents.endpoint.work_routes import RolloutQueue
from asyncrl.config import RunConfig
from asyncrl.engines.pool import EnginePool
from asyncrl.errors import RoomError
from asyncrl.files import write_whole
from asyncrl.http import Caller
from asyncrl.messages.work import WORKER_KEY_ENV, WorkerHealth
from asyncrl.placement.processes import ChildProcess
from asyncrl.rollouts.generators import HarnessGenerator, SingleTurn
from asyncrl.rollouts.rollout import Generator, derive_seed
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.run.life import Life
from asyncrl.run.start import Server, start_all
from asyncrl.run.supervise import Supervision, WorkerSupervisor
from asyncrl.tasks.scorer import TaskScorer

NO_WORKER_S = 30.0
"""Seconds without a worker after which the run reports it."""
TASK_SEED_TURN = -1
"""Takes the place of the turn number in the seed that a harness gets for its own draws."""


def model_name(config: RunConfig) -> str:
    """The policy's name in /v1/models."""
    return config.gateway.model_name or (Path(config.model.path).name if config.model.path else "policy")


def num_rollouts(config: RunConfig) -> int:
    """Rollouts in flight at once."""
    concurrency = config.generator.concurrency
    return config.rollout.slots * config.rollout.num_engines if concurrency == "auto" else concurrency


def make_gateway(
    config: RunConfig,
    engines: EnginePool,
    tokenizer: HFChatTokenizer,
    *,
    worker_key: str,
    on_broken: Callable[[RoomError], None],
) -> tuple[Gateway, RolloutQueue]:
    """The gateway with the queue of work on the same port; not open yet. Raises ConfigError for a tool format
    that is not known.
    """
    seed, rollout = config.seed, config.rollout
    queue = RolloutQueue(
        worker_key=worker_key,
        model=model_name(config),
        lease_timeout_s=config.gateway.lease_timeout_s,
        task_seed=lambda work: derive_seed(
            seed, work.prompt.seed_id, work.sample_index, TASK_SEED_TURN, work.attempt
        ),
        outcomes=config.generator.outcomes,
        give_answer=config.generator.give_answer,
    )
    rules = CallRules(
        model_name=model_name(config),
        temperature=rollout.temperature,
        top_p=1.0,
        max_tokens=rollout.max_tokens,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_length=config.rollout.max_length,
        vocab_size=tokenizer.vocab_size,
        on_sampling_override=config.gateway.on_sampling_override,
    )
    gateway = Gateway(
        engines,
        tokenizer,
        find_tool_format(config.gateway.tool_format, tokenizer.template),
        rules,
        config.gateway,
        seed_of=lambda prompt, sample, attempt, call: derive_seed(seed, prompt, sample, call, attempt),
        on_broken=on_broken,
        extra_routes=queue.routes(),
    )
    return gateway, queue


class Harnessing:
    """The gateway, the queue of work, and the run's own `workers` (none with generator.remote).

    Life: made, with the port taken and nothing started; RUN_DIR/gateway.json says where it is, and to workers
        elsewhere their key -> start -> aclose.
    """

    def __init__(
        self, job: Life, engines: EnginePool, tokenizer: HFChatTokenizer, supervision: Supervision
    ) -> None:
        config, run_dir = job.config, job.run_dir
        is_remote = config.generator.remote
        # The key of our own workers stands nowhere: what a model runs under our user could take it, lease
        # rollouts, and reward them.
        self.worker_key = _kept_worker_key(run_dir) if is_remote else secrets.token_urlsafe(24)
        self.gateway, self.queue = make_gateway(
            config, engines, tokenizer, worker_key=self.worker_key, on_broken=job.on_broken
        )
        self.url = self.gateway.bind()
        where = {"url": self.url} | ({"worker_key": self.worker_key} if is_remote else {})
        write_whole(run_dir / "gateway.json", json.dumps(where) + "\n", is_private=True)
        self.workers = () if is_remote else self._own_workers(config, run_dir)
        self.supervisors = tuple(
            WorkerSupervisor(
                worker,
                supervision,
                lease_timeout_s=config.gateway.lease_timeout_s,
                gone=self.queue.worker_gone_nowait,
            )
            for worker in self.workers
        )

    def _own_workers(self, config: RunConfig, run_dir: Path) -> tuple[Server, ...]:
        """Each worker has a secret of its own: the run's secret opens engines and trainer, and programs that
        a harness runs must not find it.
        """
        generator, num_slots = config.generator, num_rollouts(config)
        if config.eval is not None and config.evaluates_agent:
            num_slots += config.eval.slots
        harness = generator.model_dump(mode="json")
        spec = {"url": self.url, "slots": -(-num_slots // generator.workers), "harness": harness}
        workers = []
        for name in (f"worker-{index}" for index in range(generator.workers)):
            secret = secrets.token_urlsafe(24)
            child = ChildProcess(
                name,
                "asyncrl.agents.worker",
                json.dumps({"name": name, **spec}),
                run_dir=run_dir,
                secret=secret,
                secrets={WORKER_KEY_ENV: self.worker_key},
            )
            workers.append(Server(child, Caller(name, "", secret), WorkerHealth))
        return tuple(workers)

    @property
    def start_worker(self) -> str:
        """The command for a worker elsewhere, without its key."""
        return f"asyncrl work {self.url} --python MODULE:FUNCTION"

    async def open(self, job: Life) -> None:
        """Open the gateway and start the workers; returns when they answer. `job` closes them. Raises
        ConfigError or RoomError.

        Workers elsewhere are started by hand, with the command that is printed.
        """
        job.tell("starting the gateway and its workers")
        job.closes("gateway", self.aclose)
        await self.gateway.start()
        await start_all(self.workers)
        collect_less()
        if not self.workers:
            command = f"{WORKER_KEY_ENV}={self.worker_key} {self.start_worker}"
            job.say_secret(f"gateway at {self.url}; start workers with: {command}")

    def missing_workers(self) -> str | None:
        """A sentence for the log if rollouts wait and no worker runs them; None while a worker is there, or
        was a moment ago.
        """
        work = self.queue.gauges()
        if work["harness/workers"] or not work["harness/queued"] or work["harness/unseen_s"] < NO_WORKER_S:
            return None
        way_out = f"start one with: {WORKER_KEY_ENV}=KEY {self.start_worker} (KEY stands in gateway.json)"
        if self.workers:
            way_out = "the run starts its own again; logs/worker-0.log of the run directory says what they do"
        return (
            f"{work['harness/queued']:.0f} rollouts wait and no worker has been seen for "
            f"{work['harness/unseen_s']:.0f} s; {way_out}"
        )

    async def aclose(self) -> None:
        """No more work is given out, the workers end, every session ends."""
        await self.queue.aclose()
        for worker in self.workers:
            await worker.aclose()
        await self.gateway.aclose()


def _kept_worker_key(run_dir: Path) -> str:
    """The worker key from the environment, else the run's own. A resumed run keeps it, so that workers on
    other machines can connect again.
    """
    path = run_dir / "gateway.json"
    written = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return os.environ.get(WORKER_KEY_ENV) or written.get("worker_key") or secrets.token_urlsafe(24)


def make_generator(
    config: RunConfig,
    engines: EnginePool,
    tokenizer: HFChatTokenizer,
    scorer: TaskScorer,
    harnessing: Harnessing | None,
) -> Generator:
    """What runs one rollout: a harness, or a single turn of our own."""
    if harnessing is not None:
        return HarnessGenerator(harnessing.gateway, harnessing.queue, scorer)
    return SingleTurn(
        engines,
        tokenizer,
        scorer,
        run_seed=config.seed,
        max_tokens=config.rollout.max_tokens,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        temperature=config.rollout.temperature,
        stop=tuple(config.generator.stop),
    )
