"""Recorded rollouts on their way into a run: whether they are data of this run's policy, which can be taken,
and what people are told.

Reads files and blocks; starts nothing, imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.files import write_whole
from asyncrl.messages.base import joint_digest, tensor_digest
from asyncrl.messages.records import Prompt, Rollout
from asyncrl.placement.devices import Placement
from asyncrl.placement.plan import item_bytes
from asyncrl.rollouts.generators import RECORDED_VERSION
from asyncrl.rollouts.recording import (
    RecordedRollout,
    Recording,
    SampledBy,
    read_recording,
    refuse_difference,
)

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

    @property
    def num_rollouts(self) -> int:
        """Of all prompts together."""
        return sum(map(len, self.rollouts.values()))


def open_replay(config: RunConfig, run_dir: Path) -> Replayed | None:
    """The recording that task.replay names, None if it names none. Raises ConfigError.

    It is copied into the run directory, and a run that goes on reads the copy: its prompts keep their places
    in the order.
    """
    if config.task.replay is None:
        return None
    given, copy = Path(config.task.replay), run_dir / RUN_COPY
    if not copy.exists():
        recording = read_recording(given)
        write_whole(copy, given.read_text(encoding="utf-8"))
    else:
        recording = read_recording(copy)
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
            rule="the prompts of a recording come first, so that the place of every later one depends on "
            "them",
            way_out="put task.replay back as it was, or start a new run.",
        )


def check_replay(config: RunConfig) -> str | None:
    """What task.replay holds, in words, for `asyncrl check`. Raises ConfigError."""
    if config.task.replay is None:
        return None
    path = Path(config.task.replay)
    replayed = choose(read_recording(path), config, path)
    return f"{path}: {told(replayed, config)}"


def choose(recording: Recording, config: RunConfig, path: Path) -> Replayed:
    """The usable rollouts by prompt, group_size of each at most. Raises ConfigError for another temperature,
    or if none is usable.
    """
    if recording.sampled_by.temperature != config.rollout.temperature:
        now = replace(recording.sampled_by, temperature=config.rollout.temperature)
        refuse_difference(path, recording.sampled_by, now)
    left_out: Counter[str] = Counter()
    found: dict[str, tuple[Prompt, list[Rollout]]] = {}
    for record in recording.rollouts:
        of_prompt = found.get(record.prompt.prompt_id, (record.prompt, []))[1]
        why = _unusable(record, config) or (
            "beyond rollout.group_size" if len(of_prompt) == config.rollout.group_size else ""
        )
        if why:
            left_out[why] += 1
            continue
        found.setdefault(record.prompt.prompt_id, (record.prompt, of_prompt))
        of_prompt.append(tuple(replace(branch, sample_index=len(of_prompt)) for branch in record.rollout))
    if not found:
        raise ConfigError(
            f"task.replay={path} has no rollout to train on ({len(recording.rollouts)} rollouts; "
            f"{_reasons(left_out) or 'none left out'})",
            way_out="record rollouts with a reward, or remove task.replay.",
        )
    prompts = tuple(
        replace(prompt, prompt_id=f"replay/{number}") for number, (prompt, _) in enumerate(found.values())
    )
    rollouts = {
        prompt.prompt_id: tuple(of_prompt)
        for prompt, (_, of_prompt) in zip(prompts, found.values(), strict=True)
    }
    return Replayed(path, recording.sampled_by, prompts, rollouts, left_out)


def _unusable(record: RecordedRollout, config: RunConfig) -> str:
    max_length = config.rollout.max_prompt_tokens + config.rollout.max_tokens
    if record.reward is None:
        return "without a reward"
    if {span.version for branch in record.rollout for span in branch.version_spans} != {RECORDED_VERSION}:
        return f"with tokens of another policy_version than {RECORDED_VERSION}"
    if max(len(branch.token_ids) for branch in record.rollout) > max_length:
        return f"longer than max_prompt_tokens + max_tokens = {max_length}"
    return ""


def told(replayed: Replayed, config: RunConfig) -> str:
    """How many can be taken at most, and why not all."""
    buffer, num_groups = config.buffer, config.trainer.num_groups
    look_ahead = buffer.max_staleness if buffer.look_ahead == "auto" else buffer.look_ahead
    num_first = min(look_ahead + 1, config.trainer.num_steps) * num_groups
    if buffer.filter != "none":  # a group that is filtered makes room for another one at the same version
        num_first = len(replayed.prompts)
    most = sum(len(replayed.rollouts[prompt.prompt_id]) for prompt in replayed.prompts[:num_first])
    text = f"{replayed.num_rollouts} recorded rollouts of {len(replayed.prompts)} prompts, of which at most "
    text += f"{most} can be taken"
    if most < replayed.num_rollouts:
        text += (
            f": only (look_ahead + 1) * num_groups = {num_first} groups may start while policy_version "
            f"{RECORDED_VERSION} is served"
            " (buffer.max_staleness), later ones are sampled"
        )
    return text + (f"; left out: {_reasons(replayed.left_out)}" if replayed.left_out else "")


def _reasons(left_out: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {why}" for why, count in left_out.items())


def refuse_other_policy(
    replayed: Replayed, config: RunConfig, model_path: Path, placement: Placement
) -> None:
    """Raise ConfigError, with both digests, unless the run starts from what the recording was sampled
    from.
    """
    refuse_difference(replayed.path, replayed.sampled_by, sampled_by(config, model_path, placement))


def sampled_by(config: RunConfig, model_path: Path, placement: Placement) -> SampledBy:
    """What rollouts at policy_version 0 are sampled from. Reads all weights."""
    dtype = "bfloat16" if item_bytes(config.model.dtype, placement.rollout[0]) == 2 else "float32"
    try:
        digest = "simulated" if config.rollout.engine == "simulated" else _folder_digest(model_path)
        return SampledBy(digest, dtype, _tokenizer_digest(config, model_path), config.rollout.temperature)
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise ConfigError(
            f"cannot read the model in {model_path}: {type(error).__name__}: {error}",
            way_out="restore its files.",
        ) from error


def _folder_digest(folder: Path) -> str:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ConfigError(
            f"{folder} has no safetensors file",
            rule="rollouts are recorded with the digest of the weights that sampled them",
            way_out="save the model again with transformers: save_pretrained writes safetensors.",
        )
    return joint_digest(digest for path in paths for digest in _tensor_digests(path))


def _tensor_digests(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        (size,) = struct.unpack("<Q", mapped[:8])
        header: dict[str, Any] = json.loads(mapped[8 : 8 + size])
        with memoryview(mapped) as content:
            for name, tensor in header.items():
                if name != "__metadata__":
                    start, end = (8 + size + offset for offset in tensor["data_offsets"])
                    with content[start:end] as data:
                        yield tensor_digest(name, tensor["dtype"], tuple(tensor["shape"]), data)


def _tokenizer_digest(config: RunConfig, folder: Path) -> str:
    """Of vocabulary and template, as the folder has them; not of what else a tokenizer's files say."""
    digest = hashlib.sha256()
    for name in ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"):
        if (folder / name).is_file():
            digest.update(f"{name}|".encode() + hashlib.sha256((folder / name).read_bytes()).digest())
    settings = folder / "tokenizer_config.json"
    inline = (
        json.loads(settings.read_text(encoding="utf-8")).get("chat_template") if settings.is_file() else None
    )
    given = (
        Path(config.model.chat_template).read_text(encoding="utf-8") if config.model.chat_template else inline
    )
    digest.update(json.dumps(given).encode())
    return digest.hexdigest()[:32]
