"""Rows of docs/models.csv: how the product trains, serves and adapts the tiny random models of the zoo.

The oracle is one plain transformers forward per text, with autograd. python scripts/models.py writes the
table; tests/test_models_table.py measures it again.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import io
import os
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from engine_in_process import make_request, running_engine
from engine_replies import ask
from model_zoo import TYPES, make_config, random_model
from torch import Tensor
from trainer_cases import Rows, batch_of, make_spec

from asyncrl.base.errors import ConfigError, find_fatal
from asyncrl.config import LoraConfig
from asyncrl.trainer.build_model import plan_of
from asyncrl.trainer.lora import Adapters, find_targets
from asyncrl.trainer.packing import micro_batches
from asyncrl.trainer.policy import Policy
from asyncrl.trainer.ranks import Ranks

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs/models.csv"
COLUMNS = ("type", "variant", "trainer", "gradients", "embedded engine", "vllm", "lora", "known deviation")
CPU = torch.device("cpu")
SPEC = make_spec(Path("zoo"), Path("zoo"))
TEMPERATURE = 0.8
LENGTHS = ((96, 60, 34), (18, 12, 7))
"""Texts of two groups. The zoo's windows, chunks and original contexts are 12 to 32."""
SHARED = (20, 5)
FIRST_ID = 3
"""Special tokens have the ids below."""
MOST_NATS = 1e-3
MOST_GRADIENT = 2e-3
"""Relative error of a parameter's gradient; float32 gives 1e-5."""


class Scored(NamedTuple):
    """Logprobs of the M tokens in the order of the texts, and gradients by parameter."""

    logprob_M: Tensor
    gradients: dict[str, Tensor]


def measure(name: str) -> list[str]:
    """Return the row of a model of the zoo."""
    deviations = list[str]()
    model = random_model(make_config(name))
    trainer, gradients = train(model, deviations)
    engine = serve(model, deviations)
    lora = adapt(model, deviations)
    model_type, _, variant = name.partition(" ")
    vllm = "yes" if type(model).__name__ in vllm_names() else "no"
    return [model_type, variant, trainer, gradients, engine, vllm, lora, "; ".join(deviations)]


def read_table() -> dict[str, list[str]]:
    """Return the rows by the name of their model."""
    rows = [*csv.reader(TABLE.read_text(encoding="utf-8").splitlines())]
    return {f"{row[0]} {row[1]}".rstrip(): row for row in rows[1:]}


def write_table() -> None:
    """Measure all models, and write the table."""
    assert vllm_names(), "make setup-vllm, or name its Python in ASYNCRL_VLLM_PYTHON"
    rows = list[list[str]]()
    for number, name in enumerate(sorted(TYPES)):
        rows.append(measure(name))
        print(f"{number + 1}/{len(TYPES)}", *rows[-1], sep="\t", flush=True)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


@cache
def vllm_names() -> frozenset[str]:
    """Return the classes in vLLM's registry; none without the environment of `make setup-vllm`."""
    python = Path(os.environ.get("ASYNCRL_VLLM_PYTHON") or ROOT / ".venv-vllm/bin/python")
    found = python.parents[1].glob("lib/python3*/site-packages/vllm/model_executor/models/registry.py")
    return frozenset(re.findall(r'"(\w+)": \(', "".join(path.read_text(encoding="utf-8") for path in found)))


def make_texts() -> Rows:
    rng = np.random.default_rng(0)
    groups: Rows = []
    for lengths, shared in zip(LENGTHS, SHARED, strict=True):
        prefix = rng.integers(FIRST_ID, 96, shared).tolist()
        texts = [prefix + rng.integers(FIRST_ID, 96, length - shared).tolist() for length in lengths]
        groups.append([(ids, [False] + [True] * (len(ids) - 1)) for ids in texts])
    return groups


def plain_logprobs(model: Any, ids: list[int]) -> Tensor:
    """Return logprobs [T - 1] of one forward without a cache."""
    ids_1T = torch.tensor([ids])
    logits_TV = model(input_ids=ids_1T[:, :-1], use_cache=False).logits[0].float()
    return torch.log_softmax(logits_TV / TEMPERATURE, -1).gather(-1, ids_1T[0, 1:, None])[:, 0]


# ---- the trainer


def train(model: Any, deviations: list[str]) -> tuple[str, str]:
    """Return the cells `trainer` and `gradients`."""
    texts = [ids for rows in make_texts() for ids, _ in rows]
    weight_M = torch.randn(sum(map(len, texts)) - len(texts), generator=torch.Generator().manual_seed(1))
    own = copy.deepcopy(model)
    expected_M = plain(copy.deepcopy(model), texts, weight_M)
    try:
        policy = Policy(own, plan_of(SPEC, own, CPU))
        found_M = scored(policy, weight_M)
    except ConfigError as error:
        deviations.append(f"trainer: {brief(error.what)}")
        return "refused", ""
    except Exception as error:
        deviations.append(f"trainer: crashes ({type(error).__name__}: {brief(error)})")
        return "crashes", ""
    if policy.plan.reason:
        deviations.append(f"trainer: {brief(policy.plan.reason)}")
    nats = float((found_M.logprob_M - expected_M.logprob_M).abs().max())
    name, error = worst_gradient(found_M.gradients, expected_M.gradients)
    if not nats <= MOST_NATS:
        deviations.append("trainer: logprobs are not those of plain transformers")
    if not error <= MOST_GRADIENT:
        deviations.append(f"trainer: wrong gradient of {brief(name)}")
    is_exact = nats <= MOST_NATS and error <= MOST_GRADIENT
    return "packed" if policy.plan.is_packed else "one by one", "exact" if is_exact else "wrong"


