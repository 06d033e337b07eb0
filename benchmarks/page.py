"""How long `asyncrl report` and the page of `asyncrl watch` take on a run of 100,000 steps, how much memory,
and how large the page is; beside reading the lines of its metrics.

    python benchmarks/page.py [--steps 100000] [--keep FOLDER] [--write]

The run directory is made up: that of long_run.py with 55 metrics a step, samples, evaluations, and the time
line as a run of those steps leaves it. --keep makes it in FOLDER and leaves it there. --seconds is not used:
each command is started once.

    report              `asyncrl report`: the page and trace.json are written
    view of the run     its part that reads the directory, as a page that is live does
    json.loads          a process that does nothing but parse each line of metrics.jsonl with the standard
                        library
    watch: opened       a process with `asyncrl watch`, already listening: from the request of its page to the
                        last byte of it and the first event after it
    watch: again        the same once more
    watch: in chromium  from the address to charts that have points, in a headless browser that runs already,
                        and of the server's process; where chromium is not installed there is no such row

Line `limit`: the first opening in wall seconds over OPEN_S, the server's peak over PEAK_MB. Last line:
`ratio: X` = CPU seconds of report over those of json.loads.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from long_run import COMMAND, PARSE, Cost, cost_of, make_run
from report import options, reported

from asyncrl.base.spans import TimedSpan
from asyncrl.observe.run_dir import EVAL_FILE, TIMELINE_FILE
from asyncrl.observe.samples import SAMPLES_FILE
from asyncrl.observe.timeline import TimelineWriter

STEP_S, NUM_ENGINES, SAMPLE_TOKENS, EVERY = 1.5, 4, 60, 100
OPEN_S, PEAK_MB = 2.0, 200.0
"""What a page of such a run may take to open, and its server of memory."""
SCRIPTS = Path(__file__).parent.parent / "scripts"
HAVE_POINTS = (
    "return asyncrlPage.charts().length && asyncrlPage.charts().every(c => c.points.every(n => n > 0))"
)
VIEW = "from asyncrl.observe.page.view import view_run\nview_run(sys.argv[1])"


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
    parts = [
        {"branch": 0, "is_sampled": False, "text": "What is the answer?"},
        {"branch": 0, "is_sampled": True, "text": "token " * SAMPLE_TOKENS},
    ]
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
        "versions": [step, step],
        "staleness": 1,
        "logprob_gap": 0.001,
        "is_truncated": False,
        "num_interruptions": 0,
        "parts": parts,
        "error": None,
    }


def watched(folder: Path) -> dict[str, Cost]:
    """What it costs a server of the page to open it, once and again."""
    command = [sys.executable, "-u", "-c", f"import sys\n{COMMAND}", "watch", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.match(r"http://\S+", said := server.stdout.readline())
            if found is None:
                raise RuntimeError(f"`asyncrl watch {folder}` said {said!r} in place of its address")
            process, url = psutil.Process(server.pid), found[0]
            costs = {
                name: _cost_in(process, lambda: _open(url)) for name in ("watch: opened", "watch: again")
            }
            with contextlib.suppress(ImportError), _browser() as opens:
                costs["watch: in chromium"] = _cost_in(process, lambda: opens(url))
            return costs
        finally:
            server.send_signal(signal.SIGINT)


def _cost_in(process: psutil.Process, act: Callable[[], None]) -> Cost:
    """Of what `act` has that process do: its CPU time, its peak so far."""
    before, began_s = process.cpu_times(), time.perf_counter()
    act()
    wall_s, after = time.perf_counter() - began_s, process.cpu_times()
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    peak_mb = int(status.split("VmHWM:")[1].split()[0]) / 1024
    return Cost(wall_s, after.user + after.system - before.user - before.system, peak_mb)


def _open(url: str) -> None:
    """The page to its last byte, then its events to the end of the first."""
    with urllib.request.urlopen(url) as answer:
        page = answer.read().decode()
    made_s = re.search(r'"made_s":([\d.]+)', page)
    if made_s is None:
        raise RuntimeError(f"{url} has no data: {page[:200]!r}")
    with urllib.request.urlopen(f"{url}events?since={made_s[1]}") as events:
        if (first := events.readline()) != b"event: notes\n":
            raise RuntimeError(f"{url} changes while it is opened: {first!r}")
        events.readline()


@contextlib.contextmanager
def _browser() -> Iterator[Callable[[str], None]]:
    """Opens an address and waits for the charts. Raises ImportError where there is no browser or client."""
    sys.path.append(str(SCRIPTS))
    from screenshots import CHROMIUM, look, open_browser
    from selenium.webdriver.support.wait import WebDriverWait

    if not CHROMIUM.is_file():
        raise ImportError(CHROMIUM)
    with open_browser() as browser:
        look(browser, 1600, 1000)

        def opens(url: str) -> None:
            browser.get(url)
            wait = WebDriverWait(browser, 120, poll_frequency=0.02)
            wait.until(lambda _: browser.execute_script(HAVE_POINTS))

        yield opens


def show(folder: Path, num_steps: int) -> None:
    """The table and the last lines."""
    print(f"load of the machine in the last minute: {os.getloadavg()[0]:.1f}")
    names = ("metrics.jsonl", SAMPLES_FILE, TIMELINE_FILE, "journal.sqlite")
    print(f"{num_steps} steps: " + ", ".join(f"{name} {_mb(folder / name)}" for name in names))
    watched_costs = watched(folder)
    costs = {
        "report": cost_of(COMMAND, "report", folder),
        "view of the run": cost_of(VIEW, folder),
        "json.loads of metrics.jsonl": cost_of(PARSE, folder / "metrics.jsonl"),
        **watched_costs,
    }
    print(f"page {_mb(folder / 'report.html')}, trace.json {_mb(folder / 'trace.json')}")
    print(f"{'':30}{'wall s':>8}{'CPU s':>8}{'peak MB':>9}")
    for name, cost in costs.items():
        print(f"{name:30}{cost.wall_s:8.2f}{cost.cpu_s:8.2f}{cost.peak_mb:9.0f}")
    wall_s, peak_mb = costs["watch: opened"].wall_s, max(cost.peak_mb for cost in watched_costs.values())
    print(f"limit: {wall_s / OPEN_S:.2f} of {OPEN_S:g} s, {peak_mb / PEAK_MB:.2f} of {PEAK_MB:g} MB")
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
