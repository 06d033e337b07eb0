"""CPU seconds of a whole run of one step (configs/quickstart.yaml, trainer.num_steps=1)
with the fork server and without, against a plain script: it imports torch and
transformers, makes the same model, and takes one optimizer step.

CPU seconds are the sum over the processes, which other load changes little. The sides
alternate; the table has medians. The last line is the run with the fork server over the
plain script: imports of torch and of transformers' model are most of both.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time

from common import CONFIGS, options, reported

CONFIG = CONFIGS / "quickstart.yaml"
WITHOUT = """
import contextlib
from asyncrl.launch import fork_server
fork_server.serving = contextlib.nullcontext
from asyncrl.cli import main
main()
"""
PLAIN = """
import sys
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM
with open(sys.argv[2]) as file:
    scratch = yaml.safe_load(file)["model"]["scratch"]
architecture = scratch["architecture"]
config = AutoConfig.for_model(**architecture, vocab_size=len(scratch["characters"]) + 6)
model = AutoModelForCausalLM.from_config(config)
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.randint(0, config.vocab_size, (128, 12))
model(ids, labels=ids).loss.backward()
optimizer.step()
"""
SIDES = {
    "fork server": ["-m", "asyncrl.cli"],
    "without": ["-c", WITHOUT],
    "plain": ["-c", PLAIN],
}
TIMEOUT_S = 300.0


def start_once(python_arguments: list[str]) -> tuple[float, float]:
    """CPU and wall seconds of the command and its children."""
    before_s = children_s()
    since_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            "run",
            str(CONFIG),
            "trainer.num_steps=1",
            f"--run-dir={folder}/run",
        ]
        subprocess.run(
            [sys.executable, *python_arguments, *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
        )
    return children_s() - before_s, time.monotonic() - since_s


def children_s() -> float:
    """CPU seconds of all children so far, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Print the table."""
    parser = options(__doc__, seconds=60)
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SIDES}
    until_s = time.monotonic() + arguments.seconds
    with reported("startup", is_kept=arguments.write):
        while not found["plain"] or time.monotonic() < until_s:
            for name, python_arguments in SIDES.items():
                found[name].append(start_once(python_arguments))
        print(
            f"{'':12} {'CPU s':>6} {'wall s':>7}  ({len(found['plain'])} starts each)"
        )
        medians = {
            name: [statistics.median(side) for side in zip(*found[name], strict=True)]
            for name in SIDES
        }
        for name, (cpu, wall) in medians.items():
            print(f"{name:12} {cpu:6.1f} {wall:7.1f}")
        ratio = medians["fork server"][0] / medians["plain"][0]
        print(f"ratio: {ratio:.2f}")


if __name__ == "__main__":
    main()