def plain(model: Any, texts: list[list[int]], weight_M: Tensor) -> Scored:
    parts: dict[int, Tensor] = {}
    weights = weight_M.split([len(ids) - 1 for ids in texts])
    # Dynamic RoPE remembers the longest text, so short ones come first.
    for number in sorted(range(len(texts)), key=lambda number: len(texts[number])):
        parts[number] = plain_logprobs(model, texts[number])
        (parts[number] * weights[number]).sum().backward()
    return Scored(torch.cat([parts[number].detach() for number in range(len(texts))]), gradients_of(model))


def scored(policy: Policy, weight_M: Tensor) -> Scored:
    """Score the texts in micro-batches as the trainer makes them."""
    header, arrays = batch_of(make_texts())
    place_N = np.cumsum(arrays.loss_mask) - 1
    found_M = torch.zeros(len(weight_M))
    rules = policy.plan.rules(10**6)
    for micro, _ in micro_batches(header, arrays, arrays.loss_mask, rules, CPU, Ranks(0, 1), policy.costs):
        places = torch.from_numpy(place_N[micro.source_M])
        logprob_M = policy(micro, TEMPERATURE).logprob_M
        (logprob_M * weight_M[places]).sum().backward()
        found_M[places] = logprob_M.detach()
    return Scored(found_M, gradients_of(policy.model))


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def worst_gradient(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[str, float]:
    """Return the parameter whose gradient is furthest from the expected one, and the relative distance."""
    whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    zero = torch.zeros(())
    errors = {
        name: float(
            (found.get(name, zero) - expected.get(name, zero)).norm()
            / (expected.get(name, zero).norm() + 1e-4 * whole)
        )
        for name in {*expected, *found}
    }
    return max(errors.items(), key=lambda item: item[1])


# ---- the embedded engine


@torch.no_grad()
def serve(model: Any, deviations: list[str]) -> str:
    """Return the cell `embedded engine`: prompts of all lengths together, then their second turns."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            with contextlib.redirect_stderr(said), running_engine(Path(folder), num_kept=4) as engine:
                distance = served_distance(engine, model)
        except SystemExit:
            deviations.append(f"engine: {refusal(said.getvalue())}")
            return "refused"
        except Exception as error:
            deviations.append(f"engine: crashes ({type(error).__name__}: {brief(error)})")
            return "crashes"
    if distance <= MOST_NATS:
        return "exact"
    deviations.append("engine: logprobs are not those of plain transformers")
    return "wrong"


def served_distance(engine: Any, model: Any) -> float:
    """Return the largest difference of sampled and plain logprobs, in nats."""
    prompts = [ids for rows in make_texts() for ids, _ in rows]
    differences = list[Tensor]()
    for turn in range(2):
        fields = {"max_tokens": 30, "temperature": TEMPERATURE, "seed": turn}
        requests = [make_request(f"{turn}-{one[-1]}-{len(one)}", tuple(one), **fields) for one in prompts]
        answers = [answer.result(timeout=60) for answer in ask(engine, requests)]
        for number, answer in enumerate(answers):
            whole = prompts[number] + answer.token_ids
            plain_T = plain_logprobs(copy.deepcopy(model), whole)[len(prompts[number]) - 1 :]
            differences.append(plain_T - torch.tensor(answer.logprobs))
            prompts[number] = [*whole, 5, 6, 7]
    assert min(map(len, differences)) > 0
    return float(torch.cat(differences).abs().max())


# ---- adapters


def adapt(model: Any, deviations: list[str]) -> str:
    """Return the cell `lora`: names of the layers that adapters change by default."""
    try:
        return " ".join(adapted_layers(model)) or "none"
    except Exception as error:
        deviations.append(f"lora: {type(error).__name__}: {brief(error)}")
        return "wrong"


@torch.no_grad()
def adapted_layers(model: Any) -> list[str]:
    """Return the names, if logprobs are those of the merged weights. Raises AssertionError."""
    own, merged = copy.deepcopy(model), copy.deepcopy(model)
    config = LoraConfig(rank=4)
    names = find_targets(own, config)
    if not names:
        return []
    adapters = Adapters(own, config, torch.float32)
    weights = dict(merged.named_parameters())
    for name, layer in adapters.layers.items():
        lora_A, lora_B = layer.pair()
        lora_B.normal_(std=0.1)
        weights[f"{name}.weight"].add_(adapters.scale * lora_B @ lora_A)
    ids = make_texts()[0][1][0]
    base_T, expected_T, found_T = (plain_logprobs(one, ids) for one in (model, merged, own))
    assert float((base_T - expected_T).abs().max()) > 10 * MOST_NATS, "adapters change nothing"
    assert float((found_T - expected_T).abs().max()) <= MOST_NATS, "adapters are not the merged weights"
    return sorted({name.rpartition(".")[2] for name in names})


# ---- texts


def brief(error: Any) -> str:
    """Return one short line without numbers, which are those of the tiny model."""
    text = re.sub(r"(?<!\w)\d+(\.\d+)?(e-?\d+)?", "#", " ".join(str(error).split()))
    return text if len(text) <= 160 else f"{text[:160]}.."


def refusal(said: str) -> str:
    body = find_fatal(said)
    return brief(said if body is None else body.error.removeprefix("engine-0: "))
