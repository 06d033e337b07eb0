"""Rows of docs/models.csv: how the product trains, serves and adapts the tiny random
models of the zoo.

The oracle is one plain transformers forward per text, with autograd. python
scripts/models.py writes the table; tests/test_models_table.py measures it again.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import io
import os
import re
import tempfile
from collections.abc import Callable, Collection
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_in_process import make_request, running_engine
from engine_replies import ask
from model_zoo import FIRST_ID, VOCAB, make_config, random_model
from torch import Tensor
from torch.func import functional_call
from trainer_cases import batch_of, make_spec

from asyncrl.base.errors import ConfigError, find_fatal
from asyncrl.config.trainer_config import LoraConfig, TrainerConfig
from asyncrl.trainer.loss.packing import micro_batches
from asyncrl.trainer.model.build_model import plan_of
from asyncrl.trainer.model.lora import AdapterTable, targets_of
from asyncrl.trainer.model.policy import ForwardPlan, Policy
from asyncrl.trainer.ranks.ranks import ONE_RANK
from asyncrl.weights.tensor_files import SUFFIXES

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs/models.csv"
COLUMNS = (
    "type",
    "variant",
    "trainer",
    "gradients",
    "embedded engine",
    "vllm on a CPU",
    "lora",
    "known deviation",
)
VLLM = COLUMNS.index("vllm on a CPU")
NOTE = "vllm: "
CPU = torch.device("cpu")
TEMPERATURE = 0.8
LENGTHS = ((20, (96, 60, 34)), (5, (18, 12, 7)))
"""Groups: a shared prefix, and the lengths of texts. The zoo's windows, chunks and
borders are 12 to 32.
"""
MOST_NATS = 1e-3
MOST_GRADIENT = 2e-3
"""Relative error of a parameter's gradient; float32 gives 1e-5."""
Ids = list[int]
Served = tuple[str, str]
"""Cell of column vllm, and a note."""


# ---- the table


def read_table() -> dict[str, list[str]]:
    """Return the rows by the name of their model."""
    rows = [*csv.reader(TABLE.read_text(encoding="utf-8").splitlines())]
    return {f"{row[0]} {row[1]}".rstrip(): row for row in rows[1:]}


def write_table(names: Collection[str], serve: Callable[[str], Served]) -> None:
    """Measure models, and write their rows. `serve` measures column vllm."""
    assert vllm_names(), "make setup-vllm, or name its Python in ASYNCRL_VLLM_PYTHON"
    table = read_table()
    for number, name in enumerate(names):
        row = measure(name)
        if row[VLLM] != "no":
            row = with_vllm(row, *serve(name))
        table[name] = row
        print(f"{number + 1}/{len(names)}", *row, sep="\t", flush=True)
        rows = [COLUMNS, *(table[name] for name in sorted(table))]
        with TABLE.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


def with_vllm(row: list[str], cell: str, note: str) -> list[str]:
    """Return a row with another cell in column vllm; its note is the last one."""
    notes, _, _ = row[-1].partition(NOTE)
    notes = notes.removesuffix("; ")
    changed = [*row]
    changed[VLLM] = cell
    changed[-1] = "; ".join(filter(None, [notes, note and NOTE + note]))
    return changed


@cache
def vllm_names() -> frozenset[str]:
    """Return the classes in vLLM's registry; none without the environment of `make
    setup-vllm`.
    """
    python = Path(
        os.environ.get("ASYNCRL_VLLM_PYTHON") or ROOT / ".venv-vllm/bin/python"
    )
    found = python.parents[1].glob(
        "lib/python3*/site-packages/vllm/model_executor/models/registry.py"
    )
    return frozenset(
        re.findall(
            r'"(\w+)": \(', "".join(path.read_text(encoding="utf-8") for path in found)
        )
    )


