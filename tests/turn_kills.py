"""Brings a real run that takes turns to a stand in a chosen state, by freezing a process."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from crash_fuzz import CHILDREN, PATIENCE_S
from job_runs import children_of

FROZEN = {
    "generating": "engine",
    "handover to trainer": "trainer",
    "training": "trainer",
    "handover to engines": "engine",
}
"""State -> who is frozen in the state before it, or in it, so that the run stands still in it."""
SETTLE_S = 0.4


def state_of(run_dir: Path, *, since_s: float = 0.0) -> str:
    """Where the lease is, by the journal's events of that time; '' if there are none."""
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(f"file:{run_dir / 'journal.sqlite'}?mode=ro", uri=True)) as db,
    ):
        query = (
            "select what, detail from events where what in ('handover', 'handed over') and s > ? "
            "order by id desc limit 1"
        )
        for what, detail in db.execute(query, (since_s,)).fetchall():
            to = json.loads(detail)["to"]
            return (
                f"handover to {to}"
                if what == "handover"
                else {"trainer": "training", "engines": "generating"}[to]
            )
    return ""


@contextlib.contextmanager
def standing_in(
    state: str, process: subprocess.Popen[str], run_dir: Path, chance: random.Random
) -> Iterator[None]:
    """The run stands still in that state, inside; it may be killed there. AssertionError if never."""
    print(f"standing in {state}")
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the run ended with {process.returncode}: {process.communicate()}"
        first = "training" if state in ("training", "handover to engines") else "generating"
        if not _comes_to(first, process, run_dir, deadline):
            continue
        time.sleep(chance.random() * (0.2 if state in ("generating", "handover to trainer") else 0.01))
        frozen = _freeze(process, FROZEN[state])
        if frozen:
            time.sleep(SETTLE_S)
            if state_of(run_dir) == state and process.poll() is None:
                try:
                    yield
                finally:
                    _thaw(frozen)
                return
            _thaw(frozen)
    raise AssertionError(f"never {state}")


def _comes_to(state: str, process: subprocess.Popen[str], run_dir: Path, deadline: float) -> bool:
    """Return as soon as the run is in it. Not before its start is over: whoever is frozen then only makes it
    longer.
    """
    since_s = psutil.Process(process.pid).create_time()
    while time.monotonic() < deadline and process.poll() is None:
        if state_of(run_dir, since_s=since_s) == state:
            return True
        time.sleep(0.002)
    return False


def _freeze(process: subprocess.Popen[str], name: str) -> list[psutil.Process]:
    """Its processes, stopped; none if it is not there right now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = children_of(process, CHILDREN[name])
        for child in children:
            child.suspend()
        return children
    return []


def _thaw(children: list[psutil.Process]) -> None:
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.resume()
