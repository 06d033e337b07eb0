"""Every error that asyncrl raises on purpose.

AsyncrlError                what failed with its values, the rule, the way out
├── ConfigError             a setting is wrong; raised before anything starts (exit code 2)
├── RoomError               a part of the run is broken; ends the run, names the part (exit code 1)
│   ├── NodeLost            a machine of the run is gone: waited for, or the run goes on without it
│   ├── EngineError         an engine server died, answers nonsense or refuses
│   │   └── EngineLost      it gives no answer at all: its supervisor starts it again
│   ├── TrainerError        the trainer worker refused a batch
│   │   └── TrainerLost     it died or does not answer: started again and brought up to date
│   ├── PublishError        weights did not arrive as they were sent
│   │   └── WeightsLost     the trainer is gone with them: a new one exports anew
│   ├── JournalError        what happened cannot be written down, or the journal is damaged, foreign or in use
│   └── TaskError           no further prompt can be made, or no rollout can be scored any more
├── CallbackError           a function that was given to asyncrl.run raised
├── CheckpointError         a checkpoint cannot be written (the run goes on), or cannot be read
│   └── CheckpointDamaged   what was read of it is wrong or missing: an older one is taken
├── HubError                the Hugging Face hub does not take an export, or cannot be reached
└── RolloutFailure          one bad rollout: data, not a crash; caught once, in rollouts/
    ├── RolloutTimeout      it ran past rollout.timeout_s
    ├── PromptUnusable      the prompt can never be sampled
    ├── RewardFailure       the reward function raised, ran out of time or returned no finite number
    └── RequestRefused      an engine server refused this one request (too long, say)
WouldWait                   an x_nowait call that can only be answered by waiting (no failure)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


def install_extra(name: str) -> str:
    """Return the command that installs the extra `name` of pyproject.toml."""
    return f"pip install 'asyncrl[{name}]'"


OF_TRAIN = frozenset(
    "datasets huggingface_hub llguidance math_verify matplotlib pebble peft pyarrow tensorboard".split()
    + ["tokenizers", "torch", "transformers"]
)
"""The modules that come with the extra `train`."""


class AsyncrlError(Exception):
    """What failed with its values, the rule that was broken, and the way out.

    `what` and `rule` make the first sentence, `way_out` the last line; all three stay attributes, so that
    callers need not parse the text.
    """

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
    """A setting is wrong. Raised before any process is started."""

    exit_code = 2


class CallbackError(AsyncrlError):
    """A callback of asyncrl.run raised `error`. The run has ended, and can go on."""

    error: Exception


def without_train(module: str) -> ConfigError:
    """Return the error of a command that needs `module`, a missing module of OF_TRAIN."""
    what = f"this command needs the package {module}, which is not installed"
    return ConfigError(what, rule="the extra train brings it", way_out=f"{install_extra('train')}.")


@contextlib.contextmanager
def may_lack_train(name: str, unseen: list[str] | None) -> Iterator[None]:
    """Add `name` to `unseen`, if it is given, where a package of the extra train is not installed."""
    try:
        yield
    except ModuleNotFoundError as absent:
        if unseen is None or (absent.name or "").split(".")[0] not in OF_TRAIN:
            raise
        unseen.append(name)


class CheckpointError(AsyncrlError):
    """A checkpoint cannot be written, which never ends a run that trains; or cannot be read, and a run would
    have to go on from it.
    """


class CheckpointDamaged(CheckpointError):  # noqa: N818  a state of the checkpoint: an older one is taken
    """What was read of a checkpoint is wrong, or a part of it is missing."""


class HubError(AsyncrlError):
    """The Hugging Face hub does not take an export, or cannot be reached."""


class RoomError(AsyncrlError):
    """A part of the run is broken: the error is not caught, the run ends and names the part, `room`. `fault`
    is the message without that name.
    """

    def __init__(self, room: str, what: str, *, rule: str = "", way_out: str = "") -> None:
        self.room, self.fault = room, what
        super().__init__(f"{room}: {what}", rule=rule, way_out=way_out)


class NodeLost(RoomError):  # noqa: N818  a state of a machine: the run may go on without it
    """The node on which a process was to be is gone: it died, or is cut off."""


class EngineError(RoomError):
    """An engine server died, stopped answering, or answered something that cannot be."""


class EngineLost(EngineError):  # noqa: N818  a state of the server; its supervisor starts a new one
    """An engine server gives no answer: it died, hangs, or was given up. Another server may be asked the
    same.

    `is_told`: its supervisor knows already.
    """

    def __init__(
        self, room: str, what: str, *, rule: str = "", way_out: str = "", is_told: bool = False
    ) -> None:
        self.is_told = is_told
        super().__init__(room, what, rule=rule, way_out=way_out)


class TrainerError(RoomError):
    """The trainer worker died, stopped answering, or refused a batch."""


class TrainerLost(TrainerError):  # noqa: N818  a state of the trainer; its supervisor starts a new one
    """The trainer gives no answer: one of its processes died, or hangs."""


class PublishError(RoomError):
    """Weights did not arrive at an engine server as the trainer sent them."""


class WeightsLost(PublishError):  # noqa: N818  a state of the trainer's node; a new trainer exports anew
    """The trainer's node was lost, with the file of the weights, before all nodes had it; or the trainer, as
    it sent them.
    """


class JournalError(RoomError):
    """The journal cannot be written or read: it is damaged, in use, or of another run, or an event would be
    written twice.
    """

    def __init__(self, what: str, *, rule: str = "", way_out: str = "") -> None:
        super().__init__("journal", what, rule=rule, way_out=way_out)


class TaskError(RoomError):
    """In a run, no further prompt can be made, or rollouts cannot be scored any more. Data that cannot be
    read are a ConfigError.
    """


class RolloutFailure(AsyncrlError):  # noqa: N818  it is data, and not named an error on purpose
    """One rollout went wrong. Recorded, retried, counted; its siblings live on."""


class RolloutTimeout(RolloutFailure):
    """A rollout ran past `rollout.timeout_s`."""


class PromptUnusable(RolloutFailure):
    """The prompt is too long, or cannot be sent to a worker. Every attempt would fail the same way, so none
    is made.
    """


class RewardFailure(RolloutFailure):
    """The reward function raised, ran out of time, or returned no finite number."""


class RequestRefused(RolloutFailure):
    """An engine server refused this one request, with the numbers. `why` says it without names of engines and
    requests, which are not for clients.
    """

    def __init__(self, what: str, *, why: str = "", rule: str = "", way_out: str = "") -> None:
        super().__init__(what, rule=rule, way_out=way_out)
        self.why = why or what


class WouldWait(Exception):  # noqa: N818  no failure: the nowait half of a wait says "not yet"
    """Raised by an `x_nowait` call that can only be answered by waiting."""


def first_cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error that is not itself a group; one of ours before any other."""
    cause: BaseException = errors.subgroup(AsyncrlError) or errors
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return cause
