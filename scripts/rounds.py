"""Runs a command again and again, some rounds side by side, until one fails: `make faults`.

python scripts/rounds.py [--rounds 20] [--jobs 1] [--logs build/rounds] COMMAND ...

What each round writes is in round-N.log of that folder, and a line here says what came of it. Ends at the
first round that fails, with the end of its log; the rounds beside it get SIGINT then, as all do when this
program gets one, and are waited for: what tests have started ends with them.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TAIL_LINES = 60
END_S = 300.0
"""For a round that is interrupted, to end what it has started."""


@dataclass(frozen=True, slots=True)
class Round:
    """One that runs."""

    number: int
    process: subprocess.Popen[bytes]
    log: Path
    began_s: float

    def __str__(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() or ["(nothing said)"]
        what = "passed" if self.process.returncode == 0 else f"FAILED with {self.process.returncode}"
        return f"{what} in {time.monotonic() - self.began_s:.0f} s, {self.log}: {lines[-1].strip('= ')}"


def begin(number: int, command: list[str], log: Path) -> Round:
    """Start a round. A session of its own, so that Ctrl-C reaches it once: from here."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Round(number, process, log, time.monotonic())


def end(rounds: Iterable[Round]) -> None:
    """Interrupt them, and wait until they have ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    left = list(rounds)
    for one in left:
        one.process.send_signal(signal.SIGINT)
    until_s = time.monotonic() + END_S
    for one in left:
        try:
            one.process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"round {one.number} does not end within {END_S:g} s, and is killed: see {one.log}")
            one.process.kill()


def main() -> None:
    """All rounds, or those to the first failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--logs", type=Path, default=Path("build/rounds"))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    for old in options.logs.glob("round-*.log"):
        old.unlink()
    for stop in (signal.SIGINT, signal.SIGTERM):  # of which a shell may have had the first ignored
        signal.signal(stop, signal.default_int_handler)
    waiting, running, num_passed = list(range(options.rounds, 0, -1)), dict[int, Round](), 0
    try:
        while waiting or running:
            while waiting and len(running) < options.jobs:
                number = waiting.pop()
                one = begin(number, options.command, options.logs / f"round-{number}.log")
                running[one.process.pid] = one
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            assert ended is not None, "there are children"
            one = running.pop(ended.si_pid)
            failed = one.process.wait() != 0
            print(f"round {one.number} of {options.rounds} {one}", flush=True)
            if failed:
                tail = one.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
                print(*tail, f"round {one.number} failed, {num_passed} passed: {one.log}", sep="\n")
                sys.exit(1)
            num_passed += 1
    except KeyboardInterrupt:
        print(f"interrupted, {num_passed} rounds passed", flush=True)
        sys.exit(130)
    finally:
        end(running.values())
    print(f"{num_passed} rounds passed")


if __name__ == "__main__":
    main()
