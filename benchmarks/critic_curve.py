"""Curves of PPO with a critic against GRPO, on two tasks.

    python benchmarks/critic_curve.py [--seeds 3] [--work DIR]

The tasks are the quickstart's letters, and words of two letters backwards
(examples/my_task.py). Both start from random weights, with the settings of
configs/ppo.yaml. Writes benchmarks/results/critic_curve.json and
docs/results/critic_curve.png. --work keeps finished runs, so an ended benchmark
continues.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from common import ASYNCRL, HERE
from end_to_end_runs import Curve, Work, compare_sides

ROOT = HERE.parent
CONFIG = ROOT / "configs" / "ppo.yaml"
NUM_STEPS = 120
SIDES = {
    "letters-gae": "letters, GAE with a critic",
    "letters-grpo": "letters, GRPO",
    "reverse-gae": "reverse, GAE with a critic",
    "reverse-grpo": "reverse, GRPO",
}
ALGORITHMS = {
    "gae": [],
    "grpo": ["critic=none", "algorithm.advantage=grpo"],
}
TASKS = {
    "letters": [],
    "reverse": [
        "task.python=examples.my_task:Reverse",
        "task.args={length: 2}",
        'model.scratch.characters="abcdefghijklmnoprstwW: "',
        "rollout.max_prompt_tokens=40",
        "rollout.max_tokens=3",
    ],
}
LEVELS = (0.4, 0.6)


def run(side: str, seed: int, work: Path) -> Curve:
    task, algorithm = side.split("-")
    settings = [*TASKS[task], *ALGORITHMS[algorithm], f"trainer.num_steps={NUM_STEPS}"]
    # The task is found from the root of the repository.
    start = ["env", f"--chdir={ROOT}", *ASYNCRL]
    command = [*start, str(CONFIG), f"seed={seed}", *settings]
    return Work(work.absolute()).measure(f"{side}-{seed}", command)


if __name__ == "__main__":
    seconds = {
        f"seconds to {level}": (".1f", partial(Curve.reach_s, level=level))
        for level in LEVELS
    }
    compare_sides("critic_curve", __doc__, SIDES, run, seconds)
