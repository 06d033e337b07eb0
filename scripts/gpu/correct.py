"""Part 2: a device computes the same as a CPU in float32, up to the rounding of
bfloat16.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.algorithms.registry import RECIPES
from asyncrl.messages.tokens import Tokens
from asyncrl.messages.trainer_api import BatchHeader
from asyncrl.trainer.loss.objective import BatchNumbers, Objective
from asyncrl.trainer.loss.packing import Costs, PackRules, micro_batches
from asyncrl.trainer.loss.step_metrics import GAP_WARNING
from asyncrl.trainer.loss.supports import Entries
from asyncrl.trainer.model.compiled import missing_for_compiling
from asyncrl.trainer.model.policy import HeadUse, HeadWeights, head_scores
from asyncrl.trainer.ranks.rank import TrainerRank
from asyncrl.trainer.ranks.ranks import ONE_RANK
from gpu.models import Trainer, architecture, make_batch, make_folder, make_spec
from gpu.rows import Bench

REPO = Path(__file__).resolve().parents[2]
ROUNDED = 0.02
"""Largest distance of a gradient through one layer in bfloat16, relative to its norm.
"""
ROUNDED_DEEP = 0.1
"""Largest distance through all layers of a model."""
SAME = 1e-4
"""Largest distance in float32."""
INI = """[pytest]
pythonpath = {paths}
markers =
    slow: takes long
    gpu: needs CUDA
    vllm: needs vLLM
"""


def marked_tests(bench: Bench) -> None:
    """Run the tests marked gpu, without plugins of pytest."""
    paths = sorted((REPO / "tests").glob("test_*.py"))
    tests = [
        str(path)
        for path in paths
        if "@pytest.mark.gpu\n" in path.read_text(encoding="utf-8")
    ]
    ini = bench.folder / "pytest.ini"
    imported = [
        str(REPO / name) for name in ("tests/kit", "tests", "benchmarks", "scripts")
    ]
    ini.write_text(INI.format(paths=" ".join(imported)))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        str(ini),
        "--rootdir",
        str(REPO),
        "-m",
        "gpu",
    ]
    command += [
        "-rfE",
        "-p",
        "no:cacheprovider",
        "--basetemp",
        str(bench.folder / "pytest"),
        *tests,
    ]
    environ = os.environ | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HYPOTHESIS_NO_PLUGINS": "1",
    }
    done = subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, env=environ
    )
    last = (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    if done.returncode != 0:
        bench.out.mkdir(parents=True, exist_ok=True)
        (bench.out / "tests.log").write_text(
            done.stdout + done.stderr, encoding="utf-8"
        )
        print(done.stdout[-3000:], done.stderr[-1000:])
    is_right = done.returncode == 0 and (bench.device != "cuda" or " passed" in last)
    bench.tell(f"tests marked gpu, of {len(tests)} files", last, ok=is_right)


def _tell_memory(bench: Bench) -> None:
    """Print the peak; the plan of a run has no process that holds these tensors."""
    if bench.device == "cuda":
        bench.memory(None, torch.cuda.max_memory_allocated())


def distance(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference relative to the norm of `exact`."""
    found, exact = found.detach().cpu().double(), exact.detach().cpu().double()
    return float((found - exact).norm() / exact.norm())


def all_losses(bench: Bench) -> None:
    """Compare each built-in loss and its gradient with the CPU."""
    header, arrays = make_batch(
        500, [20, 3, 40, 11, 7, 60, 25, 9], prompt=5, group_size=4
    )
    model, rng, mask = (
        make_folder(bench, "0.5B"),
        np.random.default_rng(1),
        arrays.is_sampled,
    )
    current_N, proximal_N = (
        (arrays.behaviour_logprobs + mask * rng.normal(0.0, 0.2, len(mask))).astype(
            np.float32
        )
        for _ in "12"
    )
    worst = {"loss": 0.0, "gradient": 0.0}
    for name in RECIPES:
        objective = Objective(make_spec(bench, model, algorithm={"loss": name}))
        batch = BatchNumbers(header, arrays, mask, proximal_N=proximal_N)
        batch.advantage_N = objective.advantages(batch)
        numbers = objective.step_numbers(batch, mask)
        (found, found_M), (exact, exact_M) = (
            _loss_on(torch.device(kind), objective, batch, current_N, numbers)
            for kind in (bench.device, "cpu")
        )
        worst["loss"] = max(worst["loss"], abs(found - exact) / max(abs(exact), 1e-3))
        worst["gradient"] = max(worst["gradient"], distance(found_M, exact_M))
    for what, value in worst.items():
        bench.check(
            f"{len(RECIPES)} losses, float32: largest distance of a {what}",
            value,
            SAME,
            ".1e",
        )
    _tell_memory(bench)


def _loss_on(
    device: torch.device,
    objective: Objective,
    batch: BatchNumbers,
    current_N: np.ndarray,
    numbers: Any,
) -> tuple[float, Tensor]:
    given = (batch.header, batch.arrays, batch.has_loss)
    ((micro, _),) = micro_batches(
        *given, PackRules(10**6), device, ONE_RANK, Costs(0.0, 0.0)
    )
    current_M = torch.from_numpy(current_N[micro.source_M]).to(device).requires_grad_()
    loss, _ = objective.micro_loss(micro, current_M, batch, numbers)
    loss.backward()
    assert current_M.grad is not None
    return float(loss.detach()), current_M.grad


