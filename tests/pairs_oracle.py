"""Judge a run of scripts/pairs.py from its files. Each check raises AssertionError.

Shares nothing with the product: own SQL, own decoding of the journal, and logprobs by
plain transformers under the weights of each version.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import peft
import torch
import torch.distributed.checkpoint as dcp
import yaml
from resume_checker import effective
from torch import Tensor
from transformers import AutoModelForCausalLM

NOISE = 1e-4
"""Most nats between two float32 computations of one logprob; 1e-5 was measured."""
ALARM = re.compile(r" (WARNING|ERROR|CRITICAL) |^Traceback")
HARMLESS = re.compile(
    r"checkpoint of version \d+ skipped: the previous one is still being written"
)
QUERY = """SELECT batch_groups.version, group_id, sample_index, branch, blob
FROM batch_groups JOIN trajectories USING (group_id)"""
Key = tuple[int, ...]


@dataclass(frozen=True)
class Branch:
    """A trained sequence. Tokens that were not sampled have version -1."""

    batch: int
    ids_T: Tensor
    version_T: Sequence[int]
    first_T: Sequence[int]
    """The version of the first token of the same call."""
    logprob_T: Sequence[float]
    supports: Sequence[Tensor]


@dataclass(frozen=True)
class Run:
    """The files of a run; its branches by group, sample and branch."""

    folder: Path
    config: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    branches: Mapping[Key, Branch]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_run(folder: Path) -> Run:
    journal = sqlite3.connect(f"file:{folder}/journal.sqlite?mode=ro", uri=True)
    rows = journal.execute(QUERY)
    branches = {tuple(key): decode(batch, blob) for batch, *key, blob in rows}
    config = yaml.safe_load((folder / "config.yaml").read_text())
    return Run(folder, config, lines_of(folder / "metrics.jsonl"), branches)


def decode(batch: int, blob: bytes) -> Branch:
    """A blob is compressed: the length of its head, the head as JSON, then each array:
    the first bytes of all its numbers, all second bytes, and so on.
    """
    body = zlib.decompress(blob)
    start = 4 + int.from_bytes(body[:4], "little")
    arrays = dict[str, Any]()
    for name, _, num_bytes in json.loads(body[4:start])[1]:
        planes = np.frombuffer(body, np.uint8, num_bytes, start)
        start += num_bytes
        if name != "routing":
            arrays[name] = planes.reshape(4, -1).T.copy().view("<i4").reshape(-1)
    ids_T = torch.from_numpy(arrays["ids"]).long()
    version_T, first_T = [-1] * len(ids_T), [-1] * len(ids_T)
    for begin, end, version, _ in arrays["spans"].reshape(-1, 4).tolist():
        is_resumed = version_T[begin - 1] >= 0
        first = first_T[begin - 1] if is_resumed else version
        version_T[begin:end] = [version] * (end - begin)
        first_T[begin:end] = [first] * (end - begin)
    supports: Any = [()] * len(ids_T)
    if "support" in arrays:
        support = torch.from_numpy(arrays["support"]).long()
        supports = support.split(arrays["support.sizes"].tolist())
    logprob_T = arrays["behaviour_logprobs"].view("<f4").tolist()
    return Branch(batch, ids_T, version_T, first_T, logprob_T, supports)


# ---- logprobs by plain transformers


def check_logprobs(run: Run) -> None:
    """Compare the behaviour logprob of each token with plain transformers, under the
    weights that sampled it, and the trainer's own comparison with the same limit. In
    bfloat16 the noise is measured: the same weights computed in float32.
    """
    dtype = getattr(torch, run.config["model"]["dtype"])
    keeps_cache = run.config["weight_sync"]["interrupt"] == "keep_kv"
    gaps, noises = dict[int, list[float]](), [0.0]
    for version, exact in saved_models(run):
        model = copy.deepcopy(exact).to(dtype)
        exact.load_state_dict(model.state_dict())  # the same rounded weights
        for branch in run.branches.values():
            # With keep_kv, the old cache is part of what samples the later tokens.
            firsts = {version} if keeps_cache else {*branch.first_T}
            both = enumerate(zip(branch.version_T, branch.first_T, strict=True))
            places = [
                at
                for at, (sampled, first) in both
                if sampled == version and first in firsts
            ]
            own = logprobs(run, model, branch, places)
            full = logprobs(run, exact, branch, places)
            noises += [abs(one - other) for one, other in zip(own, full, strict=True)]
            said = [branch.logprob_T[place] for place in places]
            gaps.setdefault(version, []).extend(
                abs(one - other) for one, other in zip(own, said, strict=True)
            )
    limit = NOISE + 2 * fmean(noises)
    compared = {version: found for version, found in gaps.items() if found}
    assert len(compared) > 1, f"only versions {sorted(compared)} have weights"
    for version, found in compared.items():
        worst = max(found) if dtype == torch.float32 else fmean(found)
        assert worst <= limit, f"logprobs of version {version} differ by {worst} nats"
    for line in run.metrics:
        gap = line.get("policy/logprob_gap_mean", 0.0)
        assert keeps_cache or gap <= limit, f"step {line['step']}: the gap is {gap}"


def saved_models(run: Run) -> Iterator[tuple[int, Any]]:
    """Yield the model with the weights of each saved version, in float32."""
    source = run.config["model"]["path"] or run.folder / "model"
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    if lora := run.config["trainer"]["lora"]:
        shape = {"r": lora["rank"], "lora_alpha": lora["alpha"]}
        model = peft.get_peft_model(
            model, peft.LoraConfig(**shape, target_modules="all-linear")
        )
    yield 0, model.eval()
    for version in range(1, run.config["trainer"]["num_steps"]):
        saved = run.folder / f"checkpoints/step_{version}/trainer"
        trained = {
            f"weights.{name.removeprefix('base_model.model.')}": weight.data
            for name, weight in model.named_parameters()
            if weight.requires_grad
        }
        if saved.exists():
            dcp.load(trained, checkpoint_id=saved)
            yield version, model


def logprobs(run: Run, model: Any, branch: Branch, places: list[int]) -> list[float]:
    """Return the logprobs of sampled tokens, over their supports if they have one."""
    with torch.no_grad():
        logits_TV = model(branch.ids_T[None]).logits[0].double()
    logits_TV /= run.config["rollout"]["temperature"]
    found = []
    for place in places:
        logits_V = logits_TV[place - 1]
        support = branch.supports[place]
        among = logits_V[support] if len(support) else logits_V
        found.append(float(logits_V[branch.ids_T[place]] - among.logsumexp(-1)))
    return found


# ---- the record, the log and the verdict


def check_record(run: Run) -> None:
    """Each batch and each prompt is trained once, on tokens within the bound, and a
    push interrupts a rollout where it can.
    """
    bound = run.config["buffer"]["max_staleness"]
    record = effective(lines_of(run.folder / "trained.jsonl")).lines
    assert [*record] == [*range(run.config["trainer"]["num_steps"])], [*record]
    groups, left = dict[str, int](), dict(run.branches)
    for version, line in record.items():
        for entry in line["trajectories"]:
            group = entry["group_id"]
            branch = left.pop((group, entry["sample_index"], entry["branch"]), None)
            assert branch is not None, f"trained twice: {entry}"
            first = groups.setdefault(entry["prompt_id"], group)
            assert first == group, f"trained in two groups: {entry}"
            assert branch.batch == version, f"taken in {branch.batch}: {entry}"
            digest = hashlib.sha256(branch.ids_T.numpy().astype("<i4").tobytes())
            is_same = digest.hexdigest().startswith(entry["tokens_sha"])
            assert is_same, f"other tokens than in the journal: {entry}"
            for start, end, sampled in entry["spans"]:
                assert {*branch.version_T[start:end]} == {sampled}, entry
                assert max(0, version - bound) <= sampled <= version, entry
    if bound and run.config["weight_sync"]["interrupt"] != "wait":
        is_met = any(one.version_T != one.first_T for one in run.branches.values())
        assert is_met, "no push interrupted a rollout"


def check_words(run: Run) -> None:
    """No alarm is in a log, and the headline says what the rewards say. So few steps
    prove no gain.
    """
    for log in (run.folder / "logs").glob("*.log"):
        for line in log.read_text().splitlines():
            is_alarm = ALARM.search(line) and not HARMLESS.search(line)
            assert not is_alarm, f"{log.name}: {line}"
    headline = json.loads((run.folder / "summary.json").read_text())["headline"]
    rewards = [line["reward/mean"] for line in run.metrics]
    claim = re.match("Learned|Got worse", headline)
    is_equal = min(rewards) == max(rewards)
    assert claim is None or is_equal, f"{rewards}: {headline}"
    first = re.search(r"reward (?:rose from )?(-?[\d.]+\d)", headline)
    start = fmean(rewards[: len(rewards) // 2])
    said = float(first[1]) if first else start
    assert abs(said - start) < 1e-3, f"{rewards}: {headline}"


CHECKS = (check_record, check_words, check_logprobs)
