"""What a swap should do to running requests: weight_sync.interrupt abort, keep and
keep_kv, in real runs.

    python benchmarks/interrupt.py [--seconds 360] [--rounds 2] [--cases quickstart long
    vllm] [--write]

quickstart   configs/quickstart.yaml: short answers, 5 updates a second
long         answers of some 70 tokens, at most 256, in 16 slots: more to compute again
vllm         configs/quickstart-vllm.yaml, where vLLM is installed (`make setup-vllm`)

Every run is a real `asyncrl run` from the same seed with new weights after every step;
the modes alternate. Figures are of the last four fifths of the steps, medians over the
rounds.

tokens/s     Sampled tokens that were trained on: modes that learn otherwise have steps of other lengths.
s/step       Seconds of wall time a step.
CPU us/token Of all processes.
pause ms     For how long an engine gave no tokens because of a swap.
gap          Mean difference in nats of the engines' and the trainer's logprobs of fresh tokens.
reward       Mean over the last fifth.

Last line: `ratio: X` = the least over the cases of the tokens/s of abort, which is what
`auto` takes, over those of the fastest mode: 1.00 is that no mode is faster.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import ASYNCRL, CONFIGS, has_vllm, options, read_steps, reported, watched
from run_efficiency import LONG

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
    """Execute one run; return its row."""
    command = [
        *ASYNCRL,
        str(case.config),
        *case.overrides,
        f"weight_sync.interrupt={mode}",
    ]
    command += [f"trainer.num_steps={num_steps}", "checkpoint.every=none"]
    command += ["observe.console=none", "observe.trackers=[]"]
    processes = watched(command, run_dir)
    steps = read_steps(run_dir)
    first = num_steps // 5
    part = steps[first:]
    wall_s = part[-1]["time_s"] - steps[first - 1]["time_s"]
    num_tokens = sum(step["tokens/sampled"] for step in part)
    cpu_s = sum(processes.cpu(first, num_steps - 1).values()) * wall_s

    def mean(name: str, of: list[dict[str, float]]) -> float:
        return statistics.fmean([step[name] for step in of if name in step] or [0.0])

    return {
        "tokens/s": num_tokens / wall_s,
        "s/step": wall_s / len(part),
        "CPU us/token": 1e6 * cpu_s / num_tokens,
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
        mode: {
            name: statistics.median(row[name] for row in of_mode) for name in of_mode[0]
        }
        for mode, of_mode in rows.items()
    }


def main() -> None:
    """All cases, one after the other."""
    parser = options(__doc__, seconds=360.0)
    parser.add_argument(
        "--rounds", type=int, default=2, help="times that each mode is run"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    names = [name for name in arguments.cases if name != "vllm" or has_vllm()]
    each_s = arguments.seconds / (len(names) * len(MODES) * arguments.rounds)
    shares = []
    with reported("interrupt", is_kept=arguments.write):
        for name in names:
            case = CASES[name]
            num_steps = max(40, int((each_s - case.start_s) / case.step_s))
            rows = measure(case, num_steps, arguments.rounds)
            columns = list(rows["abort"])
            print(
                f"\n{name}, {num_steps} steps{''.join(f'{column:>13}' for column in columns)}"
            )
            for mode, row in rows.items():
                print(
                    f"{mode:<20}{''.join(f'{row[column]:>13.4g}' for column in columns)}",
                    flush=True,
                )
            shares.append(
                rows["abort"]["tokens/s"]
                / max(row["tokens/s"] for row in rows.values())
            )
        print(f"ratio: {min(shares):.2f}")


if __name__ == "__main__":
    main()
