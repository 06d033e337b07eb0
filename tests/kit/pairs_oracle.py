"""Judge a run of scripts/pairs.py from its files. Each check raises AssertionError.

Shares nothing with the product: own SQL, own decoding of the journal, and logprobs by
plain transformers under the weights of each version.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import re
import sqlite3
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import peft
import regex
import torch
import yaml
from resume_checker import effective
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoModelForCausalLM

ROUNDING = 1e-4
"""Most nats on average between two computations of the same logprobs in float32.
Measured: 1e-6.
"""
ANSWER = regex.compile('"[a-f]{3,9}"')
"""What the grammar of scripts/pairs.yaml allows."""
ALARM = re.compile(r"^[\d-]+ \S+ (WARNING|ERROR|CRITICAL) |^Traceback")
"""Of the product's log format; vLLM has another, and warns at each start."""
HARMLESS = re.compile(
    r"checkpoint of version \d+ skipped: the previous one is still being written"
    r"|resuming with trainer.learning_rate: 0.003 -> 0.001"
    # Of an agent that edits its history.
    r"|differs from the call before, so this call begins a new branch"
    # Of processes that outlive others by some milliseconds as the script kills the run.
    r"|gateway gave no answer to /work/|was killed by SIGKILL"
    # Of transformers: packages for CUDA are not installed.
    r"|is falling back to its reference PyTorch implementation"
)
OF_A_STOP = re.compile(
    r"^.* asyncrl\.worker: \S+ attempt \d+ failed\n"
    r"(?:(?!\d{4}-).*\n)*?openai\.\w+: .*(?:session_ended|session has ended|Connection error).*\n"
    r"|^.*\[shutdown\] MPClient: complete\n(?:(?!\(MainProcess pid=\d+\) INFO).*\n)*",
    re.MULTILINE,
)
"""A call of an agent after the stop that ended its session, and what vLLM says of calls
after its own end, with their tracebacks.
"""
QUERY = """SELECT batch_groups.version, group_id, sample_index, branch, blob
FROM batch_groups JOIN trajectories USING (group_id)"""
HARMLESS_WITH_OLD_CACHE = re.compile(r"engines and trainer disagree")
"""keep_kv continues on the cache of the version before, and the gap shows it."""
Key = tuple[int, ...]


@dataclass(frozen=True)
class Branch:
    """A trained sequence. Tokens that were not sampled have version -1."""

    batch: int
    ids_T: Tensor
    version_T: Sequence[int]
    logprob_T: Sequence[float]
    supports: Sequence[Sequence[int]]
    grammar_calls: Sequence[range]
    """Places of the tokens of each call with a grammar."""

    @property
    def is_interrupted(self) -> bool:
        """Whether the version changes within a call."""
        neighbours = itertools.pairwise(self.version_T)
        return any(0 <= left < right for left, right in neighbours)


@dataclass(frozen=True)
class Run:
    """The files of a run; its branches by group, sample and branch."""

    folder: Path
    config: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    branches: Mapping[Key, Branch]

    @property
    def source(self) -> Path:
        return Path(self.config["model"]["path"] or self.folder / "model")

    @property
    def keeps_cache(self) -> bool:
        """Whether the cache of old weights is part of what samples later tokens."""
        return bool(self.config["weight_sync"]["interrupt"] == "keep_kv")


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
    its numbers, or as bytes the first bytes of all its numbers, all second bytes, and so
    on.
    """
    body = zlib.decompress(blob)
    start = 4 + int.from_bytes(body[:4], "little")
    arrays = dict[str, Any]()
    _, layout, head = json.loads(body[4:start])
    for name, dtype, count in layout:
        array = np.frombuffer(body, dtype, count, start).copy()
        start += array.nbytes
        if name != "routing":
            if dtype == "|u1":
                array = array.reshape(4, -1).T.copy()
            arrays[name] = array.view("<i4").reshape(-1)
    ids_T = torch.from_numpy(arrays["ids"]).long()
    version_T = [-1] * len(ids_T)
    for begin, end, version, _ in arrays["spans"].reshape(-1, 4).tolist():
        version_T[begin:end] = [version] * (end - begin)
    supports: Any = [()] * len(ids_T)
    if "support" in arrays:
        support = torch.from_numpy(arrays["support"]).long()
        supports = torch.split(support, arrays["support.sizes"].tolist())
    logprob_T = arrays["behaviour_logprobs"].view("<f4").tolist()
    calls = [range(begin, end) for begin, end, _ in head["spans"]]
    return Branch(batch, ids_T, version_T, logprob_T, supports, calls)


# ---- logprobs by plain transformers


def check_logprobs(run: Run) -> None:
    """Compare the behaviour logprob of each token with plain transformers, under the
    weights that sampled it. The trainer's own comparison has the same limit.

    Two computations in the run's dtype may each differ from the exact logprob by the
    model's noise: what the same weights change by in float32. Rounding sends a token of
    a hundred to another expert, which changes its logprob by up to 1: so with experts in
    bfloat16 medians are compared.
    """
    is_routed = run.config["algorithm"]["router_replay"]
    is_exact = run.config["model"]["dtype"] == "float32"
    average = median if is_routed and not is_exact else fmean
    limits = list[float]()
    for version, model in saved_models(run):
        exact = copy.deepcopy(model).float()
        gaps, noise = list[float](), list[float]()
        for branch in run.branches.values():
            if not (run.keeps_cache and branch.is_interrupted):
                own = logprobs_of(run, model, branch, version)
                true = logprobs_of(run, exact, branch, version)
                gaps += [abs(own[place] - branch.logprob_T[place]) for place in own]
                noise += [abs(own[place] - true[place]) for place in own]
        if gaps:
            # The trainer replays the experts, so its mean has none of these jumps.
            limits.append(ROUNDING + 2 * fmean(noise))
            gap = average(gaps)
            limit = ROUNDING + 2 * average(noise)
            words = f"{gap} nats, with a noise of {average(noise)}"
            assert gap <= limit, f"logprobs of version {version} differ by {words}"
    assert len(limits) > 1, "fewer than two versions have saved weights"
    for line in run.metrics:
        gap = line.get("policy/logprob_gap_mean", 0.0)
        is_equal = gap <= max(limits)
        assert run.keeps_cache or is_equal, f"step {line['step']}: the gap is {gap}"


def saved_models(run: Run) -> Iterator[tuple[int, Any]]:
    """Yield the model with the weights of each saved version, in the run's dtype."""
    dtype = getattr(torch, run.config["model"]["dtype"])
    model: Any = AutoModelForCausalLM.from_pretrained(run.source, dtype=torch.float32)
    if lora := run.config["trainer"]["lora"]:
        linear = [
            name
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and is_target(name, lora["targets"])
        ]
        shape = {"r": lora["rank"], "lora_alpha": lora["alpha"]}
        adapters = peft.LoraConfig(**shape, target_modules=linear)
        with warnings.catch_warnings():
            # An adapter of a tied head is of the head alone.
            warnings.filterwarnings("ignore", ".*ensure_weight_tying")
            model = peft.get_peft_model(model, adapters)
    yield 0, copy.deepcopy(model.eval()).to(dtype)
    for version in range(1, run.config["trainer"]["num_steps"]):
        saved = run.folder / f"checkpoints/step_{version}/trainer"
        trained = {
            f"weights.{name.removeprefix('base_model.model.').replace('.default', '')}": weight.data
            for name, weight in model.named_parameters()
            if weight.requires_grad
        }
        if saved.exists():
            load(trained, checkpoint_id=saved)
            yield version, copy.deepcopy(model).to(dtype)


