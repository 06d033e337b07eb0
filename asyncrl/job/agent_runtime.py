"""Run rollouts with a harness or as single turns, and try agents."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from asyncrl.agents.endpoint.requests import CallRules
from asyncrl.agents.endpoint.tool_formats import find_tool_format
from asyncrl.base.errors import RolloutFailure, RoomError
from asyncrl.base.files import write_whole
from asyncrl.base.http import Caller
from asyncrl.base.message import WORKER_KEY_ENV
from asyncrl.base.waits import waiting
from asyncrl.config import RunConfig
from asyncrl.engines.pool import EnginePool
from asyncrl.job.lifecycle import Lifecycle
from asyncrl.launch.processes import ChildProcess, ProcessSpec
from asyncrl.launch.server import Server, start_all
from asyncrl.launch.supervise import HEARTBEAT_PERIOD_S, Supervision, Supervisor, summary_of
from asyncrl.messages.records import GroupId, Outcome, Prompt, Rollout
from asyncrl.messages.work import WorkerHealth
from asyncrl.observe.metrics import SpecialTokens, num_turns
from asyncrl.observe.run_numbers import several
from asyncrl.rollouts.rollout import (
    EncodedPrompts,
    FailedRollout,
    Generator,
    HarnessGenerator,
    RolloutAttempt,
    RolloutRecorder,
    RolloutRunner,
    SingleTurn,
    Slots,
    derive_seed,
    own_reward,
)
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.tasks.scorer import Scorers

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.gateway import Gateway
    from asyncrl.agents.endpoint.sessions import GatewaySession
    from asyncrl.agents.endpoint.work_routes import RolloutQueue

NO_WORKER_S = 30.0
GOODBYE_S = 5.0
"""Limit on waiting for remote workers after a run."""
TASK_SEED_TURN = -1
"""Turn in the seed of a harness's own draws."""


def model_name(config: RunConfig) -> str:
    return Path(config.model.path).name if config.model.path else "policy"


MAX_TEXT = 500
"""Characters of a rollout printed by `serve gateway --rollouts`."""


def special_tokens(config: RunConfig, tokenizer: HFChatTokenizer) -> SpecialTokens:
    """Return end-of-turn tokens, and special tokens outside tool calls and thoughts."""
    tool_format = find_tool_format(
        config.gateway.tool_format, tokenizer.template, tokenizer.response_template
    )
    vocabulary = tokenizer.vocabulary
    marks = {vocabulary.get(mark) for mark in (*tool_format.opens, *tool_format.thinking)}
    stray_ids = tokenizer.special_ids - tokenizer.end_ids - marks
    return SpecialTokens(tokenizer.end_ids, stray_ids)


def num_rollouts(config: RunConfig, num_engines: int | None = None) -> int:
    """Return the concurrent rollouts (`num_engines` None: all engines)."""
    concurrency = config.generator.concurrency
    num = config.rollout.max_engines if num_engines is None else num_engines
    return config.rollout.slots * num if concurrency == "auto" else concurrency


def make_gateway(
    life: Lifecycle,
    engines: EnginePool,
    tokenizer: HFChatTokenizer,
    worker_key: str,
    *,
    is_for_users: bool = False,
) -> tuple[Gateway, RolloutQueue]:
    """Build the gateway, not open yet, and the work queue."""
    from asyncrl.agents.endpoint.gateway import Gateway
    from asyncrl.agents.endpoint.work_routes import RolloutQueue

    config, seed, rollout = life.config, life.config.seed, life.config.rollout
    override = config.gateway.on_sampling_override
    if override == "auto":
        override = "honour" if is_for_users else "use_config"
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
        max_length=rollout.max_length,
        vocab_size=tokenizer.vocab_size,
        on_sampling_override=override,
    )
    gateway = Gateway(
        engines,
        tokenizer,
        find_tool_format(config.gateway.tool_format, tokenizer.template, tokenizer.response_template),
        rules,
        config.gateway,
        seed_of=lambda prompt, sample, attempt, call: derive_seed(seed, prompt, sample, call, attempt),
        on_broken=life.on_broken,
        extra_routes=queue.routes(),
    )
    return gateway, queue