def measure(name: str) -> list[str]:
    """Return the row of a model of the zoo, without its cell for vLLM."""
    model = random_model(make_config(name))
    notes = list[str]()
    plan: ForwardPlan | None = None

    def cell(part: str, run: Callable[[Any], str]) -> str:
        try:
            return run(copy.deepcopy(model))
        except ConfigError as refusal:
            error, word = refusal.what, "refused"
        except Exception as failure:
            word = "wrong" if isinstance(failure, AssertionError) else "crashes"
            error = f"{type(failure).__name__}: {failure}"
        notes.append(f"{part}: {brief(error)}")
        return word

    def planned(own: Any) -> str:
        nonlocal plan
        plan = plan_of(make_spec(Path("zoo"), Path("zoo")), own, CPU)
        if plan.reason:
            notes.append(f"trainer: {brief(plan.reason)}")
        return "packed" if plan.is_packed else "one by one"

    trainer = cell("trainer", planned)
    gradients = "" if plan is None else cell("trainer", partial(trained, plan=plan))
    engine = cell("engine", served)
    lora = cell("lora", partial(adapted, plan=plan))
    vllm = "" if type(model).__name__ in vllm_names() else "no"
    model_type, _, variant = name.partition(" ")
    return [
        model_type,
        variant,
        trainer,
        gradients,
        engine,
        vllm,
        lora,
        "; ".join(notes),
    ]


def brief(error: str) -> str:
    """Return one short line without numbers, which describe the tiny model."""
    text = re.sub(r"(?<!\w)\d+(\.\d+)?(e-?\d+)?", "#", " ".join(error.split()))
    return text if len(text) <= 160 else f"{text[:160]}.."


# ---- the oracle


def make_texts() -> list[list[Ids]]:
    rng = np.random.default_rng(0)
    groups = []
    for shared, lengths in LENGTHS:
        prefix = rng.integers(FIRST_ID, VOCAB, shared).tolist()
        groups.append(
            [
                prefix + rng.integers(FIRST_ID, VOCAB, length - shared).tolist()
                for length in lengths
            ]
        )
    return groups


def plain_logprobs(model: Any, ids: Ids) -> Tensor:
    """Return logprobs [T - 1] of one forward without a cache."""
    ids_1T = torch.tensor([ids])
    logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits_TV / TEMPERATURE, -1).gather(
        -1, ids_1T[0, 1:, None]
    )[:, 0]


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(one) if one.grad is None else one.grad
        for name, one in model.named_parameters()
    }


# ---- the product


def trained(model: Any, plan: ForwardPlan) -> str:
    """Compare all weights' gradients. Raises AssertionError."""
    plain = copy.deepcopy(model)
    compare(
        Policy(model, plan), partial(plain_logprobs, plain), lambda: gradients_of(plain)
    )
    return "exact"


def compare(
    policy: Policy,
    plain: Callable[[Ids], Tensor],
    expected_gradients: Callable[[], dict[str, Tensor]],
) -> None:
    """Compare logprobs and gradients of the micro-batches that the trainer makes with
    one forward for each text. Raises AssertionError.
    """
    rows = [
        [(ids, [False] + [True] * (len(ids) - 1)) for ids in texts]
        for texts in make_texts()
    ]
    header, arrays = batch_of(rows)
    weight_N = torch.randn(len(arrays.ids), generator=torch.Generator().manual_seed(1))
    expected_N = torch.zeros(len(weight_N))
    # Dynamic RoPE remembers the longest text, so short ones come first.
    for entry in sorted(header.trajectories, key=lambda entry: entry.end - entry.start):
        logprob_T = plain(arrays.ids[entry.start : entry.end].tolist())
        (logprob_T * weight_N[entry.start + 1 : entry.end]).sum().backward()
        expected_N[entry.start + 1 : entry.end] = logprob_T.detach()
    found_N = torch.zeros(len(weight_N))
    given = (
        header,
        arrays,
        arrays.is_sampled,
        policy.plan.rules(10**6),
        CPU,
        ONE_RANK,
        policy.costs,
    )
    for micro, _ in micro_batches(*given):
        logprob_M = policy(micro, TEMPERATURE).logprob_M
        (logprob_M * weight_N[micro.source_M]).sum().backward()
        found_N[micro.source_M] = logprob_M.detach()
    assert float((found_N - expected_N).abs().max()) <= MOST_NATS, (
        "logprobs are not those of plain forwards"
    )
    expected, found = expected_gradients(), gradients_of(policy.model)
    whole = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm() / (gradient.norm() + 1e-4 * whole)
        assert float(error) <= MOST_GRADIENT, (
            f"the gradient of {name} is not that of plain forwards"
        )


