"""`asyncrl serve`: run engines, and the gateway, until Ctrl-C (exit code 0) or for a
number of rollouts. A lost engine ends the command; workers restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import secrets
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.base.host import hide_memory
from asyncrl.base.user_code import run_loop
from asyncrl.config import RunConfig
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.pool import EnginePool
from asyncrl.job.agent_runtime import (
    AgentRuntime,
    make_gateway,
    make_generator,
    model_name,
)
from asyncrl.job.build import prepare_model
from asyncrl.job.check.config_check import check_everything
from asyncrl.job.lifecycle import (
    Lifecycle,
    locked_run_dir,
    new_run_dir,
    num_rollouts,
    refuse_few_files,
)
from asyncrl.job.servers import ServerFactory, as_engine, make_scorers
from asyncrl.launch.launchers import opened
from asyncrl.launch.placement import place
from asyncrl.launch.plan import resolve_auto
from asyncrl.launch.supervise import start_all
from asyncrl.messages.records import (
    GroupId,
    Outcome,
    Prompt,
    Rollout,
    num_sampled,
)
from asyncrl.observe.console import RunLog, logging_to
from asyncrl.observe.metrics import num_turns
from asyncrl.observe.run_numbers import several
from asyncrl.rollouts.rollout import (
    FailedRollout,
    Generator,
    RolloutAttempt,
    RolloutRunner,
    Slots,
    earning,
    how_failed,
    own_reward,
    weighted_outcome,
)
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.tasks.sources import make_prompt_source
from asyncrl.tasks.task import PromptTask

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.gateway import Gateway
    from asyncrl.agents.endpoint.session import GatewaySession
    from asyncrl.agents.work_queue import RolloutQueue

MAX_TEXT = 500
"""Characters of a rollout that `serve gateway --rollouts` prints."""


class RolloutRecorder:
    """Append one JSON object per rollout to a file: prompt_id, messages, answer, info,
    sample_index, reward and branches with text, token_ids, loss_mask (1: sampled),
    logprobs in nats and version_spans [start, end, version].
    """

    def __init__(self, tokenizer: HFChatTokenizer, path: Path | None) -> None:
        """Write nothing without a path. Raises OSError if the file cannot be written."""
        self.tokenizer = tokenizer
        self._path = path
        self.num_recorded = 0
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Fails here and not after the first rollout.
            path.open("a").close()

    def record(self, prompt: Prompt, reward: float | None, rollout: Rollout) -> None:
        if self._path is None:
            return
        line = {
            "prompt_id": prompt.prompt_id,
            "messages": prompt.messages,
            "answer": prompt.answer,
            "info": dict(prompt.info),
            "sample_index": rollout[0].sample_index,
            "reward": reward,
            "branches": [
                {
                    "text": self.tokenizer.decode(
                        branch.token_ids.tolist(), skip_special_tokens=False
                    ),
                    "token_ids": branch.token_ids.tolist(),
                    "loss_mask": branch.loss_mask.astype(int).tolist(),
                    "logprobs": branch.tokens.behaviour_logprobs.tolist(),
                    "version_spans": [span[:3] for span in branch.tokens.spans],
                }
                for branch in rollout
            ],
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
        self.num_recorded += 1


def serve_gateway(
    config: RunConfig,
    run_dir: Path | None,
    *,
    name: str,
    record: Path | None = None,
    num_tried: int | None = None,
) -> int:
    """Serve until Ctrl-C, or run `num_tried` rollouts; return the exit code."""
    if num_tried is not None and config.generator.outcomes == "later":
        raise ConfigError(
            "generator.outcomes=later with --rollouts",
            rule="these rollouts end at once, and nobody posts their rewards",
            way_out="add generator.outcomes=returned to try the agent.",
        )
    hide_memory()  # a tried agent runs as the same user
    with opened_lifecycle(config, run_dir, name) as lifecycle:
        live = partial(_live_gateway, lifecycle, record, num_tried)
        return run_loop(lifecycle.run(live))


def serve_engine(config: RunConfig, run_dir: Path | None, *, name: str) -> int:
    """Serve until Ctrl-C; return the exit code."""
    if config.rollout.external_urls is not None:
        key = f"rollout.{config.rollout.facts.urls_key}"
        raise ConfigError(
            f"{key}={config.rollout.external_urls}: others have started these engines",
            rule="this command starts an engine, and tells its key",
            way_out=f"remove {key}.",
        )
    with opened_lifecycle(config, run_dir, name) as lifecycle:
        return run_loop(lifecycle.run(partial(_live_engine, lifecycle)))


@contextlib.contextmanager
def opened_lifecycle(
    config: RunConfig, run_dir: Path | None, name: str
) -> Iterator[Lifecycle]:
    refuse_few_files(config)
    with opened(config.launcher) as launcher:
        # Nothing scales here, so devices for more engines would stay unused.
        num_engines = config.rollout.engine_range.min
        rollout = config.rollout.model_copy(update={"num_engines": num_engines})
        config, settled = resolve_auto(
            config.model_copy(update={"rollout": rollout}), launcher.nodes
        )
        log = RunLog()
        for text in settled:
            log.info(text)
        folder = run_dir or new_run_dir(f"serve-{name}")
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(
                f"{folder} is not empty",
                way_out="choose another --run-dir, or omit it.",
            )
        with locked_run_dir(folder, config.observe.dir_mode), logging_to(folder):
            yield Lifecycle(config, folder, log, launcher)


async def start_engines(
    lifecycle: Lifecycle, num_engines: int | None = None
) -> tuple[ServerFactory, list[EngineClient], HFChatTokenizer]:
    config = lifecycle.config
    model_path, tokenizer = await prepare_model(lifecycle)
    placement = place(config, lifecycle.launcher.nodes)
    factory = ServerFactory(
        config, placement, model_path, tokenizer, lifecycle.run_dir, lifecycle.launcher
    )
    await factory.hold()
    made = factory.engines()[:num_engines]
    engines = [engine.server for engine in made]
    clients = [as_engine(engine.client) for engine in made]
    lifecycle.log.activity(
        f"loading the model in {', '.join(engine.name for engine in engines)}"
    )
    lifecycle.servers = engines
    for engine in engines:
        lifecycle.closes(engine.name, engine.aclose)
    await start_all(engines)
    for engine in engines:
        lifecycle.spawn(
            engine.watch(config.observe.heartbeat_s), name=f"watch {engine.name}"
        )
    return factory, clients, tokenizer


async def _live_engine(lifecycle: Lifecycle) -> int:
    factory, _, _ = await start_engines(lifecycle, 1)
    (engine,) = lifecycle.servers
    url = engine.child.url
    for line in (
        f"{engine.name} ready; logs in {lifecycle.run_dir / 'logs'}",
        f"  export ENGINE_URL={url} ENGINE_KEY={factory.secret}",
        '  curl -sS "$ENGINE_URL/health" -H "Authorization: Bearer $ENGINE_KEY"',
    ):
        lifecycle.log.print_secret(line)
    lifecycle.can_stop = True  # Ctrl-C is a normal end
    await lifecycle.stop.wait()
    return 0


async def _live_gateway(
    lifecycle: Lifecycle, path: Path | None, num_tried: int | None
) -> int:
    tasks = (await check_everything(lifecycle, reads_all=num_tried is not None)).tasks
    _, clients, tokenizer = await start_engines(lifecycle)
    pool = EnginePool(clients, slots=lifecycle.config.rollout.num_slots)
    recorder = RolloutRecorder(tokenizer, path)
    if num_tried is None:
        code = await _serve_user(lifecycle, pool, recorder)
    else:
        code = await _try_agent(lifecycle, pool, tasks, recorder, num_tried)
    if path is not None:
        lifecycle.log.info(f"{recorder.num_recorded} rollouts recorded in {path}")
    return code


async def _serve_user(
    lifecycle: Lifecycle, pool: EnginePool, recorder: RolloutRecorder
) -> int:
    config = lifecycle.config
    name = next(iter(config.trainer.roles or ()), model_name(config))
    gateway, queue = make_gateway(
        lifecycle, pool, recorder.tokenizer, secrets.token_hex(24), is_for_users=True
    )
    lifecycle.closes("work queue", queue.aclose)
    lifecycle.closes("gateway", gateway.aclose)
    url = await gateway.start()
    user = UserKey(gateway, queue, recorder, lifecycle.log)
    call = _json_data(
        {"model": name, "messages": [{"role": "user", "content": "Hello"}]}
    )
    header = "Authorization: Bearer"
    logs = lifecycle.run_dir / "logs"
    lifecycle.log.info(
        f"gateway ready: model {name}, temperature {config.rollout.temperature}; logs in {logs}"
    )
    # not exported: an agent started there must not inherit the outcome key
    for line in (
        f"export OPENAI_BASE_URL={url}/v1",
        f"export OPENAI_API_KEY={user.key}",
        f"OUTCOME_KEY={user.outcome_key}",
        f'curl -sS "$OPENAI_BASE_URL/chat/completions" -H "{header} $OPENAI_API_KEY" {call}',
        f'curl -sS "$OPENAI_BASE_URL/outcome" -H "{header} $OUTCOME_KEY" {_json_data({"reward": 1.0})}',
    ):
        lifecycle.log.print_secret(f"  {line}")
    lifecycle.log.info(
        "each posted outcome ends a rollout and starts the next; press Ctrl-C to stop the gateway"
    )
    try:
        lifecycle.can_stop = True  # Ctrl-C is a normal end
        await lifecycle.stop.wait()
    finally:
        user.close()
    return 0


class UserKey:
    """Two keys of a user who tries an agent by hand, for calls and for outcomes.

    Life: open -> calls -> posted outcome: samples since the last one are recorded ->
        new session.
    Invariant: a completion is in one rollout. Calls in flight when an outcome arrives
        get 410.
    """

    def __init__(
        self,
        gateway: Gateway,
        queue: RolloutQueue,
        recorder: RolloutRecorder,
        log: RunLog,
    ) -> None:
        self.key = secrets.token_hex(24)
        self.outcome_key = secrets.token_hex(24)
        self._gateway = gateway
        self._recorder = recorder
        self._log = log
        self._name = f"people/{secrets.token_hex(4)}"  # a restart draws other tokens
        self._session = self._open(0)
        queue.on_outcome(self.outcome_key, self._take)

    def close(self) -> None:
        self._session.end_nowait("the gateway was ended")
        with contextlib.suppress(RolloutFailure):  # no sampled token
            self._keep(self._session, None, self._session.rollout(0, Outcome(), 0.0))

    def _open(self, number: int) -> GatewaySession:
        name, prompt_id = f"{self._name}/{number}", self._name
        return self._gateway.open_nowait(
            name,
            prompt_id=prompt_id,
            sample_index=number,
            attempt=0,
            route_key=name,
            user_key=self.key,
        )

    def _take(self, outcome: Outcome) -> None:
        """Record a posted outcome. Raises RolloutFailure if it does not fit the
        samples.
        """
        outcome = weighted_outcome(outcome)
        reward = own_reward(outcome)
        session = self._session
        # First, since an outcome that does not fit raises here. Then the session is
        # still open, and the user can post a corrected one.
        rollout = earning(
            functools.partial(session.rollout, 0, outcome),
            0.0 if reward is None else reward,
        )
        session.end_nowait(
            "an outcome was posted: it ended this rollout, and the key starts a new one"
        )
        self._session = self._open(session.sample_index + 1)
        self._keep(session, None if reward is None else rollout[0].reward, rollout)

    def _keep(
        self, session: GatewaySession, reward: float | None, rollout: Rollout
    ) -> None:
        prompt = Prompt(
            f"{self._name}/{session.sample_index}", tuple(session.opening or ())
        )
        self._recorder.record(prompt, reward, rollout)
        self._log.info(
            f"rollout {session.sample_index}: reward {_reward_text(reward)}, {_shape_text(rollout)}"
        )


async def _try_agent(
    lifecycle: Lifecycle,
    pool: EnginePool,
    tasks: Mapping[str, PromptTask],
    recorder: RolloutRecorder,
    num_tried: int,
) -> int:
    config = lifecycle.config
    feed = make_prompt_source(config, tasks)
    scorer = make_scorers(
        lifecycle, recorder.tokenizer, tasks, config.tasks, config.seed
    )
    agents = await open_agents(lifecycle, pool, recorder.tokenizer)
    lifecycle.log.info(f"ready; logs in {lifecycle.run_dir / 'logs'}")
    lifecycle.log.activity("running the rollouts")
    generator = make_generator(config, pool, recorder.tokenizer, scorer, agents)
    prompts = [
        feed.next_nowait() for _ in range(-(-num_tried // config.rollout.group_size))
    ]
    return (
        0
        if await try_rollouts(lifecycle, generator, prompts, num_tried, recorder)
        else 1
    )


async def open_agents(
    lifecycle: Lifecycle, pool: EnginePool, tokenizer: HFChatTokenizer
) -> AgentRuntime | None:
    """Start the gateway and its workers, if a generator needs them."""
    if not lifecycle.config.harnesses:
        return None
    supervision = lifecycle.supervision(lambda *_: None)
    agents = AgentRuntime(lifecycle, pool, tokenizer, supervision)
    await agents.open(lifecycle)
    return agents


async def try_rollouts(
    lifecycle: Lifecycle,
    generator: Generator,
    prompts: Sequence[Prompt],
    num_tried: int,
    recorder: RolloutRecorder,
) -> bool:
    """Run, print and record rollouts. Return True if any succeeded."""
    rollout = lifecycle.config.rollout
    slots = Slots(num_rollouts(lifecycle.config))
    runner = RolloutRunner(
        generator,
        timeout_s=rollout.timeout_s,
        task_timeouts_s=lifecycle.config.task_timeouts_s,
        retries=rollout.retries,
    )
    places = [
        (prompt, index) for prompt in prompts for index in range(rollout.group_size)
    ][:num_tried]
    rewards = list[float]()
    num_ended = num_usable = 0

    async def run(place: int, prompt: Prompt, index: int) -> None:
        nonlocal num_ended, num_usable, rewards
        group_id = GroupId(place // rollout.group_size)
        attempt = RolloutAttempt(f"g{group_id}/r{index}", group_id, prompt, index)
        result = await runner.run(attempt, slots=slots, order=(place, index))
        num_ended += 1
        head = f"[{num_ended}/{len(places)}] {prompt.prompt_id} sample {index}:"
        if isinstance(result, FailedRollout):
            lifecycle.log.info(
                f"{head} {how_failed(result.num_attempts)}: {result.failure}"
            )
            return
        # A reward of a whole group needs its siblings, which are not kept here.
        reward = result[0].reward if result[0].unscored is None else None
        num_usable += 1
        rewards += [] if reward is None else [reward]
        recorder.record(prompt, reward, result)
        lifecycle.log.info(
            f"{head} reward {_reward_text(reward)}, {_shape_text(result)}"
        )
        sampled = result[-1].token_ids[int(result[-1].loss_mask.argmax()) :].tolist()
        text = recorder.tokenizer.decode(sampled, skip_special_tokens=False)
        lifecycle.log.info(f"    {text[:MAX_TEXT]!r}")

    await asyncio.wait(
        [
            lifecycle.spawn(run(place, *what), name=f"rollout {place}")
            for place, what in enumerate(places)
        ]
    )
    if rewards:
        lifecycle.log.info(
            f"mean reward {fmean(rewards):.4f} over {len(rewards)} of {num_ended} rollouts"
        )
    return num_usable > 0


def _reward_text(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:.4g}"


def _shape_text(rollout: Rollout) -> str:
    text = (
        f"{several(num_turns(rollout), 'turn')}, {num_sampled(rollout)} sampled tokens"
    )
    return text if len(rollout) == 1 else f"{text}, {len(rollout)} branches"


def _json_data(body: Mapping[str, object]) -> str:
    return f'-H "Content-Type: application/json" -d {shlex.quote(json.dumps(body, ensure_ascii=False))}'
