"""Build and start the components of a run."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from asyncrl.base.errors import ComponentError, EngineLost, WeightsLost
from asyncrl.base.extensions import all_of
from asyncrl.base.files import clear_stale_staging, new_staging_dir, remove_staging_dir
from asyncrl.buffer.buffer import Buffer
from asyncrl.config import RunConfig
from asyncrl.config.eval_config import EVAL_SEED
from asyncrl.engines.pool import EnginePool
from asyncrl.job.agent_runtime import (
    TASK_SEED_TURN,
    AgentRuntime,
    make_generator,
    seeds_from,
    single_turn,
    special_tokens,
)
from asyncrl.job.check.config_check import check_everything
from asyncrl.job.check.config_warnings import digests_of
from asyncrl.job.check.model_check import find_models
from asyncrl.job.checkpointer import Checkpointer
from asyncrl.job.colocate import Colocated, Disaggregated, WeightScheduler
from asyncrl.job.components import Components
from asyncrl.job.lifecycle import Lifecycle, num_rollouts, run_id
from asyncrl.job.live_settings import read_wanted
from asyncrl.job.reporter import Reporter
from asyncrl.job.resume import ResumePoint
from asyncrl.job.roles import EVAL_ENGINE
from asyncrl.job.scale import EngineScale, EngineSupervisor
from asyncrl.job.servers import Fleet, ServerFactory
from asyncrl.job.slots_by_pressure import SlotsByPressure, make_pressure
from asyncrl.job.trainer_recovery import journaled_batches
from asyncrl.journal.checkpoint_folders import Checkpoints
from asyncrl.journal.journal import Journal
from asyncrl.journal.read import is_counted
from asyncrl.launch.parts import part_tokens
from asyncrl.launch.placement import Placement
from asyncrl.launch.processes import run_module
from asyncrl.messages.records import Batch
from asyncrl.messages.trainer_api import ExportResponse
from asyncrl.observe.metrics import is_total
from asyncrl.observe.run_dir import journal_path, read_evaluations
from asyncrl.observe.run_numbers import by_evaluation
from asyncrl.rollouts.evaluation import EvalResult, Evaluation, HeldOut
from asyncrl.rollouts.late_rewards import LateRewards
from asyncrl.rollouts.producers import Producers
from asyncrl.rollouts.recent_failures import RecentFailures
from asyncrl.rollouts.rollout import (
    AnnotatedGenerator,
    Generator,
    HarnessGenerator,
    RolloutRunner,
)
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.sync.push import NodeFiles, at_once, in_place
from asyncrl.tasks.prompt_source import PromptSource
from asyncrl.tasks.scorer import Scorers, asked_gauges
from asyncrl.tasks.sources import DataPin, EvalTask, make_prompt_source
from asyncrl.trainer.model.model_folder import ModelPin, make_model_folder

logger = logging.getLogger("asyncrl.job.build")


async def build(
    lifecycle: Lifecycle,
    placement: Placement,
    reporter: Reporter,
    point: ResumePoint,
) -> Components:
    """Build and start all components; `lifecycle` closes them."""
    config = lifecycle.config
    rollout = config.rollout
    # First, so that it is closed after every component that writes to it.
    journal = await _open_journal(lifecycle)
    found = await check_everything(lifecycle)
    tasks = found.tasks
    pinned = dict(tasks) | {
        f"eval/{name}": task for name, (task, _) in found.evals.items()
    }
    data_pin = DataPin(
        lifecycle.run_dir, digests_of(pinned), is_free=point.may_change_data
    )
    feed = make_prompt_source(config, tasks, on_epoch=journal.add_epoch_nowait)
    # Before any process is started.
    if (order := await journal.read_note("order")) is not None:
        feed.check_order(order)
    model_pin = ModelPin(
        lifecycle.run_dir, config.model.path, is_free=point.may_change_model
    )
    model_path, tokenizer = await prepare_model(
        lifecycle, model_pin.revision, journal.start_date
    )

    role_models = await asyncio.to_thread(find_models, config, tokenizer)
    fleet = await make_fleet(
        lifecycle,
        placement,
        model_path,
        tokenizer,
        role_models,
        note=journal.add_event_nowait,
        batches=partial(journaled_batches, journal),
    )
    checkpoints = fleet.checkpoints
    scorer = fleet.make_scorers(tasks, config.tasks, config.seed)
    num_engines = (
        read_wanted(lifecycle.run_dir, rollout.engine_range.numbers)
        or rollout.engine_range.min
    )
    # Hashing reads the whole model once more, so a new run does it while processes
    # load. A resumed run compares first: a changed model refuses the start.
    hash_model = asyncio.to_thread(model_pin.read, model_path)
    if point.is_new:
        await asyncio.gather(fleet.start(num_engines), hash_model)
    else:
        await hash_model  # may refuse
        await fleet.start(num_engines)

    buffer = Buffer(
        config.buffer,
        num_groups=config.trainer.num_groups,
        num_batches=config.trainer.num_steps,
        part_tokens=part_tokens(config, placement),
        compares_parts=config.algorithm.rewards != "sum",
    )
    late = LateRewards(journal, timeout_s=config.generator.outcome_timeout_s)
    agents = None
    if config.harnesses:
        agents = AgentRuntime(
            lifecycle, fleet.engines, tokenizer, fleet.supervision, late
        )
    generator = make_generator(config, fleet.engines, tokenizer, scorer, agents)
    for annotation in fleet.annotations:
        if not annotation.by_group:
            generator = AnnotatedGenerator(generator, annotation.annotate)
    of_groups = [one.annotate for one in fleet.annotations if one.by_group]
    producers = Producers(
        sink=buffer,
        source=feed,
        runner=RolloutRunner(
            generator,
            timeout_s=rollout.timeout_s,
            task_timeouts_s=config.task_timeouts_s,
            retries=rollout.retries,
            failures=RecentFailures(config.supervision.max_infrastructure_failures),
            is_ending=lifecycle.stop.is_set,
        ),
        spawn=lifecycle.spawn,
        scorers=scorer,
        annotations=of_groups,
        columns=frozenset(all_of("columns", config) if of_groups else ()),
        config=rollout,
        capacity=num_rollouts(config, num_engines),
        journal=journal,
        late=late,
        on_failed=partial(reporter.on_rollout_failed, tokenizer),
        on_finished=reporter.on_group_finished,
    )
    evaluation = None
    if found.evals:
        evaluation = _make_evaluation(
            lifecycle, fleet, found.evals, tokenizer, agents, checkpoints, reporter
        )
    held_out = () if evaluation is None else evaluation.held_out
    scorers = (scorer, *(each.scorers for each in held_out))
    sources: list[Any] = [scorer, fleet]
    if agents is not None:
        sources += [agents.gateway, agents.queue]
    journal.costs = partial(totals_of_process, reporter, sources, scorers, producers)
    scheduler = _make_scheduler(lifecycle, fleet, journal, buffer, evaluation, reporter)
    pressure = make_pressure(
        rollout, fleet.engine_servers, fleet.engines, producers.slots
    )
    scale = _make_scale(lifecycle, fleet, scheduler, producers, pressure, num_engines)
    if agents is not None:
        await agents.open(lifecycle)
    state = partial(controller_state, feed, producers, buffer)
    return Components(
        fleet=fleet,
        journal=journal,
        feed=feed,
        scorer=scorer,
        pins=(model_pin, data_pin),
        tokenizer=tokenizer,
        special_tokens=special_tokens(config, tokenizer),
        trainer=fleet.trainer,
        engines=fleet.engines,
        scale=scale,
        pressure=pressure,
        buffer=buffer,
        producers=producers,
        scheduler=scheduler,
        checkpointer=Checkpointer(
            checkpoints, fleet.trainer, journal, state, lifecycle
        ),
        evaluation=evaluation,
        agents=agents,
        late=late,
    )


async def _open_journal(lifecycle: Lifecycle) -> Journal:
    journal = await asyncio.to_thread(
        Journal,
        journal_path(lifecycle.run_dir),
        run_id=run_id(lifecycle.run_dir),
    )
    lifecycle.closes("journal", journal.aclose)
    return journal


async def make_fleet(
    lifecycle: Lifecycle,
    placement: Placement,
    model_path: Path,
    tokenizer: HFChatTokenizer,
    role_models: Mapping[str, Path] = MappingProxyType({}),
    *,
    note: Callable[[str, Mapping[str, object]], None],
    batches: Callable[[int, int], AsyncIterator[Batch]],
) -> Fleet:
    """Make the trainer and all servers, which are not started. `note` and `batches`: as
    of Fleet.
    """
    staging_dir = await _make_staging_dir(lifecycle)
    factory = ServerFactory(
        lifecycle.config,
        placement,
        model_path,
        tokenizer,
        lifecycle.run_dir,
        lifecycle.launcher,
        role_models=role_models,
    )
    # Before the fleet, whose specs contain the addresses that this reserves.
    await factory.hold(staging_dir)
    return Fleet(lifecycle, factory, staging_dir, note=note, batches=batches)


async def _make_staging_dir(lifecycle: Lifecycle) -> Path:
    given = lifecycle.config.weight_sync.disk_dir
    disk_dir = None if given is None else Path(given).expanduser().absolute()  # noqa: ASYNC240
    # Exports of a killed run fill shared memory (None) or disk_dir until the next start
    # removes them. A lock protects the exports of a run that still works.
    for root in dict.fromkeys((None, disk_dir)):
        for folder in await asyncio.to_thread(clear_stale_staging, root):
            logger.info("removed %s, left by a killed run", folder)
    staging_dir = new_staging_dir(disk_dir)
    lifecycle.stack.callback(remove_staging_dir, staging_dir)
    return staging_dir


async def prepare_model(
    lifecycle: Lifecycle, commit: str | None = None, now: date | None = None
) -> tuple[Path, HFChatTokenizer]:
    """Return the model's folder and its tokenizer, whose templates write the date `now`
    (None: today).
    """
    model = lifecycle.config.model
    lifecycle.log.activity("making the model" if model.scratch else "finding the model")
    folder = await make_model_folder(
        lifecycle.config, lifecycle.run_dir, run_module, commit=commit
    )
    tokenizer = await asyncio.to_thread(
        HFChatTokenizer,
        folder,
        chat_template=model.chat_template,
        chat_template_kwargs=model.chat_template_kwargs,
        now=now,
        parse_special_tokens=lifecycle.config.gateway.parse_special_tokens,
    )
    return folder, tokenizer


def _make_evaluation(
    lifecycle: Lifecycle,
    fleet: Fleet,
    eval_tasks: Mapping[str, EvalTask],
    tokenizer: HFChatTokenizer,
    agents: AgentRuntime | None,
    checkpoints: Checkpoints,
    reporter: Reporter,
) -> Evaluation:
    """Evaluate on the eval engine or the rollout engines."""
    config = lifecycle.config
    target = fleet.eval_client
    engine = fleet.engines.counted_apart()
    if target is not None:
        engine = EnginePool([target], slots=config.eval_slots)
    # A resumed run does not evaluate these versions again, but checkpoint.keep_best
    # must still know their rewards.
    earlier = by_evaluation(read_evaluations(lifecycle.run_dir, []))
    for line in earlier.get(config.best_eval or "", []):
        checkpoints.on_evaluation(
            line["policy_version"], line.get("eval/reward_mean", -math.inf)
        )

    sets = make_held_out(
        config,
        engine,
        tokenizer,
        agents,
        eval_tasks,
        fleet.make_scorers,
        evaluated={
            name: max(int(line["policy_version"]) for line in lines)
            for name, lines in earlier.items()
        },
    )

    def on_evaluated(result: EvalResult) -> None:
        if result.name == config.best_eval:
            checkpoints.on_evaluation(
                result.version, result.metrics().get("eval/reward_mean", -math.inf)
            )
        reporter.on_evaluated(result)

    is_fetched = fleet.node_files is not None
    evaluation = Evaluation(
        sets,
        target,
        fleet.staging_dir,
        on_result=on_evaluated,
        on_trouble=lifecycle.log.warn,
        is_fetched=is_fetched,
    )
    if target is not None:
        fleet.extra[EVAL_ENGINE].on_gone = evaluation.give_up
    return evaluation


def make_held_out(
    config: RunConfig,
    engine: EnginePool,
    tokenizer: HFChatTokenizer,
    agents: AgentRuntime | None,
    eval_tasks: Mapping[str, EvalTask],
    make_scorers: Callable[..., Scorers],
    evaluated: Mapping[str, int] = MappingProxyType({}),
) -> list[HeldOut]:
    """Return the evaluations of a config on an engine. `evaluated`: newest versions that
    are evaluated, by name.
    """

    def generator_of(
        name: str, scorers: Scorers, broken: list[ComponentError]
    ) -> Generator:
        program = config.eval_generators[name]
        settings = config.evals[name]
        limits = settings.task.limits
        if agents is None or not program.is_harness:
            # The same draws at every version and in every run: evaluations then differ
            # by their weights only.
            seeded = config.model_copy(update={"seed": EVAL_SEED})
            alone = single_turn(seeded, engine, tokenizer, scorers, program, limits)
            return replace(alone, sampling=settings.sampling, reseeds=False)
        # A separate route, with other sampling and seeds. An engine that breaks here
        # must fail this evaluation; the main route ends the run.
        seeds = seeds_from(EVAL_SEED, reseeds=False)
        host = agents.gateway.add_route(
            engine,
            sampling=settings.sampling,
            seed_of=seeds,
            on_broken=broken.append,
        )
        return HarnessGenerator(
            host,
            agents.queue,
            scorers,
            program.on_timeout,
            harness=config.harnesses.index(program),
            rules=limits.rules_of_session,
            task_seed=lambda prompt, sample: seeds(prompt, sample, 0, TASK_SEED_TURN),
        )

    sets = list[HeldOut]()
    for name, settings in config.evals.items():
        task, prompts = eval_tasks[name]
        broken = list[ComponentError]()
        # The only evaluation has no name here, and its task may have one.
        label = prompts[0].task
        scorers = make_scorers({label: task}, {label: settings.task}, EVAL_SEED)
        sets.append(
            HeldOut(
                generator=generator_of(name, scorers, broken),
                scorers=scorers,
                prompts=prompts,
                config=settings,
                name=name,
                last=config.trainer.num_steps,
                rollout_timeout_s=settings.task.limits.timeout_s
                or config.rollout.timeout_s,
                retries=config.rollout.retries,
                broken=broken,
                evaluated=evaluated.get(name),
            )
        )
    return sets


def _make_scheduler(
    lifecycle: Lifecycle,
    fleet: Fleet,
    journal: Journal,
    buffer: Buffer,
    evaluation: Evaluation | None,
    reporter: Reporter,
) -> WeightScheduler:
    config = lifecycle.config
    sync = config.weight_sync
    files = fleet.node_files

    async def on_published(manifest: ExportResponse) -> None:
        journal.add_push_nowait(manifest.version, manifest.digest)
        reporter.on_published(manifest.version, manifest.digest)
        if evaluation is not None and fleet.eval_client is None:
            evaluation.on_served_nowait(manifest.version)
        elif evaluation is not None and manifest.path:
            await publish_to(evaluation, files, manifest)

    async def export_for_evaluation(version: int) -> None:
        if evaluation is not None and evaluation.wants(version):
            manifest = await fleet.trainer.export()
            await publish_to(evaluation, files, manifest)
            # The evaluation has its own hard link or download of the file.
            Path(manifest.path).unlink(missing_ok=True)  # noqa: ASYNC240

    make: Callable[..., WeightScheduler] = partial(
        Disaggregated,
        interrupt=config.interrupt,
        is_held=sync.facts.holds_exports(is_colocated=False),
        spawn=lifecycle.spawn,
        is_held_up=lambda: evaluation is not None and evaluation.is_holding(),
        are_ours=config.rollout.external_urls is None,
    )
    if fleet.placement.is_colocated:
        make = partial(
            Colocated,
            servers=fleet.leaving,
            resident=fleet.placement.resident,
            export_for_evaluation=export_for_evaluation,
        )
    scheduler = make(
        fleet.trainer,
        fleet.clients,
        timeout_s=sync.timeout_s,
        on_served=buffer.set_served_nowait,
        on_published=on_published,
        on_lost=fleet.on_lost,
        locate=in_place if files is None else files.locate,
        wait_released=at_once if evaluation is None else evaluation.wait_released,
        num_steps=config.trainer.num_steps,
    )
    if isinstance(scheduler, Colocated):
        fleet.share_devices(scheduler)
    return scheduler


async def publish_to(
    evaluation: Evaluation, files: NodeFiles | None, manifest: ExportResponse
) -> None:
    """Bring weights to the eval engine's node if their version is due. A failure costs
    only evaluations.
    """
    if not evaluation.wants(manifest.version):
        return
    if files is not None:
        try:
            manifest = await files.locate(EVAL_ENGINE, manifest, "evaluation")
        except EngineLost as lost:
            evaluation.give_up(lost)
            return
        except WeightsLost as lost:
            # A later version is evaluated. Nothing comes after the last one, and the
            # end of the run would wait for it.
            if evaluation.is_last(manifest.version):
                evaluation.give_up(lost)
            return
    # Evaluation reads the file: the trainer overwrites memory.
    evaluation.on_published_nowait(manifest.model_copy(update={"memory": None}))


def _make_scale(
    lifecycle: Lifecycle,
    fleet: Fleet,
    scheduler: WeightScheduler,
    producers: Producers,
    pressure: SlotsByPressure | None,
    num_engines: int,
) -> EngineScale:
    """Supervise the engines; the first `num_engines` work at first."""
    engines = [
        EngineSupervisor(server, client, fleet.engines, scheduler, fleet.supervision)
        for server, client in zip(fleet.engine_servers, fleet.clients, strict=True)
    ]
    fleet.supervisors.update((engine.name, engine) for engine in engines)
    limits = lifecycle.config.rollout.engine_range

    def resize_nowait(num: int) -> None:
        if pressure is None:
            producers.slots.resize_nowait(num_rollouts(lifecycle.config, num))
        else:
            pressure.resize_nowait(num)

    return EngineScale(
        engines,
        limits,
        lifecycle.run_dir,
        lifecycle.log,
        wanted=num_engines,
        spawn=lifecycle.spawn,
        on_change=resize_nowait,
    )


def totals_of_process(
    reporter: Reporter,
    sources: Sequence[Any],
    scorers: Sequence[Scorers],
    producers: Producers,
) -> dict[str, float]:
    """Return all counts of this process that the journal's own rows do not give. The
    reporter's are up to a second old. `scorers`: the run's, then the evaluations'.
    """
    found = reporter.added_totals()
    for source in sources:
        found |= source.gauges()
    found |= asked_gauges(scorers)
    found["rollout/retried"] = producers.runner.num_retried
    return {
        name: value
        for name, value in found.items()
        if is_total(name) and not is_counted(name)
    }


def controller_state(
    feed: PromptSource, producers: Producers, buffer: Buffer
) -> dict[str, object]:
    """Return the state for a resume without the journal. `out`: num_requeued by id of
    drawn prompts that are in no batch yet.
    """
    prompts = (*producers.prompts_out(), *buffer.prompts_ready())
    return {
        "order": feed.order,
        "num_drawn": feed.num_drawn,
        "out": feed.requeued
        | {prompt.prompt_id: prompt.num_requeued for prompt in prompts},
        "next_group_id": buffer.rule.num_issued,
        "part_groups": buffer.part_groups,
        "epochs": feed.epochs(),
    }
