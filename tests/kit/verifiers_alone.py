"""Play the first task of a verifiers environment in a separate process, since its
packages may differ from those of the tests. `python verifiers_alone.py SPEC` prints the
outcome.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from asyncrl.agents import Outcome, Session, Task
from asyncrl.agents.harness import build_harness
from asyncrl.config import GeneratorConfig
from asyncrl.extensions.verifiers.verifiers_harness import load_taskset
from asyncrl.extensions.verifiers.verifiers_tasks import VerifiersTask


def task_of(name: str, args: Mapping[str, Any], index: int) -> Task:
    """Return the prompt as the task and JSON make it."""
    item = VerifiersTask(load_taskset(name, args, {}), size=index + 1).prompt(index)
    info = json.loads(json.dumps(item.info))
    return Task(f"0/{index}", tuple(item.content), info=info)  # type: ignore[arg-type]


async def play(spec: dict[str, Any]) -> Any:
    name, args = spec["name"], spec["args"]
    task = task_of(name, args, 0)
    harness = build_harness(GeneratorConfig(verifiers=name, args=args))
    return await harness.run(task, Session(spec["url"], spec["key"], "policy"))


if __name__ == "__main__":
    outcome = asyncio.run(play(json.loads(sys.argv[1])))
    assert isinstance(outcome, Outcome)
    print(json.dumps(asdict(outcome)))
