"""Recorded rollouts on their way into a run: whether they are data of this run's policy, which can be taken,
and what people are told.

Reads files and blocks; starts nothing, imports no torch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.files import write_whole
from asyncrl.messages.records import Prompt, Rollout
from asyncrl.placement.devices import Placement
from asyncrl.placement.memory_plan import item_bytes
from asyncrl.rollouts.generators import RECORDED_VERSION
from asyncrl.rollouts.recording import (
    RecordedRollout,
    Recording,
    SampledBy,
    read_recording,
    refuse_difference,
)
from asyncrl.run.engine_kinds import engine_kind, max_length
from asyncrl.run.model_folder import TOKENIZER, WEIGHTS, hash_files

RUN_COPY = "replay.jsonl"
"""In the run directory: what the run began with, whatever becomes of the file that it was given."""


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """What a run takes from a recording: prompts in the file's order with ids of their own, and the rollouts
    of each by sample index.

    `left_out`: how many rollouts cannot be taken, by why.
    """

    path: Path
    sampled_by: SampledBy
    prompts: tuple[Prompt, ...]
    rollouts: Mapping[str, tuple[Rollout, ...]]
    left_out: Mapping[str, int]

    def refuse_unless(self, sampled: SampledBy) -> None:
        """Raise ConfigError, with both digests, unless the run starts from what the recording was sampled
        from.
        """
        refuse_difference(self.path, self.sampled_by, sampled)

    def text(self, config: RunConfig) -> str:
        """How many can be taken at most, and why not all."""
        buffer, num_groups = config.buffer, config.trainer.num_groups
        look_ahead = buffer.max_staleness if buffer.look_ahead == "auto" else buffer.look_ahead
        num_first = min(look_ahead + 1, config.trainer.num_steps) * num_groups
        if buffer.filter != "none":  # a group that is filtered makes room for another at the same version
            num_first = len(self.prompts)
        num_rollouts = sum(map(len, self.rollouts.values()))
        most = sum(len(self.rollouts[prompt.prompt_id]) for prompt in self.prompts[:num_first])
        text = f"{num_rollouts} recorded rollouts of {len(self.prompts)} prompts, "
        text += f"of which at most {most} can be taken"
        if most < num_rollouts:
            text += (
                f": only (look_ahead + 1) * num_groups = {num_first} groups may start while policy_version "
                f"{RECORDED_VERSION} is served (buffer.max_staleness), later ones are sampled"
            )
        return text + (f"; left out: {_reasons(self.left_out)}" if self.left_out else "")


def open_replay(config: RunConfig, run_dir: Path | None) -> Replayed | None:
    """The recording that task.replay names, None if it names none. Raises ConfigError.

    It is copied into the run directory, if there is one, and a run that goes on reads the copy: its prompts
    keep their places in the order.
    """
    if config.task.replay is None:
        return None
    given = Path(config.task.replay)
    copy = given if run_dir is None else run_dir / RUN_COPY
    recording = read_recording(copy if copy.exists() else given)
    if not copy.exists():
        write_whole(copy, given.read_text(encoding="utf-8"))
    return choose(recording, config, given)


def settle_copy(config: RunConfig, run_dir: Path, *, is_new: bool) -> None:
    """Before a run opens its recording: remove what a start that failed has left. Raises ConfigError if one
    that goes on had none, or had one and is told to do without: the order of its prompts would be another.
    """
    copy = run_dir / RUN_COPY
    if is_new:
        copy.unlink(missing_ok=True)
    elif copy.exists() != (config.task.replay is not None):
        began = "with recorded rollouts" if copy.exists() else "without any"
        raise ConfigError(
            f"task.replay={config.task.replay}, and the run in {run_dir} began {began}",
            rule="the prompts of a recording come first, so the place of every later one depends on them",
            way_out="put task.replay back as it was, or start a new run.",
        )


def choose(recording: Recording, config: RunConfig, path: Path) -> Replayed:
    """The usable rollouts by prompt, group_size of each at most. Raises ConfigError for another temperature,
    or if none is usable.
    """
    refuse_difference(
        path, recording.sampled_by, replace(recording.sampled_by, temperature=config.rollout.temperature)
    )
    left_out: Counter[str] = Counter()
    prompts: dict[str, Prompt] = {}
    rollouts: dict[str, tuple[Rollout, ...]] = {}
    for record in recording.rollouts:
        prompt = prompts.get(record.prompt.prompt_id) or replace(
            record.prompt, prompt_id=f"replay/{len(prompts)}"
        )
        taken = rollouts.get(prompt.prompt_id, ())
        is_full = len(taken) == config.rollout.group_size
        if why := _unusable(record, config) or ("beyond rollout.group_size" if is_full else ""):
            left_out[why] += 1
            continue
        prompts[record.prompt.prompt_id] = prompt
        renumbered = tuple(replace(branch, sample_index=len(taken)) for branch in record.rollout)
        rollouts[prompt.prompt_id] = (*taken, renumbered)
    if not rollouts:
        reasons = _reasons(left_out) or "none left out"
        raise ConfigError(
            f"task.replay={path} has no rollout to train on ({len(recording.rollouts)} rollouts; {reasons})",
            way_out="record rollouts with a reward, or remove task.replay.",
        )
    return Replayed(path, recording.sampled_by, tuple(prompts.values()), rollouts, left_out)


def _unusable(record: RecordedRollout, config: RunConfig) -> str:
    if record.reward is None:
        return "without a reward"
    if {span.version for branch in record.rollout for span in branch.version_spans} != {RECORDED_VERSION}:
        return f"with tokens of another policy_version than {RECORDED_VERSION}"
    if max(len(branch.token_ids) for branch in record.rollout) > max_length(config):
        return f"longer than max_prompt_tokens + max_tokens = {max_length(config)}"
    return ""


def _reasons(left_out: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {why}" for why, count in left_out.items())


def sampled_by(config: RunConfig, model_path: Path, placement: Placement) -> SampledBy:
    """What rollouts at policy_version 0 are sampled from. Reads all weights."""
    dtype = "bfloat16" if item_bytes(config.model.dtype, placement.rollout[0]) == 2 else "float32"
    weights = _digest(model_path, WEIGHTS) if engine_kind(config).has_model else "simulated"
    template = config.model.chat_template and Path(config.model.chat_template).read_text(encoding="utf-8")
    tokenizer = _digest(model_path, TOKENIZER, json.dumps(template))
    return SampledBy(weights, dtype, tokenizer, config.rollout.temperature)


def _digest(folder: Path, patterns: Sequence[str], more: str = "") -> str:
    files = hash_files(folder, patterns, {})
    text = json.dumps([[name, file.xxh3] for name, file in files.items()]) + more
    return xxhash.xxh3_128_hexdigest(text.encode())
