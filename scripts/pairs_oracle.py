"""Judge a run from its files: the journal, the record, metrics, checkpoints and logs.

Shares nothing with the product: own SQL, own decoding, and logprobs by plain
transformers under the weights of each version.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM

DTYPES = {"behaviour_logprobs": "<f4", "routing": "<u2"}
"""Types of the journal's arrays; all others of those read here are <i4."""
NOISE = 1e-4
"""Most nats between two float32 computations of one logprob; 1e-5 was measured."""
COURSE = tuple(
    "perf/ time_s buffer/ rollout/ engine/ weight_sync/ trainer/restarts sample/interrupted gateway/ harness/ "
    "eval/seconds eval/skipped evaluation/ failure/ tokens/generated reward/posted reward/awaited teacher/".split()
)
"""Metrics of a run's course, not of its results."""
QUERY = """SELECT batch_groups.version, groups.prompt_id, group_id, sample_index, branch, blob
FROM batch_groups JOIN groups USING (group_id) JOIN trajectories USING (group_id)
ORDER BY batch_groups.version, position, sample_index, branch"""


@dataclass(frozen=True)
class Branch:
    """A trained sequence; tokens that were not sampled have version -1."""

    batch: int
    prompt_id: str
    key: tuple[int, int, int]
    ids_T: Tensor
    version_T: Sequence[int]
    logprob_T: Sequence[float]
    supports: Sequence[Tensor]

    def places(self, version: int) -> list[int]:
        return [at for at, found in enumerate(self.version_T) if found == version]

    def is_late(self, place: int) -> bool:
        """Say whether new weights came between the start of its call and this token."""
        start = place
        while self.version_T[start - 1] >= 0:
            start -= 1
        return self.version_T[start] != self.version_T[place]

    @property
    def is_interrupted(self) -> bool:
        return any(map(self.is_late, [at for at, version in enumerate(self.version_T) if version >= 0]))

    @property
    def name(self) -> str:
        return f"batch {self.batch}, group/sample/branch {self.key}"


def decoded(row: Sequence[Any]) -> Branch:
    """A blob is compressed: the head's length, the head as JSON, and each array with
    the first bytes of all its numbers, then all second bytes, and so on.
    """
    version, prompt_id, *key, blob = row
    body = zlib.decompress(blob)
    start = 4 + int.from_bytes(body[:4], "little")
    _, layout, _ = json.loads(body[4:start])
    arrays = {}
    for name, _, num_bytes in layout:
        dtype = np.dtype(DTYPES.get(name, "<i4"))
        planes = np.frombuffer(body, np.uint8, num_bytes, start)
        if name != "routing":
            arrays[name] = planes.reshape(dtype.itemsize, -1).T.copy().view(dtype).reshape(-1)
        start += num_bytes
    ids = arrays["ids"].astype(np.int64)
    versions = [-1] * len(ids)
    for begin, end, sampled, _ in arrays["spans"].reshape(-1, 4).tolist():
        versions[begin:end] = [sampled] * (end - begin)
    sizes = arrays.get("support.sizes", np.zeros(len(ids), int))
    support = torch.from_numpy(arrays.get("support", np.zeros(0, int)).astype(np.int64))
    return Branch(version, prompt_id, tuple(key), torch.from_numpy(ids), versions,
        arrays["behaviour_logprobs"].tolist(), support.split(sizes.tolist()))


@dataclass(frozen=True)
class Run:
    """The files of a run's folder."""

    folder: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        read: dict[str, Any] = yaml.safe_load((self.folder / "config.yaml").read_text())
        return read

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return lines_of(self.folder / "metrics.jsonl")

    @cached_property
    def record(self) -> dict[int, dict[str, Any]]:
        """trained.jsonl by version; a restore takes back the versions after it."""
        found = dict[int, dict[str, Any]]()
        for line in lines_of(self.folder / "trained.jsonl"):
            if "restored" in line:
                found = {at: kept for at, kept in found.items() if at < line["restored"]}
            else:
                found[line["version"]] = line
        return found

    @cached_property
    def branches(self) -> list[Branch]:
        database = sqlite3.connect(f"file:{self.folder}/journal.sqlite?mode=ro", uri=True)
        return [decoded(row) for row in database.execute(QUERY)]

    @cached_property
    def max_staleness(self) -> int:
        bound: int = self.config["buffer"]["max_staleness"]
        return bound

    @property
    def swaps_early(self) -> bool:
        """Say whether pushes meet running requests, and do not wait for them."""
        return self.max_staleness > 0 and self.config["weight_sync"]["interrupt"] != "wait"

    def weights_at(self, version: int) -> dict[str, Tensor] | None:
        """Return the weights of a checkpoint; {}: those of the start; None: none saved."""
        folder = self.folder / f"checkpoints/step_{version}/trainer"
        if version == 0:
            return {}
        if not folder.exists():
            return None
        with tempfile.NamedTemporaryFile() as file:
            dcp_to_torch_save(folder, file.name)
            saved = torch.load(file.name, weights_only=False)
        prefix = "weights."
        return {name.removeprefix(prefix): tensor for name, tensor in saved.items() if name.startswith(prefix)}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- logprobs by plain transformers


