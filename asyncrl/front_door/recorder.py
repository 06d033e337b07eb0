"""Puts finished rollouts into a file, with their text for people. Knows no session and no harness."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from asyncrl.errors import RoomError
from asyncrl.recorded import RecordedRollout, RecordFile
from asyncrl.types import ChatRenderer, Prompt, Rollout

log = logging.getLogger(__name__)


class Recorder:
    """The writer of `--record`. Without a file it records nothing.

    Life: opened with its file -> record, once a rollout -> close. What cannot be written ends the command: it was asked for.
    """

    def __init__(self, file: RecordFile | None, tokenizer: ChatRenderer, *, warn: Callable[[str], None]) -> None:
        self._file, self._tokenizer, self._warn = file, tokenizer, warn
        self.num_recorded = 0
        self._samples = Counter(record.prompt.prompt_id for record in file.before) if file is not None else Counter[str]()

    def __repr__(self) -> str:
        return f"<Recorder {self.num_recorded} recorded in {self._file!r}>"

    def next_sample(self, prompt_id: str) -> int:
        """Number of samples that there are of this prompt: the index of the next one."""
        return self._samples[prompt_id]

    def record(self, prompt: Prompt, attempt: int, reward: float | None, rollout: Rollout) -> None:
        """Write it. Raises RoomError if the file cannot be written; a prompt that is no JSON is told and left out."""
        self._samples[prompt.prompt_id] += 1
        if self._file is None:
            return
        texts = [self._tokenizer.decode(branch.token_ids.tolist(), skip_special_tokens=False) for branch in rollout]
        try:
            self._file.append(RecordedRollout(prompt, attempt, reward, rollout), texts)
        except OSError as error:
            raise RoomError("recording", f"cannot write {self._file.path}: {error}", way_out="free space, or name another file.") from error
        except ValueError as error:
            self._warn(f"not recorded: {error}")
            return
        self.num_recorded += 1

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            self._file.close()
