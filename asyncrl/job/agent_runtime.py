"""Gateway, work queue and workers of a run, and its generator."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.agents.endpoint.requests import CallRules
from asyncrl.agents.endpoint.tool_formats import find_tool_format
from asyncrl.base.files import write_whole
from asyncrl.base.http import WORKER_KEY_ENV, Caller
from asyncrl.base.waits import at_most, waiting
from asyncrl.config import GeneratorConfig, RunConfig
from asyncrl.config.task_config import TaskLimits
from asyncrl.engines.pool import EnginePool
from asyncrl.job.lifecycle import Lifecycle, num_rollouts
from asyncrl.launch.machine import find_worker_python
from asyncrl.launch.processes import ChildProcess, ProcessSpec
from asyncrl.launch.supervise import (
    Server,
    Supervision,
    Supervisor,
    health_over,
    start_all,
    summary_of,
)
from asyncrl.messages.sampling import CUTS
from asyncrl.messages.worker_api import WorkerHealth
from asyncrl.observe.metrics import SpecialTokens
from asyncrl.rollouts.late_rewards import LateRewards
from asyncrl.rollouts.rollout import (
    ByTask,
    Generator,
    HarnessGenerator,
    SingleTurn,
    derive_seed,
)
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.tasks.scorer import Scorers

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.gateway import Gateway
    from asyncrl.agents.endpoint.session import SeedOf
    from asyncrl.agents.work_queue import RolloutQueue

GOODBYE_S = 5.0
"""Limit on waiting for remote workers after a run."""
TASK_SEED_TURN = -1
"""Turn in the seed of a harness's own draws."""


NO_WORKER_S = 30.0


def model_name(config: RunConfig) -> str:
    return Path(config.model.path).name if config.model.path else "policy"


def special_tokens(config: RunConfig, tokenizer: HFChatTokenizer) -> SpecialTokens:
    """Return end-of-turn tokens, and special tokens outside tool calls and thoughts."""
    tool_format = find_tool_format(config.gateway.tool_format, tokenizer.template)
    vocabulary = tokenizer.vocabulary
    marks = {vocabulary.get(mark) for mark in tool_format.opens}
    stray_ids = tokenizer.special_ids - tokenizer.end_ids - marks
    return SpecialTokens(tokenizer.end_ids, stray_ids)


def seeds_from(run_seed: int, *, reseeds: bool = True) -> SeedOf:
    """Return the function that derives the seeds of an agent's calls. `reseeds`: see
    SingleTurn.
    """
    return lambda prompt, sample, attempt, call: derive_seed(
        run_seed, prompt, sample, call, attempt if reseeds else 0
    )


def make_gateway(
    lifecycle: Lifecycle,
    engines: EnginePool,
    tokenizer: HFChatTokenizer,
    worker_key: str,
    *,
    is_for_users: bool = False,
    late: LateRewards | None = None,
) -> tuple[Gateway, RolloutQueue]:
    """Build the gateway, not open yet, and the work queue."""
    from asyncrl.agents.endpoint.gateway import Gateway
    from asyncrl.agents.work_queue import RolloutQueue

    config = lifecycle.config
    rollout = config.rollout
    override = config.gateway.on_sampling_override
    # A person who tries an agent may choose its temperature. A run must sample at the
    # one at which the trainer computes logprobs.
    if override == "auto":
        override = "honour" if is_for_users else "use_config"
    roles = (*(config.trainer.roles or ()),)
    queue = RolloutQueue(
        worker_key=worker_key,
        model=model_name(config),
        lease_timeout_s=config.gateway.lease_timeout_s,
        task_seed=lambda work: derive_seed(
            config.seed,
            work.prompt.seed_id,
            work.sample_index,
            TASK_SEED_TURN,
            work.attempt,
        ),
        harnesses=config.harnesses or (config.generator,),
        late=late,
        roles=roles,
    )
    # An engine with its own Python reports supports only if its start asked for them.
    has_cuts = config.uses_supports or rollout.facts.package is None
    cuts = CUTS if has_cuts else frozenset[str]()
    rules = CallRules(
        model_name=model_name(config),
        sampling=rollout.sampling,
        replayed=cuts,
        max_tokens=rollout.max_tokens,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_length=rollout.max_length,
        vocab_size=tokenizer.vocab_size,
        on_sampling_override=override,
        roles=roles,
    )
    gateway = Gateway(
        engines,
        tokenizer,
        find_tool_format(config.gateway.tool_format, tokenizer.template),
        rules,
        config.gateway,
        seed_of=seeds_from(config.seed),
        on_broken=lifecycle.on_broken,
        extra_routes=queue.routes(),
    )
    return gateway, queue


