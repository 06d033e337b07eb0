"""A policy that teaches itself answers which only its teacher's prompt has
(teacher.policy and teacher.prompt).

    python benchmarks/privileged_teacher.py [--seeds 3] [--work DIR] [--write]

Each of 16 names has a secret word of three letters. `asyncrl sft` first teaches a model
with random weights to copy: "17 dcb" is answered by dcb, and "17" by any word. Then a run
asks for the names only, and its teacher, the same weights, reads name and secret. Rewards
are shown and not learned from (reward_weight: 0). A frozen teacher keeps the weights of
the start. In the control, the teacher reads only the name. --work keeps finished runs,
so an ended benchmark continues.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from common import HERE, child_environ, plain_options, reported

LETTERS = "abcdefgh"
NAMES = [str(number) for number in range(10, 26)]
NUM_STEPS = 300
POINTS = (0, 40, 80, 120, 200, 290)
"""First steps of the means over ten."""
SIDES = {
    "live": ("hint", "answers in the teacher's prompt"),
    "frozen": ("hint", "the same, a frozen teacher"),
    "control": ("name", "no answers in any prompt"),
}
"""By folder: the column that the teacher reads."""
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
SCRATCH = {"characters": f"{LETTERS}0123456789 ", "architecture": MODEL}
CPU = {"placement": {"trainer": "cpu"}, "observe": {"trackers": []}}


def exact(prompt: Any, completion: str, answer: str) -> float:
    return float(completion == answer)


def asyncrl(command: str, folder: Path, config: dict[str, Any]) -> None:
    """Run a command to its end, unless it has ended."""
    if (folder / "final").is_dir():
        return
    file = folder.with_suffix(".json")
    file.write_text(json.dumps(CPU | config))
    program = [sys.executable, "-m", "asyncrl.cli", command, str(file)]
    subprocess.run(
        [*program, "--run-dir", str(folder)],
        cwd=HERE,
        env=child_environ(),
        stdout=subprocess.DEVNULL,
        timeout=3600,
        check=True,
    )


def measure(seed: int, work: Path) -> dict[str, list[float]]:
    """Return the mean reward of each step, by side."""
    draw = random.Random(seed)

    def word() -> str:
        return "".join(draw.choices(LETTERS, k=3))

    copies = [(draw.choice(NAMES), word()) for _ in range(4000)]
    rows = [{"prompt": f"{name} {said}", "completion": said} for name, said in copies]
    rows += [{"prompt": name, "completion": word()} for name in NAMES * 60]
    secrets = [(name, word()) for name in NAMES]
    asked = [
        {"prompt": name, "answer": said, "hint": f"{name} {said}", "name": name}
        for name, said in secrets
    ]
    for name, content in (("copies", rows), ("secrets", asked)):
        lines = "\n".join(map(json.dumps, content))
        (work / f"{name}-{seed}.jsonl").write_text(lines)
    tuned = work / f"sft-{seed}"
    steps = {"num_groups": 64, "learning_rate": 3e-3, "schedule": "linear"}
    model = {"dtype": "float32", "scratch": SCRATCH}
    data = {"files": [str(work / f"copies-{seed}.jsonl")], "epochs": 4}
    sft = {"seed": seed, "model": model, "data": data, "trainer": steps}
    asyncrl("sft", tuned, sft)
    found = dict[str, list[float]]()
    for side, (column, _) in SIDES.items():
        folder = work / f"{side}-{seed}"
        final = str(tuned / "final")
        teacher = {"path": final} if side == "frozen" else {"policy": True}
        run = {
            "seed": seed,
            "model": {"dtype": "float32", "path": final},
            "task": {
                "files": [str(work / f"secrets-{seed}.jsonl")],
                "reward": "privileged_teacher:exact",
                "reward_pool": "inline",
            },
            "teacher": teacher | {"prompt": column},
            "algorithm": {
                "distill_weight": 1.0,
                "reward_weight": 0,
                "distill_loss": "topk_reverse_kl",
                "distill_top_k": 8,
            },
            "rollout": {"group_size": 8, "max_prompt_tokens": 12, "max_tokens": 6},
            "buffer": {"max_staleness": 1},
            "trainer": {
                "num_groups": 16,
                "num_steps": NUM_STEPS,
                "learning_rate": 3e-4,
                "schedule": "linear",
            },
            "placement": {"trainer": "cpu", "rollout": "cpu"},
        }
        asyncrl("run", folder, run)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        found[side] = [json.loads(line)["reward/mean"] for line in lines]
    return found


if __name__ == "__main__":
    parser = plain_options(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    place = options.work or Path(tempfile.mkdtemp())
    place.mkdir(parents=True, exist_ok=True)
    with reported("privileged_teacher", is_kept=options.write):
        for number in range(options.seeds):
            for side, rewards in measure(number, place).items():
                shares = [fmean(rewards[at : at + 10]) for at in POINTS]
                shown = " ".join(f"{share:.3f}" for share in shares)
                print(f"seed {number}, {SIDES[side][1]:31}: exact answers {shown}")
