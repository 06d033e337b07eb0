"""What a swap should do to running requests: weight_sync.interrupt abort, keep and keep_kv, in real runs.

    python benchmarks/interrupt.py [--seconds 360] [--rounds 2] [--cases quickstart long vllm] [--write]

quickstart   configs/quickstart.yaml: short answers, 5 updates a second
long         answers of some 70 tokens, at most 256, in 16 slots: more to compute again
vllm         configs/quickstart-vllm.yaml, where vLLM is installed (`make setup-vllm`)

Every run is a real `asyncrl run` from the same seed with new weights after every step; the modes take turns.
Figures are of the last four fifths of the steps, medians over the rounds.

tokens/s     Sampled tokens that were trained on: modes that learn otherwise have steps of other lengths.
s/step       Seconds of wall time a step.
CPU us/token Of all processes.
pause ms     For how long an engine gave no tokens because of a swap.
gap          Mean difference in nats of the engines' and the trainer's logprobs of fresh tokens.
reward       Mean over the last fifth.

Last line: `ratio: X` = the least over the cases of the tokens/s of abort, which is what `auto` takes, over
those of the fastest mode: 1.00 is that no mode is faster.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_servers import has_vllm
from report import options, reported
from run_efficiency import LONG, Processes, watched

CONFIGS = Path(__file__).parents[1] / "configs"
MODES = ("abort", "keep", "keep_kv")
START_S = 8.0


@dataclass(frozen=True)
class Case:
    """A kind of run; a step takes about `step_s`, a start `start_s`."""

    config: Path
    overrides: Sequence[str]
    step_s: float
    start_s: float = START_S


CASES = {
    "quickstart": Case(CONFIGS / "quickstart.yaml", (), 0.08),
    "long": Case(CONFIGS / "quickstart.yaml", LONG, 0.25),
    "vllm": Case(CONFIGS / "quickstart-vllm.yaml", (), 0.4, 60.0),
}


def run_once(case: Case, mode: str, num_steps: int, run_dir: Path) -> dict[str, float]:
    """One run, and its row."""
    command = [sys.executable, "-m", "asyncrl.cli", "run", str(case.config), *case.overrides]
    command += [f"weight_sync.interrupt={mode}", f"trainer.num_steps={num_steps}", "checkpoint.every=none"]
    command += ["observe.console=none", "observe.trackers=[]", "--run-dir", str(run_dir)]
    processes: Processes = watched(command, run_dir)
    text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    steps = [json.loads(line) for line in text.splitlines()]
    first = num_steps // 5
    part, since_s = steps[first:], steps[first - 1]["time_s"]
    wall_s, num_tokens = part[-1]["time_s"] - since_s, sum(step["tokens/sampled"] for step in part)
    mean = lambda name, of: statistics.fmean(step[name] for step in of if name in step)  # noqa: E731
    return {
        "tokens/s": num_tokens / wall_s,
        "s/step": wall_s / len(part),
        "CPU us/token": 1e6 * sum(processes.cpu(first, num_steps - 1).values()) * wall_s / num_tokens,
        "pause ms": 1e3 * mean("perf/weight_sync_pause_s", part),
        "gap": mean("policy/logprob_gap_mean", part),
        "reward": mean("reward/mean", steps[-max(1, num_steps // 5) :]),
    }


def measure(case: Case, num_steps: int, rounds: int) -> dict[str, dict[str, float]]:
    """Rows by mode."""
    rows: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for _ in range(rounds):
        for mode in MODES:
            with tempfile.TemporaryDirectory() as folder:
                rows[mode].append(run_once(case, mode, num_steps, Path(folder) / "run"))
    return {
        mode: {name: statistics.median(row[name] for row in of_mode) for name in of_mode[0]}
        for mode, of_mode in rows.items()
    }


def main() -> None:
    """All cases, one after the other."""
    parser = options(__doc__, seconds=360.0)
    parser.add_argument("--rounds", type=int, default=2, help="times that each mode is run")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    names = [name for name in arguments.cases if name != "vllm" or has_vllm()]
    each_s = arguments.seconds / (len(names) * len(MODES) * arguments.rounds)
    shares = []
    with reported("interrupt", is_kept=arguments.write):
        for name in names:
            case = CASES[name]
            num_steps = max(20, int((each_s - case.start_s) / case.step_s))
            rows = measure(case, num_steps, arguments.rounds)
            columns = list(rows["abort"])
            print(f"\n{name}, {num_steps} steps{''.join(f'{column:>13}' for column in columns)}")
            for mode, row in rows.items():
                print(f"{mode:<20}{''.join(f'{row[column]:>13.4g}' for column in columns)}", flush=True)
            shares.append(rows["abort"]["tokens/s"] / max(row["tokens/s"] for row in rows.values()))
        print(f"ratio: {min(shares):.2f}")


if __name__ == "__main__":
    main()
