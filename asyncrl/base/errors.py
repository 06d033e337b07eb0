"""Every error that asyncrl raises on purpose, and the body that carries one to another
process.

AsyncrlError                the failure with its values, the rule, the way out
├── ConfigError             a setting is wrong; raised before anything starts (exit code 2)
├── ComponentError               a part of the run is broken; ends the run (exit code 1)
│   ├── NodeLost            a machine is gone: the run waits, or continues without it
│   ├── EngineError         an engine server died, refuses, or gives invalid answers
│   │   └── EngineLost      it does not answer: restarted
│   ├── TrainerError        the trainer refused a batch
│   │   └── TrainerLost     it does not answer: restarted and brought up to date
│   ├── PublishError        weights did not arrive as sent
│   │   └── WeightsLost     the trainer was lost with them: a new one exports again
│   ├── JournalError        the journal cannot be written, or is damaged, foreign or in use
│   └── TaskError           no further prompt or score is possible
├── CallbackError           a callback of asyncrl.run raised
├── CheckpointError         a checkpoint cannot be written (the run continues) or read
│   └── CheckpointDamaged   it is corrupt or incomplete: an older one is used
└── RolloutFailure          one bad rollout: data with a FailureKind (failures.py); caught once, in rollouts/
    ├── RolloutTimeout      it exceeded rollout.timeout_s
    ├── PromptUnusable      the prompt can never be sampled
    ├── OutcomeUnusable     its harness or environment returned rewards that cannot be used
    ├── RewardFailure       the reward function raised, timed out or returned no finite number
    └── RequestRefused      an engine server refused a request
        └── AdapterMissing  ... for an adapter that is to be opened and pushed
WouldWait                   an x_nowait call would have to wait
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from asyncrl.base.failures import FailureKind


def install_extra(name: str) -> str:
    return f"pip install 'asyncrl[{name}]'"


# Packages of the extra `train`. If such an import fails, the error names the extra.
OF_TRAIN = frozenset(
    "datasets huggingface_hub llguidance math_verify matplotlib pebble pyarrow tensorboard".split()
    + ["accelerate", "regex", "tokenizers", "torch", "transformers"]
)


class AsyncrlError(Exception):
    """A failure, the broken rule, and the way out."""

    exit_code = 1

    def __init__(self, what: str, *, rule: str = "", way_out: str = "") -> None:
        self.what, self.rule, self.way_out = what, rule, way_out
        super().__init__(what)

    def __str__(self) -> str:
        sentence = f"{self.what}; {self.rule}" if self.rule else self.what
        if not sentence.endswith((".", "!", "?", "\n")):
            sentence += "."
        return f"{sentence}\n  Way out: {self.way_out}" if self.way_out else sentence


class ConfigError(AsyncrlError):
    exit_code = 2


class CallbackError(AsyncrlError):
    """A callback of asyncrl.run raised `error`. The run can be resumed."""

    error: Exception


def not_installed(
    package: str | None, extra: str = "train", what: str = "this command"
) -> ConfigError:
    return ConfigError(
        f"{what} needs the package {package}, which is not installed",
        rule=f"the extra {extra} brings it",
        way_out=f"{install_extra(extra)}, where the run is started and where its workers run.",
    )


@contextlib.contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Import packages of an extra. Raise ConfigError if one is not installed. `what`:
    the setting that needs them.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise not_installed(error.name, extra, what) from error


class CheckpointError(AsyncrlError):
    pass


class CheckpointDamaged(CheckpointError):  # noqa: N818  a state of the checkpoint
    folder: Path


class ComponentError(AsyncrlError):
    """Ends the run. `fault` is the message without the name."""

    def __init__(
        self, component: str, what: str, *, rule: str = "", way_out: str = ""
    ) -> None:
        self.component, self.fault = component, what
        super().__init__(f"{component}: {what}", rule=rule, way_out=way_out)

    def as_kind(self, kind: type[ComponentError], component: str) -> ComponentError:
        """Return an error of another kind, of this component, with the same fault."""
        return kind(component, self.fault, rule=self.rule, way_out=self.way_out)


class NodeLost(ComponentError):  # noqa: N818  a state of a machine
    pass


class EngineError(ComponentError):
    pass


class EngineLost(EngineError):  # noqa: N818  a state of the server
    is_told = False
    """Its supervisor knows already."""


class TrainerError(ComponentError):
    pass


class TrainerLost(TrainerError):  # noqa: N818  a state of the trainer
    pass


class PublishError(ComponentError):
    pass


class WeightsLost(PublishError):  # noqa: N818  a state of the trainer's node
    pass


class JournalError(ComponentError):
    def __init__(self, what: str, *, rule: str = "", way_out: str = "") -> None:
        super().__init__("journal", what, rule=rule, way_out=way_out)


class TaskError(ComponentError):
    pass


class RolloutFailure(AsyncrlError):  # noqa: N818  data, not an error
    kind = FailureKind.AGENT_CRASH

    def __init__(
        self,
        what: str,
        *,
        rule: str = "",
        way_out: str = "",
        kind: FailureKind | None = None,
    ) -> None:
        super().__init__(what, rule=rule, way_out=way_out)
        self.kind = kind or self.kind


class RolloutTimeout(RolloutFailure):
    kind = FailureKind.AGENT_TIMEOUT


class PromptUnusable(RolloutFailure):
    kind = FailureKind.PROMPT


class OutcomeUnusable(RolloutFailure):
    kind = FailureKind.CORRUPT_RESULT


class RewardFailure(RolloutFailure):
    kind = FailureKind.REWARD_CRASH


class RequestRefused(RolloutFailure):
    kind = FailureKind.REFUSED

    def __init__(
        self, what: str, *, why: str = "", rule: str = "", way_out: str = ""
    ) -> None:
        super().__init__(what, rule=rule, way_out=way_out)
        self.why = why or what


class AdapterMissing(RequestRefused):
    """The engine does not have the adapter, or only its name. Open it and push it."""


class WouldWait(Exception):  # noqa: N818  no failure
    pass


def first_cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error that is not a group, preferring AsyncrlError."""
    # The other errors of a group are mostly consequences, such as a connection that
    # broke with the process.
    cause: BaseException = errors.subgroup(AsyncrlError) or errors
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return cause


class Message(BaseModel):
    """Frozen message; refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def first_fault(error: Exception) -> str:
    """Return the first wrong field of a value, and why; or the text of another error."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    # A name in brackets is the form that a value has, not a field.
    where = [str(name) for name in first["loc"] if not str(name).startswith("[")]
    return f"{'.'.join(where)} {first['msg']}".strip()


class ErrorBody(Message):
    """Body of every error answer."""

    error: str
    rule: str = ""
    way_out: str = ""


FATAL_PREFIX = "asyncrl-error: "
"""Prefix of a failing child's ErrorBody as JSON, on one log line."""


def fatal_line(error: ErrorBody) -> str:
    return FATAL_PREFIX + error.model_dump_json()


def find_fatal(log: str) -> ErrorBody | None:
    lines = [line for line in log.splitlines() if line.startswith(FATAL_PREFIX)]
    with contextlib.suppress(ValueError, IndexError):
        return ErrorBody.model_validate_json(lines[-1].removeprefix(FATAL_PREFIX))
    return None