def head(bench: Bench) -> None:
    """Compare the output head of the 0.6B shape on bfloat16 numbers with float32."""
    shape, num = architecture(bench, "0.6B"), 64 if bench.is_tiny else 512
    torch.manual_seed(0)
    hidden_MD = torch.randn(num, shape["hidden_size"]).bfloat16()
    weight_VD = (
        torch.randn(shape["vocab_size"], shape["hidden_size"]) * 0.1
    ).bfloat16()
    target_M, grad_M = torch.randint(shape["vocab_size"], (num,)), torch.randn(num)
    found, exact = (
        _head_on(device, dtype, hidden_MD, weight_VD, target_M, grad_M)
        for device, dtype in ((bench.device, torch.bfloat16), ("cpu", torch.float32))
    )
    gap = float((found[0].cpu() - exact[0]).abs().max())
    bench.check("head: largest difference of a logprob, nats", gap, 1e-3, ".1e")
    for what, one, other in zip(
        ("hidden states", "weights"), found[1:], exact[1:], strict=True
    ):
        bench.check(
            f"head: gradient of {what}, distance", distance(one, other), ROUNDED
        )
    _tell_memory(bench)


def _head_on(
    device: str, dtype: torch.dtype, *given: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    hidden_MD, weight_VD = (
        one.to(device, dtype, copy=True).requires_grad_() for one in given[:2]
    )
    target_M, grad_M = (one.to(device) for one in given[2:])
    is_compiled = device == "cuda" and not missing_for_compiling(torch.device(device))
    # One entry a token, as distillation over several ids has them.
    id_E = torch.linspace(0, len(weight_VD) - 1, len(target_M)).long()
    row_E = torch.arange(len(target_M), device=device)
    entries = Entries(row_E, id_E.to(device), id_E.numpy().astype(np.int32))
    use = HeadUse(0.8, entries=entries, is_compiled=is_compiled)
    scores = head_scores(HeadWeights(hidden_MD, weight_VD, None), target_M, use)
    assert scores.entry_E is not None
    torch.autograd.backward([scores.logprob_M, scores.entry_E], [grad_M, grad_M])
    assert hidden_MD.grad is not None
    assert weight_VD.grad is not None
    return scores.logprob_M.detach(), hidden_MD.grad, weight_VD.grad


def against_cpu(bench: Bench, trainer: dict[str, Any]) -> None:
    """Compare packed forward and backward passes of the 0.6B shape in bfloat16 with
    float32 on the CPU.

    Completions of a group have different lengths and share their prompt.
    """
    model, threads = make_folder(bench, "0.6B"), os.cpu_count() or 1
    settings: dict[str, Any] = {
        "trainer": trainer,
        "algorithm": {"loss": "reinforce"},
        "threads": threads,
    }
    exact = Trainer(
        make_spec(bench, model, **settings | {"device": "cpu", "dtype": "float32"})
    )
    trainer_here = Trainer(make_spec(bench, model, **settings))
    _same_adapters(trainer_here.step, exact.step)
    vocab_size = architecture(bench, "0.6B")["vocab_size"]
    batch = make_batch(
        vocab_size, [16, 130, 70, 33, 90, 8, 150, 61], prompt=64, group_size=4
    )
    mask = batch[1].is_sampled
    sides = (trainer_here, exact)
    found_N, exact_N = (
        one.call(lambda step=one.step: _logprobs(step, *batch)) for one in sides
    )
    gaps = np.abs(found_N - exact_N)[mask]
    bench.check("logprobs: mean gap, nats", float(gaps.mean()), GAP_WARNING)
    bench.tell("logprobs: largest gap, nats", f"{gaps.max():.4f}")
    found, expected = (
        one.call(lambda step=one.step: _gradients(step, *batch)) for one in sides
    )
    parts = [
        (distance(found[name], one), float(one.norm()), name)
        for name, one in expected.items()
    ]
    squares = sum((part * norm) ** 2 for part, norm, _ in parts) / sum(
        norm**2 for _, norm, _ in parts
    )
    bench.check(
        f"gradient of {len(parts)} weights, distance", squares**0.5, ROUNDED_DEEP
    )
    worst, _, name = max(parts)
    bench.tell(f"largest distance: {name}", f"{worst:.4f}")
    _tell_memory(bench)


@torch.no_grad()
def _same_adapters(step: TrainerRank, exact: TrainerRank) -> None:
    """Copy the adapters, which each device draws itself. With B = 0, A would have no
    gradient.
    """
    for name, weight in exact.masters.named.items():
        if ".lora_B" in name:
            weight.normal_(0.0, 0.01)
        if ".lora_" in name:
            _whole(step.masters.named[name]).copy_(weight)
    step.masters.write_back()
    exact.masters.write_back()


def _whole(tensor: Tensor) -> Tensor:
    """Return the only shard on a mesh of one rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _logprobs(step: TrainerRank, header: BatchHeader, arrays: Tokens) -> np.ndarray:
    return step._forward(step.policy, BatchNumbers(header, arrays, arrays.is_sampled))[
        0
    ]


def _gradients(
    step: TrainerRank, header: BatchHeader, arrays: Tokens
) -> dict[str, Tensor]:
    batch = step.begin(header, arrays)
    step.forward_backward(batch, batch.has_loss)
    grads = {name: master.grad for name, master in step.masters.named.items()}
    return {
        name: _whole(grad).cpu() for name, grad in grads.items() if grad is not None
    }
