"""Two parts of a reward with different scales: their sum against GDPO, on the quickstart.

    python benchmarks/several_rewards.py [--seeds 3] [--write]

The easy part is the share of right letters in percent, 0 to 100. The hard part is how
near the length is to the wanted count, 0 to 1. `sum` compares their sum within a group,
`normalize_then_sum` each part by itself. Everything else is configs/quickstart.yaml,
with half of its steps.
Shown: the mean of each part over the last 50 steps of a run.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from statistics import fmean

from asyncrl.messages.records import Prompt
from asyncrl.tasks.toy import Letters

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("sum", "normalize_then_sum")
LAST = 50
SHORT = ["trainer.num_steps=250", "observe.console=none"]
PARTS = {"letters": "right letters (%)", "length": "length (0..1)"}


class TwoScales(Letters):
    def score(self, prompt: Prompt, completion: str) -> dict[str, float]:  # type: ignore[override]
        letter, count = prompt.messages[-1]["content"].split(" ")
        size = len(completion)
        return {
            "letters": 100 * completion.count(letter) / max(size, 1),
            "length": min(size, int(count)) / max(size, int(count)),
        }


def measure(side: str, seed: int, folder: Path) -> dict[str, float]:
    from common import ASYNCRL

    run_dir = folder / f"{side}-{seed}"
    task = "task.python=benchmarks.several_rewards:TwoScales"
    settings = [f"seed={seed}", task, f"algorithm.rewards={side}", *SHORT]
    command = [*ASYNCRL, "configs/quickstart.yaml", *settings, "--run-dir", run_dir]
    subprocess.run(command, cwd=ROOT, check=True)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()[-LAST:]
    steps = [json.loads(line) for line in lines]
    return {
        name: fmean(step[f"reward/part/{name}"] for step in steps) for name in PARTS
    }


def main() -> None:
    from common import plain_options, reported

    parser = plain_options(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep the output")
    options = parser.parse_args()
    with (
        reported("several_rewards", is_kept=options.write),
        tempfile.TemporaryDirectory() as folder,
    ):
        means = dict[str, list[float]]()
        for side in SIDES:
            for seed in range(options.seeds):
                found = measure(side, seed, Path(folder))
                means.setdefault(side, []).append(found["length"])
                shown = ", ".join(f"{PARTS[name]} {found[name]:.3g}" for name in PARTS)
                print(f"{side:20} seed {seed}: {shown}", flush=True)
        print(f"ratio: {fmean(means[SIDES[1]]) / fmean(means[SIDES[0]]):.2f} in length")


if __name__ == "__main__":
    main()
