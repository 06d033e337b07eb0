"""Runs one task folder with Harbor itself, unmodified: its agent, its steps and its
verifier. A program for generator.command, started with the Python of .venv-harbor
(scripts/setup_harbor.sh):

    generator:
      command: [.venv-harbor/bin/python, examples/harbor/trial.py, terminus-2]

The task's `info.folder` is the folder. The last line is the reward.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from harbor.models.trial.config import TrialConfig
from harbor.trial.trial import Trial

BUBBLEWRAP = "examples.harbor.bubblewrap:BubblewrapEnvironment"
ROOT = Path(__file__).parents[2]


async def main(agent: str = "terminus-2", environment: str = BUBBLEWRAP) -> None:
    """`environment`: the name of one of Harbor's, or `module:class`."""
    task = json.load(sys.stdin)
    settings: dict[str, Any] = {
        "task": {"path": task["info"]["folder"]},
        "trials_dir": Path.cwd() / "trials",
        "agent": {"name": agent},
        "environment": {
            "import_path" if ":" in environment else "type": environment,
        },
    }
    if agent not in ("oracle", "nop"):
        settings["agent"] |= {
            "model_name": f"openai/{os.environ['OPENAI_MODEL']}",
            "base_url": os.environ["OPENAI_BASE_URL"],
        }
    trial = await Trial.create(TrialConfig.model_validate(settings))
    result = await trial.run()
    # Not a reward of 0: Harbor scores a trial also after some of its errors.
    for error in result.recorded_exceptions():
        sys.exit(f"{error.exception_type}: {error.exception_message}")
    rewards = dict((result.verifier_result and result.verifier_result.rewards) or {})
    if "reward" not in rewards:
        sys.exit(f"the verifier gave no `reward`, but {sorted(rewards)}")
    print(json.dumps({"reward": rewards.pop("reward"), "metrics": rewards}))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    asyncio.run(main(*sys.argv[1:]))
