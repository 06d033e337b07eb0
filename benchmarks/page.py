"""How long `asyncrl report` takes on a run of 100,000 steps, how much memory, and how large its page is;
beside reading the lines of its metrics.

    python benchmarks/page.py [--steps 100000] [--keep FOLDER] [--write]

The run directory is made up: that of long_run.py with 55 metrics a step, samples, evaluations, and the time
line as a run of those steps leaves it. --keep makes it in FOLDER and leaves it there. --seconds is not used:
each command is started once.

    report              `asyncrl report`: the page and trace.json are written
    view of the run     its part that reads the directory, as a page that is live does
    json.loads          a process that does nothing but parse each line of metrics.jsonl with the standard
                        library

Last line: `ratio: X` = CPU seconds of report over those of json.loads.
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from long_run import COMMAND, PARSE, cost_of, make_run
from report import options, reported

from asyncrl.observe.recorder import EVAL_FILE, SAMPLES_FILE
from asyncrl.observe.timeline import TIMELINE_FILE, TimelineWriter
from asyncrl.spans import TimedSpan

STEP_S, NUM_ENGINES, SAMPLE_TOKENS, EVERY = 1.5, 4, 60, 100
VIEW = "from asyncrl.observe.page.run_view import view_run\nview_run(sys.argv[1])"


def make_shown_run(folder: Path, num_steps: int) -> None:
    """A run directory of long_run.py, with what the page shows beside."""
    make_run(folder, num_steps, num_groups=2, size=4)
    chance = random.Random(0)
    with (folder / SAMPLES_FILE).open("w", encoding="utf-8") as file:
        for step in range(num_steps):
            file.write(json.dumps(_sample(step, chance)) + "\n")
    with (folder / EVAL_FILE).open("w", encoding="utf-8") as file:
        for version in range(0, num_steps, EVERY):
            line = {"policy_version": version, "time_s": STEP_S * version, "eval/version": version}
            line |= {"eval/seconds": 3.0, "eval/reward_mean": version / num_steps}
            file.write(json.dumps(line | {"eval/length_mean": 64.0, "eval/truncated_fraction": 0.1}) + "\n")
    _make_timeline(folder, num_steps, chance)


def _make_timeline(folder: Path, num_steps: int, chance: random.Random) -> None:
    (folder / TIMELINE_FILE).unlink(missing_ok=True)
    spans, busy_s = TimelineWriter(folder), dict.fromkeys((f"engine-{k}" for k in range(NUM_ENGINES)), 0.0)
    spans.open()
    began_s = time.monotonic()
    spans.note(TimedSpan("restarts", "start", began_s - 20.0, began_s, 0))
    for step in range(num_steps):
        at_s = began_s + STEP_S * step
        wait_s, made = chance.uniform(0, 0.4), step + 1
        spans.note(TimedSpan("trainer", "wait for generation", at_s, at_s + wait_s, step))
        spans.note(TimedSpan("trainer", "journal", at_s + wait_s, at_s + wait_s + 0.01, step))
        spans.note(TimedSpan("trainer", "train", at_s + wait_s + 0.01, at_s + 1.4, step))
        spans.note(TimedSpan("trainer", "to engines", at_s + 1.4, at_s + 1.45, step))
        spans.note(TimedSpan("weight sync", "export", at_s + 1.4, at_s + 1.5, made))
        spans.note(TimedSpan("weight sync", "prepare", at_s + 1.5, at_s + 1.6, made))
        spans.note(TimedSpan("weight sync", "commit", at_s + 1.6, at_s + 1.65, made, "paused 0.4 ms at most"))
        if made % EVERY == 0:
            spans.note(TimedSpan("checkpoints", "checkpoint", at_s, at_s + 4.0, made))
            spans.note(TimedSpan("evaluations", "evaluation", at_s, at_s + 3.0, made))
        busy_s = {name: busy + STEP_S * chance.uniform(8, 16) for name, busy in busy_s.items()}
        spans.slots(busy_s, at_s + STEP_S)
    spans.close()


def _sample(step: int, chance: random.Random) -> dict[str, object]:
    pieces = ["token "] * SAMPLE_TOKENS
    stretch = {
        "is_sampled": True,
        "text": "".join(pieces),
        "pieces": pieces,
        "logprobs": [round(-chance.random(), 4) for _ in pieces],
        "versions": [step] * SAMPLE_TOKENS,
        "in_loss": [True] * SAMPLE_TOKENS,
    }
    prompt = {"is_sampled": False, "text": "What is the answer?"}
    branch = {"branch": 0, "parent": None, "num_shared": 0, "num_tokens": 70, "stretches": [prompt, stretch]}
    return {
        "step": step,
        "kind": ("best", "worst", "random")[step % 3],
        "group_id": 2 * step,
        "sample_index": 0,
        "prompt_id": f"{step}",
        "messages": [{"role": "user", "content": "What is the answer?"}],
        "reward": chance.random(),
        "metrics": {},
        "num_sampled": SAMPLE_TOKENS,
        "spans": [[0, SAMPLE_TOKENS, step]],
        "staleness": 1,
        "logprob_gap": 0.001,
        "is_truncated": False,
        "num_interruptions": 0,
        "branches": [branch],
        "error": None,
    }


def show(folder: Path, num_steps: int) -> None:
    """The table and the last line."""
    names = ("metrics.jsonl", SAMPLES_FILE, TIMELINE_FILE, "journal.sqlite")
    print(f"{num_steps} steps: " + ", ".join(f"{name} {_mb(folder / name)}" for name in names))
    costs = {
        "report": cost_of(COMMAND, "report", folder),
        "view of the run": cost_of(VIEW, folder),
        "json.loads of metrics.jsonl": cost_of(PARSE, folder / "metrics.jsonl"),
    }
    print(f"page {_mb(folder / 'report.html')}, trace.json {_mb(folder / 'trace.json')}")
    print(f"{'':30}{'wall s':>8}{'CPU s':>8}{'peak MB':>9}")
    for name, cost in costs.items():
        print(f"{name:30}{cost.wall_s:8.2f}{cost.cpu_s:8.2f}{cost.peak_mb:9.0f}")
    print(f"ratio: {costs['report'].cpu_s / costs['json.loads of metrics.jsonl'].cpu_s:.2f}")


def _mb(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.1f} MB"


@contextlib.contextmanager
def a_folder(keep: Path | None) -> Iterator[Path]:
    """That one, or one that is removed."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="asyncrl-page-") as name:
        yield Path(name)


def main() -> None:
    """Parse, make up a run, measure, print."""
    parser = options(__doc__, seconds=0.0)
    parser.add_argument("--steps", type=int, default=100_000, help="steps of the run (default: %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="make the run there, and leave it")
    arguments = parser.parse_args()
    with a_folder(arguments.keep) as folder:
        make_shown_run(folder, arguments.steps)
        with reported("page", is_kept=arguments.write):
            show(folder, arguments.steps)


if __name__ == "__main__":
    main()
