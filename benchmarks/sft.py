"""A step of supervised fine-tuning against TRL's SFTTrainer as shipped, on the same
rows.

    python benchmarks/sft.py [--seconds S] [--rows N] [--write]

Rows are a user's message of 16 characters and an answer of long-tailed length
(lognormal, median 96, sigma 0.8, at most 512). A step trains on all rows. Both sides
start from the same weights and learn the same tokens; the loss of the first step must
agree. Each measurement is a fresh process with 2 threads; the sides alternate, twice
each; medians. TRL runs at its best: padded with 2 to 32 rows a forward, or packed.
Counted are forward, backward, clipping and optimizer; for ours also checks, packing
into micro-batches, statistics and the record. Not counted: reading and encoding rows.

CPU seconds are of all threads; waiting threads sleep (OMP_WAIT_POLICY=PASSIVE). Last
line: `ratio: X` = TRL over ours in CPU seconds, tiny model. Target: 1.5.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# read when torch is imported, here and in the children
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import numpy as np
import torch
from common import options, reported, trainer_spec
from trainer import ROUNDS, THREADS, run_program, summary
from trainer_case import MAX_GRAD_NORM, Case, Meter, long_tailed_lengths, make_tiny
from trainer_case import write_result as write_steps
from transformers.utils.logging import disable_progress_bar

LEARNING_RATE = 1e-6
PACKED = 0
ROWS_A_FORWARD = (2, 4, 8, 16, 32, PACKED)
"""Of TRL; PACKED: its packing."""
MAX_LENGTH = 2048
TOLERANCE = 1e-4
MODELS = {
    "tiny": {},
    "3M": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    },
}


@dataclass(frozen=True)
class SftCase(Case):
    """`batch_path`: of the rows, JSONL."""

    def rows(self) -> list[dict[str, Any]]:
        text = Path(self.batch_path).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]


def make_rows(path: Path, num_rows: int) -> None:
    draw = np.random.default_rng(0)
    letters = list("abcdefghijkl")

    def text(length: int) -> str:
        return "".join(draw.choice(letters, length))

    lengths = long_tailed_lengths(num_rows // 8)
    lines = [
        {
            "messages": [
                {"role": "user", "content": text(16)},
                {"role": "assistant", "content": text(length)},
            ]
        }
        for length in lengths
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


# ---- our side


def run_ours(case: SftCase, result: str) -> None:
    from asyncrl.config import TrainerConfig
    from asyncrl.config.engineless_config import MEAN_NLL
    from asyncrl.extensions.sft.demonstrations import (
        DemonstrationFeed,
        demonstration_of,
    )
    from asyncrl.rollouts.tokenizer import HFChatTokenizer
    from asyncrl.trainer.ranks.rank_process import TrainerService
    from asyncrl.trainer.trainer_client import pack_groups

    trainer = TrainerConfig(
        learning_rate=LEARNING_RATE,
        max_grad_norm=MAX_GRAD_NORM,
        gradient_checkpointing=False,
    )
    tokenizer = HFChatTokenizer(case.model_path)
    rows = tuple(demonstration_of(row, "row", tokenizer) for row in case.rows())
    feed = DemonstrationFeed(rows, per_step=len(rows), seed=0)
    with tempfile.TemporaryDirectory() as name:
        spec = trainer_spec(
            case.model_path,
            Path(name),
            threads=case.threads,
            trainer=trainer,
            algorithm=MEAN_NLL,
            measures_gap=False,
        )
        rank, meter = TrainerService(spec).rank, Meter(case)
        meter.mark_loaded()
        metrics: list[dict[str, float]] = []
        while not meter.is_over():
            batch = feed.batch(len(metrics))
            meter.start()
            metrics.append(rank.train(*pack_groups(batch)))
            meter.stop()
            meter.end_step()
        first = metrics[0]
        write_steps(
            result,
            meter,
            loss=first["policy/loss"],
            grad_norm=first["policy/grad_norm"],
        )


# ---- TRL's side


def run_trl(case: SftCase, result: str) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer
    from trl_meter import AroundOptimizer, Metered

    meter = Meter(case)

    class MeteredSft(Metered, SFTTrainer):  # type: ignore[misc]
        pass

    is_packed = case.micro_batch == PACKED
    # The prompt and completion form learns the completion only, without a template
    # that marks answers.
    rows = [
        {"prompt": row["messages"][:1], "completion": row["messages"][1:]}
        for row in case.rows()
    ]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TRL, about attention without flash
        arguments = SFTConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=1 if is_packed else case.micro_batch,
            # The end of an epoch takes the step with what there is: all rows.
            gradient_accumulation_steps=len(rows),
            num_train_epochs=1000,
            packing=is_packed,
            max_length=MAX_LENGTH,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=MAX_GRAD_NORM,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = MeteredSft(
            AutoModelForCausalLM.from_pretrained(case.model_path, dtype=torch.float32),
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(case.model_path),
            callbacks=[AroundOptimizer(meter)],
        )
        trainer.meter = meter
        meter.mark_loaded()
        trainer.train()
    write_steps(
        result, meter, loss=trainer.first_loss, grad_norm=trainer.first_grad_norm
    )


# ---- both


def run_child(side: str, case: SftCase, folder: Path) -> dict[str, Any]:
    return run_program(["sft.py", side], case, folder)


def with_rows(case: SftCase, rows: int, seconds: float) -> SftCase:
    return SftCase(**{**asdict(case), "micro_batch": rows, "seconds": seconds})


def measure(model: str, case: SftCase, folder: Path, num_tokens: int) -> float:
    """Print both sides; return TRL's CPU seconds over ours."""
    costs = {
        rows: run_child("trl", with_rows(case, rows, 0.0), folder)["steps"][0][0]
        for rows in ROWS_A_FORWARD
    }
    best = min(costs, key=costs.__getitem__)
    name = "TRL, packed" if best == PACKED else f"TRL, {best} a forward"
    peer = with_rows(case, best, case.seconds)
    sides = {"ours": ("ours", case), name: ("trl", peer)}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, (side, one) in sides.items():
            results[name].append(run_child(side, one, folder))
    found = {name: summary(of_side) for name, of_side in results.items()}
    for name, one in found.items():
        print(
            f"{model:<8}{name:<20}{one.cpu_s:>8.3f}{one.wall_s:>8.3f}{num_tokens / one.cpu_s:>10.0f}"
            f"{one.peak_bytes / 2**20:>7.0f}{one.loss:>11.6f}{one.grad_norm:>10.5f}"
        )
    ours, theirs = found.values()
    if abs(ours.loss - theirs.loss) > TOLERANCE:
        raise SystemExit(
            f"the sides do not compute the same: loss {ours.loss}, {theirs.loss}"
        )
    ratio = theirs.cpu_s / ours.cpu_s
    print(f"{model:<8}TRL needs {ratio:.2f} times our CPU seconds")
    return ratio


