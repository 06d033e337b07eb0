"""Signals that stop a run. Schedulers may send them to each of its processes: systemd
and scancel send SIGTERM, Slurm's --signal SIGUSR1, a closed terminal SIGHUP.

The controller then finishes its step and makes a checkpoint, which needs its children.
So children ignore these signals, or block them where a library sets handlers. They end
by END, which only the controller sends, or at the end of their standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import popen_fork, resource_tracker

STOPS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
# A real-time signal: no shell and no scheduler sends it.
END = signal.SIGRTMIN + 8
STACKS = signal.SIGUSR1
"""Makes a child log its stacks."""
IGNORE_IN_SHELL = "trap '' INT HUP TERM USR1 USR2\n"
"""Makes a shell and the programs that it starts ignore STOPS."""
_KEPT_IGNORED = (signal.SIGINT, signal.SIGHUP)


def heard_stops() -> tuple[signal.Signals, ...]:
    """Return the signals that stop this run. A shell's background job ignores SIGINT,
    and a program under nohup SIGHUP, so these two stay ignored.
    """
    return tuple(
        number
        for number in STOPS
        if number not in _KEPT_IGNORED or signal.getsignal(number) != signal.SIG_IGN
    )


def exit_code_of(number: int) -> int:
    """Return 130 for Ctrl-C, and 143 for signals of a scheduler."""
    return 128 + (number if number == signal.SIGINT else signal.SIGTERM)


def how_ended(code: int) -> str:
    """Describe the exit code of a child: minus the signal's number if it was killed."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def ignore_stops() -> None:
    """Let only END end this child. Its handler, if it sets none, exits at once."""
    signal.signal(END, lambda *_: os._exit(0))
    for number in STOPS:
        # A handler, because programs that a child starts would inherit SIG_IGN.
        if number != STACKS:
            signal.signal(number, _ignore)
            signal.siginterrupt(number, False)  # other libraries' system calls continue
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def _ignore(*_: object) -> None: ...


def call_at(
    number: int, act: Callable[[], object], loop: asyncio.AbstractEventLoop
) -> None:
    """Let the main thread's loop call `act` at a signal. A process has one such signal.

    A signal may reach another thread of this process, and the C handler then writes it
    to the wakeup descriptor. `loop.add_signal_handler()` closes that descriptor with the
    loop: such a write would fail, or go to the next file with its number. This one stays
    open until the process ends.
    """
    reads, writes = socket.socketpair()
    _wakeups.extend([reads, writes])
    for end in (reads, writes):
        end.setblocking(False)

    def hear() -> None:
        if number in reads.recv(4096):
            act()

    loop.add_reader(reads, hear)
    # The loop ends before the process, and nobody reads the last signals.
    signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)
    signal.signal(number, _ignore)


_wakeups: list[socket.socket] = []
"""Kept, so that they stay open."""


def block_stops() -> None:
    """Block STOPS in this process and in all processes that it starts, because a library
    sets handlers for them.
    """
    with blocked(STOPS):
        # Its start unblocks SIGINT and SIGTERM, and any shared memory starts it.
        resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)


def end_by_sigterm() -> None:
    """Let END unblock and send SIGTERM. A fork or an exec forgets it, but no mask.

    multiprocessing ends its children by END too. At exit, Python sends them SIGTERM and
    waits; a child that blocks SIGTERM would keep a failed process forever.
    """
    signal.signal(END, _terminate)
    popen_fork.Popen.terminate = _end_child  # type: ignore[assignment, method-assign]


def _terminate(*_: object) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.kill(os.getpid(), signal.SIGTERM)


def _end_child(child: popen_fork.Popen) -> None:
    if child.poll() is None:
        os.kill(child.pid, END)


@contextlib.contextmanager
def blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Hold signals back. A program that is started within keeps them blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Callable[..., None]) -> Iterator[None]:
    """Call `handler` at these signals, within the block."""
    earlier = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in earlier.items():
            if before is not None:  # else it is not Python's
                signal.signal(number, before)


@contextlib.contextmanager
def usual_signals() -> Iterator[None]:
    """Undo what the parent of this process blocks or ignores, within the block. With
    SIGCHLD ignored, nobody could wait for a child.
    """
    if not is_in_main_thread():
        yield
        return
    wanted = (*STOPS, signal.SIGCHLD)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)
    on_child = signal.getsignal(signal.SIGCHLD)
    if on_child == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        if on_child == signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, on_child)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def is_in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_fork = threading.local()
"""`mask`: the signals that a thread blocked before its fork."""


def _hold_signals() -> None:
    """Let no signal reach a child before it has its own handlers."""
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOPS, END))


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _forget_signals() -> None:
    """Let signals end a process that user code forks, from its first moment on. Our
    handlers would kill the run's servers, and the inherited wakeup descriptor would
    stop the run.
    """
    for number in (*STOPS, END):
        module = getattr(signal.getsignal(number), "__module__", None) or ""
        if module.startswith("asyncrl."):
            signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
    _release_signals()


os.register_at_fork(
    before=_hold_signals,
    after_in_parent=_release_signals,
    after_in_child=_forget_signals,
)