class Policy:
    """The model of a run, at any saved version."""

    def __init__(self, run: Run) -> None:
        self._run = run
        folder = run.config["model"]["path"] or run.folder / "model"
        self.is_half = run.config["model"]["dtype"] == "bfloat16"
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        self._start = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        self._temperature = run.config["rollout"]["temperature"]

    def load(self, version: int) -> bool:
        """Load the weights of a version, rounded to the run's dtype; False: not saved."""
        saved = self._run.weights_at(version)
        if saved is None:
            return False
        dtype = torch.bfloat16 if self.is_half else torch.float32
        lora = self._run.config["trainer"]["lora"]
        changed = dict[str, Tensor]()
        for name, tensor in saved.items():
            owner, _, part = name.partition(".lora_")
            if not part:
                changed[name] = tensor
            elif part.startswith("B"):
                down = saved[f"{owner}.lora_A.default.weight"]
                added = lora["alpha"] / lora["rank"] * tensor @ down
                changed[f"{owner}.weight"] = self._start[f"{owner}.weight"] + added
        self._model.float()
        # A tied head is not saved, and follows its embedding.
        for weights in (self._start, changed):
            rounded = {name: tensor.to(dtype) for name, tensor in weights.items()}
            self._model.load_state_dict(rounded, strict=False)
        return True

    def logits(self, ids_T: Tensor, dtype: torch.dtype) -> Tensor:
        with torch.no_grad():
            logits_TV: Tensor = self._model.to(dtype)(ids_T[None]).logits[0]
        return logits_TV.double() / self._temperature


def logprob(logits_TV: Tensor, branch: Branch, place: int) -> float:
    """Return the logprob of a token, over its support if one was recorded."""
    logits_V = logits_TV[place - 1]
    support = branch.supports[place]
    among_V = logits_V[support] if len(support) else logits_V
    return float(logits_V[branch.ids_T[place]] - among_V.logsumexp(-1))


def gap_faults(run: Run) -> Iterator[str]:
    """Compare behaviour logprobs with plain transformers under the weights that sampled
    each token. In bfloat16 the noise is measured: the same weights in float32.
    """
    policy = Policy(run)
    keeps_cache = run.config["weight_sync"]["interrupt"] == "keep_kv"
    gaps = dict[int, list[float]]()
    noises = [0.0]
    worst = (0.0, "")
    for version in range(run.config["trainer"]["num_steps"]):
        if not policy.load(version):
            continue
        for branch in run.branches:
            places = branch.places(version)
            if keeps_cache:
                # The old cache is part of what sampled them.
                places = [place for place in places if not branch.is_late(place)]
            if not places:
                continue
            full_TV = policy.logits(branch.ids_T, torch.float32)
            own_TV = full_TV
            if policy.is_half:
                own_TV = policy.logits(branch.ids_T, torch.bfloat16)
            for place in places:
                own = logprob(own_TV, branch, place)
                gap = abs(own - branch.logprob_T[place])
                gaps.setdefault(version, []).append(gap)
                noises.append(abs(own - logprob(full_TV, branch, place)))
                token = f"token {place} of version {version} in {branch.name}"
                said = f"{branch.logprob_T[place]:.6f}, plain transformers {own:.6f}"
                worst = max(worst, (gap, f"{token} has logprob {said}"))
    if worst[0] > NOISE and not policy.is_half:
        yield worst[1]
    limit = NOISE + 2 * fmean(noises)
    for version, found in gaps.items():
        if fmean(found) > limit:
            yield f"tokens of version {version} differ from plain transformers by {fmean(found):.2g} nats on average, above {limit:.2g}"
    if not (0 in gaps and len(gaps) > 1):
        yield f"there are saved weights for tokens of {sorted(gaps)} only"
    for line in run.metrics:
        measured = line.get("policy/logprob_gap_mean", 0.0)
        if not keeps_cache and measured > limit:
            yield f"step {line['step']}: the trainer's logprobs of fresh tokens differ by {measured:.2g} nats, above {limit:.2g}"


