"""What other threads ask of the engine loop. Knows actions and futures; knows no engine."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from asyncrl.serving import Refused

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
        if self._error is not None:  # asked after the put: either the crash finds the message, or this line finds the crash
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