def is_target(name: str, targets: list[str] | str) -> bool:
    if targets == "all-linear":
        return name != "lm_head"
    return name.rpartition(".")[2] in targets


def logprobs_of(
    run: Run, model: Any, branch: Branch, version: int
) -> Mapping[int, float]:
    """Return the logprobs at the places that a version sampled, over their supports if
    they have one.
    """
    if version not in branch.version_T:
        return {}
    with torch.no_grad():
        logits_TV = model(branch.ids_T[None]).logits[0].double()
    logits_TV /= run.config["rollout"]["temperature"]
    supports = [*branch.supports]
    for place in itertools.chain(*branch.grammar_calls):
        if not len(supports[place]):
            supports[place] = allowed_by_grammar(run, branch, place)
    found = dict[int, float]()
    for place, sampled in enumerate(branch.version_T):
        if sampled == version:
            logits_V = logits_TV[place - 1]
            support = supports[place]
            among = logits_V[support] if len(support) else logits_V
            own = logits_V[branch.ids_T[place]] - among.logsumexp(-1)
            found[place] = float(own)
    return found


def allowed_by_grammar(run: Run, branch: Branch, place: int) -> list[int]:
    """Return the tokens that continue the answer, each a character, to an ANSWER."""
    call = next(call for call in branch.grammar_calls if place in call)
    tokenizer = json.loads((run.source / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    texts = {number: text for text, number in ids.items()}
    begun = "".join(
        texts[number] for number in branch.ids_T[call.start : place].tolist()
    )
    if ANSWER.fullmatch(begun):
        return [ids["<|im_end|>"]]
    return [ids[text] for text in ids if ANSWER.fullmatch(begun + text, partial=True)]


# ---- the record, the log and the verdict


def check_record(run: Run) -> None:
    """Each batch and each prompt is trained once, on tokens within the bound, and a
    push interrupts a rollout if it can.
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
        is_met = any(branch.is_interrupted for branch in run.branches.values())
        assert is_met, "no push interrupted a rollout"


def check_words(run: Run) -> None:
    """No alarm is in a log, and the headline says what the rewards say. So few steps
    prove no gain.
    """
    harmless = [HARMLESS]
    if run.keeps_cache:
        harmless.append(HARMLESS_WITH_OLD_CACHE)
    for log in (run.folder / "logs").glob("*.log"):
        lines = OF_A_STOP.sub("", log.read_text()).splitlines()
        for number, line in enumerate(lines):
            is_harmless = any(sentence.search(line) for sentence in harmless)
            around = "\n".join(lines[max(number - 3, 0) : number + 30])
            assert is_harmless or not ALARM.search(line), f"{log.name}: {around}"
    headline = json.loads((run.folder / "summary.json").read_text())["headline"]
    rewards = [line["reward/mean"] for line in run.metrics]
    claim = re.match("Learned|Got worse", headline)
    is_equal = min(rewards) == max(rewards)
    assert claim is None or is_equal, f"{rewards}: {headline}"
    first = re.search(r"reward (?:rose from )?(-?[\d.]+\d)", headline)
    early = sorted(rewards[: len(rewards) // 2])
    said = float(first[1]) if first else early[0]
    # The headline rounds to three digits.
    assert early[0] - 1e-3 <= said <= early[-1] + 1e-3, f"{rewards}: {headline}"


CHECKS = (check_record, check_words, check_logprobs)