class AgentRuntime:
    """Gateway, work queue, and the run's own `workers` (empty with generator.remote).

    Life: created with a bound port and RUN_DIR/gateway.json -> start -> aclose.
    Waits: aclose() waits up to GOODBYE_S for remote workers.
    """

    def __init__(
        self,
        job: Lifecycle,
        engines: EnginePool,
        tokenizer: HFChatTokenizer,
        supervision: Supervision,
        late: LateRewards | None = None,
    ) -> None:
        is_later = job.config.generator.outcomes == "later"
        self.late = late if is_later else None
        path = job.run_dir / "gateway.json"
        is_remote = job.config.generator.remote
        # The key of local workers is in no file: a program of the model could read it,
        # lease rollouts and reward them.
        self.worker_key = secrets.token_hex(24)
        if is_remote:
            # Remote workers reconnect to a resumed run with their old key.
            saved = json.loads(path.read_text("utf-8")) if path.exists() else {}
            self.worker_key = (
                os.environ.get(WORKER_KEY_ENV)
                or saved.get("worker_key")
                or self.worker_key
            )
        self.gateway, self.queue = make_gateway(
            job, engines, tokenizer, self.worker_key, late=self.late
        )
        self.url = self.gateway.bind()
        address = {"url": self.url}
        if is_remote:
            address["worker_key"] = self.worker_key
        self._command = (
            f"asyncrl work {self.url} --key-file {path} --python MODULE:FUNCTION"
        )
        write_whole(path, json.dumps(address) + "\n", is_private=True)
        num_workers = 0 if is_remote else job.config.generator.workers
        self.workers = tuple(self._worker(job, number) for number in range(num_workers))
        self.supervisors = [
            self._supervised(worker, supervision) for worker in self.workers
        ]

    def _supervised(self, worker: Server, supervision: Supervision) -> Supervisor:
        """Keep a worker running. Its lost rollouts are retried."""
        return Supervisor(
            [worker],
            supervision,
            kind="worker",
            on_down=lambda lost: self.queue.worker_gone_nowait(
                worker.name, summary_of(lost)
            ),
        )

    def _worker(self, job: Lifecycle, number: int) -> Server:
        """Create a worker whose secret differs from the run's."""
        config = job.config
        num_slots = num_rollouts(config) + (
            config.eval_slots if config.evaluates_agent else 0
        )
        name = f"worker-{number}"
        spec = {
            "name": name,
            "url": self.url,
            "slots": -(-num_slots // config.generator.workers),
            "harnesses": [each.model_dump(mode="json") for each in config.harnesses],
        }
        # The agent's code runs in the worker and can read what the worker knows. The
        # run's secret would open the engines and the trainer to it.
        secret = secrets.token_hex(24)
        keys = {WORKER_KEY_ENV: self.worker_key}
        module = "asyncrl.agents.worker"
        named = config.generator.worker_python
        child = ChildProcess(
            ProcessSpec(
                name,
                module,
                json.dumps(spec),
                job.run_dir,
                secret,
                secrets=keys,
                python=partial(find_worker_python, named) if named else None,
            )
        )
        caller = Caller(name, "", secret)
        return Server(
            child,
            caller,
            health_over(caller, WorkerHealth),
            config.supervision.start_timeout_s,
        )

    async def open(self, job: Lifecycle) -> None:
        """Open the gateway and start the workers."""
        job.log.activity("starting the gateway and its workers")
        # Registered before the start, so a start that fails halfway is cleaned up, too.
        job.closes("gateway", self.aclose)
        await self.gateway.start()
        await start_all(self.workers)
        for supervisor in self.supervisors:
            job.spawn(supervisor.run(), name=f"watch {supervisor.name}")
        if not self.workers:
            job.log.info(f"gateway at {self.url}; start workers with: {self._command}")

    def missing_workers(self) -> str | None:
        """Return a warning if rollouts wait and no worker comes."""
        work = self.queue.gauges()
        if (
            work["harness/workers"]
            or not work["harness/queued"]
            or work["harness/unseen_s"] < NO_WORKER_S
        ):
            return None
        way_out = (
            "see logs/worker-0.log"
            if self.workers
            else f"start one with: {self._command}"
        )
        return f"{work['harness/queued']:.0f} rollouts wait, and no worker has been seen lately; {way_out}"

    async def aclose(self) -> None:
        self.gateway.sessions.end_all_nowait("it has ended")
        await self.queue.aclose()
        if self.queue.is_over and not self.workers:
            with waiting("remote workers to disconnect", on="the workers"):
                async with at_most(GOODBYE_S):
                    await self.queue.wait_no_workers()
        # At the same time: all share the limit of this call, and a worker that hangs
        # may need a third of it.
        await asyncio.gather(*(worker.aclose() for worker in self.workers))
        # Last: through its port the workers learn that the run has ended.
        await self.gateway.aclose()


def make_generator(
    config: RunConfig,
    engines: EnginePool,
    tokenizer: HFChatTokenizer,
    scorers: Scorers,
    agents: AgentRuntime | None,
) -> Generator:
    """Return the generator of a run, which has a generator for each task."""
    generators = dict[str, Generator]()
    for name, settings in config.generators.items():
        limits = config.tasks[name].limits
        if not settings.is_harness:
            generators[name] = single_turn(
                config, engines, tokenizer, scorers, settings, limits
            )
            continue
        assert agents is not None
        algorithm = config.algorithms.get(name, config.algorithm)
        generators[name] = HarnessGenerator(
            agents.gateway,
            agents.queue,
            scorers,
            settings.on_timeout,
            agents.late,
            by_turn=algorithm.turn_discount is not None,
            harness=config.harnesses.index(settings),
            rules=limits.rules_of_session,
        )
    return ByTask(generators)


def single_turn(
    config: RunConfig,
    engines: EnginePool,
    tokenizer: HFChatTokenizer,
    scorers: Scorers,
    generator: GeneratorConfig,
    limits: TaskLimits,
) -> SingleTurn:
    return SingleTurn(
        engines,
        tokenizer,
        scorers,
        run_seed=config.seed,
        max_tokens=limits.max_tokens or config.rollout.max_tokens,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        sampling=config.rollout.sampling,
        stop=tuple(generator.stop),
    )
