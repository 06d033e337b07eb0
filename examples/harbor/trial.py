"""Runs a rollout as a trial of Harbor, unmodified: its agent, its steps and its verifier,
whose reward is the rollout's. For workers with the Python of .venv-harbor
(scripts/setup_harbor.sh):

    generator:
      python: examples.harbor.trial:run
      worker_python: .venv-harbor/bin/python
      args: {agent: terminus-2}

The prompt's `info.folder` is the task's folder.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from asyncrl.agents import Outcome, RewardPart, Session, Task
from asyncrl.agents.sandbox import PORT
from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.base.failures import FailureKind, kind_of_text

BUBBLEWRAP = "examples.harbor.bubblewrap:BubblewrapEnvironment"
KINDS = {
    "SandboxStartError": FailureKind.RUNTIME_START,
    "SandboxBuildFailedError": FailureKind.IMAGE_MISSING,
    "EnvironmentStartTimeoutError": FailureKind.RUNTIME_START,
    "AgentSetupTimeoutError": FailureKind.RUNTIME_START,
    "HealthcheckError": FailureKind.ENVIRONMENT,
    "AgentTimeoutError": FailureKind.AGENT_TIMEOUT,
    "AddTestsDirError": FailureKind.REWARD_CRASH,
    "DownloadVerifierDirError": FailureKind.REWARD_CRASH,
    "RewardFileNotFoundError": FailureKind.REWARD_CRASH,
    "RewardFileEmptyError": FailureKind.REWARD_CRASH,
    "VerifierTimeoutError": FailureKind.REWARD_TIMEOUT,
    "VerifierOutputParseError": FailureKind.CORRUPT_RESULT,
    "ContextWindowExceededError": FailureKind.LIMIT,
    "ContextLengthExceededError": FailureKind.LIMIT,
}
"""By the name of Harbor's exception. Others are classified by their words."""
SILENT = ("oracle", "nop")
"""Agents of Harbor that call no model."""
AGENT_ARGS: dict[str, dict[str, Any]] = {
    # The recorder, asciinema, would be installed from the network.
    "terminus-2": {"record_terminal_session": False},
    # Here this header names a sub-agent.
    "mini-swe-agent": {"session_id_headers": []},
}


@dataclass(frozen=True)
class Limits:
    """Of the sandbox, and of the times of agent and verifier in seconds. They replace
    those of the task; `processes` is for bubblewrap only.
    """

    cpus: int | None = None
    memory_mb: int | None = None
    processes: int | None = None
    agent_s: float | None = None
    verifier_s: float | None = None


async def run(
    task: Task,
    session: Session,
    *,
    agent: str = "terminus-2",
    environment: str = BUBBLEWRAP,
    agent_args: Mapping[str, Any] | None = None,
    limits: Mapping[str, Any] | None = None,
) -> Outcome:
    """`agent`: a name of Harbor's, or `module:class`. `environment`: the same. `limits`:
    the fields of Limits.

    An error of the agent, the environment or the verifier raises RolloutFailure.
    """
    most = read_limits(limits or {})
    is_inside = await asyncio.to_thread(runs_inside, agent)
    base_url = session.base_url
    place_args: dict[str, Any] = (
        {"processes": most.processes} if most.processes is not None else {}
    )
    default_args = AGENT_ARGS.get(agent, {})
    if is_inside and environment == BUBBLEWRAP:
        # No package index inside: the agent is that of .venv-harbor/tools.
        default_args = default_args | {"skip_install": True}
        place_args |= {"tools": str(Path(sys.prefix) / "tools"), "endpoint": base_url}
        base_url = f"http://127.0.0.1:{PORT}/v1"
    played: dict[str, Any] = {
        "name": agent,
        "override_timeout_sec": most.agent_s,
        "kwargs": {**default_args, **(agent_args or {})},
    }
    if agent not in SILENT:
        played["model_name"] = f"openai/{session.model}"
        played["env"] = {
            "OPENAI_API_KEY": session.api_key,
            "OPENAI_BASE_URL": base_url,
        }
    place = {
        "import_path" if ":" in environment else "type": environment,
        "override_cpus": most.cpus,
        "override_memory_mb": most.memory_mb,
        "kwargs": place_args,
    }
    with tempfile.TemporaryDirectory(prefix="asyncrl-harbor-") as folder:
        settings = {
            "task": {"path": task.info["folder"]},
            "trials_dir": folder,
            "agent": played,
            "environment": place,
            "verifier": {"override_timeout_sec": most.verifier_s},
        }
        return await play(settings)


