"""Check grammars in a separate process, which a hostile grammar may crash.

llguidance has limits, but not everywhere: a chain of some thousand `$ref` overflows its stack, and its
message about conflicting patterns doubles with each pattern. In the gateway's process one such schema would
end the run. Run as a program, this module is that process: it reads a text per line (JSON) and answers with
the reason for a refusal.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import subprocess
import sys
import threading
import weakref

from asyncrl.messages.token_grammars import MAX_GRAMMAR_BYTES, GrammarError, check_grammar

CHECK_TIMEOUT_S = 3.0
"""Most seconds that one check takes, the start of the process aside."""
START_TIMEOUT_S = 60.0
STACK_BYTES = 2**21
"""Less than any thread has that compiles a grammar later: what fits here fits there."""
MEMORY_BYTES = 2**32
_ENVIRONMENT = ("PATH", "PWD", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Environment variables passed on: no keys."""


class GrammarProcess:
    """A process that checks grammars.

    Life: the first check starts the process. A crash or a timeout ends it, and the next check starts another.
        It ends with this object, or with the process that owns it.
    Waits: why_not() blocks for at most CHECK_TIMEOUT_S, plus START_TIMEOUT_S if it starts a process; calls
        from several threads run one after the other.
    """

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., GrammarProcess] | None = None

    def why_not(self, text: str) -> str:
        """Why no tokenizer can follow this grammar; empty if one can."""
        if (size := len(text.encode())) > MAX_GRAMMAR_BYTES:
            return f"it has {size} bytes; {MAX_GRAMMAR_BYTES} are the most"
        with self._asking:
            try:
                return _asked(self._running or self._start(), text)
            except TimeoutError:
                self._kill()
                return f"it could not be checked in {CHECK_TIMEOUT_S} s"
            except (OSError, ValueError):  # it has crashed
                self._kill()
                return "it is too deep, or needs too much memory"

    def close(self) -> None:
        """End the process, if there is one. Idempotent. Waits for a check in another thread."""
        with self._asking:
            self._kill()

    def _kill(self) -> None:
        self._running = None
        if self._end is not None:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        known = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt is not for it
            env=known | {"OPENBLAS_NUM_THREADS": "1"},
        )
        self._running, self._end = process, weakref.finalize(self, _ended, process)
        _answer_of(process, START_TIMEOUT_S)
        return process


def _asked(process: subprocess.Popen[bytes], text: str) -> str:
    assert process.stdin is not None, "it has a pipe"
    process.stdin.write(json.dumps(text).encode() + b"\n")
    process.stdin.flush()
    return _answer_of(process, CHECK_TIMEOUT_S)


def _answer_of(process: subprocess.Popen[bytes], timeout_s: float) -> str:
    """Return its next line. Raises TimeoutError, or ValueError if it has ended."""
    assert process.stdout is not None, "it has a pipe"
    waiting = select.poll()  # select() knows no more than 1024 files
    waiting.register(process.stdout, select.POLLIN | select.POLLHUP)
    if not waiting.poll(timeout_s * 1000):
        raise TimeoutError
    answer: str = json.loads(process.stdout.readline())
    return answer


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # unwritten input
            if pipe is not None:
                pipe.close()


# ---- in the process


def main() -> None:
    """Answer until there is no more input."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    _say("")
    for line in sys.stdin.buffer:
        checking = threading.Thread(target=_check, args=(json.loads(line),))
        checking.start()
        checking.join()


def _check(text: str) -> None:
    try:
        check_grammar(text)
    except GrammarError as error:
        _say(str(error))
    except BaseException as error:  # a panic of llguidance is no Exception
        _say(f"llguidance fails with {type(error).__name__}")
    else:
        _say("")


def _say(why: str) -> None:
    print(json.dumps(why), flush=True)


if __name__ == "__main__":
    main()
