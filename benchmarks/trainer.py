"""One optimizer step (forward, backward, update) against TRL's GRPOTrainer as shipped,
on the same batch; and an agent's branches as a tree against separate branches.

    python benchmarks/trainer.py [--seconds S] [--model tiny|families|smollm2|all]
    [--groups G] [--device cpu]

Two batches are groups of 8 completions with prompts of 64 tokens. Two are rollouts of
an agent whose template drops earlier thoughts, so each turn is a branch: 2.1 times the
tokens of their prefix trees in 8 turns, 4.5 times in 20. All sides start from the same
weights, get the same tokens, rewards and behaviour logprobs, and minimize the same loss
(clip 0.2 around the behaviour policy, mean over the batch's tokens); loss and gradient
norm of the first step must agree. Each measurement is a fresh process with 2 threads;
the sides alternate, twice each; medians. trainer_ours.py and trainer_trl.py list the
counted work. TRL runs at its best micro-batch size. In bfloat16, TRL computes with
float32 weights under autocast (its default).

CPU seconds are of all threads; waiting threads sleep (OMP_WAIT_POLICY=PASSIVE). MiB is
the peak of resident (CUDA: allocated) memory above the loaded model.

Last line: `ratio: X` = TRL over ours in CPU seconds (CUDA: wall seconds), tiny model,
long-tailed lengths. Targets: 3 there, 2.5 for SmolLM2 with long-tailed lengths, 1 with
equal lengths, never more memory than TRL. Tiny models of other families (a recurrence,
a sliding window) run packed and one by one; target: 3.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

# read when torch is imported, here and in the children
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import torch
from common import HERE, SMOLLM2, options, reported
from trainer_case import (
    EQUAL_LENGTH,
    FAMILIES,
    GROUP_SIZE,
    Case,
    Pieces,
    Row,
    agents,
    completions,
    long_tailed_lengths,
    make_batch,
    make_tiny,
)
from transformers.utils.logging import disable_progress_bar

THREADS = 2
ROUNDS = 2
MICRO_BATCHES = {"tiny": [2, 4, 8, 16, 64], "SmolLM2-135M": [2, 4, 8]}
"""Sequences a forward of TRL's GRPOTrainer."""
TOLERANCE = {"float32": (1e-4, 1e-3), "bfloat16": (5e-3, 5e-2)}
"""Most difference of the loss, and of the gradient norm as a part of it. bfloat16
rounds logprobs by about 0.01 on both sides.
"""


@dataclass(frozen=True)
class Side:
    """Medians of one side of one row."""

    cpu_s: float
    wall_s: float
    peak_bytes: float
    loss: float
    grad_norm: float


def run_child(side: str, case: Case, folder: Path) -> dict[str, Any]:
    return run_program([f"trainer_{side}.py"], case, folder)


def run_program(words: list[str], case: Case, folder: Path) -> dict[str, Any]:
    """Run a program of this folder on a case; return its result."""
    case.save(folder / "case.json")
    files = [str(folder / "case.json"), str(folder / "result.json")]
    command = [sys.executable, str(HERE / words[0]), *words[1:], *files]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(THREADS)},
    )
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    result: dict[str, Any] = json.loads(
        (folder / "result.json").read_text(encoding="utf-8")
    )
    if result["threads"] != THREADS:
        raise SystemExit(
            f"{' '.join(words)} ran with {result['threads']} threads instead of {THREADS}"
        )
    return result


def summary(results: list[dict[str, Any]]) -> Side:
    """Medians over the steps of all processes of a side; its largest peak."""
    steps = [step for result in results for step in result["steps"]]
    return Side(
        cpu_s=statistics.median(cpu_s for cpu_s, _ in steps),
        wall_s=statistics.median(wall_s for _, wall_s in steps),
        peak_bytes=max(result["peak_bytes"] for result in results),
        loss=results[0]["loss"],
        grad_norm=results[0]["grad_norm"],
    )


def check_agreement(ours: Side, trl: Side, dtype: str) -> None:
    """End with an error if the two sides did not take the same step."""
    loss_limit, norm_limit = TOLERANCE[dtype]
    if (
        not abs(ours.loss - trl.loss) <= loss_limit
        or not abs(ours.grad_norm - trl.grad_norm) <= norm_limit * trl.grad_norm
    ):
        raise SystemExit(
            f"the sides do not compute the same: loss {ours.loss:.6f} against {trl.loss:.6f} (at most "
            f"{loss_limit} apart), "
            f"gradient norm {ours.grad_norm:.6f} against {trl.grad_norm:.6f} (at most {norm_limit:.1%} apart)"
        )


def measure(model: str, case: Case, folder: Path, *, is_agent: bool) -> dict[str, Side]:
    sides = {"ours": ("ours", case)}
    if is_agent:
        sides["ours, untangled"] = ("ours", replace(case, is_untangled=True))
    elif model in FAMILIES:
        sides["ours, one by one"] = ("ours", replace(case, is_alone=True))
    else:
        num_sequences = len(case.batch()[0].trajectories)
        index = 0 if case.device == "cpu" else 1
        peers = [
            replace(case, micro_batch=size)
            for size in MICRO_BATCHES[model]
            if size <= num_sequences
        ]
        costs = [
            run_child("trl", replace(peer, seconds=0), folder)["steps"][0][index]
            for peer in peers
        ]
        peer = peers[costs.index(min(costs))]
        sides[f"TRL, {peer.micro_batch} a forward"] = ("trl", peer)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, (side, one) in sides.items():
            found[name].append(run_child(side, one, folder))
    return {name: summary(results) for name, results in found.items()}