def main() -> None:
    """Measure both models. A child measures one side."""
    if sys.argv[1:2] in (["ours"], ["trl"]):
        side, path, result = sys.argv[1:]
        case = SftCase(**json.loads(Path(path).read_text(encoding="utf-8")))
        torch.set_num_threads(THREADS)
        (run_ours if side == "ours" else run_trl)(case, result)
        return
    parser = options(__doc__, seconds=20.0)
    parser.add_argument(
        "--rows", type=int, default=64, help="rows of a step, a multiple of 8"
    )
    arguments = parser.parse_args()
    disable_progress_bar()
    with (
        reported("sft", is_kept=arguments.write),
        tempfile.TemporaryDirectory() as name,
    ):
        folder = Path(name)
        make_rows(folder / "rows.jsonl", arguments.rows)
        ratios = []
        header = (
            f"{'model':<8}{'':<20}{'CPU s':>8}{'wall s':>8}{'tok/CPU s':>10}{'MiB':>7}"
        )
        print(f"{header}{'loss':>11}{'grad norm':>10}")
        for model, sizes in MODELS.items():
            path = make_tiny(folder / model, sizes)
            case = SftCase(
                model_path=str(path),
                batch_path=str(folder / "rows.jsonl"),
                dtype="float32",
                device="cpu",
                threads=THREADS,
                seconds=arguments.seconds / (2 * ROUNDS * len(MODELS)),
                warm_up=1,
            )
            num_tokens = num_tokens_of(case)
            ratios.append(measure(model, case, folder, num_tokens))
        print(f"ratio: {ratios[0]:.2f}")


def num_tokens_of(case: SftCase) -> int:
    """Return the tokens of all rows, prompts included."""
    from asyncrl.extensions.sft.demonstrations import demonstration_of
    from asyncrl.rollouts.tokenizer import HFChatTokenizer

    tokenizer = HFChatTokenizer(case.model_path)
    rows = [demonstration_of(row, "row", tokenizer) for row in case.rows()]
    return sum(len(row.ids) for row in rows)


if __name__ == "__main__":
    main()
