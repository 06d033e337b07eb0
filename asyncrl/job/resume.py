"""Decide if and from where a run resumes, and restore its components. The checkpoint
holds the weights, the journal everything since: its batches are trained again
unchanged, ready groups are ready again, running groups continue from their partial
turns, and requeued prompts come first.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl.base.errors import CheckpointDamaged, ConfigError
from asyncrl.base.files import settle_folder
from asyncrl.base.waits import span
from asyncrl.config import JobConfig, RunConfig, load_any
from asyncrl.config.load import job_forms
from asyncrl.config.run_config import key_of
from asyncrl.job.components import Components
from asyncrl.job.lifecycle import run_again
from asyncrl.job.reporter import Reporter
from asyncrl.job.trainer_recovery import load_batches
from asyncrl.journal.checkpoint_folders import Checkpoint, Checkpoints
from asyncrl.journal.read import ResumeState, count_trained, has_groups, reading
from asyncrl.messages.records import Batch, GroupId, Prompt, UnfinishedGroup
from asyncrl.messages.trainer_api import TrainResponse
from asyncrl.observe.metrics import batch_metrics
from asyncrl.observe.run_dir import (
    METRICS_FILE,
    SUMMARY_FILE,
    journal_path,
    read_object,
)
from asyncrl.observe.show import render_status
from asyncrl.rollouts.late_rewards import awaited_of

logger = logging.getLogger("asyncrl.job.resume")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a run starts: from `checkpoint` (None: the initial weights). `notes`:
    warnings; `damaged`: skipped checkpoints to set aside; `may_change_*`: the files may
    differ; `is_new`: nothing is resumed; `is_done`: nothing is left to train.
    """

    checkpoint: Checkpoint | None = None
    notes: tuple[str, ...] = ()
    damaged: tuple[CheckpointDamaged, ...] = ()
    may_change_model: bool = False
    may_change_data: bool = False
    is_new: bool = False
    is_done: bool = False

    @property
    def version(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.version

    @property
    def trainer_dir(self) -> Path | None:
        return None if self.checkpoint is None else self.checkpoint.trainer_dir


def settle_saved(folder: Path) -> bool:
    """Restore or remove unfinished weight folders. Return True if the directory is a
    run's.
    """
    is_ours = (folder / "run.id").exists()
    for saved in ("final", "model") if is_ours else ():
        settle_folder(folder / saved)
    return is_ours


def has_begun(run_dir: Path) -> bool:
    """Return whether a group was admitted, a step reported or a checkpoint made."""
    if any((run_dir / "checkpoints").glob("step_*")):
        return True
    # The user may have moved a damaged journal away, and the next start may have been
    # killed with an empty one. A start that failed has trained no step, so it leaves no
    # metrics.
    metrics = run_dir / METRICS_FILE
    if metrics.exists() and metrics.stat().st_size > 0:
        return True
    journal = journal_path(run_dir)
    if not journal.exists():
        return False
    with reading(journal) as connection:
        return has_groups(connection)


def find_resume(
    run_dir: Path,
    config: JobConfig,
    mode: str,
    allow_change: Collection[str] = (),
) -> ResumePoint | None:
    """Return the point to resume from, if any. Blocks. Raises ConfigError if mode or
    changed keys forbid it, OSError for an unreadable checkpoint.
    """
    if mode not in ("auto", "never", "must"):
        raise ConfigError(
            f"--resume {mode} is not known", rule="it is auto, never or must"
        )
    saved = run_dir / "config.yaml"
    if not has_begun(run_dir):
        if mode == "must":
            raise _refused(
                run_dir, "no run", "pass the directory of a run, or omit --resume."
            )
        # A run writes run.id before its config.
        if saved.exists() and not (run_dir / "run.id").exists():
            raise _refused(run_dir, "a config.yaml that no run has written")
        if (run_dir / "final").exists():
            raise _refused(
                run_dir,
                f"no run, and {run_dir / 'final'}, which a new run would replace",
            )
        return None
    if not saved.exists():
        raise _refused(
            run_dir, "a run without its config.yaml", "restore its original config."
        )
    if mode == "never":
        raise _refused(
            run_dir, "a run already", "choose another --run-dir, or omit --resume."
        )
    before = load_any(saved)
    if type(before) is not type(config):
        raise _refused(run_dir, "a run of another kind")
    accepted = _refuse_changes(before, config, allow_change, run_dir)
    # Compares every file with its digest here, before any process is started from a
    # damaged checkpoint.
    checkpoint, damaged = Checkpoints(run_dir, config.checkpoint).newest_valid()
    num_saved = 0 if checkpoint is None else checkpoint.version
    _refuse_other_weights(run_dir, num_saved, accepted)
    point = ResumePoint(
        checkpoint,
        (
            *(found.what for found in damaged),
            *(f"resuming with {change}" for change in accepted.values()),
        ),
        tuple(damaged),
        may_change_model=_is_named("model.path", allow_change),
        may_change_data=any(
            _is_named(f"{section}.digest", allow_change) for section in job_forms()
        ),
    )
    if isinstance(config, RunConfig):
        is_done = has_trained_all(run_dir, config.trainer.num_steps, point.version)
        return replace(point, is_done=is_done)
    return point


def _refused(
    run_dir: Path,
    what: str,
    way_out: str = "choose another --run-dir, or move it away.",
) -> ConfigError:
    rule = "a run resumes in its own directory, and never overwrites other files"
    return ConfigError(f"{run_dir} contains {what}", rule=rule, way_out=way_out)


def changed_keys(before: JobConfig, now: JobConfig) -> dict[str, tuple[object, object]]:
    """Return section.key -> (old, new)."""
    then, new = _keys(before), _keys(now)
    keys = sorted(then.keys() | new.keys())
    return {
        key: (then.get(key), new.get(key))
        for key in keys
        if then.get(key) != new.get(key)
    }


def _keys(config: JobConfig) -> dict[str, object]:
    sections = config.model_dump(mode="json")
    lists = dict[str, Mapping[str, object]]()
    if isinstance(config, RunConfig):
        lists = {"task": config.tasks, "eval": config.evals}
    for name, several in lists.items():
        # Entries are compared by name, so their order in the file does not matter.
        if isinstance(sections[name], list):
            entries = sections.pop(name)
            sections |= {
                key_of(name, one): entry
                for one, entry in zip(several, entries, strict=True)
            }
    found = dict[str, object]()
    for key, section in sections.items():
        if isinstance(section, dict) and section:
            found |= {f"{key}.{name}": value for name, value in section.items()}
        elif isinstance(section, list):
            # Of servers, whose keys are each free or not.
            for number, one in enumerate(section):
                found |= {f"{key}.{number}.{name}": one[name] for name in one}
        else:
            found[key] = section
    return found


def _refuse_changes(
    before: JobConfig,
    now: JobConfig,
    allowed: Collection[str],
    run_dir: Path,
) -> dict[str, str]:
    """Return the accepted changes: key -> text. Raises ConfigError."""
    changed = {
        key: values
        for key, values in changed_keys(before, now).items()
        if not _is_free(key, now)
    }
    changes = {
        key: f"{key}: {values[0]!r} -> {values[1]!r}" for key, values in changed.items()
    }
    fixed = {key: why for key in changed if (why := _why_fixed(key, changed[key]))}
    if fixed:
        lines = "".join(f"\n    {changes[key]}: {fixed[key]}" for key in fixed)
        raise ConfigError(
            f"the run in {run_dir} cannot resume with other settings:{lines}\n ",
            rule="checkpoints and journal are of the old settings, so that --allow-change does not help",
            way_out="restore them; or export the model (`asyncrl export`), and start a new run in another "
            "--run-dir with model.path set to it.",
        )
    if refused := [key for key in changes if not _is_named(key, allowed)]:
        lines = "".join(f"\n    {changes[key]}" for key in refused)
        flags = " ".join(f"--allow-change {key}" for key in refused)
        raise ConfigError(
            f"the run in {run_dir} was started with other settings:{lines}\n ",
            rule="a resumed run computes what the killed one would have",
            way_out=f"restore them, accept the change with {flags}, or start a new run in another --run-dir.",
        )
    return changes


_TRAINING = ("model.dtype", "trainer.", "algorithm.", "critic.")


def _refuse_other_weights(
    run_dir: Path, num_saved: int, changes: Mapping[str, str]
) -> None:
    """Raise ConfigError if steps since the checkpoint would be trained again with other
    settings. Example: tokens of version 8 are in the journal, the checkpoint is of
    version 6, and with another learning rate version 8 has other weights.
    """
    of_training = [
        change
        for key, change in changes.items()
        # task.algorithm or task.NAME.algorithm, too
        if key.startswith(_TRAINING) or key.endswith(".algorithm")
    ]
    num_trained = _count_trained(run_dir, num_saved)
    if of_training and num_trained > num_saved:
        raise ConfigError(
            f"the run in {run_dir} has trained {num_trained} steps and saved {num_saved}, and these settings "
            f"changed: {'; '.join(of_training)}",
            rule="a resume trains the steps since the newest checkpoint again, and with other settings they "
            "give other weights than those that sampled the later tokens",
            way_out="resume without these changes, press Ctrl-C when it trains, which saves a checkpoint, "
            "and resume with them.",
        )


def _is_free(key: str, config: JobConfig) -> bool:
    # A schedule that ends at num_steps would have had other rates from the start.
    if key in config.steps_keys:
        return not config.trainer.rate_needs_end
    section, _, name = key.partition(".")  # seed, task.KEY or task.NAME.KEY
    part = getattr(config, section, None) if name else config
    free = getattr(part[0] if isinstance(part, list) else part, "free_keys", ())
    return "*" in free or key.rpartition(".")[2] in free


_ORDER = "the order of prompts follows from it"
_TAUGHT = "rollouts in the journal lack these numbers of a teacher"
FIXED = {
    "trainer.lora": "checkpoints hold adapters of this form",
    "trainer.roles": "checkpoints hold adapters of this form",
    "trainer.optimizer": "checkpoints hold the state of this optimizer",
    "model.scratch": "checkpoints hold weights of this architecture, and the journal its tokens",
    "critic.path": "checkpoints hold the critic's weights",
    "critic.learning_rate": "a checkpoint with a critic does not load without one, nor the reverse",
    "algorithm.distill_weight": _TAUGHT,
    "algorithm.distill_loss": _TAUGHT,
    "algorithm.distill_top_k": _TAUGHT,
    "algorithm.router_replay": "rollouts in the journal lack their tokens' experts",
    "rollout.temperature": "tokens in the journal were sampled at it, and the trainer has one temperature",
    "seed": _ORDER,
    **{f"task.{key}": _ORDER for key in ("shuffle", "sampling", "share", "size")},
}
"""Keys that no resume can change, with the reason."""
_SWITCHES = ("critic.learning_rate", "algorithm.distill_weight")
"""Keys that may change, but not between a number and none."""


def _why_fixed(key: str, values: tuple[object, object]) -> str | None:
    if key in _SWITCHES and all(values):
        return None
    if key == "algorithm.router_replay" and not values[1]:
        return None
    if key.startswith("task."):  # task.KEY, or task.NAME.KEY
        key = f"task.{key.rpartition('.')[2]}"
    return FIXED.get(key)


def _is_named(key: str, allowed: Collection[str]) -> bool:
    return any(key == name or key.startswith(name + ".") for name in allowed)


def has_trained_all(
    run_dir: Path, num_steps: int, num_saved: int, key: str = "trainer.num_steps"
) -> bool:
    """Return whether the run is done with all steps. Raises ConfigError if it has
    trained more. `key`: of the setting that gives them.
    """
    num_trained = _count_trained(run_dir, num_saved)
    summary = read_object(run_dir / SUMMARY_FILE, [])
    if not journal_path(run_dir).exists():
        # of supervised fine-tuning, perhaps without checkpoints
        num_trained = max(num_saved, int(summary.get("policy_version") or 0))
    if num_steps < num_trained:
        raise ConfigError(
            f"the run in {run_dir} has trained {num_trained} steps, and {key} gives {num_steps}",
            rule="a resumed run keeps every trained step",
            way_out=f"{_longer(run_dir, num_trained, key)}, or choose another --run-dir.",
        )
    # A run that ended after its last step, but is not done, may lack final/. One that
    # was extended and killed still has the summary and final/ of its earlier end.
    return summary.get("policy_version") == num_steps == num_trained


def _count_trained(run_dir: Path, num_saved: int) -> int:
    """Return the number of steps that checkpoint and journal have."""
    journal = journal_path(run_dir)
    if not journal.exists():
        return num_saved
    with reading(journal) as connection:
        return max(num_saved, count_trained(connection))


def _longer(run_dir: Path, num_trained: int, key: str) -> str:
    if key != "trainer.num_steps":
        return f"raise {key}"
    command = run_again(
        run_dir,
        f"trainer.num_steps={2 * num_trained}",
        "--allow-change",
        "trainer.num_steps",
    )
    return f"train more steps with `{command}`"


def show_done(run_dir: Path, num_steps: int, key: str = "trainer.num_steps") -> None:
    """Print what a run has learned that is started again after its last step. A
    scheduler that repeats commands must not take it for a failure.
    """
    longer = _longer(run_dir, num_steps, key)
    print(f"all {num_steps} steps are trained already; to go on, {longer}")
    print(render_status(run_dir))


async def restore(
    run: Components, reporter: Reporter, point: ResumePoint, state: ResumeState
) -> tuple[UnfinishedGroup, ...]:
    """Restore everything except the engines; return the groups that continue. Data,
    buffer and trainer state come first: they may refuse.
    """
    feed, journal = run.feed, run.journal
    # the old journal was moved away
    if state.num_drawn == 0 and point.checkpoint is not None:
        journal.note_nowait(
            "began_at", {"version": point.version, **point.checkpoint.controller}
        )
        state = await journal.read_resume(point.version)
    if state.order is not None:
        feed.check_order(state.order)
    unfinished, ended = _from_journal(run, state)
    run.late.is_used = "reward/posted" in state.counted

    # Runs once: at the first step that is trained again, or below if there is none. By
    # then the trainer has loaded its state, so nothing refuses anymore, and
    # reporter.resume_at() may cut metrics.jsonl.
    spent_s = 0.0

    @functools.cache
    def note_restored() -> None:
        journal.note_nowait("order", feed.order)
        journal.add_event_nowait("restored", {"version": point.version, "who": "run"})
        reporter.resume_at(point.version, state.counted, spent_s)

    def report_again(batch: Batch, report: TrainResponse) -> None:
        nonlocal spent_s
        spent_s = report.metrics.get("perf/train_s", 0.0)
        note_restored()
        journal.add_training_nowait(batch.version, report.metrics)
        found = batch_metrics(batch, run.special_tokens)
        reporter.step(run, batch, report, found, reporter.end_step(run, batch))

    missed = functools.partial(load_batches, state, point.version, state.next_version)
    with span("trainer", "train again", point.version):
        await run.trainer.recover(point.trainer_dir, missed, report_again)
    note_restored()
    # In the journal only now, since a refused resume must not change its groups.
    rollouts = {found.ticket.group_id: found.rollouts for found in state.running}
    for group_id, (prompt, why) in ended.items():  # keep the same seeds
        for index, digest in awaited_of(rollouts.get(group_id, {})).items():
            name = f"g{group_id}/r{index}"
            run.late.await_nowait(name, digest, lambda _: None)
            run.late.withdraw_nowait(name, f"its group was requeued ({why})")
        journal.end_group_nowait(
            group_id, "requeued", why, requeued=prompt.num_requeued
        )
    return unfinished


def _from_journal(
    run: Components, state: ResumeState
) -> tuple[tuple[UnfinishedGroup, ...], dict[GroupId, tuple[Prompt, str]]]:
    """Return (groups that continue, requeued prompts with the reason)."""
    feed, ready = run.feed, [group for _, group in state.ready]
    # The prompts in `returning` failed at the newest version. They come back with the
    # next one, as in a run that was not killed (see Producers).
    first = {
        name: count
        for name, count in state.requeued.items()
        if name not in state.returning
    }
    feed.restore_nowait(state.num_drawn, first, state.epochs, state.observed)
    prompts = {group.group_id: group.prompt for group in ready}
    ended, whole = dict[GroupId, tuple[Prompt, str]](), dict[GroupId, UnfinishedGroup]()
    for found in state.running:
        group_id, prompt = found.ticket.group_id, found.prompt
        # only the task has its answer
        made = feed.make_again(prompt.prompt_id, prompt.num_requeued)
        # Tokens sampled so far continue the old messages, and the reward would compare
        # them with the answer to the new ones.
        if tuple(map(dict, made.messages)) != prompt.messages:
            ended[group_id] = (prompt, "the task now makes a different prompt")
            continue
        prompts[group_id], whole[group_id] = made, replace(found, prompt=made)
    tickets = [group.ticket for group in whole.values()]
    late = run.buffer.restore_nowait(
        state.next_version, state.next_group_id, tickets, ready, state.part_groups
    )
    if late:
        logger.warning(
            "requeued groups that are too old for the changed settings: %s", list(late)
        )
    for group_id in late:
        ended[group_id] = (prompts[group_id], "too old for the changed settings")
        whole.pop(group_id, None)
    for prompt, _ in ended.values():
        feed.requeue_nowait(prompt)
    for prompt_id in state.returning:
        # Without messages: the task makes them when the prompt is drawn again.
        prompt = Prompt(prompt_id, (), num_requeued=state.requeued[prompt_id])
        run.producers.returns_nowait(state.next_version, prompt)
    return tuple(whole.values()), ended