def find_models(chosen: str, folder: Path) -> dict[str, tuple[Path, str]]:
    """Name -> (folder, dtype) of the models to measure."""
    models = (
        {"tiny": (make_tiny(folder / "tiny"), "float32")}
        if chosen in ("tiny", "all")
        else {}
    )
    if chosen in ("families", "all"):
        for name, family in FAMILIES.items():
            models[name] = (make_tiny(folder / name, family), "float32")
    if chosen in ("smollm2", "all"):
        if SMOLLM2.is_dir():
            models["SmolLM2-135M"] = (SMOLLM2, "bfloat16")
        else:
            print(
                f"SmolLM2-135M is skipped: no {SMOLLM2}; `python examples/smollm2.py` makes it"
            )
    return models


def print_rows(title: str, case: Case, sides: dict[str, Side]) -> None:
    """All sides of one batch, and what each needs of what ours does."""
    num_tokens = len(case.batch()[1].ids)
    ours = sides["ours"]
    for name, side in sides.items():
        rate = num_tokens / side.wall_s
        peak = side.peak_bytes
        times = f"{side.cpu_s:>7.2f}{side.wall_s:>7.2f}{rate:>8.0f}"
        ratios = (
            side.cpu_s / ours.cpu_s,
            side.wall_s / ours.wall_s,
            peak / ours.peak_bytes,
        )
        print(
            f"{title:<36}{name:<19}{times}{peak / 2**20:>6.0f}{side.loss:>11.6f}{side.grad_norm:>10.6f}"
            f"{ratios[0]:>7.2f}{ratios[1]:>6.2f}{ratios[2]:>6.2f}"
        )


def batches(num_groups: int) -> dict[str, Callable[[Pieces], list[Row]]]:
    return {
        f"{num_groups} x {GROUP_SIZE}, long-tailed": partial(
            completions, lengths=long_tailed_lengths(num_groups)
        ),
        f"{num_groups} x {GROUP_SIZE}, equal": partial(
            completions, lengths=[EQUAL_LENGTH] * (num_groups * GROUP_SIZE)
        ),
        "1 x 4, agent, 8 turns": partial(
            agents, num_turns=8, num_groups=1, group_size=4
        ),
        "1 x 2, agent, 20 turns": partial(
            agents, num_turns=20, num_groups=1, group_size=2
        ),
    }


def run_rows(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure every row and print the table."""
    print(f"one optimizer step, {THREADS} threads, {arguments.device}")
    print(
        f"{'batch':<36}{'':<19}{'CPU s':>7}{'wall s':>7}{'tok/s':>8}{'MiB':>6}{'loss':>11}{'grad norm':>10}"
        f"{'/ ours:':>7}{'wall':>6}{'MiB':>6}"
    )
    ratio = None
    for model, (path, dtype) in find_models(arguments.model, folder).items():
        is_slow = model.startswith("SmolLM2") and arguments.device == "cpu"
        num_groups = arguments.groups or (2 if is_slow else 8)
        for name, rows in batches(num_groups).items():
            if model in FAMILIES and "long-tailed" not in name:
                continue
            batch = folder / f"{model}-{name}"
            batch.write_bytes(make_batch(str(path), rows))
            case = Case(
                model_path=str(path),
                batch_path=str(batch),
                dtype=dtype,
                device=arguments.device,
                threads=THREADS,
                seconds=arguments.seconds / (3 * ROUNDS),
                warm_up=0 if is_slow else 1,  # a step takes minutes
            )
            sides = measure(model, case, folder, is_agent="agent" in name)
            print_rows(f"{model}, {name}", case, sides)
            ours, peer = sides.values()
            check_agreement(ours, peer, dtype)
            if ratio is None:
                ratio = (
                    peer.cpu_s / ours.cpu_s
                    if arguments.device == "cpu"
                    else peer.wall_s / ours.wall_s
                )
    if ratio is not None:
        print(f"ratio: {ratio:.2f}")


def main() -> None:
    """Read the options and run."""
    parser = options(__doc__, seconds=20.0)
    parser.add_argument(
        "--model",
        choices=["tiny", "families", "smollm2", "all"],
        default="all",
        help="which models to measure",
    )
    parser.add_argument(
        "--groups",
        type=int,
        help="groups of the batch (default: 8, and 2 for SmolLM2 on the CPU)",
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="where both sides run"
    )
    arguments = parser.parse_args()
    if arguments.model != "families" and importlib.util.find_spec("trl") is None:
        raise SystemExit(
            "this benchmark needs TRL, which is not installed.\n  Way out: pip install 'trl==1.16.0'"
        )
    torch.set_num_threads(THREADS)
    disable_progress_bar()
    name = "trainer" if arguments.device == "cpu" else "trainer-cuda"
    with (
        reported(name, is_kept=arguments.write),
        tempfile.TemporaryDirectory() as folder,
    ):
        run_rows(arguments, Path(folder))


if __name__ == "__main__":
    main()
