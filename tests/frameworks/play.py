"""Plays scenarios of one framework script: imports it once, then runs each scenario in
its own fork, so that clients, caches and event loops never belong to another session.

One JSON line in: {"scenario": NAME, "env": {...}}; one out: {"result": ...} or
{"error": TRACEBACK}.
"""

import gc
import json
import os
import runpy
import sys
import traceback
from pathlib import Path


def play(scenario, environment, answer):
    os.dup2(2, 1)  # what a framework prints is no answer
    os.environ.update(environment)
    try:
        said = {"result": scenario()}
    except BaseException:
        said = {"error": traceback.format_exc()}
    with os.fdopen(answer, "w") as pipe:
        json.dump(said, pipe)
    os._exit(0)


sys.path.insert(0, str(Path(sys.argv[1]).parent))
scenarios = runpy.run_path(sys.argv[1])
gc.freeze()  # a collection in a fork would copy every page
for line in sys.stdin:
    order = json.loads(line)
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(reading)
        play(scenarios[order["scenario"]], order["env"], writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        print(pipe.read() or json.dumps({"error": "the process died"}), flush=True)
    os.waitpid(pid, 0)
