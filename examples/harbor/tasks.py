"""Reads folders in the task format of Harbor (https://harborframework.com/docs/tasks):
task.toml, instruction.md, environment/Dockerfile, tests/test.sh.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from asyncrl.base.errors import ConfigError
from asyncrl.messages.records import Prompt
from asyncrl.tasks import Item

HERE = Path(__file__).parent


@dataclass(frozen=True)
class HarborTask:
    """One folder. Times in seconds."""

    folder: Path
    instruction: str
    agent_timeout_s: float
    verifier_timeout_s: float
    memory_mb: int

    @classmethod
    def read(cls, folder: Path, *, by_harbor: bool = False) -> HarborTask:
        """`by_harbor`: Harbor itself runs it, which knows tasks of several steps.

        Raises ConfigError for what is missing, or is not run here.
        """
        try:
            settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
            steps = [f"steps/{step['name']}" for step in settings.get("steps", [])]
            # Of several, Harbor gives the others to the agent later.
            file = Path(folder, *steps[:1], "instruction.md")
            instruction = file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{folder} is no Harbor task: {error}") from error
        is_plain = not steps and (folder / "tests/test.sh").exists()
        if not is_plain and not by_harbor:
            raise ConfigError(
                f"{folder} is a Harbor task that examples.harbor.agent does not run",
                rule="it has tests/test.sh and one step; its tests are run where the agent has worked",
                way_out="let Harbor run it: docs/harbor.md.",
            )
        environment = settings.get("environment", {})
        return cls(
            folder=folder.resolve(),
            instruction=instruction,
            agent_timeout_s=float(settings.get("agent", {}).get("timeout_sec", 600)),
            verifier_timeout_s=float(
                settings.get("verifier", {}).get("timeout_sec", 600)
            ),
            memory_mb=int(environment.get("memory_mb", 2048)),
        )


class HarborTasks:
    """The tasks of a folder, by name; `size` of them at most. Their reward comes from
    the agent, which runs the tests.
    """

    by_harbor = False

    def __init__(
        self, *, size: int, seed: int, folder: str = str(HERE / "tasks")
    ) -> None:
        found = sorted(path.parent for path in Path(folder).glob("*/task.toml"))
        if not found:
            raise ConfigError(
                f"there is no task in {folder}",
                rule="each is a folder with a task.toml",
            )
        self._tasks = [
            HarborTask.read(path, by_harbor=self.by_harbor) for path in found[:size]
        ]

    def __len__(self) -> int:
        return len(self._tasks)

    def prompt(self, index: int) -> Item:
        """The instruction, and for the agent where the task lies."""
        task = self._tasks[index]
        return Item(task.instruction, info={"folder": str(task.folder)})

    def score(self, prompt: Prompt, completion: str) -> float:
        """Never asked: the agent says the reward of each rollout."""
        raise NotImplementedError(
            "use generator.python=examples.harbor.agent:run, or examples.harbor.trial:run"
        )


class TrialTasks(HarborTasks):
    """Tasks that Harbor itself runs, with examples.harbor.trial."""

    by_harbor = True