def read_limits(given: Mapping[str, Any]) -> Limits:
    """Raises ConfigError for a name that is no limit."""
    try:
        return Limits(**given)
    except TypeError as error:
        names = ", ".join(each.name for each in fields(Limits))
        raise ConfigError(
            f"generator.args.limits={dict(given)} cannot be used: {error}",
            rule=f"limits are {names}",
        ) from error


def runs_inside(agent: str) -> bool:
    """Import the agent, which takes seconds of CPU, and return whether it runs in the
    sandbox. Raises ConfigError.
    """
    # Without it, litellm asks the network for prices at its import.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    try:
        from harbor.agents.factory import AgentFactory
        from harbor.agents.installed.base import BaseInstalledAgent
        from harbor.models.trial.config import AgentConfig
        from harbor.utils.logger import logger

        logger.setLevel(logging.WARNING)  # a dozen lines per trial
        found = AgentFactory.get_agent_class_from_config(AgentConfig(name=agent))
    except ImportError as error:
        raise ConfigError(
            f"the Python of this worker, {sys.executable}, cannot import {error.name}",
            way_out="run scripts/setup_harbor.sh, and set generator.worker_python=.venv-harbor/bin/python.",
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"Harbor has no agent {agent}: {error}",
            way_out="give a name of `harbor agents list`, or module:class.",
        ) from error
    return issubclass(found, BaseInstalledAgent)


async def play(settings: dict[str, Any]) -> Outcome:
    from harbor.models.trial.config import TrialConfig
    from harbor.trial.trial import Trial

    try:
        trial = await Trial.create(TrialConfig.model_validate(settings))
    except ValueError as error:  # of a task that the environment cannot run
        raise RolloutFailure(
            f"Harbor refuses the trial: {error}", kind=FailureKind.RUNTIME_START
        ) from error
    result = await trial.run()
    rewards = dict((result.verifier_result and result.verifier_result.rewards) or {})
    # Not a reward of 0: Harbor scores a trial also after some of its errors.
    errors = [*result.recorded_exceptions()]
    is_late = all(error.exception_type == "AgentTimeoutError" for error in errors)
    timed_out = bool(errors) and is_late and bool(rewards)
    for error in () if timed_out else errors:
        said = f"{error.exception_type}: {error.exception_message}"
        kind = KINDS.get(error.exception_type)
        raise RolloutFailure(
            said, kind=kind or kind_of_text(said, FailureKind.AGENT_CRASH)
        )
    if not rewards:
        raise RolloutFailure(
            "the verifier gave no result", kind=FailureKind.CORRUPT_RESULT
        )
    # generator.on_timeout says whether a reward counts after the agent's time limit.
    return Outcome(parts_of(rewards), timed_out=timed_out)


def parts_of(results: Mapping[str, float]) -> float | dict[str, RewardPart]:
    """Return `reward` if it is the only result. Beside it, the others are parts of weight
    0; without it, all have weight 1. task.reward_weights may give them others.
    """
    if [*results] == ["reward"]:
        return results["reward"]
    others = 0.0 if "reward" in results else 1.0
    return {
        name: RewardPart(value, 1.0 if name == "reward" else others)
        for name, value in results.items()
    }