class WorkerSupervisor(Supervisor):
    """Keeps one agent worker running. Its lost rollouts are retried. A worker whose event loop blocks for
    `lease_timeout_s` is also lost. `on_down` gets name and reason.
    """

    kind = "worker"

    def __init__(
        self,
        process: Server,
        supervision: Supervision,
        *,
        lease_timeout_s: float,
        on_down: Callable[[str, str], None],
    ) -> None:
        super().__init__([process], supervision)
        self._lease_timeout_s = lease_timeout_s
        self._on_down = on_down

    def _down(self, lost: RoomError) -> None:
        self.is_up = False
        self._on_down(self.name, summary_of(lost))

    async def _wait_unfit(self) -> None:
        """Raise RoomError after two answers with a blocked loop: after a pause of the whole machine one may
        precede recovery.
        """
        health = None
        was_stuck = False
        while True:
            await asyncio.sleep(HEARTBEAT_PERIOD_S)
            previous = health
            health = self._processes[0].health
            lag_s = health.loop_lag_s if isinstance(health, WorkerHealth) else 0.0
            is_stuck = lag_s > self._lease_timeout_s
            if is_stuck and was_stuck and health is not previous:
                raise RoomError(
                    self.name,
                    f"an agent has blocked its event loop for {lag_s:.0f} s",
                    rule=f"the limit is gateway.lease_timeout_s={self._lease_timeout_s}",
                    way_out="call blocking code with `await asyncio.to_thread(...)`, or use a plain `def`.",
                )
            was_stuck = is_stuck


