"""A row of docs/models.csv: how the product trains, serves and adapts a tiny random model of the zoo.

The oracle is one plain transformers forward per text, with autograd.
"""

from __future__ import annotations

import contextlib
import copy
import io
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from engine_in_process import make_request, running_engine
from engine_replies import ask
from model_zoo import make_config, random_model
from torch import Tensor
from trainer_cases import Rows, batch_of

from asyncrl.base.errors import ConfigError, find_fatal
from asyncrl.config import LoraConfig
from asyncrl.trainer.lora import Adapters, find_targets
from asyncrl.trainer.packing import micro_batches
from asyncrl.trainer.policy import Policy, find_plan, probe_model
from asyncrl.trainer.ranks import Ranks

COLUMNS = ("type", "variant", "trainer", "gradients", "embedded engine", "vllm", "lora", "known deviation")
CPU = torch.device("cpu")
TEMPERATURE = 0.8
LENGTHS = ((96, 60, 34), (18, 12, 7))
"""Texts of two groups. The zoo's windows, chunks and original contexts are 12 to 32."""
SHARED = (20, 5)
FIRST_ID = 3
"""Special tokens have the ids below."""
MOST_NATS = 1e-3
MOST_GRADIENT = 2e-3
"""Relative error of a parameter's gradient; float32 gives 1e-5."""


class Row(NamedTuple):
    """Cells measured of a model. `deviations`: sentences."""

    trainer: str
    gradients: str
    engine: str
    lora: str
    deviations: list[str]


def measure(name: str) -> Row:
    """Return the row of a model of the zoo."""
    deviations = list[str]()
    model = random_model(make_config(name))
    trainer, gradients = train(model, deviations)
    engine = serve(model, deviations)
    try:
        lora = adapt(model)
    except Exception as error:
        lora = "wrong"
        deviations.append(f"lora: {type(error).__name__}: {brief(error)}")
    return Row(trainer, gradients, engine, lora, deviations)


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
    logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits_TV / TEMPERATURE, -1).gather(-1, ids_1T[0, 1:, None])[:, 0]


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


# ---- the trainer


def train(model: Any, deviations: list[str]) -> tuple[str, str]:
    """Return the cells `trainer` and `gradients`."""
    groups = make_texts()
    own = copy.deepcopy(model)
    expected_M = torch.cat([plain_logprobs(model, ids) for rows in groups for ids, _ in rows])
    weight_M = torch.randn(len(expected_M), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    (expected_M * weight_M).sum().backward()
    expected = gradients_of(model)
    try:
        plan = find_plan(probe_model(model.config, CPU, torch.float32))
        policy = Policy(own, plan)
        found_M = scored(policy, groups, weight_M)
    except ConfigError as error:
        deviations.append(f"trainer: {brief(error)}")
        return "refused", ""
    except Exception as error:
        deviations.append(f"trainer: crashes ({type(error).__name__}: {brief(error)})")
        return "crashes", ""
    cell = "packed" if plan.is_packed else "one by one"
    if plan.is_packed and not plan.packs(max(map(max, LENGTHS))):
        cell = "packed up to the window"
    if plan.reason:
        deviations.append(f"trainer: {brief(plan.reason)}")
    nats = float((found_M - expected_M.detach()).abs().max())
    if not nats <= MOST_NATS:
        deviations.append(f"trainer: logprobs are {nats:.1g} nats off")
    found = gradients_of(own)
    whole = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    errors = {
        name: float((found.get(name, 0.0) - gradient).norm() / (gradient.norm() + 1e-4 * whole))
        for name, gradient in expected.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    is_exact = nats <= MOST_NATS and errors[worst] <= MOST_GRADIENT
    if not errors[worst] <= MOST_GRADIENT:
        deviations.append(f"trainer: the gradient of {worst} is {errors[worst]:.0%} off")
    return cell, "exact" if is_exact else "wrong"


def scored(policy: Policy, groups: Rows, weight_M: Tensor) -> Tensor:
    """Return logprobs [M] in the order of the texts, and add gradients, by micro-batches as the trainer's."""
    header, arrays = batch_of(groups)
    has_loss = arrays.loss_mask
    longest = max(entry.end - entry.start for entry in header.trajectories)
    max_tokens = 10**6 if policy.plan.packs(longest) else 0
    place_N = np.cumsum(has_loss) - 1
    found_M = torch.zeros(len(weight_M))
    parts = micro_batches(header, arrays, has_loss, max_tokens, CPU, Ranks(0, 1), policy.costs)
    for micro, _ in parts:
        places = torch.from_numpy(place_N[micro.source_M])
        logprob_M = policy(micro, TEMPERATURE).logprob_M
        (logprob_M * weight_M[places]).sum().backward()
        found_M[places] = logprob_M.detach()
    return found_M


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
    deviations.append(f"engine: logprobs are {distance:.1g} nats off")
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
            plain_T = plain_logprobs(model, whole)[len(prompts[number]) - 1 :]
            differences.append(plain_T - torch.tensor(answer.logprobs))
            prompts[number] = [*whole, 5, 6, 7]
    assert min(map(len, differences)) > 0
    return float(torch.cat(differences).abs().max())


# ---- adapters


@torch.no_grad()
def adapt(model: Any) -> str:
    """Return the names of layers that adapters change by default. Raises what fails."""
    own, merged = copy.deepcopy(model), copy.deepcopy(model)
    config = LoraConfig(rank=4)
    names = find_targets(own, config)
    if not names:
        return "none"
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
    return " ".join(sorted({name.rpartition(".")[2] for name in names}))


# ---- texts


def brief(error: Any) -> str:
    """Return one line, without the numbers and names of the tiny model."""
    text = " ".join(str(error).split())[:200]
    return re.sub(r"(?<!\w)\d+(\.\d+)?(e-?\d+)?", "#", text)


def refusal(said: str) -> str:
    body = find_fatal(said)
    return brief(said if body is None else body.error.removeprefix("engine-0: "))
