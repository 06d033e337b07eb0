"""Command lines of asyncrl, several in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN_LINES = """
import contextlib, functools, importlib.machinery as machinery, io, json, shlex, sys
hidden, find = sys.argv[1:], machinery.PathFinder.find_spec
machinery.PathFinder.find_spec = lambda name, *of: None if name.split(".")[0] in hidden else find(name, *of)
import typer.main
from asyncrl.cli import main
typer.main.get_command = functools.cache(typer.main.get_command)  # built once
answers = []
for line in json.load(sys.stdin):
    sys.argv = ["asyncrl", *shlex.split(line)]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    answers.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""


def run_lines(
    folder: Path, *lines: str, without: Iterable[str] = ("torch",), **variables: str
) -> list[tuple[int, str, str]]:
    """Return exit code, output and errors of each command, in one process without
    these packages.
    """
    done = subprocess.run(
        [sys.executable, "-c", RUN_LINES, *without],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160", **variables},
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(answer) for answer in json.loads(done.stdout)]