class AgentRuntime:
    """Gateway, work queue, and the run's own `workers` (empty with generator.remote).

    Life: created with a bound port and RUN_DIR/gateway.json -> start -> aclose.
    Waits: aclose() waits up to GOODBYE_S for remote workers.
    """

    def __init__(
        self, job: Lifecycle, engines: EnginePool, tokenizer: HFChatTokenizer, supervision: Supervision
    ) -> None:
        path = job.run_dir / "gateway.json"
        is_remote = job.config.generator.remote
        saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() and is_remote else {}
        env_key = os.environ.get(WORKER_KEY_ENV) if is_remote else None
        # Remote workers reconnect to a resumed run with their old key. The key of local workers is in no
        # file: a program of the model could read it, lease rollouts and reward them.
        self.worker_key = env_key or saved.get("worker_key") or secrets.token_hex(24)
        self.gateway, self.queue = make_gateway(job, engines, tokenizer, self.worker_key)
        self.url = self.gateway.bind()
        address = {"url": self.url} | ({"worker_key": self.worker_key} if is_remote else {})
        write_whole(path, json.dumps(address) + "\n", is_private=True)
        num_workers = 0 if is_remote else job.config.generator.workers
        self.workers = tuple(self._worker(job, number) for number in range(num_workers))
        self.supervisors = tuple(
            WorkerSupervisor(
                worker,
                supervision,
                lease_timeout_s=job.config.gateway.lease_timeout_s,
                on_down=self.queue.worker_gone_nowait,
            )
            for worker in self.workers
        )

    def _worker(self, job: Lifecycle, number: int) -> Server:
        """Create a worker whose secret differs from the run's."""
        config = job.config
        num_slots = num_rollouts(config) + (config.eval_slots if config.evaluates_agent else 0)
        name = f"worker-{number}"
        spec = {
            "name": name,
            "url": self.url,
            "slots": -(-num_slots // config.generator.workers),
            "harness": config.generator.model_dump(mode="json"),
        }
        secret = secrets.token_hex(24)
        keys = {WORKER_KEY_ENV: self.worker_key}
        module = "asyncrl.agents.worker"
        child = ChildProcess(ProcessSpec(name, module, json.dumps(spec), job.run_dir, secret, secrets=keys))
        return Server(child, Caller(name, "", secret), WorkerHealth, config.supervision.start_timeout_s)

    async def open(self, job: Lifecycle) -> None:
        """Open the gateway and start the workers."""
        from asyncrl.agents.endpoint.listener import collect_less

        job.log.activity("starting the gateway and its workers")
        job.closes("gateway", self.aclose)
        await self.gateway.start()
        await start_all(self.workers)
        collect_less()
        generator = job.config.generator
        if generator.command and generator.outcomes == "returned":
            why = "every process that the command starts can print it. Set it to none or posted to avoid that"
            job.log.info(
                f"generator.outcomes=returned: the last line of standard output is the reward; {why}."
            )
        if not self.workers:
            command = f"{WORKER_KEY_ENV}={self.worker_key} asyncrl work {self.url} --python MODULE:FUNCTION"
            job.log.print_secret(f"gateway at {self.url}; start workers with: {command}")

    def missing_workers(self) -> str | None:
        work = self.queue.gauges()
        if work["harness/workers"] or not work["harness/queued"] or work["harness/unseen_s"] < NO_WORKER_S:
            return None
        way_out = f"start one with: asyncrl work {self.url} --key-file RUN_DIR/gateway.json --python AGENT"
        if self.workers:
            way_out = "the run restarts its own workers; see logs/worker-0.log"
        waits = f"{work['harness/queued']:.0f} rollouts wait for a worker"
        return f"{waits}, and none has been seen for {work['harness/unseen_s']:.0f} s; {way_out}"

    async def aclose(self) -> None:
        await self.queue.aclose()
        if self.queue.is_over and not self.workers:
            with contextlib.suppress(TimeoutError), waiting("their goodbye", on="workers elsewhere"):
                async with asyncio.timeout(GOODBYE_S):
                    await self.queue.wait_no_workers()
        for worker in self.workers:
            await worker.aclose()
        await self.gateway.aclose()


def make_generator(
    config: RunConfig,
    engines: EnginePool,
    tokenizer: HFChatTokenizer,
    scorers: Scorers,
    agents: AgentRuntime | None,
) -> Generator:
    if agents is not None:
        return HarnessGenerator(agents.gateway, agents.queue, scorers, config.generator.on_overflow)
    return SingleTurn(
        engines,
        EncodedPrompts(tokenizer),
        scorers,
        run_seed=config.seed,
        max_tokens=config.rollout.max_tokens,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        temperature=config.rollout.temperature,
        stop=tuple(config.generator.stop),
    )


class UserKey:
    """Two keys of a user who tries an agent by hand, for calls and for outcomes.

    Life: open -> calls -> posted outcome: samples since the last one are recorded -> new session -> close.
        Samples without an outcome are recorded without a reward.
    Invariant: a completion is in one rollout. Calls in flight when an outcome arrives get 410.
    """

    def __init__(
        self, gateway: Gateway, queue: RolloutQueue, recorder: RolloutRecorder, life: Lifecycle
    ) -> None:
        self.key, self.outcome_key = secrets.token_hex(24), secrets.token_hex(24)
        self._gateway, self._recorder, self._life = gateway, recorder, life
        # a restart draws other tokens
        self._name = f"people/{secrets.token_hex(4)}"
        self._session = self._open(0)
        queue.on_outcome(self.outcome_key, self._take, sampling_key=self.key)

    def close(self) -> None:
        self._session.end_nowait("the gateway was ended")
        try:
            rollout = self._session.rollout(0, Outcome(), 0.0)
        except RolloutFailure:
            return
        self._keep(self._session, None, rollout)

    def _open(self, number: int) -> GatewaySession:
        name, prompt_id = f"{self._name}/{number}", self._name
        session = self._gateway.open_nowait(
            name, prompt_id=prompt_id, sample_index=number, attempt=0, route_key=name, user_key=self.key
        )
        session.on_forgotten = partial(self._forgotten, session)
        return session

    def _forgotten(self, session: GatewaySession, rollout: Rollout) -> None:
        try:
            self._keep(session, None, rollout)
        except RoomError as error:
            self._life.on_broken(error)

    def _take(self, outcome: Outcome) -> None:
        """Record a posted outcome. Raises RolloutFailure if it does not fit the samples."""
        reward = own_reward(outcome)
        session = self._session
        is_trainable = session.has_trained or not session.num_completions
        rollout = session.rollout(0, outcome, reward or 0.0) if is_trainable else None
        session.end_nowait("an outcome was posted: it ended this rollout, and the key starts a new one")
        self._session = self._open(session.sample_index + 1)
        if rollout is None:
            why = "its calls have set temperature or top_p (gateway.on_sampling_override)"
            self._life.log.info(f"rollout {session.sample_index}: not recorded, {why}")
            return
        try:
            self._keep(session, reward, rollout)
        except RoomError as error:
            self._life.on_broken(error)
            raise RolloutFailure(f"this rollout cannot be recorded: {error.what}") from error

    def _keep(self, session: GatewaySession, reward: float | None, rollout: Rollout) -> None:
        messages = tuple(session.opening or ())
        digest = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:16]
        prompt = Prompt(f"people/{digest}", messages)
        index = self._recorder.next_sample(prompt.prompt_id)
        branches = tuple(replace(branch, sample_index=index) for branch in rollout)
        self._recorder.record(prompt, reward, branches)
        reward_text = "none" if reward is None else f"{reward:.4g}"
        self._life.log.info(f"rollout {session.sample_index}: reward {reward_text}, {shape_text(rollout)}")


