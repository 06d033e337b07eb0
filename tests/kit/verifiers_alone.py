"""Play the first task of a verifiers environment in a separate process, since its
packages may differ from those of the tests. `python verifiers_alone.py SPEC` prints the
outcome.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from typing import Any

from asyncrl.agents import Outcome, Session, Task
from asyncrl.agents.harness import build_harness
from asyncrl.agents.verifiers import load_taskset
from asyncrl.config import GeneratorConfig
from asyncrl.tasks.sources import VerifiersTask


async def play(spec: dict[str, Any]) -> Any:
    name, args = spec["name"], spec["args"]
    item = VerifiersTask(load_taskset(name, args, {}), size=1).prompt(0)
    info = json.loads(json.dumps(item.info))
    task = Task("0/0", tuple(item.content), info=info)  # type: ignore[arg-type]
    harness = build_harness(GeneratorConfig(verifiers=name, args=args))
    return await harness.run(task, Session(spec["url"], spec["key"], "policy"))


if __name__ == "__main__":
    outcome = asyncio.run(play(json.loads(sys.argv[1])))
    assert isinstance(outcome, Outcome)
    print(json.dumps(asdict(outcome)))