# ---- the record


def record_faults(run: Run) -> Iterator[str]:
    trainer = run.config["trainer"]
    if sorted(run.record) != list(range(trainer["num_steps"])):
        yield f"trained.jsonl has batches {sorted(run.record)}"
    branches = {branch.key: branch for branch in run.branches}
    groups = dict[str, int]()
    for version, line in run.record.items():
        in_batch = {entry["group_id"] for entry in line["trajectories"]}
        if len(in_batch) != trainer["num_groups"]:
            yield f"batch {version} has {len(in_batch)} groups"
        for entry in line["trajectories"]:
            key = (entry["group_id"], entry["sample_index"], entry["branch"])
            branch = branches.pop(key, None)
            if branch is None or branch.batch != version:
                yield f"batch {version} trained {key}, which the journal lacks or has elsewhere: a second time?"
                continue
            if groups.setdefault(entry["prompt_id"], key[0]) != key[0]:
                yield f"prompt {entry['prompt_id']} was trained in two groups"
            ids = branch.ids_T.numpy().astype("<i4").tobytes()
            if hashlib.sha256(ids).hexdigest()[:16] != entry["tokens_sha"]:
                yield f"{branch.name}: the record has other tokens than the journal"
            for start, end, sampled in entry["spans"]:
                if not max(0, version - run.max_staleness) <= sampled <= version:
                    yield f"{branch.name}: loss on tokens of version {sampled}"
                if {*branch.version_T[start:end]} != {sampled}:
                    yield f"{branch.name}: the record and the journal disagree on versions"
    if run.swaps_early and not any(branch.is_interrupted for branch in run.branches):
        yield "no push interrupted a rollout"


def log_faults(run: Run, expected: Sequence[str]) -> Iterator[str]:
    for log in sorted((run.folder / "logs").glob("*.log")):
        for line in log.read_text().splitlines():
            is_alarm = re.search(r" (WARNING|ERROR|CRITICAL) |^Traceback", line)
            if is_alarm and not any(re.search(text, line) for text in expected):
                yield f"{log.name}: {line}"


def verdict_faults(run: Run) -> Iterator[str]:
    """Compare the headline with the rewards of the steps. So few prove no gain."""
    summary = json.loads((run.folder / "summary.json").read_text())
    headline = summary["headline"]
    rewards = [line["reward/mean"] for line in run.metrics]
    first = fmean(rewards[: len(rewards) // 2])
    if re.match("Learned:|Learned and|Got worse", headline):
        yield f"after {len(rewards)} steps: {headline}"
    if "Learned nothing" in headline and min(rewards) < max(rewards):
        yield f"rewards from {min(rewards)} to {max(rewards)}: {headline}"
    for start in re.findall(r"reward (?:rose from |fell from )?(-?\d+\.\d+)", headline):
        if abs(float(start) - first) > 0.0006:
            yield f"the first half of the steps earned {first:.4f}: {headline}"
    for start, end in re.findall(r"rose from (\S+) to (\S+)", headline):
        if float(start) >= float(end):
            yield headline
    if summary["state"] != "done":
        yield f"the state is {summary['state']}"


def faults_of(folder: Path, expected: Sequence[str]) -> list[str]:
    """Return what is wrong with a run. `expected`: patterns of harmless warnings."""
    run = Run(folder)
    return [*record_faults(run), *gap_faults(run), *log_faults(run, expected), *verdict_faults(run)]


def differences(one: Path, other: Path) -> list[str]:
    """Return where two runs have different results."""
    runs = [Run(folder) for folder in (one, other)]
    found = list[str]()
    left, right = ({line["step"]: line for line in run.metrics} for run in runs)
    for step in sorted(left.keys() | right.keys()):
        of_left, of_right = left.get(step, {}), right.get(step, {})
        for name in sorted(of_left.keys() | of_right.keys()):
            if not name.startswith(COURSE) and of_left.get(name) != of_right.get(name):
                found.append(f"step {step}: {name} is {of_left.get(name)}, killed {of_right.get(name)}")
    if runs[0].record != runs[1].record:
        found.append("trained.jsonl differs after a kill")
    digests = [{path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (run.folder / "final").glob("*.safetensors")} for run in runs]
    if digests[0] != digests[1]:
        found.append("final weights differ after a kill")
    return found