def shape_text(rollout: Rollout) -> str:
    num_sampled = sum(branch.num_sampled for branch in rollout)
    text = f"{several(num_turns(rollout), 'turn')}, {num_sampled} sampled tokens"
    return text if len(rollout) == 1 else f"{text}, {len(rollout)} branches"


def sampled_text(rollout: Rollout, tokenizer: HFChatTokenizer) -> str:
    branch = rollout[-1]
    first = int(branch.loss_mask.argmax())
    text = tokenizer.decode(branch.token_ids[first:].tolist(), skip_special_tokens=False)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text)} characters)"


async def try_rollouts(
    life: Lifecycle,
    generator: Generator,
    prompts: Sequence[Prompt],
    num_tried: int,
    *,
    recorder: RolloutRecorder,
    tokenizer: HFChatTokenizer,
) -> bool:
    """Run, print and record rollouts. Return True if any succeeded."""
    rollout = life.config.rollout
    slots = Slots(num_rollouts(life.config))
    runner = RolloutRunner(generator, timeout_s=rollout.timeout_s, retries=rollout.retries)
    places = [(prompt, index) for prompt in prompts for index in range(rollout.group_size)][:num_tried]
    rewards = list[float]()
    failures = list[FailedRollout]()

    async def run(place: int, prompt: Prompt, index: int) -> None:
        group_id = GroupId(place // rollout.group_size)
        attempt = RolloutAttempt(f"g{group_id}/r{index}", group_id, prompt, index)
        result = await runner.run(attempt, slots=slots, order=(place, index))
        number = len(rewards) + len(failures) + 1
        head = f"[{number}/{len(places)}] {prompt.prompt_id} sample {index}:"
        if isinstance(result, FailedRollout):
            failures.append(result)
            life.log.info(f"{head} {result.how}: {result.failure.what}")
            return
        rewards.append(result[0].reward)
        recorder.record(prompt, result[0].reward, result)
        life.log.info(f"{head} reward {result[0].reward:.4g}, {shape_text(result)}")
        life.log.info(f"    {sampled_text(result, tokenizer)!r}")

    tasks = [life.spawn(run(place, *what), name=f"rollout {place}") for place, what in enumerate(places)]
    await asyncio.wait(tasks)
    if rewards:
        life.log.info(f"mean reward {fmean(rewards):.4f} over {len(rewards)} rollouts")
    if failures:
        life.log.info(
            f"{len(failures)} of {len(places)} rollouts failed, the last one: {failures[-1].failure}"
        )
    return bool(rewards)
