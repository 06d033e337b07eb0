"""Teacher of a run: its model, vocabulary check and supervision."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from asyncrl.base.errors import ConfigError, EngineLost, RoomError
from asyncrl.config import RunConfig
from asyncrl.config.learning import TEACHER_SLOTS
from asyncrl.engines.teacher import Teacher
from asyncrl.job.start import Server
from asyncrl.job.supervision.supervise import Supervision, Supervisor
from asyncrl.rollouts.tokenizer import HFChatTokenizer, read_vocabulary
from asyncrl.trainer.model_folder import find_model, find_on_disk

if TYPE_CHECKING:
    from asyncrl.job.servers.server_maker import ServerMaker

KEY = "teacher.path"
ANSWER_TIMEOUT_S = 120.0
"""Seconds without an answer after which the teacher counts as lost."""


class TeacherSupervisor(Supervisor):
    """Keeps the teacher running; while it is down, rollouts wait for scores."""

    kind = "teacher"

    def __init__(self, process: Server, client: Teacher, supervision: Supervision) -> None:
        super().__init__([process], supervision)
        self._client = client

    def lost_nowait(self, error: EngineLost) -> None:
        """Report a call without an answer. The teacher is down on return; run restarts it."""
        if not error.is_told:
            self._lost_by(error)

    def _down(self, lost: RoomError) -> None:
        self.is_up = False
        self._client.down_nowait()

    async def _before_start(self) -> None:
        self._client.reset_nowait()

    async def _works_again(self) -> None:
        self._client.up_nowait()


class Teaching:
    def __init__(self, maker: ServerMaker, folder: Path, supervision: Supervision) -> None:
        settings, rollout = maker.config.teacher, maker.config.rollout
        assert settings is not None, "made where the config has the section"
        self.server = maker.teacher(folder)
        self.teacher = Teacher(
            self.server.caller,
            temperature=rollout.temperature,
            places=2 * TEACHER_SLOTS,  # the next requests arrive while it reads these
            timeout_s=ANSWER_TIMEOUT_S,
            on_lost=self._lost if supervision.config.max_restarts else None,
        )
        self.supervisor = TeacherSupervisor(self.server, self.teacher, supervision)

    def _lost(self, error: EngineLost) -> None:
        self.supervisor.lost_nowait(error)


async def make_teaching(maker: ServerMaker, supervision: Supervision) -> Teaching:
    """Return the teacher, fetching its model if needed. Raises ConfigError if the model is missing or has
    other tokens.
    """
    settings = maker.config.teacher
    assert settings is not None, "asked for where the config has the section"
    folder = await asyncio.to_thread(find_model, settings.path, settings.revision, KEY)
    await asyncio.to_thread(refuse_other_tokens, settings.path, folder, maker.tokenizer)
    return Teaching(maker, folder, supervision)


def look_at_teacher(config: RunConfig, tokenizer: HFChatTokenizer | None) -> list[str]:
    """Describe the teacher before anything starts. Raises like make_teaching."""
    if config.teacher is None:
        return []
    path, revision = config.teacher.path, config.teacher.revision
    folder = find_on_disk(path, KEY, revision)
    if folder is None or tokenizer is None:
        return [f"teacher: {path} is compared with the model when the run starts"]
    refuse_other_tokens(path, folder, tokenizer)
    return [f"teacher: {path}, its vocabulary is the model's"]


def refuse_other_tokens(path: str, folder: Path, tokenizer: HFChatTokenizer) -> None:
    """Raise ConfigError unless each token id means the same to teacher and model."""
    theirs, ours = read_vocabulary(folder), tokenizer.vocabulary
    if theirs == ours:
        return
    names, own = ({number: token for token, number in one.items()} for one in (theirs, ours))
    first = min(number for number in {*names, *own} if names.get(number) != own.get(number))
    raise ConfigError(
        f"{KEY}={path} has {len(theirs)} tokens (digest {_digest(theirs)}), the model {len(ours)} "
        f"({_digest(ours)}): id {first} is {names.get(first)!r} there and {own.get(first)!r} here",
        rule="a teacher gives logprobs of the very token ids that were sampled",
        way_out="name a teacher with the model's own tokenizer, one of its family.",
    )


def _digest(vocabulary: Mapping[str, int]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(sorted(vocabulary.items())).encode())