@torch.no_grad()
def served(model: Any) -> str:
    """Serve texts of all lengths together, then their second turns. Raises ConfigError,
    AssertionError.
    """
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(said):
        model.save_pretrained(folder)
        try:
            with running_engine(
                Path(folder), slots=3, num_kept=3, max_length=128
            ) as engine:
                compare_turns(engine, model)
        except SystemExit:
            body = find_fatal(said.getvalue().replace(folder, "FOLDER"))
            raise ConfigError("no reason" if body is None else body.error) from None
    return "exact"


def compare_turns(engine: Any, model: Any) -> None:
    prompts = [ids for texts in make_texts() for ids in texts]
    for turn in range(2):
        fields = {"max_tokens": 12, "temperature": TEMPERATURE, "seed": turn}
        requests = [
            make_request(f"{turn}-{number}", tuple(ids), **fields)
            for number, ids in enumerate(prompts)
        ]
        answers = [answer.result(timeout=60) for answer in ask(engine, requests)]
        for prompt, answer in zip(prompts, answers, strict=True):
            length = len(prompt)
            prompt += answer.token_ids
            # A copy, because dynamic RoPE remembers the longest text.
            plain_T = plain_logprobs(copy.deepcopy(model), prompt)[length - 1 :]
            distance = float((plain_T - torch.tensor(answer.logprobs)).abs().max())
            assert distance <= MOST_NATS, (
                "sampled logprobs are not those of plain forwards"
            )
            prompt += [5, 6, 7]


def adapted(model: Any, plan: ForwardPlan | None) -> str:
    """Return the names of layers with adapters by default. They and the output head act
    as W + scale * B A, also in gradients. Raises AssertionError.
    """
    plain = copy.deepcopy(model).requires_grad_(False)
    default = targets_of(model, LoraConfig())
    shown = " ".join(sorted({name.rpartition(".")[2] for name in default}))
    head = model.get_output_embeddings()
    of_head = [name for name, one in model.named_modules() if one is head]
    if head is None or type(head).forward is not torch.nn.Linear.forward:
        of_head = []
    lora = LoraConfig(rank=4, targets=[*default, *of_head])
    settings = TrainerConfig(lora=lora)
    adapters = AdapterTable(model, settings, torch.float32, Path(tempfile.gettempdir()))
    assert [*adapters.layers] == [*default, *of_head]
    pairs = dict[str, tuple[Tensor, Tensor]]()
    weights = adapters.trained().masters.named
    for name in adapters.layers:
        lora_A, lora_B = (weights[name + end] for end in SUFFIXES)
        torch.nn.init.normal_(lora_B, std=0.1)
        pairs[name] = (
            lora_A.detach().clone().requires_grad_(),
            lora_B.detach().clone().requires_grad_(),
        )

    def merged_logprobs(ids: Ids) -> Tensor:
        weights = {
            f"{name}.weight": plain.get_parameter(f"{name}.weight")
            + lora.scale * lora_B @ lora_A
            for name, (lora_A, lora_B) in pairs.items()
        }
        # A tied head and the embedding are two weights here.
        call = partial(functional_call, plain, weights, (), tie_weights=False)
        return plain_logprobs(lambda **inputs: call(inputs), ids)

    ids = make_texts()[0][0]
    with torch.no_grad():
        base_T = plain_logprobs(plain, ids)
        assert float((base_T - merged_logprobs(ids)).abs().max()) > 10 * MOST_NATS, (
            "adapters change nothing"
        )
    if plan is None:  # a model that the trainer refuses
        with torch.no_grad():
            gap_T = plain_logprobs(model, ids) - merged_logprobs(ids)
        assert float(gap_T.abs().max()) <= MOST_NATS, "not as merged weights"
        return shown
    compare(
        Policy(model, plan),
        merged_logprobs,
        lambda: {
            f"{name}.pair.{kind}": torch.zeros_like(one)
            if one.grad is None
            else one.grad
            for name, pair in pairs.items()
            for kind, one in zip(("lora_A", "lora_B"), pair, strict=True)
        },
    )
    return shown
