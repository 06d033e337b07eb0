"""What other threads ask of the engine loop. Knows actions and futures; knows no engine."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from asyncrl.http import Refused
from asyncrl_servers.embedded.runner import Runner
from asyncrl_servers.embedded.sequence import RunningRows, Sequence

Answer = TypeVar("Answer")


class Inbox:
    """Actions for the loop's thread, each with the future that its sender waits for.

    Life:       open -> crashed, for good: the loop has ended by an error.
    Waits:      the loop sleeps in wait_one until somebody posts. post and ask never sleep.
    Invariant:  every future that was posted is answered: by its action, or by crash, which refuses it.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Future[Any]]] = queue.SimpleQueue()
        self._error: BaseException | None = None

    def post(self, action: Callable[[], None], answer: Future[Any]) -> None:
        """Have `action` done, which answers `answer` then or later."""
        self._queue.put((action, answer))
        if (
            self._error is not None
        ):  # asked after the put: either the crash finds the message, or this line finds the crash
            self.refuse([answer])

    def ask(self, action: Callable[[], Answer]) -> Future[Answer]:
        """Have `action` done; the future has what it returns, or the refusal that it raises."""
        answer: Future[Answer] = Future()
        answer.set_running_or_notify_cancel()

        def act() -> None:
            try:
                answer.set_result(action())
            except Refused as error:
                answer.set_exception(error)

        self.post(act, answer)
        return answer

    def wait_one(self) -> None:
        """Do the next action, once there is one."""
        self._queue.get()[0]()

    def do_all_nowait(self) -> None:
        """Do all that was asked."""
        while not self._queue.empty():
            self._queue.get_nowait()[0]()

    def crash(self, error: BaseException | None) -> None:
        """The loop has ended: refuse what was asked, and all that will be."""
        self._error = error
        while not self._queue.empty():
            self.refuse([self._queue.get_nowait()[1]])

    def refuse(self, answers: Iterable[Future[Any]]) -> None:
        """Tell of the crash whoever was not answered yet."""
        for answer in answers:
            with suppress(InvalidStateError):
                answer.set_exception(RuntimeError(f"the engine loop died: {self._error!r}"))


# Gives queued requests their rows and prefills their prompts, each different one once. Knows rows and the
# runner; decides nothing.


def admit(runner: Runner, rows: RunningRows, sequences: list[Sequence], version: int) -> Tensor:
    """Rows for `sequences`, which run under `version` from here on; returns the logits [N, V] after their
    prompts.
    """
    first = rows.n
    leaders: dict[tuple[int, ...], int] = {}
    jobs: list[tuple[int, tuple[int, ...]]] = []
    logits: list[Tensor | None] = [None] * len(sequences)
    followers: list[tuple[int, int]] = []
    # Longest first, as `segments` wants the rows.
    for index, sequence in enumerate(sorted(sequences, key=lambda sequence: -len(sequence.prompt_ids))):
        sequence.marks.append((0, version))
        row, prompt_ids = rows.add(sequence), sequence.prompt_ids
        if prompt_ids in leaders:
            followers.append((index, leaders[prompt_ids]))
        elif (remembered := runner.recall(row, prompt_ids)) is not None:
            logits[index] = remembered
        else:
            leaders[prompt_ids] = index
            jobs.append((row, prompt_ids))
    if jobs:
        for (row, prompt_ids), logits_V in zip(jobs, runner.prefill(jobs), strict=True):
            logits[row - first] = logits_V
            if rows.sequences[row].request.num_resumed == 0:
                runner.remember(row, prompt_ids, logits_V)
    for index, leader in followers:
        length = len(rows.sequences[first + leader].prompt_ids)
        runner.cache.copy_slot(first + leader, first + index, length)
        logits[index] = logits[leader]
    return torch.stack([one for one in logits if one is not None])
